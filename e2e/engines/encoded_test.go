package engines

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
)

// TestVLLMGptOss and TestVLLMMistral play conversations on a vLLM whose prompts are not rendered by a template. Its model has
// no weights: its answers are noise, and it caches what Kvlane predicts.
func TestVLLMGptOss(t *testing.T) {
	playEncoded(t, "gptoss", "openai", "/v1/chat/completions", "/v1/responses")
}
func TestVLLMMistral(t *testing.T) {
	playEncoded(t, "mistral_tekken_v13", "none", "/v1/chat/completions")
}

func playEncoded(t *testing.T, files, tools string, paths ...string) {
	t.Helper()
	k := *vllm
	k.model, k.tools, k.blocks, k.context = "dummy", tools, 512, 4096
	k.further = []string{"--enable-scale-out", "--prefix-cache-retention-interval", strconv.Itoa(k.block)} // see retention_test.go
	k.files = files
	if files == "gptoss" {
		k.files = filepath.Join(filepath.Dir(qwen3), files)
	}
	b := newBed(t, &k)
	b.until("the tokenizer is compared", func() bool { return b.metric("kvlane_token_checks_total") > 0 })
	hits := 0
	for _, path := range paths {
		for n := range 6 {
			messages := []m{system(fmt.Sprintf("Reader %d of %s. %s", n, path, rules))}
			for turn := range 4 {
				messages = append(messages, talked(path, n, turn)...)
				body := encodedRequest(path, n, messages)
				first := b.predicted(fmt.Sprintf("%s %d, turn %d", path, n+1, turn+1), path, body)
				if again := b.predicted("the same again", path, body); again.cached != (again.prompt-1)/b.block*b.block {
					t.Errorf("%s %d, turn %d: got %d of %d tokens cached the second time", path, n+1, turn+1, again.cached, again.prompt)
				}
				if turn > 0 {
					hits += first.cached
				}
			}
		}
	}
	if hits == 0 {
		t.Error("no turn found the one before in the cache")
	}
	b.predicted("a completion", "/v1/completions", completion(prose("plain", 90)))
	b.predicted("a longer one", "/v1/completions", completion(prose("plain", 90)+" "+prose("more", 60)))
	b.renderedIDs()
	if different := b.metric("kvlane_token_checks_total{[^}]*outcome=\"different\"[^}]*}"); different != 0 {
		t.Errorf("%v comparisons in service differ", different)
	}
}

// talked are a turn's question and what came of the one before: thoughts, a call, its result and an answer.
func talked(path string, n, turn int) (out []m) {
	text := func(what string, words int) string { return prose(fmt.Sprint(path, what, n, turn), words) }
	call, result := fmt.Sprintf("call%05d", 10*n+turn), text("result", 20+7*n)
	if turn > 0 && path == "/v1/responses" {
		out = append(out, m{"type": "reasoning", "id": "r" + call, "summary": []m{}, "content": []m{{"type": "reasoning_text", "text": text("thought", 30)}}},
			m{"type": "function_call", "call_id": call, "name": "find", "arguments": `{"shelf": "maps"}`},
			m{"type": "function_call_output", "call_id": call, "output": result}, assistant(text("answer", 25)))
	} else if turn > 0 {
		asked := assistant("")
		asked["tool_calls"] = []m{{"id": call, "type": "function", "function": m{"name": "find", "arguments": `{"shelf": "maps"}`}}}
		if n%2 == 1 {
			asked["reasoning"] = text("thought", 30)
		}
		out = append(out, asked, m{"role": "tool", "tool_call_id": call, "content": result}, assistant(text("answer", 25)))
	}
	return append(out, user("And where are these? "+text("question", 10+3*turn)))
}

func encodedRequest(path string, n int, messages []m) m {
	parameters := m{"type": "object", "properties": m{"shelf": m{"type": "string", "description": "its name"}}, "required": []string{"shelf"}}
	if path == "/v1/responses" {
		body := m{"model": modelName, "max_output_tokens": 2, "temperature": 0, "store": false, "input": messages}
		if n%3 != 0 {
			body["tools"] = []m{{"type": "function", "name": "find", "description": "Finds a shelf.", "parameters": parameters}}
		}
		return body
	}
	body := limited(messages)
	if n%3 != 0 {
		body["tools"] = []m{{"type": "function", "function": m{"name": "find", "description": "Finds a shelf.", "parameters": parameters}}}
	}
	return body
}

// renderedIDs compares `kvlane render` with what the engine in service renders, for generated chats.
func (b *bed) renderedIDs() {
	const path = "/v1/chat/completions/render"
	var bodies []m
	for n := range 120 {
		bodies = append(bodies, oddRequest(n))
	}
	equal, refused := 0, 0
	for i, line := range b.run(linesOf(bodies, func(body m) m { return body }), "render", "--tokenizer", b.tokenizer(), "--engine", b.name, "--path", path,
		"--tokens", "--tool-parser", "--max-model-len", strconv.Itoa(b.contextLength())) {
		theirs, status := b.ids(path, encode(bodies[i]))
		switch ours := idsOf(b.t, line); {
		case status != 200 && ours == nil:
			refused++
		case status == 200 && slices.Equal(ours, theirs):
			equal++
		default:
			b.t.Errorf("%s: ours %.300s, the engine's %d %v", encode(bodies[i]), line, status, theirs)
		}
	}
	b.t.Logf("%d chats: %d with equal ids, %d refused by both", len(bodies), equal, refused)
	if equal == 0 {
		b.t.Error("nothing was compared")
	}
}

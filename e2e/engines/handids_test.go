package engines

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

// TestHandedIDs compares the answers to requests with ids in the place of the text with the engine's own answers to the same
// requests without them: all bytes but random identifiers and times are equal. By default prompts of 256 tokens or more go with ids.
func TestHandedIDs(t *testing.T) {
	t.Run("always", func(t *testing.T) {
		k := *vllm
		k.blocks, k.options = 256, ", hand_ids: true"
		k.further = []string{"--reasoning-parser", "qwen3"}
		compareHanded(t, k, handedAPIs, 100, 60, func(_ string, _ int, _ m, must bool) bool { return must })
	})
	t.Run("by default", func(t *testing.T) {
		k := *vllm
		k.blocks, k.context = 768, 12288
		k.further = []string{"--reasoning-parser", "qwen3"}
		compareHanded(t, k, handedAPIs, 16, 5, func(api string, n int, body m, must bool) bool {
			return sized(api, n, body) && must && body["truncate_prompt_tokens"] == nil
		})
	})
	// Chats that vLLM encodes in code: given ids, it takes another path. Each fourth prompt is long.
	for _, c := range []struct {
		name, files, architecture, tools string
		further                          []string
		apis                             map[string]bool
		least                            int
	}{
		{"gpt-oss", filepath.Join(filepath.Dir(qwen3), "gptoss"), "", "openai", nil, without("/v1/responses"), 12},
		// From version 11 on vLLM refuses all chats if there is a parser.
		{"Mistral v7", "mistral_tekken_v7", "", "mistral", nil, handedAPIs, 4},
		{"Mistral v15", "mistral_tekken_v15", "", "none", nil, handedAPIs, 4},
		{"DeepSeek-V3.2", filepath.Join(filepath.Dir(qwen3), "deepseek_v3"), "DeepseekV32ForCausalLM", "deepseek_v32",
			[]string{"--tokenizer-mode", "deepseek_v32"}, handedAPIs, 12},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := *vllm
			k.model, k.files, k.tools, k.further = "encoded", c.files, c.tools, c.further
			k.blocks, k.context, k.options = 768, 12288, ", hand_ids: true"
			if c.architecture != "" {
				k.folder = named(t, c.files, c.architecture)
			}
			compareHanded(t, k, c.apis, 24, c.least, func(api string, n int, body m, must bool) bool {
				if n%4 == 1 {
					lengthen(api, body, prose(fmt.Sprint("long ", api, n), 4200))
				}
				return must
			})
		})
	}
}

// TestHandedIDsSGLang does so with SGLang, which takes the ids of chats and completions; its other APIs are left alone.
func TestHandedIDsSGLang(t *testing.T) {
	apis := without("/v1/messages", "/v1/responses", "/generate")
	qwen := *sglang
	qwen.blocks, qwen.context = 1024, 12288
	t.Run("always", func(t *testing.T) {
		k := qwen
		k.options, k.further = ", hand_ids: true", []string{"--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3"}
		compareHanded(t, k, apis, 60, 40, func(api string, n int, body m, must bool) bool {
			if n%8 == 1 {
				lengthen(api, body, prose(fmt.Sprint("long ", api, n), 4200))
			}
			return sglangField(api, n, body, must)
		})
	})
	t.Run("by default", func(t *testing.T) {
		k := qwen
		k.further = []string{"--tool-call-parser", "hermes", "--reasoning-parser", "deepseek-r1"}
		compareHanded(t, k, apis, 60, 20, func(api string, n int, body m, must bool) bool {
			long := sized(api, n, body)
			return sglangField(api, n/2, body, must) && long
		})
	})
	// SGLang's own code for chats, which its parser of calls selects.
	t.Run("DeepSeek-V3.2", func(t *testing.T) {
		k := qwen
		k.files = deepseekForSGLang(t)
		k.folder, k.options = k.files, ", hand_ids: true"
		k.further = []string{"--tool-call-parser", "deepseekv32"}
		compareHanded(t, k, apis, 48, 20, func(api string, n int, body m, must bool) bool {
			messages, _ := body["messages"].([]m)
			for _, message := range messages { // asked for their ids, SGLang fails, and then gets none for a time
				if role := message["role"]; role == "wizard" || role == "function" {
					message["role"] = "user"
				}
			}
			return sglangField(api, n, body, must)
		})
	})
}

// sglangField gives a body one of SGLang's fields, and returns whether it still goes with ids.
func sglangField(api string, n int, body m, must bool) bool {
	fields := slices.Concat(sglangFields, []m{{"suffix": "end"}})
	switch api {
	case "/v1/chat/completions":
		fields = slices.Concat(sglangFields, sglangChatFields)
	case "/v1/completions":
	default:
		return must
	}
	field := fields[n%len(fields)]
	if maps.Copy(body, field); body["return_meta_info"] != nil || body["return_prompt_token_ids"] != nil || body["return_token_ids"] != nil {
		delete(body, "stream") // refused by chats
	}
	return (must || body["prompt_logprobs"] != nil) && field["suffix"] == nil // it has no such field as the former
}

// sglangFields are what may be asked of an answer, sglangChatFields of that to a chat. A few answers take more than some tokens.
var (
	sglangFields = []m{
		{}, {"cache_salt": "s"}, {"lora_path": nil, "custom_params": m{"a": 1}}, {"stop": []string{"e", "a", "\n"}}, {"stop": " ", "no_stop_trim": true, "max_tokens": 24}, {"n": 2}, {"n": 3, "stream": false},
		{"skip_special_tokens": false, "ignore_eos": true}, {"min_tokens": 4}, {"stop_token_ids": []int{220, 264, 279, 311}, "max_tokens": 24}, {"stop_regex": "[a-m]"},
		{"regex": "(red|blue|green), [0-9]{3}", "max_tokens": 12}, {"ebnf": "root ::= \"yes\" | \"no\" root", "max_tokens": 12},
		{"logit_bias": m{"264": 50, "279": 40}}, {"frequency_penalty": 1.5, "presence_penalty": 0.5, "max_tokens": 16}, {"repetition_penalty": 1.3, "max_tokens": 16},
		{"return_token_ids": true}, {"seed": 7, "top_p": 0.5, "top_k": 1, "min_p": 0.1}, {"stream": true, "stream_options": m{"include_usage": true}},
		{"rid": "r", "priority": 1, "extra_key": "k"}, {"user": "u", "session_id": "s"},
		{"response_format": m{"type": "json_object"}, "max_tokens": 12},
		{"response_format": m{"type": "json_schema", "json_schema": m{"name": "s", "schema": m{"type": "object", "properties": m{"a": m{"type": "integer"}}, "required": []string{"a"}}}}, "max_tokens": 16},
	}
	sglangChatFields = []m{
		{"logprobs": true, "top_logprobs": 3}, {"logprobs": true, "n": 2, "stream": false}, {"return_prompt_token_ids": true}, {"return_meta_info": true},
		{"return_input_ids_in_sglext": true, "return_output_ids_in_sglext": true}, {"return_cached_tokens_details": true, "return_spec_tokens_details": true},
		{"continue_final_message": true}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}, {"reasoning": m{"enabled": true}}, {"reasoning": m{"effort": "high"}},
		{"separate_reasoning": false}, {"stream_reasoning": false, "stream": true}, {"thinking": m{"type": "disabled"}}, {"task": "query"},
		{"parallel_tool_calls": false, "tools": aTool, "tool_choice": "required", "max_tokens": 40}, {"tools": aTool, "tool_choice": "auto", "max_tokens": 16},
		{"tools": aTool, "tool_choice": "none"}, {"tools": aTool, "tool_choice": m{"type": "function", "function": m{"name": "f"}}, "stream": true, "max_tokens": 40},
		{"tools": aTool, "tool_choice": "required", "chat_template_kwargs": m{"enable_thinking": false}, "max_tokens": 40},
		{"chat_template_kwargs": m{"enable_thinking": false, "spaces_between_special_tokens": false}}, {"max_completion_tokens": 5, "max_tokens": 9},
	}
	aTool = []m{{"type": "function", "function": m{"name": "f", "description": "It reads a file.", "parameters": m{"type": "object", "properties": m{
		"path": m{"type": "string"}, "lines": m{"type": "integer"}}, "required": []string{"path"}}}}}
)

// sized makes the prompt of every second body one of 256 tokens or more, most of them just so, and those of the others shorter.
func sized(api string, n int, body m) bool {
	if n%2 == 1 {
		delete(body, "tools")
		delete(body, "tool_choice")
		if messages, ok := body["messages"].([]m); ok {
			body["messages"] = messages[max(0, len(messages)-1):]
		}
		return false
	}
	words := 260
	if n%8 == 0 {
		words = 4200
	}
	lengthen(api, body, prose(fmt.Sprint("long ", api, n), words))
	return true
}

// named makes a folder with the files of a tokenizer, of a model of this architecture.
func named(t *testing.T, files, architecture string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		text, err := os.ReadFile(filepath.Join(files, name))
		if packed, e := os.Open(filepath.Join(files, name+".gz")); err != nil && e == nil {
			var r *gzip.Reader
			if r, err = gzip.NewReader(packed); err == nil {
				text, err = io.ReadAll(r)
			}
			_ = packed.Close()
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), encode(m{"architectures": []string{architecture}}), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// deepseekForSGLang makes a folder with DeepSeek's tokenizer that transformers takes as it is for Qwen3's weights, too. SGLang's
// parser of calls, and Kvlane the architecture, choose the code for chats.
func deepseekForSGLang(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "deepseek_v3_plain")
	if err := os.Rename(named(t, filepath.Join(filepath.Dir(qwen3), "deepseek_v3"), "DeepseekV32ForCausalLM"), dir); err != nil {
		t.Fatal(err)
	}
	edit := func(name string, change func(config m)) {
		name = filepath.Join(dir, name)
		text, err := os.ReadFile(name)
		var config m
		if err == nil {
			err = json.Unmarshal(text, &config)
		}
		if change(config); err == nil {
			err = os.WriteFile(name, encode(config), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	edit("config.json", func(config m) { config["model_type"] = "qwen3" })
	edit("tokenizer_config.json", func(config m) {
		config["tokenizer_class"] = "PreTrainedTokenizerFast"
		delete(config, "chat_template")
	})
	return dir
}

// handedAPIs are the APIs that are compared, and whether prompts go with ids.
var handedAPIs = without()

// without are the APIs, of which these take no ids.
func without(apis ...string) map[string]bool {
	out := map[string]bool{}
	for _, api := range []string{"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"} {
		out[api] = true
	}
	for _, api := range apis {
		out[api] = false
	}
	return out
}

// lengthen puts a text before the prompt of a body.
func lengthen(api string, body m, text string) {
	switch field := map[string]string{"/v1/completions": "prompt", "/v1/responses": "input", "/generate": "text"}[api]; field {
	case "prompt", "text":
		body[field] = fmt.Sprint(text, " ", body[field])
	case "input":
		items, _ := body[field].([]m)
		body[field] = slices.Concat([]m{user(text)}, items)
	default:
		messages, _ := body["messages"].([]m)
		body["messages"] = slices.Concat([]m{user(text)}, messages)
	}
}

// compareHanded sends count requests to each API, of which at least least go with ids where the API takes them. form may change
// a body, and returns whether it goes with ids.
func compareHanded(t *testing.T, k kind, apis map[string]bool, count, least int, form func(api string, n int, body m, must bool) bool) {
	t.Helper()
	e := startEngine(t, &k)
	e.dependsOnContext()
	var sent atomic.Pointer[[]byte] // the last body that came to the engine
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: e.address})
	proxy.ErrorLog = log.New(io.Discard, "", 0)
	between := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		if req.Header.Get("X-Request-Id") != "" && req.Method == http.MethodPost { // not Kvlane's own questions
			sent.Store(&body)
		}
		req.Body = io.NopCloser(bytes.NewReader(body))
		proxy.ServeHTTP(w, req)
	}))
	t.Cleanup(between.Close)
	b := newFront(t, e, strings.Replace(e.yaml(), e.address, between.Listener.Addr().String(), 1), "", "")
	handed := func(body []byte) bool {
		return slices.ContainsFunc([]string{"prompt_token_ids", "input_ids", "prompt"}, func(name string) bool {
			return bytes.Contains(body, []byte(`"`+name+`":[`))
		})
	}
	b.until("the engine was asked whether it takes ids", func() bool { // for each API when its first request comes
		taken := true
		for _, first := range []struct {
			path string
			body m
		}{ // an API that takes none comes first: its questions would be in the cache of the first comparisons
			{"/v1/responses", m{"model": modelName, "input": []m{user("Hi")}, "max_output_tokens": 1}},
			{"/v1/chat/completions", chat(user("Hi"))}, {"/v1/completions", completion("Hi")}, {"/v1/messages", chat(user("Hi"))},
		} {
			if takes, compared := apis[first.path]; compared {
				form(first.path, 0, first.body, true)
				b.both(first.path, first.body)
				taken = (handed(*sent.Load()) || !takes) && taken
			}
		}
		return taken
	})
	for _, api := range slices.Sorted(maps.Keys(apis)) {
		equal, refused, taken := 0, 0, 0
		for n := range count {
			body, must := handedRequest(api, n)
			must = form(api, n, body, must) && apis[api]
			own, through, status := b.both(api, body)
			switch took := handed(*sent.Load()); {
			case !bytes.Equal(own, through):
				t.Errorf("%s %s\ngot  %s\nwant %s", api, encode(body), through, own)
			case status != http.StatusOK:
				refused++
			case must != took:
				t.Errorf("%s %s: ids handed on: %v, want %v", api, encode(body), took, must)
			default:
				equal++
				if took {
					taken++
				}
			}
		}
		for name, more := range constraints {
			body := chat(user("Which color? " + name))
			maps.Copy(body, more)
			if k.name == sglang.name { // else its parser of reasoning waits for the end of thoughts
				body["chat_template_kwargs"] = m{"enable_thinking": false}
			}
			if body["max_tokens"] = 24; api != "/v1/chat/completions" || !apis[api] {
				break
			}
			must := form(api, 2, body, true)
			own, through, status := b.both(api, body)
			if took := handed(*sent.Load()); !bytes.Equal(own, through) || status == http.StatusOK && took != must {
				t.Errorf("%s\ngot  %s, to ids %v\nwant %s, %v", encode(body), through, took, own, must)
			}
			t.Logf("%s: %s", name, own[:min(len(own), 300)])
		}
		t.Logf("%s: %d equal answers, %d of them with ids, %d refusals", api, equal, taken, refused)
		if equal < least || apis[api] && taken < least {
			t.Errorf("%s: got %d equal answers, %d with ids, want %d at least", api, equal, taken, least)
		}
	}
}

// constraints of what a chat's answer may be. An engine ignores those of the other one.
var constraints = map[string]m{
	"JSON":      {"response_format": m{"type": "json_object"}},
	"a schema":  {"response_format": m{"type": "json_schema", "json_schema": m{"name": "s", "schema": m{"type": "object", "properties": m{"a": m{"type": "integer"}}, "required": []string{"a"}}}}},
	"a choice":  {"structured_outputs": m{"choice": []string{"red", "blue"}}},
	"a pattern": {"regex": "(red|blue)"},
}

// random parts of answers.
var randomParts = regexp.MustCompile(`"(?:id|item_id|call_id|signature|response_id)": ?"[^"]*"|"(?:created|created_at|completed_at|\w+_time|\w+_ts|\w+_latency|\w+_throughput)": ?[0-9.e+-]+`)

// both sends a request to the engine and through Envoy, each with empty caches, and returns the answers without their random
// parts and the status of the latter.
func (b *bed) both(path string, body m) (own, through []byte, status int) {
	b.t.Helper()
	var answers [2][]byte
	for i, host := range []string{b.address, b.ingress} {
		b.clear()
		resp, err := b.client.Post("http://"+host+path, "application/json", bytes.NewReader(encode(body)))
		if err != nil {
			b.t.Fatal(err)
		}
		answer, err := io.ReadAll(resp.Body)
		if err != nil {
			b.t.Fatal(err)
		}
		_ = resp.Body.Close()
		status = resp.StatusCode
		if bytes.HasPrefix(answer, []byte("data: ")) || bytes.HasPrefix(answer, []byte("event: ")) {
			answer = joined(answer)
		}
		answers[i] = fmt.Appendf(randomParts.ReplaceAll(answer, nil), " status %d", status)
	}
	return answers[0], answers[1], status
}

// joined are the events of a stream with their texts joined: how many tokens an event has depends on timing.
func joined(stream []byte) []byte {
	said := map[string]string{}
	var walk func(key string, v any)
	walk = func(key string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for _, k := range slices.Sorted(maps.Keys(v)) {
				walk(k, v[k])
			}
		case []any:
			for _, inner := range v {
				walk(key, inner)
			}
		case string, json.Number:
			if slices.Contains(saidIn, key) {
				said[key] += fmt.Sprint(v)
			}
		}
	}
	for line := range bytes.Lines(stream) {
		if data, ok := bytes.CutPrefix(line, []byte("data: {")); ok {
			var event map[string]any
			d := json.NewDecoder(bytes.NewReader(append([]byte("{"), data...)))
			d.UseNumber()
			if err := d.Decode(&event); err != nil {
				return append([]byte("not JSON: "), line...)
			}
			walk("", event)
		}
	}
	return encode(said)
}

// saidIn are the members of events that say what the model did.
var saidIn = []string{"content", "reasoning", "text", "thinking", "partial_json", "arguments", "name", "delta", "token", "logprob", "finish_reason", "stop_reason",
	"prompt_tokens", "input_tokens", "output_tokens", "completion_tokens", "prompt_token_ids", "message"}

// handedRequest makes a request, and whether its ids are handed on if the engine accepts it.
func handedRequest(api string, seed int) (body m, handed bool) {
	r := random(5000 + seed)
	one := func(n int) bool { return r.IntN(n) == 0 }
	if api == "/v1/completions" {
		body = completion(oddText(seed)+oddText(seed+1000), "max_tokens", 6)
		switch r.IntN(12) {
		case 0:
			body["echo"] = true
		case 1:
			body["prompt_logprobs"] = 1
		case 2:
			body["truncate_prompt_tokens"] = 2
		case 3:
			body["logprobs"] = 2
			return body, true
		case 4:
			body["return_token_ids"] = true
			return body, true
		default:
			body["stream"] = one(3)
			return body, true
		}
		return body, false
	}
	if api == "/generate" {
		return m{"text": oddText(seed) + oddText(seed+1000), "sampling_params": m{"temperature": 0, "max_new_tokens": 6}, "return_logprob": one(2)}, false // its streams repeat texts
	}
	body = oddRequest(7000 + seed)
	body["temperature"], body["stream"] = 0, one(3)
	switch api {
	case "/v1/messages":
		body = m{"model": modelName, "max_tokens": 8, "temperature": 0, "stream": body["stream"], "messages": body["messages"], "chat_template_kwargs": body["chat_template_kwargs"]}
		var turns []m
		for n := range 1 + 2*r.IntN(3) {
			turns = append(turns, m{"role": []string{"user", "assistant"}[n%2], "content": oddText(seed + 100*n)})
		}
		body["messages"] = turns
		if one(2) {
			body["system"] = oddText(seed + 50)
		}
		if one(2) {
			body["tools"] = []m{{"name": "f", "description": oddText(seed + 60), "input_schema": m{"type": "object", "properties": m{"a": m{"type": "string"}}}}}
		}
		return body, true
	case "/v1/responses":
		var items []m
		for n := range 1 + 2*r.IntN(3) {
			items = append(items, m{"role": []string{"user", "assistant"}[n%2], "content": oddText(seed + 100*n)})
		}
		body = m{"model": modelName, "max_output_tokens": 8, "temperature": 0, "stream": body["stream"], "input": items}
		if one(2) {
			body["instructions"] = oddText(seed + 50)
		}
		if one(2) {
			body["tools"] = []m{{"type": "function", "name": "f", "description": oddText(seed + 60), "parameters": m{"type": "object", "properties": m{"a": m{"type": "string"}}}}}
		}
		if one(4) {
			body["truncation"] = "auto"
		}
		return body, true
	}
	body["max_tokens"] = 8
	switch r.IntN(14) {
	case 0:
		body["echo"] = true
		return body, false
	case 1:
		body["prompt_logprobs"] = 1
		return body, false
	case 2:
		body["return_prompt_text"] = true
		return body, false
	case 3:
		body["truncate_prompt_tokens"] = 5
	case 4:
		body["logprobs"], body["top_logprobs"] = true, 2
	case 5:
		body["return_token_ids"] = true
	case 6:
		body["response_format"] = m{"type": "json_object"}
	case 7, 8:
		if body["tools"] != nil {
			body["tool_choice"], body["max_tokens"] = "required", 40
		}
	case 9, 10:
		if body["tools"] != nil {
			body["tool_choice"], body["max_tokens"] = m{"type": "function", "function": m{"name": "tool_0"}}, 40
		}
	}
	return body, true
}

package shape_test

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// sglangAPIs are those of the recordings sglang_NAME.jsonl.gz, and sglang_dsv32_NAME.jsonl.gz, of e2e/engines/encoders.py.
var sglangAPIs = map[string]body.API{"chat": body.Chat, "completions": body.Completions, "responses": body.Responses, "embeddings": body.Embeddings,
	"messages": body.Messages, "generate": body.Generate, "conversations": body.Chat}

// TestSGLangBodies compares the ids of stock SGLang for generated bodies, valid ones and others: samples, and the files in
// KVLANE_ENCODER_CASES.
func TestSGLangBodies(t *testing.T) {
	t.Parallel()
	m, err := shape.Load(os.DirFS("../models/qwen3"), shape.Options{ToolParser: true, MaxModelLen: 1024})
	if err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob("testdata/sglang/*.jsonl.gz")
	if live := os.Getenv("KVLANE_ENCODER_CASES"); live != "" {
		files, _ = filepath.Glob(filepath.Join(live, "sglang_*.jsonl.gz"))
	} else if len(files) < len(sglangAPIs) {
		t.Fatalf("got recordings %v, want one for each of %d APIs", files, len(sglangAPIs))
	}
	encoded := encoderModel(t, "sglang_dsv32")
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(file), "sglang_"), ".")
			m := m
			if api, found := strings.CutPrefix(name, "dsv32_"); found {
				m, name = encoded, api
			}
			compareSGLang(t, m, sglangAPIs[name], file, aloneShares[strings.TrimPrefix(strings.TrimSuffix(filepath.Base(file), ".jsonl.gz"), "sglang_")])
		})
	}
}

// aloneShares are the shares of the bodies refused by the engine that Kvlane has ids for, as of 3,000 bodies each.
var aloneShares = map[string]float64{"chat": 0.064, "completions": 0.375, "responses": 0.467, "messages": 0.372, "embeddings": 0.381, "generate": 0.508,
	"dsv32_conversations": 0.057, "dsv32_completions": 0.375, "dsv32_responses": 0.426, "dsv32_messages": 0.550}

func compareSGLang(t *testing.T, m *shape.Model, api body.API, file string, share float64) {
	t.Helper()
	var equal, refused, alone, partial, different int
	for c := range encoderCases(t, file) {
		req, err := body.Parse(api, []byte(c.Body))
		var got shape.Result
		if err == nil {
			got, err = m.RenderPrompt(req, shape.SGLang)
		}
		switch {
		case c.Status != 0 && err != nil:
			refused++
		case c.Status != 0: // for types and values of fields that are not read here
			alone++
		case err == nil && got.Partial == "" && (slices.Equal(got.IDs, c.IDs) || c.Hash != "" && c.Hash == hashOf(got.IDs)):
			equal++
		case err == nil && got.Partial != "" && (c.Hash != "" || len(got.IDs) <= len(c.IDs) && slices.Equal(got.IDs, c.IDs[:len(got.IDs)])):
			partial++
		default:
			if different++; different <= 10 {
				t.Errorf("%.2000s\ngot %d ids, partial %q, error %v, want %d ids", c.Body, len(got.IDs), got.Partial, err, len(c.IDs))
			}
		}
	}
	t.Logf("%d equal, %d refused by both, %d by the engine alone, %d known in part, %d different", equal, refused, alone, partial, different)
	n := float64(alone + refused)
	if most := n*share + 4*math.Sqrt(n*share*(1-share)); share == 0 || float64(alone) > most {
		t.Errorf("got %d refused by the engine alone, want at most %.0f of %.0f: refusals drift", alone, most, n)
	}
	if equal == 0 || refused == 0 || partial > equal/10 {
		t.Errorf("got %d equal, %d refused and %d in part, want some of the first two and few of the last", equal, refused, partial)
	}
}

// TestSGLangBOS: SGLang puts BOS before texts for some tokenizer classes whatever tokenizer.json says, unless the configuration
// says not to.
func TestSGLangBOS(t *testing.T) {
	const bos, text = 256, `{"prompt": "a", "text": "a", "input": "a"}`
	for config, want := range map[string][2]int{ // ids with SGLang and with vLLM
		`"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": true`:      {2, 1},
		`"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": null`:      {2, 1},
		`"tokenizer_class": "LlamaTokenizerFast"`:                             {2, 1},
		`"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": false`:     {1, 1},
		`"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": true`: {1, 1},
	} {
		m, err := shape.Load(fstest.MapFS{"tokenizer.json": {Data: byteTokenizer("<s>")}, "tokenizer_config.json": {Data: []byte(`{"bos_token": "<s>", ` + config + `}`)}}, shape.Options{})
		if err != nil {
			t.Fatal(err)
		}
		cache := conv.New(1 << 20)
		for range 2 { // the second time from the cache
			for api, engines := range map[body.API][]shape.Engine{body.Completions: {shape.SGLang, shape.VLLM}, body.Embeddings: {shape.VLLM, shape.SGLang}, body.Generate: {shape.SGLang}} {
				for _, engine := range engines {
					var turn conv.Turn
					if err := cache.Parse(&turn, api, []byte(text)); err != nil {
						t.Fatal(err)
					}
					n := want[0]
					if engine == shape.VLLM {
						n = want[1]
					}
					got, err := m.PromptInto(t.Context(), nil, &turn, engine)
					if err != nil || len(got.IDs) != n || n == 2 && got.IDs[0] != bos {
						t.Errorf("%s, %v of %v: got %v, %v, want %d ids", config, api, engine, got.IDs, err, n)
					}
				}
			}
		}
	}
}

// The effort of a message sets no thinking, that of a chat does.
func TestEffortOfSGLangsMessages(t *testing.T) {
	m := tinyChat(t, "{}", "{}", "{{ reasoning_effort }} {{ thinking }} {{ enable_thinking }}")
	for api, want := range map[body.API]string{body.Messages: "low  ", body.Chat: "low True True"} {
		req, err := body.Parse(api, []byte(`{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"output_config":{"effort":"low"},"reasoning_effort":"low"}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.RenderPrompt(req, shape.SGLang); err != nil || got.Text != want {
			t.Errorf("%v: got %q, %v, want %q", api, got.Text, err, want)
		}
	}
}

// The values are those of SGLang 0.5.23's own request types.
func TestEffortOfSGLangsResponses(t *testing.T) {
	m := tinyChat(t, "{}", "{}", "{{ reasoning_effort }} {{ thinking }} {{ enable_thinking }}")
	for reasoning, want := range map[string]string{
		`null`:                        "  ",
		`{}`:                          "medium True True",
		`{"summary":"auto"}`:          "medium True True",
		`{"effort":null}`:             "  ",
		`{"effort":"low"}`:            "low True True",
		`{"effort":"none"}`:           "none False False",
		`{"reasoning_effort":"none"}`: "medium False False",
	} {
		req, err := body.Parse(body.Responses, []byte(`{"input":"x","reasoning":`+reasoning+`}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.RenderPrompt(req, shape.SGLang); err != nil || got.Text != want {
			t.Errorf("%s: got %q, partial %q, %v, want %q", reasoning, got.Text, got.Partial, err, want)
		}
	}
}

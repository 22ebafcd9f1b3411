package shape_test

import (
	"cmp"
	"errors"
	"fmt"
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

// bodyAPIs are those of the recordings ENGINE_MODEL_NAME.jsonl.gz of e2e/engines/encoders.py.
var bodyAPIs = map[string]body.API{"chat": body.Chat, "completions": body.Completions, "responses": body.Responses, "embeddings": body.Embeddings,
	"messages": body.Messages, "generate": body.Generate, "conversations": body.Chat, "tokenize": body.Tokenize}

// TestSGLangBodies and TestVLLMBodies compare the ids of a stock engine for generated bodies, valid ones and others: samples,
// and the files in KVLANE_ENCODER_CASES.
func TestSGLangBodies(t *testing.T) { compareBodies(t, shape.SGLang, 10) }

func TestVLLMBodies(t *testing.T) { compareBodies(t, shape.VLLM, 25) }

func compareBodies(t *testing.T, engine shape.Engine, most int) {
	t.Helper()
	t.Parallel()
	files, _ := filepath.Glob("testdata/bodies/" + engine.String() + "_*.jsonl.gz")
	if live := os.Getenv("KVLANE_ENCODER_CASES"); live != "" {
		files, _ = filepath.Glob(filepath.Join(live, engine.String()+"_*.jsonl.gz"))
	} else if len(files) < most {
		t.Fatalf("got recordings %v, want %d", files, most)
	}
	models := map[string]*shape.Model{}
	for _, file := range files {
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), engine.String()+"_"), ".jsonl.gz")
		at := strings.LastIndexByte(name, '_')
		model, api := name[:max(at, 0)], name[at+1:]
		if models[model] == nil {
			models[model] = bodiesModel(t, engine, model)
		}
		m, share := models[model], aloneShares[engine.String()+"_"+name]
		if engine == shape.VLLM {
			share = aloneShares["vllm_"+api]
		}
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			compareRecorded(t, m, engine, bodyAPIs[api], file, share)
		})
	}
}

// bodiesModel returns the model of recordings: Qwen3's, or one with an encoder.
func bodiesModel(t *testing.T, engine shape.Engine, name string) *shape.Model {
	t.Helper()
	switch {
	case name == "" || name == "qwen3":
		m, err := shape.Load(os.DirFS("../models/qwen3"), shape.Options{ToolParser: true, TrustTemplates: engine == shape.VLLM, MaxModelLen: 1024})
		if err != nil {
			t.Fatal(err)
		}
		return m
	case engine == shape.SGLang:
		name = "sglang_" + name
	}
	return encoderModel(t, name)
}

// aloneShares are the shares of the bodies refused by the engine that Kvlane has ids for, as of 3,000 bodies each; vLLM's are
// the largest of all models.
var aloneShares = map[string]float64{"sglang_chat": 0.064, "sglang_completions": 0.375, "sglang_responses": 0.467, "sglang_messages": 0.372,
	"sglang_embeddings": 0.381, "sglang_generate": 0.508, "sglang_dsv32_conversations": 0.057, "sglang_dsv32_completions": 0.375,
	"sglang_dsv32_responses": 0.426, "sglang_dsv32_messages": 0.550, "vllm_chat": 0.11, "vllm_completions": 0.43, "vllm_messages": 0.36,
	"vllm_responses": 0.49, "vllm_tokenize": 0.36}

func compareRecorded(t *testing.T, m *shape.Model, engine shape.Engine, api body.API, file string, share float64) {
	t.Helper()
	var equal, both, alone, none, different int
	reasons := map[string]int{}
	for c := range encoderCases(t, file) {
		req, err := body.Parse(api, []byte(c.Body))
		var got shape.Result
		invalid := err != nil
		if !invalid {
			got, err = m.RenderPrompt(req, engine)
		}
		refused, refusal := errors.AsType[*shape.Refusal](err)
		switch {
		case c.Status != 0 && (invalid || refusal || err != nil && engine == shape.SGLang):
			both++
		case c.Status != 0 && err == nil && got.Partial == "": // for types and values of fields that are not read here
			alone++
		case err == nil && got.Partial == "" && (slices.Equal(got.IDs, c.IDs) || c.Hash != "" && c.Hash == hashOf(got.IDs)):
			equal++
		case c.Status == 0 && refusal && refused.Guessed && engine == shape.VLLM,
			err == nil && got.Partial != "" && (c.Status != 0 || c.Hash != "" || len(got.IDs) <= len(c.IDs) && slices.Equal(got.IDs, c.IDs[:len(got.IDs)])),
			err != nil && !refusal && engine == shape.VLLM:
			none++
			reasons[cmp.Or(got.Partial, fmt.Sprint(err))]++
		default:
			if different++; different <= 10 {
				t.Errorf("%.2000s\ngot %d ids, partial %q, error %v, want %d ids, status %d %s", c.Body, len(got.IDs), got.Partial, err, len(c.IDs), c.Status, c.Reason)
			}
		}
	}
	t.Logf("%d equal, %d refused by both, %d by the engine alone, %d with no ids or known in part %v, %d different", equal, both, alone, none, reasons, different)
	n := float64(alone + both)
	if most := n*share + 4*math.Sqrt(n*share*(1-share)); share == 0 || float64(alone) > most {
		t.Errorf("got %d refused by the engine alone, want at most %.0f of %.0f: refusals drift", alone, most, n)
	}
	if equal == 0 || both == 0 || none > 3*equal {
		t.Errorf("got %d equal, %d refused and %d in part, want some of the first two and few of the last", equal, both, none)
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

// TestSGLangTokenizesChatsTwice: a chat of text for a model that takes media has a second BOS with SGLang, which its tokenizing
// endpoint does not show, if the tokenizer puts one before each text. Such a chat has no ids.
func TestSGLangTokenizesChatsTwice(t *testing.T) {
	const chat = `{"messages": [{"role": "user", "content": "a"}]}`
	const media = `"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}`
	for name, c := range map[string]struct {
		config, bos string
		api         body.API
		engine      shape.Engine
		raw         string
		given       *bool // models[].multimodal
		want        bool  // there are ids
	}{
		"SGLang":              {config: media, bos: "true", engine: shape.SGLang, raw: chat},
		"SGLang, messages":    {config: media, bos: "true", engine: shape.SGLang, api: body.Messages, raw: `{"max_tokens": 1, ` + chat[1:]},
		"its endpoint":        {config: media, bos: "true", engine: shape.SGLang, api: body.Tokenize, raw: chat, want: true},
		"ids":                 {config: media, bos: "true", engine: shape.SGLang, raw: `{"input_ids": [1], ` + chat[1:], want: true},
		"a completion":        {config: media, bos: "true", engine: shape.SGLang, api: body.Completions, raw: `{"prompt": "a"}`, want: true},
		"no BOS":              {config: media, bos: "false", engine: shape.SGLang, raw: chat, want: true},
		"text only":           {config: `"architectures": ["MistralForCausalLM"]`, bos: "true", engine: shape.SGLang, raw: chat, want: true},
		"media off":           {config: `"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}`, bos: "true", engine: shape.SGLang, raw: chat, want: true},
		"media on":            {config: `"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}`, bos: "true", engine: shape.SGLang, raw: chat, given: new(true)},
		"no config, media":    {bos: "true", engine: shape.SGLang, raw: chat, given: new(true)},
		"no config":           {bos: "true", engine: shape.SGLang, raw: chat, want: true},
		"given as text only":  {config: media, bos: "true", engine: shape.SGLang, raw: chat, given: new(false), want: true},
		"vLLM":                {config: media, bos: "true", engine: shape.VLLM, raw: chat, want: true},
		"up to the first one": {config: media, bos: "true", engine: shape.SGLang, raw: `{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}`, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := shape.Load(fstest.MapFS{"tokenizer.json": {Data: byteTokenizer("<s>")}, "config.json": {Data: []byte("{" + c.config + "}")},
				"tokenizer_config.json": {Data: []byte(`{"bos_token": "<s>", "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": ` + c.bos + `,
					"chat_template": "<s>{% for m in messages %}{{ m.content }}{% endfor %}"}`)}}, shape.Options{Multimodal: c.given})
			if err != nil {
				t.Fatal(err)
			}
			req, err := body.Parse(cmp.Or(c.api, body.Chat), []byte(c.raw))
			if err != nil {
				t.Fatal(err)
			}
			res, err := m.Prompt(req, c.engine)
			if got := err == nil && len(res.IDs) > 0; got != c.want {
				t.Errorf("got ids %v, %v, want them: %v", res.IDs, err, c.want)
			}
		})
	}
}

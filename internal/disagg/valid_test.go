package disagg

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// begun holds a prompt of each API, without the closing brace, that engines accept.
var begun = map[body.API]string{
	body.Chat: `{"messages":[{"role":"user","content":"x"}]`, body.Completions: `{"prompt":"x"`, body.Responses: `{"input":"x"`,
	body.Messages: `{"messages":[{"role":"user","content":"x"}],"max_tokens":9`, body.VLLMGenerate: `{"token_ids":[1,2],"sampling_params":{}`,
	body.Generate: `{"text":"x"`,
}

func refusal(t *testing.T, p *Protocol, api body.API, raw string) string {
	t.Helper()
	r, err := body.Parse(api, []byte(raw))
	if err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
	return p.Refuses(r, []uint32{1, 2})
}

// whatOnlyPrefillEdits returns the paths that the prefill leg of a request changes and the decode leg does not.
func whatOnlyPrefillEdits(t *testing.T, p *Protocol, api body.API) (paths [][]string) {
	t.Helper()
	req, err := body.Parse(api, []byte(begun[api]+"}"))
	if err != nil {
		t.Fatal(err)
	}
	side := Side{Worker: "w", Address: "10.0.0.1:80", Rank: 0, Ranks: 2, ByHeader: true, Settings: wholeSettings()}
	x := &Exchange{Request: req, Path: "/v1/completions", ID: "id", IDs: []uint32{1, 2}, Prefill: side, Decode: side, Unique: Unique{Text: "u"}}
	answer, err := ParseAnswer([]byte(answerOf))
	if err != nil {
		t.Fatal(err)
	}
	prefill, err := p.Prefill(context.Background(), x)
	if err != nil {
		t.Fatal(err)
	}
	decode, err := p.Decode(x, answer)
	if err != nil {
		t.Fatal(err)
	}
	for i := range prefill.Edits {
		path := prefill.Edits[i].Path()
		both := slices.ContainsFunc(decode.Edits, func(e body.Edit) bool { return e.Path()[0] == path[0] })
		made := p.Name == "lmcache" && slices.Contains([]string{"prompt", "truncate_prompt_tokens", kvParams}, path[0]) // of the ids
		if !both && !made {
			paths = append(paths, path)
		}
	}
	return paths
}

// Every field that the prefill leg replaces or removes, of every connector and API, has a check: with a value that no
// engine accepts, or twice, the request is not split. Without it the prefill engine would compute a prompt, and keep
// its blocks, for a request that the decode engine refuses.
func TestNoLegHidesWhatDecodeRefuses(t *testing.T) {
	for _, p := range protocolsForTest(t) {
		for _, api := range p.apis {
			if why := refusal(t, p, api, begun[api]+"}"); why != "" {
				t.Errorf("%s, %v: got %q, want it split", p.Name, api, why)
			}
			paths := [][]string{{"stream"}, {"stream_options"}, {"min_tokens"}} // which llm-d's sidecar edits
			if api == body.VLLMGenerate {
				paths[2] = []string{"sampling_params", "min_tokens"}
			}
			if !p.NoLeg {
				paths = whatOnlyPrefillEdits(t, p, api)
			}
			for _, path := range paths {
				name := path[len(path)-1]
				if begins[name] == "" {
					t.Errorf("%s, %v: no check of %v", p.Name, api, path)
				}
				member, twice := func(value string) string { return `"` + name + `":` + value }, func(m string) string { return m + "," + m }
				for _, m := range []string{member("-1"), member("5.5"), member("1e1"), member(`-0`), twice(member("[]")), twice(member("5")), twice(member("true")), twice(member(`"x"`)), twice(member("null"))} {
					more := "," + m
					if len(path) > 1 {
						more = `,"` + path[0] + `":{` + m + "}"
					}
					if why := refusal(t, p, api, begun[api]+strings.Repeat(`,"filler":0`, 1500)+more+"}"); why == "" {
						t.Errorf("%s, %v: %s is split", p.Name, api, more)
					}
				}
				if len(path) > 1 {
					for _, raw := range []string{strings.Replace(begun[api], `"sampling_params":{}`, `"sampling_params":[5]`, 1), strings.Replace(begun[api], `,"sampling_params":{}`, "", 1)} {
						if why := refusal(t, p, api, raw+"}"); why == "" {
							t.Errorf("%s: %s is split", p.Name, raw)
						}
					}
				}
			}
		}
	}
}

// What engines certainly accept is split; what they refuse, or only some accept, is not.
func TestOnlyWhatDecodeCertainlyAcceptsIsSplit(t *testing.T) {
	for _, c := range []struct {
		connectors string // by blanks
		api        body.API
		split      []string // members
		not        []string
	}{
		{"nixl nixl-push moriio moriio-write mooncake p2p-nccl sharedstorage sidecar lmcache", body.Chat, []string{
			`"max_tokens":1`, `"max_tokens":null`, `"max_completion_tokens":70,"max_tokens":80`, `"max_tokens":4,"min_tokens":4`, `"min_tokens":0`, `"min_tokens":1`,
			`"stream":true`, `"stream":false`, `"stream":null`, `"stream":null,"stream_options":null`, `"stream":true,"stream_options":{}`, `"x":1,"x":2`,
			`"stream":true,"stream_options":{"include_usage":true}`, `"stream":true,"stream_options":{"include_usage":null,"continuous_usage_stats":false}`,
		}, []string{
			`"max_tokens":0`, `"max_tokens":-1`, `"max_tokens":"5"`, `"max_tokens":5.0`, `"max_tokens":true`, `"max_tokens":[]`, `"max_tokens":99999999999999999999`,
			`"max_completion_tokens":5,"max_tokens":-1`, `"max_completion_tokens":0,"max_tokens":5`, `"max_tokens":"x","max\u005ftokens":5`, `"max_tokens":5,"max_tokens":"x"`,
			`"min_tokens":100,"max_tokens":4`, `"min_tokens":100,"max_tokens":200,"max_completion_tokens":4`, `"min_tokens":2`, `"min_tokens":-1`, `"min_tokens":null`, `"min_tokens":"1"`,
			`"stream":"maybe"`, `"stream":1`, `"stream":{}`, `"stream":true,"stream":true`, `"stream_options":{"include_usage":true}`, `"stream":false,"stream_options":{}`,
			`"stream":true,"stream_options":5`, `"stream":true,"stream_options":[]`, `"stream":true,"stream_options":{"include_usage":5}`,
			`"stream":true,"stream_options":{"x":true}`, `"stream":true,"stream_options":{"include_usage":true,"include_usage":true}`,
		}},
		{"nixl sidecar lmcache", body.Completions, []string{`"max_tokens":20,"min_tokens":20`, `"max_completion_tokens":5`},
			[]string{`"max_completion_tokens":50,"min_tokens":40`, `"max_completion_tokens":"x"`, `"min_completion_tokens":[]`, `"min_tokens":20`}},
		{"nixl sidecar", body.Responses, []string{`"max_output_tokens":9,"min_tokens":9`, `"max_output_tokens":null`, `"store":true`, `"store":null`, `"store":false,"background":false`, `"background":null`},
			[]string{`"max_output_tokens":0`, `"max_output_tokens":"9"`, `"max_tokens":"x"`, `"max_tokens":9,"min_tokens":9`, `"store":"no"`, `"store":1`, `"background":5`, `"background":true`, `"background":true,"store":false`}},
		{"nixl sidecar", body.Messages, []string{`"stream":true`, `"min_tokens":9`}, []string{`"max_tokens":null`, `"max_tokens":0`, `"min_tokens":10`}},
		{"nixl sidecar", body.VLLMGenerate, []string{`"x":1`}, []string{`"sampling_params":null`, `"sampling_params":5`, `"sampling_params":{"max_tokens":0}`,
			`"sampling_params":{"max_tokens":9,"min_tokens":10}`, `"sampling_params":{"max_new_tokens":99,"max_tokens":9,"min_tokens":10}`, `"sampling_params":{"min_tokens":null}`,
			`"sampling_params":{"max_tokens":"9"}`, `"sampling_params":{"max_tokens":9,"max_tokens":9}`}},
		{"trtllm trtllm-generation-first", body.Chat, []string{`"max_tokens":9`, `"stream":true,"stream_options":{"include_usage":true}`, `"prompt_logprobs":1`},
			[]string{`"stream":"x"`, `"stream_options":{}`, `"stream":true,"stream_options":7`, `"stream":true,"prompt_logprobs":1`}},
		{"lmcache", body.Chat, []string{`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","parallel_tool_calls":false`, `"chat_template_kwargs":{"enable_thinking":false}`,
			`"reasoning_effort":"low","logprobs":true,"top_logprobs":null,"echo":false,"documents":null,"add_generation_prompt":true`},
			[]string{`"tools":5`, `"tool_choice":5`, `"parallel_tool_calls":"x"`, `"logprobs":3`, `"top_logprobs":1000`, `"echo":null`, `"chat_template":1`, `"reasoning_effort":{}`, `"documents":{}`}},
		{"nixl", body.Chat, []string{`"logprobs":true,"top_logprobs":1000`, `"background":5`, `"store":"x"`}, nil}, // both engines judge them
		{"sglang", body.Chat, []string{`"stream":"x"`, `"max_tokens":"x"`, `"stream":true,"stream":true`}, nil},
		{"sglang", body.Responses, []string{`"store":true,"background":true`, `"background":true`, `"store":false`, `"request_id":"resp_x"`, `"max_output_tokens":"x"`},
			[]string{`"store":"x"`, `"background":true,"store":false`, `"background":true,"store":null`, `"background":[]`, `"request_id":null`, `"request_id":5`, `"store":true,"store":true`}},
	} {
		for name := range strings.FieldsSeq(c.connectors) {
			p := protocols[name]()
			for i, members := range slices.Concat(c.split, c.not) {
				split := i < len(c.split)
				base := begun[c.api]
				if key, _, _ := strings.Cut(members, ":"); strings.Contains(base, ","+key) { // it takes the place of the base's
					base = base[:strings.Index(base, ","+key)]
				}
				raw := base + "," + members + "}"
				if why := refusal(t, p, c.api, raw); (why == "") != split {
					t.Errorf("%s, %v: %s: got %q, want split %v", name, c.api, raw, why, split)
				}
				r, err := body.Parse(c.api, []byte(raw))
				if err != nil {
					t.Fatal(err)
				}
				if why := p.Impossible(r, []uint32{1, 2}); (why != "") != (p.Always && !split) {
					t.Errorf("%s: %s: impossible because of %q", name, raw, why)
				}
			}
		}
	}
}

// The check allocates nothing for what is split.
func TestWhatIsSplitIsCheckedWithoutAllocations(t *testing.T) {
	r, err := body.Parse(body.Chat, []byte(begun[body.Chat]+`,"max_tokens":40,"min_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`))
	if err != nil {
		t.Fatal(err)
	}
	p := nixl()
	ids := []uint32{1}
	if n := testing.AllocsPerRun(100, func() { p.Refuses(r, ids) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
}

func BenchmarkRefuses(b *testing.B) {
	r, err := body.Parse(body.Chat, []byte(begun[body.Chat]+`,"max_tokens":40,"stream":true,"stream_options":{"include_usage":true}}`))
	if err != nil {
		b.Fatal(err)
	}
	p := nixl()
	for b.Loop() {
		p.Refuses(r, nil)
	}
}

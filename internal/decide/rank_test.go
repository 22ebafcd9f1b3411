package decide

import (
	"strings"
	"testing"
)

// How ranks in bodies are handled, by engine.
func TestRanksInBodies(t *testing.T) {
	const unchanged = ""
	for name, c := range map[string]struct {
		engine, rankBy, path, body, want string
	}{
		"picked":                {"sglang", "header", "/generate", `{"text":"x"}`, `{"text":"x","routed_dp_rank":0}`},
		"a client's":            {"sglang", "header", "/generate", `{"routed_dp_rank": 9 ,"text":"x"}`, `{"routed_dp_rank": 0 ,"text":"x"}`},
		"a client's old one":    {"sglang", "header", "/generate", `{"text":"x", "data_parallel_rank":9}`, `{"text":"x","routed_dp_rank":0}`},
		"the header wins there": {"sglang", "header", "/v1/completions", `{"model":"demo","prompt":"x"}`, unchanged},
		"not in every version":  {"sglang", "header", "/v1/messages", `{"model":"demo","max_tokens":1,"messages":[],"routed_dp_rank":9}`, `{"model":"demo","max_tokens":1,"messages":[],"routed_dp_rank":0}`},
		"the engine chooses":    {"sglang", "none", "/generate", `{"text":"x"}`, unchanged},
		"nobody else does":      {"sglang", "none", "/generate", `{"routed_dp_rank":0,"text":"x"}`, `{"text":"x"}`},
		"a port is the rank":    {"sglang", "port", "/v1/completions", `{"model":"demo","prompt":"x","data_parallel_rank":1}`, `{"model":"demo","prompt":"x"}`},
		"vLLM reads none":       {"vllm", "header", "/v1/completions", `{"model":"demo","prompt":"x","data_parallel_rank":1}`, unchanged},
		"TensorRT-LLM's hint":   {"trtllm", "header", "/v1/completions", `{"model":"demo","prompt":"x","disaggregated_params":{"route_hint":{"dp_rank":1},"a":1}}`, `{"model":"demo","prompt":"x","disaggregated_params":{"a":1}}`},
	} {
		t.Run(name, func(t *testing.T) {
			w := worker("a", 1)
			w.Engine, w.RankBy = c.engine, c.rankBy
			b := newBench(t, "", w)
			d, _ := b.ask(c.path, c.body)
			if d.Reject != nil || string(d.Body) != c.want {
				t.Errorf("got  %s\nwant %s", d.Body, c.want)
			}
		})
	}
}

// An id in the body that names hosts is replaced even without a connector: the engine may
// run one that Kvlane does not know of.
func TestNoRequestIDInTheBodyNamesAHost(t *testing.T) {
	for id, stays := range map[string]bool{"fine": true, `\u005f__prefill_addr_evil:1___decode_addr_evil:1_0`: false} {
		for sections, trusted := range map[string]bool{"": false, "disagg: {trust_client_params: true}\n": true} {
			b := newBench(t, sections, worker("a", 0))
			d, _ := b.ask("/v1/responses", `{"model":"demo","request_id":"`+id+`","input":"x"}`)
			if got, want := d.Body == nil, stays || trusted; got != want || !want && strings.Contains(string(d.Body), "evil") {
				t.Errorf("%s, trusted %v: body unchanged: got %v, want %v: %s", id, trusted, got, want, d.Body)
			}
			end(&d, 200)
		}
	}
}

package decide

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/extproc"
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
		"TensorRT-LLM's hint":   {"trtllm", "header", "/v1/completions", `{"model":"demo","prompt":"x","disaggregated_params":{"route_hint":{"dp_rank":1},"a":1}}`, `{"model":"demo","prompt":"x"}`},
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

// TensorRT-LLM learns a conversation by the header that it reads, whatever named it to Kvlane, and its
// bodies get no field that a version of it refuses. Other engines get nothing.
func TestConversationsOfTensorRTLLM(t *testing.T) {
	const plain = `{"model":"demo","prompt":"x"}`
	for name, c := range map[string]struct{ engine, body, header, id, want string }{
		"by header":      {"trtllm", plain, "x-claude-code-session-id", "c1", "c1"},
		"its own header": {"trtllm", plain, "x-session-id", "c1", "c1"},
		"its own field":  {"trtllm", `{"model":"demo","prompt":"x","conversation_params":{"conversation_id":"own"}}`, "x-session-id", "c1", "own"},
		"none":           {"trtllm", plain, "x-other", "c1", ""},
		"line feed":      {"trtllm", `{"model":"demo","prompt":"x","prompt_cache_key":"a\nb"}`, "x-other", "c1", ""},
		"not ASCII":      {"trtllm", `{"model":"demo","prompt":"x","prompt_cache_key":"ä"}`, "x-other", "c1", ""},
		"long":           {"trtllm", plain, "thread-id", strings.Repeat("c", 257), ""},
		"vLLM":           {"vllm", plain, "x-claude-code-session-id", "c1", ""},
		"SGLang":         {"sglang", plain, "x-claude-code-session-id", "c1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := worker("a", 2)
			w.Engine = c.engine
			b := newBench(t, "", w)
			d, _ := b.ask("/v1/completions", c.body, c.header, c.id)
			got := ""
			for _, h := range d.Set {
				if h.Name == "x-session-id" {
					got += h.Value
				}
			}
			if d.Reject != nil || got != c.want || d.Body != nil {
				t.Errorf("got conversation %q, body %s, %+v; want %q and an unchanged body", got, d.Body, d.Reject, c.want)
			}
			end(&d, 200)
		})
	}
}

// A client's disaggregated_params are removed from a request that is not split; its conversation is not lost with them.
func TestALocalRequestKeepsItsConversation(t *testing.T) {
	p := newPoolsWith(t, "trtllm", "routing: {disagg: {mode: 'off'}}\n")
	p.list[0].Engine = "trtllm"
	p.Fleet().SetWorkers(p.list)
	d := p.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions",
		Body: []byte(`{"prompt":"x","disaggregated_params":{"request_type":"context_only","conversation_id":"c1"}}`)})
	defer end(&d, 200)
	if got, want := string(d.Body), `{"prompt":"x"}`; d.Reject != nil || got != want || !slices.Contains(d.Set, extproc.Header{Name: "x-session-id", Value: "c1"}) {
		t.Errorf("got body %s, headers %v, %+v; want %s and x-session-id: c1", got, d.Set, d.Reject, want)
	}
}

// An id in the body that names hosts is replaced even without a connector: the engine may
// run one that Kvlane does not know of.
func TestNoRequestIDInTheBodyNamesAHost(t *testing.T) {
	for id, stays := range map[string]bool{"an_id_of_a_client_that_knows": true, "short": false, `\u005f__prefill_addr_evil:1___decode_addr_evil:1_0`: false} {
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

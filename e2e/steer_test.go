package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// SGLang reads ranks from the body: it must have the picked one and no other.
func TestARankInTheBodyIsThePickedOne(t *testing.T) {
	bodies := map[string]string{
		"generate":       `{"text":%q,"sampling_params":{"max_new_tokens":2}}`,
		"generate, rank": `{"routed_dp_rank":3,"text":%q,"sampling_params":{"max_new_tokens":2}}`,
		"generate, old":  `{"text":%q,"data_parallel_rank": 3 ,"sampling_params":{"max_new_tokens":2}}`,
		"generate, both": `{"routed\u005fdp_rank":3,"data_parallel_rank":2,"text":%q,"routed_dp_rank":1}`,
		"no such rank":   `{"routed_dp_rank":99,"text":%q}`,
		"null":           `{"routed_dp_rank":null,"text":%q}`,
		"completions":    `{"model":"demo","routed_dp_rank":3,"prompt":%q,"max_tokens":2}`,
	}
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		t.Run(mode, func(t *testing.T) {
			b := newBed(t, shape{engines: 1, ranks: 4, otherwise: true, envoy: ", request_body: " + mode, worker: ", engine: sglang", model: ", engine: sglang",
				engine: func(_ int, o *enginesim.Options) { o.Engine = enginesim.SGLang }})
			ranks := map[int]bool{}
			for name, body := range bodies {
				path := "/generate"
				if name == "completions" {
					path = "/v1/completions"
				}
				for i := range 4 {
					r := b.post(path, fmt.Appendf(nil, body, prose(fmt.Sprint(mode, name, i), 40)), "x-override-routed-dp-rank", "2")
					worker, rec, ok := b.seen(r.header.Get("X-Request-Id"))
					if !ok || r.status != http.StatusOK {
						t.Fatalf("%s: status %d: %s", name, r.status, r.body)
					}
					if served := fmt.Sprintf("%s/%d", worker, rec.Rank); r.target != served || !rec.Pinned {
						t.Errorf("%s: decided for %s, served by %s, pinned %v", name, r.target, served, rec.Pinned)
					}
					if rec.Headers["x-override-routed-dp-rank"] != "" {
						t.Errorf("%s: a header that steers SGLang reached it", name)
					}
					ranks[rec.Rank] = true
				}
			}
			if len(ranks) != 4 {
				t.Errorf("ranks used: %v", ranks)
			}
		})
	}
}

// If the engine chooses the rank, clients cannot.
func TestNoRankInTheBodyWhereTheEngineChooses(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, rankFree: true, otherwise: true, worker: ", engine: sglang", model: ", engine: sglang",
		engine: func(_ int, o *enginesim.Options) { o.Engine, o.Ranks = enginesim.SGLang, 2 }})
	for i := range 4 {
		for _, field := range []string{"routed_dp_rank", "data_parallel_rank"} {
			r := b.post("/generate", fmt.Appendf(nil, `{%q:1,"text":%q}`, field, prose(fmt.Sprint(field, i), 30)))
			if _, rec, ok := b.seen(r.header.Get("X-Request-Id")); !ok || rec.Pinned || r.status != http.StatusOK {
				t.Errorf("%s: status %d, pinned %v: %s", field, r.status, rec.Pinned, r.body)
			}
		}
	}
}

// Headers that control Kvlane do not reach workers.
func TestControlHeadersNeverReachAWorker(t *testing.T) {
	for _, trusted := range []bool{true, false} {
		t.Run(fmt.Sprint("trusted ", trusted), func(t *testing.T) {
			b := newBed(t, shape{config: fmt.Sprintf("routing: {trust_overrides: %v, objectives: {batch: 1}}\n", trusted)})
			headers := []string{"x-envoy-original-path", "/evil", "x-envoy-original-host", "evil", "x-envoy-original-dst-host", "1.1.1.1:1", "x-prefiller-url", "http://evil",
				"x-kv-cache-source-host-port", "evil:1", "x-prefiller-host-port", "evil:1", "x-encoder-hosts-ports", "evil:1", "x-data-parallel-host-port", "evil:1", "x-kvlane-endpoint", "evil:1", "x-gateway-destination-endpoint-subset", "evil:1", "x-override-temperature", "2", "x-kvlane-pin", "e0", "x-kvlane-exclude", "e1", "x-kvlane-priority", "1", "x-gateway-inference-objective", "batch", "x-llm-d-inference-objective", "batch", "x-slo-ttft-ms", "60000"}
			r := b.post("/v1/completions", completionBody("control", 1), headers...)
			_, rec, ok := b.seen(r.header.Get("X-Request-Id"))
			if !ok || r.status != http.StatusOK {
				t.Fatalf("status %d: %s", r.status, r.body)
			}
			for i := 0; i < len(headers); i += 2 {
				if v := rec.Headers[headers[i]]; v != "" {
					t.Errorf("%s: %s reached the worker", headers[i], v)
				}
			}
		})
	}
}

// A request goes to a worker of its model or to none.
func TestARequestGoesToAWorkerOfItsModel(t *testing.T) {
	b := newBed(t, shape{ranks: 1, models: func(i int) string { return [...]string{modelName, "other"}[i] },
		engine: func(i int, o *enginesim.Options) {
			if i == 1 {
				o.Model = "other"
			} else {
				o.LoRA = []string{"sql"} // listed in /v1/models only
			}
		}})
	seen := func() (n int) {
		for _, e := range b.engines {
			n += len(e.Stats().Requests)
		}
		return n
	}
	for i := range 4 {
		for model, want := range map[string]string{"demo": "e0/0", "other": "e1/0", "sql": "e0/0"} {
			r := b.post("/v1/completions", fmt.Appendf(nil, `{"model":%q,"prompt":%q,"max_tokens":1}`, model, prose(fmt.Sprint(model, i), 30)))
			if r.status != http.StatusOK || r.target != want {
				t.Errorf("%s: status %d on %s, want %s: %s", model, r.status, r.target, want, r.body)
			}
		}
	}
	before := seen()
	for name, c := range map[string]struct {
		path, body string
		status     int
		part       string
	}{
		"unknown":           {"/v1/chat/completions", `{"model":"nope","messages":[{"role":"user","content":"x"}]}`, 404, `"code":"model_not_found"`},
		"unknown, streamed": {"/v1/completions", `{"model":"nope","prompt":"x","stream":true}`, 404, `"code":"model_not_found"`},
		"none":              {"/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]}`, 400, `"param":"model"`},
		"none, SGLang's":    {"/generate", `{"text":"x"}`, 400, `"param":"model"`},
		"Anthropic's shape": {"/v1/messages", `{"model":"nope","max_tokens":1,"messages":[{"role":"user","content":"x"}]}`, 404, `"type":"error"`},
	} {
		r := b.post(c.path, []byte(c.body))
		for _, part := range []string{c.part, "`demo`", "`other`"} {
			if r.status != c.status || !strings.Contains(string(r.body), part) {
				t.Errorf("%s: status %d, want %d with %s: %s", name, r.status, c.status, part, r.body)
			}
		}
	}
	if after := seen(); after != before {
		t.Errorf("%d of the requests without a known model reached an engine", after-before)
	}
	// Envoy's observing filter and its access log reported these answers too.
	last := b.post("/v1/completions", []byte(`{"model":"demo","prompt":"after them","max_tokens":1}`))
	b.until("the access log to come", func() bool {
		var entry struct {
			After struct {
				Outcome *struct{} `json:"outcome"`
			} `json:"after"`
		}
		b.getJSON("/debug/decisions/"+last.header.Get("X-Request-Id"), &entry)
		return entry.After.Outcome != nil
	})
	if n := b.metric("kvlane_extproc_failures_total", `kind="unknown_request"`); n != 0 {
		t.Errorf("%v answers of Kvlane's own were taken for requests that never came", n)
	}
}

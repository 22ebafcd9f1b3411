package enginesim

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// A recording of vLLM 0.32 or SGLang 0.5.23 is replayed to the simulated engine: every
// request that names its rank, sent sequentially, must have as many cached tokens as on the
// real engine, and the same resets must be refused and accepted.
func TestAgainstRecordings(t *testing.T) {
	dir := filepath.Join(shared(t), "data", "engine-truth")
	vllm := Options{Model: "tiny", Ranks: 2, BlockSize: 32, Blocks: 64, MaxModelLen: 1024}
	lora := vllm
	lora.LoRA, lora.Blocks = []string{"alpha", "beta"}, 33
	sglang := Options{Engine: SGLang, Model: "tiny", Ranks: 2, BlockSize: 16, Blocks: 96, MaxModelLen: 1024}
	for file, o := range map[string]Options{
		"vllm_00_basics.jsonl.gz": vllm, "vllm_02_salt_reset_session.jsonl.gz": vllm, "vllm_04_replay.jsonl.gz": vllm, "vllm_08_lora.jsonl.gz": lora,
		"sglang_00_basics.jsonl.gz": sglang, "sglang_02_salt_flush.jsonl.gz": sglang, "sglang_04_replay.jsonl.gz": sglang,
	} {
		t.Run(file, func(t *testing.T) {
			type record struct {
				Kind    string            `json:"kind"`
				Flags   string            `json:"flags"`
				Method  string            `json:"method"`
				Path    string            `json:"path"`
				Label   string            `json:"label"`
				Headers map[string]string `json:"headers"`
				Body    string            `json:"body"`
				Status  int               `json:"status"`
				Sent    float64           `json:"t_sent"`
				End     float64           `json:"t"`
				Resp    json.RawMessage   `json:"resp"`
			}
			var recs []record
			jsonLines(t, filepath.Join(dir, file), func(line []byte) {
				var r record
				if err := json.Unmarshal(line, &r); err != nil {
					t.Fatal(err)
				}
				recs = append(recs, r)
			})
			e := start(t, o)
			overlaps := func(i int) bool {
				for j, r := range recs {
					if j != i && r.Kind == "http" && r.Method == http.MethodPost && r.Sent < recs[i].End && r.End > recs[i].Sent {
						return true
					}
				}
				return false
			}
			compared, differ := 0, 0
			for i, r := range recs {
				if r.Kind != "http" || r.Method != http.MethodPost || overlaps(i) {
					continue
				}
				switch {
				case strings.HasPrefix(r.Path, "/reset_prefix_cache"):
					a := post(t, e.URL()+r.Path, "")
					if strings.Contains(string(a.raw), "true") != strings.Contains(string(r.Resp), "true") {
						t.Errorf("%s: %s, the engine said %s", r.Path, a.raw, r.Resp)
					}
				case r.Path == "/flush_cache":
					if a := post(t, e.URL()+r.Path, ""); a.status != r.Status {
						t.Errorf("flush: %d, the engine's %d", a.status, r.Status)
					}
				case strings.HasPrefix(r.Path, "/v1/completions") || strings.HasPrefix(r.Path, "/v1/chat/completions"):
					headers := make([]string, 0, 2*len(r.Headers))
					for k, v := range r.Headers {
						headers = append(headers, k, v)
					}
					a := post(t, e.URL()+r.Path, r.Body, headers...)
					var real answer
					if a.status != r.Status {
						t.Errorf("%s %q: status %d, the engine's %d: %s / %s", r.Path, r.Label, a.status, r.Status, a.raw, r.Resp)
					}
					if json.Unmarshal(r.Resp, &real.body) != nil || r.Status != 200 || r.Headers["X-data-parallel-rank"]+r.Headers["X-Data-Parallel-Rank"] == "" {
						continue
					}
					compared++
					if a.cached() != real.cached() || a.body.Usage.Prompt != real.body.Usage.Prompt || a.body.Usage.Completion != real.body.Usage.Completion {
						differ++
						t.Errorf("%q: usage %+v, the engine's %+v; body %.300s", r.Label, a.body.Usage, real.body.Usage, r.Body)
					}
				}
			}
			if compared == 0 {
				t.Error("nothing compared")
			}
			t.Logf("%d requests compared, %d differ", compared, differ)
		})
	}
}

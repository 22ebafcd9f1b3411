package replay

import (
	"bytes"
	"io"
	"testing"
)

// FuzzTraces reads arbitrary traces: invalid ones are errors, valid ones give the same
// requests twice.
func FuzzTraces(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}` + "\n" +
		`{"timestamp": 3000, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 2, 4]}`))
	f.Add([]byte(`{"start_time_unix_nano": 1, "attributes": {"gen_ai.conversation.id": "a", "gen_ai.usage.input_tokens": 200}}`))
	f.Add([]byte(`{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "3", "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "70"}}]}]}]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<12 {
			return
		}
		for _, read := range []func(io.Reader, float64, float64) (Workload, error){ReadMooncake, ReadOTel} {
			w, err := read(bytes.NewReader(data), 1, 0)
			if err != nil {
				continue
			}
			a, b := w.Generate(1), w.Generate(1)
			for i := range a {
				if a[i].At != b[i].At || a[i].Prompt < 1 || len(a[i].Blocks)*w.BlockSize > a[i].Prompt {
					t.Fatalf("request %+v and %+v", a[i], b[i])
				}
			}
		}
	})
}

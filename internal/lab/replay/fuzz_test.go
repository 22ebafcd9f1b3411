package replay

import (
	"bytes"
	"io"
	"path"
	"testing"
)

// FuzzTraces reads arbitrary traces: invalid ones are errors, valid ones give the same
// requests twice.
func FuzzTraces(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}` + "\n" +
		`{"timestamp": 3000, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 2, 4]}`))
	f.Add([]byte(`{"start_time_unix_nano": 1, "attributes": {"gen_ai.conversation.id": "a", "gen_ai.usage.input_tokens": 200}}`))
	f.Add([]byte(`{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "3", "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "70"}}]}]}]}]}`))
	f.Add([]byte("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:03.98,4000,10\n7,300,44\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<12 {
			return
		}
		for _, read := range []func(io.Reader, float64, float64) (Workload, error){ReadMooncake, ReadOTel, ReadCSV} {
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

// A scenario that is valid can be prepared, with bounds that let its simulation end.
func FuzzScenario(f *testing.F) {
	files, err := scenarioFiles.ReadDir("scenarios")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		text, err := scenarioFiles.ReadFile(path.Join("scenarios", file.Name()))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte("fleet: {workers: 2}\nworkload: {skew: {clients: .nan}}"))
	f.Add([]byte("workload: &w {siblings: {background: 1}}\ncases: [{workload: *w}]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 1<<14 {
			return
		}
		s, err := parseScenario("f", text)
		if err != nil {
			return
		}
		for i := range s.Cases {
			o, err := s.Options(&s.Cases[i], func(float64) (Workload, error) { return Workload{BlockSize: 16}, nil })
			if err != nil {
				t.Fatalf("%q: got %v of a valid scenario", text, err)
			}
			if n := o.Fleet.Workers * o.Fleet.Ranks; n < 1 || n > mostRanks || o.Fleet.Prefill >= o.Fleet.Workers {
				t.Fatalf("%q: got fleet %+v, want 1 to %d ranks", text, o.Fleet, mostRanks)
			}
		}
	})
}

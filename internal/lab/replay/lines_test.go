package replay

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const threeRequests = `{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 5000, "input_length": 1700, "output_length": 0, "hash_ids": [1, 2, 7, 8]}
{"timestamp": 9000, "input_length": 600.0, "output_length": 1}
`

// All forms of a trace give the same trace.
func TestFormsOfATrace(t *testing.T) {
	want, err := ReadMooncake(strings.NewReader(threeRequests), 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(threeRequests), "\n")
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := io.WriteString(z, threeRequests); err != nil || z.Close() != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"a.jsonl": "\n\n" + strings.Join(lines, "\n\n"), "b.jsonl": strings.Join(lines, "\r\n") + "\r\n", "c.jsonl": "\ufeff" + threeRequests,
		"d.jsonl": strings.Join([]string{lines[2], lines[0], lines[1]}, "\n"), "e.jsonl": packed.String(), "f.gz": threeRequests,
	} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		f := &flags{trace: path, format: "mooncake"}
		got, err := f.reader()(1)
		if err != nil || fmt.Sprint(got.Generate(1)) != fmt.Sprint(want.Generate(1)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A file of another format than --format says: the error names the formats.
func TestErrorsOfATraceNameTheFormats(t *testing.T) {
	for format, text := range map[string]string{"mooncake": "a,b,c\n1,2,3\n", "otel": `{"timestamp": 1, "input_length": 600, "output_length": 5}`, "csv": `{"timestamp": 1}`} {
		path := filepath.Join(t.TempDir(), "trace")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := Command([]string{"--trace", path, "--format", format}, io.Discard, io.Discard)
		for _, want := range []string{path, "as --format " + format, "mooncake, lines", "input_length", "otel, lines", "csv, tables", "Azure or BurstGPT"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("--format %s: got %v, want %q", format, err, want)
			}
		}
	}
}

// Errors of a trace name the line.
func TestErrorsOfATrace(t *testing.T) {
	good := `{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}` + "\n\n"
	for line, want := range map[string]string{
		`{"input_length": 600, "output_length": 5}`:                                        "no timestamp",
		`{"timestamp": 1, "output_length": 5}`:                                             "no input_length",
		`{"timestamp": 1, "input_length": 600}`:                                            "no output_length",
		`{"timestamp": -1, "input_length": 600, "output_length": 5}`:                       "timestamp -1: want 0 to 1e+13 ms",
		`{"timestamp": "1", "input_length": 600, "output_length": 5}`:                      "timestamp: string does not fit",
		`{"timestamp": 1, "input_length": 0, "output_length": 5}`:                          "input_length 0: want 1 to 16777216",
		`{"timestamp": 1, "input_length": 600.5, "output_length": 5}`:                      "600.5: want a whole number of tokens",
		`{"timestamp": 1, "input_length": 600, "output_length": -5}`:                       "output_length -5: want 0 to 16777216",
		`{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [-1]}`:      "hash_ids: number -1 does not fit",
		`{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2, 3]}`: "3 hash_ids for 600 tokens, which have 2 blocks of 512",
		`[1]`:                       "a JSON array, want one object a line",
		`{"timestamp": 1, `:         "not a JSON object: unexpected end of JSON input",
		strings.Repeat(" ", 17<<20): "longer than 16 MiB",
	} {
		_, err := ReadMooncake(strings.NewReader(good+line), 1, 0)
		if err == nil || err.Error() != "trace, line 3: "+want {
			t.Errorf("%.100s: %v", line, err)
		}
	}
	for line, want := range map[string]string{
		`{"start_time_unix_nano": 1.5, "gen_ai.usage.input_tokens": 5}`:                     "start: 1.5: want a whole number",
		`{"start_time_unix_nano": 1, "gen_ai.usage.input_tokens": "many"}`:                  "gen_ai.usage.input_tokens: many: want a whole number",
		`{"start_time_unix_nano": null, "gen_ai.usage.input_tokens": 5}`:                    "no start_time_unix_nano",
		`{"start_time_unix_nano": 1, "attributes": "none", "gen_ai.usage.input_tokens": 5}`: "attributes: string does not fit",
		`{"start_time_unix_nano": 1, "gen_ai.usage.input_tokens": 1e9}`:                     "1000000000 input and 0 output tokens: want 1 to 16777216 and 0 to 16777216",
	} {
		if _, err := ReadOTel(strings.NewReader(line), 1, 0); err == nil || err.Error() != "spans, line 1: "+want {
			t.Errorf("%s: %v", line, err)
		}
	}
	w, err := ReadOTel(strings.NewReader(`{"start_time_unix_nano": 1.763e18, "gen_ai.usage.input_tokens": 300.0}
{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1763000001000000000", "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"doubleValue": 200}}]}]}]}]}`), 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	if r := w.Generate(1); len(r) != 2 || r[0].Prompt != 300 || r[1].Prompt != 200 || r[1].At != 1 {
		t.Errorf("numbers as floats: %+v", r)
	}
}

// A flag's error names the flag and the values that it accepts.
func TestErrorsOfFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--workers 0": "--workers 0: must be at least 1", "--ranks -1": "--ranks -1: must be at least 1", "--workers x": `--workers "x": want a whole number`,
		"--seed -1": `--seed "-1": want a whole number from 0 on`, "--event-loss x": `--event-loss "x": want a number`, "--event-loss NaN": "--event-loss NaN: a part, 0 to 1",
		"--coupled=x": `--coupled "x": want true or false`, "--arrival-jitter x": `--arrival-jitter "x": want a time like 10ms or 0.01`, "--nope": "no flag --nope (kvlane replay --help shows them)",
		"--workers": "--workers needs a value", "--replicas 100000": "--replicas 100000: must be 1 to 1000", "--rows L1": "--rows are those of --acceptance",
		"--workers 1000 --ranks 1000": "1000 workers with 1000 ranks each: a fleet has 100000 ranks at most", "--capacity 10": "does not fit into a rank's KV cache of 10 tokens (--capacity)",
	} {
		err := Command(append([]string{"--format", "generated", "--scenario", "no-reuse", "--seeds", "1", "--policies", "kv-aware"}, strings.Fields(args)...), io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
}

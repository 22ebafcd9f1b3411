package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOTel(t *testing.T) {
	lines := `{"start_time_unix_nano": 3000000000, "attributes": {"gen_ai.conversation.id": "a", "gen_ai.usage.input_tokens": 400, "gen_ai.usage.output_tokens": 5}}
{"start_time_unix_nano": 1000000000, "gen_ai.conversation.id": "a", "gen_ai.usage.input_tokens": 200, "gen_ai.usage.output_tokens": 5}
{"start_time_unix_nano": 2000000000, "gen_ai.usage.input_tokens": 200, "gen_ai.usage.output_tokens": 5}
`
	w, err := ReadOTel(strings.NewReader(lines), 2, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := w.Generate(1)
	if len(r) != 3 || r[0].At != 0 || r[1].At != 0.5 || r[2].At != 1 {
		t.Fatalf("arrivals %v", r)
	}
	first, other, second := r[0].Blocks, r[1].Blocks, r[2].Blocks
	if len(first) != 3 || len(second) != 6 || second[2] != first[2] || other[0] == first[0] {
		t.Errorf("blocks %v, %v, %v", first, other, second)
	}
	if _, err := ReadOTel(strings.NewReader("{}"), 1, 0); err == nil {
		t.Error("a span without tokens was accepted")
	}
}

func TestPolicySettings(t *testing.T) {
	p, err := PolicyByName("kv-aware?cost.miss=4&pick.ties=lowest&cap.fairShare=true")
	if err != nil {
		t.Fatal(err)
	}
	got := &p.Config.Policy
	if got.Cost.Miss != 4 || got.Cost.Active != 1000 || got.Pick.Ties != "lowest" || !got.Cap.FairShare {
		t.Errorf("policy %+v", got)
	}
	for _, bad := range []string{"kv-aware?cost.mis=4", "kv-aware?cost.miss=much", "none?cost.miss=4"} {
		if _, err := PolicyByName(bad); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
	for _, name := range Sweep() {
		if _, err := PolicyByName(name); err != nil {
			t.Error(err)
		}
	}
}

func TestCommand(t *testing.T) {
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace.jsonl")
	var lines strings.Builder
	for i := range 40 {
		line, err := json.Marshal(map[string]any{"timestamp": 100 * i, "input_length": 2000, "output_length": 20, "hash_ids": []int{0, 1, 2 + i, 100 + i}})
		if err != nil {
			t.Fatal(err)
		}
		lines.Write(line)
		lines.WriteByte('\n')
	}
	if err := os.WriteFile(trace, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	page, data := filepath.Join(dir, "r.html"), filepath.Join(dir, "r.json")
	var out bytes.Buffer
	err := Command([]string{"-trace", trace, "-policies", "kv-aware,round-robin", "-workers", "2", "-ranks", "2", "-coupled", "-seeds", "2",
		"-replicas", "2", "-share-delay", "0.01", "-event-delay", "0.1", "-report", page, "-json", data}, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if s := out.String(); !strings.Contains(s, "round-robin") || !strings.Contains(s, "4 ranks, 2 seeds") {
		t.Errorf("table:\n%s", s)
	}
	html, err := os.ReadFile(page)
	if err != nil || strings.Count(string(html), "<rect") != 8 {
		t.Errorf("page: %v\n%s", err, html)
	}
	raw, err := os.ReadFile(data)
	if err != nil {
		t.Fatal(err)
	}
	var report Report
	if err := json.Unmarshal(raw, &report); err != nil || len(report.Rows) != 2 || len(report.Rows[0].Runs) != 2 {
		t.Errorf("report %+v: %v", report, err)
	}
	for _, bad := range [][]string{{"-seeds", "0"}, {"-format", "csv"}, {"-trace", filepath.Join(dir, "none")}, {"-format", "generated", "-scenario", "x"},
		{"-format", "generated", "-engine", "x"}} {
		if err := Command(bad, io.Discard, io.Discard); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}

func TestChecksThatFail(t *testing.T) {
	var b strings.Builder
	failed, err := WriteChecks(&b, []Check{atMost("a", 2, 1), atLeast("b", 2, 1), atLeast("c", 0, 1)})
	if err != nil || failed != 2 || strings.Count(b.String(), "FAILED") != 2 {
		t.Errorf("%d failed, %v\n%s", failed, err, b.String())
	}
	// A single seed of L1 alone: whatever the outcome, it is the table's last word.
	err = Command([]string{"-acceptance", "-rows", "L13", "-seeds", "1"}, &b, io.Discard)
	if err != nil && !errors.Is(err, ErrChecksFailed) {
		t.Error(err)
	}
}

func BenchmarkTrace64Ranks(b *testing.B) {
	needTrace(b)
	in, err := openTrace()
	if err != nil {
		b.Fatal(err)
	}
	defer in.Close()
	w, err := ReadMooncake(in, 1, -1)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := Run(Options{Workload: w, Fleet: eightByEight(), Policies: []string{"kv-aware"}, Seeds: []uint64{1}}); err != nil {
			b.Fatal(err)
		}
	}
}

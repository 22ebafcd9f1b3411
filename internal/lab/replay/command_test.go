package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
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
	if w, err = ReadOTel(strings.NewReader(lines+`{"start_time_unix_nano": 5, "attributes": {"http.method": "GET"}}`), 1, 0); err != nil || len(w.Generate(1)) != 3 {
		t.Errorf("a span of something else: %v", err)
	}
	if _, err = ReadOTel(strings.NewReader(`{"gen_ai.usage.input_tokens": 200}`), 1, 0); err == nil || !strings.Contains(err.Error(), "line 1: no start_time_unix_nano") {
		t.Errorf("a span without a start: %v", err)
	}
	if _, err = ReadMooncake(strings.NewReader(`{"timestamp": 1e300, "input_length": 10, "output_length": 1, "hash_ids": [1]}`), 1, 0); err == nil || !strings.Contains(err.Error(), "line 1: timestamp 1e+300: want 0 to 1e+13 ms") {
		t.Errorf("a time that no trace has: %v", err)
	}
	// The same from OTLP's file exporter, which writes 64-bit numbers as strings; it also
	// has spans of other kinds.
	kv := func(key, kind, value string) string {
		return fmt.Sprintf(`{"key": %q, "value": {%q: %q}}`, key, kind, value)
	}
	turn := func(start, input string) string {
		return `{"startTimeUnixNano": "` + start + `", "attributes": [` + kv("session.id", "stringValue", "a") + "," +
			kv("gen_ai.usage.prompt_tokens", "intValue", input) + "," + kv("gen_ai.usage.completion_tokens", "intValue", "5") + `]}`
	}
	otlp := `{"resourceSpans": [{"scopeSpans": [{"spans": [` + turn("3000000000", "400") + `, {"startTimeUnixNano": "5", "attributes": []}]}]}]}` + "\n\n" +
		`{"resourceSpans": [{"scopeSpans": [{"spans": [` + turn("1000000000", "200") + `]}]}]}`
	if w, err = ReadOTel(strings.NewReader(otlp), 1, 0); err != nil {
		t.Fatal(err)
	}
	r = w.Generate(1)
	if len(r) != 2 || r[1].At != 2 || r[1].Prompt != 400 || r[1].Output != 5 || r[1].Conversation != "a" || r[1].Blocks[2] != r[0].Blocks[2] {
		t.Errorf("OTLP: %+v", r)
	}
	for _, bad := range []string{"{}", "", "x", `{"start_time_unix_nano": "soon", "gen_ai.usage.input_tokens": 4}`, `{"resourceSpans": []}`,
		`{"gen_ai.usage.input_tokens": "many"}`, `{"gen_ai.usage.input_tokens": -4}`} {
		if _, err := ReadOTel(strings.NewReader(bad), 1, 0); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestPolicySettings(t *testing.T) {
	p, err := PolicyByName("kv-aware?cost.miss=4&pick.ties=lowest&cap.fair_share=true")
	if err != nil {
		t.Fatal(err)
	}
	got := &p.Config.Policy
	if got.Cost.Miss != 4 || got.Cost.Active != 1000 || got.Pick.Ties != "lowest" || !got.Cap.FairShare {
		t.Errorf("policy %+v", got)
	}
	for _, bad := range []string{"kv-aware?cost.mis=4", "kv-aware?cost.miss", "kv-aware?firstTurn.slack=1", "kv-aware?cost.miss=much", "none?cost.miss=4"} {
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
	if s := out.String(); !strings.Contains(s, "round-robin") || !strings.Contains(s, "ranks: 4, seeds: 2") {
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
		{"-format", "generated", "-engine", "x"}, {"-trace", trace, "-json", filepath.Join(dir, "none", "r.json")}, {"-trace", trace, "-replicas", "0"},
		{"-trace", trace, "-event-delay", "-1s"}, {"-trace", trace, "-policies", "kv-aware?cost.miss=-1"}} {
		if err := Command(bad, io.Discard, io.Discard); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}

func TestChecksThatFail(t *testing.T) {
	one, two := 1.0, 2.0
	var b strings.Builder
	failed, err := WriteOutcomes(&b, []Outcome{{Measured: 2, AtMost: &one}, {Measured: 2, AtLeast: &one}, {Measured: 0, AtLeast: &two}, {Measured: 9}})
	if err != nil || failed != 2 || strings.Count(b.String(), "FAILED") != 2 {
		t.Errorf("%d failed, %v\n%s", failed, err, b.String())
	}
	// The exit code: for a row that cannot hold, and one that needs a trace.
	path := filepath.Join(t.TempDir(), "x.yaml")
	err = os.WriteFile(path, []byte("row: L0\nworkload: {one_shot: {tenants: 1, own: 100, output: 5, per_second: 1}}\nfleet: {workers: 2}\n"+
		"checks: [{what: impossible, policy: random, figure: hit, at_least: 2}]\n"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	s, err := LoadScenario(path)
	if err != nil {
		t.Fatal(err)
	}
	a := Acceptance{Scenarios: []*Scenario{s}, Seeds: []uint64{1}}
	if outcomes, _, err := a.Run(); err != nil || len(outcomes) != 1 || outcomes[0].OK() {
		t.Errorf("%+v, %v", outcomes, err)
	}
	b.Reset()
	if err := Command([]string{"-acceptance", "-scenario", path, "-seeds", "1"}, &b, io.Discard); !errors.Is(err, ErrChecksFailed) || !strings.Contains(b.String(), "L0  impossible") {
		t.Errorf("a scenario's own checks: %v\n%s", err, b.String())
	}
	b.Reset()
	if err := Command([]string{"-acceptance", "-rows", "L4,L9"}, &b, io.Discard); err != nil || !strings.Contains(b.String(), "want of a trace (--trace): L4, L9") {
		t.Errorf("%v\n%s", err, b.String())
	}
}

func TestScenarios(t *testing.T) {
	list, err := Scenarios()
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]bool{}
	for _, s := range list {
		rows[s.Row] = true
		if len(s.Checks) == 0 || s.Title == "" || len(s.Policies) == 0 || s.Policies[0] != "kv-aware" && s.Policies[0] != "pools" {
			t.Errorf("%s: %d checks, title %q, policies %v", s.Name, len(s.Checks), s.Title, s.Policies)
		}
	}
	for n := 1; n <= 15; n++ {
		if !rows[fmt.Sprint("L", n)] {
			t.Errorf("no scenario for L%d", n)
		}
	}
	var b strings.Builder
	if err := Command([]string{"-scenario", "list"}, &b, io.Discard); err != nil || strings.Count(b.String(), "\n") != len(list) {
		t.Errorf("%v\n%s", err, b.String())
	}
	dir := t.TempDir()
	for name, text := range map[string]string{
		"two workloads":    "workload: {trace: {load: 1}, one_shot: {tenants: 1}}\nfleet: {workers: 1}",
		"no workload":      "fleet: {workers: 1}",
		"no workers":       "workload: {trace: {load: 1}}",
		"unknown key":      "workload: {trace: {load: 1}}\nfleet: {workers: 1, size: 2}",
		"unknown engine":   "workload: {trace: {load: 1}}\nfleet: {workers: 1, engine: x}",
		"unknown figure":   "workload: {trace: {load: 1}}\nfleet: {workers: 1}\nchecks: [{policy: random, figure: x}]",
		"unknown policy":   "workload: {trace: {load: 1}}\nfleet: {workers: 1}\nchecks: [{policy: x, figure: hit}]",
		"unknown case":     "workload: {trace: {load: 1}}\nfleet: {workers: 1}\nchecks: [{case: x, policy: random, figure: hit}]",
		"negative workers": "workload: {trace: {load: 1}}\nfleet: {workers: -1}",
	} {
		path := filepath.Join(dir, "s.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadScenario(path); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// TestArguments: times and forms of a command line.
func TestArguments(t *testing.T) {
	f, err := parseFlags([]string{"--format", "generated", "--scenario", "tenants/overload", "--workers", "3", "--ranks", "2", "--seed", "7", "--seeds", "2",
		"--replicas", "4", "--share-delay", "10ms", "--event-delay", "0.5", "--policies", "session,random"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	o, err := f.options()
	if err != nil {
		t.Fatal(err)
	}
	want := Conditions{EventDelay: 0.5, Replicas: 4, ShareDelay: new(0.01)}
	if !reflect.DeepEqual(o.Conditions, want) || o.Fleet.Workers != 3 || o.Fleet.Ranks != 2 || o.Fleet.Engine.Capacity != 300_000 || fmt.Sprint(o.Seeds, o.Policies) != "[7 8] [session random]" {
		t.Errorf("%+v", o)
	}
	for jitter, want := range map[string]seconds{"": -1, "0": 0, "never": 0, "3s": 3, "250ms": 0.25} {
		args := []string{"--arrival-jitter", jitter}
		if jitter == "" {
			args = nil
		}
		if f, err := parseFlags(args, io.Discard); err != nil || f.jitter != want {
			t.Errorf("jitter %q: %v, %v", jitter, f.jitter, err)
		}
	}
	if f, err := parseFlags([]string{"--share-delay", "never"}, io.Discard); err != nil || f.share >= 0 {
		t.Errorf("never: %v", err)
	}
}

func TestVerdict(t *testing.T) {
	row := func(name string, p90, dev, throughput float64) Row {
		return Row{Policy: name, Mean: Result{TTFT90: p90, Throughput: throughput}, Deviation: Result{TTFT90: dev}}
	}
	for _, tc := range []struct {
		rows []Row
		want string
	}{
		{[]Row{row("kv-aware", 2, 0.1, 100), row("session", 3, 0.1, 100), row("oracle", 1, 0.1, 100)}, "Least TTFT p90: kv-aware, 2.00 s ± 0.10: the default, keep it."},
		{[]Row{row("kv-aware", 2, 0.1, 100), row("session", 1.9, 0.1, 100)}, "Least TTFT p90: session, 1.90 s ± 0.10; the default's 2.00 s ± 0.10 is not worse beyond the seeds' deviation: keep it."},
		{[]Row{row("kv-aware", 2, 0.1, 100), row("session", 1, 0.1, 100), row("random", 0.5, 0.1, 90)}, "Least TTFT p90: session, 1.00 s ± 0.10: 50 % less than the default's 2.00 s. In the configuration: routing: {preset: session}"},
		{[]Row{row("kv-aware", 2, 0.1, 100), row("llm-d", 1, 0.1, 100)}, "Least TTFT p90: llm-d, 1.00 s ± 0.10: 50 % less than the default's 2.00 s."},
		{[]Row{{Policy: "kv-aware", Mean: Result{TTFT90: 2}, Runs: make([]Result, 1)}, {Policy: "session", Mean: Result{TTFT90: 1}, Runs: make([]Result, 1)}},
			"Least TTFT p90: session, 1.00 s ± 0.00; the default has 2.00 s. One seed tells no deviation: run more."},
		{[]Row{row("kv-aware?cost.miss=6", 2, 0.1, 100), row("kv-aware?cost.miss=2", 1, 0.1, 100), row("session", 0.8, 0, 100)},
			"Least TTFT p90: session, 0.80 s ± 0.00: 60 % less than the default's 2.00 s. In the configuration: routing: {preset: session}\n" +
				"Best overlap weight: kv-aware?cost.miss=2, 1.00 s ± 0.10: 50 % less than the default's 2.00 s. In the configuration: routing: {preset: kv-aware, policy: {cost: {miss: 2}}}"},
	} {
		if got := strings.Join((&Report{Rows: tc.rows}).Verdict(), "\n"); got != tc.want {
			t.Errorf("got %s\nwant %s", got, tc.want)
		}
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
	s, err := LoadScenario("trace-speed")
	if err != nil {
		b.Fatal(err)
	}
	fleet, err := s.fleet(&s.Cases[0])
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := Run(Options{Workload: w, Fleet: fleet, Policies: []string{"kv-aware"}, Seeds: []uint64{1}}); err != nil {
			b.Fatal(err)
		}
	}
}

// TestWhatCannotRunIsSaidFirst: an error in the last policy is reported before any policy
// runs.
func TestWhatCannotRunIsSaidFirst(t *testing.T) {
	for args, want := range map[string]string{
		"--policies kv-aware,nonsense":                   `no policy "nonsense": there are compute-and-resident, `,
		"--gauntlet --families chat,nonsense":            `no family "nonsense": there are chat, `,
		"--policies kv-aware?flow.hold_tokens=-1":        `setting "flow.hold_tokens=-1": `,
		"--policies kv-aware?flow.fairness=none":         `setting "flow.fairness=none": `,
		"--policies kv-aware,kv-aware?cap.multiplier=-5": "kv-aware?cap.multiplier=-5: routing: policy.cap.multiplier: -5 is not within",
		"--load 0":             "--load 0: must be above 0",
		"--load -1":            "--load -1: must be above 0",
		"--load Inf":           "--load +Inf: must be above 0",
		"--load NaN":           "--load NaN: must be above 0",
		"--load 1e9":           "--load 1e+09: must be above 0, up to 1e+06",
		"--seeds 0":            "--seeds 0: must be 1 to 10000",
		"--seeds 2000000000":   "--seeds 2000000000: must be 1 to 10000",
		"--event-delay nan":    `--event-delay "nan": want a time like 10ms or 0.01`,
		"--event-replay -1s":   `--event-replay "-1s": want a time like`,
		"--arrival-jitter inf": `--arrival-jitter "inf": want a time like`,
		"--share-delay -3":     `--share-delay "-3": want a time like`,
	} {
		var out, progress strings.Builder
		err := Command(append([]string{"--format", "generated", "--seeds", "1"}, strings.Fields(args)...), &out, &progress)
		if err == nil || !strings.HasPrefix(err.Error(), want) || progress.String() != "" || out.String() != "" {
			t.Errorf("%s: %v, want %s; after %s%s", args, err, want, &progress, &out)
		}
	}
}

// flow.hold_tokens is a setting like those of routing.policy, and leaves what is not named.
func TestPoliciesTakeHoldTokens(t *testing.T) {
	for name, want := range map[string]int64{"kv-aware": 0, "kv-aware-flow": 8192, "kv-aware-flow?cost.miss=4": 8192,
		"kv-aware-flow?flow.hold_tokens=24576": 24576, "kv-aware-flow?flow.hold_tokens=100&cost.miss=4": 100, "kv-aware?flow.hold_tokens=1": 1} {
		p, err := PolicyByName(name)
		if err != nil || p.Config.Hold != want || strings.Contains(name, "miss") != (p.Config.Policy.Cost.Miss == 4) {
			t.Errorf("%s: got %d tokens, %+v, %v, want %d", name, p.Config.Hold, p.Config.Policy.Cost, err, want)
		}
	}
}

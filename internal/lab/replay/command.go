package replay

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// defaultPolicies are compared on a trace if none are named.
const defaultPolicies = "kv-aware,session,llm-d,kv-aware-trt,conversation-rank,first-turn-round-robin,compute-and-resident,min-wait,least-tokens,oracle"

// defaultScenario is the generated workload if none is named.
const defaultScenario = "skew"

// ErrChecksFailed is returned by Command when acceptance rows do not hold.
var ErrChecksFailed = errors.New("acceptance rows do not hold")

// seconds is a flag value like 10ms or 0.01; "never" is negative.
type seconds float64

func (s *seconds) String() string { return fmt.Sprintf("%gs", float64(*s)) }

func (s *seconds) Set(text string) error {
	if text == "never" {
		*s = -1
		return nil
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		var d time.Duration
		d, err = time.ParseDuration(text)
		v = d.Seconds()
	}
	if err != nil || !(v >= 0 && v <= mostSeconds) {
		return errors.New("want a time like 10ms or 0.01")
	}
	*s = seconds(v)
	return nil
}

// mostSeconds is a year, longer than any trace.
const mostSeconds = 366 * 24 * 3600

// flags are the command-line arguments.
type flags struct {
	set *flag.FlagSet

	trace, format, scenario, policies string
	sweep, acceptance, credit         bool
	rows                              string
	shape                             Shape
	load                              float64
	seed                              uint64
	seeds, replicas                   int
	jitter, share, delay, resend      seconds
	loss, skew                        float64
	jsonPath, htmlPath                string

	gauntlet, quick, heldOut bool
	families, results        string
}

// sections are the flags in the order of the help text.
var sections = []struct{ title, flags string }{
	{"What arrives", "trace format scenario load arrival-jitter"},
	{"What is compared", "policies sweep seed seeds"},
	{"The fleet", "workers ranks coupled prefill engine capacity budget device keep-output slow slow-known fail add"},
	{"What the router knows", "event-delay event-loss event-replay replicas skew share-delay share-credit"},
	{"Where it is written, besides the table", "report json"},
	{"All rules on all workloads", "gauntlet quick held-out families results"},
	{"The project's own measurements", "acceptance rows"},
}

func usage(s *flag.FlagSet) {
	out := s.Output()
	fmt.Fprint(out, `Runs a trace through the real router and index against simulated engines, and compares policies.

  kvlane replay --trace FILE --load 2.5               the default policies on a trace of Mooncake's format
  kvlane replay --trace FILE --format otel --sweep    which preset and which weight suits your own trace
  kvlane replay --scenario tenants/overload           a workload that ships with the project
  kvlane replay --scenario list                       all of these
  kvlane replay --gauntlet --quick                    every public rule on every family of workloads

A TIME is like 10ms, or seconds. Flags:
`)
	for _, section := range sections {
		fmt.Fprintf(out, "\n%s\n", section.title)
		for name := range strings.FieldsSeq(section.flags) {
			f := s.Lookup(name)
			value, text := flag.UnquoteUsage(f)
			if f.DefValue != "" && f.DefValue != "0" && f.DefValue != "false" && !strings.Contains(text, "(default") {
				text += " (default " + f.DefValue + ")"
			}
			fmt.Fprintf(out, "  %-22s %s\n", strings.TrimSpace("--"+name+" "+value), text)
		}
	}
}

// Flags returns the flags of Command, for lists of them.
func Flags() *flag.FlagSet { return newFlags().set }

func newFlags() *flags {
	f := &flags{set: flag.NewFlagSet("replay", flag.ContinueOnError), jitter: -1, share: -1}
	s := f.set
	s.SetOutput(io.Discard)
	s.StringVar(&f.trace, "trace", "", "trace `FILE`, .gz or plain")
	s.StringVar(&f.format, "format", "mooncake", "`FORMAT` of the trace: mooncake, otel or csv (Azure, BurstGPT); generated: no trace, a scenario of the project")
	s.StringVar(&f.scenario, "scenario", "", "`NAME` of a scenario of the project, NAME/CASE, or a .yaml file of your own; list shows them all")
	s.Float64Var(&f.load, "load", 0, "the trace arrives this many `TIMES` faster (default: the scenario's, else 1)")
	s.Var(&f.jitter, "arrival-jitter", "`TIME` over which arrivals are spread; never: as recorded (default: the trace's resolution, 3s for mooncake)")
	s.StringVar(&f.policies, "policies", "", "`LIST` of presets, with commas; settings as in kv-aware?cost.miss=4&first_turn.slack=2048, those of routing.policy and flow.hold_tokens")
	s.BoolVar(&f.sweep, "sweep", false, "compare presets and the weights of the default, and say which is best")
	s.Uint64Var(&f.seed, "seed", 1, "first seed `N`")
	s.IntVar(&f.seeds, "seeds", 5, "`NUMBER` of seeds; figures are means over them")
	s.IntVar(&f.shape.Workers, "workers", 0, "`NUMBER` of workers (default: the scenario's, else 8)")
	s.IntVar(&f.shape.Ranks, "ranks", 0, "`NUMBER` of data-parallel ranks of a worker (default: the scenario's, else 1)")
	s.BoolVar(&f.shape.Coupled, "coupled", false, "ranks of a worker step together, as with attention data parallelism")
	s.IntVar(&f.shape.Prefill, "prefill", 0, "the first `N` workers prefill, the others decode (policies pools, pools-threshold-4096, ...)")
	s.StringVar(&f.shape.Engine, "engine", "", "`MODEL` of an engine: d70, ds or h100 (default: the scenario's, else d70)")
	s.IntVar(&f.shape.Capacity, "capacity", 0, "KV cache of a rank in `TOKENS` (default: the scenario's, else 3000000)")
	s.IntVar(&f.shape.Budget, "budget", 0, "most `TOKENS` of a step (default: the engine's)")
	s.IntVar(&f.shape.Device, "device", 0, "`TOKENS` of the capacity on the device; the rest is on the host, 6.4 us a token to read back (default: all)")
	s.BoolVar(&f.shape.KeepOutput, "keep-output", false, "engines cache answers for the next turn")
	s.IntVar(&f.shape.Slow, "slow", 0, "the last `N` workers take twice as long")
	s.BoolVar(&f.shape.SlowKnown, "slow-known", false, "the router knows the speeds")
	s.Var((*seconds)(&f.shape.Fail), "fail", "`TIME` at which the last worker is lost; its requests start over elsewhere")
	s.Var((*seconds)(&f.shape.Add), "add", "`TIME` at which the last worker joins")
	s.Var(&f.delay, "event-delay", "`TIME` until events arrive (default: immediately)")
	s.Float64Var(&f.loss, "event-loss", 0, "`PART` of the event batches that is lost, 0 to 1")
	s.Var(&f.resend, "event-replay", "`TIME` until lost batches are replayed (default: never)")
	s.IntVar(&f.replicas, "replicas", 1, "`NUMBER` of routers that take requests in turn")
	s.Float64Var(&f.skew, "skew", 0, "`PART` of the requests that the first router gets, 0 to 1 (default: all take turns)")
	s.Var(&f.share, "share-delay", "`TIME` until replicas know each other's bookings and conversations (default: never)")
	s.BoolVar(&f.credit, "share-credit", false, "with --share-delay: replicas also share which prompts they sent where")
	s.StringVar(&f.htmlPath, "report", "", "write tables and charts to this HTML `FILE`")
	s.StringVar(&f.jsonPath, "json", "", "write all runs to this JSON `FILE`")
	s.BoolVar(&f.acceptance, "acceptance", false, "measure every acceptance row against its bound, those on the trace need --trace; with --scenario, its checks")
	s.BoolVar(&f.gauntlet, "gauntlet", false, "compare all public rules on all families of workloads, loads and fleets; with --trace, on that too")
	s.BoolVar(&f.quick, "quick", false, "fewer cells and 2 seeds: 2 minutes instead of 20")
	s.BoolVar(&f.heldOut, "held-out", false, "with the family that is left out of choosing; judge on --seed 101")
	s.StringVar(&f.families, "families", "", "`LIST` of families of the gauntlet, with commas (default: all)")
	s.StringVar(&f.results, "results", "", "`FOLDER` of finished cells, from which a gauntlet resumes")
	s.StringVar(&f.rows, "rows", "", "`LIST` of acceptance rows, with commas (default: all)")
	s.Usage = func() {}
	return f
}

func parseFlags(args []string, help io.Writer) (*flags, error) {
	f := newFlags()
	s := f.set
	if err := s.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			s.SetOutput(help)
			usage(s)
			return nil, err
		}
		return nil, UsageError{plainFlag(s, err)}
	}
	if err := f.check(); err != nil {
		return nil, UsageError{err}
	}
	// The trace's resolution (the default) and "as recorded" have the same value.
	if f.given("arrival-jitter") && f.jitter < 0 {
		f.jitter = 0
	}
	return f, nil
}

// check returns an error for the first value that is out of bounds or contradicts another.
func (f *flags) check() error {
	for name := range strings.FieldsSeq("workers ranks capacity budget prefill device slow") {
		least := 1
		if name == "prefill" || name == "slow" {
			least = 0
		}
		if v, ok := f.set.Lookup(name).Value.(flag.Getter).Get().(int); ok && f.given(name) && v < least {
			return fmt.Errorf("--%s %d: must be at least %d", name, v, least)
		}
	}
	switch {
	case f.set.NArg() > 0:
		return fmt.Errorf("unknown argument %q", f.set.Arg(0))
	case f.seeds < 1 || f.seeds > mostSeeds:
		return fmt.Errorf("--seeds %d: must be 1 to %d", f.seeds, mostSeeds)
	case f.given("load") && !(f.load > 0 && f.load <= mostLoad):
		return fmt.Errorf("--load %g: must be above 0, up to %g", f.load, mostLoad)
	case !(f.loss >= 0 && f.loss <= 1):
		return fmt.Errorf("--event-loss %g: a part, 0 to 1", f.loss)
	case !(f.skew >= 0 && f.skew <= 1):
		return fmt.Errorf("--skew %g: a part, 0 to 1", f.skew)
	case f.replicas < 1 || f.replicas > mostReplicas:
		return fmt.Errorf("--replicas %d: must be 1 to %d", f.replicas, mostReplicas)
	case f.delay < 0 || f.resend < 0:
		return errors.New("--event-delay and --event-replay are times from 0 on")
	case f.jsonPath != "" && f.jsonPath == f.htmlPath:
		return fmt.Errorf("--json and --report name the same file, %s", f.jsonPath)
	case f.acceptance && f.jsonPath+f.htmlPath != "":
		return errors.New("--json and --report are not written with --acceptance")
	case f.rows != "" && !f.acceptance:
		return errors.New("--rows are those of --acceptance")
	case readers[f.format] == nil && f.format != "generated":
		return fmt.Errorf("--format %q: want mooncake, otel, csv or generated", f.format)
	}
	return f.checkGauntlet()
}

// checkGauntlet returns an error for flags that are only valid with a gauntlet, or only without one.
func (f *flags) checkGauntlet() error {
	other, text := "quick held-out families results", "--%s is one of --gauntlet"
	if f.gauntlet {
		other = "acceptance sweep scenario load workers ranks coupled prefill engine capacity budget event-delay event-loss event-replay replicas skew share-delay share-credit"
		text = "--gauntlet has workloads, fleets and loads of its own: no --%s"
	}
	for name := range strings.FieldsSeq(other) {
		if f.given(name) {
			return fmt.Errorf(text, name)
		}
	}
	return nil
}

// mostReplicas bounds the routers, each of which has its own index.
const mostReplicas = 1000

// mostSeeds bounds the runs, mostLoad the speed-up of a trace.
const (
	mostSeeds = 10_000
	mostLoad  = 1e6
)

// plainFlag rewrites an error of package flag in a user's terms.
func plainFlag(s *flag.FlagSet, err error) error {
	text := err.Error()
	if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
		return fmt.Errorf("no flag --%s (kvlane replay --help shows them)", name)
	}
	if name, ok := strings.CutPrefix(text, "flag needs an argument: -"); ok {
		return fmt.Errorf("--%s needs a value", name)
	}
	_, rest, ok := strings.Cut(text, " for flag -")
	if !ok {
		_, rest, ok = strings.Cut(text, " for -") // of a bool
	}
	name, _, _ := strings.Cut(rest, ":")
	f := s.Lookup(name)
	if !ok || f == nil {
		return err
	}
	want := "a time like 10ms or 0.01"
	if typed, ok := f.Value.(flag.Getter); ok {
		switch typed.Get().(type) {
		case int:
			want = "a whole number"
		case uint64:
			want = "a whole number from 0 on"
		case float64:
			want = "a number"
		case bool:
			want = "true or false"
		}
	}
	_, given, _ := strings.Cut(text, "\"")
	given, _, _ = strings.Cut(given, "\"")
	return fmt.Errorf("--%s %q: want %s", name, given, want)
}

// given reports whether a flag was set, even if to its default.
func (f *flags) given(name string) bool {
	found := false
	f.set.Visit(func(set *flag.Flag) { found = found || set.Name == name })
	return found
}

// UsageError is an error of the arguments.
type UsageError struct{ error }

// Command is `kvlane replay`: it parses the arguments, runs, and writes the table to out
// and its progress to progress. An error of the arguments is a UsageError.
func Command(args []string, out, progress io.Writer) error {
	f, err := parseFlags(args, out)
	if err != nil {
		return err
	}
	switch {
	case f.scenario == "list":
		list, err := Scenarios()
		if err != nil {
			return err
		}
		return WriteScenarios(out, list)
	case f.acceptance:
		return f.accept(out, progress)
	}
	if err := errors.Join(checkOutput("json", f.jsonPath), checkOutput("report", f.htmlPath)); err != nil {
		return err
	}
	if f.gauntlet {
		return f.runGauntlet(out, progress)
	}
	o, err := f.options()
	if err != nil {
		return err
	}
	o.Progress = func(policy string, seed uint64, run, runs int) {
		fmt.Fprintf(progress, "%d/%d %s, seed %d\n", run, runs, policy, seed)
	}
	report, err := Run(o)
	if err != nil {
		return err
	}
	if err := report.WriteTable(out); err != nil {
		return err
	}
	return f.writeFiles(report)
}

// writeFiles writes what --json and --report name.
func (f *flags) writeFiles(report interface {
	WriteJSON(out io.Writer) error
	WriteHTML(out io.Writer) error
}) error {
	files := []string{f.jsonPath, f.htmlPath}
	for i, write := range []func(io.Writer) error{report.WriteJSON, report.WriteHTML} {
		if files[i] == "" {
			continue
		}
		if err := writeFile(files[i], write); err != nil {
			return err
		}
	}
	return nil
}

func (f *flags) runGauntlet(out, progress io.Writer) error {
	g := Gauntlet{Quick: f.quick, HeldOut: f.heldOut, Rules: Rules(), Seeds: f.allSeeds(), Trace: f.reader(), Results: f.results}
	if f.quick && !f.given("seeds") {
		g.Seeds = g.Seeds[:2]
	}
	if f.families != "" {
		g.Families = strings.Split(f.families, ",")
	}
	if f.policies != "" {
		g.Rules = nil
		for name := range strings.SplitSeq(f.policies, ",") {
			g.Rules = append(g.Rules, ruleOf(name))
		}
	}
	if f.trace != "" {
		info, err := os.Stat(f.trace)
		if err != nil {
			return err
		}
		g.TraceName = fmt.Sprint(f.trace, info.Size(), info.ModTime().UnixNano(), f.format, f.jitter)
	}
	if f.results != "" {
		if err := os.MkdirAll(f.results, 0o755); err != nil { //nolint:gosec // under the user's umask
			return err
		}
	}
	began := time.Now()
	g.Progress = func(cell string, number, cells int, known bool) {
		state := ""
		if known {
			state = ", known"
		}
		fmt.Fprintf(progress, "%d/%d %s%s (%s)\n", number, cells, cell, state, time.Since(began).Round(time.Second))
	}
	outcomes, err := g.Run()
	if err != nil {
		return err
	}
	if err := outcomes.WriteMarkdown(out); err != nil {
		return err
	}
	return f.writeFiles(outcomes)
}

func (f *flags) accept(out, progress io.Writer) error {
	var rows []string
	if f.rows != "" {
		rows = strings.Split(f.rows, ",")
	}
	scenarios, err := AcceptanceScenarios(rows...)
	if f.scenario != "" {
		var s *Scenario
		s, err = LoadScenario(f.scenario)
		scenarios = []*Scenario{s}
	}
	if err != nil {
		return err
	}
	a := Acceptance{Scenarios: scenarios, Seeds: f.allSeeds(), Trace: f.reader(), Progress: func(scenario, policy string, seed uint64) {
		fmt.Fprintf(progress, "%s: %s, seed %d\n", scenario, policy, seed)
	}}
	a.Done = func(outcomes []Outcome) {
		for i := range outcomes {
			fmt.Fprintln(progress, strings.Join(outcomes[i].cells(), "  "))
		}
	}
	outcomes, without, err := a.Run()
	if err != nil {
		return err
	}
	failed, err := WriteOutcomes(out, outcomes)
	if err == nil && len(without) > 0 {
		_, err = fmt.Fprintf(out, "not run for want of a trace (--trace): %s\n", strings.Join(without, ", "))
	}
	if err == nil && failed > 0 {
		err = fmt.Errorf("%d of %d: %w", failed, len(outcomes), ErrChecksFailed)
	}
	return err
}

func (f *flags) allSeeds() []uint64 {
	all := make([]uint64, f.seeds)
	for i := range all {
		all[i] = f.seed + uint64(i)
	}
	return all
}

// readers read traces by format.
var readers = map[string]func(in io.Reader, load, jitter float64) (Workload, error){"mooncake": ReadMooncake, "otel": ReadOTel, "csv": ReadCSV}

// reader returns a reader of the named trace, nil if none is named.
func (f *flags) reader() TraceReader {
	read := readers[f.format]
	if f.trace == "" || read == nil {
		return nil
	}
	return func(load float64) (Workload, error) {
		file, err := os.Open(f.trace)
		if err != nil {
			return Workload{}, err
		}
		defer file.Close()
		in, err := unpacked(file)
		if err != nil {
			return Workload{}, fmt.Errorf("%s: %w", f.trace, err)
		}
		w, err := read(in, cmp.Or(f.load, load), float64(f.jitter))
		if err != nil {
			return w, fmt.Errorf("%s, read as --format %s: %w (formats: mooncake, lines of JSON with timestamp, input_length and output_length; "+
				"otel, lines of JSON with spans; csv, tables of Azure or BurstGPT)", f.trace, f.format, err)
		}
		return w, nil
	}
}

// options returns what to run: a scenario, modified by the other arguments.
func (f *flags) options() (Options, error) {
	s := &Scenario{Name: "trace", Workload: Source{Trace: &Trace{Load: 1}}, Fleet: Shape{Workers: 8}, Policies: strings.Split(defaultPolicies, ","), Cases: []Case{{}}}
	name, at := f.scenario, ""
	if name == "" && f.format == "generated" {
		name = defaultScenario
	}
	if name != "" {
		if !strings.HasSuffix(name, ".yaml") {
			name, at, _ = strings.Cut(name, "/")
		}
		var err error
		if s, err = LoadScenario(name); err != nil {
			return Options{}, err
		}
	}
	c, ok := s.Case(at)
	if !ok {
		return Options{}, fmt.Errorf("scenario %s has no case %q", name, at)
	}
	o, err := s.Options(c, f.reader())
	if err != nil {
		return Options{}, err
	}
	o.Seeds = f.allSeeds()
	switch {
	case f.sweep:
		o.Policies = Sweep()
	case f.policies != "":
		o.Policies = strings.Split(f.policies, ",")
	}
	if err := f.shape.change(&o.Fleet); err != nil {
		return Options{}, err
	}
	if o.Fleet.Prefill >= o.Fleet.Workers {
		return Options{}, fmt.Errorf("%d of %d workers for prefill leave none to decode", o.Fleet.Prefill, o.Fleet.Workers)
	}
	to := &o.Conditions
	changes := map[string]func(){
		"event-delay":  func() { to.EventDelay = float64(f.delay) },
		"event-loss":   func() { to.EventLoss = f.loss },
		"event-replay": func() { to.EventReplay = float64(f.resend) },
		"replicas":     func() { to.Replicas = f.replicas },
		"skew":         func() { to.Skew = f.skew },
		"share-delay": func() {
			if to.ShareDelay = nil; f.share >= 0 { // else never
				to.ShareDelay = new(float64(f.share))
			}
		},
		"share-credit": func() { to.ShareCredit = f.credit },
	}
	f.set.Visit(func(given *flag.Flag) {
		if change := changes[given.Name]; change != nil {
			change()
		}
	})
	return o, nil
}

// unpacked returns the content of a file that may be compressed, regardless of its name.
func unpacked(file io.Reader) (io.Reader, error) {
	in := bufio.NewReader(file)
	if magic, err := in.Peek(2); err == nil && string(magic) == "\x1f\x8b" {
		return gzip.NewReader(in)
	}
	return in, nil
}

func writeFile(path string, write func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(file), file.Close())
}

// checkOutput returns an error if a file cannot be written, before the minutes that a run
// takes. It creates no file and leaves an existing one unchanged.
func checkOutput(flag, path string) error {
	if path == "" {
		return nil
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return fmt.Errorf("--%s %s: is a folder, not a file", flag, path)
	case err == nil && !info.Mode().IsRegular():
		return nil // a pipe or device: opening it may have an effect
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("--%s: %w", flag, err)
	}
	if folder, err := os.Stat(filepath.Dir(path)); err != nil || !folder.IsDir() {
		return fmt.Errorf("--%s %s: %s: no such folder", flag, path, filepath.Dir(path))
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644) //nolint:gosec // as os.Create, under the user's umask
	if err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	if info == nil {
		return os.Remove(path)
	}
	return nil
}

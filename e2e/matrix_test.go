package e2e

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

var (
	everyFault = flag.Bool("faults", false, "play every row of the fault matrix, and write docs/faults.md")
	writePage  = flag.Bool("faultspage", false, "write docs/faults.md with the figures of the last whole run")
)

const (
	faultsPage    = "../docs/faults.md"
	faultsFigures = "testdata/faults.json" // what the last whole run with -faults measured
	loadClients   = 8
	stallTimeout  = 2 * time.Second // envoy.stall_timeout of the beds, the default
	// slack is how long an unimpeded request may take on a busy machine. It is added to
	// every bound that follows from a configured timeout.
	slack = 4 * time.Second
	// stallSlack is the same where the pings of the stall timeout end the wait: others must not wait much longer than it.
	stallSlack = 1500 * time.Millisecond
	// backSoon is when all is normal after a fault that keeps no engine under suspicion. A restart of a process is part of it.
	backSoon = 5 * time.Second
	// retried is when a suspect engine is tried again (routing.md), with the request that tests it.
	retried = 31 * time.Second
	// racedTime and racedMemory multiply the bounds of the time until normal, and of memory, in a build with the race detector:
	// a process starts many times slower there, and holds more.
	racedTime, racedMemory = 4, 2
)

// fault is a row of the matrix: a fault that is played under load in one shape, with bounds
// on its effect on the clients that have no part in it.
type fault struct {
	name, made string
	shape      string // a bed of faultBeds
	quick      bool   // part of every run; the others only with -faults
	failed     int    // bound of requests that fail
	why        string // why the bound cannot be lower; "" for 0
	stall      time.Duration
	slack      time.Duration // what is added to stall; default slack
	normal     time.Duration // until all is normal again; default backSoon
	memory     int           // MiB that Kvlane may hold in addition afterwards; default 48
	heap       int           // MiB that Envoy may have allocated afterwards; default 64
	shows      string        // a metric of Kvlane that the fault must raise
	skip       func() string // why this machine cannot play it, if so
	setup      func(b *bed)  // before the load
	clear      func(b *bed)  // after the load
	play       func(p *stage)
}

// elsewhere are rows that other tests play, or that cannot be played.
var elsewhere = []struct{ name, where string }{
	{"API server gone", "`e2e/k8s`, \"the API server is away under load\" (`make test-k8s`): no request fails, and each replica follows afterwards"},
	{"messages of replicas lost, doubled, late", "`internal/lab/simulate`, `TestReplicas`: after the last message all replicas agree. `internal/replicas`, `TestExternalServerIsKilledAndComesBack`: without NATS replicas decide alone and drop each other's bookings"},
	{"secret of the fleet wrong", "`internal/replicas`, `TestAnotherSecretNeitherReadsNorWrites`"},
	{"disk full, other files", "The bindings of `fleet.persist`: `internal/replicas`, `TestAStoreThatIsFull`, `TestABrokenStoreStopsNothing`. Downloads of tokenizers: `internal/hub`, `TestBrokenDownloadLeavesNothing`. Not played: no room for the temporary file of a copy of the index for another replica"},
	{"all faults of legs, other connectors", "`TestFaultsOfEveryConnector`, `TestFaultsBehindTheSidecar`, without load: each connector, those of SGLang and TensorRT-LLM too, and legs that a sidecar runs"},
	{"NATS stopped; replicas stopped and killed while conversations go on", "`TestExternalServerIsStopped`; `TestReplicaIsStoppedAndKilled`: no conversation moves"},
	{"clock jumps", "not played on Envoy, since a process's clock cannot be set without the machine's. Kvlane computes times with the monotonic clock; `TestClockJumps` of `kvindex` steps the wall clock for the TTL of speculative credit. Wall time is read for log lines, the validity of certificates, seeds, the ids that TensorRT-LLM demands (which only increase), and by replicas for the start of their logical clocks and for the delay of messages in the metrics"},
}

// measured is what a run of a row found.
type measured struct {
	outcomes
	Normal time.Duration `json:"normal"` // from the end of the fault
	Before int64         `json:"before"` // resident memory of Kvlane in bytes
	After  int64         `json:"after"`
	Envoy  int64         `json:"envoy"` // heap of Envoy in bytes, afterwards
	Note   string        `json:"note,omitempty"`
}

// wholeRun is what a run of all rows found, by the names of the rows, and when.
type wholeRun struct {
	Date       string              `json:"date"`
	Minutes    int                 `json:"minutes"`
	Processors int                 `json:"processors"`
	Rows       map[string]measured `json:"rows"`
}

// stage is a bed on which a row is played while a load runs.
type stage struct {
	*bed
	load *load
	past time.Time // the end of the fault
	note string
}

// over marks the end of the fault, before what repairs it takes time.
func (p *stage) over() { p.past = time.Now() }

// lasts lets a fault act for a time and at least n requests.
func (p *stage) lasts(d time.Duration, n int) {
	p.t.Helper()
	time.Sleep(d)
	if n > 0 {
		p.load.more(n, false)
	}
}

func (f *fault) id() string { return f.shape + ": " + f.name }

// TestFaults plays rows of the fault matrix. `make faults` plays all and writes the page, which has the figures of one whole
// run: with -run nothing is written.
func TestFaults(t *testing.T) {
	figures, began := map[string]measured{}, time.Now()
	for _, shape := range faultShapes {
		rows := slices.DeleteFunc(faults(), func(f fault) bool { return f.shape != shape.name || !f.quick && !*everyFault })
		if len(rows) == 0 {
			continue
		}
		t.Run(shape.name, func(t *testing.T) {
			b := shape.bed(t)
			for i := range rows {
				was := b.t
				t.Run(rows[i].name, func(t *testing.T) {
					b.t = t
					defer func() { b.t = was }()
					figures[rows[i].id()] = b.playFault(&rows[i])
				})
			}
		})
	}
	if !*everyFault || t.Failed() || raceEnabled {
		return
	}
	run := wholeRun{Date: began.UTC().Format("2 January 2006"), Minutes: int(time.Since(began).Minutes() + 0.5), Processors: runtime.NumCPU(), Rows: figures}
	for name, text := range faultsFiles(t, &run) {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// faultsFiles returns what a run writes, by file: nothing unless it has played every row.
func faultsFiles(t *testing.T, run *wholeRun) map[string]string {
	t.Helper()
	for _, f := range faults() {
		if _, ok := run.Rows[f.id()]; !ok {
			t.Logf("not written: %q was not played", f.id())
			return nil
		}
	}
	text, err := json.MarshalIndent(run, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{faultsFigures: string(text) + "\n", faultsPage: faultsText(t, run)}
}

func TestAPartOfTheMatrixIsNotWritten(t *testing.T) {
	run := readFigures(t)
	if files := faultsFiles(t, run); len(files) != 2 {
		t.Errorf("a whole run: got %d files, want 2", len(files))
	}
	rows := faults()
	delete(run.Rows, rows[len(rows)/2].id())
	if files := faultsFiles(t, run); len(files) != 0 {
		t.Errorf("all rows but one: got %d files, want none", len(files))
	}
}

// playFault plays a row and compares what it measured with the bounds.
func (b *bed) playFault(f *fault) (m measured) {
	b.t.Helper()
	if f.skip != nil {
		if why := f.skip(); why != "" {
			return measured{Note: "Not played: " + why}
		}
	}
	if f.setup != nil {
		f.setup(b)
	}
	b.normal()
	b.quiet()
	raised := 0.0
	if f.shows != "" {
		raised = b.metric(f.shows)
	}
	m.Before = resident(b.t, b.kvlane.Process.Pid)
	p := &stage{bed: b, load: b.load(loadClients)}
	defer func() {
		if b.t.Failed() {
			b.faults(enginesim.Faults{}) // requests that a fault holds would hold the end of the load for minutes
		}
		p.load.end()
	}()
	p.load.more(4*loadClients, true)
	f.play(p)
	if p.past.IsZero() {
		p.over()
	}
	b.normal()
	m.Normal = time.Since(p.past)
	p.load.more(4*loadClients, true)
	m.outcomes, m.Note = p.load.end(), p.note
	b.quiet()
	if f.shows != "" && b.metric(f.shows) <= raised {
		b.t.Errorf("got %s still at %v, want more: the fault did not happen", f.shows, raised)
	}
	m.After, m.Envoy = resident(b.t, b.kvlane.Process.Pid), int64(b.envoyHeap())
	b.t.Logf("served %d, failed %v, wrong %d, longest stall %v, normal after %v, Kvlane's memory %d MiB, before %d; Envoy's heap %d MiB; %s",
		m.Served, m.Failed, m.Wrong, m.Stall.Round(time.Millisecond), m.Normal.Round(time.Millisecond), m.After>>20, m.Before>>20, m.Envoy>>20, m.Note)
	if m.failed() > f.failed || b.t.Failed() {
		ended := regexp.MustCompile(`(?m)^.*"status":5.*"message":"ended".*$`).FindAllString(b.read("kvlane.log"), -1)
		b.t.Logf("the last of %d errors in Kvlane's log: %q", len(ended), ended[max(0, len(ended)-5):])
	}
	if m.failed() > f.failed {
		b.t.Errorf("got %v requests failed, want at most %d", m.Failed, f.failed)
	}
	if m.Wrong > 0 {
		b.t.Errorf("got %d answers with wrong bytes, want 0", m.Wrong)
	}
	bounds := f.bounds()
	if raceEnabled {
		bounds.stall, bounds.normal, bounds.memory = f.stall+slack, racedTime*bounds.normal, racedMemory*bounds.memory
	}
	for _, what := range bounds.exceeded(&m) {
		b.t.Error(what)
	}
	if f.clear != nil {
		f.clear(b)
	}
	return m
}

// bounds are those of a row's times and memory; memory is in MiB.
type bounds struct {
	stall, normal time.Duration
	memory, heap  int64
}

func (f *fault) bounds() bounds {
	return bounds{stall: f.stall + cmp.Or(f.slack, slack), normal: cmp.Or(f.normal, backSoon) + slack, memory: int64(cmp.Or(f.memory, 48)), heap: int64(cmp.Or(f.heap, 64))}
}

// exceeded says which figures are out of bounds.
func (o bounds) exceeded(m *measured) (out []string) {
	if m.Stall > o.stall {
		out = append(out, fmt.Sprintf("got a stall of %v, want at most %v", m.Stall, o.stall))
	}
	if m.Normal > o.normal {
		out = append(out, fmt.Sprintf("got all normal after %v, want at most %v", m.Normal, o.normal))
	}
	if grown := m.After - m.Before; grown > o.memory<<20 {
		out = append(out, fmt.Sprintf("got %d MiB more resident memory, want at most %d", grown>>20, o.memory))
	}
	if m.Envoy > o.heap<<20 {
		out = append(out, fmt.Sprintf("got a heap of Envoy of %d MiB, want at most %d", m.Envoy>>20, o.heap))
	}
	return out
}

func TestFiguresOutOfBoundsAreSeen(t *testing.T) {
	o := (&fault{stall: time.Second, normal: 2 * time.Second, memory: 3}).bounds()
	good := measured{outcomes: outcomes{Stall: o.stall}, Normal: o.normal, Before: 1 << 20, After: 4 << 20, Envoy: 64 << 20}
	if got := o.exceeded(&good); len(got) != 0 {
		t.Errorf("figures at their bounds: got %q, want nothing", got)
	}
	for what, spoil := range map[string]func(m *measured){
		"stall":           func(m *measured) { m.Stall++ },
		"normal":          func(m *measured) { m.Normal++ },
		"resident memory": func(m *measured) { m.After++ },
		"heap of Envoy":   func(m *measured) { m.Envoy++ },
	} {
		m := good
		spoil(&m)
		if got := o.exceeded(&m); len(got) != 1 || !strings.Contains(got[0], what) {
			t.Errorf("%s above its bound: got %q, want one text about it", what, got)
		}
	}
}

// normal waits until the bed is as before a fault: every worker is ready and not suspect,
// every feed is live, and Kvlane decides.
func (b *bed) normal() {
	b.t.Helper()
	ready, live := len(b.engines), len(b.engines)*b.shape.ranks
	if b.process != nil {
		ready, live = ready+1, live+b.shape.ranks
	}
	var missing string
	defer func() {
		if b.t.Failed() {
			b.t.Logf("missing: %s", missing)
			for _, w := range []string{"e0", "e1", "e2", "e3", "p0"} {
				b.t.Logf("%s: %v suspect targets", w, b.metric("kvlane_suspect_target", fmt.Sprintf("worker=%q", w)))
			}
		}
	}()
	b.until("all is normal again", func() bool {
		for what, ok := range map[string]bool{
			"ready workers": b.metric("kvlane_worker_ready") == float64(ready),
			"live feeds":    b.metric("kvlane_feed_state", `state="live"`) == float64(live),
			"no suspects":   b.metric("kvlane_suspect_target") == 0,
			"all replicas":  b.replicas == nil || b.replicas.together(),
		} {
			if !ok {
				missing = what
				return false
			}
		}
		r, err := b.send("/v1/chat/completions", chatBody(message{"user", "is all well?"}))
		missing = fmt.Sprint("a decision: ", err)
		return err == nil && r.status == 200 && r.target != ""
	})
}

// startEnvoy replaces the bed's Envoy by a new one.
func (b *bed) startEnvoy() {
	b.t.Helper()
	var err error
	if b.envoy, err = envoy.Run(b.t.Context(), envoyBinary, b.dir, b.file("envoy.yaml"), b.envoyAdmin, 2); err != nil {
		b.t.Fatal(err)
	}
}

// faultsText is the page: the bounds of the rows, and what was measured.
func faultsText(t *testing.T, run *wholeRun) string {
	t.Helper()
	page, err := os.ReadFile(faultsPage)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(page), tableBegin)
	_, after, ok2 := strings.Cut(rest, tableEnd)
	if !ok || !ok2 {
		t.Fatalf("%s: got no marks around the tables, want %q and %q", faultsPage, tableBegin, tableEnd)
	}
	var w strings.Builder
	fmt.Fprintf(&w, "%s%s\n\nPlayed on %s on %d processors, in %d minutes. %d rows, of which `make test` plays %d.\n",
		before, tableBegin, run.Date, run.Processors, run.Minutes, len(faults()), quickRows())
	for _, shape := range faultShapes {
		fmt.Fprintf(&w, "\n### %s\n\n%s\n\n", shape.title, shape.what)
		fmt.Fprint(&w, "| fault | how it is made | failed of requests, bound and why it is not lower | longest stall, bound | normal after, bound | memory of Kvlane before, after, bound of its growth; Envoy's heap, bound |\n|---|---|---|---|---|---|\n")
		for _, f := range faults() {
			if f.shape != shape.name {
				continue
			}
			m, ok := run.Rows[f.id()]
			if !ok {
				t.Fatalf("no figures for %q: run `make faults`", f.id())
			}
			bound := fmt.Sprint("≤ ", f.failed, ": ", f.why)
			if f.failed == 0 {
				bound = "0"
			}
			quick := ""
			if f.quick {
				quick = "*"
			}
			note := ""
			if m.Note != "" {
				note = ". " + m.Note
			}
			o := f.bounds()
			fmt.Fprintf(&w, "| %s%s | %s | %d of %d; %s | %s; %s | %s; %s | %d, %d, +%d MiB; %d, %d MiB |\n", f.name, quick, f.made+note,
				m.failed(), m.failed()+m.Served, bound, seconds(m.Stall), seconds(o.stall), seconds(m.Normal), seconds(o.normal),
				m.Before>>20, m.After>>20, o.memory, m.Envoy>>20, o.heap)
		}
	}
	fmt.Fprint(&w, "\n### Played elsewhere\n\n| fault | where |\n|---|---|\n")
	for _, e := range elsewhere {
		fmt.Fprintf(&w, "| %s | %s |\n", e.name, e.where)
	}
	return w.String() + "\n" + tableEnd + after
}

const tableBegin, tableEnd = "<!-- begin: written by make faults -->", "<!-- end -->"

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }

// quickRows is the number of rows that every run plays.
func quickRows() (n int) {
	for _, f := range faults() {
		if f.quick {
			n++
		}
	}
	return n
}

func readFigures(t *testing.T) (run *wholeRun) {
	t.Helper()
	text, err := os.ReadFile(faultsFigures)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &run); err != nil {
		t.Fatal(err)
	}
	return run
}

// The page has the rows and bounds of the code, and the figures of the last whole run.
func TestFaultsPage(t *testing.T) {
	run := readFigures(t)
	page, err := os.ReadFile(faultsPage)
	if err != nil {
		t.Fatal(err)
	}
	want := faultsText(t, run)
	switch {
	case *everyFault: // the run writes it
		return
	case *writePage:
		if err := os.WriteFile(faultsPage, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	case string(page) != want:
		t.Errorf("%s does not have the rows of the code: run `go test ./e2e -run FaultsPage -faultspage`, or `make faults` for new figures", faultsPage)
	}
	names, quick := map[string]bool{}, map[string]bool{}
	for _, f := range faults() {
		names[f.id()] = true
		quick[f.shape] = quick[f.shape] || f.quick
		m := run.Rows[f.id()]
		if what := f.bounds().exceeded(&m); m.failed() > f.failed || m.Wrong > 0 || len(what) > 0 {
			t.Errorf("%s: got figures out of bounds: %+v %q", f.id(), m, what)
		}
		if f.failed > 0 && f.why == "" {
			t.Errorf("%s: got a bound without a reason, want one", f.id())
		}
	}
	for name := range run.Rows {
		if !names[name] {
			t.Errorf("got figures for %q, want none: there is no such row", name)
		}
	}
	if n := quickRows(); 3*n < len(names) || n != len(regexp.MustCompile(`(?m)^\| [^|]+\* \|`).FindAllString(want, -1)) {
		t.Errorf("got %d rows of %d that every run plays, want a third of them, each with a star", n, len(names))
	}
	for _, shape := range faultShapes {
		if !quick[shape.name] && shape.name != "replicas" { // TestReplicaIsStoppedAndKilled is part of every run
			t.Errorf("%s: got no row that every run plays, want one", shape.name)
		}
	}
}

// process is an engine that is a process of its own, so that signals reach it.
type process struct {
	args []string
	pid  int
	done chan struct{}
	side string
	line string // its entry in the list of workers
}

// newProcess reserves the ports of an engine process and returns its entry for the list of
// workers.
func newProcess(t *testing.T, ranks int, keys string, args ...string) *process {
	t.Helper()
	ports, err := enginesim.FreePorts(2*ranks + 2)
	if err != nil {
		t.Fatal(err)
	}
	at := func(n int) string { return fmt.Sprintf("127.0.0.1:%d", ports+n) }
	p := &process{side: at(2*ranks + 1)}
	p.line = fmt.Sprintf("  - {name: p0, address: %q, ranks: %d, models: [%s], events: {endpoint: \"tcp://%s\", replay: \"tcp://%s\"}%s}\n",
		at(2*ranks), ranks, modelName, at(0), at(ranks), keys)
	p.args = append([]string{"engine-sim", "--model", modelName, "--ranks", fmt.Sprint(ranks), "--listen", at(2 * ranks), "--side-listen", p.side,
		"--events", "tcp://" + at(0), "--replay", "tcp://" + at(ranks), "--blocks", "16384", "--step-base", "2ms"}, args...)
	return p
}

func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(p.pid, s); err != nil {
		t.Fatal(err)
	}
	if s == syscall.SIGKILL {
		<-p.done
	}
}

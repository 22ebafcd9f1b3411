package replay

import (
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// defaultPolicies are compared when none are named.
const defaultPolicies = "kv-aware,session,llm-d,kv-aware-trt,conversation-rank,first-turn-round-robin,compute-and-resident,min-wait,least-tokens,oracle"

// generated are the workloads that need no trace.
var generated = map[string]func() Workload{
	"skew":     ConversationSkew,
	"starved":  StarvedRanks,
	"siblings": func() Workload { return Siblings(0.3) },
	"tenants": func() Workload {
		return OneShot{Tenants: 50, System: 8000, Own: 1000, Output: 250, PerSecond: 40, Capacity: 300_000}.Workload("50 tenants")
	},
	"hot": func() Workload {
		return OneShot{Tenants: 1, System: 8000, Own: 500, Output: 200, PerSecond: 70, Capacity: 500_000}.Workload("hot prefix")
	},
	"no-reuse": func() Workload {
		return OneShot{Tenants: 1, Own: 6000, Output: 250, PerSecond: 19, Capacity: 500_000}.Workload("no reuse")
	},
}

// ErrChecksFailed is returned by Command when acceptance rows do not hold.
var ErrChecksFailed = errors.New("acceptance rows do not hold")

// Command is `kvlane replay`: it parses the arguments, runs, and writes the table to
// out and what it is doing to progress.
func Command(args []string, out, progress io.Writer) error {
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(progress)
	trace := f.String("trace", "", "trace file, .gz or plain")
	format := f.String("format", "mooncake", "mooncake, otel or generated")
	scenario := f.String("scenario", "skew", "with -format generated: skew, starved, siblings, tenants, hot or no-reuse")
	policies := f.String("policies", defaultPolicies, "comma-separated; a setting is changed as in kv-aware?cost.miss=4")
	sweep := f.Bool("sweep", false, "compare presets and weights instead of -policies")
	workers := f.Int("workers", 0, "workers, 0 for the workload's own")
	ranks := f.Int("ranks", 0, "ranks of a worker, 0 for the workload's own")
	coupled := f.Bool("coupled", false, "ranks of a worker step together")
	prefill := f.Int("prefill", 0, "workers of a prefill pool; the others decode (policies pools, pools-threshold-4096, ...)")
	engine := f.String("engine", "", "d70 or ds, empty for the workload's own")
	capacity := f.Int("capacity", 0, "KV tokens of a rank, 0 for the engine's own")
	budget := f.Int("budget", 0, "tokens of a step, 0 for the engine's own")
	load := f.Float64("load", 1, "how many times faster the trace arrives")
	jitter := f.Float64("arrival-jitter", -1, "seconds over which arrivals are spread, -1 for the trace's resolution")
	seed := f.Uint64("seed", 1, "first seed")
	seeds := f.Int("seeds", 5, "number of seeds")
	replicas := f.Int("replicas", 1, "routers that take requests in turn")
	share := f.Float64("share-delay", -1, "seconds until replicas know each other's bookings, -1 for never")
	delay := f.Float64("event-delay", 0, "seconds until events arrive")
	loss := f.Float64("event-loss", 0, "part of the event batches that is lost, 0 to 1")
	resend := f.Float64("event-replay", 0, "seconds until lost batches are replayed, 0 for never")
	jsonPath := f.String("json", "", "write all runs as JSON")
	htmlPath := f.String("report", "", "write a page with tables and charts")
	acceptance := f.Bool("acceptance", false, "run the acceptance rows; those on the trace need -trace")
	rows := f.String("rows", "", "with -acceptance: comma-separated rows")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *seeds < 1 || *load <= 0 {
		return errors.New("replay: -seeds and -load must be above 0")
	}
	all := make([]uint64, *seeds)
	for i := range all {
		all[i] = *seed + uint64(i)
	}
	say := func(policy string, seed uint64) { fmt.Fprintf(progress, "%s, seed %d\n", policy, seed) }
	if *acceptance {
		a := Acceptance{Seeds: all, Progress: say, Rows: map[string]bool{}}
		if *trace != "" {
			a.Trace = func() (io.ReadCloser, error) { return openFile(*trace) }
		}
		for row := range strings.SplitSeq(*rows, ",") {
			if row != "" {
				a.Rows[row] = true
			}
		}
		return accept(&a, out)
	}
	w, err := workloadOf(*format, *trace, *scenario, *load, *jitter)
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	o := Options{Workload: w, Fleet: w.Fleet, Seeds: all, Policies: strings.Split(*policies, ","), Progress: say,
		Conditions: Conditions{EventDelay: *delay, EventLoss: *loss, EventReplay: *resend, Replicas: *replicas, Share: *share >= 0, ShareDelay: max(*share, 0)}}
	if *sweep {
		o.Policies = Sweep()
	}
	if err := shape(&o.Fleet, *workers, *ranks, *coupled, *engine, *capacity, *budget); err != nil {
		return err
	}
	o.Fleet.Prefill = min(*prefill, o.Fleet.Workers-1)
	report, err := Run(o)
	if err != nil {
		return err
	}
	for path, write := range map[string]func(io.Writer) error{*jsonPath: report.WriteJSON, *htmlPath: report.WriteHTML} {
		if path == "" {
			continue
		}
		if err := writeFile(path, write); err != nil {
			return fmt.Errorf("replay: %w", err)
		}
	}
	return report.WriteTable(out)
}

func accept(a *Acceptance, out io.Writer) error {
	checks, err := a.Run()
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	failed, err := WriteChecks(out, checks)
	if err == nil && failed > 0 {
		err = fmt.Errorf("replay: %d of %d: %w", failed, len(checks), ErrChecksFailed)
	}
	return err
}

// workloadOf makes the workload.
func workloadOf(format, path, scenario string, load, jitter float64) (Workload, error) {
	if format == "generated" {
		w, ok := generated[scenario]
		if !ok {
			return Workload{}, fmt.Errorf("no scenario %q", scenario)
		}
		return w(), nil
	}
	read := map[string]func(io.Reader, float64, float64) (Workload, error){"mooncake": ReadMooncake, "otel": ReadOTel}[format]
	if read == nil {
		return Workload{}, fmt.Errorf("no format %q", format)
	}
	in, err := openFile(path)
	if err != nil {
		return Workload{}, err
	}
	defer in.Close()
	return read(in, load, jitter)
}

// shape changes the fleet as asked.
func shape(fleet *Fleet, workers, ranks int, coupled bool, engine string, capacity, budget int) error {
	if workers > 0 {
		fleet.Workers = workers
	}
	if ranks > 0 {
		fleet.Ranks = ranks
	}
	fleet.Coupled = fleet.Coupled || coupled
	switch engine {
	case "":
	case "d70":
		fleet.Engine = Dense70B(fleet.Engine.Capacity)
	case "ds":
		fleet.Engine = ExpertRank(fleet.Engine.Capacity)
	default:
		return fmt.Errorf("replay: no engine %q", engine)
	}
	if capacity > 0 {
		fleet.Engine.Capacity = capacity
	}
	if budget > 0 {
		fleet.Engine.Budget = budget
	}
	return nil
}

// gzipped closes the file under its decompressor.
type gzipped struct {
	*gzip.Reader
	file *os.File
}

func (g gzipped) Close() error { return errors.Join(g.Reader.Close(), g.file.Close()) }

func openFile(path string) (io.ReadCloser, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if !strings.HasSuffix(path, ".gz") {
		return file, nil
	}
	z, err := gzip.NewReader(file)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), file.Close())
	}
	return gzipped{z, file}, nil
}

func writeFile(path string, write func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(file), file.Close())
}

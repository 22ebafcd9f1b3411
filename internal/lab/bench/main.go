package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

type options struct {
	kvlane, envoy  string
	length         time.Duration
	floor, targets string
	only           *regexp.Regexp
}

func main() {
	var o options
	flag.StringVar(&o.kvlane, "kvlane", "", "`binary` to measure")
	flag.StringVar(&o.envoy, "envoy", "", "Envoy's `binary`")
	flag.DurationVar(&o.length, "length", 4*time.Second, "of one load")
	flag.StringVar(&o.floor, "floor", "", "be the floor on this Unix `socket` (the bench starts itself so)")
	flag.StringVar(&o.targets, "targets", "", "the floor's endpoints")
	o.only = regexp.MustCompile("")
	flag.Func("only", "run only what matches this `regexp`, such as \"BUFFERED kvlane prose and code, 2k tokens\", \"kvlane pieces\" or \"idle\"", func(s string) (err error) {
		o.only, err = regexp.Compile(s)
		return err
	})
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if o.floor != "" {
		err = runFloor(ctx, o.floor, o.targets)
	} else {
		err = report(ctx, &o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1) //nolint:gocritic // stop was called
	}
}

var rows = []row{tokens(2000), tokens(8000), tokens(32000), tokens(100000)}

// busy is the load for measuring the throughput of one core.
var busy = row{name: "220 KB, 50 connections", bytes: 220_000, connections: 50}

func report(ctx context.Context, o *options) error {
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		return err
	}
	tok, err := bpe.Load(files)
	if err != nil {
		return err
	}
	seen, whole, err := library(ctx, tok)
	if err != nil {
		return err
	}
	m, err := shape.Load(files, shape.Options{})
	if err != nil {
		return err
	}
	list, err := startEngines(ctx, m, 8)
	if err != nil {
		return err
	}
	defer list.close()
	fmt.Fprintf(os.Stdout, "Through the real Envoy, 8 engines with events, 16 connections; half of each prompt is shared, half is\n"+
		"%-15s from another line of Go's library each time, unlike lines, %.1f bytes a token; all of it was sent through once before\n"+
		"%-15s the same of all its files as they are, tables and tests too, %.1f bytes a token\n"+
		"%-15s words of the first, in an order that never was before\n", seen.name, seen.perToken, whole.name, whole.perToken, fresh(seen).name)
	fmt.Fprintf(os.Stdout, "%-22s %-15s %-20s %-7s %8s %13s %12s %14s\n", "load", "text", "request body", "server", "requests", "server ms/req", "Envoy ms/req", "req/s per core")
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		if err := o.mode(ctx, list, seen, whole, mode); err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
	}
	if o.only.MatchString("idle") {
		return o.idle(ctx)
	}
	return nil
}

// server is one of the two that are measured.
type server struct {
	*bed
	name  string
	start memory
	text  *text // that of the latest load
}

// prepare sends a text to the server once, unless its sentences are always new.
func (s *server) prepare(ctx context.Context, t *text) error {
	known := s.text == t || len(t.words) > 0
	if s.text = t; known {
		return nil
	}
	return s.read(ctx, t)
}

// mode runs the loads in one mode. Only the first text is also for the floor, which does not read text.
func (o *options) mode(ctx context.Context, list engines, seen, whole *text, mode string) error {
	type load struct {
		text *text
		rows []row
	}
	loads := []load{{seen, append(slices.Clip(rows), busy)}}
	if mode == "BUFFERED" {
		loads = append(loads, load{whole, rows}, load{fresh(seen), rows[:2]})
	}
	wants := func(name string, t *text, r row) bool {
		return (name == "kvlane" || t == seen) && o.only.MatchString(fmt.Sprintf("%s %s %s, %s", mode, name, t.name, r.name))
	}
	pieces := func(name string) bool { return mode == "BUFFERED" && o.only.MatchString(name+" pieces") }
	servers, err := o.start(ctx, list, mode, func(name string) bool {
		return pieces(name) || slices.ContainsFunc(loads, func(l load) bool {
			return slices.ContainsFunc(l.rows, func(r row) bool { return wants(name, l.text, r) })
		})
	})
	defer func() {
		for _, s := range servers {
			s.close()
		}
	}()
	if err != nil {
		return err
	}
	for _, l := range loads {
		for _, r := range l.rows {
			measured := slices.DeleteFunc(slices.Clone(servers), func(s *server) bool { return !wants(s.name, l.text, r) })
			for _, s := range measured {
				if err := s.prepare(ctx, l.text); err != nil {
					return err
				}
			}
			if err := o.row(ctx, measured, r, l.text, mode); err != nil {
				return err
			}
		}
		for _, s := range servers {
			if end, err := residentMemory(s.server.Process.Pid); err == nil && s.text == l.text {
				fmt.Fprintf(os.Stdout, "%-22s %-15s %-20s %-7s %s before the load, %s after\n", "resident memory", l.text.name, mode, s.name, s.start, end)
			}
		}
	}
	for _, s := range servers {
		if pieces(s.name) {
			if err := o.pieces(ctx, s.bed, s.name); err != nil {
				return err
			}
		}
	}
	return nil
}

// start starts the requested servers. Close them, also after an error.
func (o *options) start(ctx context.Context, list engines, mode string, wanted func(name string) bool) (servers []*server, err error) {
	for _, name := range []string{"floor", "kvlane"} {
		if !wanted(name) {
			continue
		}
		b, err := newBed(ctx, o, list, mode, name == "floor")
		if err != nil {
			return servers, fmt.Errorf("%s: %w", name, err)
		}
		s := &server{bed: b, name: name}
		servers = append(servers, s)
		if s.start, err = residentMemory(b.server.Process.Pid); err != nil {
			return servers, err
		}
	}
	return servers, nil
}

// rounds is how often the servers take turns in a load: on a shared machine only costs of one minute are comparable.
const rounds = 3

// row runs one load against the servers by turns and prints what each costs, for Kvlane also by stage.
func (o *options) row(ctx context.Context, servers []*server, r row, t *text, mode string) error {
	before, results, ratios := make([]stages, len(servers)), make([]result, len(servers)), []float64(nil)
	for range rounds {
		var cost []float64
		for i, s := range servers {
			if s.name == "kvlane" && before[i] == nil {
				var err error
				if before[i], err = s.stages(ctx); err != nil {
					return err
				}
			}
			res, err := s.run(ctx, r, t, o.length/rounds)
			if err != nil {
				return err
			}
			results[i].add(res)
			cost = append(cost, res.perRequest(res.server))
		}
		if len(cost) > 1 && cost[0] > 0 {
			ratios = append(ratios, cost[1]/cost[0])
		}
	}
	for i, s := range servers {
		res := &results[i]
		perCore := float64(res.requests) / (res.server + res.envoy).Seconds()
		fmt.Fprintf(os.Stdout, "%-22s %-15s %-20s %-7s %8d %13.3f %12.3f %14.0f", r.name, t.name, mode, s.name, res.requests, res.perRequest(res.server), res.perRequest(res.envoy), perCore)
		if res.errors > 0 {
			fmt.Fprintf(os.Stdout, "  %d ERRORS", res.errors)
		}
		fmt.Fprintln(os.Stdout)
		if before[i] == nil {
			continue
		}
		after, err := s.stages(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(os.Stdout, "    decision by the wall clock, ms: %s\n", after.since(before[i]))
	}
	if slices.Sort(ratios); len(ratios) > 0 {
		fmt.Fprintf(os.Stdout, "    processor time of kvlane by the floor's in the same round: %.2f (%.2f to %.2f)\n", ratios[len(ratios)/2], ratios[0], ratios[len(ratios)-1])
	}
	return nil
}

// pieces prints the cost of a piece of a streamed answer: the difference between answers of 1,000 pieces and of one.
func (o *options) pieces(ctx context.Context, b *bed, name string) error {
	const many = 1000
	var cost [2]*result
	for i, n := range []int{1, many} {
		body := fmt.Appendf(nil, `{"model":%q,"stream":true,"max_tokens":%d,"prompt":"x"}`, modelName, n)
		var err error
		if cost[i], err = b.load(ctx, 16, "/v1/completions", o.length, func(int) ([]byte, error) { return body, nil }); err != nil {
			return err
		}
	}
	perPiece := func(of func(*result) time.Duration) float64 {
		return (cost[1].perRequest(of(cost[1])) - cost[0].perRequest(of(cost[0]))) * 1000 / (many - 1)
	}
	fmt.Fprintf(os.Stdout, "%-22s %-15s %-20s %-7s %8d %10.2f µs %9.2f µs  each, in answers of 1,000\n", "a piece of an answer", "", "BUFFERED", name, cost[1].requests,
		perPiece(func(r *result) time.Duration { return r.server }), perPiece(func(r *result) time.Duration { return r.envoy }))
	return nil
}

// idle measures the cost of 100 workers without requests.
func (o *options) idle(ctx context.Context) error {
	list, err := startEngines(ctx, nil, 100)
	if err != nil {
		return err
	}
	defer list.close()
	b, err := newBed(ctx, o, list, "BUFFERED", false)
	if err != nil {
		return err
	}
	defer b.close()
	before, err := b.used()
	if err != nil {
		return err
	}
	const length = 10 * time.Second
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(length):
	}
	after, err := b.used()
	if err != nil {
		return err
	}
	resident, err := residentMemory(b.server.Process.Pid)
	if err != nil {
		return err
	}
	info, err := os.Stat(o.kvlane)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "idle with 100 workers: %.4f cores, %s resident; binary %.1f MB\n",
		(after[0]-before[0]).Seconds()/length.Seconds(), resident, float64(info.Size())/1e6)
	return nil
}

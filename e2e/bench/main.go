package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"time"

	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/models"
)

type options struct {
	kvlane, envoy  string
	length         time.Duration
	floor, targets string
}

func main() {
	var o options
	flag.StringVar(&o.kvlane, "kvlane", "", "`binary` to measure")
	flag.StringVar(&o.envoy, "envoy", "", "Envoy's `binary`")
	flag.DurationVar(&o.length, "length", 4*time.Second, "of one load")
	flag.StringVar(&o.floor, "floor", "", "be the floor on this Unix `socket` (the bench starts itself so)")
	flag.StringVar(&o.targets, "targets", "", "the floor's endpoints")
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

// busy is the load that tells how much a core carries.
var busy = row{"220 KB, 50 connections", 220_000, 50}

func report(ctx context.Context, o *options) error {
	text, err := corpus(ctx)
	if err != nil {
		return err
	}
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		return err
	}
	m, err := model.Load(files, model.Options{})
	if err != nil {
		return err
	}
	list, err := startEngines(ctx, m, 8)
	if err != nil {
		return err
	}
	defer list.close()
	fmt.Fprintln(os.Stdout, "Through the real Envoy, 8 engines with events, 16 connections; half of each prompt is shared,\nhalf is another part of Go's library each time, which was sent through once before")
	fmt.Fprintf(os.Stdout, "%-22s %-22s %-8s %9s %14s %14s %14s\n", "load", "request body", "server", "requests", "server ms/req", "Envoy ms/req", "req/s per core")
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		for _, name := range []string{"floor", "kvlane"} {
			if err := o.mode(ctx, list, text, mode, name); err != nil {
				return fmt.Errorf("%s %s: %w", name, mode, err)
			}
		}
	}
	return o.idle(ctx)
}

// mode runs all loads against one server in one mode.
func (o *options) mode(ctx context.Context, list engines, text, mode, name string) error {
	b, err := newBed(ctx, o, list, mode, name == "floor")
	if err != nil {
		return err
	}
	defer b.close()
	start, err := residentMB(b.server.Process.Pid)
	if err != nil {
		return err
	}
	if err := b.read(ctx, text); err != nil {
		return err
	}
	loads := rows
	if mode == "BUFFERED" {
		loads = append(slices.Clip(loads), busy)
	}
	for _, r := range loads {
		res, err := b.run(ctx, r, text, o.length)
		if err != nil {
			return err
		}
		perCore := float64(res.requests) / (res.server + res.envoy).Seconds()
		fmt.Fprintf(os.Stdout, "%-22s %-22s %-8s %9d %14.3f %14.3f %14.0f", r.name, mode, name, res.requests, res.perRequest(res.server), res.perRequest(res.envoy), perCore)
		if res.errors > 0 {
			fmt.Fprintf(os.Stdout, "  %d ERRORS", res.errors)
		}
		fmt.Fprintln(os.Stdout)
	}
	end, err := residentMB(b.server.Process.Pid)
	fmt.Fprintf(os.Stdout, "%-22s %-22s %-8s %d MB before the load, %d MB after\n", "resident memory", mode, name, start, end)
	return err
}

// idle is what serving nobody costs with 100 workers.
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
	resident, err := residentMB(b.server.Process.Pid)
	if err != nil {
		return err
	}
	info, err := os.Stat(o.kvlane)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "idle with 100 workers: %.4f cores, %d MB resident; binary %.1f MB\n",
		(after[0]-before[0]).Seconds()/length.Seconds(), resident, float64(info.Size())/1e6)
	return nil
}

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvlane/kvlane/internal/observe"
)

func runStatus(ctx context.Context, io streams, args []string) error {
	f := flags("status")
	c := adminFlags(f, io.err)
	asJSON := f.Bool("json", false, "print JSON")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	s, err := c.status(ctx)
	if err != nil {
		return err
	}
	if *asJSON {
		e := json.NewEncoder(io.out)
		e.SetIndent("", "  ")
		err = e.Encode(s)
	} else {
		fmt.Fprint(io.out, observe.Printable(statusText(&s)))
	}
	if err == nil && s.NotReady != "" {
		return fmt.Errorf("not ready: %s", observe.Printable(s.NotReady))
	}
	return err
}

// totals returns the first lines of status and top.
func totals(s *observe.Status) string {
	ready, ranks := 0, 0
	for i := range s.Workers {
		ranks += len(s.Workers[i].Ranks)
		if s.Workers[i].Ready && !s.Workers[i].Draining {
			ready++
		}
	}
	return fmt.Sprintf("kvlane %s, %s\nworkers: %d of %d ready; ranks: %d; requests: %.0f, %d running, %d waiting, %.0f refused\n"+
		"prompt tokens cached: %s predicted; engines report %s of the prediction\n", s.Version, cmp.Or(s.NotReady, "ready"),
		ready, len(s.Workers), ranks, s.Requests, s.Reservations, s.Waiting, s.Rejected,
		percent(s.MatchedTokens, s.PromptTokens), percent(s.ObservedTokens, s.PredictedTokens))
}

func percent(part, whole float64) string {
	if whole <= 0 {
		return "-"
	}
	return strconv.Itoa(int(100*part/whole+0.5)) + "%"
}

func statusText(s *observe.Status) string {
	var b strings.Builder
	b.WriteString(totals(s))
	for _, c := range s.Queue {
		fmt.Fprintf(&b, "queue: %s, priority %d, requests: %d, tokens: %d\n", inCell(c.Model), c.Priority, c.Requests, c.Tokens)
	}
	for _, t := range s.Tenants {
		fmt.Fprintf(&b, "tenant: %s, priority %d, requests: %d, tokens served / weight: %d, weight: %g\n", cmp.Or(inCell(t.Tenant), "-"), t.Priority, t.Requests, t.Served, t.Weight)
	}
	b.WriteByte('\n')
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "WORKER\tADDRESS\tROLE\tSTATE\tRANKS\tRUNNING\tQUEUED\tKV\tCACHED\tFEED\tTOKENIZER")
	for i := range s.Workers {
		worker := &s.Workers[i]
		var sum observe.RankStatus
		var known, usage float64
		feeds := map[string]int{}
		for j := range worker.Ranks {
			r := &worker.Ranks[j]
			sum.Active += r.Active
			sum.QueuedTokens += r.QueuedTokens
			sum.PromptTokens += r.PromptTokens
			sum.MatchedTokens += r.MatchedTokens
			if r.Usage != nil {
				known, usage = known+1, usage+*r.Usage
			}
			feeds[cmp.Or(r.Feed, "none")]++
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\n", inCell(worker.Name), worker.Address, worker.Role, workerState(worker), len(worker.Ranks),
			sum.Active, sum.QueuedTokens, percent(usage, known), percent(sum.MatchedTokens, sum.PromptTokens), counts(feeds), cmp.Or(worker.Tokenizer, "-"))
	}
	_ = w.Flush() // a strings.Builder does not fail
	for _, text := range s.Warnings {
		fmt.Fprintf(&b, "warning: %s\n", inCell(text))
	}
	for i := range s.Workers {
		for _, text := range s.Workers[i].Warnings {
			fmt.Fprintf(&b, "warning: worker %s: %s\n", inCell(s.Workers[i].Name), inCell(text))
		}
	}
	return b.String()
}

// inCell escapes line ends and tabs, so that a name from outside stays within its cell of a table.
func inCell(text string) string { return strings.NewReplacer("\n", `\n`, "\t", `\t`).Replace(text) }

// counts lists feed states with their numbers of ranks.
func counts(of map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(of)) {
		parts = append(parts, strconv.Itoa(of[name])+" "+name)
	}
	return strings.Join(parts, ", ")
}

func workerState(w *observe.WorkerStatus) string {
	switch {
	case w.Draining:
		return "draining"
	case !w.Ready:
		return "not ready"
	}
	return "ready"
}

func runTop(ctx context.Context, io streams, args []string) error {
	f := flags("top")
	c := adminFlags(f, io.err)
	every := f.Duration("every", 2*time.Second, "time between updates")
	n := f.Int("n", 30, "number of ranks, the busiest first")
	times := f.Int("times", 0, "number of updates (0: until Ctrl-C)")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if *every < 100*time.Millisecond || *n < 1 {
		return usageError{"--every must be 100ms or more, --n 1 or more"}
	}
	home := ""
	if observe.Terminal(io.out) {
		home = "\x1b[H\x1b[2J"
	}
	tick := time.NewTicker(*every)
	defer tick.Stop()
	last := -1.0
	for i := 1; ; i++ {
		s, err := c.status(ctx)
		if err != nil {
			return err
		}
		rate := "-"
		if last >= 0 {
			rate = fmt.Sprintf("%.1f", (s.Requests-last)/every.Seconds())
		}
		last = s.Requests
		fmt.Fprint(io.out, home+observe.Printable(totals(&s)+"requests per second: "+rate+"\n\n"+topText(&s, *n))+"\n")
		if i == *times {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// topText is the table of the n busiest ranks.
func topText(s *observe.Status, n int) string {
	type line struct {
		worker *observe.WorkerStatus
		rank   *observe.RankStatus
	}
	var list []line
	for i := range s.Workers {
		for j := range s.Workers[i].Ranks {
			list = append(list, line{&s.Workers[i], &s.Workers[i].Ranks[j]})
		}
	}
	slices.SortStableFunc(list, func(a, b line) int {
		return cmp.Or(cmp.Compare(b.rank.Active, a.rank.Active), cmp.Compare(b.rank.QueuedTokens, a.rank.QueuedTokens))
	})
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RANK\tROLE\tSTATE\tRUNNING\tQUEUED\tKV\tBLOCKS\tCACHED\tFEED\tLAST ERROR")
	for _, l := range list[:min(n, len(list))] {
		name, state, usage := l.worker.Name, workerState(l.worker), "-"
		if l.rank.Rank != "" {
			name += "/" + l.rank.Rank
		}
		if l.rank.Suspect && state == "ready" {
			state = "suspect"
		}
		if l.rank.Usage != nil {
			usage = percent(*l.rank.Usage, 1)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%s\t%d\t%s\t%s\t%s\n", inCell(name), l.worker.Role, state, l.rank.Active, l.rank.QueuedTokens, usage, l.rank.Blocks,
			percent(l.rank.MatchedTokens, l.rank.PromptTokens), cmp.Or(l.rank.Feed, "none"), inCell(cmp.Or(l.rank.FeedError, l.worker.Reason)))
	}
	_ = w.Flush() // a strings.Builder does not fail
	if len(list) > n {
		fmt.Fprintf(&b, "%d more\n", len(list)-n)
	}
	return b.String()
}

func runDecisions(ctx context.Context, io streams, args []string) error {
	f := flags("decisions")
	c := adminFlags(f, io.err)
	n := f.Int("n", 20, "number of past decisions")
	follow := f.Bool("follow", false, "print each decision when its request has ended, until Ctrl-C")
	asJSON := f.Bool("json", false, "print a JSON object a line")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if *n < 1 || *n > 10000 { // as /debug/stream
		return usageError{fmt.Sprintf("--n %d: want 1 to 10000", *n)}
	}
	if !*follow {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
	}
	first := true
	err := c.rows(ctx, fmt.Sprintf("n=%d&follow=%t", *n, *follow), func(line string, row *observe.Row) error {
		if first && !*asJSON {
			fmt.Fprintf(io.out, "%-12s  %-36s  %7s  %9s  %8s  %9s  %9s  %s\n", "TIME", "REQUEST", "PROMPT", "PREDICTED", "REPORTED", "DECISION", "ANSWER", "TARGET, OUTCOME")
		}
		first = false
		switch {
		case row == nil || *follow && !row.Ended:
		case *asJSON:
			fmt.Fprintln(io.out, line)
		default:
			fmt.Fprintln(io.out, observe.Printable(inCell(rowText(row))))
		}
		return nil
	})
	if ctx.Err() != nil && *follow {
		return nil
	}
	return err
}

func rowText(r *observe.Row) string {
	reported, answer := "-", "running"
	if r.CachedTokens != nil {
		reported = strconv.FormatInt(*r.CachedTokens, 10)
	}
	if r.Ended {
		answer = short(r.Duration)
	}
	outcome := r.Target
	if r.Prefill != "" {
		outcome += " after " + r.Prefill
	}
	if r.Waited > 0 {
		outcome += ", waited " + short(r.Waited)
	}
	if r.Status != 0 {
		outcome += ", " + strconv.Itoa(r.Status)
	}
	if why := cmp.Or(r.Reason, r.Degraded); why != "" {
		outcome += ", " + why
	}
	return fmt.Sprintf("%-12s  %-36s  %7d  %9d  %8s  %9s  %9s  %s", r.At.Local().Format("15:04:05.000"), r.ID, r.PromptTokens, r.MatchedTokens, reported,
		short(r.Decision), answer, strings.TrimPrefix(outcome, ", "))
}

// short formats a time, given in seconds, with about three digits.
func short(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond} {
		if d >= unit {
			return d.Round(unit / 10).String()
		}
	}
	return d.String()
}

package observe

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/kvlane/kvlane/routing"
)

// Status is GET /debug/status: the fleet as of now. Totals count since the start.
type Status struct {
	Version string `json:"version"`
	// NotReady is what readiness waits for, "" for nothing.
	NotReady string `json:"not_ready,omitempty"`
	// Warnings are those about no worker: each worker has its own.
	Warnings     []string `json:"warnings,omitempty"`
	Requests     float64  `json:"requests_total"`
	Rejected     float64  `json:"rejected_total"`
	Reservations int      `json:"reservations"`
	// Waiting is the number of requests in the queue for capacity, WaitingMost its bound.
	Waiting         int     `json:"waiting"`
	WaitingMost     int     `json:"waiting_max"`
	PromptTokens    float64 `json:"prompt_tokens_total"`
	MatchedTokens   float64 `json:"matched_tokens_total"`
	PredictedTokens float64 `json:"predicted_cached_tokens_total"`
	ObservedTokens  float64 `json:"observed_cached_tokens_total"`
	// Legs counts prefill legs by outcome.
	Legs    map[string]float64 `json:"prefill_legs_total,omitempty"`
	Workers []WorkerStatus     `json:"workers"`
	// Queue and Pools describe the queue (flow); nil without it.
	Queue []FlowClass `json:"queue,omitempty"`
	Pools []FlowPool  `json:"pools,omitempty"`
	// Tenants are those with the most waiting requests, by the first 16 hex digits of a name's SHA-256.
	Tenants []routing.TenantState `json:"tenants,omitempty"`
	// Replicas is the page of the replicas, nil if this one routes alone.
	Replicas any `json:"replicas,omitempty"`
}

// WorkerStatus is a worker in a Status.
type WorkerStatus struct {
	WorkerRow
	// Tokenizer is the worst state of the comparisons with the worker's tokenizers, "" if there are none.
	Tokenizer string `json:"tokenizer,omitempty"`
	// RemovalCost is the number of tokens that the fleet would compute again without the worker: its running prompts,
	// its cached blocks on the device, and 1,000 per conversation that is bound to it. The worker with the lowest cost
	// is the best one to remove.
	RemovalCost int64        `json:"removal_cost_tokens"`
	Ranks       []RankStatus `json:"ranks"`
}

// RankStatus is a target in a Status.
type RankStatus struct {
	Rank string `json:"rank"`
	// Usage is the used share of the KV cache as the engine reports it, nil if it does not.
	Usage *float64 `json:"kv_usage,omitempty"`
	// Blocks is the number of blocks on the device, as the index knows them.
	Blocks        int64   `json:"blocks"`
	Active        int64   `json:"active"`
	QueuedTokens  int64   `json:"queued_tokens"`
	Suspect       bool    `json:"suspect,omitempty"`
	PromptTokens  float64 `json:"prompt_tokens_total"`
	MatchedTokens float64 `json:"matched_tokens_total"`
	// Feed is the state of the feed, "" if there is none.
	Feed      string `json:"feed,omitempty"`
	FeedError string `json:"feed_error,omitempty"`
}

// Value returns the value of a counter.
func Value(c prometheus.Metric) float64 {
	var m dto.Metric
	_ = c.Write(&m) // that of a counter does not fail
	return m.GetCounter().GetValue()
}

// series returns the labels and values of all series of a vector; those of histograms have no value.
func series(v prometheus.Collector) (labels []prometheus.Labels, values []float64) {
	all := make(chan prometheus.Metric)
	go func() {
		v.Collect(all)
		close(all)
	}()
	for one := range all {
		var m dto.Metric
		_ = one.Write(&m)
		of := prometheus.Labels{}
		for _, l := range m.GetLabel() {
			of[l.GetName()] = l.GetValue()
		}
		labels, values = append(labels, of), append(values, m.GetCounter().GetValue())
	}
	return labels, values
}

// Sums returns the sums of a counter's series by the value of a label.
func Sums(v *prometheus.CounterVec, label string) map[string]float64 {
	out := map[string]float64{}
	labels, values := series(v)
	for i, of := range labels {
		out[of[label]] += values[i]
	}
	return out
}

// Totals fills in the totals of a Status.
func (m *Metrics) Totals(s *Status) {
	s.Rejected = Sums(m.Requests, "outcome")["rejected"]
	s.Legs = Sums(m.Legs, "outcome")
	for total, v := range map[*float64]*prometheus.CounterVec{
		&s.Requests: m.Requests, &s.PromptTokens: m.PromptTokens, &s.MatchedTokens: m.MatchedTokens, &s.PredictedTokens: m.Predicted, &s.ObservedTokens: m.Observed,
	} {
		for _, n := range Sums(v, "worker") {
			*total += n
		}
	}
}

// Row is a decision in GET /debug/stream. Times are in seconds.
type Row struct {
	ID            string    `json:"id"`
	At            time.Time `json:"at"`
	API           string    `json:"api"`
	Model         string    `json:"model,omitempty"`
	Target        string    `json:"target,omitempty"`
	Prefill       string    `json:"prefill,omitempty"`
	PromptTokens  int64     `json:"prompt_tokens"`
	MatchedTokens int64     `json:"matched_tokens"`
	// CachedTokens is what the engine reports, nil until it does.
	CachedTokens *int64  `json:"cached_tokens,omitempty"`
	Status       int     `json:"status,omitempty"`
	Reason       string  `json:"reason,omitempty"`
	Degraded     string  `json:"degraded,omitempty"`
	Waited       float64 `json:"waited_seconds,omitempty"`
	// Decision is the time of the decision without the wait for capacity and the prefill leg.
	Decision float64 `json:"decision_seconds"`
	Duration float64 `json:"duration_seconds,omitempty"`
	Ended    bool    `json:"ended"`
	// OutputTokens is what the engine reports, nil if it does not. HashIDs are Entry.HashIDs, on demand.
	OutputTokens *int64   `json:"output_tokens,omitempty"`
	HashIDs      []uint64 `json:"hash_ids,omitempty"`
}

// Row returns the entry's current state.
func (e *Entry) Row() Row {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := Row{ID: e.ID, At: e.At, API: e.API, Model: e.Model, Target: e.Target, Prefill: e.Prefill, PromptTokens: e.PromptTokens, MatchedTokens: e.Matched,
		CachedTokens: e.After.Cached, OutputTokens: e.After.Output, Status: cmp.Or(e.Rejected, e.After.Status), Reason: e.Reason, Degraded: e.Degraded, Waited: e.Waited.Seconds(), Ended: e.Rejected != 0}
	for _, s := range e.Stages {
		if s.Stage != StageLeg.String() && s.Stage != stageWait {
			r.Decision += s.Took.Seconds()
		}
	}
	if e.After.Ended != nil {
		r.Ended, r.Duration = true, e.After.Ended.Sub(e.At).Seconds()
	}
	return r
}

const (
	streamEvery = 200 * time.Millisecond
	// maxStreams bounds the readers of GET /debug/stream, maxStreamed the decisions sent to a reader each time: the
	// newest ones.
	maxStreams  = 32
	maxStreamed = 200
	// maxRunning bounds the open requests whose end is still to be sent to a reader.
	maxRunning = 2000
	// streamAlive is the longest silence of a stream, streamPatience how long a reader may take to read.
	streamAlive    = 15 * time.Second
	streamPatience = 10 * time.Second
)

// stream sends decisions as server-sent events: the last n, then each as it is made, and again
// when its request has ended. With follow=false it ends after the first ones.
func (p *Pages) stream(w http.ResponseWriter, r *http.Request) {
	n, ok := countParam(w, r, 50, 0, 10000)
	if !ok {
		return
	}
	if p.streams.Add(1) > maxStreams {
		p.streams.Add(-1)
		http.Error(w, "too many streams are open", http.StatusServiceUnavailable)
		return
	}
	defer p.streams.Add(-1)
	follow, hashes := r.URL.Query().Get("follow") != "false", r.URL.Query().Get("hashes") == "true"
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	out := http.NewResponseController(w)
	quiet := time.Now()
	send := func(format string, args ...any) bool {
		quiet = time.Now()
		_ = out.SetWriteDeadline(quiet.Add(streamPatience))
		_, err := fmt.Fprintf(w, format, args...)
		return err == nil
	}
	tick := time.NewTicker(streamEvery)
	defer tick.Stop()
	entries, seen := p.Decisions.Since(0, n)
	var running []*Entry
	for {
		next := running[:0]
		for i, e := range append(running, entries...) {
			row := e.Row()
			if !row.Ended {
				next = append(next, e)
			}
			if i < len(running) && !row.Ended {
				continue // has been sent
			}
			if hashes {
				row.HashIDs = e.HashIDs
			}
			text, err := json.Marshal(row)
			if err != nil || !send("data: %s\n\n", text) {
				return
			}
		}
		running = next[max(0, len(next)-maxRunning):]
		if time.Since(quiet) > streamAlive && !send(": alive\n\n") || out.Flush() != nil || !follow {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		}
		before := seen
		entries, seen = p.Decisions.Since(seen, maxStreamed)
		if skipped := seen - before - uint64(len(entries)); skipped > 0 && !send(": skipped %d\n\n", skipped) {
			return
		}
	}
}

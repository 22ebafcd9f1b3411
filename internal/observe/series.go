package observe

import (
	"strconv"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	"github.com/kvlane/kvlane/routing"
)

// Emit receives each series of a scrape: a gauge, or a counter if its name ends in _total. labels are pairs of name and
// value.
type Emit func(name, help string, value float64, labels ...string)

// TargetLoad is the load booked on a target.
type TargetLoad struct {
	Target kvindex.Target
	Load   routing.Load
	// Suspect reports that new requests avoid the target.
	Suspect bool
	// KVUsage is the used share of the KV cache that the engine reports, less than 0 if unknown.
	KVUsage float64
	// Bound is the number of conversations that are bound to the target.
	Bound int64
}

// Ledger is the exported part of the router's state.
type Ledger struct {
	Targets                      []TargetLoad
	Reservations, Waiting        int
	DoubleReleases, StaleReports uint64
	// Classes and Pools describe the queue; nil without flow.
	Classes []FlowClass
	Pools   []FlowPool
}

// FlowClass describes the waiting requests of a model and priority.
type FlowClass struct {
	Model    string `json:"model"`
	Priority int    `json:"priority"`
	Requests int64  `json:"requests"`
	Tokens   int64  `json:"tokens"`
}

// FlowPool sums up the targets of a model. Saturation is their mean saturation, 0 to 1; Drain is the time that they
// need to compute all queued and waiting prompts.
type FlowPool struct {
	Model      string        `json:"model"`
	Saturation float64       `json:"saturation"`
	Drain      time.Duration `json:"drain_ns"`
}

// Ledger emits the load of every target and the sums of the ledger.
func (emit Emit) Ledger(l *Ledger) {
	sum, squares, n := 0.0, 0.0, max(float64(len(l.Targets)), 1)
	for _, t := range l.Targets {
		sum += float64(t.Load.Active)
		squares += float64(t.Load.Active) * float64(t.Load.Active)
		labels := []string{"worker", t.Target.Worker, "rank", Rank(t.Target.Rank)}
		emit("active_requests", "Requests booked on a target.", float64(t.Load.Active), labels...)
		emit("queued_tokens", "Prefill tokens booked on a target before the first token.", float64(t.Load.Queue), labels...)
		emit("resident_tokens", "Prompt tokens of running requests on a target.", float64(t.Load.KV), labels...)
		emit("suspect_target", "1 if new requests avoid a target that does not answer or whose answers fail.", Gauge(t.Suspect), labels...)
	}
	emit("active_requests_mean", "Mean of active_requests over all targets.", sum/n)
	emit("active_requests_variance", "Variance of active_requests over all targets.", squares/n-(sum/n)*(sum/n))
	emit("reservations", "Reservations that have not ended.", float64(l.Reservations))
	emit("waiting_requests", "Requests that wait for capacity (flow or routing.wait).", float64(l.Waiting))
	for _, c := range l.Classes {
		priority := strconv.Itoa(c.Priority)
		emit("flow_waiting_requests", "Requests that wait in the queue (flow), by model and priority.", float64(c.Requests), "model", c.Model, "priority", priority)
		emit("flow_waiting_tokens", "Uncached prompt tokens of requests that wait in the queue (flow).", float64(c.Tokens), "model", c.Model, "priority", priority)
	}
	for _, p := range l.Pools {
		emit("flow_saturation", "How full the targets of a model are, 0 to 1: the mean of what each has most of, queued tokens of flow.hold_tokens or what routing.policy.limits bounds.", p.Saturation, "model", p.Model)
		emit("flow_drain_seconds", "Time to compute what is queued and waits for a model, at routing.prefill_rate.", p.Drain.Seconds(), "model", p.Model)
	}
	emit("double_releases_total", "Reservations that were given back twice; a bug if not 0.", float64(l.DoubleReleases))
	emit("stale_reports_total", "Load reports that were not believed.", float64(l.StaleReports))
}

// WorkerReady emits whether a worker may be picked.
func (emit Emit) WorkerReady(name, role string, ready bool) {
	emit("worker_ready", "1 if a worker may be picked.", Gauge(ready), "worker", name, "role", role)
}

// Warnings emits the reasons of warnings about workers.
func (emit Emit) Warnings(list []Warning) {
	for i, w := range list {
		if i == 0 || list[i-1].Worker != w.Worker || list[i-1].Reason != w.Reason {
			emit("worker_warnings", "1 for each reason why a worker is not ready or less useful than configured.", 1, "worker", w.Worker, "reason", w.Reason)
		}
	}
}

// Gauge is 1 if on, else 0.
func Gauge(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// Tokenizer emits the state of the comparison of a model's tokenizer with a worker's.
func (emit Emit) Tokenizer(model, worker, state string) {
	emit("tokenizer_state", "1 for what is known of a model's tokenizer and a worker's: unchecked, agrees or differs.", 1,
		"model", model, "worker", worker, "state", state)
}

// Index emits the index's sizes and counts. warmed is the number of targets that were loaded from another replica's copy
// of the index at the start.
func (emit Emit) Index(s kvindex.Stats, warmed int64) {
	for _, m := range []struct {
		name, help string
		value      int64
	}{
		{"index_bytes", "Memory of the index in use.", s.Bytes},
		{"index_reserved_bytes", "Memory that the index has taken.", s.Reserved},
		{"index_distinct_blocks", "Blocks that some target holds.", s.Blocks},
		{"index_segments", "Stretches of chains that the blocks are stored in.", int64(s.Segments)},
		{"index_speculative_blocks", "Blocks credited for what was sent, without an event yet.", s.Speculative},
		{"index_stored_blocks_total", "Blocks stored by events.", s.Stored},
		{"index_removed_blocks_total", "Blocks removed by events.", s.Removed},
		{"index_unknown_removed_blocks_total", "Blocks removed by events that the target was not known to hold.", s.UnknownRemoved},
		{"index_cleared_total", "Times that a target was cleared.", s.Cleared},
		{"index_evicted_blocks_total", "Blocks dropped for index.max_bytes.", s.Evicted},
		{"index_rebuilt_segments_total", "Segments split because most of their blocks were gone.", s.Rebuilt},
		{"index_warmed_targets", "Targets whose entries came from a peer's copy at the start.", warmed},
	} {
		emit(m.name, m.help, float64(m.value))
	}
	for why, n := range s.Refused {
		emit("index_refused_events_total", "Events that the index refused, by reason.", float64(n), "reason", why.Name())
	}
	for _, t := range s.Targets {
		labels := []string{"worker", t.Target.Worker, "rank", Rank(t.Target.Rank)}
		for tier, n := range t.Held {
			emit("index_blocks", "Blocks that a target holds, by tier.", float64(n), append(labels, "tier", tierNames[tier])...)
		}
		emit("index_aliases", "Holdings of a target beyond the plain one: repeated, of a further group, or by another name.", float64(t.Aliases), labels...)
		emit("index_window_blocks", "Blocks of a target in KV-cache groups with sliding windows.", float64(t.Windows), labels...)
		emit("index_pages", "Engine blocks of a target that are smaller than the index's.", float64(t.Pages), labels...)
	}
}

var tierNames = [...]string{"device", "host", "disk", "external"}

var feedStates = []feed.State{feed.Stale, feed.Syncing, feed.Live, feed.Gap}

// Feeds emits the state and the counts of every feed.
func (emit Emit) Feeds(feeds []feed.Status) {
	for _, st := range feeds {
		rank := ""
		if len(st.Targets) == 1 {
			rank = Rank(st.Targets[0].Target.Rank)
		}
		labels := []string{"worker", st.Worker, "rank", rank}
		for _, c := range []struct {
			name, help string
			value      uint64
		}{
			{"feed_events_total", "KV events applied.", st.Events},
			{"feed_blocks_total", "Blocks in KV events applied.", st.Blocks},
			{"feed_batches_total", "Batches of events applied.", st.Counts.Applied},
			{"feed_duplicate_batches_total", "Batches of events that had been applied already.", st.Counts.Duplicates},
			{"feed_gaps_total", "Times that batches of events were missing.", st.Counts.Gaps},
			{"feed_missing_batches_total", "Batches of events that were missing when a gap was found.", st.Counts.Missing},
			{"feed_recovered_batches_total", "Batches of events applied from replays.", st.Counts.Recovered},
			{"feed_lost_batches_total", "Batches of events that could not be had.", st.Counts.Lost},
			{"feed_restarts_total", "Engine restarts seen in the events.", st.Counts.Restarts},
			{"feed_clears_total", "Times that what a feed's targets hold was forgotten.", st.Counts.Clears},
			{"feed_replays_total", "Replays asked for.", st.Counts.Replays},
			{"feed_replay_failures_total", "Replays that failed.", st.Counts.Failures},
			{"feed_overflows_total", "Batches of events dropped because too many waited for a replay.", st.Counts.Overflows},
			{"feed_silences_total", "Times that requests finished without an event.", st.Counts.Silences},
			{"feed_connects_total", "Connections made, or polls answered.", st.Connects},
			{"feed_errors_total", "Connections that failed or broke.", st.Errors},
		} {
			emit(c.name, c.help, float64(c.value), labels...)
		}
		for why, n := range st.Dropped {
			emit("feed_dropped_events_total", "KV events not applied, by reason.", float64(n), append(labels, "reason", string(why))...)
		}
		for _, t := range st.Targets {
			for _, s := range feedStates {
				emit("feed_state", "1 for the state that a target's feed is in.", Gauge(s == t.State), "worker", t.Target.Worker, "rank", Rank(t.Target.Rank), "state", s.String())
			}
		}
	}
}

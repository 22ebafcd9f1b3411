package decide

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/kvlane/kvlane/internal/telemetry"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// maxReplays bounds the replays that run at once: after a restart with a thousand
// feeds the engines' histories come in turn.
const maxReplays = 8

// feeds runs the event feeds of all workers.
type feeds struct {
	d      *Decider
	ctx    context.Context
	cancel context.CancelFunc
	limit  *feed.Limit

	mu      sync.Mutex
	running map[*feedHandle]struct{}
}

// feedHandle is the feeds of one worker, one a rank.
type feedHandle struct {
	feeds  *feeds
	bySlot map[kvindex.Slot]*feed.Feed
}

func newFeeds(d *Decider) *feeds {
	f := &feeds{d: d, limit: feed.NewLimit(maxReplays), running: map[*feedHandle]struct{}{}}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

func (f *feeds) close() {
	f.cancel()
	f.mu.Lock()
	all := make([]*feedHandle, 0, len(f.running))
	for h := range f.running {
		all = append(all, h)
	}
	f.mu.Unlock()
	for _, h := range all {
		h.stop()
	}
}

// startFeed begins to follow a worker's events. A worker without events, or with
// some that cannot be followed, is routed by load and by what was sent to it.
func (d *Decider) startFeed(m *member, places []place) *feedHandle {
	h := &feedHandle{feeds: d.feeds, bySlot: map[kvindex.Slot]*feed.Feed{}}
	if m.Events.Endpoint == "" {
		return h
	}
	for i, slot := range m.slots {
		src := feed.Source{
			Worker: m.Name, Engine: feed.Engine(m.Engine), Rank: places[i].target.Rank, BlockSize: m.BlockSize,
			Topic: m.Events.Topic, Replays: d.feeds.limit,
		}
		var err error
		if strings.HasPrefix(m.Events.Endpoint, "http") {
			src.PollURL = m.Events.Endpoint
			if i > 0 {
				break // one poller: polling drains the engine's buffer
			}
			src.RankFromBatch = len(m.slots) > 1
		} else {
			src.Endpoint, err = rankEndpoint(m.Events.Endpoint, i)
			if err == nil && m.Events.Replay != "" {
				src.Replay, err = rankEndpoint(m.Events.Replay, i)
			}
		}
		var running *feed.Feed
		if err == nil {
			running, err = feed.Start(d.feeds.ctx, src, &sink{d: d, m: m, places: places})
		}
		if err != nil {
			d.log.Error().Err(err).Str("worker", m.Name).Msg("no events from this worker")
			continue
		}
		h.bySlot[slot] = running
	}
	d.feeds.mu.Lock()
	d.feeds.running[h] = struct{}{}
	d.feeds.mu.Unlock()
	return h
}

// rankEndpoint is the endpoint of a worker's i-th rank: engines add the rank to the
// port.
func rankEndpoint(endpoint string, i int) (string, error) {
	if i == 0 {
		return endpoint, nil
	}
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("endpoint %s: several ranks need tcp", endpoint)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return "", fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return "", fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(n+i)), nil
}

func (h *feedHandle) stop() {
	if h == nil {
		return
	}
	for _, f := range h.bySlot {
		f.Close()
	}
	h.feeds.mu.Lock()
	delete(h.feeds.running, h)
	h.feeds.mu.Unlock()
}

// finished tells a target's feed that a request with new blocks ended there.
func (h *feedHandle) finished(slot kvindex.Slot, t kvindex.Target) {
	f := h.bySlot[slot]
	if f == nil {
		for _, only := range h.bySlot { // a poller serves all ranks
			f = only
		}
	}
	if f != nil {
		f.Finished(t)
	}
}

// sink puts a worker's events into the index. It implements feed.Sink.
type sink struct {
	d      *Decider
	m      *member
	places []place
}

func (s *sink) slot(t kvindex.Target) (kvindex.Slot, bool) {
	for i := range s.places {
		if s.places[i].target == t {
			return s.m.slots[i], true
		}
	}
	return 0, false
}

// Apply implements feed.Sink.
func (s *sink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	slot, ok := s.slot(t)
	if !ok {
		return fmt.Errorf("no target %s", t)
	}
	return s.d.index.Apply(slot, ev)
}

// Clear implements feed.Sink.
func (s *sink) Clear(t kvindex.Target, why feed.Reason) {
	slot, ok := s.slot(t)
	if !ok {
		return
	}
	if err := s.d.index.Apply(slot, &kvindex.Event{Kind: kvindex.Cleared}); err != nil {
		s.d.log.Error().Err(err).Stringer("target", t).Msg("target not cleared")
		return
	}
	s.d.log.Info().Stringer("target", t).Str("reason", string(why)).Msg("target cleared")
}

// State implements feed.Sink.
func (s *sink) State(t kvindex.Target, state feed.State, why feed.Reason) {
	line := s.d.log.Info()
	if state == feed.Gap || state == feed.Stale {
		line = s.d.log.Warn()
	}
	line.Stringer("target", t).Stringer("state", state).Str("reason", string(why)).Msg("feed changed")
}

// Warn implements feed.Sink.
func (s *sink) Warn(t kvindex.Target, why feed.Reason, detail string) {
	s.d.log.Warn().Stringer("target", t).Str("reason", string(why)).Str("detail", detail).Msg("feed warning")
}

// FeedStatus is the state of every feed, for the debug page and readiness.
func (d *Decider) FeedStatus() []feed.Status {
	var out []feed.Status
	for _, m := range d.fleet.Load().members {
		for _, f := range m.feed.bySlot {
			out = append(out, f.Status())
		}
	}
	return out
}

var feedStates = []feed.State{feed.Stale, feed.Syncing, feed.Live, feed.Gap}

func (f *feeds) collect(emit func(name, help string, value float64, labels ...string)) {
	for _, st := range f.d.FeedStatus() {
		rank := ""
		if len(st.Targets) == 1 {
			rank = telemetry.Rank(st.Targets[0].Target.Rank)
		}
		labels := []string{"worker", st.Worker, "rank", rank}
		emit("feed_events_total", "KV events applied.", float64(st.Events), labels...)
		emit("feed_blocks_total", "Blocks in KV events applied.", float64(st.Blocks), labels...)
		emit("feed_gaps_total", "Times that batches of events were missing.", float64(st.Counts.Gaps), labels...)
		emit("feed_lost_batches_total", "Batches of events that could not be had.", float64(st.Counts.Lost), labels...)
		emit("feed_restarts_total", "Engine restarts seen in the events.", float64(st.Counts.Restarts), labels...)
		emit("feed_errors_total", "Connections that failed or broke.", float64(st.Errors), labels...)
		for why, n := range st.Dropped {
			emit("feed_dropped_events_total", "KV events not applied, by reason.", float64(n), append(labels, "reason", string(why))...)
		}
		for _, t := range st.Targets {
			for _, s := range feedStates {
				on := 0.0
				if s == t.State {
					on = 1
				}
				emit("feed_state", "1 for the state that a target's feed is in.", on, "worker", t.Target.Worker, "rank", telemetry.Rank(t.Target.Rank), "state", s.String())
			}
		}
	}
}

// Syncing says which feed has not caught up yet, "" if all have or cannot.
func (d *Decider) Syncing() string {
	for _, s := range d.FeedStatus() {
		for _, t := range s.Targets {
			if t.State == feed.Syncing || t.State == feed.Stale && s.Errors == 0 {
				return fmt.Sprintf("events of %s are %s", t.Target, t.State)
			}
		}
	}
	return ""
}

package decide

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/telemetry"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
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
	push   *feed.PushServer

	mu      sync.Mutex
	running map[*feedHandle]struct{}
	pushed  map[string]*feedHandle // by worker, those that relays push for

	// still is held for reading while events of a batch go into the index, and for
	// writing while a copy of it is made.
	still  sync.RWMutex
	warmMu sync.Mutex
	warm   map[kvindex.Target]warmTarget
	warmed atomic.Int64 // targets that a peer's copy brought
}

// feedHandle is the feeds of one worker, one a rank, or that it is pushed.
type feedHandle struct {
	feeds  *feeds
	bySlot map[kvindex.Slot]*feed.Feed
	sink   *sink
	pushed bool
}

func newFeeds(d *Decider) *feeds {
	f := &feeds{
		d: d, limit: feed.NewLimit(maxReplays), running: map[*feedHandle]struct{}{}, pushed: map[string]*feedHandle{},
		warm: map[kvindex.Target]warmTarget{},
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.push = feed.NewPushServer(pushSink{f}, f.accept)
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
// resume has, for each place, where its events go on, nil for the beginning.
func (d *Decider) startFeed(m *member, places []place, resume []*feed.Cursor) *feedHandle {
	h := &feedHandle{feeds: d.feeds, bySlot: map[kvindex.Slot]*feed.Feed{}, sink: &sink{d: d, m: m, places: places, cursors: make([]feed.Cursor, len(places))}}
	switch m.Events.Endpoint {
	case "":
		return h
	case config.PushEndpoint:
		h.pushed = true
		for i, c := range resume {
			if c != nil {
				h.sink.cursors[i] = *c
				d.feeds.push.Resume(places[i].target, *c)
			}
		}
	default:
		for i, slot := range m.slots {
			running, err := d.followRank(m, places, i, resume[i], h.sink)
			if err != nil {
				d.log.Error().Err(err).Str("worker", m.Name).Msg("no events from this worker")
				continue
			}
			if running != nil {
				h.bySlot[slot] = running
			}
		}
	}
	d.feeds.mu.Lock()
	defer d.feeds.mu.Unlock()
	d.feeds.running[h] = struct{}{}
	if h.pushed {
		d.feeds.pushed[m.Name] = h
	}
	return h
}

// followRank starts the feed of a worker's i-th target; nil where another one's
// serves it too.
func (d *Decider) followRank(m *member, places []place, i int, resume *feed.Cursor, into *sink) (*feed.Feed, error) {
	src := feed.Source{
		Worker: m.Name, Engine: feed.Engine(m.Engine), Rank: places[i].target.Rank, BlockSize: m.BlockSize,
		Topic: m.Events.Topic, Bind: m.Events.Bind, Replays: d.feeds.limit,
	}
	if strings.HasPrefix(m.Events.Endpoint, "http") {
		if i > 0 {
			return nil, nil // one poller: polling drains the engine's buffer
		}
		src.PollURL = m.Events.Endpoint
		src.RankFromBatch = len(m.slots) > 1
		return feed.Start(d.feeds.ctx, src, into)
	}
	var err error
	if src.Endpoint, err = rankEndpoint(m.Events.Endpoint, i); err != nil {
		return nil, err
	}
	if m.Events.Replay != "" {
		if src.Replay, err = rankEndpoint(m.Events.Replay, i); err != nil {
			return nil, err
		}
	}
	if resume != nil {
		src.Machine.Resume = resume
		into.cursors[i] = *resume
	}
	return feed.Start(d.feeds.ctx, src, into)
}

// Push is the gRPC service that relays push events to.
func (d *Decider) Push() *feed.PushServer { return d.feeds.push }

// accept says whether a relay may push for a worker.
func (f *feeds) accept(hello *kvlanev1.Hello) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.pushed[hello.GetWorker()]
	if h == nil {
		return fmt.Errorf("no worker %q with events endpoint %q", hello.GetWorker(), config.PushEndpoint)
	}
	t := kvindex.Target{Worker: hello.GetWorker(), Rank: kvindex.NoRank}
	if hello.Rank != nil {
		t.Rank = hello.GetRank()
	}
	if _, _, ok := h.sink.slot(t); !ok {
		return fmt.Errorf("no target %s", t)
	}
	if engine := h.sink.m.Engine; hello.GetEngine() != engine {
		return fmt.Errorf("engine %q, the worker is configured as %q", hello.GetEngine(), engine)
	}
	return nil
}

// cursors is how far the events of each slot are in the index, for those that
// another replica can go on from. feeds.still is held for writing.
func (f *feeds) cursors() map[kvindex.Slot]feed.Cursor {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[kvindex.Slot]feed.Cursor{}
	for h := range f.running {
		if !resumable(&h.sink.m.Worker.Worker) {
			continue
		}
		for i, slot := range h.sink.m.slots {
			if c := h.sink.cursors[i]; c.Next > 0 {
				out[slot] = c
			}
		}
	}
	return out
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

// stop ends the feeds; nothing of them reaches the index when it returns.
func (h *feedHandle) stop() {
	if h == nil {
		return
	}
	for _, f := range h.bySlot {
		f.Close()
	}
	h.feeds.mu.Lock()
	delete(h.feeds.running, h)
	if h.pushed {
		delete(h.feeds.pushed, h.sink.m.Name) // from here on no relay is accepted
	}
	h.feeds.mu.Unlock()
	if h.pushed {
		h.feeds.push.Forget(h.sink.m.Name)
	}
}

// finished tells a target's feed that a request with new blocks ended there; silent
// says that no events came from there since it was decided.
func (h *feedHandle) finished(slot kvindex.Slot, t kvindex.Target, silent bool) {
	if h.pushed {
		h.feeds.push.Finished(t, silent)
		return
	}
	f := h.bySlot[slot]
	if f == nil {
		for _, only := range h.bySlot { // a poller serves all ranks
			f = only
		}
	}
	if f != nil {
		f.Finished(t, silent)
	}
}

// sink puts a worker's events into the index. It implements feed.Batcher.
type sink struct {
	d      *Decider
	m      *member
	places []place
	// cursors has, by place, where the sequence stands whose events are in the index;
	// zero if they cannot be told. Changed under feeds.still.
	cursors []feed.Cursor
}

// slot finds a target's slot and place.
func (s *sink) slot(t kvindex.Target) (slot kvindex.Slot, at int, ok bool) {
	for i := range s.places {
		if s.places[i].target == t {
			return s.m.slots[i], i, true
		}
	}
	return 0, 0, false
}

// BeginBatch implements feed.Batcher.
func (s *sink) BeginBatch(kvindex.Target) { s.d.feeds.still.RLock() }

// EndBatch implements feed.Batcher.
func (s *sink) EndBatch(t kvindex.Target, c feed.Cursor) {
	if _, at, ok := s.slot(t); ok {
		s.cursors[at] = c
		s.m.tallies[at].batches.Add(1)
	}
	s.d.feeds.still.RUnlock()
}

// Apply implements feed.Sink.
func (s *sink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	slot, _, ok := s.slot(t)
	if !ok {
		return fmt.Errorf("no target %s", t)
	}
	if err := s.d.index.Apply(slot, ev); err != nil {
		return err
	}
	if size := int32(ev.BlockSize); ev.Kind == kvindex.Stored && size > 0 && s.m.blockSize.Load() != size {
		s.m.blockSize.Store(size)
		s.d.sawBlocks(size)
	}
	return nil
}

// Clear implements feed.Sink.
func (s *sink) Clear(t kvindex.Target, why feed.Reason) {
	slot, at, ok := s.slot(t)
	if !ok {
		return
	}
	s.d.feeds.still.RLock()
	defer s.d.feeds.still.RUnlock()
	s.cursors[at] = feed.Cursor{}
	if err := s.d.index.Apply(slot, &kvindex.Event{Kind: kvindex.Cleared}); err != nil {
		s.d.log.Error().Err(err).Stringer("target", t).Msg("target not cleared")
		return
	}
	if why == feed.Restarted {
		s.d.recheck(s.m.Name)
	}
	s.d.log.Info().Stringer("target", t).Str("reason", string(why)).Msg("target cleared")
}

// State implements feed.Sink.
func (s *sink) State(t kvindex.Target, state feed.State, why feed.Reason) {
	line := s.d.log.Info()
	if state == feed.Gap || state == feed.Stale {
		line = s.d.log.Warn()
	}
	if why == feed.Connected || why == feed.Restarted {
		s.d.recheck(s.m.Name)
	}
	line.Stringer("target", t).Stringer("state", state).Str("reason", string(why)).Msg("feed changed")
}

// Warn implements feed.Sink.
func (s *sink) Warn(t kvindex.Target, why feed.Reason, detail string) {
	s.d.log.Warn().Stringer("target", t).Str("reason", string(why)).Str("detail", detail).Msg("feed warning")
}

// pushSink hands what relays push to the sink of the worker. It implements
// feed.Batcher.
type pushSink struct{ f *feeds }

func (p pushSink) of(t kvindex.Target) *sink {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	if h := p.f.pushed[t.Worker]; h != nil {
		return h.sink
	}
	return nil // the worker has just been removed, and its publishers are about to be
}

// BeginBatch implements feed.Batcher.
func (p pushSink) BeginBatch(kvindex.Target) { p.f.still.RLock() }

// EndBatch implements feed.Batcher.
func (p pushSink) EndBatch(t kvindex.Target, c feed.Cursor) {
	if s := p.of(t); s != nil {
		s.EndBatch(t, c)
		return
	}
	p.f.still.RUnlock()
}

// Apply implements feed.Sink.
func (p pushSink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	if s := p.of(t); s != nil {
		return s.Apply(t, ev)
	}
	return fmt.Errorf("no target %s", t)
}

// Clear implements feed.Sink.
func (p pushSink) Clear(t kvindex.Target, why feed.Reason) {
	if s := p.of(t); s != nil {
		s.Clear(t, why)
	}
}

// State implements feed.Sink.
func (p pushSink) State(t kvindex.Target, state feed.State, why feed.Reason) {
	if s := p.of(t); s != nil {
		s.State(t, state, why)
	}
}

// Warn implements feed.Sink.
func (p pushSink) Warn(t kvindex.Target, why feed.Reason, detail string) {
	if s := p.of(t); s != nil {
		s.Warn(t, why, detail)
	}
}

var (
	_ feed.Batcher = (*sink)(nil)
	_ feed.Batcher = pushSink{}
)

// FeedStatus is the state of every feed, for the debug page, the metrics and
// readiness. A target that relays push for is stale until one does.
func (d *Decider) FeedStatus() []feed.Status {
	out := d.feeds.push.Statuses()
	come := map[kvindex.Target]bool{}
	for i := range out {
		for _, t := range out[i].Targets {
			come[t.Target] = true
		}
	}
	for _, m := range d.fleet.Load().members {
		for _, f := range m.feed.bySlot {
			out = append(out, f.Status())
		}
		if !m.feed.pushed {
			continue
		}
		for _, p := range m.feed.sink.places {
			if !come[p.target] {
				out = append(out, feed.Status{Worker: m.Name, Targets: []feed.TargetStatus{{Target: p.target}}})
			}
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
				on := 0.0
				if s == t.State {
					on = 1
				}
				emit("feed_state", "1 for the state that a target's feed is in.", on, "worker", t.Target.Worker, "rank", telemetry.Rank(t.Target.Rank), "state", s.String())
			}
		}
	}
}

// Syncing says which feed has not caught up yet, "" if all have or cannot. Relays
// that have not come are not waited for.
func (d *Decider) Syncing() string {
	members := d.fleet.Load().members
	for _, s := range d.FeedStatus() {
		m := members[s.Worker]
		waits := s.Errors == 0 && m != nil && !m.feed.pushed
		for _, t := range s.Targets {
			if t.State == feed.Syncing || t.State == feed.Stale && waits {
				return fmt.Sprintf("events of %s are %s", t.Target, t.State)
			}
		}
	}
	return ""
}

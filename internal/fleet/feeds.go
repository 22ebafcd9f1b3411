package fleet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/semaphore"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	"github.com/kvlane/kvlane/kvindex/feed/zmtp"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// maxReplays bounds concurrent replays: after a restart with a thousand feeds the engines' histories are fetched a few at a
// time. workerReplays bounds those of one worker, whose replays may be slow or endless.
// maxLarge bounds the large batches that are received or applied at a time: while one is applied, another arrives. A worker
// has one of them, so that workers take turns. maxPending and workerPending bound the bytes of batches that wait for a replay.
const maxReplays, workerReplays, maxLarge, maxPending, workerPending = 8, 2, 2, 128 << 20, 32 << 20

// feeds runs the event feeds of all workers.
type feeds struct {
	ctx                   context.Context
	cancel                context.CancelFunc
	limit, large, pending *semaphore.Weighted
	push                  *feed.PushServer

	mu      sync.Mutex
	running map[string]*feedHandle // by worker

	// snapshot is read-locked while the events of a batch are applied, and write-locked while a copy of the index is made.
	snapshot sync.RWMutex
	warmMu   sync.Mutex
	warm     map[kvindex.Target]warmTarget
	warmed   atomic.Int64 // targets that were loaded from a peer's copy
}

// feedHandle holds the feeds of one worker: one per rank, none if relays push its events.
type feedHandle struct {
	feeds  *feeds
	bySlot map[kvindex.Slot]*feed.Feed
	sink   *sink
	pushed bool
	late   *time.Timer // of a pushed feed: warns that no relay has connected
}

func newFeeds() *feeds {
	f := &feeds{limit: semaphore.NewWeighted(maxReplays), large: semaphore.NewWeighted(maxLarge), pending: semaphore.NewWeighted(maxPending), running: map[string]*feedHandle{}, warm: map[kvindex.Target]warmTarget{}}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.push = feed.NewPushServer(f.accept)
	f.push.Large = []*semaphore.Weighted{f.large}
	return f
}

func (f *feeds) close() {
	f.cancel()
	f.mu.Lock()
	all := slices.Collect(maps.Values(f.running))
	f.mu.Unlock()
	for _, h := range all {
		h.stop()
	}
}

// relayWait is how long a relay may take to connect before a warning is logged. feedLines bounds the log lines about a
// worker's feeds in 10 s, because a sender of events could otherwise cause three with each batch. maxBatch bounds a
// batch in bytes: engines send less than 1 MiB, and the feed may hold and decode one for each rank.
const relayWait, feedLines, maxBatch = time.Second, 500, 16 << 20

// startFeed follows a worker's events. A worker without events, or with events that cannot be followed, is routed by
// load and by the prompts sent to it. resume has, by endpoint, the cursor to continue from; nil for the beginning.
func (f *Fleet) startFeed(m *Member, all []Endpoint, resume []*feed.Cursor) *feedHandle {
	h := &feedHandle{feeds: f.feeds, bySlot: map[kvindex.Slot]*feed.Feed{}, sink: &sink{fleet: f, m: m, endpoints: all, cursors: make([]feed.Cursor, len(all)), replays: semaphore.NewWeighted(workerReplays), large: semaphore.NewWeighted(1), pending: []*semaphore.Weighted{semaphore.NewWeighted(workerPending), f.feeds.pending}}}
	h.sink.log = f.Log.Sample(&zerolog.BurstSampler{Burst: feedLines, Period: 10 * time.Second})
	switch m.Events.Endpoint {
	case "":
		return h
	case config.PushEndpoint:
		h.pushed = true
		h.late = time.AfterFunc(relayWait, func() {
			if !slices.ContainsFunc(all, func(e Endpoint) bool { return f.feeds.push.Pushes(e.Target) }) {
				f.Log.Warn().Str("worker", m.Name).Str("reason", "no_relay").Msg("no relay pushes events of this worker")
			}
		})
		for i, c := range resume {
			if c != nil {
				h.sink.cursors[i] = *c
				f.feeds.push.Resume(all[i].Target, *c)
			}
		}
	default:
		for i, slot := range m.Slots {
			switch running, err := f.followRank(m, all, i, resume[i], h.sink); {
			case err != nil:
				f.Log.Error().Err(err).Str("worker", m.Name).Msg("no events from this worker")
			case running != nil:
				h.bySlot[slot] = running
			}
		}
	}
	f.feeds.mu.Lock()
	defer f.feeds.mu.Unlock()
	f.feeds.running[m.Name] = h
	return h
}

// followRank starts the feed of a worker's i-th target. It returns nil if the feed of another target serves it too.
func (f *Fleet) followRank(m *Member, all []Endpoint, i int, resume *feed.Cursor, into *sink) (*feed.Feed, error) {
	src := feed.Source{
		Worker: m.Name, Engine: feed.Engine(m.Engine), Rank: all[i].Target.Rank, BlockSize: m.BlockSize,
		Topic: m.Events.Topic, Bind: m.Events.Bind, Replays: []*semaphore.Weighted{into.replays, f.feeds.limit}, Large: []*semaphore.Weighted{into.large, f.feeds.large}, Conn: zmtp.Options{MaxMessage: maxBatch}, Machine: feed.MachineConfig{Pending: into.pending},
	}
	if strings.HasPrefix(m.Events.Endpoint, "http") {
		if i > 0 {
			return nil, nil // a single poller: polling drains the engine's buffer
		}
		src.PollURL = m.Events.Endpoint
		src.RankFromBatch = len(m.Slots) > 1
		return feed.Start(f.feeds.ctx, src, into)
	}
	var err error
	if src.Endpoint, err = workers.RankEndpoint(m.Events.Endpoint, i); err != nil {
		return nil, err
	}
	if m.Events.Replay != "" {
		if src.Replay, err = workers.RankEndpoint(m.Events.Replay, i); err != nil {
			return nil, err
		}
	}
	if resume != nil {
		src.Machine.Resume = resume
		into.cursors[i] = *resume
	}
	return feed.Start(f.feeds.ctx, src, into)
}

// Push returns the gRPC service that relays push events to.
func (f *Fleet) Push() *feed.PushServer { return f.feeds.push }

// accept returns the sink of the worker that a relay pushes for, or why it may not.
func (f *feeds) accept(hello *kvlanev1.Hello) (feed.Sink, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.running[hello.GetWorker()]
	if h == nil || !h.pushed {
		return nil, fmt.Errorf("no worker %q with events endpoint %q", hello.GetWorker(), config.PushEndpoint)
	}
	t := kvindex.Target{Worker: hello.GetWorker(), Rank: kvindex.NoRank}
	if hello.Rank != nil {
		t.Rank = hello.GetRank()
	}
	if _, _, ok := h.sink.slot(t); !ok {
		return nil, fmt.Errorf("no target %s", t)
	}
	if engine := h.sink.m.Engine; hello.GetEngine() != engine {
		return nil, fmt.Errorf("engine %q, the worker is configured as %q", hello.GetEngine(), engine)
	}
	return h.sink, nil
}

// cursors returns the position up to which each slot's events are applied, for feeds that
// another replica can resume. The caller holds feeds.snapshot for writing.
func (f *feeds) cursors() map[kvindex.Slot]feed.Cursor {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[kvindex.Slot]feed.Cursor{}
	for _, h := range f.running {
		if !resumable(&h.sink.m.Worker.Worker) {
			continue
		}
		for i, slot := range h.sink.m.Slots {
			if c := h.sink.cursors[i]; c.Next > 0 {
				out[slot] = c
			}
		}
	}
	return out
}

// stop ends the feeds; after it returns no further event is applied.
func (h *feedHandle) stop() {
	if h == nil {
		return
	}
	var closing sync.WaitGroup
	for _, f := range h.bySlot {
		closing.Go(f.Close)
	}
	closing.Wait()
	h.feeds.mu.Lock()
	if h.feeds.running[h.sink.m.Name] == h { // another one belongs to the worker's successor
		delete(h.feeds.running, h.sink.m.Name) // from here on no relay is accepted
	}
	h.feeds.mu.Unlock()
	if h.pushed {
		h.late.Stop()
		h.feeds.push.Forget(h.sink.m.Name)
	}
}

// Finished informs a target's feed that a request with new blocks ended there. silent reports that no event has arrived
// from the target since the request was decided.
func (m *Member) Finished(slot kvindex.Slot, t kvindex.Target, silent bool) {
	h := m.feed
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

// sink applies a worker's events to the index. It implements feed.Batcher, feed.Turner and feed.Limiter.
type sink struct {
	turn           sync.Mutex
	fleet          *Fleet
	m              *Member
	endpoints      []Endpoint
	log            zerolog.Logger
	replays, large *semaphore.Weighted
	pending        []*semaphore.Weighted
	// cursors holds, by endpoint, the position up to which events are applied, zero if unknown. Guarded by feeds.snapshot.
	cursors []feed.Cursor
}

// slot returns a target's slot and its position in endpoints.
func (s *sink) slot(t kvindex.Target) (slot kvindex.Slot, at int, ok bool) {
	for i := range s.endpoints {
		if s.endpoints[i].Target == t {
			return s.m.Slots[i], i, true
		}
	}
	return 0, 0, false
}

// address is the endpoint of a target's events: the rank's, or the worker's if one poll serves all ranks.
func (s *sink) address(t kvindex.Target) string {
	if _, at, ok := s.slot(t); ok {
		if own, err := workers.RankEndpoint(s.m.Events.Endpoint, at); err == nil {
			return own
		}
	}
	return s.m.Events.Endpoint
}

func (s *sink) BeginBatch(kvindex.Target) { s.fleet.feeds.snapshot.RLock() }

func (s *sink) EndBatch(t kvindex.Target, c feed.Cursor) {
	if _, at, ok := s.slot(t); ok {
		s.cursors[at] = c
		s.m.counters[at].Batches.Add(1)
	}
	s.fleet.feeds.snapshot.RUnlock()
}

func (s *sink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	slot, _, ok := s.slot(t)
	if !ok {
		return fmt.Errorf("no target %s", t)
	}
	if err := s.fleet.index.Apply(slot, ev); err != nil {
		return err
	}
	if size := int32(ev.BlockSize); ev.Kind == kvindex.Stored && size > 0 && ev.Window == 0 && s.m.blockSize.Load() != size {
		s.m.blockSize.Store(size)
		s.fleet.sawBlocks(size)
	}
	return nil
}

func (s *sink) Clear(t kvindex.Target, why feed.Reason) {
	slot, at, ok := s.slot(t)
	if !ok {
		return
	}
	s.fleet.feeds.snapshot.RLock()
	defer s.fleet.feeds.snapshot.RUnlock()
	s.cursors[at] = feed.Cursor{}
	if err := s.fleet.index.Apply(slot, &kvindex.Event{Kind: kvindex.Cleared}); err != nil {
		s.fleet.Log.Error().Err(err).Stringer("target", t).Msg("target not cleared")
		return
	}
	if why == feed.Restarted {
		s.fleet.recheck(s.m.Name)
	}
	s.log.Info().Stringer("target", t).Str("reason", string(why)).Msg("target cleared")
}

func (s *sink) State(t kvindex.Target, state feed.State, why feed.Reason) {
	level := zerolog.InfoLevel
	if (state == feed.Gap || state == feed.Stale) && s.fleet.feeds.ctx.Err() == nil { // Close disconnects all
		level = zerolog.WarnLevel
	}
	if why == feed.Connected || why == feed.Restarted {
		s.fleet.recheck(s.m.Name)
	}
	s.log.WithLevel(level).Stringer("target", t).Stringer("state", state).Str("reason", string(why)).Msg("feed changed")
}

func (s *sink) Warn(t kvindex.Target, why feed.Reason, detail string) {
	s.fleet.Log.Warn().Stringer("target", t).Str("endpoint", s.address(t)).Str("reason", string(why)).Str("detail", observe.ClipTo(detail, observe.MaxText)).Msg("feed warning")
}

func (s *sink) Turn() *sync.Mutex { return &s.turn }

func (s *sink) Pending() []*semaphore.Weighted { return s.pending }

var (
	_ feed.Batcher = (*sink)(nil)
	_ feed.Turner  = (*sink)(nil)
	_ feed.Limiter = (*sink)(nil)
)

// FeedStatus returns the state of every feed, for the debug page, the metrics and
// readiness. A target that relays push for is stale until one connects.
func (f *Fleet) FeedStatus() []feed.Status {
	out := f.feeds.push.Statuses()
	pushed := map[kvindex.Target]bool{}
	for i := range out {
		for _, t := range out[i].Targets {
			pushed[t.Target] = true
		}
	}
	for _, m := range f.View().members {
		for _, running := range m.feed.bySlot {
			out = append(out, running.Status())
		}
		if !m.feed.pushed {
			continue
		}
		for _, e := range m.feed.sink.endpoints {
			if !pushed[e.Target] {
				out = append(out, feed.Status{Worker: m.Name, Targets: []feed.TargetStatus{{Target: e.Target}}})
			}
		}
	}
	return out
}

// Syncing names a feed that has not caught up but may still do so, "" if there is none. Relays that have not connected
// are ignored.
func (f *Fleet) Syncing() string {
	members := f.View().members
	for _, s := range f.FeedStatus() {
		m := members[s.Worker]
		waits := s.Errors < 2 && m != nil && !m.feed.pushed // the first attempt is short
		for _, t := range s.Targets {
			if t.State == feed.Syncing || t.State == feed.Stale && waits {
				return fmt.Sprintf("events of %s are %s", t.Target, t.State)
			}
		}
	}
	return ""
}

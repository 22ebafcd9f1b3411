package feed

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// rawEngine publishes what send writes to each connection.
func rawEngine(t *testing.T, send func(c net.Conn)) (endpoint string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = c.Write(pubHello)
				go send(c)
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	return "tcp://" + l.Addr().String()
}

// pubHello is what a publisher writes before its batches.
var pubHello = slices.Concat([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL"), make([]byte, 48), []byte("\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"))

// batchFrame is a message with one removal, of about that many bytes.
func batchFrame(seq uint64, size int) []byte {
	payload := []byte("\x92\x00\x91\x92\xacBlockRemoved\xdd")
	n := size / 9
	payload = binary.BigEndian.AppendUint32(payload, uint32(n))
	payload = append(payload, bytes.Repeat([]byte("\xcf\x01\x02\x03\x04\x05\x06\x07\x08"), n)...)
	head := append(binary.BigEndian.AppendUint64([]byte("\x01\x00\x01\x08"), seq), 2)
	return append(binary.BigEndian.AppendUint64(head, uint64(len(payload))), payload...)
}

// gated is a sink of a worker whose calls of Apply wait until they are let go.
type gated struct {
	worker  string
	turn    sync.Mutex
	arrived chan string // the names of targets whose event waits in Apply
	letGo   chan struct{}
	mu      *sync.Mutex
	now     map[string]int // calls of Apply at this time, by worker
	most    map[string]int
	blocks  int // most of an event
}

func (g *gated) Turn() *sync.Mutex { return &g.turn }

func (g *gated) Apply(t kvindex.Target, ev *kvindex.Event) error {
	g.mu.Lock()
	g.now[g.worker]++
	g.most[g.worker] = max(g.most[g.worker], g.now[g.worker])
	g.blocks = max(g.blocks, len(ev.Hashes))
	g.mu.Unlock()
	g.arrived <- t.String()
	<-g.letGo
	g.mu.Lock()
	g.now[g.worker]--
	g.mu.Unlock()
	return nil
}

func (g *gated) Clear(kvindex.Target, Reason)        {}
func (g *gated) State(kvindex.Target, State, Reason) {}
func (g *gated) Warn(kvindex.Target, Reason, string) {}

// flooded starts that many feeds of each worker, whose engines send batches without end of size bytes each.
func flooded(t *testing.T, arrived chan string, letGo chan struct{}, places int64, sizes map[string]int, ranks int) (map[string]*gated, []*Feed) {
	t.Helper()
	all := semaphore.NewWeighted(places)
	var mu sync.Mutex
	now, most := map[string]int{}, map[string]int{}
	sinks, feeds := map[string]*gated{}, []*Feed(nil)
	ctx, cancel := context.WithCancel(t.Context())
	for worker, size := range sizes {
		g := &gated{worker: worker, arrived: arrived, letGo: letGo, mu: &mu, now: now, most: most}
		sinks[worker] = g
		own := semaphore.NewWeighted(1)
		for rank := range ranks {
			endpoint := rawEngine(t, func(c net.Conn) {
				for seq := uint64(0); ; seq++ {
					if _, err := c.Write(batchFrame(seq, size)); err != nil {
						return
					}
				}
			})
			f, err := Start(ctx, Source{Worker: worker, Rank: int32(rank), Engine: VLLM, Endpoint: endpoint, Large: []*semaphore.Weighted{own, all}}, g)
			if err != nil {
				t.Fatal(err)
			}
			feeds = append(feeds, f)
		}
	}
	t.Cleanup(func() {
		cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for _, f := range feeds {
				f.Close()
			}
		}()
		for {
			select {
			case <-arrived:
			case letGo <- struct{}{}:
			case <-done:
				return
			}
		}
	})
	return sinks, feeds
}

// Large batches of many feeds are handled one at a time, those of workers in turns, and small ones of others do not wait for them.
func TestLargeBatchesTakeTurns(t *testing.T) {
	arrived, letGo := make(chan string), make(chan struct{})
	flooded(t, arrived, letGo, 1, map[string]int{"many": 2 << 20, "few": 2 << 20}, 6)
	// One large batch is in Apply; all others wait for the place.
	holder, _, _ := strings.Cut(<-arrived, "/")
	select {
	case other := <-arrived:
		t.Fatalf("got a large batch of %s handled beside that of %s", other, holder)
	case <-time.After(100 * time.Millisecond):
	}
	small, go2 := make(chan string), make(chan struct{})
	flooded(t, small, go2, 1, map[string]int{"small": 900}, 1)
	<-small // though the place of large batches is taken
	go2 <- struct{}{}

	// Though all feeds have a batch to send, no worker has two turns in a row, once both wait.
	const batch = (2<<20)/9/maxPart + 1 // pieces
	for turns, run, last := 0, 0, holder; turns < 6; {
		time.Sleep(time.Millisecond) // the other worker's next batch comes to wait
		letGo <- struct{}{}
		if worker, _, _ := strings.Cut(<-arrived, "/"); worker != last {
			turns, run, last = turns+1, 0, worker
		}
		if run++; run > batch && turns > 0 {
			t.Fatalf("got %d pieces of %s in a row after %d turns, want at most %d", run, last, turns, batch)
		}
	}
}

// The feeds of one worker handle batches one after the other, whatever their size; those of several workers do not wait
// for each other.
func TestFeedsOfAWorkerTakeTurns(t *testing.T) {
	arrived, letGo := make(chan string), make(chan struct{})
	sinks, feeds := flooded(t, arrived, letGo, 1, map[string]int{"a": 900, "b": 900}, 4)
	first, second := <-arrived, <-arrived
	if first[0] == second[0] {
		t.Fatalf("got batches of %s and %s handled at a time, want none of the same worker", first, second)
	}
	select {
	case third := <-arrived:
		t.Fatalf("got a batch of %s handled beside those of %s and %s", third, first, second)
	case <-time.After(100 * time.Millisecond):
	}
	for _, f := range feeds { // returns though its worker is busy
		f.Finished(kvindex.Target{Worker: f.src.Worker, Rank: f.src.Rank}, true)
	}
	for range 100 {
		letGo <- struct{}{}
		<-arrived
	}
	sinks["a"].mu.Lock()
	defer sinks["a"].mu.Unlock()
	if most := sinks["a"].most; most["a"] != 1 || most["b"] != 1 {
		t.Errorf("got %v batches at a time, want one of each worker", most)
	}
}

// An event of many blocks reaches the sink in pieces, and the index holds what it would hold of the whole.
func TestALongEventIsPassedInPieces(t *testing.T) {
	const blocks, size = 3*maxPart + 100, 16
	event := func(kind kvindex.EventKind, tier kvindex.Tier, tokens bool) *kvindex.Event {
		ev := &kvindex.Event{Kind: kind, Tier: tier, BlockSize: size}
		for i := range blocks {
			ev.Hashes = append(ev.Hashes, kvindex.EngineHash(i+1))
			ev.Extra = append(ev.Extra, uint64(i%3))
			for k := range size {
				ev.Tokens = append(ev.Tokens, uint32(i*7+k))
			}
		}
		if !tokens {
			ev.Tokens, ev.Extra, ev.BlockSize = nil, nil, 0
		}
		return ev
	}
	target := kvindex.Target{Worker: "w"}
	history := []*kvindex.Event{event(kvindex.Stored, kvindex.Device, true), event(kvindex.Stored, kvindex.Host, false), event(kvindex.Removed, kvindex.Device, false)}
	for n := range len(history) + 1 {
		var got [2]string
		for whole := range 2 {
			x, err := kvindex.New(kvindex.Config{BlockSize: size})
			if err != nil {
				t.Fatal(err)
			}
			slot, err := x.Add(target, "m", size)
			if err != nil {
				t.Fatal(err)
			}
			sink := &intoIndex{x: x, slot: slot}
			a := &applier{sink: sink, mu: newGuard(sink)}
			a.mu.Lock()
			for _, ev := range history[:n] {
				given := *ev // pass changes it
				if whole == 1 {
					err = x.Apply(slot, &given)
				} else {
					err = a.pass(target, &given)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if sink.most > maxPart {
				t.Fatalf("got an event of %d blocks, want at most %d", sink.most, maxPart)
			}
			hashes := x.Hasher().AppendHashesExtra(nil, x.Hasher().Seed("m", "", ""), history[0].Tokens, size, history[0].Extra, nil)
			var m kvindex.Matches
			x.Match(hashes, &m)
			got[whole] = fmt.Sprint(x.Stats().Targets, m.Holders)
		}
		if got[0] != got[1] {
			t.Errorf("after %d events: got %s in pieces, %s of the whole", n, got[0], got[1])
		}
	}
}

type intoIndex struct {
	gated
	x    *kvindex.Index
	slot kvindex.Slot
	most int
}

func (s *intoIndex) Apply(_ kvindex.Target, ev *kvindex.Event) error {
	s.most = max(s.most, len(ev.Hashes))
	return s.x.Apply(s.slot, ev)
}

// A large batch that arrives during a replay does not wait in memory: another replay fetches it.
func TestALargeBatchDoesNotWaitForAReplay(t *testing.T) {
	m := NewMachine(MachineConfig{Replay: true})
	m.Up()
	m.Live(0, make([]byte, LargeBatch))
	m.Live(1, make([]byte, LargeBatch+1))
	if held := m.pendingBytes; held > LargeBatch+perPending || m.counts.Overflows != 1 || len(m.pending) != 1 {
		t.Fatalf("got %d bytes held, %d batches dropped, want the first held and the second dropped", held, m.counts.Overflows)
	}
	m.Replayed(m.epoch, 0, make([]byte, LargeBatch))
	if actions := m.ReplayEnd(m.epoch, true); !slices.ContainsFunc(actions, func(a Action) bool { return a.Kind == Replay }) {
		t.Errorf("got %v, want another replay", actions)
	}
}

// Who announces a large batch and does not send it loses its place to others.
func TestATrickledBatchLosesItsPlace(t *testing.T) {
	was := largeWithin
	largeWithin = 50 * time.Millisecond
	defer func() { largeWithin = was }()
	slow := rawEngine(t, func(c net.Conn) {
		batch := batchFrame(0, 2<<20)
		for i := 0; i < len(batch); i += 64 {
			if _, err := c.Write(batch[i : i+64]); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	place := semaphore.NewWeighted(1)
	f, err := Start(t.Context(), Source{Worker: "slow", Engine: VLLM, Endpoint: slow, Large: []*semaphore.Weighted{place}, ReconnectMin: time.Hour, ReconnectMax: time.Hour}, &strict{t: t})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for f.Status().Errors == 0 { // the test's timeout ends it
		time.Sleep(time.Millisecond)
	}
	if !place.TryAcquire(1) {
		t.Error("got no place after the connection ended")
	}
}

// A replay that panics leaves the feed's lock free.
func TestAReplayThatPanicsUnlocksOnce(t *testing.T) {
	f := pollingFeed(&strict{t: t})
	f.src.Replays = []*semaphore.Weighted{nil} // Acquire panics
	f.newest = &replay{ctx: t.Context()}
	panics := func() (v any) {
		defer func() { v = recover() }()
		f.replayNewest()
		return nil
	}
	if panics() == nil {
		t.Fatal("got no panic")
	}
	if !f.mu.TryLock() || !f.mu.turn.TryLock() {
		t.Error("got a lock that is taken after a panic")
	}
}

// States are read, and other workers forgotten, while an event is applied, however long that takes. What is shown is what
// was applied before.
func TestStatesDoNotWaitForEvents(t *testing.T) {
	for _, end := range []string{"applied", "forgotten"} {
		t.Run("pushed "+end, func(t *testing.T) {
			g := &gated{worker: "w", arrived: make(chan string), letGo: make(chan struct{}), mu: new(sync.Mutex), now: map[string]int{}, most: map[string]int{}}
			s := NewPushServer(func(*kvlanev1.Hello) (Sink, error) { return g, nil })
			hello := &kvlanev1.Hello{Worker: "w", Engine: "vllm"}
			src, err := helloSource(hello)
			if err != nil {
				t.Fatal(err)
			}
			p, err := s.publisher(src, hello)
			if err != nil {
				t.Fatal(err)
			}
			mine, _, _ := p.begin(&src, func() {})
			events := &kvlanev1.Events{Events: []*kvlanev1.Event{{Change: &kvlanev1.Event_Removed{Removed: &kvlanev1.Removed{Hashes: []uint64{1}}}}}}
			done := make(chan error)
			go func() {
				done <- p.message(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Content: &kvlanev1.Batch_Events{Events: events}}}}, mine, false)
			}()
			<-g.arrived
			all := s.Statuses()
			if len(all) != 1 || all[0].Counts.Applied != 0 || all[0].Targets[0].State != Live || all[0].Targets[0].Cursor.Next != 0 {
				t.Errorf("got %+v while the first batch is applied, want a live target without a batch", all)
			}
			gone := make(chan struct{})
			if end == "forgotten" {
				go func() { s.Forget("w"); close(gone) }()
				for s.Pushes(kvindex.Target{Worker: "w", Rank: kvindex.NoRank}) { // the test's timeout ends it
					time.Sleep(time.Millisecond)
				}
				if all := s.Statuses(); len(all) != 0 {
					t.Errorf("got %+v, want no publisher of a worker that is forgotten", all)
				}
				select {
				case <-gone:
					t.Error("Forget returned while an event was applied")
				case <-time.After(10 * time.Millisecond):
				}
			}
			g.letGo <- struct{}{}
			if err := <-done; err != nil {
				t.Error(err)
			}
			if end == "forgotten" {
				<-gone
			} else if all := s.Statuses(); all[0].Counts.Applied != 1 || all[0].Targets[0].Cursor.Next != 1 {
				t.Errorf("got %+v after the batch was applied", all)
			}
		})
	}
	t.Run("zmq", func(t *testing.T) {
		arrived, letGo := make(chan string), make(chan struct{})
		_, feeds := flooded(t, arrived, letGo, 1, map[string]int{"a": 900}, 1)
		<-arrived
		if s := feeds[0].Status(); s.Counts.Applied != 0 || s.Connects != 1 || s.Targets[0].State != Live {
			t.Errorf("got %+v while the first batch is applied, want a live target without a batch", s)
		}
		letGo <- struct{}{}
		<-arrived
		if s := feeds[0].Status(); s.Counts.Applied != 1 || s.Events != 1 {
			t.Errorf("got %+v while the second batch is applied, want one applied", s)
		}
	})
}

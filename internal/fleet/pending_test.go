package fleet

import (
	"bytes"
	"context"
	"encoding/binary"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex/feed"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// removals is a batch of about that many bytes.
func removals(size int) []byte {
	payload := binary.BigEndian.AppendUint32([]byte("\x92\x00\x91\x92\xacBlockRemoved\xdd"), uint32(size/9))
	return append(payload, bytes.Repeat([]byte("\xcf\x01\x02\x03\x04\x05\x06\x07\x08"), size/9)...)
}

func heap() int64 {
	var m runtime.MemStats
	for range 3 { // two collections empty the pools
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// waitForFeeds waits until ok for each of a fleet's feeds.
func waitForFeeds(t *testing.T, f *Fleet, what string, ok func(*feed.Status) bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		done, all := 0, f.FeedStatus()
		for i := range all {
			if ok(&all[i]) {
				done++
			}
		}
		if done == len(all) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %d of %d feeds after 30 s", what, done, len(all))
		}
	}
}

func overflowed(s *feed.Status) bool { return s.Counts.Overflows > 0 }

// checkPending fails unless one worker has what it may have of the room for batches that wait, and no more of the heap.
func checkPending(t *testing.T, f *Fleet, before int64) {
	t.Helper()
	const most = 4 * workerPending // with what sockets, connections and the other side have
	if n := heap() - before; n > most {
		t.Errorf("got %d MiB of heap for batches that wait, want at most %d", n>>20, most>>20)
	}
	if f.feeds.pending.TryAcquire(maxPending-workerPending+1<<20) || !f.feeds.pending.TryAcquire(maxPending-workerPending) {
		t.Error("got other room taken than that of one worker")
		return
	}
	f.feeds.pending.Release(maxPending - workerPending)
}

// checkNoPending fails unless all room is free again.
func checkNoPending(t *testing.T, f *Fleet) {
	t.Helper()
	if !f.feeds.pending.TryAcquire(maxPending) {
		t.Error("got room that stays taken")
	}
}

// Batches that wait for replays which never end take a bounded part of the memory, whatever the number of ranks.
func TestBatchesThatWaitAreBounded(t *testing.T) {
	const ranks = 64
	w := worker("w", ranks)
	w.Events.Endpoint, w.Events.Replay = zmqSockets(t, "PUB", ranks, removals(100_000)), zmqSockets(t, "ROUTER", ranks, noEvents)
	before := heap()
	f := newFleet(t, "", w)
	waitForFeeds(t, f, "overflow", overflowed)
	checkPending(t, f, before)
	f.SetWorkers(nil)
	checkNoPending(t, f)
}

// pushing is a relay's stream.
type pushing struct {
	kvlanev1.KVEvents_PushServer
	ctx   context.Context
	in    chan *kvlanev1.PushRequest
	asked chan *kvlanev1.Replay
}

func (p *pushing) Context() context.Context { return p.ctx }

func (p *pushing) Recv() (*kvlanev1.PushRequest, error) {
	select {
	case m := <-p.in:
		return m, nil
	case <-p.ctx.Done():
		return nil, p.ctx.Err()
	}
}

func (p *pushing) Send(r *kvlanev1.PushResponse) error {
	if r.GetReplay() != nil {
		p.asked <- r.GetReplay()
	}
	return nil
}

func (p *pushing) batch(seq, replay uint64, payload []byte) {
	p.in <- &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: seq, ReplayId: replay, Content: &kvlanev1.Batch_Raw{Raw: payload}}}}
}

// The same of pushed batches, where more waits for each rank than its share. Once relays replay, all ranks have all batches.
func TestPushedBatchesThatWaitAreBounded(t *testing.T) {
	const ranks, batches = 64, 12
	w := worker("w", ranks)
	w.Events.Endpoint = config.PushEndpoint
	before := heap()
	f := newFleet(t, "", w)
	ctx, cancel := context.WithCancel(t.Context())
	var streams sync.WaitGroup
	defer streams.Wait()
	defer cancel()
	payload := removals(60_000)
	var relays [ranks]*pushing
	connect := func(rank int32) {
		p := &pushing{ctx: ctx, in: make(chan *kvlanev1.PushRequest), asked: make(chan *kvlanev1.Replay, 64)}
		relays[rank] = p
		streams.Go(func() { _ = f.feeds.push.Push(p) })
		p.in <- &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Hello{Hello: &kvlanev1.Hello{Worker: "w", Engine: "vllm", Rank: &rank, CanReplay: true}}}
	}
	for rank := range int32(ranks) {
		connect(rank)
	}
	for seq := range uint64(batches) {
		for _, p := range relays {
			p.batch(seq, 0, payload)
		}
	}
	waitForFeeds(t, f, "overflow", overflowed)
	checkPending(t, f, before)
	for _, p := range relays {
		streams.Go(func() {
			for {
				select {
				case ask := <-p.asked:
					for seq := ask.GetFrom(); seq < batches; seq++ {
						p.batch(seq, ask.GetReplayId(), payload)
					}
					p.in <- &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_ReplayEnd{ReplayEnd: &kvlanev1.ReplayEnd{ReplayId: ask.GetReplayId()}}}
				case <-ctx.Done():
					return
				}
			}
		})
	}
	waitForFeeds(t, f, "all batches", func(s *feed.Status) bool {
		return s.Targets[0].State == feed.Live && s.Targets[0].Cursor.Next == batches && s.Counts.Clears == 0
	})
	checkNoPending(t, f)
	f.feeds.pending.Release(maxPending)
	// A worker that is removed meanwhile leaves no room taken.
	connect(0)
	<-relays[0].asked
	relays[0].batch(batches, 0, payload)
	relays[0].batch(batches+1, 0, payload) // received once the first is handled
	f.SetWorkers([]workers.Worker{})
	checkNoPending(t, f)
}

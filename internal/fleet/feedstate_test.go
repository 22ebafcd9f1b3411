package fleet

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/kvindex/feed"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// The states of feeds, which readiness asks for, do not wait for events that wait, for example for a copy of the index.
func TestFeedStatusDoesNotWaitForEvents(t *testing.T) {
	zmq, pushed := worker("zmq", 1), worker("pushed", 0)
	zmq.Events.Endpoint, pushed.Events.Endpoint = zmqSockets(t, "PUB", 1, removals(100)), config.PushEndpoint
	f := newFleet(t, "", zmq, pushed)
	ctx, cancel := context.WithCancel(t.Context())
	p := &pushing{ctx: ctx, in: make(chan *kvlanev1.PushRequest), asked: make(chan *kvlanev1.Replay, 64)}
	var stream sync.WaitGroup
	stream.Go(func() { _ = f.feeds.push.Push(p) })
	defer stream.Wait()
	defer cancel()
	p.in <- &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Hello{Hello: &kvlanev1.Hello{Worker: "pushed", Engine: "vllm"}}}
	p.batch(0, 0, removals(100))
	waitForFeeds(t, f, "first batches", func(s *feed.Status) bool { return s.Counts.Applied > 0 })

	f.feeds.snapshot.Lock() // a copy is made
	p.batch(1, 0, removals(100))
	for turn := f.feeds.running["pushed"].sink.Turn(); turn.TryLock(); time.Sleep(time.Millisecond) { // the test's timeout ends it
		turn.Unlock()
	}
	for _, s := range f.FeedStatus() {
		if s.Worker == "pushed" && (s.Counts.Applied != 1 || s.Targets[0].Cursor.Next != 1 || s.Targets[0].State != feed.Live) {
			t.Errorf("got %+v while the second batch waits, want a live target with the first", s)
		}
	}
	f.feeds.snapshot.Unlock()
	waitForFeeds(t, f, "second batch", func(s *feed.Status) bool { return s.Worker != "pushed" || s.Counts.Applied == 2 })
}

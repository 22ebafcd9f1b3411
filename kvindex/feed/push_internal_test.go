package feed

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// Whatever a relay pushes, the resulting events have the form that the index requires.
func FuzzPushed(f *testing.F) {
	parent := uint64(3)
	seed, err := proto.Marshal(&kvlanev1.Events{Events: []*kvlanev1.Event{
		{Change: &kvlanev1.Event_Stored{Stored: &kvlanev1.Stored{Hashes: []uint64{9}, Parent: &parent, Tokens: []uint32{1, 2}, BlockSize: 2, Salt: "s", Extra: []uint64{1}}}},
		{Change: &kvlanev1.Event_Removed{Removed: &kvlanev1.Removed{Hashes: []uint64{9}, Tier: kvlanev1.Tier_TIER_HOST}}},
		{Change: &kvlanev1.Event_Cleared{}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(byte(pushedEvents), seed)
	f.Add(byte(pushedRaw), []byte{0x93, 0xca, 0, 0, 0, 0, 0x90, 0})
	f.Add(byte(pushedEvents), seed[:len(seed)-1])
	f.Fuzz(func(t *testing.T, kind byte, content []byte) {
		if kind != pushedRaw {
			kind = pushedEvents
		}
		d := &pushDecoder{Decoder: NewDecoder(VLLM, 0)}
		b, err := d.Decode(append([]byte{kind}, content...))
		if err != nil {
			return
		}
		for i := range b.Events {
			ev := &b.Events[i]
			switch {
			case ev.Kind < kvindex.Stored || ev.Kind > kvindex.Cleared, ev.Tier >= kvindex.NumTiers:
				t.Fatalf("%+v", ev)
			case ev.Kind == kvindex.Stored && len(ev.Tokens) > 0 && len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize,
				len(ev.Extra) > 0 && len(ev.Extra) != len(ev.Hashes):
				t.Fatalf("misaligned: %+v", ev)
			}
		}
	})
}

// handed is a stream of messages, which ends after the last.
type handed struct {
	kvlanev1.KVEvents_PushServer
	ctx  context.Context
	left chan *kvlanev1.PushRequest
}

func (p handed) Context() context.Context { return p.ctx }

func (p handed) Recv() (*kvlanev1.PushRequest, error) {
	if m, ok := <-p.left; ok {
		return m, nil
	}
	return nil, io.EOF
}

// A pushed batch of more than LargeBatch bytes waits for a place, a shorter one does not.
func TestLargePushedBatchesTakeTurns(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		places := semaphore.NewWeighted(1)
		if !places.TryAcquire(1) {
			t.Fatal("a new semaphore has no place")
		}
		x, err := kvindex.New(kvindex.Config{BlockSize: 16})
		if err != nil {
			t.Fatal(err)
		}
		slot, err := x.Add(kvindex.Target{Worker: "w", Rank: kvindex.NoRank}, "m", 16)
		if err != nil {
			t.Fatal(err)
		}
		s := NewPushServer(func(*kvlanev1.Hello) (Sink, error) { return &intoIndex{x: x, slot: slot}, nil })
		s.Large = []*semaphore.Weighted{places}
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
		next := func() uint64 {
			p.mu.Lock()
			defer p.mu.Unlock()
			n, _ := p.a.machine.Next()
			return n
		}
		ctx, cancel := context.WithCancel(t.Context())
		stream := handed{ctx: ctx, left: make(chan *kvlanev1.PushRequest)}
		done := make(chan error, 1)
		go func() { done <- p.receive(ctx, stream, mine, &sync.Mutex{}) }()
		for seq, hashes := range []int{1, LargeBatch/8 + 1} {
			events := &kvlanev1.Events{Events: []*kvlanev1.Event{{Change: &kvlanev1.Event_Removed{Removed: &kvlanev1.Removed{Hashes: make([]uint64, hashes)}}}}}
			stream.left <- &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: uint64(seq), Content: &kvlanev1.Batch_Events{Events: events}}}}
		}
		close(stream.left)
		select {
		case err := <-done:
			t.Fatalf("got %v while the only place is taken, want a wait", err)
		case <-time.After(100 * time.Millisecond):
		}
		if n := next(); n != 1 {
			t.Errorf("got batch %d as the next while the only place is taken, want the large one, 1", n)
		}
		if leaves {
			cancel()
		}
		places.Release(1)
		switch err := <-done; {
		case leaves && err != nil && !errors.Is(err, context.Canceled), !leaves && (err != nil || next() != 2):
			t.Errorf("got %v and batch %d as the next, want both batches, or the end of the stream", err, next())
		}
		if !places.TryAcquire(1) {
			t.Error("the place is still taken")
		}
		cancel()
	}
}

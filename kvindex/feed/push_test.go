package feed_test

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// startPush starts the push service and returns a client and the server.
func startPush(t *testing.T, sink feed.Sink) (kvlanev1.KVEventsClient, *feed.PushServer) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	push := feed.NewPushServer(func(h *kvlanev1.Hello) (feed.Sink, error) {
		if h.GetWorker() == "stranger" {
			return nil, errors.New("no such worker")
		}
		return sink, nil
	})
	srv := grpc.NewServer()
	kvlanev1.RegisterKVEventsServer(srv, push)
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(); srv.Stop(); <-done })
	return kvlanev1.NewKVEventsClient(conn), push
}

// relay is one stream.
type relay struct {
	t *testing.T
	kvlanev1.KVEvents_PushClient
}

func connect(t *testing.T, c kvlanev1.KVEventsClient, hello *kvlanev1.Hello) relay {
	t.Helper()
	s, err := c.Push(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r := relay{t, s}
	r.send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Hello{Hello: hello}})
	return r
}

func (r relay) send(m *kvlanev1.PushRequest) {
	r.t.Helper()
	if err := r.Send(m); err != nil {
		r.t.Fatal(err)
	}
}

func (r relay) raw(seq, replay uint64, payload []byte) {
	r.t.Helper()
	r.send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: seq, ReplayId: replay, Content: &kvlanev1.Batch_Raw{Raw: payload}}}})
}

func (r relay) events(seq uint64, events ...*kvlanev1.Event) {
	r.t.Helper()
	r.send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: seq, Content: &kvlanev1.Batch_Events{Events: &kvlanev1.Events{Events: events}}}}})
}

func (r relay) end(replay uint64) {
	r.t.Helper()
	r.send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_ReplayEnd{ReplayEnd: &kvlanev1.ReplayEnd{ReplayId: replay}}})
}

// replay waits until the server requests batches.
func (r relay) replay() *kvlanev1.Replay {
	r.t.Helper()
	for {
		m, err := r.Recv()
		if err != nil {
			r.t.Fatal(err)
		}
		if a := m.GetReplay(); a != nil {
			return a
		}
	}
}

func TestPush(t *testing.T) {
	sink := newRecorder()
	c, push := startPush(t, sink)
	rank := int32(2)
	hello := &kvlanev1.Hello{Worker: "w", Engine: "vllm", Rank: &rank, CanReplay: true}
	target := kvindex.Target{Worker: "w", Rank: 2}

	r := connect(t, c, hello)
	ask := r.replay()
	if ask.GetFrom() != 0 {
		t.Fatalf("got a replay from %d", ask.GetFrom())
	}
	r.raw(0, ask.GetReplayId(), storedBatch(t, 0, 1))
	r.end(ask.GetReplayId())
	r.raw(1, 0, storedBatch(t, 1, 1))
	r.raw(3, 0, storedBatch(t, 3, 1))
	if ask = r.replay(); ask.GetFrom() != 1 {
		t.Fatalf("got a replay from %d, want it from the last applied batch, 1", ask.GetFrom())
	}
	r.raw(1, ask.GetReplayId(), storedBatch(t, 1, 1))
	r.raw(2, ask.GetReplayId(), storedBatch(t, 2, 1))
	r.end(ask.GetReplayId())
	eventually(t, "four batches", func() bool { return len(sink.seen()) == 4 })
	if err := r.CloseSend(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "stale", func() bool { return push.Statuses()[0].Targets[0].State == feed.Stale })

	// The relay reconnects and proves to serve the same engine; a second stream takes over from
	// it.
	r = connect(t, c, hello)
	if ask = r.replay(); ask.GetFrom() != 3 {
		t.Fatalf("got a replay from %d", ask.GetFrom())
	}
	second := connect(t, c, hello)
	if ask = second.replay(); ask.GetFrom() != 3 {
		t.Fatalf("got a replay from %d", ask.GetFrom())
	}
	second.raw(3, ask.GetReplayId(), storedBatch(t, 3, 1))
	second.end(ask.GetReplayId())
	parent := uint64(3)
	second.events(4,
		&kvlanev1.Event{Change: &kvlanev1.Event_Stored{Stored: &kvlanev1.Stored{Hashes: []uint64{9}, Parent: &parent, Tokens: []uint32{1, 2}, BlockSize: 2}}},
		&kvlanev1.Event{Change: &kvlanev1.Event_Stored{Stored: &kvlanev1.Stored{Hashes: []uint64{9}, Tokens: []uint32{1}, BlockSize: 2}}},
		&kvlanev1.Event{Change: &kvlanev1.Event_Removed{Removed: &kvlanev1.Removed{Hashes: []uint64{9}, Tier: 7}}},
		&kvlanev1.Event{Change: &kvlanev1.Event_Removed{Removed: &kvlanev1.Removed{Hashes: []uint64{9}, Tier: kvlanev1.Tier_TIER_HOST}}},
		&kvlanev1.Event{}, &kvlanev1.Event{Change: &kvlanev1.Event_Cleared{}})
	eventually(t, "events", func() bool { return len(sink.seen()) == 7 })
	want := []string{"w/2 +[0]", "w/2 +[1]", "w/2 +[2]", "w/2 +[3]", "w/2 +[9]", "w/2 -[9]", "w/2 x[]"}
	if got := sink.seen(); !slices.Equal(got, want) {
		t.Fatalf("got %q\nwant %q", got, want)
	}
	st := push.Statuses()[0]
	if st.Dropped[feed.Misaligned] != 1 || st.Dropped[feed.UnknownMedium] != 1 || st.Dropped[feed.UnknownTag] != 1 || st.Counts.Clears != 0 {
		t.Fatalf("%+v", st)
	}
	for {
		if _, err := r.Recv(); err != nil {
			if status.Code(err) != codes.Aborted {
				t.Fatal(err)
			}
			break
		}
	}
	if !push.Finished(target, true) || push.Finished(kvindex.Target{Worker: "x", Rank: kvindex.NoRank}, true) {
		t.Error("got finished requests at the wrong feed")
	}
	push.Forget("w")
	if len(push.Statuses()) != 0 {
		t.Error("got a publisher of a forgotten worker")
	}
}

func TestPushRefusals(t *testing.T) {
	c, _ := startPush(t, newRecorder())
	below := int32(-3)
	tests := map[string]struct {
		first *kvlanev1.PushRequest
		then  *kvlanev1.PushRequest
		code  codes.Code
		text  string
	}{
		"no hello":       {&kvlanev1.PushRequest{}, nil, codes.InvalidArgument, "hello"},
		"a stranger":     {helloRequest(&kvlanev1.Hello{Worker: "stranger", Engine: "vllm"}), nil, codes.FailedPrecondition, "no such worker"},
		"unknown engine": {helloRequest(&kvlanev1.Hello{Worker: "w", Engine: "x"}), nil, codes.FailedPrecondition, `engine "x"`},
		"no worker":      {helloRequest(&kvlanev1.Hello{Engine: "vllm"}), nil, codes.FailedPrecondition, "without a worker"},
		"a long name":    {helloRequest(&kvlanev1.Hello{Worker: strings.Repeat("w", 2<<10), Engine: "vllm"}), nil, codes.FailedPrecondition, "a name of more than 1024 bytes"},
		"bad rank":       {helloRequest(&kvlanev1.Hello{Worker: "w", Engine: "vllm", Rank: &below}), nil, codes.FailedPrecondition, "rank -3"},
		"hello twice":    {helloRequest(&kvlanev1.Hello{Worker: "w", Engine: "vllm"}), helloRequest(&kvlanev1.Hello{Worker: "w"}), codes.InvalidArgument, "want a batch"},
		"empty batch":    {helloRequest(&kvlanev1.Hello{Worker: "w", Engine: "vllm"}), &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{}}}, codes.InvalidArgument, "without content"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s, err := c.Push(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Send(tt.first); err != nil {
				t.Fatal(err)
			}
			if tt.then != nil {
				_ = s.Send(tt.then)
			}
			for {
				if _, err = s.Recv(); err != nil {
					break
				}
			}
			if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, tt.code, tt.text)
			}
		})
	}
}

func helloRequest(h *kvlanev1.Hello) *kvlanev1.PushRequest {
	return &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Hello{Hello: h}}
}

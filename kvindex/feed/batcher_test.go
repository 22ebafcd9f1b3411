package feed_test

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// batches is a recorder that also records where batches begin and end.
type batches struct {
	*recorder

	cursors map[kvindex.Target]feed.Cursor
}

func newBatches() *batches { return &batches{newRecorder(), map[kvindex.Target]feed.Cursor{}} }

func (b *batches) BeginBatch(t kvindex.Target) { b.add(fmt.Sprint(t, " (")) }

func (b *batches) EndBatch(t kvindex.Target, c feed.Cursor) {
	b.add(fmt.Sprint(t, " ) ", c.Next))
	b.mu.Lock()
	b.cursors[t] = c
	b.mu.Unlock()
}

func (b *batches) cursor(t kvindex.Target) feed.Cursor {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cursors[t]
}

func (b *batches) add(line string) {
	b.mu.Lock()
	b.lines = append(b.lines, line)
	b.mu.Unlock()
}

// Events come between the beginning and the end of their batch, which carries the sequence's
// position; a clear never does.
func TestBatcher(t *testing.T) {
	sink := newBatches()
	p := feed.NewPlayer(feed.Source{Worker: "w", Engine: feed.VLLM, Rank: kvindex.NoRank, BlockSize: 2}, sink)
	wrong := pack(t, []any{1.0, []any{[]any{"BlockStored", []uint64{8}, nil, []int{1, 2, 3}, 3}, []any{"BlockRemoved", []uint64{2}}}, 0})
	p.Message([][]byte{nil, binary.BigEndian.AppendUint64(nil, 0), storedBatch(t, 0, 1)})
	p.Message([][]byte{nil, binary.BigEndian.AppendUint64(nil, 1), wrong})
	p.Message([][]byte{nil, binary.BigEndian.AppendUint64(nil, 5), storedBatch(t, 5, 1)})
	want := []string{"w (", "w +[0]", "w ) 1", "w (", "w -[2]", "w ) 2", "w clear lost_batches", "w (", "w +[5]", "w ) 6"}
	if got := sink.seen(); !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

// A copy of a sink's state of a pushed target, with its cursor, is usable in another process:
// the relay proves to be the same and continues from there.
func TestPushResumes(t *testing.T) {
	sink := newBatches()
	c, _ := startPush(t, sink)
	hello := &kvlanev1.Hello{Worker: "w", Engine: "vllm", CanReplay: true}
	target := kvindex.Target{Worker: "w", Rank: kvindex.NoRank}
	r := connect(t, c, hello)
	ask := r.replay()
	r.raw(0, ask.GetReplayId(), storedBatch(t, 0, 1))
	r.raw(1, ask.GetReplayId(), storedBatch(t, 1, 1))
	r.end(ask.GetReplayId())
	eventually(t, "two batches", func() bool { return sink.cursor(target).Next == 2 })

	for _, restarted := range []bool{false, true} {
		copied := newBatches()
		other, second := startPush(t, copied)
		second.Resume(target, sink.cursor(target))
		stamp := 1.0
		if restarted {
			stamp = 2
		}
		r := connect(t, other, hello)
		if ask = r.replay(); ask.GetFrom() != 1 {
			t.Fatalf("got a replay from %d", ask.GetFrom())
		}
		r.raw(1, ask.GetReplayId(), storedBatch(t, 1, stamp))
		if restarted {
			if ask = r.replay(); ask.GetFrom() != 0 {
				t.Fatalf("got a replay of a new engine from %d", ask.GetFrom())
			}
		}
		r.raw(2, ask.GetReplayId(), storedBatch(t, 2, stamp))
		r.end(ask.GetReplayId())
		want := []string{"w (", "w +[2]", "w ) 3"}
		if restarted {
			want = append([]string{"w clear engine_restarted"}, want...)
		}
		eventually(t, "the next batch", func() bool { return copied.cursor(target).Next == 3 })
		if got := copied.seen(); !slices.Equal(got, want) {
			t.Errorf("restarted %v: got %q, want %q", restarted, got, want)
		}

		// A forgotten worker delivers nothing more, and its stream ends.
		second.Forget("w")
		before := len(copied.seen())
		_ = r.Send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: 3, Content: &kvlanev1.Batch_Raw{Raw: storedBatch(t, 3, stamp)}}}})
		for {
			if _, err := r.Recv(); err != nil {
				if status.Code(err) != codes.Aborted {
					t.Error(err)
				}
				break
			}
		}
		if second.Finished(target, true) || len(copied.seen()) != before {
			t.Error("got events of a forgotten worker")
		}
	}
}

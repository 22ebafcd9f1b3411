package replicas

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

type message = kvlanev1.ReplicaMessage

// recode sends a message through its wire form.
func recode(t testing.TB, m *message) *message {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(data)
	if err != nil {
		t.Fatalf("got %v for a message of ours: %v", err, m)
	}
	return got
}

func TestABookingIsSentWhole(t *testing.T) {
	target := func(worker string) kvindex.Target { return kvindex.Target{Worker: worker, Rank: 1} }
	want := routing.Booking{Replica: "a", ID: 5, Decode: target("d"), Prefill: target("p"), Miss: 2, KV: 3, Sequences: 8, Phase: 2, Turn: [numLegs]uint8{1, 2}, InTurn: 3}
	w := writer{m: &message{Version: 1, Replica: "a"}}
	w.booked(&want)
	m := recode(t, w.m)
	if got := bookingOf(m, m.GetBooked()[0]); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	want.Sequences = 1 << 32
	w.booked(&want)
	if got := w.m.GetBooked()[1].GetSequences(); got != 1<<32-1 {
		t.Errorf("got %d sequences of 2^32, want the most that the field holds", got)
	}
}

// all returns the messages of o, which owns the lock.
func (o *Out) all() []*message {
	if o.Build != nil {
		return slices.Collect(o.Build(unlocked))
	}
	return []*message{o.Message}
}

func unlocked(do func()) { do() }

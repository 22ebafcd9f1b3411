package replicas

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// A state of many bookings is installed in steps, between which others may have the router's lock, and so are the changes
// that came meanwhile.
func TestALargeStateIsInstalledInSteps(t *testing.T) {
	_, b := pair(t)
	clock := b.clock
	send := func(m *message) {
		m.Version, m.Replica, m.Clock = 1, "x", clock
		b.Receive(0, m, "")
	}
	send(&message{})
	p := b.peers["x"]
	state := func(from, n uint64) {
		m := &message{Seq: p.seq + 7, StatePart: &kvlanev1.ReplicaStatePart{Id: p.request, Parts: 1},
			Targets: []*kvlanev1.ReplicaTarget{{Worker: target(0).Worker, Rank: uint32(target(0).Rank + 1)}}}
		for id := range n {
			m.Booked = append(m.Booked, &kvlanev1.ReplicaBooking{Id: from + id + 1, Decode: 1})
		}
		send(m)
	}
	finish := func() (steps int) {
		was := b.router.Live()
		for b.Continue(0) {
			if got := b.router.Live(); max(got-was, was-got) > maxSteps+maxSteps-1 { // and the rest of a message
				t.Fatalf("got %d bookings installed in one step, want at most %d", max(got-was, was-got), 2*maxSteps-1)
			}
			was = b.router.Live()
			steps++
		}
		return steps
	}
	const many = 10 * maxSteps
	if state(0, many); b.router.Live() > maxSteps || p.live || b.Ready(time.Hour) {
		t.Fatalf("got %d bookings installed with the last part, live %v, want at most %d and more to come", b.router.Live(), p.live, maxSteps)
	}
	// What comes meanwhile waits: a release, a further part with the same number, and changes that are many themselves.
	send(&message{Seq: 8, Released: []uint64{1}})
	send(&message{StatePart: &kvlanev1.ReplicaStatePart{Id: p.request, Part: 1, Parts: 2}, Booked: []*kvlanev1.ReplicaBooking{}})
	for seq := uint64(9); seq < 12; seq++ {
		m := &message{Seq: seq}
		for id := range uint64(maxSteps) {
			m.Released = append(m.Released, (seq-9)*maxSteps+id+2)
		}
		send(m)
	}
	if steps, want := finish(), 9+3; steps < want || b.router.Live() != many-3*maxSteps-1 || p.request != 0 || p.seq != 11 || !p.live || p.heldSize != 0 {
		t.Fatalf("got %d bookings after %d steps, request %d, seq %d, %d bytes held; want %d after at least %d steps, 0, 11, 0", b.router.Live(), steps,
			p.request, p.seq, p.heldSize, many-3*maxSteps-1, want)
	}
	// A state without them ends them in steps, too, and a tick goes on.
	b.ask(0, p)
	state(many, 5)
	b.Tick(time.Millisecond)
	finish()
	if got := b.router.Live(); got != 5 || int(p.sum.count) != 5 {
		t.Errorf("got %d bookings, %d in the sum, want 5", got, p.sum.count)
	}
	// One that is asked for again, or a replica that leaves, ends what was being installed.
	b.ask(0, p)
	state(2*many, many)
	b.ask(0, p)
	state(0, 3)
	finish()
	if got := b.router.Live(); got != 3 {
		t.Errorf("got %d bookings, want those of the newer state", got)
	}
	b.ask(0, p)
	state(2*many, many)
	b.drop(0, p)
	if finish(); b.router.Live() != 0 {
		t.Errorf("got %d bookings of a replica that is gone", b.router.Live())
	}
}

// A message has no more changes than a replica gathers, with some to spare: they are applied in one go.
func TestMessagesOfManyChangesAreRefused(t *testing.T) {
	for _, n := range []int{maxBatch, 2*maxBatch + 1} {
		m := &message{Version: 1, Replica: "x", Released: make([]uint64, n)}
		data := must(proto.Marshal(m))
		if _, err := Parse(data); (err == nil) != (n == maxBatch) {
			t.Errorf("%d changes: got %v", n, err)
		}
	}
}

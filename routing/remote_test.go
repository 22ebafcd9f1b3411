package routing

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// A copy that stays for long must not keep those that ended after it was made.
func TestALongCopyKeepsNoMemoryOfOthers(t *testing.T) {
	r := newBed(t, 1, nil).r
	apply := func(id ReservationID) {
		if !r.ApplyRemote(0, Booking{Replica: "other", ID: id, Decode: r.targets[0].info.Target, Miss: 1, KV: 1}) {
			t.Fatal("got a copy that was not applied")
		}
	}
	apply(1)
	for id := ReservationID(2); id < 10_000; id++ {
		apply(id)
		r.RemoteRelease(0, "other", id)
	}
	if got := len(r.remotes.fifo); got > 1100 {
		t.Errorf("got %d copies in order of expiry, want at most 1100", got)
	}
	if got := r.Load(0).Active; got != 1 {
		t.Errorf("got %d requests, want the long one", got)
	}
	if n := r.ExpireRemote(r.config.RemoteTTL - time.Second); n != 0 {
		t.Errorf("got %d expired copies before the TTL, want 0", n)
	}
	if n := r.ExpireRemote(r.config.RemoteTTL); n != 1 || r.Load(0).Active != 0 {
		t.Errorf("got %d expired copies and %d requests after the TTL, want 1 and 0", n, r.Load(0).Active)
	}
}

// Another replica's request takes as many places here as it has answers; a version that does not send them counts one.
func TestACopyTakesThePlacesOfItsAnswers(t *testing.T) {
	from, r := newBed(t, 1, nil).r, newBed(t, 1, nil).r
	r.config.Policy.Limits.MaxActive = 8
	for id, want := range map[int64]string{8: "refused", 7: "placed", 0: "placed"} {
		b, _ := from.Booking(planAt(t, from, 0, &Query{Sequences: id}).Reservation)
		b.Replica = "other"
		r.ApplyRemote(0, b)
		got := "placed"
		if p, err := r.Pick(0, &Query{}, nil, nil); err != nil {
			got = "refused"
		} else {
			r.Release(0, p.Reservation)
		}
		if got != want {
			t.Errorf("%d answers: %s, want %s", id, got, want)
		}
		if r.RemoteRelease(0, "other", b.ID); r.Load(0) != (Load{}) {
			t.Errorf("%d answers: got %+v left, want nothing", id, r.Load(0))
		}
	}
}

// New conversations that come together go to other places of the round robin at each replica, and a record repeats that.
func TestNewConversationsTogetherAmongReplicas(t *testing.T) {
	r := newBed(t, 8, nil).r
	r.Among(1, 2, 6*time.Millisecond)
	var got []kvindex.Slot
	for i := range 3 {
		id := fmt.Sprint("c", i)
		d, err := r.PickRecorded(time.Second, &Query{ID: id, Conversation: id, PromptTokens: 100}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if again, _, err := d.Rerun(); err != nil || again != d.Plan {
			t.Errorf("decided again: got %+v, %v, want %+v", again, err, d.Plan)
		}
		if d.State.Others = (others{Replicas: 1}); i == 1 {
			if alone, _, err := d.Rerun(); err != nil || alone.Decode != 1 {
				t.Errorf("decided again by one replica: got %+v, %v, want target 1, the next in turn", alone, err)
			}
		}
		for _, place := range []int{-1, 1 << 20} {
			d.State.Others.Place = place
			if _, _, err := d.Rerun(); err == nil {
				t.Errorf("decided again at place %d: got no error, want one", place)
			}
		}
		got = append(got, d.Plan.Decode)
	}
	if want := []kvindex.Slot{0, 5, 6}; !slices.Equal(got, want) {
		t.Errorf("got the targets %v, want %v", got, want)
	}
}

// Where others place new conversations now and few targets are near, a replica takes those of its part.
func TestFewTargetsAmongReplicas(t *testing.T) {
	for _, c := range []struct {
		heard bool
		place int
		want  kvindex.Slot
	}{{false, 1, 1}, {true, 0, 1}, {true, 1, 6}} {
		b := newBed(t, 8, nil)
		b.r.Among(c.place, 2, 6*time.Millisecond)
		for slot := range kvindex.Slot(8) {
			if slot != 1 && slot != 6 {
				b.r.ApplyRemote(0, Booking{Replica: "b", ID: ReservationID(slot) + 1, Decode: b.r.targets[slot].info.Target, Miss: 50_000})
			}
		}
		if c.heard {
			b.r.ApplyRemote(time.Second-time.Millisecond, Booking{Replica: "b", ID: 9, Decode: b.r.targets[0].info.Target, Turn: [numLegs]uint8{1}, InTurn: 1})
		}
		plan, err := b.r.Pick(time.Second, &Query{ID: "c", Conversation: "c", PromptTokens: 100}, nil, nil)
		if err != nil || plan.Decode != c.want {
			t.Errorf("%+v: got target %d, %v, want %d", c, plan.Decode, err, c.want)
		}
	}
}

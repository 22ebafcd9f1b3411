package routing

import (
	"testing"
	"time"
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

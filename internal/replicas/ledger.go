package replicas

import (
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// sum is the checksum of a ledger: equal ledgers have equal sums, regardless of the order of changes.
type sum struct {
	count, hash uint64
}

func (s *sum) add(b *routing.Booking) {
	s.count++
	s.hash += hashBooking(b)
}

func (s *sum) remove(b *routing.Booking) {
	s.count--
	s.hash -= hashBooking(b)
}

// hashBooking hashes the shared fields of a booking.
func hashBooking(b *routing.Booking) uint64 {
	h := mix(uint64(b.ID))
	h = mix(h ^ uint64(b.Miss))
	h = mix(h ^ uint64(b.KV)<<2 ^ uint64(max(b.Phase, 1)))
	return hashTarget(hashTarget(h, b.Decode), b.Prefill)
}

func hashTarget(h uint64, t kvindex.Target) uint64 {
	for i := range len(t.Worker) {
		h = (h ^ uint64(t.Worker[i])) * 0x100000001b3
	}
	return mix(h ^ uint64(uint32(t.Rank)))
}

// mix is the finalizer of SplitMix64.
func mix(h uint64) uint64 {
	h += 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// withoutTurn returns a booking as it is stored: a state that carried its turn would make others count it again.
func withoutTurn(b routing.Booking) routing.Booking {
	b.Turn, b.InTurn = [numLegs]uint8{}, 0
	return b
}

// copied is another replica's booking.
type copied struct {
	routing.Booking
	// applied reports that the router has the booking; false while it does not know the target.
	applied bool
}

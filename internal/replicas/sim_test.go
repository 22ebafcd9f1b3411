package replicas

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

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

// simulated is a replica of a simulation: the real router and the real Core.
type simulated struct {
	core   *Core
	router *routing.Router
	awake  bool
	live   []routing.ReservationID
	// paused is until when the process is stopped.
	paused time.Duration
}

// flight is a message on its way.
type flight struct {
	at       time.Duration
	n        int // order of sending, for messages that arrive at the same time
	from, to string
	reply    string
	m        *message
}

// simulation is a fleet with a scheduler and a network that a seed decides.
type simulation struct {
	t        testing.TB
	rng      *rand.Rand
	now      time.Duration
	replicas map[string]*simulated
	order    []string // see ids
	starts   int
	sent     int
	flights  []flight
	recorded []flight // by somebody who sends them again
	// lost, doubled and late are how many of 1,000 messages are.
	lost, doubled, late int
	side                map[string]int // replicas of different sides do not hear each other
	ticked              time.Duration
	known               [simTargets]bool
}

const (
	simTargets       = 6
	simConversations = 12
	maxRecorded      = 100
)

// all returns the messages of o, which owns the lock.
func (o *Out) all() []*message {
	if o.Build != nil {
		return slices.Collect(o.Build(unlocked))
	}
	return []*message{o.Message}
}

func unlocked(do func()) { do() }

func newSimulation(t testing.TB, seed uint64) *simulation {
	s := &simulation{t: t, rng: rand.New(rand.NewPCG(seed, 1)), replicas: map[string]*simulated{}, side: map[string]int{}}
	for n := range s.known {
		s.known[n] = true
	}
	for range 2 + s.rng.IntN(3) {
		s.begin()
	}
	return s
}

func (s *simulation) begin() {
	s.starts++
	id := fmt.Sprint("r", s.starts)
	r := &simulated{router: newRouter(s.t, simTargets)}
	r.core = New(id, r.router, s.now, func() { r.awake = true })
	r.router.Share(r.core)
	s.replicas[id], s.order, r.awake = r, nil, true
}

// ids lists the replicas in order: a map's order would not repeat.
func (s *simulation) ids() []string {
	if s.order == nil {
		s.order = slices.Sorted(maps.Keys(s.replicas))
	}
	return s.order
}

func (s *simulation) any() (string, *simulated) {
	ids := s.ids()
	id := ids[s.rng.IntN(len(ids))]
	return id, s.replicas[id]
}

func (s *simulation) stopped(r *simulated) bool { return r.paused > s.now }

// send puts what a replica has to say on the network.
func (s *simulation) send(id string) {
	r := s.replicas[id]
	r.awake = false
	for _, o := range r.core.Take() {
		for _, m := range o.all() {
			m := recode(s.t, m) // receivers change nothing in it
			for _, to := range s.ids() {
				if to == id || o.To != "" && o.To != to || o.Reply != "" && o.Reply != to {
					continue
				}
				copies := 1
				if s.rng.IntN(1000) < s.lost || s.side[id] != s.side[to] {
					copies = 0
				} else if s.rng.IntN(1000) < s.doubled {
					copies = 2
				}
				for range copies {
					delay := time.Duration(1+s.rng.IntN(3)) * time.Millisecond
					if s.rng.IntN(1000) < s.late {
						delay = time.Duration(s.rng.IntN(400)) * time.Millisecond
					}
					s.sent++
					s.flights = append(s.flights, flight{s.now + delay, s.sent, id, to, id, m})
				}
				if len(s.recorded) < maxRecorded || s.rng.IntN(4) == 0 {
					s.recorded = append(s.recorded[:min(len(s.recorded), maxRecorded-1)], flight{from: id, to: to, reply: id, m: m})
					last := len(s.recorded) - 1
					at := s.rng.IntN(len(s.recorded))
					s.recorded[at], s.recorded[last] = s.recorded[last], s.recorded[at]
				}
			}
		}
	}
}

// advance lets time pass: messages arrive, and replicas send and tick.
func (s *simulation) advance(by time.Duration) {
	for end := s.now + by; s.now < end; {
		s.now = min(end, s.next())
		slices.SortFunc(s.flights, func(a, b flight) int {
			if a.at != b.at {
				return int(a.at - b.at)
			}
			return a.n - b.n
		})
		later := s.flights[:0]
		for _, f := range s.flights {
			r := s.replicas[f.to]
			switch {
			case r == nil:
			case f.at > s.now || s.stopped(r):
				later = append(later, f)
			default:
				r.core.Receive(s.now, f.m, f.reply)
			}
		}
		s.flights = later
		tick := s.now-s.ticked >= 100*time.Millisecond
		if tick {
			s.ticked = s.now
		}
		for _, id := range s.ids() {
			r := s.replicas[id]
			if s.stopped(r) {
				continue
			}
			if tick {
				r.core.Tick(s.now)
			}
			if tick || r.awake {
				s.send(id)
			}
		}
	}
}

// next is when something happens next.
func (s *simulation) next() time.Duration {
	soon := s.now + 2*time.Millisecond
	for _, r := range s.replicas {
		if r.awake {
			return soon
		}
	}
	at := s.ticked + 100*time.Millisecond
	for _, f := range s.flights {
		if r := s.replicas[f.to]; r != nil && !s.stopped(r) {
			at = min(at, f.at)
		}
	}
	return max(at, soon)
}

// act does one random thing.
func (s *simulation) act() {
	id, r := s.any()
	switch n := s.rng.IntN(100); {
	case n < 45:
		if s.stopped(r) {
			return
		}
		q := &routing.Query{ID: fmt.Sprint(s.sent), Conversation: fmt.Sprint("c", s.rng.IntN(simConversations)), PromptTokens: int64(s.rng.IntN(5000))}
		if plan, err := r.router.Pick(s.now, q, nil, nil); err == nil {
			r.live = append(r.live, plan.Reservation)
		}
	case n < 60:
		if len(r.live) > 0 && !s.stopped(r) {
			r.router.FirstToken(s.now, r.live[s.rng.IntN(len(r.live))])
		}
	case n < 85:
		if len(r.live) > 0 && !s.stopped(r) {
			i := s.rng.IntN(len(r.live))
			r.router.Release(s.now, r.live[i])
			r.live = slices.Delete(r.live, i, i+1)
		}
	case n < 88:
		if len(r.live) > 0 && !s.stopped(r) {
			r.router.Rebook(s.now, r.live[s.rng.IntN(len(r.live))], kvindex.Slot(s.rng.IntN(simTargets)))
		}
	case n < 90: // killed
		if len(s.replicas) > 1 {
			delete(s.replicas, id)
			s.order = nil
		}
	case n < 92:
		if len(s.replicas) < 5 {
			s.begin()
		}
	case n < 94:
		r.paused = s.now + time.Duration(s.rng.IntN(5000))*time.Millisecond
	case n < 96:
		s.side[id] = s.rng.IntN(2)
	case n < 98: // a worker list that differs for a while
		slot := s.rng.IntN(simTargets - 1)
		if _, there := r.router.Target(kvindex.Slot(slot)); there {
			r.router.RemoveTarget(kvindex.Slot(slot))
		} else {
			r.router.SetTarget(kvindex.Slot(slot), routing.TargetInfo{Target: target(slot), Ready: true})
		}
	case n < 99:
		for _, f := range s.recorded {
			if f.from != id && (f.to == id || hasChanges(f.m) || f.m.GetSum() != nil || f.m.GetHello()) && !s.stopped(r) {
				r.core.Receive(s.now, f.m, f.reply)
			}
		}
	default:
		s.advance(time.Duration(s.rng.IntN(3000)) * time.Millisecond)
	}
}

// heal ends all faults and gives the replicas the time to agree: those that live 2 s, and 3 s to
// drop those that were killed. It returns what differs after 2 s.
func (s *simulation) heal() []string {
	s.lost, s.doubled, s.late = 0, 0, 0
	clear(s.side)
	for _, r := range s.replicas {
		r.paused = 0
		for slot := range simTargets {
			if _, there := r.router.Target(kvindex.Slot(slot)); !there {
				r.router.SetTarget(kvindex.Slot(slot), routing.TargetInfo{Target: target(slot), Ready: true})
			}
		}
	}
	s.advance(2 * time.Second)
	list := s.copyFailures()
	s.advance(time.Second)
	return list
}

// copyFailures lists the living replicas of which another does not have the ledger.
func (s *simulation) copyFailures() (list []string) {
	for _, id := range s.ids() {
		for _, other := range s.ids() {
			if p := s.replicas[id].core.peers[other]; other != id && (p == nil || p.gone || p.request != 0 || p.sum != s.replicas[other].core.sum) {
				list = append(list, fmt.Sprintf("%s: got another ledger of %s or none: %+v, want %v", id, other, p, s.replicas[other].core.sum))
			}
		}
	}
	return list
}

// ledgerFailures lists the ledgers that differ in a fleet that had the time to agree.
func (s *simulation) ledgerFailures() (list []string) {
	want := 0
	for _, r := range s.replicas {
		want += len(r.live)
	}
	for _, id := range s.ids() {
		r := s.replicas[id]
		if got := r.router.Live(); got != want {
			list = append(list, fmt.Sprintf("%s: got %d bookings, want the fleet's %d", id, got, want))
		}
		if n := r.core.stats.Errors; n != 0 {
			list = append(list, fmt.Sprintf("%s: got %d silent errors, want 0: gaps are found before", id, n))
		}
		if n := r.router.DoubleReleases(); n != 0 {
			list = append(list, fmt.Sprintf("%s: got %d double releases, want 0", id, n))
		}
		for slot := range simTargets {
			if got := r.router.Load(kvindex.Slot(slot)); want == 0 && got != (routing.Load{}) {
				list = append(list, fmt.Sprintf("%s: got load %+v of target %d after the end, want none", id, got, slot))
			}
		}
		for _, p := range r.core.peers {
			if s.replicas[p.id] == nil && !p.gone {
				list = append(list, fmt.Sprintf("%s: %s is still there, want it dropped", id, p.id))
			}
		}
	}
	return append(list, s.copyFailures()...)
}

// bindingFailures lists the conversations with more than one binding.
func (s *simulation) bindingFailures() (list []string) {
	for leg := range numLegs {
		bound := map[routing.Key]kvindex.Target{}
		for _, id := range s.ids() {
			r := s.replicas[id]
			for key := range r.core.legs[leg].byKey {
				got, ok := r.router.Bound(leg, key)
				if before, seen := bound[key]; ok && seen && before != got {
					list = append(list, fmt.Sprintf("%s: conversation %x is bound to %v, elsewhere to %v", id, key.Hi, got, before))
				} else if ok {
					bound[key] = got
				}
			}
		}
	}
	return list
}

// history runs one history and returns what did not hold.
func history(t testing.TB, seed uint64) []string {
	s := newSimulation(t, seed)
	s.lost, s.doubled, s.late = s.rng.IntN(4)*30, s.rng.IntN(3)*50, s.rng.IntN(3)*100
	for range 40 + s.rng.IntN(80) {
		s.act()
		s.advance(time.Duration(s.rng.IntN(15)) * time.Millisecond)
	}
	list := append(s.heal(), s.ledgerFailures()...)
	// A replica that dies may have told a binding to some only. The next use of the conversation
	// tells the others.
	for _, id := range s.ids() {
		r := s.replicas[id]
		for n := range simConversations {
			plan, err := r.router.Pick(s.now, &routing.Query{ID: "last", Conversation: fmt.Sprint("c", n), PromptTokens: 1}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.router.Release(s.now, plan.Reservation)
		}
		s.advance(50 * time.Millisecond)
	}
	for _, id := range s.ids() {
		r := s.replicas[id]
		for _, b := range r.live {
			r.router.Release(s.now, b)
		}
		r.live = nil
	}
	s.advance(100 * time.Millisecond)
	list = append(list, s.ledgerFailures()...)
	return append(list, s.bindingFailures()...)
}

// TestHistories runs the protocol through thousands of histories of faults. One that fails
// repeats with its seed. It has one goroutine: make test runs it without the race detector.
func TestHistories(t *testing.T) {
	count := uint64(4000)
	if testing.Short() {
		count = 100
	}
	for seed := range count {
		if list := history(t, seed); len(list) > 0 {
			t.Fatalf("seed %d: %d failures, the first: %s", seed, len(list), list[0])
		}
	}
}

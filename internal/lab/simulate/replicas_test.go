package simulate

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/internal/replicas"
	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

// member is one process of a fleet: the real router and the real protocol.
type member struct {
	name   string
	core   *replicas.Core
	router *routing.Router
	live   []routing.ReservationID
	awake  bool          // it has something to send
	paused time.Duration // until when its process is stopped
	side   int           // members of different sides do not hear each other
}

// flight is a message on its way.
type flight struct {
	at               time.Duration
	n                int // order of sending, for messages that arrive at the same time
	from, to, answer string
	m                *kvlanev1.ReplicaMessage
}

// replicaSet is replicas that tell each other what they book, on a network that loses, doubles and delays messages.
type replicaSet struct {
	rng     *rand.Rand
	trace   *strings.Builder
	reached map[string]int
	now     time.Duration
	ticked  time.Duration

	members      []*member
	starts, sent int
	flights      []flight
	recorded     []flight // by an attacker, who sends them again
	keys         [2]map[routing.Key]bool
	relisted     [fleetTargets]bool // a replica took it off its list: bookings on it no longer load it there
	// How many of 1,000 messages are lost, doubled and late.
	lost, doubled, late int
	attacked            bool // to the end
	died                bool // a replica has ended
}

const (
	fleetTargets       = 6
	fleetConversations = 12
	maxRecorded        = 100
	tickEvery          = 100 * time.Millisecond
)

var fleetKinds = []kind[*replicaSet]{
	{"request", 45, func(f *replicaSet) { f.running((*replicaSet).request) }},
	{"first token", 15, func(f *replicaSet) {
		f.booking(func(m *member, i int) { m.router.FirstToken(f.now, m.live[i]) })
	}},
	{"end", 25, func(f *replicaSet) { f.booking(f.release) }},
	{"served elsewhere", 3, func(f *replicaSet) {
		f.booking(func(m *member, i int) { m.router.Rebook(f.now, m.live[i], kvindex.Slot(f.rng.IntN(fleetTargets))) })
	}},
	{"replica is killed", 2, func(f *replicaSet) {
		if len(f.members) > 1 {
			at := f.rng.IntN(len(f.members))
			f.reach("killed")
			f.died = true
			f.sayf("%s", f.members[at].name)
			f.members = slices.Delete(f.members, at, at+1)
		}
	}},
	{"replica says goodbye", 1, (*replicaSet).goodbye},
	{"replica starts", 3, func(f *replicaSet) {
		if len(f.members) < 5 {
			f.start()
		}
	}},
	{"replica is stopped", 2, func(f *replicaSet) {
		m := f.any()
		m.paused = f.now + time.Duration(f.rng.IntN(5000))*time.Millisecond
		f.sayf("%s until %v", m.name, m.paused)
	}},
	{"network parts", 2, func(f *replicaSet) {
		m := f.any()
		m.side = f.rng.IntN(2)
		f.sayf("%s is on side %d", m.name, m.side)
	}},
	{"another list of workers", 2, (*replicaSet).relist},
	{"recorded messages", 1, func(f *replicaSet) { f.running((*replicaSet).sendAgain) }},
	{"time", 1, func(f *replicaSet) { f.pass(time.Duration(f.rng.IntN(3000)) * time.Millisecond) }},
}

func (f *replicaSet) reach(what string) { f.reached[what]++ }

func (f *replicaSet) sayf(format string, args ...any) {
	if f.trace != nil {
		fmt.Fprintf(f.trace, "  %8.3fs  "+format+"\n", append([]any{f.now.Seconds()}, args...)...)
	}
}

func openFleet(seed uint64, trace *strings.Builder, reached map[string]int) *replicaSet {
	rng := rngOf(seed, 2)
	f := &replicaSet{rng: rng, trace: trace, reached: reached, keys: [2]map[routing.Key]bool{{}, {}}}
	f.lost, f.doubled, f.late, f.attacked = rng.IntN(4)*30, rng.IntN(3)*50, rng.IntN(3)*100, rng.IntN(2) == 0
	f.sayf("scenario: of 1000 messages %d are lost, %d doubled, %d late", f.lost, f.doubled, f.late)
	for range 2 + rng.IntN(3) {
		f.start()
	}
	return f
}

func fleetTarget(n int) kvindex.Target {
	return kvindex.Target{Worker: fmt.Sprint("w", n/2), Rank: int32(n % 2)}
}

func (f *replicaSet) start() {
	f.starts++
	rules := routing.DefaultConfig()
	rules.MaxConversations, rules.Policy.Sticky.Mode, rules.Node = 1000, routing.StickyTarget, uint64(f.starts)
	router, err := routing.New(rules)
	if err != nil {
		panic(err)
	}
	m := &member{name: fmt.Sprint("r", f.starts), router: router, awake: true}
	for n := range fleetTargets {
		router.SetTarget(kvindex.Slot(n), routing.TargetInfo{Target: fleetTarget(n), Ready: true})
	}
	m.core = replicas.New(m.name, router, f.now, func() { m.awake = true })
	router.Share(m.core)
	f.members = append(f.members, m)
	f.sayf("%s starts", m.name)
}

func (f *replicaSet) any() *member { return f.members[f.rng.IntN(len(f.members))] }

func (f *replicaSet) running(do func(f *replicaSet, m *member)) {
	if m := f.any(); m.paused <= f.now {
		do(f, m)
	}
}

// booking does something to a booking of a running member.
func (f *replicaSet) booking(do func(m *member, i int)) {
	f.running(func(f *replicaSet, m *member) {
		if len(m.live) > 0 {
			i := f.rng.IntN(len(m.live))
			f.sayf("%s, booking %d", m.name, m.live[i])
			do(m, i)
		}
	})
}

func (f *replicaSet) request(m *member) {
	q := &routing.Query{ID: fmt.Sprint(f.sent), Conversation: fmt.Sprint("c", f.rng.IntN(fleetConversations)), PromptTokens: int64(f.rng.IntN(5000))}
	if plan, err := m.router.Pick(f.now, q, nil, nil); err == nil {
		f.sayf("%s books %d on target %d for %s", m.name, plan.Reservation, plan.Decode, q.Conversation)
		m.live = append(m.live, plan.Reservation)
	}
}

func (f *replicaSet) release(m *member, i int) {
	m.router.Release(f.now, m.live[i])
	m.live = slices.Delete(m.live, i, i+1)
}

func (f *replicaSet) goodbye() {
	if m := f.any(); len(f.members) > 1 && m.paused <= f.now {
		f.reach("goodbye")
		f.died = true
		f.sayf("%s", m.name)
		m.core.Bye()
		f.send(m)
		f.members = slices.DeleteFunc(f.members, func(o *member) bool { return o == m })
	}
}

// relist takes a target off a replica's list, or puts it back.
func (f *replicaSet) relist() {
	m, slot := f.any(), kvindex.Slot(f.rng.IntN(fleetTargets-1))
	_, there := m.router.Target(slot)
	f.sayf("%s, target %d, was there: %v", m.name, slot, there)
	if there {
		f.relisted[slot] = true
		m.router.RemoveTarget(slot)
	} else {
		m.router.SetTarget(slot, routing.TargetInfo{Target: fleetTarget(int(slot)), Ready: true})
	}
}

// sendAgain replays what an attacker has recorded: what went to all, and what went to this replica.
func (f *replicaSet) sendAgain(m *member) {
	for _, r := range f.recorded {
		if r.from != m.name && (r.to == m.name || r.answer == "") {
			f.reach("sent again")
			m.core.Receive(f.now, r.m, r.from)
		}
	}
}

// passAttacked lets time pass, in half of the histories with recorded messages that are sent to all.
func (f *replicaSet) passAttacked(d time.Duration) {
	const every = 500 * time.Millisecond
	for ; d > 0; d -= every {
		for _, m := range f.members {
			if f.attacked {
				f.sendAgain(m)
			}
		}
		f.pass(every)
	}
}

// send puts what a member has to say on the network.
func (f *replicaSet) send(m *member) {
	m.awake = false
	for _, o := range m.core.Take() {
		if o.Build == nil {
			f.transmit(m, &o, o.Message)
			continue
		}
		for built := range o.Build(func(do func()) { do() }) {
			f.transmit(m, &o, built)
		}
	}
}

func (f *replicaSet) transmit(m *member, o *replicas.Out, message *kvlanev1.ReplicaMessage) {
	data, err := proto.Marshal(message)
	if err != nil {
		panic(err)
	}
	message, err = replicas.Parse(data)
	if err != nil {
		failf("a message can be read", "got %v for one of %s: %v", err, m.name, message)
	}
	for _, c := range message.GetConversations() {
		f.keys[c.GetLeg()][routing.Key{Hi: c.GetHi(), Lo: c.GetLo()}] = true
	}
	one := cmp.Or(o.To, o.Reply)
	for _, to := range f.members {
		if to == m || one != "" && one != to.name {
			continue
		}
		copies := 1
		if f.rng.IntN(1000) < f.lost || m.side != to.side {
			copies = 0
		} else if f.rng.IntN(1000) < f.doubled {
			copies = 2
		}
		for range copies {
			delay := time.Duration(1+f.rng.IntN(3)) * time.Millisecond
			if f.rng.IntN(1000) < f.late {
				delay = time.Duration(f.rng.IntN(400)) * time.Millisecond
			}
			f.sent++
			f.flights = append(f.flights, flight{f.now + delay, f.sent, m.name, to.name, one, message})
		}
		if r := (flight{from: m.name, to: to.name, answer: one, m: message}); len(f.recorded) < maxRecorded {
			f.recorded = append(f.recorded, r)
		} else if f.rng.IntN(4) == 0 {
			f.recorded[f.rng.IntN(maxRecorded)] = r
		}
	}
}

// pass lets time pass: messages arrive, members send and tick.
func (f *replicaSet) pass(d time.Duration) {
	for end := f.now + d; f.now < end; {
		f.now = min(end, f.next())
		slices.SortFunc(f.flights, func(a, b flight) int { return cmp.Or(cmp.Compare(a.at, b.at), a.n-b.n) })
		later := f.flights[:0]
		for _, l := range f.flights {
			at := slices.IndexFunc(f.members, func(m *member) bool { return m.name == l.to })
			switch {
			case at < 0:
			case l.at > f.now || f.members[at].paused > f.now:
				later = append(later, l)
			default:
				f.members[at].core.Receive(f.now, l.m, l.from)
			}
		}
		f.flights = later
		tick := f.now-f.ticked >= tickEvery
		if tick {
			f.ticked = f.now
		}
		for _, m := range f.members {
			if m.paused > f.now {
				continue
			}
			if tick {
				m.core.Tick(f.now)
			}
			if tick || m.awake {
				f.send(m)
			}
		}
	}
}

// next is when something happens next.
func (f *replicaSet) next() time.Duration {
	soon, at := f.now+2*time.Millisecond, f.ticked+tickEvery
	for _, m := range f.members {
		if m.awake && m.paused <= f.now {
			return soon
		}
	}
	for _, l := range f.flights {
		if slices.ContainsFunc(f.members, func(m *member) bool { return m.name == l.to && m.paused <= f.now }) {
			at = min(at, l.at)
		}
	}
	return max(at, soon)
}

// finish mends all faults: after 2 s all replicas know each other, after 3 s they agree on every booking and load and have
// forgotten the dead ones. When all requests have ended nothing is booked.
func (f *replicaSet) finish() {
	f.lost, f.doubled, f.late = 0, 0, 0
	for _, m := range f.members {
		m.paused, m.side = 0, 0
		for n := range fleetTargets {
			if _, there := m.router.Target(kvindex.Slot(n)); !there {
				m.router.SetTarget(kvindex.Slot(n), routing.TargetInfo{Target: fleetTarget(n), Ready: true})
			}
		}
	}
	f.passAttacked(2 * time.Second)
	f.know()
	f.passAttacked(time.Second)
	f.agree()
	if !f.died {
		f.bound()
	}
	// A replica that ended may have told a binding to some only. The next use of the conversation tells the others.
	for _, m := range f.members {
		for n := range fleetConversations {
			plan, err := m.router.Pick(f.now, &routing.Query{ID: "last", Conversation: fmt.Sprint("c", n), PromptTokens: 1}, nil, nil)
			if err != nil {
				failf("all targets serve", "%s: %v", m.name, err)
			}
			m.router.Release(f.now, plan.Reservation)
		}
		f.pass(50 * time.Millisecond)
	}
	for _, m := range f.members {
		for len(m.live) > 0 {
			f.release(m, 0)
		}
	}
	f.pass(tickEvery)
	f.agree()
	f.bound()
}

// know checks that each replica has the ledgers of all others.
func (f *replicaSet) know() {
	for _, m := range f.members {
		for _, o := range f.members {
			if m == o {
				continue
			}
			at := slices.IndexFunc(m.core.State(f.now).Peers, func(p replicas.PeerState) bool { return p.ID == o.name })
			if at < 0 {
				failf("replicas know each other after 2 s", "%s does not know %s", m.name, o.name)
			}
			if p, want := m.core.State(f.now).Peers[at], o.core.State(f.now); !p.Synced || p.Seq != want.Seq || p.Bookings != want.Bookings {
				failf("replicas know each other's bookings after 2 s", "%s: got %+v of %s, want sequence number %d and %d bookings", m.name, p, o.name, want.Seq, want.Bookings)
			}
		}
	}
}

// agree checks that all replicas have the same loads, which are those of the living bookings.
func (f *replicaSet) agree() {
	f.know()
	live := 0
	for _, m := range f.members {
		live += len(m.live)
	}
	for _, m := range f.members {
		if got := m.router.Live(); got != live {
			failf("each booking counts once", "%s: got %d bookings, want the fleet's %d", m.name, got, live)
		}
		if n := m.core.State(f.now).Stats.Errors; n != 0 {
			failf("gaps are found before sums differ", "%s: got %d silent errors, want 0", m.name, n)
		}
		if n := m.router.DoubleReleases(); n != 0 {
			failf("nothing is released twice", "%s: got %d double releases, want 0", m.name, n)
		}
		if got, want := len(m.core.State(f.now).Peers), len(f.members)-1; got != want {
			failf("dead replicas are dropped", "%s: got %d other replicas, want %d", m.name, got, want)
		}
		for n := range fleetTargets {
			got, want := m.router.Load(kvindex.Slot(n)), f.members[0].router.Load(kvindex.Slot(n))
			if live == 0 {
				want = routing.Load{}
			} else if f.relisted[n] {
				continue
			}
			if got != want {
				failf("loads are equal", "target %d of %s: got %+v, want %+v", n, m.name, got, want)
			}
		}
	}
}

// bound checks that a conversation is bound to one target, wherever it is bound.
func (f *replicaSet) bound() {
	for leg, keys := range f.keys {
		for key := range keys {
			var at kvindex.Target
			for _, m := range f.members {
				got, ok := m.router.Bound(leg, key)
				if ok && at != (kvindex.Target{}) && got != at {
					failf("a conversation has one binding", "conversation %x: got %v on %s, want %v", key.Hi, got, m.name, at)
				}
				if ok {
					f.reach("bound")
					at = got
				}
			}
		}
	}
}

func runFleet(h history, trace *strings.Builder, reached map[string]int) *failure {
	step := 0
	bad := guard(func() {
		f := openFleet(h.seed, trace, reached)
		for i, op := range h.operations {
			step = i
			at := slices.IndexFunc(fleetKinds, func(k kind[*replicaSet]) bool { return k.name == op.kind })
			f.rng = rngOf(op.seed, 3)
			f.sayf("%s", op.kind)
			fleetKinds[at].run(f)
			f.pass(time.Duration(f.rng.IntN(15)) * time.Millisecond)
		}
		step = len(h.operations)
		f.rng = rngOf(h.seed, 4)
		f.sayf("the end: all faults are mended, all requests end")
		f.finish()
		for _, m := range f.members {
			s := m.core.State(f.now).Stats
			for what, n := range map[string]uint64{"gap": s.Gaps, "state stopped": s.Stopped, "dropped": s.Dropped, "duplicate": s.Duplicates, "conflict": s.Conflicts, "unknown target": s.Unknown} {
				if n > 0 {
					f.reach(what)
				}
			}
		}
	})
	if bad != nil {
		bad.step = step
	}
	return bad
}

// TestReplicas is the simulation of the protocol by which replicas share what they book.
func TestReplicas(t *testing.T) {
	seeds := number("SEEDS", 2000)
	if raceDetector {
		seeds = 20
	}
	simulate(t, seeds, func(seed uint64) history { return draw(seed, 80, fleetKinds) }, runFleet,
		[]string{"killed", "goodbye", "sent again", "gap", "state stopped", "dropped", "duplicate", "conflict", "unknown target", "bound"})
}

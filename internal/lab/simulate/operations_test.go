package simulate

import (
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// kinds is what can happen in the world.
var kinds = []kind[*world]{
	{"request", 30, (*world).arrive},
	{"progress", 35, func(w *world) { w.some((*request).progress) }},
	{"client leaves", 4, func(w *world) { w.some((*request).end) }},
	{"answer fails", 4, func(w *world) { w.some((*request).fail) }},
	{"retried elsewhere", 4, func(w *world) { w.some((*request).retry) }},
	{"prefill fails", 4, func(w *world) { w.some((*request).movePrefill) }},
	{"broken answer", 3, func(w *world) { w.some((*request).breakOff) }},
	{"double release", 1, func(w *world) { w.some((*request).endTwice) }},
	{"waiter leaves", 3, (*world).leaveQueue},
	{"time", 12, func(w *world) { w.pass(time.Duration(1+w.rng.IntN(1500)) * time.Millisecond) }},
	{"much time", 2, func(w *world) { w.pass(time.Duration(5+w.rng.IntN(40)) * time.Second) }},
	{"delivery", 45, func(w *world) { w.feed(func(x *target) { x.deliver() }) }},
	{"replay", 35, func(w *world) { w.feed(func(x *target) { x.stepReplay(false) }) }},
	{"replay fails", 2, func(w *world) { w.feed(func(x *target) { x.stepReplay(true) }) }},
	{"batch lost", 4, func(w *world) { w.replica((*replica).lose) }},
	{"batch doubled", 2, func(w *world) { w.feed((*target).double) }},
	{"connection breaks", 3, func(w *world) { w.feed((*target).broken) }},
	{"connection", 12, func(w *world) { w.feed((*target).connect) }},
	{"silent finish", 4, func(w *world) { w.feed(func(x *target) { x.do(x.machine.Finished()) }) }},
	{"engine restarts", 2, func(w *world) { w.engine((*engine).restart) }},
	{"cache cleared", 1, func(w *world) { w.engine((*engine).clear) }},
	{"eviction", 6, func(w *world) { w.engine((*engine).evict) }},
	{"engine hangs", 2, func(w *world) { w.engine(func(e *engine) { e.hung = true }) }},
	{"engine fails", 2, func(w *world) { w.engine(func(e *engine) { e.failing = true }) }},
	{"engine heals", 4, func(w *world) { w.engine(func(e *engine) { e.hung, e.failing = false, false }) }},
	{"worker leaves", 2, func(w *world) { w.replica((*replica).leave) }},
	{"worker comes", 5, func(w *world) { w.replica((*replica).come) }},
	{"health check", 3, func(w *world) { w.replica((*replica).health) }},
	{"load report", 4, func(w *world) { w.replica((*replica).report) }},
	{"message", 30, func(w *world) {
		w.replica(func(r *replica) {
			if len(r.inbox) > 0 {
				r.receive()
			}
		})
	}},
	{"message lost", 2, func(w *world) {
		w.replica(func(r *replica) {
			if len(r.inbox) > 0 {
				r.inbox = r.inbox[1:]
			}
		})
	}},
	{"snapshot", 2, func(w *world) { w.replica((*replica).save) }},
	{"replica restarts", 1, func(w *world) {
		w.replica(func(r *replica) {
			r.stop(w.rng.IntN(3) > 0)
			w.start(r.saved, r.roles)
		})
	}},
}

// runCore plays a history in a new world.
func runCore(h history, trace *strings.Builder, reached map[string]int) *failure {
	step := 0
	bad := guard(func() {
		w := newWorld(h.seed, trace, reached)
		for i, op := range h.operations {
			step = i
			at := slices.IndexFunc(kinds, func(k kind[*world]) bool { return k.name == op.kind })
			w.rng = rngOf(op.seed, 3)
			w.now += time.Millisecond
			w.sayf("%s", op.kind)
			kinds[at].run(w)
			w.check()
		}
		step = len(h.operations)
		w.rng = rngOf(h.seed, 4)
		w.sayf("the end: all faults are mended, all requests end")
		w.finish()
	})
	if bad != nil {
		bad.step = step
	}
	return bad
}

func (w *world) some(f func(q *request)) {
	if len(w.requests) > 0 {
		f(w.requests[w.rng.IntN(len(w.requests))])
	}
}

func (w *world) replica(f func(r *replica)) { f(w.replicas[w.rng.IntN(len(w.replicas))]) }

func (w *world) engine(f func(e *engine)) {
	e := w.engines[w.rng.IntN(len(w.engines))]
	w.sayf("%s", e.target)
	f(e)
}

func (w *world) feed(f func(x *target)) {
	if x := w.replicas[w.rng.IntN(len(w.replicas))].anyTarget(); x != nil {
		w.sayf("%s of %s, %s, %d batches on the wire", x.e.target, x.r.name, x.machine.State(), len(x.wire))
		f(x)
	}
}

func (w *world) pass(d time.Duration) {
	w.now += d
	for _, r := range w.replicas {
		r.expire()
		for _, o := range slices.Clone(r.waiting) {
			if o.Deadline <= w.now && slices.Contains(r.waiting, o) {
				w.reach("waiter timed out")
				r.giveUp(o)
			}
		}
	}
}

// progress takes a request to its next phase.
func (q *request) progress() {
	b, r := q.b, q.r
	computes := b.decode
	if b.phase == 0 && b.prefill != nil {
		computes = b.prefill
	}
	switch {
	case computes.e.hung || computes.removed && b.phase < 2:
		return
	case computes.e.failing:
		q.fail()
		return
	}
	r.w.sayf("request %d goes on at %s", q.id, computes.e.target)
	switch {
	case b.phase == 0 && b.prefill != nil:
		if !r.router.PrefillDone(r.w.now, b.id) {
			failf("phases follow each other", "request %d: prefill not done", q.id)
		}
		b.phase = 1
		computes.e.store(q.last)
	case b.phase < 2:
		if !r.router.FirstToken(r.w.now, b.id) || r.router.FirstToken(r.w.now, b.id) || r.router.PrefillDone(r.w.now, b.id) {
			failf("phases follow each other", "request %d: first token", q.id)
		}
		b.phase = 2
		r.tell(first, routing.Booking{ID: b.id})
		computes.e.store(q.last)
	default:
		q.end()
		return
	}
	r.place()
}

// end releases a request, in whatever phase it is.
func (q *request) end() {
	r := q.r
	if !r.router.Release(r.w.now, q.b.id) {
		failf("2: a booking is released once", "request %d was not booked", q.id)
	}
	r.tell(released, routing.Booking{ID: q.b.id})
	r.bookings = slices.DeleteFunc(r.bookings, func(b *booking) bool { return b == q.b })
	r.w.requests = slices.DeleteFunc(r.w.requests, func(o *request) bool { return o == q })
	r.place()
}

func (q *request) endTwice() {
	q.end()
	if q.r.router.Release(q.r.w.now, q.b.id) {
		failf("2: a booking is released once", "request %d was released again", q.id)
	}
	q.r.doubles++
}

// fail is an answer with an error: the engine computed nothing.
func (q *request) fail() {
	q.r.router.Failed(q.b.id)
	if q.r.w.rng.IntN(2) == 0 {
		q.withdraw()
	}
	q.end()
}

// retry is a request that the data plane has sent elsewhere, often because its worker left.
func (q *request) retry() {
	for _, o := range q.r.w.requests {
		if o.b.decode.removed {
			q = o
		}
	}
	x := q.r.anyTarget()
	if x == nil || x.role() == routing.Prefill {
		return
	}
	if !q.r.router.Rebook(q.r.w.now, q.b.id, x.slot) {
		failf("a retry moves the booking", "request %d to %s", q.id, x.e.target)
	}
	if x != q.b.decode {
		q.r.w.reach("rebooked")
		for i := range q.r.homes {
			if h := &q.r.homes[i]; h.conversation == q.b.conversation && h.at == q.b.decode {
				h.at = x
			}
		}
		q.b.decode = x
	}
	q.r.place()
}

// breakOff is answers that the engine ends early, which is known only after their end, or a whole one.
func (q *request) breakOff() {
	x, n := q.b.decode, q.r.w.rng.IntN(12)
	q.end()
	for range n {
		if !x.removed {
			q.r.router.BrokenOff(x.slot, x.e.target, n > 2)
		}
	}
}

// movePrefill is a prefill leg that failed: it is tried elsewhere, or computed on the decode target.
func (q *request) movePrefill() {
	b, r := q.b, q.r
	if b.prefill == nil || b.phase != 0 {
		return
	}
	again := q.q
	again.Exclude = []kvindex.Slot{b.prefill.slot}
	if b.prefill.removed {
		again.Exclude = nil
	}
	r.router.PrefillFailed(b.id)
	plan, err := r.router.MovePrefill(r.w.now, b.id, &again, r.overlaps(q.last), nil)
	if err == nil {
		r.w.reach("prefill moved")
		b.prefill, b.miss = r.at(plan.Prefill), plan.Miss
		q.speculate(b.prefill)
	} else {
		r.w.reach("computed locally")
		if !r.router.ComputeLocally(r.w.now, b.id, q.plan.DecodeMiss) {
			failf("phases follow each other", "request %d is not computed locally", q.id)
		}
		b.prefill, b.miss = nil, q.plan.DecodeMiss
	}
	r.place()
}

func (w *world) leaveQueue() {
	r := w.replicas[w.rng.IntN(len(w.replicas))]
	if len(r.waiting) > 0 {
		o := r.waiting[w.rng.IntN(len(r.waiting))]
		w.sayf("%s: request %d leaves the queue", r.name, o.ID)
		r.giveUp(o)
	}
}

// lose drops a batch from the wire of any target that has one: few have, so that a target drawn first would seldom lose
// anything.
func (r *replica) lose() {
	start := r.w.rng.IntN(len(r.targets))
	for i := range r.targets {
		x := r.targets[(start+i)%len(r.targets)]
		if x == nil || r.w.feeds == polled {
			continue
		}
		if at := slices.IndexFunc(x.wire, func(b *batch) bool { return b != nil }); at >= 0 {
			r.w.reach("batch lost")
			r.w.sayf("batch %d of %s to %s", x.wire[at].seq, x.e.target, r.name)
			x.wire = slices.Delete(x.wire, at, at+1)
			return
		}
	}
}

func (x *target) double() {
	if len(x.wire) > 0 && x.wire[0] != nil {
		x.wire = slices.Insert(x.wire, 0, x.wire[0])
	}
}

// broken is a connection that the network breaks. What an engine keeps until it is fetched is not lost.
func (x *target) broken() {
	if !x.connected {
		return
	}
	if x.r.w.feeds == polled {
		x.down()
		return
	}
	x.connected, x.wire = false, append(x.wire, nil)
}

func (e *engine) clear() {
	e.held = [tiers]set{}
	e.publish([]event{{Event: kvindex.Event{Kind: kvindex.Cleared}}})
}

// evict drops a block, as an engine does for requests of other clients.
func (e *engine) evict() {
	if n := e.victim(0, nil); n >= 0 {
		e.publish([]event{e.removal(0, n)})
	}
}

func (r *replica) leave() {
	if x := r.anyTarget(); x != nil {
		r.w.sayf("%s at %s", x.e.target, r.name)
		r.remove(x)
		r.place()
	}
}

func (r *replica) come() {
	for _, e := range r.w.engines {
		if r.targets[e.number] == nil {
			r.w.sayf("%s at %s", e.target, r.name)
			r.add(e, nil)
			r.place()
			return
		}
	}
}

func (r *replica) health() {
	if x := r.anyTarget(); x != nil {
		x.unready = !x.unready && r.w.rng.IntN(2) == 0
		r.router.SetTarget(x.slot, r.info(x.e, !x.unready))
		r.place()
	}
}

func (r *replica) report() {
	if x := r.anyTarget(); x != nil && r.w.reports {
		r.router.Report(r.w.now, x.slot, routing.Report{At: r.w.now, Running: r.w.rng.Int64N(6), Waiting: r.w.rng.Int64N(3), KVUsage: 0.5})
		r.place()
	}
}

// check compares every replica with its naive models.
func (w *world) check() {
	for _, r := range w.replicas {
		loads := r.loads()
		for _, x := range r.targets {
			if x == nil {
				continue
			}
			if got, want := r.router.Load(x.slot), loads[x]; got != want {
				failf("2: loads are the sum of the bookings", "%s of %s: got %+v, want %+v", x.e.target, r.name, got, want)
			}
			if !x.outdated() && len(x.lasts) > 1 {
				failf("1: no credit for blocks that are not held", "%s of %s: got applied batches of %d incarnations on a verified connection, want one", x.e.target, r.name, len(x.lasts))
			}
			if len(x.lasts) > 1 {
				w.reach("batches of two incarnations")
			}
			for tier := range tiers {
				if n := x.known[tier].outside(x.backed(tier)); n >= 0 {
					failf("1: no credit for blocks that are not held", "%s of %s, feed %s: block %v is credited on tier %d, the engine did not hold it after the newest batch that was applied",
						x.e.target, r.name, x.machine.State(), w.blocks[n].path, tier)
				}
			}
			if r.router.Suspect(x.slot) != "" {
				w.reach("suspect")
			}
		}
		if got, want := r.router.Live(), len(r.bookings); got != want {
			failf("2: loads are the sum of the bookings", "%s: got %d bookings, want %d", r.name, got, want)
		}
		if got := r.router.DoubleReleases(); got != r.doubles {
			failf("2: a booking is released once", "%s: got %d double releases, want %d", r.name, got, r.doubles)
		}
		if got := r.queue.Len(); got != len(r.waiting) || got > w.queueMax {
			failf("no waiter is lost", "%s: got %d in the queue, want %d, at most %d", r.name, got, len(r.waiting), w.queueMax)
		}
		r.checkIndex()
	}
}

func (r *replica) checkIndex() {
	s := r.index.Stats()
	if r.bounded() && s.Bytes > r.w.maxBytes {
		failf("7: memory is bounded", "%s: got %d bytes, want at most %d", r.name, s.Bytes, r.w.maxBytes)
	}
	for _, t := range s.Targets {
		x := r.engineOf(t.Target)
		if x == nil {
			failf("1: no credit for blocks that are not held", "%s: the index has %s, which was removed", r.name, t.Target)
			return
		}
		for tier := range tiers {
			// A feed that has not seen its engine's restart may apply batches of both, and with them a block twice: the
			// index then takes two removals, as of an engine that has two copies.
			if got, want := t.Held[tier], int64(x.known[tier].count()); !x.outdated() && (got > want || got < want && !r.bounded()) {
				failf("1: the index follows the events", "%s of %s, tier %d: got %d blocks, want %d", t.Target, r.name, tier, got, want)
			}
		}
		if got := t.Speculative; got > int64(len(x.claims)) {
			failf("1: no credit for blocks that are not held", "%s of %s: got credit for %d blocks, %d were sent", t.Target, r.name, got, len(x.claims))
		}
	}
}

// finish mends everything, ends everything, and checks what must be true then.
func (w *world) finish() {
	for _, e := range w.engines {
		e.hung, e.failing = false, false
	}
	for _, r := range w.replicas {
		for range w.engines {
			r.come()
		}
		for _, x := range r.targets {
			x.unready = false
			r.router.SetTarget(x.slot, r.info(x.e, true))
		}
	}
	w.settle()
	for _, e := range w.engines {
		e.store(w.prompt())
		e.publish([]event{{Event: kvindex.Event{Kind: kvindex.Removed, Hashes: []kvindex.EngineHash{1 << 62}}, blocks: []int{1 << 20}}})
	}
	w.settle()
	w.check()
	for _, r := range w.replicas {
		for _, x := range r.targets {
			if x.machine.State().String() != "live" || x.last != x.e.last {
				failf("feeds recover", "%s of %s: got %s, newest batch %v, want live and %v", x.e.target, r.name, x.machine.State(), x.last, x.e.last)
			}
			if n := x.known[0].outside(x.e.held[0]); n >= 0 {
				failf("1: no credit for blocks that are not held", "%s of %s: block %v", x.e.target, r.name, w.blocks[n].path)
			}
		}
	}
	for len(w.requests) > 0 {
		w.requests[0].end()
	}
	for _, r := range w.replicas {
		for len(r.waiting) > 0 {
			r.giveUp(r.waiting[0])
		}
		for len(w.requests) > 0 {
			w.requests[0].end()
		}
	}
	for _, r := range w.replicas {
		for len(r.inbox) > 0 {
			r.receive()
		}
	}
	w.pass(time.Hour)
	w.check()
	for _, r := range w.replicas {
		if len(r.bookings) > 0 || r.queue.Len() > 0 {
			failf("2: all loads end at zero", "%s: %d bookings, %d waiters", r.name, len(r.bookings), r.queue.Len())
		}
		for _, x := range r.targets {
			if l := r.router.Load(x.slot); l != (routing.Load{}) {
				failf("2: all loads end at zero", "%s of %s: %+v", x.e.target, r.name, l)
			}
		}
		if n := r.index.Stats().Speculative; n != 0 {
			failf("credit for prompts ends", "%s: %d blocks", r.name, n)
		}
		r.recover()
	}
}

// settle delivers everything.
func (w *world) settle() {
	for range 3 {
		for _, r := range w.replicas {
			for _, x := range r.targets {
				x.connect()
				for n := 0; len(x.wire) > 0 || x.replay != nil; n++ {
					if n > 100_000 {
						failf("feeds recover", "%s of %s: %s, %d batches wait for ever", x.e.target, r.name, x.machine.State(), len(x.wire))
					}
					if x.replay != nil {
						x.stepReplay(false)
					} else {
						x.deliver()
					}
				}
			}
		}
	}
}

// recover sends each target a request that is answered well: it is not suspect any more.
func (r *replica) recover() {
	for range 2 {
		for _, x := range r.targets {
			if x.role() == routing.Prefill {
				continue
			}
			r.w.now += time.Second
			q := routing.Query{ID: "last", PromptTokens: 10, Local: true, Pin: &routing.Pin{Worker: x.e.target.Worker, Rank: x.e.target.Rank}}
			plan, err := r.router.Pick(r.w.now, &q, nil, nil)
			if err != nil || plan.Decode != x.slot {
				failf("suspects recover", "%s of %s: got %+v, error %v, want it", x.e.target, r.name, plan, err)
			}
			r.router.FirstToken(r.w.now+10*time.Millisecond, plan.Reservation)
			r.router.Release(r.w.now+20*time.Millisecond, plan.Reservation)
			r.router.BrokenOff(x.slot, x.e.target, false)
		}
	}
	for _, x := range r.targets {
		if why := r.router.Suspect(x.slot); why != "" && x.role() != routing.Prefill {
			failf("suspects recover", "%s of %s is still suspect: %s", x.e.target, r.name, why)
		}
	}
}

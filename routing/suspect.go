package routing

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// A worker that accepts requests and never answers looks idle to every rule that counts tokens: its clients give up,
// and its queue is empty again. So the router watches answers. A target is suspect while its oldest request has waited
// for the first token much longer than the others take for as many tokens, or while its answers keep failing. New
// requests avoid a suspect target unless nothing else is eligible; now and then one may try it. The cause may be the
// requests: if all of them belong to one conversation, or those that wait to one tenant, only its own avoid the target.
const (
	// suspectFactor is how many times its group's median a target's wait per token must be to make it suspect.
	suspectFactor = 10
	// suspectFailures is the number of failed answers in a row that make a target suspect.
	suspectFailures = 5
	// suspectBase is added to the booked tokens of a wait: the fixed cost of a request.
	suspectBase = 1000
	// probeEvery is how often a suspect target may get a request.
	probeEvery = 30 * time.Second
	// judgeEvery is how often targets are judged: judging reads the whole ledger.
	judgeEvery = 250 * time.Millisecond
	// pauseAfter is the least time without a sign of life that counts as a pause.
	pauseAfter = 2 * AwakeEvery
)

// wait is the time that a request waited, or waits, for its first token.
type wait struct {
	Since time.Duration `json:"since"`
	Took  time.Duration `json:"took"`
	// Pace is Took in seconds per token that had to be computed before the first token.
	Pace float64 `json:"pace"`
	// Alone is Took in seconds per token of this request only.
	Alone float64 `json:"alone,omitempty"`
	Of    party   `json:"of,omitzero"`
}

// party is whose requests are meant: those of one conversation, or of one tenant. A zero field means any, or not known.
type party struct {
	Tenant       Key `json:"tenant,omitzero"`
	Conversation Key `json:"conversation,omitzero"`
}

// common is the least party that both belong to. Tenants have no conversations in common: clients choose their ids.
func (p party) common(q party) party {
	if p.Tenant != q.Tenant {
		return party{}
	}
	if p.Conversation != q.Conversation {
		p.Conversation = Key{}
	}
	return p
}

// waits is the longest wait, and of those that say more the longest.
type waits struct {
	wait
	Other wait `json:"other,omitzero"`
}

func (w *waits) add(n wait) {
	if n.Pace > w.Pace {
		n, w.wait = w.wait, n
	}
	if n.adds(&w.wait) > w.Other.adds(&w.wait) {
		w.Other = n
	}
}

// adds ranks waits by what they add to another: those of its conversation nothing, those of other tenants most. A
// request without an id is a conversation of its own.
func (w *wait) adds(o *wait) float64 {
	switch {
	case w.Of == o.Of && w.Of.Conversation != (Key{}):
		return 0
	case w.Of.Tenant != o.Of.Tenant && w.Pace > 0:
		return 1e9 + w.Pace
	}
	return w.Pace
}

// health is what the answers of a target have shown.
type health struct {
	// Pace is the wait per token of the request with the latest first token, 0 if none came since the target was suspect.
	Pace float64 `json:"pace,omitempty"`
	// Heard is when the last first token came, Answered when the youngest request with a first token was booked.
	// Requests booked before that were overtaken: their wait says nothing about the target.
	Heard    time.Duration `json:"heard,omitempty"`
	Answered time.Duration `json:"answered,omitempty"`
	// GivenUp holds the longest waits since then that ended without a first token.
	GivenUp waits `json:"given_up,omitzero"`
	// Failures counts failed answers in a row, Broken those in a row that the engine broke off.
	Failures int32 `json:"failures,omitempty"`
	Broken   int32 `json:"broken,omitempty"`
	// Blamed is the party of all failures in a row, as far as they have one in common.
	Blamed party `json:"blamed,omitzero"`
	// Suspect is why the target is avoided, By whose requests avoid it, and Probe when it may get one again.
	Suspect string        `json:"suspect,omitempty"`
	By      party         `json:"by,omitzero"`
	Probe   time.Duration `json:"probe,omitempty"`

	// Worst is the longest waits per token at the last judgement, GivenUp included.
	Worst waits `json:"worst,omitzero"`
}

// Suspect returns why new requests avoid a target: "no first token" or "failures". It returns "" if they do not, if
// only those of one conversation or tenant do, and if none has tried the target for probeEvery, as of the last Awake.
func (r *Router) Suspect(slot kvindex.Slot) string {
	if t := r.at(slot); t != nil && t.health.avoided(r.alive, party{}) {
		return t.health.Suspect
	}
	return ""
}

// avoided reports whether new requests of a party avoid the target.
func (h *health) avoided(now time.Duration, p party) bool {
	return h.Suspect != "" && now < h.Probe && h.By == h.By.common(p)
}

// Failed tells the router that the answer to a request was an error of the engine
// (status 5xx). Call it before FirstToken and Release.
func (r *Router) Failed(id ReservationID) {
	if res := r.ledger.get(id); res != nil && !res.Failed {
		res.Failed = true
		r.withdraw(res)
		r.failed(r.targetOf(res.Decode, res.decodeGen), res)
	}
}

// PrefillFailed tells the router that a prefill failed on its target. Call it before MovePrefill, ComputeLocally and Release.
func (r *Router) PrefillFailed(id ReservationID) {
	if res := r.ledger.get(id); res != nil {
		r.failed(r.targetOf(res.Prefill, res.prefillGen), res)
	}
}

// Refused tells the router that the engine refused a request (status 4xx) without computing it, so that its first token
// is not learned from. Call it before FirstToken.
func (r *Router) Refused(id ReservationID) {
	if res := r.ledger.get(id); res != nil {
		r.withdraw(res)
	}
}

// failed counts a failure of a target, which may be nil. A target that fails quickly
// looks idle: the failure that can make it suspect is judged at the next pick.
func (r *Router) failed(t *target, res *reservation) {
	if t != nil {
		h, c := t.health, res.Of
		if h.Failures > 0 {
			c = c.common(h.Blamed)
		}
		h.Failures++
		r.judgeNext = r.judgeNext || h.Failures == suspectFailures || h.Failures > suspectFailures && h.Blamed != c
		h.Blamed = c
	}
}

// BrokenOff tells the router whether the engine broke off an answer that had begun, which only Envoy's access log
// shows, after the reservation was released. It returns broken: after a broken answer, report complete ones too.
// Unknown targets are ignored.
func (r *Router) BrokenOff(slot kvindex.Slot, target kvindex.Target, broken bool) bool {
	t := r.at(slot)
	if t == nil || t.info.Target != target {
		return false
	}
	if broken {
		t.health.Broken++
		r.judgeNext = r.judgeNext || t.health.Broken == suspectFailures
		return true
	}
	r.whole(t)
	return false
}

// whole records an answer that was not broken off, which resets the count of broken ones.
func (r *Router) whole(t *target) {
	t.health.Broken = 0
	r.absolve(t)
}

// absolve ends the suspicion of a target once too few failures in a row are left.
func (r *Router) absolve(t *target) {
	if h := t.health; h.Suspect == failingTarget && h.failures() < suspectFailures {
		t.health.Suspect = ""
		r.suspects--
	}
}

// failures is the number of failed answers in a row, of any kind.
func (h *health) failures() int32 { return max(h.Failures, h.Broken) }

// ofOne reports whether all failures in a row belong to one conversation.
func (h *health) ofOne() bool { return h.Blamed.Conversation != (Key{}) && h.Broken < suspectFailures }

// AwakeEvery is how often to call Awake.
const AwakeEvery = 250 * time.Millisecond

// Awake tells the router that its process is running. Once it has been called, a time of more than two AwakeEvery
// without another call, a pick, a first token or an end counts as a pause of the process itself: answers may have
// arrived unseen, so waits do not count that time.
func (r *Router) Awake(now time.Duration) {
	if r.alive == 0 {
		r.alive = now
	}
	r.awake(now)
}

// awake records a sign of life. After a pause it moves the times of all waits by its length.
func (r *Router) awake(now time.Duration) {
	from, pause := r.alive, now-r.alive
	if from == 0 || pause <= 0 {
		return
	}
	if r.alive = now; pause <= pauseAfter {
		return
	}
	shift := func(t *time.Duration) {
		if *t <= from {
			*t += pause
		}
	}
	for i := range r.ledger.slab {
		res := &r.ledger.slab[i]
		shift(&res.Since)
		if res.Forecast.learns = false; res.Forecast.Expected > 0 {
			res.Forecast.Expected += pause
		}
	}
	for _, slot := range r.order {
		h := r.targets[slot].health
		shift(&h.Heard)
		shift(&h.Answered)
		shift(&h.GivenUp.Since)
	}
}

// waitsFor returns the target that a reservation waits for, nil for none.
func (r *Router) waitsFor(res *reservation) *target {
	switch res.Phase {
	case computing:
		return r.computes(res)
	case transferring:
		return r.targetOf(res.Decode, res.decodeGen)
	}
	return nil
}

// waitOf is the wait of a reservation on a target so far. First tokens of other requests
// show that the target works: it counts from the last one.
func (r *Router) waitOf(now time.Duration, res *reservation, t *target) wait {
	took := now - max(res.Since, t.health.Heard)
	own := res.Miss
	if res.Phase == transferring {
		own = res.Owed
	}
	effort := took.Seconds() * t.speed
	return wait{res.Since, took, effort / float64(res.Owed+suspectBase), effort / float64(own+suspectBase), res.Of}
}

// answered records that a target, which may be nil, has done what a reservation waited for.
func (r *Router) answered(now time.Duration, res *reservation, t *target) {
	r.awake(now)
	if t == nil || res.Failed || res.Lookup || res.Idle {
		return
	}
	h := t.health
	h.Pace = max(now-res.Since, time.Millisecond).Seconds() * t.speed / float64(res.Owed+suspectBase)
	h.Heard, h.Answered, h.GivenUp = now, max(h.Answered, res.Since), waits{}
	if h.Suspect == silentTarget {
		h.Pace, h.Suspect = 0, ""
		r.suspects--
	}
}

// ended records how a reservation ended. The end of a copy shows neither a failure nor a wait, because a copy is also
// dropped when its replica is gone.
func (r *Router) ended(now time.Duration, res *reservation) {
	r.awake(now)
	if res.Failed || res.Lookup || res.Idle || res.remote.key.replica != "" {
		return
	}
	if t := r.waitsFor(res); t != nil {
		if res.Since >= t.health.Answered {
			t.health.GivenUp.add(r.waitOf(now, res, t))
		}
	} else if t := r.targetOf(res.Decode, res.decodeGen); t != nil && res.Phase == decoding {
		r.worked(t)
	}
}

// worked records a good answer or a computed prefill.
func (r *Router) worked(t *target) {
	t.health.Failures, t.health.Blamed = 0, party{}
	r.absolve(t)
}

const (
	silentTarget  = "no first token"
	failingTarget = "failures"
)

// judge decides which targets are suspect. Targets of one role and model are compared with each other.
func (r *Router) judge(now time.Duration) {
	r.awake(now)
	if r.config.SuspectAfter == 0 || now-r.judged < judgeEvery && !r.judgeNext {
		return
	}
	r.judged, r.judgeNext, r.suspects = now, false, 0
	r.group = r.group[:0]
	for _, slot := range r.order {
		r.targets[slot].health.Worst = r.targets[slot].health.GivenUp
		r.targets[slot].progress.Overdue = 0
		r.group = append(r.group, slot)
	}
	for i := range r.ledger.slab {
		res := &r.ledger.slab[i]
		if res.remote.key.replica != "" {
			continue // a replica that hangs does not tell of first tokens: its copies would make good targets suspect
		}
		if t := r.waitsFor(res); t != nil && res.Since >= t.health.Answered {
			t.health.Worst.add(r.waitOf(now, res, t))
			if res.Forecast.Expected > 0 {
				t.progress.Overdue = max(t.progress.Overdue, now-res.Forecast.Expected)
			}
		}
	}
	slices.SortFunc(r.group, func(a, b kvindex.Slot) int {
		x, y := &r.targets[a], &r.targets[b]
		return cmp.Or(cmp.Compare(x.role, y.role), cmp.Compare(x.model(), y.model()), cmp.Compare(x.health.slowest(), y.health.slowest()))
	})
	for rest := r.group; len(rest) > 0; {
		first, n := &r.targets[rest[0]], 1
		for n < len(rest) && r.targets[rest[n]].role == first.role && r.targets[rest[n]].model() == first.model() {
			n++
		}
		r.judgeGroup(now, rest[:n])
		rest = rest[n:]
	}
}

// judgeGroup judges comparable targets, in order of their waits per token.
func (r *Router) judgeGroup(now time.Duration, group []kvindex.Slot) {
	asked, _ := slices.BinarySearchFunc(group, 0, func(s kvindex.Slot, _ int) int {
		return cmp.Compare(r.targets[s].health.slowest(), 1e-12)
	})
	known := group[asked:] // the others were never asked
	answered, good, bad := time.Duration(0), 0, 0
	for _, slot := range group {
		answered = max(answered, r.targets[slot].health.Answered)
		if h := r.targets[slot].health; h.failures() == 0 || h.ofOne() {
			good++
		}
	}
	limit := 1 / r.config.PrefillRate
	if len(known) > 0 {
		limit = max(limit, r.targets[known[(len(known)-1)/2]].health.slowest())
	}
	// It requires that another target has answered a request that was booked later: otherwise all are slow.
	silent := func(w *wait, pace float64) bool {
		return w.Took >= r.config.SuspectAfter && pace > suspectFactor*limit && w.Since < answered
	}
	for _, slot := range group {
		h := r.targets[slot].health
		was := h.Suspect
		switch w := &h.Worst; {
		case h.failures() >= suspectFailures && !h.ofOne() && 2*good >= len(group):
			h.Suspect, h.By = failingTarget, party{}
		// What is queued before the other is the first, which is not computed.
		case silent(&w.wait, w.Pace) && silent(&w.Other, w.Other.Alone):
			h.Suspect, h.By = silentTarget, w.Of.common(w.Other.Of)
		case h.failures() >= suspectFailures && h.ofOne():
			h.Suspect, h.By = failingTarget, h.Blamed
		case silent(&w.wait, w.Pace) && w.Of.Conversation != (Key{}):
			h.Suspect, h.By = silentTarget, w.Of
		default:
			h.Suspect = ""
			continue
		}
		if h.By == (party{}) {
			bad++
		}
		if r.suspects++; was == "" {
			h.Probe = now + probeEvery
		}
	}
	// What most of them do is not the fault of one.
	for _, slot := range group {
		if h := r.targets[slot].health; 2*bad > len(group) && h.Suspect != "" && h.By == (party{}) {
			h.Suspect = ""
			r.suspects--
		}
	}
}

// slowest is the longer wait per token: of the last first token, or of the present wait.
func (h *health) slowest() float64 { return max(h.Pace, h.Worst.Pace) }

// model is the first name that a target serves.
func (t *target) model() string {
	if len(t.info.Models) == 0 {
		return ""
	}
	return t.info.Models[0]
}

// avoidSuspects drops suspect targets unless that would leave nothing, or only targets at the hard cap.
func (d *decision) avoidSuspects() {
	trusted := func(c *candidate) bool {
		return !d.r.targets[c.slot].health.avoided(d.now, party{d.out.owner, d.out.key})
	}
	if !slices.ContainsFunc(d.cands, func(c candidate) bool { return trusted(&c) && d.belowCap(&c) }) {
		return
	}
	if d.ex != nil {
		for i := range d.cands {
			if t := &d.r.targets[d.cands[i].slot]; !trusted(&d.cands[i]) {
				d.ex.sayf("suspect", "%s is avoided: %s", t.name, t.health.text())
			}
		}
	}
	d.keep("suspect", ReasonSuspect, trusted)
	d.findBestOverlap()
}

func (h *health) text() string {
	whose := ""
	switch {
	case h.By.Conversation != (Key{}):
		whose = " to this conversation"
	case h.By.Tenant != (Key{}):
		whose = " to this tenant"
	}
	if h.Suspect == failingTarget {
		return fmt.Sprintf("%d answers in a row%s have failed", h.failures(), whose)
	}
	return fmt.Sprintf("no first token%s for %s", whose, h.Worst.Took.Round(100*time.Millisecond))
}

package routing

import (
	"math"
	"time"
)

// The time to the first token of a request on a target is predicted as
//
//	what it has yet to compute + base + a*miss + b*pairs + (c + d*miss)*context + e*mates
//
// plus what later requests add on average. pairs counts the tokens that attention reads for those of the miss, and
// context is the prompt tokens of the target's requests that decode. An engine computes in steps: each costs base +
// c*context. mates is the extra time if each step lasts as long as that of the worker's busiest rank. The time per
// output token is
//
//	base + a*requests + b*context + c*share
//
// where share is the part of the last seconds that prefill took. What prompts that come while a request is decoded add
// to its time is learned as part of these. The coefficients belong to a model, in seconds, and are learned from first
// tokens and ends; each target has a factor for its speed. All state is bounded, and no decision allocates.
const (
	features = 6
	// mates is the index of that term.
	mates = features - 1
	// learnedFrom is the number of answers after which predictions begin.
	learnedFrom = 32
	// forgetting is the weight that a sample keeps after each later one.
	forgetting = 0.998
	// maxFactor bounds a target's factors and their inverses.
	maxFactor = 16
	// stepTokens is the most tokens that a step computes. An engine may be that far ahead of what first tokens show,
	// because it begins with the next prompt in the step that ends one.
	stepTokens = 8192
	// delayed is the weight of a sample that may have been delayed, by more than a 16th of its time, by requests booked
	// after it. What these add is learned from all samples.
	delayed = 1.0 / 64
	// shareOver is the time in seconds over which the share of prefill is averaged.
	shareOver = 10
)

// terms are the features of a request, scaled so that usual ones are near 1.
type terms [features]float64

// fit is a linear regression with non-negative coefficients, by coordinate descent on decaying sums. Errors are
// relative. An unusually large one gets a lower weight (the square root), so that a client that reads slowly hardly
// moves the coefficients.
type fit struct {
	Theta terms `json:"theta"`
	Seen  int   `json:"seen,omitempty"`
	// Spread is a moving mean of the absolute relative errors.
	Spread float64 `json:"spread,omitempty"`
	a      [features]terms
	b      terms
}

func (f *fit) at(x *terms) (y float64) {
	for i := range x {
		y += f.Theta[i] * x[i]
	}
	return y
}

// learn adds a sample with a weight of at most 1: y seconds for x. Errors are relative to whole, of which y is part.
func (f *fit) learn(x *terms, y, whole, trust float64) {
	expected := f.at(x)
	scale := max(whole, whole-y+expected, 1e-6)
	e := math.Abs(y-expected) / scale
	if f.Seen < learnedFrom/2 { // the coefficients are still far off
		f.Spread = 1
	}
	weight := trust * min(1, 3*f.Spread/max(e, 1e-9)) / (scale * scale)
	f.Spread += (min(e, 3*f.Spread) + 0.01 - f.Spread) / min(max(float64(f.Seen-learnedFrom/2), 1), 100)
	f.Seen++
	n := features // without the last terms, if they have always been 0
	for n > 0 && x[n-1] == 0 && f.a[n-1][n-1] == 0 {
		n--
	}
	for i := range n {
		row := f.a[i][:n]
		for j := range row {
			row[j] = row[j]*forgetting + weight*x[i]*x[j]
		}
		f.b[i] = f.b[i]*forgetting + weight*y*x[i]
	}
	theta := f.Theta[:n]
	for range 4 {
		for i := range theta {
			if row := f.a[i][:len(theta)]; row[i] > 0 {
				rest := f.b[i] + row[i]*theta[i]
				for j, t := range theta {
					if t != 0 { // many are 0, and each subtraction waits for the one before
						rest -= row[j] * t
					}
				}
				if theta[i] = 0; rest > 0 {
					theta[i] = rest / row[i]
				}
			}
		}
	}
}

// paces holds what is learned about a model's targets: by the leg that computes the prompt, the time until it is
// computed (or its KV cache has arrived), and the time per output token. Later is what requests that are booked later
// add to the first.
type paces struct {
	First    [numLegs]fit `json:"first,omitzero"`
	Later    fit          `json:"later,omitzero"`
	PerToken fit          `json:"per_token,omitzero"`
}

// progress is how much of its booked prefill a target has computed, as far as first tokens show.
type progress struct {
	// Factor and TokenFactor multiply the predictions of the model's coefficients.
	Factor      float64 `json:"factor"`
	TokenFactor float64 `json:"token_factor"`
	// Booked is the seconds of prefill booked so far. Done is how many of them have been computed, as first tokens
	// show. Due is when all are expected to be computed. Next is how many wait for the running step to end.
	Booked float64       `json:"booked,omitempty"`
	Done   float64       `json:"done,omitempty"`
	Due    time.Duration `json:"due,omitempty"`
	Next   float64       `json:"next,omitempty"`
	// withdrawn is the seconds of Booked that were withdrawn before they were computed.
	withdrawn float64
	// Overdue is how late the latest first token was when targets were last judged.
	Overdue time.Duration `json:"overdue,omitempty"`
	// Share is the share of time that prefill takes, 0 to 1, as of the time Booking.
	Share   float64       `json:"share,omitempty"`
	Booking time.Duration `json:"booking,omitempty"`
}

// forecast is what was predicted for a reservation.
type forecast struct {
	// Expected is when the first token is expected, 0 once it came or if it will not be observed.
	Expected time.Duration `json:"expected,omitempty"`
	// since is when it was booked, or when its first token came.
	since time.Duration
	x     terms
	// ahead is the seconds until the target begins with it, own the seconds that it takes itself, and later what others
	// add. work is the part of own that delays others, 0 once it is no longer awaited. mark is the target's Booked with
	// it, withdrawn the target's value at the booking.
	ahead, own, later, work, mark, withdrawn float64
	// learns is set if the next observation of the reservation is a sample to learn from. behind is set if its first
	// token is not: nearly all of its wait was for the prompts before it, and learning would attribute their time to a
	// request almost without prefill.
	learns, behind bool
}

func toDuration(seconds float64) time.Duration {
	return time.Duration(min(max(seconds, 0), 1e9) * float64(time.Second))
}

// fitOf returns the regression for the first tokens of a target's role.
func (t *target) fitOf() *fit {
	if t.role == Prefill {
		return &t.paces.First[prefillLeg]
	}
	return &t.paces.First[mainLeg]
}

// steps describes a target's steps: base is the seconds that one takes without prompts, most what its prompts add at
// most, never less than base. next and due are the expected values of Next and Due, in the steps that have begun.
type steps struct {
	base, most, next float64
	due              time.Duration
}

func (t *target) steps(now time.Duration) steps {
	f, p, n, context := t.fitOf(), &t.progress, stepTokens/1024.0, float64(t.load.KV-t.waiting)/(1<<20)
	s := steps{base: p.Factor * (f.Theta[0] + f.Theta[3]*context), next: p.Next, due: p.Due}
	s.most = max(p.Factor*n*(f.Theta[1]+f.Theta[2]*n/2+f.Theta[4]*context), s.base, 0.01)
	s.begin(now)
	return s
}

// begin removes what has begun by now from what waits.
func (s *steps) begin(now time.Duration) {
	if s.next > 0 && s.next >= (s.due-now).Seconds() {
		steps := min(math.Ceil(s.next/s.most), math.Floor((s.next-(s.due-now).Seconds())/(s.base+s.most))+1)
		s.next = max(s.next-steps*s.most, 0)
		s.due += toDuration(steps * s.base)
	}
}

// forecast predicts a request on a target with steps, of the worker whose busiest ranks are given.
func (t *target) forecast(now time.Duration, b *busiest, s steps, miss, prompt, foreign int64) (w forecast) {
	f, p := t.fitOf(), &t.progress
	n, context, steps := float64(miss)/1024, float64(t.load.KV-t.waiting)/(1<<20), 1.0
	if t.load.Work > t.load.Queue && s.due <= now {
		steps = 1.5 // half of one that only decodes ends first
	}
	w.since = now
	w.x = terms{steps, n, n * (float64(prompt) - float64(miss)/2) / 1024, steps * context, n * context}
	w.work = p.Factor * (f.Theta[1]*w.x[1] + f.Theta[2]*w.x[2] + f.Theta[4]*w.x[4]) // exactly 0 without a miss
	count := math.Ceil((s.next + w.work) / s.most)
	// What is late by some time is expected to take as long again.
	w.ahead = max((s.due-now).Seconds(), 0) + s.base*(count-math.Ceil(w.work/s.most)) + p.overdue(now, s.due) + p.Factor*f.Theta[1]*float64(foreign)/1024
	longer := max(b.ends-max(s.due-toDuration(s.next), now), 0).Seconds() + max(min(b.next, count*s.most)-s.next-w.work, 0)
	w.x[mates] = longer / p.Factor
	w.own = p.Factor * f.at(&w.x)
	w.later = t.paces.Later.at(w.rest())
	return w
}

// busiest is when the longest step of a worker's ranks ends, and the most seconds that wait for a step to end. The
// maximum may include the rank that is compared with it: the two are then equal, which changes nothing.
type busiest struct {
	worker int32
	ends   time.Duration
	next   float64
}

// busiest returns the values of the target's worker.
func (r *Router) busiest(now time.Duration, t *target) busiest {
	b, pos := busiest{worker: t.worker}, int(t.pos)
	for pos > 0 && r.targets[r.order[pos-1]].worker == b.worker {
		pos--
	}
	for ; pos < len(r.order) && r.targets[r.order[pos]].worker == b.worker; pos++ {
		if t := &r.targets[r.order[pos]]; t.progress.Due > now || t.progress.Next > 0 { // most ranks are idle most of the time
			s := t.steps(now)
			b.ends, b.next = max(b.ends, s.due-toDuration(s.next)), max(b.next, s.next)
		}
	}
	return b
}

// rest returns the terms of what later requests add, those that arrive before its own step begins.
func (w *forecast) rest() *terms { return &terms{0.1, w.ahead, w.own} }

func (w *forecast) first() float64 { return w.ahead + w.own + w.later }

// overdue is the seconds by which the latest first token delays others beyond what is due.
func (p *progress) overdue(now, due time.Duration) float64 {
	return max(p.Overdue-max(due-now, 0), 0).Seconds()
}

// ttft is the predicted time to the first token of a candidate in seconds, 0 without a prediction.
func (d *decision) ttft(c *candidate) float64 {
	t := &d.r.targets[c.slot]
	if d.req.pool == Decode || t.fitOf().Seen < learnedFrom {
		return 0
	}
	if d.busiest.worker != t.worker { // candidates of a worker follow one another
		d.busiest = d.r.busiest(d.now, t)
	}
	w := t.forecast(d.now, &d.busiest, t.steps(d.now), c.miss, d.q.PromptTokens, c.queue-t.load.Queue)
	return w.first()
}

// perToken is the predicted time per output token of a further request on a target in seconds, 0 without a prediction.
func (t *target) perToken(now time.Duration, prompt int64) float64 {
	f, p := &t.paces.PerToken, &t.progress
	if f.Seen < learnedFrom {
		return 0
	}
	x := t.decoding(now, 1, prompt)
	return p.TokenFactor * f.at(&x)
}

// share is the part of time that prefill takes.
func (p *progress) share(now time.Duration) float64 {
	if p.Booking == now {
		return p.Share
	}
	return p.Share * math.Exp((p.Booking-now).Seconds()/shareOver)
}

// adapt raises a target's factor if the observation exceeds the prediction, else lowers it. The factor tends to 1, so
// that what all targets have in common is in the coefficients.
func adapt(factor *float64, predicted, observed float64) {
	e := (observed - predicted) / max(observed, predicted)
	*factor = min(max(*factor*(1+min(max(e, -0.2), 0.2)/16)+(1-*factor)/1024, 1.0/maxFactor), maxFactor)
}

// computes returns the target that computes a reservation's prompt, nil if it is gone.
func (r *Router) computes(res *reservation) *target {
	if res.Prefill != NoSlot {
		return r.targetOf(res.Prefill, res.prefillGen)
	}
	return r.targetOf(res.Decode, res.decodeGen)
}

// expect records the prediction for a new reservation. Call it before its load is applied. seen reports that its first
// token will be observed.
func (r *Router) expect(now time.Duration, res *reservation, seen bool) {
	t := r.computes(res)
	if t == nil {
		return
	}
	p, b, s := &t.progress, r.busiest(now, t), t.steps(now)
	w := t.forecast(now, &b, s, res.Miss, res.KV, 0)
	p.Share, p.Booking = p.share(now)+w.work/shareOver, now
	p.Booked += w.work
	if s.next += w.work; s.due <= now { // an engine that decodes begins with all that comes until its step ends
		s.due = now + toDuration((w.x[0]-1)*s.base)
	}
	s.due += toDuration(w.work)
	s.begin(now)
	p.Next, p.Due = s.next, s.due
	w.mark, w.withdrawn, w.learns = p.Booked, p.withdrawn, seen
	w.behind = res.Miss <= repeated && t.load.Queue > 4*res.Miss
	if seen {
		w.Expected = max(now+toDuration(w.first()), 1)
	}
	res.Forecast = w
}

// computed records that the prompt of res, and all booked before, is computed: engines work first in, first out.
func (r *Router) computed(now time.Duration, res *reservation) {
	w := &res.Forecast
	t := r.computes(res)
	if t == nil || w.work == 0 {
		return
	}
	p, seen := &t.progress, w.Expected > 0
	w.Expected, w.work = 0, 0
	if w.mark <= p.Done { // a later one was computed first: the order of the others is not known
		return
	}
	p.Done = w.mark
	// Work booked since may have been withdrawn, or computed before a whole answer came.
	s := t.steps(now)
	left, due := max(p.Booked-w.mark-(p.withdrawn-w.withdrawn), 0), max((s.due-now).Seconds(), 0)
	if seen {
		p.Overdue, due = 0, max(due, left-s.most)
	}
	if seen || due > left { // a step has ended
		s.next = min(due, left)
		s.due = now + toDuration(s.next)
		s.begin(now)
	}
	p.Next, p.Due = s.next, s.due
}

// withdraw ends the wait for a prompt that will not be computed, or not there.
func (r *Router) withdraw(res *reservation) {
	w := &res.Forecast
	if t := r.computes(res); t != nil && w.work > 0 && w.mark > t.progress.Done {
		t.progress.Due -= toDuration(w.work)
		t.progress.Next = max(t.progress.Next-w.work, 0)
		t.progress.withdrawn += w.work
	}
	w.Expected, w.work, w.learns = 0, 0, false
}

// learnFirst learns from a first token, and records it for the time per output token.
func (r *Router) learnFirst(now time.Duration, res *reservation) {
	w, t, trust := &res.Forecast, r.computes(res), 1.0
	took := (now - w.since).Seconds()
	if t != nil && t.progress.Booked-w.mark > took/16 {
		trust = delayed
	}
	r.computed(now, res)
	if t != nil && w.learns && !w.behind && took > 0 {
		f, p := t.fitOf(), &t.progress
		// What takes twice its time, with others behind it, waited for more than prompts, as for KV memory.
		if trust == 1 || f.Seen < 2*learnedFrom || took-w.ahead < 2*w.own {
			f.learn(&w.x, (took-w.ahead)/p.Factor, took, trust)
		}
		t.paces.Later.learn(w.rest(), took-w.ahead-w.own, took, 1)
		if f.Seen > learnedFrom && trust == 1 {
			adapt(&p.Factor, w.ahead+w.own, took)
		}
	}
	if t := r.targetOf(res.Decode, res.decodeGen); t != nil && w.learns {
		*w = forecast{since: now, x: t.decoding(now, 0, 0), learns: true}
	}
}

// decoding returns the terms of the time per output token on t with more further requests, which have prompt tokens.
func (t *target) decoding(now time.Duration, more, prompt int64) terms {
	return terms{1, float64(t.load.Active+more) / 64, float64(t.load.KV+prompt) / (1 << 20), t.progress.share(now)}
}

// Generated records the number of output tokens of an answer that has ended. Call it before Release.
func (r *Router) Generated(now time.Duration, id ReservationID, tokens int64) {
	res := r.ledger.get(id)
	if res == nil || res.Phase != decoding || !res.Forecast.learns || tokens < 2 {
		return
	}
	w := &res.Forecast
	w.learns = false
	t := r.targetOf(res.Decode, res.decodeGen)
	took := (now - w.since).Seconds()
	if t == nil || took <= 0 {
		return
	}
	f, p, y := &t.paces.PerToken, &t.progress, took/float64(tokens-1)
	predicted := p.TokenFactor * f.at(&w.x)
	f.learn(&w.x, y/p.TokenFactor, y, 1)
	if f.Seen > learnedFrom {
		adapt(&p.TokenFactor, predicted, y)
	}
}

package routing

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// train lets every target answer 64 prompts, one after the other: 20 ms and the prompt at rate
// tokens a second until the first token, then 10 ms a token. It returns when it is done.
func train(r *Router, rate float64) (now time.Duration) {
	for i := range 64 {
		for _, slot := range slices.Clone(r.order) {
			info, _ := r.Target(slot)
			q := &Query{ID: fmt.Sprint("train", i), PromptTokens: int64(500 * (1 + i%8)), Pin: &Pin{Worker: info.Worker, Rank: info.Rank}, Local: true}
			plan, err := r.Pick(now, q, nil, nil)
			if err != nil {
				continue // as that of a prefill worker
			}
			now += 20*time.Millisecond + time.Duration(float64(q.PromptTokens)/rate*1e9)
			r.FirstToken(now, plan.Reservation)
			now += 100 * 10 * time.Millisecond
			r.Generated(now, plan.Reservation, 101)
			r.Release(now, plan.Reservation)
		}
	}
	return now
}

// fifo is an engine that computes one prompt after the other, with attention that grows with
// the context, and then answers slower with more requests.
type fifo struct {
	free  time.Duration
	speed float64
}

func (e *fifo) first(now time.Duration, miss, prompt int64) time.Duration {
	n := float64(miss)
	e.free = max(e.free, now) + time.Duration((15e-3+n*100e-6+n*(float64(prompt)-n/2)*2e-9)/e.speed*1e9)
	return e.free
}

// predictions drives two engines, one of half the speed, at a moderate load, and returns the
// relative errors of the last third of the predictions, in order. Every 20th first token comes
// later by this time; with less than 0 it comes immediately.
func predictions(t *testing.T, late time.Duration) (errors []float64) {
	t.Helper()
	r := newRouter(t, preset(t, "round-robin"), 2)
	engines := []fifo{{speed: 1}, {speed: 0.5}}
	rng := rand.New(rand.NewPCG(1, 2))
	type event struct {
		at   time.Duration
		plan Plan
		end  bool
	}
	var events []event
	const requests = 3000
	now := time.Duration(0)
	next := func(until time.Duration) {
		for len(events) > 0 {
			i := 0
			for k := range events {
				if events[k].at < events[i].at {
					i = k
				}
			}
			e := events[i]
			if e.at > until {
				return
			}
			events = slices.Delete(events, i, i+1)
			if e.end {
				r.Generated(e.at, e.plan.Reservation, 101)
				r.Release(e.at, e.plan.Reservation)
				continue
			}
			r.FirstToken(e.at, e.plan.Reservation)
			e.at, e.end = e.at+time.Duration(10+r.Load(e.plan.Decode).Active)*100*time.Millisecond, true
			events = append(events, e)
		}
	}
	for i := range requests {
		now += time.Duration(rng.ExpFloat64() * 0.6e9)
		next(now)
		q := &Query{ID: fmt.Sprint(i), PromptTokens: 200 + int64(rng.ExpFloat64()*4000)}
		plan := planAt(t, r, now, q, held(0, int32(q.PromptTokens/2)), held(1, int32(q.PromptTokens/2)))
		at := engines[plan.Decode].first(now, plan.Miss, q.PromptTokens)
		seen := at
		if odd := i%20 == 7; odd && late < 0 {
			seen = now + time.Millisecond
		} else if odd {
			seen += late
		}
		events = append(events, event{at: seen, plan: plan})
		if i > 2*requests/3 && seen == at {
			took := (at - now).Seconds()
			errors = append(errors, math.Abs(plan.TTFT.Seconds()-took)/took)
		}
	}
	next(math.MaxInt64)
	slices.Sort(errors)
	return errors
}

func planAt(t *testing.T, r *Router, now time.Duration, q *Query, overlaps ...Overlap) Plan {
	t.Helper()
	plan, err := r.Pick(now, q, overlaps, nil)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

func TestPredictsEnginesOfTwoSpeeds(t *testing.T) {
	errors := predictions(t, 0)
	if p90 := errors[len(errors)*9/10]; p90 > 0.1 {
		t.Errorf("got an error of the time to the first token of %.3f at p90, want at most 0.1", p90)
	}
}

// One request in 20 has its first token 30 s after the engine computed its prompt, or immediately.
func TestOutliersDoNotSpoilPredictions(t *testing.T) {
	for _, late := range []time.Duration{30 * time.Second, -1} {
		errors := predictions(t, late)
		t.Logf("outliers of %s: errors %.3f, %.3f at p90", late, errors[len(errors)/2], errors[len(errors)*9/10])
		if p50, p90 := errors[len(errors)/2], errors[len(errors)*9/10]; p50 > 0.03 || p90 > 0.1 {
			t.Errorf("outliers of %s: got errors of %.3f and %.3f at p90, want at most 0.03 and 0.1", late, p50, p90)
		}
	}
}

// What hangs is expected to hang on: its predictions grow with the time that it is late.
func TestLateTargetsArePredictedLate(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 2)
	now := train(r, 10_000)
	hangs := planAt(t, r, now, &Query{ID: "hangs", PromptTokens: 1000, Pin: &Pin{Worker: "w", Rank: 0}})
	ttft := func(after time.Duration) float64 {
		ex := new(Explanation)
		if _, err := r.PickRecorded(now+after, &Query{ID: "x", PromptTokens: 1000}, nil, ex); err != nil {
			t.Fatal(err)
		}
		r.Release(now+after, ex.Plan.Reservation)
		return ex.Candidates[0].TTFT
	}
	soon, late := ttft(50*time.Millisecond), ttft(1900*time.Millisecond)
	if soon > 0.3 || late < 1.5 {
		t.Errorf("got %.2f s soon and %.2f s when the target is late, want at most 0.3 and at least 1.5", soon, late)
	}
	r.FirstToken(now+1900*time.Millisecond, hangs.Reservation)
	if after := ttft(2 * time.Second); after > 0.3 {
		t.Errorf("got %.2f s after the first token, want at most 0.3", after)
	}
}

// An engine with room for 50 requests gets twice as many as it answers. What waits for room is predicted from what such
// requests have waited, and is not learned as time of prompts: that is as before once the engine is idle.
func TestWaitsForMemoryAreNotPrompts(t *testing.T) {
	const answer = 50 * time.Second
	r := newRouter(t, preset(t, DefaultPreset), 1)
	began := train(r, 10_000)
	begins := make([]time.Duration, 0, 1500) // when each request leaves room for the 50th after it
	type event struct {
		at   time.Duration
		plan Plan
	}
	var firsts, ends []event
	free, worst, least := began, 0.0, math.Inf(1)
	at := func(now time.Duration) {
		for len(firsts) > 0 || len(ends) > 0 {
			first := len(firsts) > 0 && (len(ends) == 0 || firsts[0].at < ends[0].at)
			from := &ends
			if first {
				from = &firsts
			}
			e := (*from)[0]
			if e.at > now {
				return
			}
			if *from = (*from)[1:]; first {
				r.FirstToken(e.at, e.plan.Reservation)
				ends = append(ends, event{e.at + answer, e.plan})
			} else {
				r.Release(e.at, e.plan.Reservation)
			}
		}
	}
	for i := range 8000 {
		now := began + time.Duration(i)*answer/100
		at(now)
		r.Awake(now)
		q := &Query{ID: fmt.Sprint(i), PromptTokens: int64(1000 + i%7*500)}
		plan := planAt(t, r, now, q)
		start := max(free, now)
		if i >= 50 {
			start = max(start, begins[i-50])
		}
		free = start + 20*time.Millisecond + time.Duration(q.PromptTokens)*100*time.Microsecond
		begins = append(begins, free+answer)
		firsts = append(firsts, event{free, plan})
		if i >= 300 {
			ratio := plan.TTFT.Seconds() / (free - now).Seconds()
			worst, least = max(worst, ratio), min(least, ratio)
		}
	}
	t.Logf("predicted %.2f to %.2f of the time", least, worst)
	if least < 0.4 || worst > 2 {
		t.Errorf("got predictions of %.2f to %.2f times what came true, want 0.4 to 2", least, worst)
	}
	idle := free + 2*answer
	at(idle)
	if plan := planAt(t, r, idle, &Query{ID: "idle", PromptTokens: 1000}); plan.TTFT < 100*time.Millisecond || plan.TTFT > 150*time.Millisecond {
		t.Errorf("got a prediction of %s once the engine is idle, want about 120 ms", plan.TTFT)
	}
}

// Prompts of an engine that has become slow are learned, although others follow each of them but the last.
func TestSlowerPromptsAreLearned(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 1)
	now := train(r, 10_000)
	var last time.Duration
	for i := range 400 {
		plans := [4]Plan{}
		for k := range plans {
			plans[k] = planAt(t, r, now+time.Duration(k)*time.Millisecond, &Query{ID: fmt.Sprint(i, k), PromptTokens: int64(1000 + i%5*500)})
		}
		took := 20*time.Millisecond + time.Duration(1000+i%5*500)*time.Millisecond
		last = plans[3].TTFT
		for k := range plans {
			now += took
			r.FirstToken(now, plans[k].Reservation)
			r.Release(now, plans[k].Reservation)
		}
		now += time.Second
		if want := 4 * took; i >= 380 && math.Abs((last-want).Seconds()) > 0.2*want.Seconds() {
			t.Errorf("group %d: got a prediction of %s for the last prompt, want %s", i, last, want)
		}
	}
}

// Whatever is learned, steps without prompts take no longer than prompts that wait.
func TestStepsAreBounded(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 1)
	now := train(r, 10_000)
	for i := range 20 {
		planAt(t, r, now, &Query{ID: fmt.Sprint(i), PromptTokens: 20_000})
	}
	r.targets[0].paces.First[mainLeg].Theta = terms{10}
	if plan := planAt(t, r, now, &Query{ID: "x", PromptTokens: 1000}); plan.TTFT < 40*time.Second || plan.TTFT > 100*time.Second {
		t.Errorf("got a prediction of %s behind 40 s of prompts, want 40 to 100 s", plan.TTFT)
	}
}

// Answers that come in one piece teach nothing, as do copies of other replicas' bookings.
func TestLearnsOnlyFromFirstTokensThatAreSeen(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 1)
	for i := range 100 {
		now := time.Duration(i) * time.Second
		whole := planAt(t, r, now, &Query{ID: "whole", PromptTokens: 1000, Whole: true})
		if whole.TTFT != 0 {
			t.Fatalf("got a prediction of %s from answers in one piece, want none", whole.TTFT)
		}
		r.ApplyRemote(now, Booking{Replica: "other", ID: ReservationID(i + 1), Decode: kvindex.Target{Worker: "w", Rank: 0}, Miss: 1000, KV: 1000})
		r.FirstToken(now+100*time.Millisecond, whole.Reservation)
		r.RemotePhase(now+100*time.Millisecond, "other", ReservationID(i+1), 3)
		r.Release(now+200*time.Millisecond, whole.Reservation)
		r.RemoteRelease(now+200*time.Millisecond, "other", ReservationID(i+1))
	}
}

// A model with one target keeps what is learned when the target's health changes.
func TestHealthChangesKeepWhatIsLearned(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 0)
	info := TargetInfo{Target: kvindex.Target{Worker: "w", Rank: 0}, Ready: true, Models: []string{"m"}}
	r.SetTarget(0, info)
	now := train(r, 10_000)
	info.Ready = false
	r.SetTarget(0, info)
	info.Ready = true
	r.SetTarget(0, info)
	if plan := planAt(t, r, now, &Query{ID: "x", Model: "m", PromptTokens: 1000}); plan.TTFT < 80*time.Millisecond || plan.TTFT > 160*time.Millisecond {
		t.Errorf("got a prediction of %s, want about 120 ms", plan.TTFT)
	}
}

// An idle engine begins with the first sample of a prompt immediately, and the others follow in a step of 25 ms; one
// that decodes takes all into its next step. The time of the prompt must not be learned as that of its samples.
func TestSamplesDoNotTeach(t *testing.T) {
	const step = 25 * time.Millisecond
	for _, decodes := range []bool{false, true} {
		r := newRouter(t, preset(t, "round-robin"), 1)
		now := time.Duration(0)
		if decodes {
			r.FirstToken(now, planAt(t, r, now, &Query{ID: "decodes", PromptTokens: 1000}).Reservation)
		}
		group := func(missed int64, took time.Duration) (predicted []time.Duration) {
			var plans []Plan
			for i := range 16 {
				tokens := int32(4096)
				if i == 0 {
					tokens = int32(4097 - missed)
				}
				plan := planAt(t, r, now, &Query{ID: fmt.Sprint(now, i), PromptTokens: 4097}, held(0, tokens))
				plans, predicted = append(plans, plan), append(predicted, plan.TTFT)
			}
			now += took
			for i := range plans {
				if r.FirstToken(now, plans[i].Reservation); i == 0 && !decodes {
					now += step
				}
			}
			for i := range plans {
				r.Release(now, plans[i].Reservation)
			}
			now += time.Second
			return predicted
		}
		for i := range 200 {
			missed, took := int64(4097), 250*time.Millisecond
			if i%8 == 7 {
				missed, took = 1, step
			}
			last := took + step
			if decodes {
				last = took
			}
			predicted := group(missed, took)
			if i < 150 {
				continue
			}
			for k, want := range map[int]time.Duration{0: took, 15: last} {
				if e := math.Abs((predicted[k] - want).Seconds()) / want.Seconds(); e > 0.2 {
					t.Errorf("decodes %v, group %d: got %v for sample %d, want %v", decodes, i, predicted[k], k, want)
				}
			}
		}
	}
}

// Ranks of a worker that step together: a short prompt takes as long as the long one that another
// rank computes. Ranks that do not are predicted alone.
func TestRanksThatStepTogether(t *testing.T) {
	for _, together := range []bool{true, false} {
		r := newRouter(t, preset(t, "round-robin"), 2)
		now := time.Duration(0)
		var errors []float64
		for i := range 300 {
			// Rank 0 computes a long prompt, rank 1 gets a short one meanwhile.
			long, short := int64(2000+500*(i%8)), int64(100+100*(i%5))
			took := func(tokens int64) time.Duration {
				return 20*time.Millisecond + time.Duration(tokens)*100*time.Microsecond
			}
			a := planAt(t, r, now, &Query{ID: fmt.Sprint("a", i), PromptTokens: long, Pin: &Pin{Worker: "w", Rank: 0}})
			at, ends := now+10*time.Millisecond, now+took(long)
			b := planAt(t, r, at, &Query{ID: fmt.Sprint("b", i), PromptTokens: short, Pin: &Pin{Worker: "w", Rank: 1}})
			first := at + took(short)
			if together {
				first += ends - at
			}
			if i >= 250 {
				errors = append(errors, math.Abs((b.TTFT-(first-at)).Seconds())/(first-at).Seconds())
			}
			for _, e := range []struct {
				at   time.Duration
				plan Plan
			}{{min(first, ends), map[bool]Plan{true: a, false: b}[together]}, {max(first, ends), map[bool]Plan{true: b, false: a}[together]}} {
				r.FirstToken(e.at, e.plan.Reservation)
				r.Release(e.at, e.plan.Reservation)
			}
			now += 3 * time.Second
		}
		if slices.Sort(errors); errors[len(errors)*9/10] > 0.2 {
			t.Errorf("together %v: got an error of the time to the first token of %.2f at p90, want at most 0.2", together, errors[len(errors)*9/10])
		}
	}
}

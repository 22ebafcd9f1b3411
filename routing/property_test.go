package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"pgregory.net/rapid"
)

func drawOverlaps(t *rapid.T, n int) []Overlap {
	var overlaps []Overlap
	for s := range n {
		if rapid.IntRange(0, 2).Draw(t, "has") == 0 {
			overlaps = append(overlaps, Overlap{Slot: kvindex.Slot(s), Tokens: [kvindex.NumTiers]int32{
				int32(rapid.IntRange(0, 5000).Draw(t, "device")), int32(rapid.IntRange(0, 2000).Draw(t, "host"))},
				Speculative: int32(rapid.IntRange(0, 2000).Draw(t, "spec"))})
		}
	}
	return overlaps
}

func drawQuery(t *rapid.T, id, n int) *Query {
	q := &Query{ID: fmt.Sprint("r", id), PromptTokens: int64(rapid.IntRange(0, 20000).Draw(t, "prompt"))}
	if rapid.Bool().Draw(t, "hasConv") {
		q.Conversation = fmt.Sprint("c", rapid.IntRange(0, 20).Draw(t, "conv"))
	} else {
		h := uint64(rapid.IntRange(1, 3).Draw(t, "root"))
		for range rapid.IntRange(0, 8).Draw(t, "blocks") {
			h = mix(h)
			q.Prefix = append(q.Prefix, h)
		}
	}
	switch rapid.IntRange(0, 9).Draw(t, "special") {
	case 0:
		q.Exclude = []kvindex.Slot{kvindex.Slot(rapid.IntRange(0, n).Draw(t, "exclude"))}
	case 1:
		q.Pin = &Pin{Rank: int32(rapid.IntRange(-1, n).Draw(t, "pin"))}
	case 2:
		q.Subset = new(SlotSet)
		for range rapid.IntRange(0, 3).Draw(t, "subsetSize") {
			q.Subset.Add(kvindex.Slot(rapid.IntRange(0, n).Draw(t, "subset")))
		}
	case 3:
		q.Priority = -1
	case 4:
		q.Model = "other"
	}
	q.TTFT = time.Duration(rapid.SampledFrom([]int{0, 0, 100, 1000, 5000}).Draw(t, "ttft")) * time.Millisecond
	q.Whole = rapid.IntRange(0, 3).Draw(t, "whole") == 0
	q.Tenant, q.Share = rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "tenant"), rapid.SampledFrom([]float64{0, 0.4, 0.75}).Draw(t, "share")
	q.Sequences = int64(rapid.IntRange(0, 3).Draw(t, "sequences"))
	return q
}

func drawConfig(t *rapid.T) Config {
	cfg := DefaultConfig()
	cfg.Policy, _ = Preset(rapid.SampledFrom(Presets()).Draw(t, "preset"))
	cfg.Disagg.Mode = rapid.SampledFrom([]DisaggMode{ModeOff, ModeThreshold, ModeConditional, ModeCost}).Draw(t, "mode")
	cfg.Policy.Cap.Hard = int64(rapid.IntRange(0, 6).Draw(t, "hard"))
	cfg.Policy.Limits.MaxQueue = int64(rapid.SampledFrom([]int{0, 30000}).Draw(t, "maxQueue"))
	cfg.Policy.Limits.MaxActive = int64(rapid.SampledFrom([]int{0, 2}).Draw(t, "maxActive"))
	cfg.Disagg.Decode.Limits.MaxActive = cfg.Policy.Limits.MaxActive
	cfg.Unmet = rapid.SampledFrom([]Unmet{UnmetRoute, UnmetQueue}).Draw(t, "unmet")
	cfg.MaxConversations = rapid.IntRange(1, 15).Draw(t, "conversations")
	cfg.MaxPrefixBlocks = rapid.IntRange(1, 40).Draw(t, "prefixBlocks")
	return cfg
}

func drawTarget(t *rapid.T, slot int) TargetInfo {
	return TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", slot/2), Rank: int32(slot % 2)},
		Ready: rapid.IntRange(0, 9).Draw(t, "ready") > 0, Draining: rapid.IntRange(0, 9).Draw(t, "draining") == 0,
		Role: Role(rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(t, "role"))}
}

// TestLaws drives a router with arbitrary operations. Law 2: when everything has
// ended, every load is exactly zero. Law 6: a second router in the same state gives
// the same decision. A request is only sent where it may go, and refused only where
// nothing is free.
func TestLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { laws(t, 60, func([]byte) {}) })
}

// laws calls decided with the record of each of up to most decisions.
func laws(t *rapid.T, most int, decided func(record []byte)) {
	const n = 6
	r, err := New(drawConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	for s := range n {
		r.SetTarget(kvindex.Slot(s), drawTarget(t, s))
	}
	var live []ReservationID
	now := time.Duration(0)
	if rapid.Bool().Draw(t, "trained") && most > 10 { // takes long
		now = train(r, 10_000)
	}
	for i := range rapid.IntRange(1, most).Draw(t, "ops") {
		now += time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond
		pickOne := func(action func(ReservationID)) {
			if len(live) > 0 {
				action(live[rapid.IntRange(0, len(live)-1).Draw(t, "which")])
			}
		}
		switch rapid.IntRange(0, 10).Draw(t, "op") {
		case 0:
			pickOne(func(id ReservationID) { r.FirstToken(now, id) })
		case 1:
			pickOne(func(id ReservationID) { r.PrefillDone(now, id) })
		case 2:
			pickOne(func(id ReservationID) {
				r.Generated(now, id, 20)
				r.Release(now, id)
			})
		case 3:
			slot := rapid.IntRange(0, n-1).Draw(t, "slot")
			if rapid.Bool().Draw(t, "remove") {
				r.RemoveTarget(kvindex.Slot(slot))
			} else {
				r.SetTarget(kvindex.Slot(slot), drawTarget(t, slot))
			}
		case 4:
			r.Report(now, kvindex.Slot(rapid.IntRange(0, n).Draw(t, "slot")), Report{At: now,
				Running: int64(rapid.IntRange(0, 5).Draw(t, "running")), Waiting: int64(rapid.IntRange(0, 3).Draw(t, "waiting")), KVUsage: 0.5})
		case 5:
			pickOne(func(id ReservationID) { r.Rebook(now, id, kvindex.Slot(rapid.IntRange(0, n).Draw(t, "served"))) })
		case 6:
			// Some answers in a row fail: the target may become suspect.
			if info, ok := r.Target(kvindex.Slot(rapid.IntRange(0, n-1).Draw(t, "slot"))); ok {
				for range suspectFailures {
					q := &Query{ID: "failing", Pin: &Pin{Worker: info.Worker, Rank: info.Rank}}
					if plan, err := r.Pick(now, q, nil, nil); err == nil {
						r.Failed(plan.Reservation)
						r.Release(now, plan.Reservation)
					}
				}
			}
		default:
			q := drawQuery(t, i, n)
			if id := pickTwice(t, r, now, q, drawOverlaps(t, n), decided); id != 0 {
				live = append(live, id)
			}
		}
	}
	for _, id := range live {
		r.Release(now, id)
	}
	for s := range r.targets {
		if r.targets[s].load != (Load{}) || len(r.targets[s].tenants.places) > 0 {
			t.Fatalf("slot %d is left with %+v, places %v", s, r.targets[s].load, r.targets[s].tenants.places)
		}
	}
	if r.Live() != 0 {
		t.Fatalf("%d bookings are left", r.Live())
	}
}

// TestRecordKeepsTheOrderOfSharedBlocks: of the conversations that share a block the one that had it last is tried first.
// That is not the one that was used last, if its turn only added blocks.
func TestRecordKeepsTheOrderOfSharedBlocks(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Policy.Sticky = Sticky{Mode: StickyTarget, Implicit: true, MatchThreshold: 0.5}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for s := range kvindex.Slot(2) {
		r.SetTarget(s, TargetInfo{Target: kvindex.Target{Worker: "w", Rank: int32(s)}, Ready: true})
	}
	mustPick(t, r, &Query{ID: "a", Prefix: []uint64{1, 2}, Pin: &Pin{Rank: 0}})
	mustPick(t, r, &Query{ID: "b", Prefix: []uint64{1, 3}, Pin: &Pin{Rank: 1}})
	mustPick(t, r, &Query{ID: "a2", Prefix: []uint64{1, 2, 4}})
	d, err := r.PickRecorded(0, &Query{ID: "c", Prefix: []uint64{1}}, nil, nil)
	if err != nil || d.Plan.Decode != 1 {
		t.Fatalf("got %+v, error %v, want slot 1", d.Plan, err)
	}
	if plan, _, err := d.Rerun(); plan != d.Plan {
		t.Errorf("got %+v from the record, error %v, want %+v", plan, err, d.Plan)
	}
}

// pickTwice decides, checks the decision, and has it made again from its record.
func pickTwice(t *rapid.T, r *Router, now time.Duration, q *Query, overlaps []Overlap, decided func(record []byte)) ReservationID {
	d, err := r.PickRecorded(now, q, overlaps, nil)
	data, jsonErr := json.Marshal(d) //nolint:musttag // kvindex.Target goes by the names of its fields
	if jsonErr != nil {
		t.Fatal(jsonErr)
	}
	decided(data)
	var again Decision
	if jsonErr := json.Unmarshal(data, &again); jsonErr != nil { //nolint:musttag // as above
		t.Fatal(jsonErr)
	}
	plan, ex, rerunErr := again.Rerun()
	if plan != d.Plan || fmt.Sprint(rerunErr) != fmt.Sprint(err) {
		t.Fatalf("decided %+v %v, from its record %+v %v\n%s", d.Plan, err, plan, rerunErr, ex)
	}
	if err != nil {
		checkRefusal(t, r, now, q, err)
		return 0
	}
	info, ok := r.Target(plan.Decode)
	switch {
	case !ok, !info.Ready, info.Draining, info.Role == Prefill:
		t.Fatalf("sent to %+v", info)
	case len(q.Exclude) > 0 && q.Exclude[0] == plan.Decode:
		t.Fatal("sent to an excluded target")
	case q.Subset != nil && !q.Subset.Has(plan.Decode):
		t.Fatal("sent outside the subset")
	}
	if plan.Prefill != NoSlot {
		if p, ok := r.Target(plan.Prefill); !ok || !p.Ready || p.Role == Decode || p.Worker == info.Worker {
			t.Fatalf("prefill on %+v", p)
		}
	}
	return plan.Reservation
}

// checkRefusal looks for a target that could have taken a refused request. Pins, shed
// priorities and pools have rules of their own.
func checkRefusal(t *rapid.T, r *Router, now time.Duration, q *Query, err error) {
	held, ok := errors.AsType[*HeldError](err)
	if ok && held.Above {
		checkShare(t, r, now, q)
		return
	}
	if ok && q.TTFT > 0 && r.config.Unmet == UnmetQueue {
		return
	}
	if q.Pin != nil || q.Priority < 0 || (r.config.Disagg.Mode != ModeOff && r.roles[Prefill]+r.roles[Decode] > 0) {
		return
	}
	p := &r.config.Policy
	for _, slot := range r.order {
		x := &r.targets[slot]
		switch {
		case !x.info.Ready, x.info.Draining, x.info.Role == Prefill, x.report.known, q.Subset != nil && !q.Subset.Has(slot),
			len(q.Exclude) > 0 && q.Exclude[0] == slot, p.Cap.Hard > 0 && x.load.Active >= p.Cap.Hard,
			p.Limits.MaxActive > 0 && sequencesOn(r, slot) >= p.Limits.MaxActive,
			p.Limits.MaxQueue > 0 && x.load.Queue >= p.Limits.MaxQueue:
		default:
			t.Fatalf("refused (%v) although %s has capacity: %+v", err, x.info.Target, x.load)
		}
	}
}

// sequencesOn counts the answers that the requests in the ledger want of a target.
func sequencesOn(r *Router, slot kvindex.Slot) (n int64) {
	for i := range r.ledger.slab {
		if res := &r.ledger.slab[i]; res.Phase != unused && res.Decode == slot && r.targetOf(slot, res.decodeGen) != nil {
			n += max(res.Sequences, 1)
		} else if res.Phase == computing && res.Prefill == slot && r.targetOf(slot, res.prefillGen) != nil {
			n++
		}
	}
	return n
}

// checkShare counts the places of a request that was held for its tenant's share.
func checkShare(t *rapid.T, r *Router, now time.Duration, q *Query) {
	places, held := int64(0), int64(0)
	for _, slot := range r.order {
		if x := &r.targets[slot]; x.state == eligible && x.role != Prefill && !x.suspended(now, r.config.Policy.Limits.SuspendAfter) {
			places += r.config.Policy.Limits.MaxActive
		}
	}
	tenant := r.config.keyOf(q.Tenant)
	tenant.Lo |= 1
	for i := range r.ledger.slab {
		if res := &r.ledger.slab[i]; res.Tenant == tenant && r.targetOf(res.Decode, res.decodeGen) != nil {
			held += max(res.Sequences, 1)
		}
	}
	if held == 0 || float64(held+max(q.Sequences, 1)) <= q.Share*float64(places) {
		t.Fatalf("held for %d of %d places with a share of %v and %d sequences", held, places, q.Share, q.Sequences)
	}
}

// TestCostAgainstNaive compares the default with the rule as written, computed
// plainly: no tables, no stages.
func TestCostAgainstNaive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const n = 8
		cfg := DefaultConfig()
		r, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		type naive struct{ queue, kv, active int64 }
		loads := make([]naive, n)
		cursor := 0
		seen := map[string]bool{}
		for s := range n {
			r.SetTarget(kvindex.Slot(s), TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", s/4), Rank: int32(s % 4)}, Ready: true})
		}
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			q := &Query{ID: fmt.Sprint(i), PromptTokens: int64(rapid.IntRange(1, 9000).Draw(t, "prompt"))}
			if rapid.Bool().Draw(t, "hasConv") {
				q.Conversation = fmt.Sprint(rapid.IntRange(0, 9).Draw(t, "conv"))
			}
			overlaps := drawOverlaps(t, n)
			miss, best := make([]int64, n), int64(0)
			for s := range miss {
				miss[s] = q.PromptTokens
			}
			for _, o := range overlaps {
				held := int64(float64(o.Tokens[kvindex.Device]) + 0.9*float64(o.Tokens[kvindex.Host]) + float64(o.Speculative))
				best = max(best, held)
				miss[o.Slot] = max(q.PromptTokens-held, 0)
			}
			plan := mustPick(t, r, q, overlaps...)
			got := int(plan.Decode)
			first := q.Conversation == "" || !seen[q.Conversation]
			seen[q.Conversation] = true
			if first && 2*best <= q.PromptTokens {
				wait := func(s int) int64 { return miss[s] + loads[s].queue + 1000*loads[s].active }
				least := wait(0)
				for s := range miss {
					least = min(least, wait(s))
				}
				want := cursor
				for wait(want%n) > least+min(8192, q.PromptTokens) {
					want++
				}
				if got != want%n {
					t.Fatalf("request %d: new conversation on %d, want %d", i, got, want%n)
				}
				cursor = want%n + 1
			} else {
				price := int64(1000)
				if q.PromptTokens > 256 && q.PromptTokens-best <= 64 {
					price = 250
				}
				cost := func(s int) int64 { return 6*miss[s] + loads[s].queue + price*loads[s].active }
				for s := range miss {
					if cost(s) < cost(got) {
						t.Fatalf("request %d: %d costs %d, %d costs %d", i, got, cost(got), s, cost(s))
					}
					then := func(s int) float64 { return float64(loads[s].queue) + 0.01*float64(loads[s].kv) }
					if cost(s) == cost(got) && then(s) < then(got) {
						t.Fatalf("request %d: %d and %d cost the same, the second key is less", i, got, s)
					}
				}
			}
			loads[got].queue += miss[got]
			loads[got].kv += q.PromptTokens
			loads[got].active++
			if rapid.Bool().Draw(t, "firstToken") {
				r.FirstToken(0, plan.Reservation)
				loads[got].queue -= miss[got]
			}
		}
	})
}

// TestReplicasShareBookings lets two routers tell each other everything: their loads
// are equal at every moment, and zero at the end.
func TestReplicasShareBookings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := [2]string{"a", "b"}
		routers := [2]*Router{}
		for i := range routers {
			r, err := New(DefaultConfig())
			if err != nil {
				t.Fatal(err)
			}
			for s := range 4 {
				// The second replica numbers its slots the other way round.
				slot := kvindex.Slot(s)
				if i == 1 {
					slot = 3 - slot
				}
				r.SetTarget(slot, TargetInfo{Target: kvindex.Target{Worker: "w", Rank: int32(s)}, Ready: true})
			}
			routers[i] = r
		}
		type owned struct {
			by int
			id ReservationID
		}
		var live []owned
		compare := func() {
			for s := range kvindex.Slot(4) {
				if a, b := routers[0].Load(s), routers[1].Load(3-s); a != b {
					t.Fatalf("rank %d: %+v and %+v", s, a, b)
				}
			}
		}
		for i := range rapid.IntRange(1, 40).Draw(t, "ops") {
			by := rapid.IntRange(0, 1).Draw(t, "by")
			switch op := rapid.IntRange(0, 3).Draw(t, "op"); {
			case op < 2 || len(live) == 0:
				plan := mustPick(t, routers[by], &Query{ID: fmt.Sprint(i), PromptTokens: int64(rapid.IntRange(0, 5000).Draw(t, "prompt"))})
				b, ok := routers[by].Booking(plan.Reservation)
				b.Replica = names[by]
				if !ok || !routers[1-by].ApplyRemote(0, b) || routers[1-by].ApplyRemote(0, b) {
					t.Fatal("a booking counts once")
				}
				live = append(live, owned{by, plan.Reservation})
			case op == 2:
				o := live[rapid.IntRange(0, len(live)-1).Draw(t, "which")]
				if routers[o.by].FirstToken(0, o.id) != routers[1-o.by].RemotePhase(0, names[o.by], o.id, 3) {
					t.Fatal("first token differs")
				}
			default:
				at := rapid.IntRange(0, len(live)-1).Draw(t, "which")
				o := live[at]
				live = append(live[:at], live[at+1:]...)
				if !routers[o.by].Release(0, o.id) || !routers[1-o.by].RemoteRelease(0, names[o.by], o.id) {
					t.Fatal("release did nothing")
				}
			}
			compare()
		}
		// One replica falls silent: its copies expire. The other says goodbye.
		count := 0
		for _, o := range live {
			routers[o.by].Release(0, o.id)
			if o.by == 1 {
				count++
			} else if !routers[1].RemoteRelease(0, "a", o.id) {
				t.Fatal("drop did nothing")
			}
		}
		if n := routers[0].ExpireRemote(24 * time.Hour); n != count {
			t.Fatalf("%d expired, %d were live", n, count)
		}
		compare()
		if routers[0].Load(0) != (Load{}) || routers[0].Live() != 0 || routers[1].Live() != 0 {
			t.Fatal("load is left")
		}
	})
}

// A plan is read as it was written: no target is left out, and names are in snake_case.
func TestPlansAsJSON(t *testing.T) {
	for written, want := range map[string]Plan{
		`{"decode":1,"prefill":4294967295,"via":"first_turn","degraded":"model_unknown"}`:          {Decode: 1, Prefill: NoSlot, Via: ViaFirstTurn, Degraded: DegradedModel},
		`{"decode":1,"prefill":0,"via":"warm_up","degraded":"no_decode_target"}`:                   {Decode: 1, Prefill: 0, Via: ViaWarmUp, Degraded: DegradedNoDecode},
		`{"decode":1,"prefill":2,"via":"cost","degraded":"no_prefill_target"}`:                     {Decode: 1, Prefill: 2, Via: ViaCost, Degraded: DegradedNoPrefill},
		`{"decode":1,"prefill":4294967295,"via":"cost","degraded":"a_target_has_no_fresh_report"}`: {Decode: 1, Prefill: NoSlot, Via: ViaCost, Degraded: DegradedNoReport},
		`{"decode":1,"via":"first_turn","degraded":"model_unknown"}`:                               {Decode: 1, Prefill: NoSlot, Via: ViaFirstTurn, Degraded: DegradedModel},
	} {
		var plan, again Plan
		if err := json.Unmarshal([]byte(written), &plan); err != nil || plan != want {
			t.Errorf("%s: got %+v, %v, want %+v", written, plan, err, want)
		}
		text, err := json.Marshal(want)
		if err != nil || strings.Contains(string(text), `"prefill"`) != (want.Prefill != NoSlot) || bytes.ContainsAny(text, " -") {
			t.Errorf("got %s, %v, want a prefill target only where there is one, and no spaces in names", text, err)
		}
		if err := json.Unmarshal(text, &again); err != nil || again != want {
			t.Errorf("%s: got %+v, %v, want %+v", text, again, err, want)
		}
	}
	for _, other := range []string{`{"decode":1,"wait":3}`} {
		if err := json.Unmarshal([]byte(other), new(Plan)); err == nil {
			t.Errorf("%s: got no error, want one about a key that is not known", other)
		}
	}
}

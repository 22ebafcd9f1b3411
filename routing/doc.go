// Package routing chooses the target of a request: the worker and the
// data-parallel rank that will serve it, and the prefill target when the request
// is disaggregated. It is a pure core: no I/O, no clock, no goroutines, no global
// randomness. Time comes in as a duration since start, seeds come from request
// ids, so the same state and the same request give the same decision.
//
// A user keeps one Router under one mutex, tells it which targets exist, and asks
// it once per request:
//
//	r, err := routing.New(routing.DefaultConfig())
//	r.SetTarget(slot, routing.TargetInfo{Target: t, Ready: true})
//
//	plan, err := r.Pick(now, &routing.Query{ID: "r1", PromptTokens: 4000}, overlaps, nil)
//	r.FirstToken(now, plan.Reservation) // the prefill is done
//	r.Release(now, plan.Reservation)    // the stream has ended, however
//
// Choosing and booking are one step: a burst sees its own load. A Policy is a set
// of stages (eligible, sticky, cap, warm-up, first turn, gate, cost, pick), each
// of which can be off; a preset is a Policy with a name. Every stage writes a line
// into an Explanation if one is asked for.
//
// A Router is not safe for concurrent use.
package routing

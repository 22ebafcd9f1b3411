// Package routing chooses the target of a request: the worker and the data-parallel rank that serve it, and the prefill
// target if the request is disaggregated. It has no I/O, no clock, no goroutines and no global randomness. The caller
// passes the time as the duration since start, and seeds are request ids: the same state and the same request give the
// same decision.
//
// Keep one Router under one mutex, tell it which targets exist, and call Pick once per request:
//
//	r, err := routing.New(routing.DefaultConfig())
//	r.SetTarget(slot, routing.TargetInfo{Target: t, Ready: true})
//
//	plan, err := r.Pick(now, &routing.Query{ID: "r1", PromptTokens: 4000}, overlaps, nil)
//	r.FirstToken(now, plan.Reservation) // the answer has begun
//	r.Release(now, plan.Reservation)    // the request has ended, successfully or not
//
// Pick chooses and books in one step, so that requests of a burst see each other. A Policy is a set of stages
// (eligible, suspect, sticky, cap, ttft, warm_up, first_turn, gate, cost, pick), most of which are optional. A preset
// is a Policy with a name. Each stage adds a line to the Explanation if Pick gets one.
//
// Stability: the exported API follows the module's version; before v1 it may change in a minor version, with a note in
// the changelog. The names of presets and the keys of Config in YAML stay readable. The JSON forms of State, Decision
// and Explanation are for debugging and may change in every version.
//
// A Router is not safe for concurrent use.
package routing

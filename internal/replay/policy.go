package replay

import (
	"fmt"
	"sort"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// Policy is a routing configuration and what it is told.
type Policy struct {
	Name   string
	Config routing.Config
	// NoID hides conversation ids, NoCredit the prompts sent and not yet confirmed.
	NoID, NoCredit bool
	// Oracle gives all ranks one infinite cache: a bound for any router.
	Oracle bool
	// Peer, if not nil, chooses in the router's place: a modelled rule of another
	// project.
	Peer func(s *simulation, rec *record) kvindex.Slot
}

// variants are the policies that are presets with a change.
var variants = map[string]struct {
	preset string
	change func(p *Policy, r *routing.Policy)
}{
	"oracle":               {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Oracle = true }},
	"kv-aware-no-id":       {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.NoID = true }},
	"kv-aware-no-credit":   {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.NoCredit = true }},
	"kv-aware-no-active":   {routing.DefaultPreset, func(_ *Policy, r *routing.Policy) { r.Cost.Active = 0 }},
	"kv-aware-no-first":    {routing.DefaultPreset, func(_ *Policy, r *routing.Policy) { r.FirstTurn.Placement = routing.PlaceByCost }},
	"kv-aware-blind-first": {routing.DefaultPreset, func(_ *Policy, r *routing.Policy) { r.FirstTurn.Placement = routing.PlaceRoundRobin }},
	"llm-d":                {"random", func(p *Policy, _ *routing.Policy) { p.Peer, p.NoCredit = llmd, true }},
	"trt-plain":            {"kv-aware-trt", func(_ *Policy, r *routing.Policy) { r.Gate.On, r.Cap.FairShare, r.Cap.Hard = false, false, 0 }},
	"trt-plain-lowest":     {"kv-aware-trt", trtLowest(false)},
	"trt-gate":             {"kv-aware-trt", func(_ *Policy, r *routing.Policy) { r.Cap.FairShare, r.Cap.Hard = false, 0 }},
	"trt-gate-lowest":      {"kv-aware-trt", trtLowest(true)},
	"trt-plain-first-turn": {"first-turn-round-robin", func(_ *Policy, r *routing.Policy) { r.Gate.On, r.Cap.FairShare, r.Cap.Hard = false, false, 0 }},
}

func trtLowest(gate bool) func(*Policy, *routing.Policy) {
	return func(_ *Policy, r *routing.Policy) {
		r.Gate.On, r.Cap.FairShare, r.Cap.Hard = gate, false, 0
		r.Pick.Ties = routing.TiesLowest
	}
}

// PolicyByName returns a preset or one of the variants that replay adds.
func PolicyByName(name string) (Policy, error) {
	p := Policy{Name: name, Config: routing.DefaultConfig()}
	preset := name
	v, isVariant := variants[name]
	if isVariant {
		preset = v.preset
	}
	var ok bool
	if p.Config.Policy, ok = routing.Preset(preset); !ok {
		return Policy{}, fmt.Errorf("no policy %q", name)
	}
	if isVariant {
		v.change(&p, &p.Config.Policy)
	}
	return p, nil
}

// PolicyNames lists what PolicyByName knows.
func PolicyNames() []string {
	names := routing.Presets()
	for name := range variants {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

package replay

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// Policy is a routing configuration and the knowledge that the router has.
type Policy struct {
	Name   string
	Config routing.Config
	// NoID hides conversation ids, NoCredit the prompts sent and not yet confirmed.
	NoID, NoCredit bool
	// Oracle gives all ranks one infinite cache in addition to their own, so that no choice of the router costs a hit.
	// Informed lets the router know it too: it then balances load only, which is the bound for any router.
	Oracle, Informed bool
	// Order is that of held requests (Config.Hold) as in flow.order; "" is shortest. Tenants share the capacity.
	Order   string
	Tenants bool
	// Programs admits conversations whole, as with flow.kv_tokens.
	Programs bool
	// TTFT is the target of every request for its first token, see routing.Query; 0 for none.
	TTFT time.Duration
	// Peer, if not nil, chooses in place of the router: a model of another project's rule.
	Peer func(s *simulation, rec *record) kvindex.Slot
}

const leastServed, byArrival = "least_served", "arrival"

type variant struct {
	preset string
	change func(p *Policy, r *routing.Policy)
}

// modelled is a rule of another project; its choice is pinned.
func modelled(rule func(p *pick) func(slot int) float64) variant {
	return variant{"random", func(p *Policy, _ *routing.Policy) { p.Peer = peer(rule) }}
}

// variants are policies derived from presets.
var variants = map[string]variant{
	"oracle":               {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Oracle = true }},
	"oracle-informed":      {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Oracle, p.Informed, p.NoCredit = true, true, true }},
	"kv-aware-no-id":       {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.NoID = true }},
	"kv-aware-no-credit":   {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.NoCredit = true }},
	"kv-aware-no-suspect":  {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Config.SuspectAfter = 0 }},
	"conversation-no-id":   {"conversation", func(p *Policy, _ *routing.Policy) { p.NoID = true }},
	"kv-aware-flow":        {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Config.Hold = 8192 }},
	"kv-aware-flow-fifo":   {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Config.Hold, p.Order = 8192, byArrival }},
	"kv-aware-programs":    {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Config.Hold, p.Programs = 8192, true }},
	"kv-aware-flow-served": {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Config.Hold, p.Order = 8192, leastServed }},
	"kv-aware-flow-fair":   {routing.DefaultPreset, func(p *Policy, _ *routing.Policy) { p.Config.Hold, p.Tenants = 8192, true }},
	"kv-aware-slo":         {routing.DefaultPreset, withTarget(routing.UnmetRoute)},
	"kv-aware-slo-queue":   {routing.DefaultPreset, withTarget(routing.UnmetQueue)},
	"kv-aware-slo-refuse":  {routing.DefaultPreset, withTarget(routing.UnmetRefuse)},
	"llm-d":                {"random", func(p *Policy, _ *routing.Policy) { p.Peer, p.NoCredit = peer(llmd), true }},
	"dynamo":               {"compute-and-resident", func(*Policy, *routing.Policy) {}},
	// Dynamo's cost is scale*(queue + prompt - credit*overlap) + resident + weight*requests. With
	// a credit of 2, prompt - 2*overlap is 2*miss less the prompt, which is the same everywhere.
	"dynamo-agentic":  {"compute-and-resident", func(_ *Policy, r *routing.Policy) { r.Cost.Miss, r.Cost.Queue, r.Cost.Active = 8, 4, 1024 }},
	"llm-d-affinity":  modelled(llmdAffinity),
	"lmetric":         modelled(lmetric),
	"dualmap":         modelled(dualMap),
	"preble-e2":       modelled(prebleE2),
	"aibrix-prefix":   modelled(aibrixPrefix),
	"smg-cache-aware": modelled(smgCacheAware),
	"smg-least-load":  modelled(smgLeastLoad),
	"loadaware":       modelled(loadAware),
	"power-of-two":    modelled(powerOfTwo),
	"trt-plain":       {"kv-aware-trt", func(_ *Policy, r *routing.Policy) { r.Gate.On, r.Cap.FairShare, r.Cap.Hard = false, false, 0 }},
}

// poolRules are the rules for prefill and decode pools; all choose targets in the same way.
var poolRules = map[string]func(d *routing.Disagg){
	"pools":                 func(*routing.Disagg) {},
	"pools-k2":              func(d *routing.Disagg) { d.K = 2 },
	"pools-k5":              func(d *routing.Disagg) { d.K = 5 },
	"pools-local":           func(d *routing.Disagg) { d.K = 0 },
	"pools-threshold-0":     threshold(0),
	"pools-threshold-1024":  threshold(1024),
	"pools-threshold-4096":  threshold(4096),
	"pools-threshold-8192":  threshold(8192),
	"pools-threshold-16384": threshold(16384),
}

func threshold(tokens int64) func(d *routing.Disagg) {
	return func(d *routing.Disagg) { d.Mode, d.Threshold = routing.ModeThreshold, tokens }
}

// withTarget sets the time to the first token that counts as goodput as the requests' target.
func withTarget(unmet routing.Unmet) func(*Policy, *routing.Policy) {
	return func(p *Policy, _ *routing.Policy) { p.Config.Unmet, p.TTFT = unmet, time.Duration(sloTTFT*1e9) }
}

// PolicyByName returns a preset or one of the variants that replay adds, with
// settings changed as in "kv-aware?cost.miss=4&first_turn.slack=2048".
func PolicyByName(name string) (Policy, error) {
	p := Policy{Name: name, Config: routing.DefaultConfig()}
	preset, settings, _ := strings.Cut(name, "?")
	v, isVariant := variants[preset]
	if isVariant {
		preset = v.preset
	}
	if rule := poolRules[preset]; rule != nil {
		rule(&p.Config.Disagg)
		preset = routing.DefaultPreset
	}
	var ok bool
	if p.Config.Policy, ok = routing.Preset(preset); !ok {
		known := slices.Concat(routing.Presets(), slices.Sorted(maps.Keys(variants)), slices.Sorted(maps.Keys(poolRules)))
		return Policy{}, fmt.Errorf("no policy %q: there are %s", preset, strings.Join(known, ", "))
	}
	if isVariant {
		v.change(&p, &p.Config.Policy)
	}
	for setting := range strings.SplitSeq(settings, "&") {
		if setting == "" {
			continue
		}
		if err := p.set(setting); err != nil {
			return Policy{}, err
		}
	}
	return p, nil
}

// set changes one setting, given as path=value with the keys of the configuration's routing.policy, or flow.hold_tokens.
func (p *Policy) set(setting string) error {
	flow := struct {
		Hold uint32 `yaml:"hold_tokens"`
	}{uint32(p.Config.Hold)}
	var into any = &p.Config.Policy
	path, value, ok := strings.Cut(setting, "=")
	if key, isFlow := strings.CutPrefix(path, "flow."); isFlow {
		path, into = key, &flow
	}
	if !ok {
		return fmt.Errorf("setting %q: want key=value", setting)
	}
	for _, name := range slices.Backward(strings.Split(path, ".")) {
		value = fmt.Sprintf("{%q: %s}", name, value)
	}
	if err := yaml.NewDecoder(strings.NewReader(value), yaml.Strict()).Decode(into); err != nil {
		first, _, _ := strings.Cut(yaml.FormatError(err, false, false), "\n")
		return fmt.Errorf("setting %q: %s", setting, first)
	}
	p.Config.Hold = int64(flow.Hold)
	return nil
}

// weightSetting is the prefix of kv-aware's names with an overlap weight other than the default.
const weightSetting, defaultWeight = "kv-aware?cost.miss=", "6"

// Sweep lists the policies that show how a workload reacts to the most important settings: the overlap weight first.
func Sweep() []string {
	var names []string
	for _, weight := range []string{"1", "2", "3", "4", defaultWeight, "8", "12", "20"} {
		names = append(names, weightSetting+weight)
	}
	return append(names, "kv-aware?first_turn.slack=0", "kv-aware?first_turn.slack=2048", "kv-aware?first_turn.slack=65536",
		"kv-aware?cost.active=0", "kv-aware?cost.active=4000",
		"session", "round-robin", "kv-aware-trt", "conversation-rank", "first-turn-round-robin", "min-wait", "least-tokens", "oracle")
}

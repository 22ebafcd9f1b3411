package replay

import (
	"math"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// Rule is a public routing rule of the gauntlet, under the policy that models it.
type Rule struct {
	// Policy is a name for PolicyByName.
	Policy string `json:"policy"`
	// Source and Date say where the rule is described.
	Source string `json:"source"`
	Date   string `json:"date"`
	// Bound marks oracles, which no router can match.
	Bound bool `json:"bound,omitempty"`
}

// Rules lists the rules of the gauntlet. docs/gauntlet.md describes each model.
func Rules() []Rule {
	return []Rule{
		{Policy: routing.DefaultPreset, Source: "Kvlane's default", Date: "2026-11"},
		{Policy: "session", Source: "Kvlane: a conversation stays on its target, new ones go to the fewest tokens", Date: "2026-11"},
		{Policy: "min-wait", Source: "Kvlane: least miss plus queue", Date: "2026-11"},
		{Policy: "llm-d", Source: "llm-d router's chart: 3 prefix + 2 queue + 2 free KV", Date: "2026-08"},
		{Policy: "llm-d-affinity", Source: "llm-d guide (llm-d#2071): affinity filter 0.80, 18 s, then token load", Date: "2026-07"},
		{Policy: "dynamo", Source: "Dynamo's KV router, default weights", Date: "2026-08"},
		{Policy: "dynamo-agentic", Source: "Dynamo --agentic (dynamo#13447): credit 2, prefill scale 4, 64 blocks a request", Date: "2026-08"},
		{Policy: "lmetric", Source: "LMetric, arXiv 2603.15202: new prefill times batch", Date: "2026-03"},
		{Policy: "dualmap", Source: "DualMap, arXiv 2602.06502: two hashes, load where TTFT misses its target", Date: "2026-02"},
		{Policy: "preble-e2", Source: "Preble's E2, arXiv 2407.00023; AIBrix prefix-cache-preble", Date: "2024-07"},
		{Policy: "aibrix-prefix", Source: "AIBrix prefix-cache", Date: "2026-08"},
		{Policy: "smg-cache-aware", Source: "SMG, SGLang gateway, vLLM router: cache_aware 0.3/64/1.5", Date: "2026-08"},
		{Policy: "smg-least-load", Source: "SMG least_load by expected wait (smg#1647)", Date: "2026-06"},
		{Policy: "loadaware", Source: "vLLM production-stack loadaware (#1035), beta 1", Date: "2026-08"},
		{Policy: "kv-aware-trt", Source: "TensorRT-LLM KV-aware router with gate and cap", Date: "2026-10"},
		{Policy: "conversation-rank", Source: "TensorRT-LLM conversation affinity", Date: "2026-10"},
		{Policy: "power-of-two", Source: "fewer requests of two random targets", Date: "1996"},
		{Policy: "load-balancing", Source: "least requests", Date: "-"},
		{Policy: "round-robin", Source: "round robin", Date: "-"},
		{Policy: "oracle", Source: "the default over one infinite cache of the fleet", Date: "-", Bound: true},
		{Policy: "oracle-informed", Source: "the same, and the router knows", Date: "-", Bound: true},
	}
}

// ruleOf returns a rule of the gauntlet, or a policy that is not one of them.
func ruleOf(policy string) Rule {
	for _, r := range Rules() {
		if r.Policy == policy {
			return r
		}
	}
	return Rule{Policy: policy, Source: "-", Date: "-", Bound: strings.HasPrefix(policy, "oracle")}
}

// sloTTFT and sloITL are the target of goodput, in seconds.
const sloTTFT, sloITL = 2.0, 0.1

// peerState is what the modelled routers remember.
type peerState struct {
	// sent is the uncached tokens ever sent to each rank: the size of its tree of prefixes, from which nothing is removed.
	// recent is the seconds of work sent to each rank, decaying over Preble's window.
	sent, recent []float64
	recentAt     float64
	// uses counts requests by the prefixes that they have.
	uses  map[uint64]int
	total int
}

// pick is one decision of a modelled router: its view of all ranks.
type pick struct {
	s    *simulation
	rec  *record
	load []routing.Load
	// held is the number of prompt tokens that a rank has, miss the number of the others.
	held, miss []float64
}

// peer makes a policy function of a rule that returns the cost of a rank; the least wins, ties are random.
func peer(rule func(p *pick) func(slot int) float64) func(*simulation, *record) kvindex.Slot {
	return func(s *simulation, rec *record) kvindex.Slot {
		n := s.ranks()
		if s.peers.sent == nil {
			s.peers = peerState{sent: make([]float64, n), recent: make([]float64, n), uses: map[uint64]int{}}
		}
		p := pick{s: s, rec: rec, load: make([]routing.Load, n), held: make([]float64, n), miss: make([]float64, n)}
		for slot := range n {
			p.load[slot], p.miss[slot] = s.replicas[rec.replica].router.Load(kvindex.Slot(slot)), float64(rec.Prompt)
		}
		for i := range s.overlap {
			o := &s.overlap[i]
			p.held[o.Slot] = min(float64(o.Tokens[kvindex.Device]+o.Speculative), float64(rec.Prompt-1))
			p.miss[o.Slot] -= p.held[o.Slot]
		}
		slot := p.least(rule(&p))
		s.peers.sent[slot] += p.miss[slot]
		return kvindex.Slot(slot)
	}
}

// least returns the rank that may get requests with the least cost.
func (p *pick) least(cost func(slot int) float64) int {
	best, tied, least := -1, 0, math.Inf(1)
	for slot := range p.load {
		if !p.s.up(slot) {
			continue
		}
		switch c := cost(slot); {
		case best < 0 || c < least:
			best, tied, least = slot, 1, c
		case c == least:
			if tied++; p.s.rng.IntN(tied) == 0 {
				best = slot
			}
		}
	}
	return best
}

// bounds returns the least and the greatest value over ranks that may get requests, and the mean.
func (p *pick) bounds(value func(slot int) float64) (least, most, mean float64) {
	least, n := math.Inf(1), 0.0
	for slot := range p.load {
		if !p.s.up(slot) {
			continue
		}
		v := value(slot)
		least, most, mean, n = min(least, v), max(most, v), mean+v, n+1
	}
	return least, most, mean / n
}

func (p *pick) active(slot int) float64 { return float64(p.load[slot].Active) }

// only adds a cost above all others to ranks that a filter drops.
func only(keep func(slot int) bool, cost func(slot int) float64) func(slot int) float64 {
	return func(slot int) float64 {
		if keep(slot) {
			return cost(slot)
		}
		return 1e15 + cost(slot)
	}
}

// llmd is the weighted sum of scores in [0, 1] that llm-d's chart has: 3 prefix + 2 queue + 2
// free KV, with exact prefixes.
func llmd(p *pick) func(slot int) float64 {
	waiting := func(slot int) float64 { return p.s.scrape.waiting[slot] }
	least, most, _ := p.bounds(waiting)
	return func(slot int) float64 {
		queue := 1.0
		if most > least {
			queue = (most - waiting(slot)) / (most - least)
		}
		return -(2*queue + 2*(1-p.s.scrape.used[slot]) + 3*p.held[slot]/float64(p.rec.Prompt))
	}
}

// llmdAffinity keeps the ranks that hold 80 % of the prompt, unless their backlog exceeds that
// of the others by 18 s of prefill, and takes the fewest uncached tokens in flight.
func llmdAffinity(p *pick) func(slot int) float64 {
	const threshold, penalty = 0.80, 18.0
	sticky := func(slot int) bool { return p.held[slot] >= threshold*float64(p.rec.Prompt) }
	inFlight := func(slot int) float64 { return float64(p.load[slot].Work) }
	in, out := math.Inf(1), math.Inf(1)
	for slot := range p.load {
		switch {
		case !p.s.up(slot):
		case sticky(slot):
			in = min(in, inFlight(slot))
		default:
			out = min(out, inFlight(slot))
		}
	}
	cost := func(slot int) float64 { return inFlight(slot) + p.miss[slot] }
	if math.IsInf(in, 1) || (in-out)*p.s.fleet.Engine.PerToken > penalty {
		return cost
	}
	return only(sticky, cost)
}

func lmetric(p *pick) func(slot int) float64 {
	return func(slot int) float64 { return max(p.miss[slot], 1) * (p.active(slot) + 1) }
}

// dualMap hashes the shortest prefix that fewer than one in ranks requests share to two ranks, and takes the one with
// the greater match if its expected TTFT meets the target, else the sooner one. Requests that queue are not migrated.
func dualMap(p *pick) func(slot int) float64 {
	st, n := &p.s.peers, len(p.load)
	st.total++
	key := scramble(uint64(len(p.s.records)) + 1<<50)
	for _, b := range p.rec.Blocks {
		key = b
		st.uses[b]++
		if st.uses[b]*n < st.total {
			break
		}
	}
	// Rendezvous hashing: a rank that leaves moves only its own prefixes.
	best := [2]int{-1, -1}
	var score [2]uint64
	for slot := range n {
		if !p.s.up(slot) {
			continue
		}
		h := scramble(key ^ scramble(uint64(slot)+1<<40))
		switch {
		case best[0] < 0 || h > score[0]:
			best[1], score[1] = best[0], score[0]
			best[0], score[0] = slot, h
		case best[1] < 0 || h > score[1]:
			best[1], score[1] = slot, h
		}
	}
	ttft := func(slot int) float64 {
		return (float64(p.load[slot].Queue) + p.miss[slot]) * p.s.fleet.Engine.PerToken
	}
	return only(func(slot int) bool { return slot == best[0] || slot == best[1] }, func(slot int) float64 {
		if t := ttft(slot); t > sloTTFT {
			return float64(p.rec.Prompt) + t
		}
		return p.miss[slot]
	})
}

// prebleE2 exploits the longest match if it is at least half of the prompt and its rank had at
// most twice the work of the least busy one in the last three minutes; else it explores: least
// recent work plus this prompt's. The eviction cost is left out.
func prebleE2(p *pick) func(slot int) float64 {
	const window, output = 180.0, 256
	st, e := &p.s.peers, &p.s.fleet.Engine
	decay := math.Exp((st.recentAt - p.s.now) / window)
	for i := range st.recent {
		st.recent[i] *= decay
	}
	st.recentAt = p.s.now
	recent := func(slot int) float64 { return st.recent[slot] }
	work := func(slot int) float64 { return p.miss[slot]*e.PerToken + output*e.PerDecode }
	cost := func(slot int) float64 { return recent(slot) + work(slot) }
	_, held, _ := p.bounds(func(slot int) float64 { return p.held[slot] })
	if 2*held >= float64(p.rec.Prompt) {
		longest := func(slot int) bool { return p.held[slot] == held }
		slot := p.least(only(longest, recent))
		if idle, _, _ := p.bounds(recent); recent(slot) <= 2*idle+1 {
			cost = only(longest, recent)
		}
	}
	slot := p.least(cost)
	st.recent[slot] += work(slot)
	return only(func(s int) bool { return s == slot }, cost)
}

// aibrixPrefix takes the longest match among ranks with at most the mean plus one deviation of
// requests, and the fewest requests while these differ by more than eight.
func aibrixPrefix(p *pick) func(slot int) float64 {
	least, most, mean := p.bounds(p.active)
	if most-least > 8 {
		return p.active
	}
	_, _, square := p.bounds(func(slot int) float64 { return (p.active(slot) - mean) * (p.active(slot) - mean) })
	limit := mean + math.Sqrt(square)
	return func(slot int) float64 {
		if p.active(slot) > limit {
			return p.active(slot)
		}
		return p.active(slot) - 1e6*math.Floor(100*p.held[slot]/float64(p.rec.Prompt))
	}
}

// smgCacheAware takes the engine with the fewest requests if the highest and the lowest load differ
// by more than 64 requests and by more than a factor of 1.5; else the one with the longest match, if
// that is above 0.3 of the prompt; else the one with the smallest tree.
func smgCacheAware(p *pick) func(slot int) float64 {
	least, most, _ := p.bounds(p.active)
	_, held, _ := p.bounds(func(slot int) float64 { return p.held[slot] })
	switch {
	case most-least > 64 && most > 1.5*least:
		return p.active
	case held > 0.3*float64(p.rec.Prompt):
		return func(slot int) float64 { return -p.held[slot] }
	default:
		return func(slot int) float64 { return p.s.peers.sent[slot] }
	}
}

// smgLeastLoad is the time to drain plus a barrier before full KV caches.
func smgLeastLoad(p *pick) func(slot int) float64 {
	return func(slot int) float64 {
		k := min(p.s.scrape.used[slot], 0.999)
		return float64(p.load[slot].Queue)*p.s.fleet.Engine.PerToken + 0.15*k/(1-k)
	}
}

func loadAware(p *pick) func(slot int) float64 {
	_, _, mean := p.bounds(p.active)
	return func(slot int) float64 {
		return (p.active(slot)-mean)/max(1, mean) - p.held[slot]/float64(p.rec.Prompt)
	}
}

func powerOfTwo(p *pick) func(slot int) float64 {
	first := p.least(func(int) float64 { return 0 })
	second := p.least(func(slot int) float64 {
		if slot == first {
			return 1
		}
		return 0
	})
	return only(func(slot int) bool { return slot == first || slot == second }, p.active)
}

// scrapeEvery bounds the age in seconds of a peer's view of engine load.
const scrapeEvery = 0.05

// scrape is a peer's view of the load.
type scrape struct {
	next    float64
	waiting []float64
	used    []float64
}

// refresh scrapes all ranks if it is time.
func (s *simulation) refresh() {
	if s.now < s.scrape.next {
		return
	}
	s.scrape.next = (math.Floor(s.now/scrapeEvery) + 1) * scrapeEvery
	s.scrape.waiting, s.scrape.used = s.scrape.waiting[:0], s.scrape.used[:0]
	for slot := range s.ranks() {
		_, k := s.at(kvindex.Slot(slot))
		s.scrape.waiting = append(s.scrape.waiting, float64(len(k.waiting)))
		s.scrape.used = append(s.scrape.used, float64(k.used())/float64(k.places))
	}
}

package replay

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvlane/kvlane/routing"
)

// view is what a modelled rule sees of a rank.
type view struct {
	held             float64 // tokens of the prompt
	active, queue    int64
	work             int64
	waiting, used    float64
	sent, recentWork float64
	missing          bool
}

// TestRules asks the models of public rules for decisions that their descriptions fix. The
// prompt has 10,000 tokens; want is the ranks that may be taken.
func TestRules(t *testing.T) {
	idle := view{}
	for _, c := range []struct {
		name  string
		rule  func(p *pick) func(slot int) float64
		ranks []view
		want  []int
	}{
		{"llm-d: the match outweighs a short queue", llmd, []view{{held: 9000, waiting: 1}, {waiting: 2}}, []int{0}},
		{"llm-d: an empty rank beats a third of the prompt", llmd, []view{{held: 3000, waiting: 4, used: 0.5}, idle}, []int{1}},
		{"llm-d guide: sticky at 80 %", llmdAffinity, []view{{held: 8000, work: 300_000}, idle}, []int{0}},
		{"llm-d guide: not below", llmdAffinity, []view{{held: 7900, work: 300_000}, idle}, []int{1}},
		{"llm-d guide: 18 s more of prefill break it", llmdAffinity, []view{{held: 8000, work: 361_000}, idle}, []int{1}},
		{"llm-d guide: least uncached tokens among sticky ones", llmdAffinity, []view{{held: 9000, work: 5000}, {held: 8000, work: 1000}, idle}, []int{1}},
		{"LMetric: half the miss, twice the batch and more", lmetric, []view{{held: 5000, active: 2}, idle}, []int{1}},
		{"LMetric: half the miss, less than twice the batch", lmetric, []view{{held: 5500, active: 1}, idle}, []int{0}},
		{"Preble: exploits half of the prompt", prebleE2, []view{{held: 5000, recentWork: 0.9}, idle}, []int{0}},
		{"Preble: explores below half", prebleE2, []view{{held: 4900, recentWork: 0.9}, idle}, []int{1}},
		{"Preble: explores where the holder was twice as busy", prebleE2, []view{{held: 9000, recentWork: 9}, {recentWork: 1}}, []int{1}},
		{"AIBrix: match within a deviation of the mean", aibrixPrefix, []view{{held: 2000, active: 3}, {active: 1}, {active: 5}}, []int{0}},
		{"AIBrix: not above it", aibrixPrefix, []view{{held: 2000, active: 8}, {active: 1}, {active: 1}, {active: 2}}, []int{1, 2}},
		{"AIBrix: fewest requests where these differ by more than 8", aibrixPrefix, []view{{held: 9000, active: 9}, idle}, []int{1}},
		{"SMG: longest match above 0.3", smgCacheAware, []view{{held: 3100, active: 60}, idle}, []int{0}},
		{"SMG: else the smallest tree", smgCacheAware, []view{{held: 2900, sent: 100}, {sent: 50}}, []int{1}},
		{"SMG: fewest requests when unbalanced", smgCacheAware, []view{{held: 9000, active: 66}, {active: 1}}, []int{1}},
		{"SMG least load: tokens that queue", smgLeastLoad, []view{{held: 9000, queue: 5000}, {active: 50, queue: 4000}}, []int{1}},
		{"SMG least load: a KV cache that is nearly full", smgLeastLoad, []view{{used: 0.97}, {queue: 4000}}, []int{1}},
		{"loadaware: one whole match is worth one mean of load", loadAware, []view{{held: 9000, active: 4}, {active: 2}}, []int{0}},
		{"loadaware: and no more", loadAware, []view{{held: 5000, active: 6}, {active: 1}}, []int{1}},
		{"power of two: the lesser of two", powerOfTwo, []view{{active: 2}, {held: 9000, active: 3}}, []int{0}},
		{"a rank that is not there", lmetric, []view{{held: 9999, missing: true}, {active: 9}}, []int{1}},
	} {
		taken := map[int]bool{}
		for seed := range uint64(20) {
			n := len(c.ranks)
			s := &simulation{fleet: Fleet{Workers: n, Ranks: 1, Engine: Dense70B(1_000_000)}, rng: rand.New(rand.NewPCG(seed, 1))}
			p := &pick{s: s, rec: &record{Request: Request{Prompt: 10_000}}}
			for _, v := range c.ranks {
				p.load = append(p.load, routing.Load{Active: v.active, Queue: v.queue, Work: v.work})
				p.held, p.miss = append(p.held, v.held), append(p.miss, 10_000-v.held)
				s.present = append(s.present, !v.missing)
				s.scrape.waiting, s.scrape.used = append(s.scrape.waiting, v.waiting), append(s.scrape.used, v.used)
				s.peers.sent, s.peers.recent = append(s.peers.sent, v.sent), append(s.peers.recent, v.recentWork)
			}
			taken[p.least(c.rule(p))] = true
		}
		for slot := range c.ranks {
			if taken[slot] != slices.Contains(c.want, slot) {
				t.Errorf("%s: got rank %d taken %v, want those of %v", c.name, slot, taken[slot], c.want)
			}
		}
	}
}

// TestDualMap sends prompts with one prefix to two ranks, and many prefixes to all.
func TestDualMap(t *testing.T) {
	s := &simulation{fleet: Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(1_000_000)}, rng: rand.New(rand.NewPCG(1, 1)), peers: peerState{uses: map[uint64]int{}}}
	for range 8 {
		s.present = append(s.present, true)
	}
	took := func(blocks []uint64, queue int64) int {
		p := &pick{s: s, rec: &record{Request: Request{Prompt: 4096, Blocks: blocks}}, load: make([]routing.Load, 8), held: make([]float64, 8), miss: make([]float64, 8)}
		for slot := range p.load {
			p.load[slot].Queue = queue
			p.miss[slot] = 4096
		}
		return p.least(dualMap(p))
	}
	one, all := map[int]bool{}, map[int]bool{}
	for n := range uint64(200) {
		all[took(chain(chain(nil, 7, 4), n, 12), 0)] = true // a hot prefix does not decide
	}
	for range 20 {
		one[took(chain(chain(nil, 7, 4), 1<<40, 12), 0)] = true
	}
	if len(one) != 2 || len(all) != 8 {
		t.Errorf("got %d ranks for one prefix and %d for many, want 2 and 8", len(one), len(all))
	}
}

// Every rule of the gauntlet is a policy, with its source.
func TestRulesArePolicies(t *testing.T) {
	for _, r := range Rules() {
		if _, err := PolicyByName(r.Policy); err != nil || r.Source == "" || r.Date == "" {
			t.Errorf("%+v: got %v, want a policy with a source and a date", r, err)
		}
	}
}

package replay

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// family is a generated workload of the gauntlet: sessions that arrive at random. Within a
// session a turn follows the end of the one before.
type family struct {
	name, text string
	// heldOut families are for judging only: constants must not be tuned on them.
	heldOut bool
	// seconds is how long requests arrive; the first quarter is not measured.
	seconds float64
	// full is the share of demand's computed time at which a fleet is saturated: decoding and prefilling share steps,
	// and memory bounds batches.
	full float64
	// closed families have a constant number of sessions under way: where one ends, the next
	// begins. In the others sessions arrive at random.
	closed bool
	// session draws the first turns of one session.
	session func(g *sessions) []*turn
}

// familyBlock is the number of tokens of a block of all families, so that they can be mixed.
const familyBlock = 256

// longestPrompt ends a session, as compaction does.
const longestPrompt = 180_000

// turn is a request of a session and what follows it.
type turn struct {
	Request
	// gap is the time in seconds from the end of the last turn before this one.
	gap  float64
	next []*turn
	// before is the number of turns that must end first.
	before int
	// from draws the next session of a closed family.
	from *sessions
}

func (t *turn) then(next *turn) {
	t.next = append(t.next, next)
	next.before++
}

// sessions draws sessions; ids and texts are its own.
type sessions struct {
	rng   *rand.Rand
	at    float64 // of the session's arrival
	count uint64  // of conversations and texts
}

// text returns a name for a text that no other prompt has.
func (g *sessions) text() uint64 {
	g.count++
	return 1<<40 + g.count
}

// skewed draws from 0 to n-1 with probabilities like 1/(rank+1).
func (g *sessions) skewed(n int) int {
	return min(int(math.Pow(float64(n+1), g.rng.Float64()))-1, n-1)
}

// dialogue is a conversation whose prompts grow.
type dialogue struct {
	id     string
	tenant int
	tokens int
	blocks []uint64
	own    uint64
}

// say is the dialogue's next turn: text more tokens, then an answer of the model that the turn after it starts with.
func (d *dialogue) say(text, output int, gap float64) *turn {
	d.tokens += text
	d.blocks = chain(d.blocks, d.own, d.tokens/familyBlock-len(d.blocks))
	t := &turn{gap: gap, Request: Request{Conversation: d.id, Tenant: d.tenant, Prompt: d.tokens, Output: output, Blocks: slices.Clip(d.blocks)}}
	d.tokens += output
	return t
}

// dialogue starts a conversation of a tenant with a shared prefix.
func (g *sessions) dialogue(tenant int, shared uint64, tokens int) *dialogue {
	own := g.text()
	return &dialogue{id: fmt.Sprintf("c%d", own), tenant: tenant, tokens: tokens, own: own, blocks: chain(nil, shared, tokens/familyBlock)}
}

var families = []family{
	{name: "chat", text: "conversations with documents, log-normal gaps", seconds: 240, full: 1.08, session: chat},
	{name: "agents", text: "coding agents in a closed loop, with subagents", seconds: 600, full: 2.4, closed: true, session: agent},
	{name: "tenants", text: "questions under 300 system prompts of 8,000 tokens", seconds: 100, full: 1.55, session: tenant},
	{name: "batch", text: "waves of unrelated prompts", seconds: 150, full: 1.03, session: submission},
	{name: "rl", text: "groups of 64 samples of a prompt; new weights every 30 s empty the caches", seconds: 120, full: 1.15, session: rollout},
	{name: "mix", text: "chat, agents, tenants and batch together", seconds: 300, full: 1.63, session: mixed},
	{name: "retrieval", text: "four of 1,000 documents in any order", seconds: 120, full: 1.09, session: retrieval},
	{name: "reading", text: "questions about one of 776 documents of 23,000 tokens, with long gaps", seconds: 400, full: 0.33, session: reading},
	{name: "completion", text: "code completion: a file is sent again and again, from some place on with other text", seconds: 200, full: 2, session: completion, heldOut: true},
}

// chat has 5 turns in the mean and gaps with a median of 12 s; one of 8 tenants.
func chat(g *sessions) []*turn {
	who := g.skewed(8)
	d := g.dialogue(who+1, uint64(who)+1, 512)
	return d.goOn(g, 0.8, 700, 1.2, 340, 0.8, 12, d.say(min(lognormal(g.rng, 6000, 1.2), 60_000), lognormal(g.rng, 340, 0.8), 0))
}

// reading asks 8 questions in the mean about a document, popular ones more often: the numbers of documents and questions of
// LooGLE, and the lengths that arXiv 2407.00023 gives for it (23,474 ± 6,105 and 16). The gaps, 30 s in the median, are made up.
func reading(g *sessions) []*turn {
	document := g.skewed(776)
	d := g.dialogue(1+g.rng.IntN(8), uint64(document)+1<<24, 12_900+document*311%776*21_150/776)
	return d.goOn(g, 0.88, 40, 0.5, 16, 0.6, 30, d.say(lognormal(g.rng, 40, 0.5), lognormal(g.rng, 16, 0.6), 0))
}

// completion sends the context of one of 40 repositories and a file of 6,000 tokens in the mean, 30 times in the mean. Each time
// the file has been edited somewhere, so that only what precedes is as before. All numbers are made up.
func completion(g *sessions) []*turn {
	const context, edited = 2048, 10
	repository, file := g.skewed(40), lognormal(g.rng, 6000, 0.6)
	d := g.dialogue(1+repository%8, uint64(repository)+1<<25, context)
	first := d.say(file, lognormal(g.rng, 30, 0.7), 0)
	for last := first; g.rng.Float64() < 1-1.0/30; last = last.next[0] {
		d.tokens = context + g.rng.IntN(file)
		d.blocks, d.own = slices.Clone(d.blocks[:d.tokens/familyBlock]), g.text()
		last.then(d.say(context+file+edited-d.tokens, lognormal(g.rng, 30, 0.7), 4*math.Exp(g.rng.NormFloat64())))
	}
	return []*turn{first}
}

// goOn adds further turns to the first one, each with probability more, of log-normal lengths; gap is the median.
func (d *dialogue) goOn(g *sessions, more, text, spread, output, varies, gap float64, first *turn) []*turn {
	for last := first; g.rng.Float64() < more && d.tokens < longestPrompt; last = last.next[0] {
		last.then(d.say(lognormal(g.rng, text, spread), lognormal(g.rng, output, varies), gap*math.Exp(g.rng.NormFloat64())))
	}
	return []*turn{first}
}

// agentGap is the time of a tool: 86 % below 1 s, 95 % below 10 s, 90 s at most.
func agentGap(rng *rand.Rand) float64 { return min(math.Exp(-4.40+4.08*rng.NormFloat64()), 90) }

// agent has 43 turns in the median (at most 200), a prefix of 12,000 tokens that all agents of its kind share, and in
// 44 % of the sessions a turn that starts one to three subagents and waits for them.
func agent(g *sessions) []*turn {
	const prefix = 12_288
	kind := g.skewed(6)
	shared := uint64(kind) + 1<<20
	d := g.dialogue(kind+1, shared, prefix)
	// Texts that tools return: a median of 440 tokens and a mean of 2,200.
	tool := func() int { return lognormal(g.rng, 2200, 1.8) }
	output := func() int { return lognormal(g.rng, 444, 1.17) }
	turns := min(max(int(43*math.Exp(0.8*g.rng.NormFloat64())), 1), 200)
	spawn := -1
	if g.rng.Float64() < 0.44 {
		spawn = 1 + g.rng.IntN(max(turns/2, 1))
	}
	first := d.say(lognormal(g.rng, 6000, 0.8), output(), 0)
	last := first
	for n := 1; n < turns && d.tokens < longestPrompt; n++ {
		t := d.say(min(tool(), 40_000), output(), agentGap(g.rng))
		if n == spawn {
			for range 1 + g.rng.IntN(3) {
				sub := g.dialogue(kind+1, shared+1<<19, prefix)
				end := sub.say(lognormal(g.rng, 2000, 0.8), output(), 0)
				last.then(end)
				for range 4 + g.rng.IntN(12) {
					next := sub.say(min(tool(), 40_000), output(), agentGap(g.rng))
					end.then(next)
					end = next
				}
				end.then(t)
			}
		} else {
			last.then(t)
		}
		last = t
	}
	return []*turn{first}
}

// retrieval puts four documents of 2,048 tokens, the more popular ones more often, in random order before a question.
func retrieval(g *sessions) []*turn {
	d := g.dialogue(1+g.rng.IntN(8), 1<<21, 512)
	for range 4 {
		d.blocks = chain(d.blocks, uint64(g.skewed(1000))+1<<22, 2048/familyBlock)
		d.tokens += 2048
	}
	return []*turn{d.say(lognormal(g.rng, 200, 0.8), lognormal(g.rng, 250, 0.5), 0)}
}

// tenant asks one question.
func tenant(g *sessions) []*turn {
	who := g.skewed(300)
	d := g.dialogue(who+1, uint64(who)+1<<23, 8192)
	return []*turn{d.say(lognormal(g.rng, 2000, 0.5), lognormal(g.rng, 300, 0.5), 0)}
}

// submission is 1 to 32 prompts at the same time.
func submission(g *sessions) []*turn {
	var wave []*turn
	who := 1 + g.rng.IntN(4)
	for range 1 + g.rng.IntN(32) {
		wave = append(wave, g.dialogue(who, 0, 0).say(lognormal(g.rng, 6000, 1), lognormal(g.rng, 250, 0.5), 0))
	}
	return wave
}

// rollout is a group of 64 requests with one of 200 problems.
func rollout(g *sessions) []*turn {
	var group []*turn
	problem := g.rng.IntN(200)
	source := uint64(problem)<<16 + uint64(g.at/30) + 1<<33
	for range 64 {
		d := g.dialogue(problem%4+1, source, 4096)
		group = append(group, d.say(1, lognormal(g.rng, 800, 0.7), 0))
	}
	return group
}

// isFamily returns an error that names all families if there is none of the name.
func isFamily(name string) error {
	names := make([]string, len(families))
	for i := range families {
		names[i] = families[i].name
	}
	if slices.Contains(names, name) {
		return nil
	}
	return fmt.Errorf("no family %q: there are %s", name, strings.Join(names, ", "))
}

// mixed draws a session of the other families, so that each has a similar part of the work.
func mixed(g *sessions) []*turn {
	switch n := g.rng.IntN(100); {
	case n < 1:
		return agent(g)
	case n < 6:
		return submission(g)
	case n < 36:
		return chat(g)
	default:
		return tenant(g)
	}
}

// cost is the seconds that an engine needs for a request of which hit tokens are cached, in steps with a full batch.
func (e *Engine) cost(r *Request, hit int) float64 {
	miss, prompt, output := float64(r.Prompt-hit), float64(r.Prompt), float64(r.Output)
	batch := max(min(float64(e.Seqs), float64(e.Capacity)/(prompt+output)), 1)
	return (e.PerToken+e.Base/float64(e.Budget))*miss + e.PerPair*miss*(float64(hit)+miss/2) +
		output*(e.PerDecode+e.Base/batch+e.PerResident*(prompt+output/2))
}

// demand is the mean cost of a session: engine seconds at the hit rate of one infinite cache, and its duration at half load.
type demand struct{ work, lasts float64 }

// demand counts 300 sessions after 300 that warm the cache.
func (f *family) demand(e *Engine) demand {
	const sample = 300
	g := &sessions{rng: rand.New(rand.NewPCG(0, 0x726174))}
	seen := map[uint64]bool{}
	var d demand
	var all func(t *turn)
	all = func(t *turn) {
		d.work += e.cost(&t.Request, min(enter(seen, t.Blocks)*familyBlock, t.Prompt-1)) / sample
		d.lasts += (t.gap + 2*e.Base*float64(t.Output)) / sample
		for _, next := range t.next {
			if next.before--; next.before == 0 {
				all(next)
			}
		}
	}
	for n := range 2 * sample {
		if n == sample {
			d = demand{}
		}
		for _, t := range f.session(g) {
			all(t)
		}
	}
	return demand{d.work / f.full, d.lasts}
}

// workload generates the family at a share of a fleet's capacity. It begins with the sessions that would be under way,
// each at a random turn.
func (f *family) workload(fleet *Fleet, d demand, part float64) Workload {
	rate := part * float64(fleet.Workers*fleet.Ranks) / d.work
	return Workload{Name: f.name, BlockSize: familyBlock,
		Generate: func(seed uint64) []Request {
			g := &sessions{rng: rand.New(rand.NewPCG(seed, 0x676175))}
			var out []Request
			for range int(rate * d.lasts) {
				t := f.session(g)[0]
				turns := []*turn{t}
				for len(t.next) > 0 {
					t = t.next[0]
					turns = append(turns, t)
				}
				if n := g.rng.IntN(len(turns)); n > 0 || f.closed {
					out = append(out, f.arrive(g, turns[n], g.rng.Float64()*f.seconds/8))
				}
			}
			if f.closed {
				return out
			}
			for g.at = g.rng.ExpFloat64() / rate; g.at < f.seconds; g.at += g.rng.ExpFloat64() / rate {
				for _, t := range f.session(g) {
					out = append(out, f.arrive(g, t, g.at))
				}
			}
			return out
		},
		Follow: func(done *Request, ended float64) []Request {
			g, next := done.turn.from, done.turn.next
			if len(next) == 0 && f.closed {
				next = f.session(g)
				next[0].before = 1
			}
			var out []Request
			for _, t := range next {
				if t.before--; t.before == 0 && ended+t.gap < f.seconds {
					out = append(out, f.arrive(g, t, ended+t.gap))
				}
			}
			return out
		}}
}

func (f *family) arrive(g *sessions, t *turn, at float64) Request {
	t.from = g
	r := t.Request
	r.At, r.turn, r.WarmUp = at, t, at < f.seconds/4
	return r
}

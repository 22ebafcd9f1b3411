package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
)

// shape is a generated workload of chains of depth blocks, distinct from their first block on. Each chain is held by
// `holders` ranks; blocks is the total number of holder-blocks.
type shape struct {
	depth, holders, ranks, blocks int
}

// lookupsOfAPhase is the number of lookups in each phase of a generated workload.
const lookupsOfAPhase = 20_000

// room is the number of words in a batch, which are valid until its end; most is the largest number of its operations.
const room, most = 1 << 21, 4096

// synthetic generates the operations of a shape: pairs of chain and rank are stored in random order, looked up in four
// ways, and removed in another random order, last block first as engines free chains.
type synthetic struct {
	shape
	rng    *rand.Rand
	chains int
	pairs  []uint32 // chain*holders + which of its holders
	arena  []uint64 // the words of the batch
	phase  int      // index into phaseOrder
	done   int      // operations of the phase so far
	batch  int      // operations of the batch so far
	queued []operation
}

var phaseOrder = []uint16{10, 11, 12, 13, 14, 15} // as in phaseNames

func newSynthetic(s shape) (*synthetic, error) {
	if s.depth < 2 || s.holders < 1 || s.ranks < s.holders || s.depth > room/4 || s.blocks < s.depth*s.holders || s.blocks/s.depth > 1<<30 {
		return nil, errors.New("want depth >= 2, 1 <= holders <= ranks, and at least one chain's blocks")
	}
	g := &synthetic{shape: s, rng: rand.New(rand.NewPCG(1, 2)), chains: s.blocks / s.depth / s.holders, arena: make([]uint64, 0, room)}
	g.pairs = make([]uint32, g.chains*s.holders)
	for i := range g.pairs {
		g.pairs[i] = uint32(i)
	}
	clear(g.arena[:room]) // allocated before the baseline, so not part of the measured memory
	g.begin()
	return g, nil
}

func (g *synthetic) about() header {
	n := uint64(len(g.pairs) * g.depth)
	return header{ranks: uint32(g.ranks), block: 16, stored: n, removed: n, looks: 4 * lookupsOfAPhase,
		name: fmt.Sprintf("depth %d, %d holders, %d ranks, %d first blocks", g.depth, g.holders, g.ranks, g.chains)}
}

func (g *synthetic) begin() {
	g.done = 0
	g.rng.Shuffle(len(g.pairs), func(i, j int) { g.pairs[i], g.pairs[j] = g.pairs[j], g.pairs[i] })
	g.queued = append(g.queued, operation{kind: opPhase, phase: phaseOrder[g.phase]})
}

func (g *synthetic) next() (op operation, ok bool, err error) {
	if len(g.queued) > 0 {
		op, g.queued = g.queued[0], g.queued[1:]
		return op, true, nil
	}
	if g.batch++; g.batch > most || len(g.arena)+2*g.depth > room {
		return g.barrier(), true, nil
	}
	phase := phaseOrder[g.phase]
	writes := phase == 10 || phase == 15
	if writes && g.done == len(g.pairs) || !writes && g.done == lookupsOfAPhase {
		if g.phase++; g.phase == len(phaseOrder) {
			return op, false, nil
		}
		g.begin()
		return g.barrier(), true, nil
	}
	g.done++
	if !writes {
		return g.lookup(phase), true, nil
	}
	pair := int(g.pairs[g.done-1])
	chain := pair / g.holders
	op = operation{kind: opStore, n: uint32(g.depth), rank: uint32((chain*31 + pair%g.holders) % g.ranks)}
	at := len(g.arena)
	if phase == 10 {
		g.contents(chain)
		for i := range g.depth {
			g.arena = append(g.arena, engineName(chain, i))
		}
	} else {
		op.kind = opRemove
		for i := g.depth - 1; i >= 0; i-- {
			g.arena = append(g.arena, engineName(chain, i))
		}
	}
	op.words = g.arena[at:]
	return op, true, nil
}

func (g *synthetic) barrier() operation {
	g.arena, g.batch = g.arena[:0], 0
	return operation{kind: opBarrier}
}

// lookup returns a lookup of any chain, of one of 16, of one that diverges half way, or of
// an unknown one, depending on the phase.
func (g *synthetic) lookup(phase uint16) operation {
	chain, matched := g.rng.IntN(g.chains), g.depth
	switch phase {
	case 12:
		chain = g.rng.IntN(min(16, g.chains))
	case 13:
		matched = g.depth / 2
	case 14:
		matched = 0
	}
	at := len(g.arena)
	g.contents(chain)
	words := g.arena[at:]
	if matched < g.depth {
		words[matched] ^= 1 << 63
	}
	op := operation{kind: opLookup, flags: flagExpect, n: uint32(g.depth), words: words, aux: uint32(matched), parent: uint64(matched * g.holders)}
	if matched > 0 {
		op.rank = uint32(g.holders)
	}
	return op
}

func (g *synthetic) contents(chain int) {
	for i := range g.depth {
		g.arena = append(g.arena, scramble(uint64(chain)<<20|uint64(i))>>1|1)
	}
}

// engineName is the engine hash of a block, the same on all ranks.
func engineName(chain, i int) uint64 { return scramble(uint64(chain)<<20|uint64(i)|1<<63) | 1 }

func scramble(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

package replay

import (
	"cmp"
	"container/heap"
	"slices"
)

// Engine is the model of one rank: the duration of a step and the bounds of its batch.
//
//	step = Base + PerToken*prefill + PerPair*sum(chunk*(start+chunk/2))
//	     + PerDecode*decoding + PerResident*resident tokens of decoding requests
type Engine struct {
	Name        string
	Base        float64 // seconds
	PerToken    float64
	PerPair     float64
	PerDecode   float64
	PerResident float64
	// PerHostToken is seconds per token read back from host memory, where the least recently used blocks beyond the
	// Device tokens of the KV cache are. If both are 0, reading is free.
	PerHostToken float64
	Device       int
	// KeepOutput caches answers for the next turn.
	KeepOutput bool
	// Budget is the tokens of a step, Seqs the running requests, Capacity the tokens of the KV cache.
	Budget, Seqs, Capacity int
}

// Dense70B stands for a dense 70B model in BF16 on four H100 as one rank, in round numbers near those of H100x4.
func Dense70B(capacity int) Engine {
	return Engine{Name: "D70", Base: 10e-3, PerToken: 50e-6, PerPair: 1.3e-9, PerDecode: 30e-6, PerResident: 35e-9, Budget: 8192, Seqs: 256, Capacity: capacity}
}

// H100x4 stands for a dense 70B model in BF16 on four H100 as one rank, by published
// measurements: 14.3 ms for one token, 54 us per token at 4,000.
func H100x4(capacity int) Engine {
	return Engine{Name: "H100", Base: 14.3e-3, PerToken: 48e-6, PerPair: 1.3e-9, PerDecode: 30e-6, PerResident: 35e-9, Budget: 8192, Seqs: 256, Capacity: capacity}
}

// ExpertRank stands for one rank of a DeepSeek-class model on eight H200.
func ExpertRank(capacity int) Engine {
	return Engine{Name: "DS", Base: 22e-3, PerToken: 160e-6, PerPair: 0.8e-9, PerDecode: 50e-6, PerResident: 24e-9, Budget: 8192, Seqs: 128, Capacity: capacity}
}

// Fleet is a number of Workers with Ranks each. Coupled ranks step together (attention data
// parallel): a step takes as long as on the slowest rank.
type Fleet struct {
	Workers, Ranks int
	Coupled        bool
	Engine         Engine
	// Prefill is the number of workers, the first ones, in the prefill pool of a
	// disaggregated fleet; the others decode. 0 if all workers do both.
	Prefill int
	// Slow is the number of workers that take twice as long. If SlowKnown, the router is told which.
	Slow      int
	SlowKnown bool
	Change    fleetChange
}

// block is a cached block of a rank. Blocks that no request uses are in the LRU list.
type block struct {
	name uint64
	pins int
	// used is the rank's count of uses when the block was last released.
	used         int
	older, newer *block
}

// job is a request on a rank.
type job struct {
	*record
	// hit is the tokens that were cached at its first admission, cached those at its last, and done the tokens that are
	// cached or computed.
	hit, cached, done int
	// prefillLeg ends with the first token; handover arrives with its KV cache.
	prefillLeg, handover bool
	// generated is the output tokens that were preempted: they are computed again with the prompt.
	generated int
	// pinned are the blocks that it holds, private the number of places that it has reserved.
	pinned  []*block
	private int
	// admitted and finish are the numbers of the rank's decode steps in which the request was admitted and ends.
	finish, admitted int
}

// rank is an engine's data-parallel rank.
type rank struct {
	engine  *Engine
	size    int
	places  int
	blocks  map[uint64]*block
	lru     block // ring: lru.newer is the oldest
	private int
	pinned  int
	hung    bool // it computes nothing any more
	waiting []*job
	prefill []*job
	decode  heapOf[*job]
	// steps counts decode steps. resident is the tokens of decoding requests; grown is how many of them were generated
	// since admission, without reserved places.
	steps, resident, grown int
	admissions, preempted  int
	// chunk has the tokens that the running step computes for each prefill job.
	chunk []int
	// uses counts releases of blocks, fetched is the tokens that the running step reads back from the host.
	uses, fetched int
	// stored and removed are the events of the running step, in order.
	events []change
	// shared, if not nil, is an infinite cache of the whole fleet in addition to the rank's own: blocks that any rank
	// has computed load at no cost, but need places like the rest.
	shared map[uint64]bool
}

// change is a block that a rank stored or removed.
type change struct {
	names  []uint64 // of the request, up to the block
	name   uint64
	stored bool
}

func (j *job) Before(o *job) bool { return j.finish < o.finish }

// goal is the tokens to be computed before the next output token.
func (j *job) goal() int { return j.Prompt + j.generated }

// grownOf is the tokens that a decoding job has generated since it was admitted, without the one
// that its last prefill chunk gave.
func (r *rank) grownOf(j *job) int { return j.Output - (j.finish - r.steps) - j.generated - 1 }

func newRank(e *Engine, blockSize int, shared map[uint64]bool) *rank {
	r := &rank{engine: e, size: blockSize, places: e.Capacity / blockSize, blocks: map[uint64]*block{}, shared: shared}
	r.lru.older, r.lru.newer = &r.lru, &r.lru
	return r
}

func (r *rank) busy() bool { return len(r.waiting)+len(r.prefill)+len(r.decode) > 0 }

func (r *rank) pin(b *block) {
	if b.pins == 0 && b.older != nil {
		b.older.newer, b.newer.older = b.newer, b.older
		b.older, b.newer = nil, nil
	}
	if b.pins == 0 {
		r.pinned++
	}
	b.pins++
}

func (r *rank) unpin(b *block) {
	if b.pins--; b.pins == 0 {
		r.pinned--
		r.uses++
		b.used = r.uses
		newest := r.lru.older
		b.older, b.newer = newest, &r.lru
		newest.newer, r.lru.older = b, b
	}
}

// admit starts the oldest waiting request if it fits, without evicting what runs.
func (r *rank) admit() bool {
	if len(r.waiting) == 0 || len(r.prefill)+len(r.decode) >= r.engine.Seqs {
		return false
	}
	j := r.waiting[0]
	if !r.reserve(j) {
		return false
	}
	if r.shared != nil {
		j.cached = max(j.cached, min(leading(r.shared, j.Blocks)*r.size, j.Prompt-1))
	}
	j.done = j.cached
	if j.handover {
		j.done = j.Prompt
	}
	r.waiting = r.waiting[1:]
	r.prefill = append(r.prefill, j)
	if j.admitted == 0 {
		j.hit = j.cached
	}
	r.admissions++
	j.admitted = r.admissions
	return true
}

// reserve pins the cached prefix and reserves places for the rest of the prompt, not for the
// answer, whose length engines do not know.
func (r *rank) reserve(j *job) bool {
	j.pinned = slices.Grow(j.pinned[:0], len(j.Blocks))
	fresh := 0
	for _, name := range j.Blocks {
		b := r.blocks[name]
		if b == nil {
			break
		}
		if b.pins == 0 {
			fresh++
		}
		j.pinned = append(j.pinned, b)
	}
	hits := len(j.pinned)
	need := ceilDiv(j.goal(), r.size) - hits
	if r.used()+fresh+need > r.places {
		j.pinned = j.pinned[:0]
		return false
	}
	for _, b := range j.pinned {
		// Blocks that were used since, and those in use, occupy the device first.
		if r.engine.Device > 0 && b.pins == 0 && (r.uses-b.used+r.pinned+r.private)*r.size > r.engine.Device {
			r.fetched += r.size
		}
		r.pin(b)
	}
	j.cached = min(hits*r.size, j.Prompt-1)
	j.private = need
	r.private += need
	r.evict()
	return true
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// used is the places that running requests take.
func (r *rank) used() int { return r.pinned + r.private + ceilDiv(r.grown, r.size) }

// preempt frees requests, the youngest first, until a token fits for each that decodes, and
// reports whether it freed one. They wait before all others, and are computed again.
func (r *rank) preempt() (any bool) {
	for len(r.prefill)+len(r.decode) > 1 && r.pinned+r.private+ceilDiv(r.grown+len(r.decode), r.size) > r.places {
		var j *job
		if n := len(r.prefill); n > 0 {
			j, r.prefill = r.prefill[n-1], r.prefill[:n-1]
		} else {
			j = slices.MaxFunc(r.decode, func(a, b *job) int { return cmp.Compare(a.admitted, b.admitted) })
			grown := r.grownOf(j)
			r.grown -= grown
			r.resident -= j.goal() + 1 + grown
			j.generated += grown + 1
			heap.Remove(&r.decode, slices.Index(r.decode, j))
		}
		r.free(j)
		j.done, j.handover = 0, false
		r.waiting = slices.Insert(r.waiting, 0, j)
		r.preempted++
		any = true
	}
	return any
}

func (r *rank) evict() {
	for len(r.blocks)+r.used()-r.pinned > r.places && r.lru.newer != &r.lru {
		b := r.lru.newer
		b.older.newer, b.newer.older = b.newer, b.older
		delete(r.blocks, b.name)
		r.events = append(r.events, change{name: b.name})
	}
}

// begin plans a step and returns its time; 0 if there is nothing to do.
func (r *rank) begin() float64 {
	r.chunk, r.fetched = r.chunk[:0], 0
	if !r.busy() || r.hung {
		return 0
	}
	full := r.preempt()
	r.evict()
	e := r.engine
	budget, tokens, pairs := e.Budget-len(r.decode), 0, 0.0
	for i := 0; budget > 0 && (i < len(r.prefill) || !full && r.admit()); i++ {
		j := r.prefill[i]
		n := min(budget, j.goal()-j.done)
		r.store(j, j.Blocks, min(j.done+n, j.Prompt))
		pairs += float64(n) * (float64(j.done) + float64(n)/2)
		budget -= n
		tokens += n
		r.chunk = append(r.chunk, n)
	}
	if len(r.chunk) == 0 && len(r.decode) == 0 {
		return 0
	}
	return e.Base + e.PerToken*float64(tokens) + e.PerPair*pairs + e.PerDecode*float64(len(r.decode)) + e.PerResident*float64(r.resident) +
		e.PerHostToken*float64(r.fetched)
}

// leading counts the leading blocks that are in a cache.
func leading(cache map[uint64]bool, blocks []uint64) int {
	n := 0
	for n < len(blocks) && cache[blocks[n]] {
		n++
	}
	return n
}

// enter adds blocks to a cache and counts the leading ones that it already held.
func enter(cache map[uint64]bool, blocks []uint64) int {
	n := leading(cache, blocks)
	for _, b := range blocks[n:] {
		cache[b] = true
	}
	return n
}

// store enters the blocks that a chunk, or the answer, completes.
func (r *rank) store(j *job, blocks []uint64, upTo int) {
	for i := len(j.pinned); i < len(blocks) && (i+1)*r.size <= upTo; i++ {
		name := blocks[i]
		if r.shared != nil {
			r.shared[name] = true
		}
		b := r.blocks[name]
		if b == nil {
			b = &block{name: name}
			r.blocks[name] = b
			r.private--
			j.private--
			r.events = append(r.events, change{names: blocks[:i+1], name: name, stored: true})
		}
		r.pin(b)
		j.pinned = append(j.pinned, b)
	}
}

// end finishes the step: first tokens and ended requests are reported in order.
func (r *rank) end(first, done func(*job)) {
	r.steps++
	r.resident += len(r.decode)
	r.grown += len(r.decode)
	for len(r.decode) > 0 && r.decode[0].finish <= r.steps {
		j := heap.Pop(&r.decode).(*job)
		r.resident -= j.Prompt + j.Output
		r.grown -= r.grownOf(j)
		if r.engine.KeepOutput && len(j.pinned) == len(j.Blocks) {
			more := ceilDiv(j.Prompt+j.Output, r.size) - ceilDiv(j.goal(), r.size)
			j.private, r.private = j.private+more, r.private+more
			r.store(j, slices.Concat(j.Blocks, j.Answer), j.Prompt+j.Output)
		}
		r.free(j)
		done(j)
	}
	n := 0
	for i, j := range r.prefill {
		if i < len(r.chunk) {
			j.done += r.chunk[i]
		}
		if j.done < j.goal() {
			r.prefill[n] = j
			n++
			continue
		}
		if j.generated == 0 {
			first(j)
		}
		if j.prefillLeg || j.Output <= j.generated+1 {
			r.free(j)
			done(j)
			continue
		}
		j.finish = r.steps + j.Output - j.generated - 1
		r.resident += j.goal() + 1
		heap.Push(&r.decode, j)
	}
	r.prefill = r.prefill[:n]
}

// free releases a request's blocks, the last block first: a chain is evicted from its end.
func (r *rank) free(j *job) {
	for _, b := range slices.Backward(j.pinned) {
		r.unpin(b)
	}
	r.private -= j.private
	j.pinned, j.private = nil, 0
}

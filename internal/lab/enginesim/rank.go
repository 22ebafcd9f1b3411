package enginesim

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"sync"
)

// sequence is one prompt with its answer on one rank.
type sequence struct {
	prompt    int      // tokens of the prompt
	ids       []uint32 // prompt, then generated tokens
	maxTokens int
	starter   bool // the answer begins a chat turn
	variant   int  // index among n answers
	id        identity
	loraID    int
	session   string

	// remote is the number of prompt tokens whose blocks come from a prefill engine.
	remote int
	// keep holds the blocks after the end until release is called: a prefill engine keeps them for the decode side.
	keep bool

	out chan token // one per generated token, then closed; large enough that the rank never waits

	// The rest is used only by the rank, under its lock.
	state    seqState
	computed int // tokens whose KV exists
	cached   int // of these, found in the cache at admission
	chunk    int // tokens of the current step
	blocks   []*block
	hashes   []digest // of the full blocks of ids, as far as known
	stored   int      // blocks entered in the cache
	reserve  int      // blocks that may still be allocated
}

type seqState int

const (
	seqWaiting seqState = iota
	seqRunning
	seqDone
)

// token is a generated token; the last one of a sequence has the finish reason.
type token struct {
	word
	finish string // "", "length" or "abort"
	cached int    // tokens of the prompt that were found in the cache
}

// rank is one data-parallel rank: a queue, a batch, a cache and an event stream.
type rank struct {
	eng   *Engine
	local int
	wake  chan struct{}

	mu      sync.Mutex
	pool    *pool
	waiting []*sequence
	running []*sequence
	events  []kvEvent
	removed []digest // SGLang and TensorRT-LLM: removals not yet in an event
	resets  int      // announcements to be sent with the next step that has work
	pub     *publisher
	trt     *trtEvents
	counts  RankStats // without the current state
}

func (r *rank) global() int { return r.eng.opts.StartRank + r.local }

func (r *rank) newPool() {
	n := r.eng.opts.Blocks
	if r.eng.opts.Engine == VLLM {
		n-- // the null block
	}
	r.pool = newPool(n, r.eng.opts.Engine != VLLM, r.evict)
}

func (r *rank) evict(d digest) {
	if r.eng.opts.Engine == VLLM {
		r.events = append(r.events, kvEvent{kind: blockRemoved, hashes: []digest{d}})
		return
	}
	r.removed = append(r.removed, d)
}

// flushRemoved puts collected removals in one event.
func (r *rank) flushRemoved() {
	if len(r.removed) > 0 {
		r.events = append(r.events, kvEvent{kind: blockRemoved, hashes: r.removed})
		r.removed = nil
	}
}

// poke wakes the step loop.
func (r *rank) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// submit queues sequences in one step, so that the parts of one request are admitted
// together. A sequence that was aborted before has ended and is not queued.
func (r *rank) submit(seqs ...*sequence) {
	r.mu.Lock()
	for _, s := range seqs {
		if s.state != seqDone {
			r.waiting = append(r.waiting, s)
		}
	}
	r.counts.Requests += len(seqs)
	r.mu.Unlock()
	r.poke()
}

// abort ends a sequence whose client has disconnected; it has no effect on one that has ended.
func (r *rank) abort(s *sequence) {
	r.mu.Lock()
	if s.state != seqDone {
		r.counts.Aborted++
		s.keep = false
		r.finish(s, "abort")
	}
	r.mu.Unlock()
	r.poke()
}

// release releases the blocks of a sequence that ended with keep set.
func (r *rank) release(s *sequence) {
	r.mu.Lock()
	blocks := s.blocks
	s.blocks = nil
	r.pool.release(blocks)
	r.mu.Unlock()
	r.poke()
}

func (r *rank) depth() (waiting, running int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waiting), len(r.running)
}

// schedule plans one step: decodes, then running prefills, then admissions in order of arrival. It reports whether
// there is anything to compute.
func (r *rank) schedule() (l load, work bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	budget := r.eng.opts.Time.Budget
	if r.resets > 0 && len(r.waiting)+len(r.running) > 0 {
		for range r.resets {
			r.events = append(r.events, kvEvent{kind: allCleared})
		}
		r.resets = 0
	}
	for _, decoding := range [2]bool{true, false} {
		for _, s := range r.running {
			if (s.computed >= s.prompt) == decoding {
				budget -= r.plan(s, budget, &l)
			}
		}
	}
	for len(r.waiting) > 0 && budget > 0 && len(r.running) < r.eng.opts.Time.MaxSeqs {
		s := r.waiting[0]
		if !r.admit(s) {
			break
		}
		r.waiting = r.waiting[1:]
		r.running = append(r.running, s)
		budget -= r.plan(s, budget, &l)
	}
	work = len(r.running) > 0
	if work {
		r.counts.Steps++
	}
	return l, work
}

// plan gives a sequence its tokens of this step, the blocks for them, and enters the blocks that they fill.
func (r *rank) plan(s *sequence, budget int, l *load) int {
	s.chunk = min(len(s.ids)-s.computed, max(budget, 0))
	if s.chunk == 0 {
		return 0
	}
	if s.computed >= s.prompt {
		l.decoding++
		l.resident += s.computed
	} else {
		l.prefill += s.chunk
		l.quadratic += float64(s.chunk) * (float64(s.computed) + float64(s.chunk)/2)
	}
	end := s.computed + s.chunk
	r.grow(s, end)
	if r.eng.opts.Engine == VLLM {
		r.store(s, end)
	}
	return s.chunk
}

func (r *rank) grow(s *sequence, tokens int) {
	for len(s.blocks)*r.eng.opts.BlockSize < tokens {
		s.blocks = append(s.blocks, r.pool.allocate())
		s.reserve--
	}
}

// hashUpTo chains the hashes of the first n full blocks.
func (r *rank) hashUpTo(s *sequence, n int) {
	size := r.eng.opts.BlockSize
	for len(s.hashes) < n {
		i := len(s.hashes)
		var parent digest
		if i > 0 {
			parent = s.hashes[i-1]
		}
		s.hashes = append(s.hashes, parent.next(s.ids[i*size:(i+1)*size], s.id))
	}
}

func (r *rank) key(s *sequence, i int) cacheKey {
	return cacheKey{s.hashes[i], s.id.extra}
}

// admit matches the prompt against the cache and takes references, if all blocks that the
// sequence may need are available.
func (r *rank) admit(s *sequence) bool {
	size := r.eng.opts.BlockSize
	need := (s.prompt + s.maxTokens - 2 + size) / size
	// The block with the last prompt token is always computed, because its output is needed for sampling.
	full := (s.prompt - 1) / size
	r.hashUpTo(s, full)
	var hit []*block
	fromFree := 0
	for i := range full {
		b := r.pool.lookup(r.key(s, i))
		if b == nil {
			break
		}
		if b.refs == 0 {
			fromFree++
		}
		hit = append(hit, b)
	}
	promised := 0
	for _, o := range r.running {
		promised += max(o.reserve, 0)
	}
	if r.pool.free-fromFree-promised < need-len(hit) {
		return false
	}
	for _, b := range hit {
		r.pool.touch(b)
	}
	s.blocks = hit
	s.state = seqRunning
	s.stored = len(hit)
	s.cached = len(hit) * size
	s.computed = s.cached
	s.reserve = need - len(hit)
	r.counts.PromptTokens += s.prompt
	r.counts.CachedTokens += s.cached
	if s.remote > s.cached {
		r.receive(s)
	}
	return true
}

// receive takes over blocks that a prefill engine computed: all of them are stored
// immediately, and the last prompt token is computed again here.
func (r *rank) receive(s *sequence) {
	r.counts.TransferTokens += s.remote - s.cached
	r.grow(s, s.remote)
	r.store(s, s.remote)
	s.computed = min(s.remote, s.prompt-1)
}

// store enters the blocks filled by the first `tokens` ids, with one event for the new ones.
func (r *rank) store(s *sequence, tokens int) {
	full := tokens / r.eng.opts.BlockSize
	if full <= s.stored {
		return
	}
	r.hashUpTo(s, full)
	from := s.stored
	first := -1
	for i := from; i < full; i++ {
		kept, fresh := r.pool.store(s.blocks[i], r.key(s, i))
		s.blocks[i] = kept
		switch {
		case fresh && first < 0:
			first = i
		case !fresh && first >= 0:
			r.emitStored(s, first, i)
			first = -1
		}
	}
	s.stored = full
	if first >= 0 {
		r.emitStored(s, first, full)
	}
}

// emitStored announces blocks [from, to).
func (r *rank) emitStored(s *sequence, from, to int) {
	r.flushRemoved()
	size := r.eng.opts.BlockSize
	ev := kvEvent{kind: blockStored, from: from, id: s.id, loraID: s.loraID, session: s.session,
		hashes: slices.Clone(s.hashes[from:to]), tokens: slices.Clone(s.ids[from*size : to*size])}
	if from > 0 {
		parent := s.hashes[from-1]
		ev.parent = &parent
	}
	r.events = append(r.events, ev)
}

// advance ends a step: it sends events first, then tokens.
func (r *rank) advance() {
	r.mu.Lock()
	defer r.mu.Unlock()
	type result struct {
		s *sequence
		t token
	}
	var results []result
	for _, s := range slices.Clone(r.running) {
		if s.chunk == 0 {
			continue
		}
		s.computed += s.chunk
		s.chunk = 0
		if s.computed < len(s.ids) {
			continue
		}
		if r.eng.opts.Engine != VLLM && len(s.ids) == s.prompt {
			r.store(s, s.prompt)
		}
		t := token{word: r.sample(s), cached: s.cached}
		s.ids = append(s.ids, t.id)
		r.counts.GeneratedTokens++
		if len(s.ids)-s.prompt >= s.maxTokens {
			t.finish = "length"
			if r.eng.opts.Engine != VLLM {
				r.store(s, s.computed)
			}
		}
		results = append(results, result{s, t})
	}
	r.flushRemoved()
	r.publish()
	for _, x := range results {
		x.s.out <- x.t
		if x.t.finish != "" {
			r.counts.Finished++
			r.finish(x.s, "")
		}
	}
}

// publish sends the collected events. It requires the lock, so that batches are sent in order.
func (r *rank) publish() {
	if len(r.events) == 0 {
		return
	}
	events := r.events
	r.events = nil
	if r.trt != nil {
		r.trt.add(events, r.local)
	}
	r.pub.publish(events)
}

// finish removes a sequence from the batch or the queue. It requires the lock.
func (r *rank) finish(s *sequence, reason string) {
	if s.state == seqDone {
		return
	}
	s.state = seqDone
	r.running, r.waiting = without(r.running, s), without(r.waiting, s)
	if !s.keep {
		r.pool.release(s.blocks)
		s.blocks = nil
	}
	if reason != "" {
		s.out <- token{finish: reason}
	}
	close(s.out)
}

// sample returns a word that depends on the prompt, the answer's index and the position:
// the same request always gets the same answer.
func (r *rank) sample(s *sequence) word {
	tok := r.eng.opts.Tokenizer
	n := len(s.ids) - s.prompt
	b := make([]byte, 0, 64)
	tail := s.ids[max(0, s.prompt-8):s.prompt]
	for _, id := range tail {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(s.prompt)<<32|uint64(n)<<8|uint64(s.variant))
	sum := sha256.Sum256(append(b, s.id.lora...))
	pick := binary.LittleEndian.Uint64(sum[:])
	if n == 0 && s.starter {
		return tok.starters[pick%uint64(len(tok.starters))]
	}
	return tok.words[pick%uint64(len(tok.words))]
}

// reset clears the cache if nothing runs (or force is set, then running requests start
// over). vLLM announces it with the next step that has work, SGLang immediately.
func (r *rank) reset(force bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.running) > 0 {
		if !force {
			return false
		}
		for _, s := range slices.Clone(r.running) {
			r.preempt(s)
		}
	}
	if r.eng.opts.Engine == TRTLLM { // it has no event for clearing the cache
		for key := range r.pool.cached {
			r.removed = append(r.removed, key.hash)
		}
		r.flushRemoved()
	}
	r.pool.clear()
	if r.eng.opts.Engine == VLLM {
		r.resets++
		return true
	}
	r.removed = nil
	if r.eng.opts.Engine == SGLang {
		r.events = append(r.events, kvEvent{kind: allCleared})
	}
	r.publish()
	return true
}

// preempt puts a running sequence back in the queue; its generated tokens become part of the prompt.
func (r *rank) preempt(s *sequence) {
	r.running = without(r.running, s)
	r.pool.release(s.blocks)
	s.blocks, s.hashes, s.stored, s.computed, s.chunk = nil, nil, 0, 0, 0
	s.state, s.remote = seqWaiting, 0
	r.waiting = slices.Insert(r.waiting, 0, s)
}

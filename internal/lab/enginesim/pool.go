package enginesim

import "slices"

// block is one page of the cache. Invariant: refs == 0 if and only if the block is in the pool's free list.
type block struct {
	id         int
	refs       int
	cached     bool
	key        cacheKey
	prev, next *block
}

// cacheKey is the key of a block: its hash, and SGLang's extra_key, which separates blocks without being part of the hash.
type cacheKey struct {
	hash  digest
	extra string
}

// pool is the paged cache of one rank: reference counts, a free list in order of eviction, and a table from hash to the
// blocks that hold it. It is not safe for concurrent use.
type pool struct {
	blocks     []*block
	head, tail block // sentinels of the free list; the front is evicted first
	free       int
	cached     map[cacheKey][]*block // in order of storing; never an empty list
	unique     bool                  // a radix tree: one block per hash (SGLang, TensorRT-LLM)
	evicted    func(digest)
	evictions  int
}

func newPool(n int, unique bool, evicted func(digest)) *pool {
	p := &pool{cached: map[cacheKey][]*block{}, unique: unique, evicted: evicted}
	p.head.next, p.tail.prev = &p.tail, &p.head
	for i := range n {
		b := &block{id: i}
		p.blocks = append(p.blocks, b)
		p.pushFree(b)
	}
	return p
}

func (p *pool) pushFree(b *block) {
	b.prev, b.next = p.tail.prev, &p.tail
	b.prev.next, p.tail.prev = b, b
	p.free++
}

func (p *pool) takeFree(b *block) {
	b.prev.next, b.next.prev = b.next, b.prev
	b.prev, b.next = nil, nil
	p.free--
}

func (p *pool) lookup(k cacheKey) *block {
	if list := p.cached[k]; len(list) > 0 {
		return list[0]
	}
	return nil
}

// touch adds a reference to a cached block.
func (p *pool) touch(b *block) {
	if b.refs == 0 {
		p.takeFree(b)
	}
	b.refs++
}

// allocate takes the least recently freed block and drops its hash. The caller has checked that free > 0.
func (p *pool) allocate() *block {
	b := p.head.next
	p.takeFree(b)
	if b.cached {
		p.forget(b)
		p.evictions++
		p.evicted(b.key.hash)
	}
	b.refs = 1
	return b
}

// release drops the references of a request, its last block first, so that a chain is evicted from its end.
func (p *pool) release(blocks []*block) {
	for _, b := range slices.Backward(blocks) {
		b.refs--
		if b.refs > 0 {
			continue
		}
		p.pushFree(b)
	}
}

// store enters a full block. In a unique pool it returns the block that already holds the hash, with the caller's
// reference moved to it; fresh reports whether anything new was entered.
func (p *pool) store(b *block, k cacheKey) (kept *block, fresh bool) {
	if b.cached {
		return b, false
	}
	if p.unique {
		if old := p.lookup(k); old != nil {
			p.touch(old)
			p.release([]*block{b})
			return old, false
		}
	}
	b.cached, b.key = true, k
	p.cached[k] = append(p.cached[k], b)
	return b, true
}

func (p *pool) forget(b *block) {
	list := without(p.cached[b.key], b)
	if len(list) == 0 {
		delete(p.cached, b.key)
	} else {
		p.cached[b.key] = list
	}
	b.cached = false
}

// clear forgets every hash; blocks in use stay with their requests.
func (p *pool) clear() {
	for _, b := range p.blocks {
		b.cached = false
	}
	p.cached = map[cacheKey][]*block{}
}

// without returns a list without one of its elements.
func without[T comparable](list []T, one T) []T {
	return slices.DeleteFunc(list, func(o T) bool { return o == one })
}

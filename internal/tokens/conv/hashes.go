package conv

import "slices"

// hashes are lists of chained block hashes of ids. Each hash depends on the ids up to the end of
// its block only, so a list is valid for all ids that begin alike.
type hashes []hashList

type hashList struct {
	seed  uint64
	block int // ids per hash
	list  []uint64
}

// maxLists bounds the lists of one entry or result.
const maxLists = 8

func (h hashes) of(seed uint64, block int) []uint64 {
	for i := range h {
		if h[i].seed == seed && h[i].block == block {
			return h[i].list
		}
	}
	return nil
}

// with returns h with a longer list, whose first elements equal those that are stored.
func (h hashes) with(seed uint64, block int, list []uint64) hashes {
	for i := range h {
		if l := &h[i]; l.seed == seed && l.block == block {
			if n := len(l.list); n < len(list) {
				l.list = append(l.list, list[n:]...)
			}
			return h
		}
	}
	if len(h) == maxLists { // evict the oldest: clients choose seeds by salt, and must not fill the lists permanently
		h = slices.Delete(h, 0, 1)
	}
	return append(h, hashList{seed, block, append(make([]uint64, 0, len(list)*9/8+16), list...)})
}

// upTo returns a copy of the hashes of the first ids, with room for the hashes of all ids.
func (h hashes) upTo(ids, all int) (out hashes) {
	for _, l := range h {
		if n := min(len(l.list), ids/l.block); n > 0 {
			out = append(out, hashList{l.seed, l.block, append(make([]uint64, 0, all/l.block*9/8+16), l.list[:n]...)})
		}
	}
	return out
}

func (h hashes) memory() (n int) {
	for _, l := range h {
		n += 8*cap(l.list) + 64
	}
	return n
}

// AppendHashes appends the hashes of the whole blocks of ids, which must be those of t's last result. It computes the
// hashes that are not cached with hash, which chains the blocks of ids after parent, and caches them. seed stands for
// everything else that the hashes depend on, and block, the number of ids per block, is positive.
func AppendHashes[H ~uint64](t *Turn, dst []H, seed H, ids []uint32, block int, hash func(dst []H, parent H, ids []uint32, block int) []H) []H {
	n := len(ids) / block
	stored, all := t.hashes(uint64(seed), block)
	base := len(dst)
	stored = stored[:min(len(stored), n)]
	dst = slices.Grow(dst, n)[:base+len(stored)]
	for i, h := range stored {
		dst[base+i] = H(h)
	}
	known, parent := len(dst)-base, seed
	if all {
		return dst
	}
	if known > 0 {
		parent = dst[len(dst)-1]
	}
	dst = hash(dst, parent, ids[known*block:], block)
	if t.result != nil || t.prompt != nil {
		t.digests = t.digests[:0]
		for _, h := range dst[base:] {
			t.digests = append(t.digests, uint64(h))
		}
		t.setHashes(uint64(seed), block, t.digests)
	}
	return dst
}

// hashes returns the cached hashes of the first blocks of the turn's ids; all reports that none is missing.
func (t *Turn) hashes(seed uint64, block int) (list []uint64, all bool) {
	if t.result == nil && t.prompt == nil {
		return nil, false
	}
	t.cache.mu.Lock()
	defer t.cache.mu.Unlock()
	if t.result != nil {
		if list = t.result.hashes.of(seed, block); list != nil {
			return list, true
		}
	}
	if t.prompt != nil {
		list = t.prompt.hashes.of(seed, block)
		list = list[:min(len(list), t.kept/block)]
	}
	return list, false
}

func (t *Turn) setHashes(seed uint64, block int, list []uint64) {
	t.cache.mu.Lock()
	defer t.cache.mu.Unlock()
	if t.result != nil && t.whole.place != nil {
		t.result.hashes = t.result.hashes.with(seed, block, list)
		t.cache.resize(t.whole)
	}
	if t.prompt != nil && t.prompt.place != nil {
		t.prompt.hashes = t.prompt.hashes.with(seed, block, list[:min(len(list), t.kept/block)])
		t.cache.resize(t.prompt)
	}
}

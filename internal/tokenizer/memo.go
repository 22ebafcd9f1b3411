package tokenizer

import "sync"

// memo remembers the ids of stretches of text between safe cuts, so that text
// seen before costs a hash and a copy. It is shared by all workers, in shards
// of a fixed size that are made when they are first needed.
type memo struct {
	shards [memoShards]memoShard
}

// memoShard keeps a stretch when it comes for the second time: most text never does, and to
// copy all of it cost a fifth of the time that new text takes.
type memoShard struct {
	mu    sync.Mutex
	store *store
	once  *[memoOnce]uint32 // upper halves of the hashes of what came, by their lower bits
	_     [40]byte          // one shard per cache line
}

const (
	memoShards = 16
	// memoMinimum is the length from which a stretch is worth a lookup.
	memoMinimum = 48
	memoSlots   = 1 << 12
	memoText    = 1 << 19
	memoIDs     = 1 << 17
	memoOnce    = 1 << 11
)

// paragraphs appends the ids of pre-tokenized text through the memo.
func (w *worker) paragraphs(dst []uint32, s string) []uint32 {
	cuts := w.t.cuts
	if cuts == nil || len(s) < memoMinimum {
		return w.words(dst, s, 0, len(s))
	}
	text := bytesOf(s)
	for at := 0; at < len(s); {
		for limit := min(at+lookEvery, len(s)); at < limit; {
			end := cuts.next(text, s, at)
			if end-at < memoMinimum {
				return w.words(dst, s, at, end)
			}
			dst = w.stretchOf(dst, s, at, end)
			at = end
		}
		if at < len(s) && w.watch.look() {
			break
		}
	}
	return dst
}

// stretchOf appends the ids of s[at:end], which lies between two cuts.
func (w *worker) stretchOf(dst []uint32, s string, at, end int) []uint32 {
	key := bytesOf(s)[at:end]
	h := hashBytes(key)
	shard := &w.t.memo.shards[h>>60]
	dst, ok, again := shard.get(dst, h, key)
	if ok {
		return dst
	}
	n := len(dst)
	dst = w.words(dst, s, at, end)
	if again && !w.watch.stopped {
		shard.mu.Lock()
		if shard.store == nil {
			shard.store = newStore(memoSlots, memoText, memoIDs)
		}
		shard.store.put(h, key, dst[n:])
		shard.mu.Unlock()
	}
	return dst
}

// get appends the ids of a stretch if they are kept; else it tells whether it came before.
func (m *memoShard) get(dst []uint32, h uint64, key []byte) (_ []uint32, ok, again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.store != nil {
		if ids, ok := m.store.get(h, key); ok {
			return append(dst, ids...), true, false
		}
	}
	if m.once == nil {
		m.once = new([memoOnce]uint32)
	}
	once := &m.once[h%memoOnce]
	again = *once == uint32(h>>32)
	*once = uint32(h >> 32)
	return dst, false, again
}

// reset forgets everything.
func (m *memo) reset() {
	for i := range m.shards {
		s := &m.shards[i]
		s.mu.Lock()
		if s.store != nil {
			s.store.reset()
		}
		if s.once != nil {
			clear(s.once[:])
		}
		s.mu.Unlock()
	}
}

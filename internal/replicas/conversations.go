package replicas

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// version orders the bindings of a conversation. It is a total order, so that all replicas
// that have seen the same bindings keep the same one.
type version struct {
	generation uint32
	time       uint64
	origin     string
}

// before reports whether v wins over o: the later generation, then the earlier time, then the smaller origin.
func (v version) before(o version) bool {
	return cmp.Or(cmp.Compare(o.generation, v.generation), cmp.Compare(v.time, o.time), cmp.Compare(v.origin, o.origin)) < 0
}

// scanAtATime bounds the conversations that are read without releasing the lock.
const scanAtATime = 4096

// binding is one conversation.
type binding struct {
	key    routing.Key
	tail   uint64 // tail and turns are those of routing.Sharer.Used
	turns  uint32
	target kvindex.Target
	// later is the encoded fields that a newer version of Kvlane added. They are forwarded unchanged.
	later string
	version
	// used is this replica's logical time of the last use.
	used         uint64
	newer, older uint32
	// missing reports that the router does not know the target yet.
	missing bool
	// saved is when it was last taken for storing, 0 for never. queued reports that it waits to be stored.
	saved  time.Duration
	queued bool
}

// bindings is an LRU table of the conversations of one leg, as all replicas merge them.
type bindings struct {
	max   int
	byKey map[routing.Key]uint32
	// slab[0] is not a conversation: it closes the ring, between the newest (its older) and the oldest (its newer).
	slab    []binding
	missing int
}

func newBindings(limit int) *bindings {
	return &bindings{max: limit, byKey: map[routing.Key]uint32{}, slab: make([]binding, 1)}
}

func (t *bindings) find(k routing.Key) *binding {
	if i, ok := t.byKey[k]; ok {
		return &t.slab[i]
	}
	return nil
}

// put adds a conversation that is not in the table; the least recently used one makes room for it.
func (t *bindings) put(b binding) *binding {
	var i uint32
	if len(t.byKey) >= t.max {
		i = t.slab[0].newer
		t.setMissing(&t.slab[i], false)
		t.unlink(i)
		delete(t.byKey, t.slab[i].key)
	} else {
		i = uint32(len(t.slab))
		t.slab = append(t.slab, binding{})
	}
	b.missing, b.queued, b.saved = false, false, 0
	t.slab[i] = b
	t.byKey[b.key] = i
	t.link(i)
	return &t.slab[i]
}

// touch makes a conversation the most recently used one.
func (t *bindings) touch(b *binding, used uint64) {
	b.used = used
	if i := t.byKey[b.key]; i != t.slab[0].older {
		t.unlink(i)
		t.link(i)
	}
}

func (t *bindings) setMissing(b *binding, missing bool) {
	if b.missing != missing {
		b.missing = missing
		if t.missing--; missing {
			t.missing += 2
		}
	}
}

func (t *bindings) link(i uint32) {
	b := &t.slab[i]
	b.newer, b.older = 0, t.slab[0].older
	t.slab[b.older].newer, t.slab[0].older = i, i
}

func (t *bindings) unlink(i uint32) {
	b := &t.slab[i]
	t.slab[b.newer].older, t.slab[b.older].newer = b.older, b.newer
}

// use is when the conversation at a place of the table was used last.
type use struct {
	time uint64
	at   uint32
}

// usedBetween returns the conversations last used in (since, until], the least recently used first. locked runs a function
// under the lock that guards the table; usedBetween calls it once for each scanAtATime conversations.
func (t *bindings) usedBetween(since, until uint64, locked func(func())) (list []use) {
	for at, n := 0, 1; at < n; at += scanAtATime {
		locked(func() {
			n = len(t.slab)
			for i := at; i < min(at+scanAtATime, n); i++ {
				if used := t.slab[i].used; used > since && used <= until {
					list = append(list, use{used, uint32(i)})
				}
			}
		})
	}
	slices.SortFunc(list, func(a, b use) int { return cmp.Compare(a.time, b.time) })
	return list
}

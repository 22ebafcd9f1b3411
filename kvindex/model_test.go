package kvindex

import "fmt"

// model is a naive second implementation: every target's holdings by engine hash in maps, every
// lookup answered by walking the prompt.
type model struct {
	block   int
	targets map[Slot]*modelTarget
	keys    map[string]int // identity of a chain of engine blocks
}

type modelTarget struct {
	model string
	block int
	key   map[EngineHash]int               // the block that a held hash stands for
	units map[EngineHash]map[modelUnit]int // the number of holdings
	byKey map[int]map[EngineHash]bool
}

type modelUnit struct {
	hash  EngineHash
	group int32
	tier  Tier
}

func newModel(block int) *model {
	return &model{block: block, targets: map[Slot]*modelTarget{}, keys: map[string]int{}}
}

func (m *model) add(s Slot, name string, block int) {
	t := &modelTarget{model: name, block: block}
	t.clear()
	m.targets[s] = t
}

func (t *modelTarget) clear() {
	t.key, t.units, t.byKey = map[EngineHash]int{}, map[EngineHash]map[modelUnit]int{}, map[int]map[EngineHash]bool{}
}

func (m *model) root(name, adapter, salt string) int {
	return m.intern(fmt.Sprintf("root %q %q %q", name, adapter, salt))
}

func (m *model) child(parent int, tokens []uint32, extra uint64) int {
	return m.intern(fmt.Sprint(parent, tokens, extra))
}

func (m *model) intern(s string) int {
	k, ok := m.keys[s]
	if !ok {
		k = len(m.keys) + 1
		m.keys[s] = k
	}
	return k
}

func (t *modelTarget) held(key int, tier Tier) bool {
	for h := range t.byKey[key] {
		for u, n := range t.units[h] {
			if n > 0 && u.tier == tier {
				return true
			}
		}
	}
	return false
}

func (t *modelTarget) known(h EngineHash) bool { _, ok := t.key[h]; return ok }

func (m *model) apply(s Slot, e *Event) error {
	t := m.targets[s]
	switch e.Kind {
	case Cleared:
		t.clear()
	case Removed:
		for _, h := range e.Hashes {
			u := modelUnit{h, e.Group, e.Tier}
			units := t.units[h]
			if units[u] == 0 {
				continue
			}
			if units[u]--; units[u] == 0 {
				delete(units, u)
			}
			if len(units) == 0 {
				delete(t.units, h)
				delete(t.byKey[t.key[h]], h)
				delete(t.key, h)
			}
		}
	case Stored:
		if len(e.Tokens) == 0 {
			var err error
			for _, h := range e.Hashes {
				if t.known(h) {
					t.units[h][modelUnit{h, e.Group, e.Tier}]++
				} else {
					err = ErrPlaceholder
				}
			}
			return err
		}
		if len(e.Tokens) != len(e.Hashes)*t.block {
			return ErrTokens
		}
		key := m.root(t.model, e.Adapter, e.Salt)
		if e.HasParent {
			if !t.known(e.Parent) {
				return ErrUnknownParent
			}
			key = t.key[e.Parent]
		}
		for i, h := range e.Hashes {
			extra := uint64(0)
			if e.Extra != nil {
				extra = e.Extra[i]
			}
			key = m.child(key, e.Tokens[i*t.block:(i+1)*t.block], extra)
			if t.known(h) && t.key[h] != key {
				return ErrHashConflict
			}
			t.key[h] = key
			if t.byKey[key] == nil {
				t.byKey[key] = map[EngineHash]bool{}
			}
			t.byKey[key][h] = true
			if t.units[h] == nil {
				t.units[h] = map[modelUnit]int{}
			}
			t.units[h][modelUnit{h, e.Group, e.Tier}]++
		}
	}
	return nil
}

// match is the expected result of Index.Match of a prompt for a target: index blocks per tier,
// where each tier counts how far the prefix grows.
func (m *model) match(s Slot, adapter, salt string, tokens []uint32, extra []uint64) (out [NumTiers]uint32) {
	t := m.targets[s]
	var per []([NumTiers]bool) // by engine block
	key := m.root(t.model, adapter, salt)
	for i := 0; (i+1)*t.block <= len(tokens); i++ {
		x := uint64(0)
		if extra != nil {
			x = extra[i]
		}
		key = m.child(key, tokens[i*t.block:(i+1)*t.block], x)
		var on [NumTiers]bool
		for tier := range Tier(NumTiers) {
			on[tier] = t.held(key, tier) || tier > 0 && on[tier-1] && t.block >= m.block
		}
		per = append(per, on)
	}
	before := uint32(0)
	for tier := range out {
		n := uint32(0)
		for {
			// engine blocks of index block n
			from, to := int(n)*m.block/t.block, (int(n)*m.block+m.block-1)/t.block
			if to >= len(per) {
				break
			}
			ok := false
			for k := 0; k <= tier && !ok; k++ { // all its pages on one of the tiers
				ok = true
				for b := from; b <= to; b++ {
					ok = ok && per[b][k]
				}
			}
			if !ok {
				break
			}
			n++
		}
		if t.block > m.block {
			n -= n % uint32(t.block/m.block)
		}
		out[tier] = n - before
		before = n
	}
	return out
}

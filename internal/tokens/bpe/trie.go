package bpe

import (
	"bytes"
	"slices"
)

// byteTrie is a double-array trie of the tokens of a Unigram model, with their scores: a step reads one unit.
//
// Invariant: the child of a node for byte b is the unit at base^b if its parent is the node. Bases are below len(units), a
// multiple of 256, so base^b is, too. Of the first 256 units, where the children of leaves would be, only 0 is a node: the root.
type byteTrie struct {
	units []trieUnit
	hole  int // no unit before it is free
}

// trieUnit is a node: the place of its children, its parent (noNode if the unit is free), and the score and the id+1 of its token.
type trieUnit struct {
	base, parent, token uint32
	score               float64
}

const noNode, maxUnits = 1<<32 - 1, 1 << 25

// newByteTrie returns the trie of the tokens of v.
func newByteTrie(v *vocab, scores []float64) (*byteTrie, error) {
	ids := make([]uint32, len(v.has))
	for id := range ids {
		ids[id] = uint32(id) // one without text ends at the root, whose token is not read
	}
	slices.SortFunc(ids, func(a, b uint32) int { return bytes.Compare(v.bytes(a), v.bytes(b)) })
	t := &byteTrie{hole: 256}
	t.grow()
	t.add(v, scores, ids, 0, 0)
	if len(t.units) > maxUnits {
		return nil, unsupported("a vocabulary whose trie has more than %d nodes", maxUnits)
	}
	return t, nil
}

// add completes a node whose tokens, in order, share their first depth bytes.
func (t *byteTrie) add(v *vocab, scores []float64, ids []uint32, node uint32, depth int) {
	for ; len(ids) > 0 && len(v.bytes(ids[0])) == depth; ids = ids[1:] {
		t.units[node].token, t.units[node].score = ids[0]+1, scores[ids[0]]
	}
	var room [16]byte
	labels := room[:0]
	for _, id := range ids {
		if b := v.bytes(id)[depth]; len(labels) == 0 || b != labels[len(labels)-1] {
			labels = append(labels, b)
		}
	}
	if len(labels) == 0 || len(t.units) > maxUnits {
		return
	}
	base := t.place(labels)
	t.units[node].base = base
	for _, b := range labels {
		t.units[base^uint32(b)].parent = node
	}
	for _, b := range labels {
		to, _ := slices.BinarySearchFunc(ids, int(b)+1, func(id uint32, next int) int { return int(v.bytes(id)[depth]) - next })
		t.add(v, scores, ids[:to], base^uint32(b), depth+1)
		ids = ids[to:]
	}
}

// place returns a base for which the units of all labels are free. One label takes the first free unit; several look among the
// last units only and append more, so that building takes linear time.
func (t *byteTrie) place(labels []byte) uint32 {
	for t.hole < len(t.units) && t.units[t.hole].parent != noNode {
		t.hole++
	}
	at := t.hole
	if len(labels) > 1 {
		at = max(at, len(t.units)-512)
	}
	for ; ; at++ {
		if at >= len(t.units) {
			t.grow()
		}
		base := uint32(at) ^ uint32(labels[0])
		if !slices.ContainsFunc(labels, func(b byte) bool { return t.units[base^uint32(b)].parent != noNode }) {
			return base
		}
	}
}

// grow appends free units.
func (t *byteTrie) grow() {
	t.units = append(t.units, slices.Repeat([]trieUnit{{parent: noNode}}, 256)...)
}

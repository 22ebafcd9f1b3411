package bpe

// byteTrie is a trie of the tokens of a Unigram model: a hash table of its nodes, at most half full. A node is the number of
// its slot; the root, trieRoot, has none.
type byteTrie []trieNode

// trieNode holds its parent, the byte that leads from the parent to it, and the id+1 of its token. A free slot is zero.
type trieNode struct{ key, token uint32 }

// Numbers of nodes have 24 bits, see edge.
const maxNodes, trieRoot = 1 << 24, 1<<24 - 2

// newByteTrie returns the trie of the tokens of v.
func newByteTrie(v *vocab) (byteTrie, error) {
	for size := 1 << 10; size < maxNodes; size *= 2 {
		if t := make(byteTrie, size); t.fill(v) {
			return t, nil
		}
	}
	return nil, unsupported("a vocabulary whose trie has more than %d nodes", maxNodes/4)
}

// fill adds the tokens of v, and reports whether there was room.
func (t byteTrie) fill(v *vocab) bool {
	used := 0
	for id := range v.has {
		node := uint32(trieRoot)
		for _, b := range v.bytes(uint32(id)) {
			parent := node
			if node = t.child(parent, b); t[node].key == 0 {
				t[node].key = edge(parent, b)
				used++
			}
			if used > len(t)/2 {
				return false
			}
		}
		if node != trieRoot {
			t[node].token = uint32(id) + 1
		}
	}
	return true
}

// edge is the key of a child, which is not 0.
func edge(node uint32, b byte) uint32 { return (node+1)<<8 | uint32(b) }

// child returns the slot of a node's child, or the free one where it would be.
func (t byteTrie) child(node uint32, b byte) uint32 {
	key, mask := edge(node, b), uint32(len(t)-1)
	at := uint32(fold(uint64(key)^hashSeed, mulA)) & mask
	for t[at].key != key && t[at].key != 0 {
		at = (at + 1) & mask
	}
	return at
}

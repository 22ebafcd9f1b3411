package routing

// PrefixBlocks appends to dst the chained hashes of a prompt's blocks of blockSize
// tokens, for Query.Prefix. The first skip tokens and the last one are left out; the
// last block may be partial. The hashes are the same in all replicas and versions.
func PrefixBlocks(dst []uint64, tokens []uint32, blockSize, skip int) []uint64 {
	if skip >= len(tokens) {
		return dst
	}
	tokens = tokens[max(skip, 0):]
	tokens = tokens[:len(tokens)-1]
	parent := uint64(0)
	for len(tokens) > 0 {
		n := min(blockSize, len(tokens))
		parent = blockKey(parent, tokens[:n])
		dst = append(dst, parent)
		tokens = tokens[n:]
	}
	return dst
}

// blockKey hashes a block under the hash of the blocks before it.
func blockKey(parent uint64, tokens []uint32) uint64 {
	seed := uint64(len(tokens)) ^ parent*0xBF58476D1CE4E5B9
	for _, v := range tokens {
		v = ((v >> 16) ^ v) * 0x45D9F3B
		v = ((v >> 16) ^ v) * 0x45D9F3B
		v = ((v >> 16) ^ v) + 0x9E3779B9
		seed ^= uint64(v) + (seed << 6) + (seed >> 2)
	}
	return seed
}

package routing

import "unicode/utf8"

// CharsPerToken is the number of code points that the reference routers take for
// one token when there is no tokenizer.
const CharsPerToken = 5

// PrefixBlocks appends to dst the chained hashes of a prompt's blocks, for
// Query.Prefix: the form that implicit conversations are recognised by. The first
// skip tokens and the last one are left out; the last block may be partial. The hash
// is TensorRT-LLM's v1_block_key.
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

// PrefixText is PrefixBlocks for text: its elements are code points, and skip, given
// in tokens, leaves out CharsPerToken of them each.
func PrefixText(dst []uint64, text string, blockSize, skip int) []uint64 {
	points := make([]uint32, 0, utf8.RuneCountInString(text))
	for _, c := range text {
		points = append(points, uint32(c))
	}
	return PrefixBlocks(dst, points, blockSize, skip*CharsPerToken)
}

// blockKey is v1_block_key without adapter and salt.
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

package fleet

import (
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	"github.com/kvlane/kvlane/routing"
)

// Prompt is a query of the index: the block hashes of Tokens tokens. Made is the model of the ids, nil for a renderer's.
type Prompt struct {
	Hashes []kvindex.Hash
	Tokens int
	Made   *Model
}

// Index returns the index, for its hasher and for tests.
func (f *Fleet) Index() *kvindex.Index { return f.index }

// AppendOverlaps appends, for each target that holds blocks of the prompt, the number of tokens that it need not
// compute. Workers whose tokenizer differs from the prompt's are left out, because their blocks are hashes of other
// ids. matches is scratch memory for the lookup.
func (f *Fleet) AppendOverlaps(dst []routing.Overlap, p *Prompt, matches *kvindex.Matches) []routing.Overlap {
	if len(p.Hashes) == 0 {
		return dst
	}
	unused := 0
	if p.Made != nil && p.Made.Config.EAGLE {
		unused = 1
	}
	f.index.MatchPrompt(p.Hashes, p.Tokens, unused, matches)
	at := len(dst)
	var engineBlock func(kvindex.Slot) int // nil if all are the index's, which saves a lookup per holder
	if f.otherBlocks.Load() {
		engineBlock = f.View().engineBlock
	}
	dst = appendOverlaps(dst, matches, f.Config.Index.BlockSize, p.Tokens, engineBlock)
	if p.Made == nil || p.Made.agreement.differing.Load() == nil {
		return dst
	}
	v := f.View()
	return dst[:at+len(slices.DeleteFunc(dst[at:], func(o routing.Overlap) bool {
		e := v.Endpoint(o.Slot)
		return e != nil && p.Made.Differs(e.Member)
	}))]
}

// appendOverlaps converts blocks into tokens. An engine never takes the block with the last prompt token from its
// cache, because it has to compute at least one token. engineBlock returns the size in tokens of the engine's own block
// by slot, 0 if it is the index's; engineBlock is nil if that holds for all.
func appendOverlaps(dst []routing.Overlap, m *kvindex.Matches, block, tokens int, engineBlock func(kvindex.Slot) int) []routing.Overlap {
	most := int32((tokens - 1) / block * block)
	at := len(dst)
	dst = slices.Grow(dst, len(m.Holders))[:at+len(m.Holders)]
	for i := range m.Holders {
		h, o := &m.Holders[i], &dst[at+i]
		left := most
		if engineBlock != nil {
			if engine := engineBlock(h.Slot); engine != 0 {
				left = int32((tokens - 1) / engine * engine)
			}
		}
		o.Slot = h.Slot
		for tier := range h.Blocks {
			n := min(int32(h.Blocks[tier])*int32(block), left)
			o.Tokens[tier] = n
			left -= n
		}
		o.Speculative = min(int32(h.Speculative)*int32(block), left)
	}
	return dst
}

// engineBlock returns the block size in tokens of a slot's engine, 0 while unknown.
func (v *View) engineBlock(slot kvindex.Slot) int {
	if e := v.Endpoint(slot); e != nil {
		return int(e.Member.blockSize.Load())
	}
	return 0
}

// sawBlocks records the block size of an engine in tokens, 0 if it is unknown.
func (f *Fleet) sawBlocks(size int32) {
	if size != 0 && int(size) != f.Config.Index.BlockSize {
		f.otherBlocks.Store(true)
	}
}

// Media converts media of a prompt for the index, with the same digests of their identifiers that feed computes.
func Media(media []conv.Medium) []kvindex.Medium {
	out := make([]kvindex.Medium, len(media))
	for i, m := range media {
		out[i] = kvindex.Medium{At: m.At, Digest: feed.ExtraDigest(0, []byte(m.Identifier))}
	}
	return out
}

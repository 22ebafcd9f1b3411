package decide

import (
	"slices"

	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	prompt "github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// match hashes the ids into blocks and asks the index which targets hold them. The
// hashes, the overlaps and the prefix that names an implicit conversation are in the
// scratch memory.
func (j *job) match(in *input, t *tokens) {
	d, s := j.d, j.s
	s.hashes, s.overlaps, s.prefix = s.hashes[:0], s.overlaps[:0], s.prefix[:0]
	if len(t.ids) == 0 {
		return
	}
	block := d.cfg.Index.BlockSize
	j.hash(in, t, d.fleet.Index().Hasher().Seed(in.model.CacheName(), adapter(in), salt(in.body, j.cacheSalt(in))), block)
	j.took(observe.StageHash)
	if len(s.hashes) == 0 {
		if j.degraded == "" {
			j.degraded = degradedShortPrompt
		}
		return
	}
	d.fleet.Expire(j.clock)
	j.overlap(t)
	if skip := d.cfg.Routing.PrefixSkip; skip > 0 {
		s.prefix = routing.PrefixBlocks(s.prefix[:0], t.ids, block, skip)
	}
	j.took(observe.StageIndex)
}

// overlap asks the index which blocks of the prompt each target holds as of now.
func (j *job) overlap(t *tokens) {
	p := fleet.Prompt{Hashes: j.s.hashes, Tokens: len(t.ids), Made: t.made}
	j.s.overlaps = j.d.fleet.AppendOverlaps(j.s.overlaps[:0], &p, &j.s.matches)
}

// hashed has the block hashes that are cached with a body. They belong to the ids whose
// first element has this address (ids never change in place): a body's ids can differ with
// the date, or with the tokenizer that made them.
type hashed struct {
	first  *uint32
	tokens int
	hashes []uint64
}

// hash computes those block hashes that are not cached with the body or with the ids of the
// conversation's earlier turns.
func (j *job) hash(in *input, t *tokens, seed kvindex.Hash, block int) {
	s := j.s
	key := bpe.ValuesKey{Seed: uint64(seed), Stride: block}
	if v, ok := in.body.Attached(key); ok {
		if kept, ok := v.(*hashed); ok && kept.first == &t.ids[0] && kept.tokens == len(t.ids) {
			s.prefix = append(s.prefix, kept.hashes...)
			s.hashes = appendConverted(s.hashes, s.prefix)
			return
		}
	}
	s.prefix = t.cached.Values(s.prefix, key)
	s.prefix = s.prefix[:min(len(s.prefix), len(t.ids)/block)]
	s.hashes = appendConverted(s.hashes, s.prefix)
	known, parent := len(s.hashes), seed
	if known > 0 {
		parent = s.hashes[known-1]
	}
	s.hashes = j.d.fleet.Index().Hasher().AppendHashes(s.hashes, parent, t.ids[known*block:], block)
	s.prefix = appendConverted(s.prefix, s.hashes[known:])
	if known < len(s.hashes) {
		t.cached.SetValues(key, s.prefix)
	}
	if in.body.Kept() {
		in.body.Attach(key, &hashed{&t.ids[0], len(t.ids), slices.Clone(s.prefix)}, int64(8*len(s.prefix))+64)
	}
}

func appendConverted[To, From ~uint64](dst []To, src []From) []To {
	dst = slices.Grow(dst, len(src))
	for _, v := range src {
		dst = append(dst, To(v))
	}
	return dst
}

// adapter is the LoRA adapter that the request names, "" for the base model.
func adapter(in *input) string {
	if in.model.Tokens == nil {
		return ""
	}
	return in.model.Tokens.Adapter(in.body)
}

// salt separates this request's blocks from others'. SGLang's extra_key does so in the
// engine but does not appear in its events: with one, only prompts sent with the same one
// match.
func salt(body *prompt.Request, salt string) string {
	if extra := body.Raw(prompt.FieldExtraKey); len(extra) > 0 && extra[0] != 'n' {
		return "extra_key\x00" + string(extra) + "\x00" + salt
	}
	return salt
}

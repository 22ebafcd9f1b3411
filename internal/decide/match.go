package decide

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"

	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// match hashes the ids into blocks and asks the index which targets hold them. The hashes, the overlaps and the prefix
// that names an implicit conversation are in the scratch memory.
func (j *job) match(in *input, t *tokens) {
	d, s := j.d, j.s
	s.hashes, s.overlaps, s.prefix, s.others = s.hashes[:0], s.overlaps[:0], s.prefix[:0], nil
	others := t.others
	t.others = nil // a request that waits does not keep them
	j.cacheReads = shape.EntireCache
	if in.known && in.model != nil {
		use := in.model.Engine.CacheUse(in.body)
		j.cacheReads = use.Reads
		switch {
		case use.Reads == 0:
			j.entry.Cache = "unread"
		case use.Reads < t.count && (!t.batch || use.Reads < int64(t.n)):
			j.entry.Cache = "read_in_part"
		}
		if use.NotStored {
			return
		}
	}
	if len(t.ids) == 0 {
		j.textPrefix(in)
		j.overlap(t)
		return
	}
	block := d.cfg.Index.BlockSize
	hasher := d.fleet.Index().Hasher()
	seed := hasher.Seed(in.model.Config.Name, adapter(in), salt(in.body, j.cacheSalt(in)))
	if t.media == nil {
		s.hashes = conv.AppendHashes(s.turn, s.hashes, seed, t.ids, block, hasher.AppendHashes)
	} else {
		s.hashes = hasher.AppendHashesExtra(s.hashes, seed, t.ids, block, nil, fleet.Media(t.media))
	}
	for _, o := range others { // the blocks that it shares with prompts before it are computed once
		shared := int(min(int64(min(o.Shared, max(0, len(o.IDs)-1))), j.cacheReads)) / block * block
		t.count -= int64(shared)
		s.others = append(s.others, other{fleet.Prompt{Hashes: hasher.AppendHashes(nil, seed, o.IDs, block), Tokens: len(o.IDs), Made: t.made}, int32(shared)})
	}
	j.took(observe.StageHash)
	if len(s.hashes) == 0 && s.others == nil {
		j.degraded = cmp.Or(j.degraded, degradedShortPrompt)
		return
	}
	j.entry.HashIDs = slices.Grow(j.entry.HashIDs, len(s.hashes)*block/observe.TraceBlock)
	for end := observe.TraceBlock; block <= end && end/block <= len(s.hashes); end += observe.TraceBlock {
		j.entry.HashIDs = append(j.entry.HashIDs, uint64(s.hashes[end/block-1]))
	}
	d.fleet.Expire(j.clock)
	j.overlap(t)
	if j.cacheReads == 0 {
		return // without a cache, the prefix does not identify a conversation either
	}
	if skip := d.live.Load().Routing.PrefixSkip; skip > 0 {
		s.prefix = routing.PrefixBlocks(s.prefix, t.ids, block, skip)
	} else {
		for _, h := range s.hashes {
			s.prefix = append(s.prefix, uint64(h))
		}
	}
	j.took(observe.StageIndex)
}

// textPrefix fills the scratch prefix for a request without a conversation id to a model without a
// tokenizer, where a policy recognises conversations by their prefix. Four bytes of the text, as it
// is in the body, count as a token. The tools and the system prompt come before the messages. The
// bracket that closes the list is left out: in the next turn another message follows instead.
func (j *job) textPrefix(in *input) {
	live := &j.d.live.Load().Routing
	if !in.known || in.conversation != "" || j.cacheReads == 0 || in.model != nil && (in.model.Tokens != nil || in.model.Remote != nil) ||
		!live.Policy.Sticky.Implicit && !live.Disagg.Prefill.Sticky.Implicit && !live.Disagg.Decode.Sticky.Implicit {
		return
	}
	r, hasher := in.body, j.d.fleet.Index().Hasher()
	prompt := r.FirstPrompt()
	if n := len(r.Elements); n > 0 && n == r.Count && (r.Form == body.FormMessages || r.Form == body.FormItems) {
		prompt = r.Body[r.Prompt.Start:r.Elements[n-1].End]
	} else if len(prompt) > 0 {
		prompt = prompt[:len(prompt)-1]
	}
	var words [kvindex.MaxBlockSize]uint32
	var hash [1]kvindex.Hash
	hash[0] = hasher.Seed("text\x00"+in.modelName(), "", salt(r, r.CacheSalt()))
	n, skip := 0, 4*live.PrefixSkip
	for _, text := range [...][]byte{r.Raw(body.FieldTools), r.Raw(body.FieldSystem), r.Raw(body.FieldInstructions), prompt} {
		from := min(skip, len(text))
		skip -= from
		for text = text[from:]; len(text) >= 4; text = text[4:] {
			words[n] = binary.LittleEndian.Uint32(text)
			if n++; n == j.d.cfg.Index.BlockSize {
				hasher.AppendHashes(hash[:0], hash[0], words[:n], n)
				j.s.prefix, n = append(j.s.prefix, uint64(hash[0])), 0
			}
		}
	}
}

// overlap asks the index which blocks of the prompt each target holds as of now, as far as the engine reads them. If the
// request continues a stored answer, the answer's target also holds the conversation before the prompt. The index does not
// know those tokens, so they are added here.
func (j *job) overlap(t *tokens) {
	j.s.overlaps = j.s.overlaps[:0]
	if j.cacheReads == 0 {
		return
	}
	var places map[kvindex.Slot]int
	if j.s.others != nil {
		places = make(map[kvindex.Slot]int)
	}
	j.addOverlaps(fleet.Prompt{Hashes: j.s.hashes, Tokens: t.n, Made: t.made}, 0, places)
	for _, o := range j.s.others {
		j.addOverlaps(o.Prompt, o.shared, places)
	}
	if j.stored.Pin != nil && j.stored.Tokens > 0 {
		j.s.overlaps = append(j.s.overlaps, routing.Overlap{Slot: j.stored.Slot, Speculative: int32(min(j.stored.Tokens, math.MaxInt32))})
	}
}

// other is a further prompt of a batch, and how many of its first tokens are computed for the prompts before it anyway.
type other struct {
	fleet.Prompt
	shared int32
}

// addOverlaps adds a prompt's overlaps behind the shared tokens to those of the prompts before it. places are the targets'
// places among the overlaps of a batch, nil for one prompt.
func (j *job) addOverlaps(p fleet.Prompt, shared int32, places map[kvindex.Slot]int) {
	if j.cacheReads < int64(p.Tokens) {
		p.Tokens = int(j.cacheReads) + 1 // the last one is always computed
	}
	at := len(j.s.overlaps)
	all := j.d.fleet.AppendOverlaps(j.s.overlaps, &p, &j.s.matches)
	if j.s.overlaps = all; places == nil {
		return
	}
	for _, o := range all[at:] {
		left := shared
		i, ok := places[o.Slot]
		if !ok {
			i, places[o.Slot], at = at, at, at+1
			all[i] = routing.Overlap{Slot: o.Slot}
		}
		for tier, n := range o.Tokens {
			all[i].Tokens[tier] += max(0, n-left)
			left = max(0, left-n)
		}
		all[i].Speculative += max(0, o.Speculative-left)
	}
	j.s.overlaps = all[:at]
}

// adapter is the LoRA adapter that the request names, "" for the base model.
func adapter(in *input) string {
	if in.model.Tokens == nil {
		return ""
	}
	return in.model.Tokens.Adapter(in.body)
}

// salt separates this request's blocks from others'. SGLang's extra_key separates them in the engine but is not in its
// events: a prompt with an extra_key matches only prompts that Kvlane sent with the same one.
func salt(req *body.Request, salt string) string {
	if extra := req.Raw(body.FieldExtraKey); len(extra) > 0 && extra[0] != 'n' {
		return "extra_key\x00" + string(extra) + "\x00" + salt
	}
	return salt
}

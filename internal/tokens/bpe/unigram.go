package bpe

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// unigram is a Unigram model: it divides a text into the tokens with the highest sum of scores. Sums are in the order
// and the precision of the reference, because equal sums that are rounded differently decide which tokens are taken.
type unigram struct {
	vocab *vocab
	trie  *byteTrie
	// unknown is the score of a character without a token, unk its id.
	unknown  float64
	unk      uint32
	fallback bool
	bytes    [256]uint32 // token of "<0x41>", maxID if none
	longest  int         // token, in bytes
	// single: sums have 32 bits, as in SentencePiece itself.
	single bool
}

// unkPenalty is subtracted from the lowest score of the vocabulary for the score of an unknown character.
const unkPenalty = 10

// singleLimit is the sum beyond which SentencePiece subtracts it from all open paths.
const singleLimit = 100000

// maxPiece bounds the length of a token in bytes: a step of viterbi packs it with an id.
const maxPiece = 1<<(32-packedID) - 1

// viterbi appends the ids of a word. It takes a step per byte and length of token, and four bytes
// of memory per byte. Once stopped, it appends nothing.
func (u *unigram) viterbi(enc *encoder, dst []uint32, word []byte) []uint32 {
	n := len(word)
	if cap(enc.steps) < n+1 {
		enc.steps = make([]uint32, n+1)
	}
	// steps[i] is the last token of the best path to i, with its length in the upper bits; 0 if
	// no path ends there. The scores of paths are needed for the longest token only.
	steps := enc.steps[:n+1]
	clear(steps)
	window := 1<<bits.Len(uint(u.longest)) - 1
	if len(enc.sums) <= window {
		enc.sums = make([]float64, window+1)
	}
	sums := enc.sums[:window+1]
	sums[0] = 0
	units := u.trie.units
	for at, read := 0, 0; at < n; {
		_, size := utf8.DecodeRune(word[at:])
		if n > maxWord && enc.watch.over(size+read) {
			return dst
		}
		if u.single && math.Abs(sums[at&window]) > singleLimit {
			offset := sums[at&window]
			for i := at; i <= min(n, at+window); i++ {
				if i == at || steps[i] != 0 {
					sums[i&window] = u.rounded(sums[i&window] - offset)
				}
			}
		}
		sum, known := sums[at&window], false
		node, base := uint32(0), units[0].base
		to := at
		for to < n {
			next := base ^ uint32(word[to])
			unit := &units[next]
			if unit.parent != node {
				break
			}
			node, base = next, unit.base
			to++
			if unit.token != 0 {
				relax(&steps[to], &sums[to&window], u.rounded(sum+unit.score), uint32(to-at)<<packedID|(unit.token-1))
				known = known || to == at+size
			}
		}
		at, read = at+size, to-at
		if !known {
			relax(&steps[at], &sums[at&window], u.rounded(sum+u.unknown), uint32(size)<<packedID|u.unk)
		}
	}
	return u.follow(dst, word, steps)
}

// relax keeps the better of two paths.
func relax(step *uint32, best *float64, sum float64, with uint32) {
	if *step == 0 || sum > *best {
		*step, *best = with, sum
	}
}

// rounded returns a sum as it is kept.
func (u *unigram) rounded(sum float64) float64 {
	if u.single {
		return float64(float32(sum))
	}
	return sum
}

// follow appends the ids of a path, whose last step is at the end of steps.
func (u *unigram) follow(dst []uint32, word []byte, steps []uint32) []uint32 {
	// A step is stored at the end of its token. Move each to the start, so that the path can be followed forward.
	for at, after := len(word), uint32(0); at > 0; {
		steps[at], after = after, steps[at]
		at -= int(after >> packedID)
		if at == 0 {
			steps[0] = after
		}
	}
	for at := 0; at < len(word); {
		step := steps[at]
		from := at
		at += int(step >> packedID)
		if step&maxID != u.unk {
			dst = append(dst, step&maxID)
			continue
		}
		for at < len(word) && steps[at]&maxID == u.unk { // unknown neighbours are one token
			at += int(steps[at] >> packedID)
		}
		dst = u.unknownText(dst, word[from:at])
	}
	return dst
}

// unknownText appends the ids of text that no token covers.
func (u *unigram) unknownText(dst []uint32, text []byte) []uint32 {
	if id, _, ok := u.vocab.find(text); ok {
		return append(dst, id) // such as "<unk>"
	}
	at := len(dst)
	for _, b := range text {
		if !u.fallback || u.bytes[b] == maxID {
			return append(dst[:at], u.unk)
		}
		dst = append(dst, u.bytes[b])
	}
	return dst
}

// readUnigram reads the model of a tokenizer.json. exact: scores are not rounded as the library rounds them.
func (t *Tokenizer) readUnigram(head *modelHead, exact bool) error {
	if head.UnkID == nil {
		return unsupported("Unigram without unk_id")
	}
	list := &tokenList{literal: map[string]uint32{}}
	var scores []float64
	err := eachItem(head.vocab, func(pair []byte) error {
		var text []byte
		score, part := "", 0
		err := eachItem(pair, func(item []byte) (err error) {
			if part++; part == 1 {
				text, err = body.AppendText(nil, item)
			} else {
				score = string(item)
			}
			return err
		})
		if err != nil {
			return err
		}
		value, err := parseScore(score, exact)
		if err != nil || part != 2 {
			return fmt.Errorf("token %d has %d parts, score %q", len(scores), part, score)
		}
		id := uint32(len(scores))
		scores = append(scores, value)
		own, ok := t.form.text(nil, text)
		if !ok {
			list.literal[string(text)] = id
			own = nil
		}
		return list.add(own, id)
	})
	if err != nil {
		return fmt.Errorf("vocab: %w", err)
	}
	if *head.UnkID >= len(scores) {
		return fmt.Errorf("unk_id %d of %d tokens", *head.UnkID, len(scores))
	}
	return t.setUnigram(&unigram{unk: uint32(*head.UnkID), fallback: head.ByteFallback}, scores, list)
}

// setUnigram completes a model whose unknown token is set; scores are by id.
func (t *Tokenizer) setUnigram(u *unigram, scores []float64, list *tokenList) (err error) {
	if t.vocab, err = list.vocab(); err != nil {
		return err
	}
	lowest := math.Inf(1)
	for id, score := range scores {
		lowest = min(lowest, score)
		u.longest = max(u.longest, len(t.vocab.bytes(uint32(id))))
	}
	if u.longest > maxPiece {
		return unsupported("a token of %d bytes", u.longest)
	}
	u.longest = max(u.longest, utf8.UTFMax)
	u.unknown = lowest - unkPenalty
	for b := range u.bytes {
		u.bytes[b] = maxID
		if id, ok := t.TokenID(fmt.Sprintf("<0x%02X>", b)); ok {
			u.bytes[b] = id
		}
	}
	if u.trie, err = newByteTrie(t.vocab, scores); err != nil {
		return err
	}
	t.unigram, u.vocab = u, t.vocab
	for token, id := range t.vocab.literal {
		t.literalOf[id] = token
	}
	enc := &encoder{}
	wholes := t.vocab.markWhole(func(id uint32) bool {
		text := t.vocab.bytes(id) // of longer ones, which are rare, the time grows with the cube if they are nested
		return len(text) <= maxWord && slices.Equal(u.viterbi(enc, nil, text), []uint32{id})
	})
	t.short = newShortTokens(t.vocab, func(id uint32) bool { return wholes[id] })
	t.parter = t.splitter
	return nil
}

// parseScore reads a number as serde_json does, which rounds twice; exact: as Python does.
func parseScore(s string, exact bool) (float64, error) {
	value, err := strconv.ParseFloat(s, 64)
	digits, exponent, _ := strings.Cut(strings.TrimPrefix(s, "-"), "e")
	whole, fraction, _ := strings.Cut(digits, ".")
	significand, tooLong := strconv.ParseUint(whole+fraction, 10, 64)
	if err != nil || exact || tooLong != nil {
		return value, err
	}
	power := -len(fraction)
	if exponent != "" {
		e, err := strconv.Atoi(exponent)
		if err != nil {
			return 0, err
		}
		power += e
	}
	rounded := float64(significand)
	if power < 0 {
		rounded /= math.Pow10(-power)
	} else {
		rounded *= math.Pow10(power)
	}
	return math.Copysign(rounded, value), nil
}

// markedWords reports whether the normalizer or pre-tokenizer replaces all spaces by U+2581, so that
// tokens can be stored with a space for it. simple reports whether words are the parts of the whole
// text that begin at each U+2581; prefix is then where a space is put before a text.
func markedWords(norm, pre []component) (marked, simple bool, prefix prefixSpace) {
	if len(pre) == 0 {
		last := len(norm) - 1
		return last >= 0 && norm[last].Type == "Replace" && norm[last].Content == spaceMark && norm[last].Pattern.String != nil &&
			*norm[last].Pattern.String == " ", false, prefixNone
	}
	m := pre[len(pre)-1]
	if m.Type != "Metaspace" || m.Replacement != spaceMark {
		return false, false, prefixNone
	}
	scheme, err := m.prependScheme()
	simple = err == nil && (m.Split == nil || *m.Split) && (len(pre) == 1 || len(pre) == 2 && pre[0].Type == "WhitespaceSplit" && scheme == "always")
	return true, simple, map[string]prefixSpace{"always": prefixUnless, "first": prefixFirst}[scheme]
}

// unigramPipeline reads the stages around a Unigram model.
func (t *Tokenizer) unigramPipeline(f *file) error {
	norm, pre, err := f.stages()
	if err != nil {
		return err
	}
	for _, p := range pre {
		if p.PrependScheme == "first" && len(norm) > 0 {
			return unsupported("Metaspace with prepend_scheme first after a normalizer") // the reference looks at the offset in the original text
		}
	}
	if t.pipe, err = newPipeline(norm, pre, false); err != nil {
		return err
	}
	marked, simple, prefix := markedWords(norm, pre)
	t.form, t.splitter, t.pipe.finish = literalForm, wholeSplit{}, (*encoder).oneWord
	switch {
	case simple:
		t.form, t.prefix = spaceForm, prefix
		t.pipe.splitters, t.splitter, t.pipe.finish = nil, spaceSplit{each: true}, (*encoder).marked
		if len(pre) == 2 {
			t.pipe.finish = func(enc *encoder, dst []uint32, p piece) []uint32 {
				return enc.paragraphs(dst, enc.joinedWords(p.text))
			}
		}
	case marked:
		t.form = spaceForm
		t.pipe.finish = func(enc *encoder, dst []uint32, p piece) []uint32 {
			return enc.oneWord(dst, piece{enc.unmarked(p.text), p.first})
		}
	}
	return nil
}

// marked appends the ids of a text whose words start at spaces and at U+2581.
func (enc *encoder) marked(dst []uint32, p piece) []uint32 {
	return enc.pretokenized(dst, enc.unmarked(p.text), p.first)
}

// unmarked returns s with spaces for U+2581, valid until the next call.
func (enc *encoder) unmarked(s string) string {
	if !strings.Contains(s, spaceMark) {
		return s
	}
	enc.text = enc.text[:0]
	for {
		i := strings.Index(s, spaceMark)
		if i < 0 || enc.watch.over(i+1) {
			break
		}
		enc.text = append(append(enc.text, s[:i]...), ' ')
		s = s[i+len(spaceMark):]
	}
	enc.text = append(enc.text, s...)
	return stringOf(enc.text)
}

// joinedWords returns the words between white space, each after one space (U+2581 counts as its
// space), valid until the next call.
func (enc *encoder) joinedWords(s string) string {
	out := enc.spacing[:0]
	fresh := true // a word starts
	for i := 0; i < len(s); {
		c, n := classAt(s, i)
		if enc.watch.over(n) {
			break
		}
		switch {
		case c&clsWS != 0:
			fresh = true
		case strings.HasPrefix(s[i:], spaceMark):
			out, fresh = append(out, ' '), false
		default:
			if fresh {
				out, fresh = append(out, ' '), false
			}
			from := i
			for i += n; i < len(s) && s[i] < utf8.RuneSelf && byteKinds[s[i]]&kindBlank == 0; i++ {
			}
			out = append(out, s[from:i]...)
			continue
		}
		i += n
	}
	enc.spacing = out
	return stringOf(out)
}

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
	trie  byteTrie
	// unknown is the score of a character without a token, unk its id.
	unknown  float64
	unk      uint32
	fallback bool
	bytes    [256]uint32 // token of "<0x41>", maxID if none
	longest  int         // token, in bytes
	// single: sums have 32 bits, as in SentencePiece itself.
	single bool
	// summed: the sums run over a whole text, see encoder.summed. words divides it, limit and margin bound what is kept of a word.
	summed        bool
	words         splitter
	scores        []float64 // by token
	limit, margin float64
}

// openPath holds the sum of the best path to a place, and the best sum of the paths with another last token.
type openPath struct{ sum, next float64 }

// unkPenalty is subtracted from the lowest score of the vocabulary for the score of an unknown character.
const unkPenalty = 10

// singleLimit is the sum beyond which SentencePiece subtracts it from all open paths.
const singleLimit = 100000

// maxPiece bounds the length of a token in bytes: a step of viterbi packs it with an id.
const maxPiece = 1<<(32-packedID) - 1

// summed appends the ids of a text over which sums run on. No token crosses the end of one of its words, so the best path of
// each word is a part of the text's, and only how sums are rounded depends on what precedes it. A word whose best path is
// ahead of all others by more than rounding can change has the same ids after any sum, and is kept.
func (enc *encoder) summed(dst []uint32, p piece) []uint32 {
	u, text := enc.t.unigram, bytesOf(p.text)
	enc.sum = 0
	for at := 0; at < len(text); {
		n, next := u.words.split(p.text, at, enc.ends[:])
		if enc.watch.over(next - at) {
			break
		}
		for _, end := range enc.ends[:n] {
			from := len(dst)
			enc.sure = math.Abs(enc.sum)-float64(int(end)-at)*u.unknown < u.limit
			if enc.sure {
				dst = enc.second(dst, text, at, int(end), false)
			} else {
				dst = u.viterbi(enc, dst, text[at:end])
			}
			for _, id := range dst[from:] {
				if enc.sure {
					enc.sum = u.rounded(enc.sum + u.scores[id])
				}
			}
			at = int(end)
		}
	}
	return dst
}

// viterbi appends the ids of a word that follows a path of the sum enc.sum. It takes a step per byte and length of token, and
// four bytes of memory per byte. Once stopped, it appends nothing. If the word's ids depend on the sum, enc.sure is unset and
// enc.sum is that of the path to its end.
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
	if len(enc.paths) <= window {
		enc.paths = make([]openPath, window+1)
	}
	paths := enc.paths[:window+1]
	paths[0] = openPath{sum: enc.sum}
	for at, read := 0, 0; at < n; {
		_, size := utf8.DecodeRune(word[at:])
		if n > maxWord && enc.watch.over(size+read) {
			return dst
		}
		if u.single && math.Abs(paths[at&window].sum) > singleLimit {
			offset := paths[at&window].sum
			for i := at; i <= min(n, at+window); i++ {
				if i == at || steps[i] != 0 {
					paths[i&window].sum = u.rounded(paths[i&window].sum - offset)
				}
			}
		}
		sum, known := paths[at&window].sum, false
		node, to := uint32(trieRoot), at
		for to < n {
			if node = u.trie.child(node, word[to]); u.trie[node].key == 0 {
				break
			}
			to++
			if token := u.trie[node].token; token != 0 {
				relax(&steps[to], &paths[to&window], u.rounded(sum+u.scores[token-1]), uint32(to-at)<<packedID|(token-1))
				known = known || to == at+size
			}
		}
		at, read = at+size, to-at
		if !known {
			relax(&steps[at], &paths[at&window], u.rounded(sum+u.unknown), uint32(size)<<packedID|u.unk)
		}
	}
	return u.follow(enc, dst, word, steps)
}

// relax keeps the better of two paths.
func relax(step *uint32, path *openPath, sum float64, with uint32) {
	switch {
	case *step == 0:
		*step, *path = with, openPath{sum, math.Inf(-1)}
	case sum > path.sum:
		*step, *path = with, openPath{sum, path.sum}
	case sum > path.next:
		path.next = sum
	}
}

// rounded returns a sum as it is kept.
func (u *unigram) rounded(sum float64) float64 {
	if u.single {
		return float64(float32(sum))
	}
	return sum
}

// follow appends the ids of a path, whose last step is at the end of steps. The second best path joins the best one at
// a place, by another token. So it is behind by the least difference at the places of the best path.
func (u *unigram) follow(enc *encoder, dst []uint32, word []byte, steps []uint32) []uint32 {
	end := enc.paths[len(word)&(len(enc.paths)-1)].sum
	sure := enc.sure && len(word) < len(enc.paths)
	// A step is stored at the end of its token. Move each to the start, so that the path can be followed forward.
	at, after := len(word), uint32(0)
	for at > 0 {
		p := &enc.paths[at&(len(enc.paths)-1)]
		sure = sure && p.sum-p.next > float64(len(word))*u.margin && steps[at]&maxID != u.unk
		steps[at], after = after, steps[at]
		at -= int(after >> packedID)
	}
	steps[0] = after
	if u.summed && !sure {
		enc.sum, enc.sure = end, false
	}
	for at < len(word) {
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
	if u.fallback {
		if dst, ok := appendBytes(dst, &u.bytes, text); ok {
			return dst
		}
	}
	return append(dst, u.unk)
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
		return list.addNamed(text, own, ok, id)
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
	u.bytes = t.byteTokens()
	if u.trie, err = newByteTrie(t.vocab); err != nil {
		return err
	}
	t.unigram, u.vocab, u.scores, u.words = u, t.vocab, scores, t.splitter
	if _, u.summed = u.words.(wholeSplit); u.summed {
		u.limit, u.margin = 1<<30, 0x1p-20 // the unit in the last place of limit is 2⁻²³; a path of n bytes has at most n sums
		if u.single {
			u.limit, u.margin = singleLimit, 0x1p-6 // 2⁻⁷
		}
	}
	for token, id := range t.vocab.literal {
		t.literalOf[id] = token
	}
	enc := &encoder{}
	_, _, apart := t.vocab.find([]byte(" ")) // else an unknown space joins unknown neighbours
	wholes := t.vocab.markWhole(func(id uint32) bool {
		apart = apart && !t.vocab.spaceInside(id)
		enc.sum, enc.sure = 0, true
		text := t.vocab.bytes(id) // of longer ones, which are rare, the time grows with the cube if they are nested
		return len(text) <= maxWord && slices.Equal(u.viterbi(enc, nil, text), []uint32{id}) && enc.sure
	})
	if u.summed && apart {
		u.words = spaceSplit{}
	}
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
	t.form, t.splitter, t.pipe.finish = literalForm, wholeSplit{}, (*encoder).summed
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
			return enc.summed(dst, piece{enc.unmarked(p.text), p.first})
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

package bpe

import (
	"fmt"
	"strings"
)

// encode appends the ids of text[from:]; from is 0 or the Text of a Cut. The error is
// ErrStopped, or wraps ErrText, or ErrLimit if the split pattern exceeded its work limit.
func (enc *encoder) encode(dst []uint32, text string, from int) ([]uint32, error) {
	enc.match.allow(len(text))
	enc.invalid = false
	find := search{set: enc.t.raw, s: text, pos: from, cut: from, wanted: &enc.watch}
	at := from
	for {
		hit, ok := find.next()
		if !ok || enc.watch.over(hit.to-at) {
			break
		}
		if at < hit.from {
			dst = enc.betweenAdded(dst, text[at:hit.from], at)
		}
		dst = append(dst, hit.token.ID)
		at = hit.to
		enc.record(hit, at, len(dst))
	}
	if at < len(text) && !enc.watch.stopped {
		dst = enc.betweenAdded(dst, text[at:], at)
	}
	if enc.watch.stopped {
		return dst, ErrStopped
	}
	if enc.invalid {
		return dst, errInvalid
	}
	if enc.match.exceeded() {
		return dst, fmt.Errorf("%w: the split pattern takes too long", ErrLimit)
	}
	return dst, nil
}

// record appends a Cut if cuts are being recorded.
func (enc *encoder) record(hit addedHit, at, ids int) {
	if enc.recording && hit.final && at >= enc.lastCut+cutDistance {
		enc.cuts = append(enc.cuts, Cut{Text: at, IDs: ids - enc.cutBase})
		enc.lastCut = at
	}
}

// betweenAdded appends the ids of text without raw added tokens: it normalizes the text and cuts out
// the added tokens of normalized text. base is the offset of s in the whole text.
func (enc *encoder) betweenAdded(dst []uint32, s string, base int) []uint32 {
	if enc.t.pipe != nil {
		return enc.pipelined(dst, s, base)
	}
	first := base == 0
	if enc.t.nfc && !enc.t.lazy && composeAt(s, 0, &enc.watch) < len(s) {
		enc.nfc = enc.composed(enc.nfc[:0], s)
		s = stringOf(enc.nfc)
	}
	if len(enc.t.normal.starts) == 0 {
		return enc.plain(dst, s, first)
	}
	if enc.t.sp != nil && enc.t.sp.marked {
		// these tokens are matched against the normalizer's output
		return enc.normalizedSpace(dst, s, first)
	}
	find := search{set: enc.t.normal, s: s, wanted: &enc.watch}
	return enc.around(dst, &find, enc.plain, first, func(hit addedHit, n int) { enc.record(hit, base+hit.to, n) })
}

// normalizedSpace is the remainder of betweenAdded for normalizers that mark spaces.
func (enc *encoder) normalizedSpace(dst []uint32, s string, first bool) []uint32 {
	enc.added = append(enc.added[:0], enc.t.normalizedText(s)...)
	find := search{set: enc.t.normal, s: string(enc.added), marks: true, wanted: &enc.watch}
	return enc.around(dst, &find, enc.pretokenized, first, nil)
}

// around appends the ids of the added tokens of a normalized text, and those that encode appends for what is between them.
// first reports that the text is the beginning of the whole text. found, if not nil, gets each token with the number of ids
// up to its end.
func (enc *encoder) around(dst []uint32, find *search, encode func(dst []uint32, s string, first bool) []uint32, first bool, found func(hit addedHit, n int)) []uint32 {
	s, at := find.s, 0
	for len(find.set.starts) > 0 {
		hit, ok := find.next()
		if !ok {
			break
		}
		if at < hit.from {
			dst = encode(dst, s[at:hit.from], first && at == 0)
		}
		dst = append(dst, hit.token.ID)
		at = hit.to
		if found != nil {
			found(hit, len(dst))
		}
	}
	if at < len(s) && !enc.watch.stopped {
		dst = encode(dst, s[at:], first && at == 0)
	}
	return dst
}

// normalizedText returns the normalizer's output, with spaces in place of U+2581.
func (t *Tokenizer) normalizedText(s string) string {
	s = strings.ReplaceAll(s, spaceMark, " ")
	if t.prefix == prefixAlways && s != "" {
		s = " " + s
	}
	return s
}

// plain appends the ids of text without added tokens.
func (enc *encoder) plain(dst []uint32, s string, first bool) []uint32 {
	if enc.t.sp != nil {
		s = enc.unmarked(s)
	}
	if enc.t.prefix == prefixAlways {
		return enc.spaced(dst, s)
	}
	return enc.pretokenized(dst, s, first)
}

// pretokenized appends the ids of normalized text.
func (enc *encoder) pretokenized(dst []uint32, s string, first bool) []uint32 {
	switch {
	case enc.t.prefix == prefixFirst && !first, enc.t.prefix == prefixNone, enc.t.prefix == prefixAlways:
	case s[0] != ' ':
		return enc.spaced(dst, s)
	}
	return enc.paragraphs(dst, s)
}

// spaced appends the ids of a space and s.
func (enc *encoder) spaced(dst []uint32, s string) []uint32 {
	enc.spacing = append(append(enc.spacing[:0], ' '), s...)
	return enc.paragraphs(dst, stringOf(enc.spacing))
}

package tokenizer

import (
	"fmt"
	"strings"
)

// encode appends the ids of text[from:], from being 0 or the end of a hard cut.
// The error is that of a pattern to which the text is too much work, or ErrStopped.
func (w *worker) encode(dst []uint32, text string, from int) ([]uint32, error) {
	w.match.allow(len(text))
	find := search{set: w.t.raw, s: text, pos: from, cut: from}
	at := from
	for {
		hit, ok := find.next()
		if !ok || w.watch.over(hit.to-at) {
			break
		}
		if at < hit.from {
			dst = w.stretch(dst, text[at:hit.from], at)
		}
		dst = append(dst, hit.token.ID)
		at = hit.to
		w.record(hit, at, len(dst))
	}
	if at < len(text) && !w.watch.stopped {
		dst = w.stretch(dst, text[at:], at)
	}
	if w.watch.stopped {
		return dst, ErrStopped
	}
	if w.match.exceeded() {
		return dst, fmt.Errorf("%w: the split pattern takes too long", ErrLimit)
	}
	return dst, nil
}

// record notes a hard cut at a place of the text, if cuts are wanted.
func (w *worker) record(hit addedHit, at, ids int) {
	if w.recording && hit.hard && at >= w.lastCut+cutDistance {
		w.cuts = append(w.cuts, hardCut{text: at, ids: ids - w.cutBase})
		w.lastCut = at
	}
}

// stretch appends the ids of text without raw added tokens: it is normalized,
// and the added tokens of normalized text are cut out. It begins at offset base
// of the whole.
func (w *worker) stretch(dst []uint32, s string, base int) []uint32 {
	if w.t.pipe != nil {
		return w.pipelined(dst, s, base)
	}
	first := base == 0
	if w.t.nfc && composeAt(s, 0) < len(s) {
		w.nfc = appendNFC(w.nfc[:0], s, &w.watch)
		s = stringOf(w.nfc)
	}
	if len(w.t.normal.starts) == 0 {
		return w.plain(dst, s, first)
	}
	if w.t.sp != nil && w.t.sp.marked {
		// Tokens of normalized text are compared with what the normalizer made.
		return w.normalizedSpace(dst, s, first)
	}
	find := search{set: w.t.normal, s: s}
	at := 0
	for {
		hit, ok := find.next()
		if !ok {
			break
		}
		if at < hit.from {
			dst = w.plain(dst, s[at:hit.from], first && at == 0)
		}
		dst = append(dst, hit.token.ID)
		at = hit.to
		w.record(hit, base+at, len(dst))
	}
	if at < len(s) {
		dst = w.plain(dst, s[at:], first && at == 0)
	}
	return dst
}

// normalizedSpace is the rest of stretch where the normalizer marks spaces.
func (w *worker) normalizedSpace(dst []uint32, s string, first bool) []uint32 {
	w.added = append(w.added[:0], w.t.normalizedText(s)...)
	s = string(w.added)
	find := search{set: w.t.normal, s: s, marks: true}
	at := 0
	for {
		hit, ok := find.next()
		if !ok {
			break
		}
		if at < hit.from {
			dst = w.pretokenized(dst, s[at:hit.from], first && at == 0)
		}
		dst = append(dst, hit.token.ID)
		at = hit.to
	}
	if at < len(s) {
		dst = w.pretokenized(dst, s[at:], first && at == 0)
	}
	return dst
}

// normalizedText is the text as the normalizer leaves it, with spaces where it
// has U+2581.
func (t *Tokenizer) normalizedText(s string) string {
	s = strings.ReplaceAll(s, lowLine, " ")
	if t.prefix == prefixAlways && s != "" {
		s = " " + s
	}
	return s
}

// plain appends the ids of text without added tokens.
func (w *worker) plain(dst []uint32, s string, first bool) []uint32 {
	if w.t.sp != nil && strings.Contains(s, lowLine) {
		w.text = w.text[:0]
		for {
			i := strings.Index(s, lowLine)
			if i < 0 {
				break
			}
			w.text = append(append(w.text, s[:i]...), ' ')
			s = s[i+len(lowLine):]
		}
		w.text = append(w.text, s...)
		s = stringOf(w.text)
	}
	if w.t.prefix == prefixAlways {
		return w.spaced(dst, s)
	}
	return w.pretokenized(dst, s, first)
}

// pretokenized appends the ids of normalized text.
func (w *worker) pretokenized(dst []uint32, s string, first bool) []uint32 {
	switch {
	case w.t.prefix == prefixFirst && !first, w.t.prefix == prefixNone, w.t.prefix == prefixAlways:
	case s[0] != ' ':
		return w.spaced(dst, s)
	}
	return w.paragraphs(dst, s)
}

// spaced appends the ids of a space and s.
func (w *worker) spaced(dst []uint32, s string) []uint32 {
	w.spacing = append(append(w.spacing[:0], ' '), s...)
	return w.paragraphs(dst, stringOf(w.spacing))
}

package bpe

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Marked tokenizes marked text, in which special tokens are ids: what a client writes cannot become one. Marked text is
// UTF-8 with two marks, whose first bytes UTF-8 does not have. Each text between marks is tokenized separately.
type Marked struct{ *Tokenizer }

const (
	markPart  = 0xfe // ends a text
	markToken = 0xff // followed by the four bytes of a token id
)

// AppendPart appends the mark between two texts.
func AppendPart(dst []byte) []byte { return append(dst, markPart) }

// AppendToken appends the mark of a token id.
func AppendToken(dst []byte, id uint32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, markToken), id)
}

// PlainOfMarked returns marked text with the strings of its tokens, for people to read.
func (m Marked) PlainOfMarked(text string) string {
	out := make([]byte, 0, len(text))
	for at := 0; at < len(text); at++ {
		switch {
		case text[at] == markToken && at+4 < len(text):
			name, _ := m.Token(binary.BigEndian.Uint32([]byte(text[at+1 : at+5])))
			out = append(out, name...)
			at += 4
		case text[at] < markPart:
			out = append(out, text[at])
		}
	}
	return string(out)
}

// EncodeAfter is Tokenizer.EncodeAfter for marked text. Nothing is added to it: addSpecial is ignored.
func (m Marked) EncodeAfter(stop <-chan struct{}, dst []uint32, cuts []Cut, text string, from Cut, _ bool) ([]uint32, []Cut, error) {
	if len(text) > MaxText {
		return dst, cuts, fmt.Errorf("%w: %d bytes, the limit is %d", ErrLimit, len(text), MaxText)
	}
	enc := m.acquire(stop, from.Space)
	if enc == nil {
		return dst, cuts, ErrStopped
	}
	defer m.release(enc)
	base, last := len(dst)-from.IDs, from.Text
	enc.match.allow(len(text))
	for at := from.Text; at < len(text) && !enc.watch.stopped; {
		if text[at] >= markPart {
			if text[at] == markToken {
				if at+5 > len(text) {
					return dst, cuts, errInvalid
				}
				dst = append(dst, binary.BigEndian.Uint32(bytesOf(text)[at+1:]))
				at += 4
			}
			at++
			if at >= last+cutDistance {
				cuts = append(cuts, Cut{Text: at, IDs: len(dst) - base})
				last = at
			}
			continue
		}
		end := at
		for end < len(text) && text[end] < markPart {
			end++
		}
		part := text[at:end]
		if !utf8.ValidString(part) {
			// tiktoken takes a surrogate without a partner for U+FFFD, which has three bytes too. Two in a row may be partners.
			valid := strings.ToValidUTF8(part, "\uFFFD")
			switch {
			case !m.config.MistralFile.Tekken:
				return dst, cuts, errInvalid
			case len(valid) != len(part):
				return dst, cuts, fmt.Errorf("%w: surrogates in a row", ErrLimit)
			}
			part = valid
		}
		if enc.watch.over(len(part)) {
			break
		}
		dst = enc.ordinary(dst, part)
		at = end
	}
	switch {
	case enc.watch.stopped:
		return dst, cuts, ErrStopped
	case enc.match.exceeded():
		return dst, cuts, fmt.Errorf("%w: the split pattern takes too long", ErrLimit)
	}
	return dst, cuts, nil
}

// ordinary appends the ids of text in which no added tokens are sought.
func (enc *encoder) ordinary(dst []uint32, s string) []uint32 {
	if enc.t.pipe != nil {
		return enc.pipelined(dst, s, 0)
	}
	if enc.t.nfc && composeAt(s, 0, &enc.watch) < len(s) {
		enc.nfc = enc.composed(enc.nfc[:0], s)
		s = stringOf(enc.nfc)
	}
	return enc.plain(dst, s, true)
}

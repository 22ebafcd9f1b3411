package bpe

import "fmt"

// literalBPE is a BPE model whose tokens are the text that they match, with optional byte tokens and an optional unknown token.
type literalBPE struct {
	t        *Tokenizer
	fallback bool
	bytes    [256]uint32 // token of "<0x41>", maxID if none
	unk      uint32      // maxID if none
	fuse     bool        // consecutive unknown symbols share one unk
}

// literalBPE returns the model of a tokenizer that runs as a pipeline.
func (t *Tokenizer) literalBPE(head *modelHead) error {
	m := &literalBPE{t: t, fallback: head.ByteFallback, bytes: t.byteTokens(), unk: maxID, fuse: head.FuseUnk}
	if head.Unk != nil {
		id, _, ok := t.vocab.find([]byte(*head.Unk))
		if !ok {
			return unsupported("the unknown token %q is not in the vocabulary", *head.Unk)
		}
		m.unk = id
	}
	t.pipe.finish = func(enc *encoder, dst []uint32, word piece) []uint32 { return m.word(enc, dst, word.text) }
	return nil
}

// word appends the ids of a word.
func (m *literalBPE) word(enc *encoder, dst []uint32, word string) []uint32 {
	b := bytesOf(word)
	h := hashBytes(b)
	if m.t.ignoreMerges {
		if id, _, ok := m.t.vocab.findHash(h, b); ok {
			return append(dst, id)
		}
	}
	if len(b) <= maxWord {
		if ids, ok := enc.long.get(h^enc.space, b); ok {
			return append(dst, ids...)
		}
	}
	if len(b) > hugeWord {
		if !huge.take(enc.watch.stop) {
			enc.watch.look()
			return dst
		}
		defer huge.give()
		enc.merge.parts = make([]uint64, 0, len(b))
	}
	at := len(dst)
	enc.merge.parts = m.symbols(enc.merge.parts[:0], word, &enc.watch)
	dst = enc.merge.run(m.t.merges, dst, &enc.watch)
	enc.merge.trim()
	if len(b) <= maxWord {
		enc.long.put(h^enc.space, b, dst[at:])
	}
	return dst
}

// symbols appends the initial tokens for merging. As in the library, an unknown symbol without byte tokens is emitted
// before the next known one, after symbols that are spelled in bytes. Once stopped, it appends a part.
func (m *literalBPE) symbols(dst []uint64, word string, wanted *watch) []uint64 {
	waiting := 0
	flush := func() {
		for ; waiting > 0; waiting-- {
			dst = append(dst, uint64(m.unk))
		}
	}
	for i := 0; i < len(word) && !wanted.over(1); {
		end := i + 1
		for end < len(word) && word[end]&0xc0 == 0x80 {
			end++
		}
		symbol := bytesOf(word[i:end])
		i = end
		if id, _, ok := m.t.vocab.find(symbol); ok {
			flush()
			dst = append(dst, uint64(id))
			continue
		}
		if m.fallback {
			if spelled, ok := appendBytes(dst, &m.bytes, symbol); ok {
				dst = spelled
				continue
			}
		}
		if m.unk == maxID {
			continue // the library drops it
		}
		if waiting > 0 && !m.fuse {
			flush()
		}
		waiting = 1
	}
	flush()
	return dst
}

// byteTokens are the tokens "<0x00>" to "<0xFF>" of a vocabulary, maxID for those that it lacks.
func (t *Tokenizer) byteTokens() (ids [256]uint32) {
	for b := range ids {
		ids[b] = maxID
		if id, ok := t.TokenID(fmt.Sprintf("<0x%02X>", b)); ok {
			ids[b] = id
		}
	}
	return ids
}

// appendBytes appends the tokens of the bytes of a text; false if one has none.
func appendBytes[T uint32 | uint64](dst []T, tokens *[256]uint32, text []byte) ([]T, bool) {
	at := len(dst)
	for _, b := range text {
		if tokens[b] == maxID {
			return dst[:at], false
		}
		dst = append(dst, T(tokens[b]))
	}
	return dst, true
}

package bpe

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// modelHead is the model member of tokenizer.json without its tables.
type modelHead struct {
	Type          string   `json:"type"`
	Dropout       *float64 `json:"dropout"`
	Unk           *string  `json:"unk_token"`
	UnkID         *int     `json:"unk_id"`
	FuseUnk       bool     `json:"fuse_unk"`
	Prefix        string   `json:"continuing_subword_prefix"`
	Suffix        string   `json:"end_of_word_suffix"`
	ByteFallback  bool     `json:"byte_fallback"`
	IgnoreMerges  bool     `json:"ignore_merges"`
	vocab, merges []byte
	list          *tokenList // instead of vocab and merges
}

func readHead(raw []byte) (*modelHead, error) {
	head := &modelHead{}
	var rest strings.Builder
	if err := eachMember(raw, func(key, value []byte) error {
		switch name := string(key); name {
		case "vocab":
			head.vocab = value
		case "merges":
			head.merges = value
		default:
			fmt.Fprintf(&rest, ",%q:%s", name, value)
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if err := json.Unmarshal([]byte("{"+strings.TrimPrefix(rest.String(), ",")+"}"), head); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	switch {
	case head.Type == "Unigram":
	case head.Type != "BPE" && (head.Type != "" || head.merges == nil):
		return nil, unsupported("model %s, which is neither BPE nor Unigram", cmp.Or(head.Type, "without a type"))
	case head.Dropout != nil && *head.Dropout != 0:
		return nil, unsupported("BPE with dropout")
	case head.Prefix != "" || head.Suffix != "":
		return nil, unsupported("BPE with continuing_subword_prefix %q, end_of_word_suffix %q", head.Prefix, head.Suffix)
	}
	return head, nil
}

// readTables reads vocabulary and merges.
func (t *Tokenizer) readTables(head *modelHead) (err error) {
	if head.list != nil {
		if t.vocab, err = head.list.vocab(); err == nil {
			t.merges, err = head.list.merges(t.vocab)
		}
		return err
	}
	if t.vocab, err = readVocab(head.vocab, t.form.text); err != nil {
		return fmt.Errorf("vocab: %w", err)
	}
	if t.merges, err = readMerges(head.merges, t.vocab, t.form.text); err != nil {
		return fmt.Errorf("merges: %w", err)
	}
	return nil
}

func (t *Tokenizer) readModel(head *modelHead) error {
	t.ignoreMerges = head.IgnoreMerges
	err := t.readTables(head)
	if err != nil {
		return err
	}
	for token, id := range t.vocab.literal {
		t.literalOf[id] = token
	}
	switch {
	case t.pipe != nil && !t.pipe.bytes:
		t.merges.pairs, t.merges.ranks = nil, nil
		return t.literalBPE(head)
	case t.sp != nil:
		err = t.spaceSymbols()
	default:
		err = t.byteSymbols()
	}
	if err != nil {
		return err
	}
	t.completeBPE()
	return nil
}

// completeBPE derives the other tables from those of symbols and merges.
func (t *Tokenizer) completeBPE() {
	t.pairASCII()
	wholes := t.markWhole()
	if t.sp == nil {
		t.findUnits()
	}
	t.prepareWords(wholes)
	t.merges.pairs, t.merges.ranks = nil, nil
}

// prepareWords builds the tables that are consulted before merging. With ignoreMerges, a word that is a token is not merged, but
// a part of a word is. So words are cut into parts only if merging each token's text yields the token, which makes both the same.
func (t *Tokenizer) prepareWords(wholes []bool) {
	t.short = newShortTokens(t.vocab, func(id uint32) bool { return t.ignoreMerges || wholes[id] })
	t.parter = t.splitter
	if t.sp != nil {
		if !t.ignoreMerges && !t.mergesBytes() {
			spaces, _ := t.splitter.(spaceSplit)
			t.parter = adjacencySplit{newAdjacency(t.vocab, false), spaces.each}
		}
		return
	}
	for id, whole := range wholes {
		if t.ignoreMerges && !whole && !isASCII(t.vocab.bytes(uint32(id))) {
			return
		}
	}
	t.adjacency = newAdjacency(t.vocab, true)
}

// mergesBytes reports whether a merge consumes or produces a byte token: the text of such a token
// differs from what it stands for.
func (t *Tokenizer) mergesBytes() bool {
	for i, p := range t.merges.pairs {
		for _, b := range t.sp.bytes {
			if p[0] == b || p[1] == b || t.merges.result[t.merges.rankAt(i)] == b {
				return true
			}
		}
	}
	return false
}

func isASCII(b []byte) bool {
	for _, c := range b {
		if c >= 0x80 {
			return false
		}
	}
	return true
}

// byteSymbols finds the token of each byte.
func (t *Tokenizer) byteSymbols() error {
	for b := range 256 {
		id, _, ok := t.vocab.find([]byte{byte(b)})
		if !ok && b < 0xf5 && b != 0xc0 && b != 0xc1 {
			return unsupported("no token for byte 0x%02x", b)
		}
		t.byteID[b] = id
	}
	return nil
}

// spaceSymbols finds the token of each character and of each byte, and whether text may be cut before spaces.
func (t *Tokenizer) spaceSymbols() error {
	t.sp.bytes = t.byteTokens()
	if b := slices.Index(t.sp.bytes[:], maxID); b >= 0 && t.sp.unk == maxID {
		return unsupported("byte_fallback without the token <0x%02X>", b)
	}
	t.sp.bmp = slices.Repeat([]uint32{maxID}, 0x10000)
	t.sp.astral = map[rune]uint32{}
	for id, has := range t.vocab.has {
		if !has {
			continue
		}
		r, ok := onlyRune(t.vocab.bytes(uint32(id)))
		switch {
		case !ok:
		case r < 0x10000:
			t.sp.bmp[r] = uint32(id)
		default:
			t.sp.astral[r] = uint32(id)
		}
	}
	for b := range t.byteID[:128] {
		if t.byteID[b] = t.sp.bmp[b]; t.byteID[b] == maxID {
			t.byteID[b] = min(t.sp.bytes[b], t.sp.unk)
		}
	}
	if t.splitter == (wholeSplit{}) && !t.ignoreMerges && !slices.ContainsFunc(t.merges.result, t.vocab.spaceInside) {
		t.splitter = spaceSplit{}
	}
	return nil
}

// pairASCII looks up all pairs of ASCII characters.
func (t *Tokenizer) pairASCII() {
	t.asciiPairs = new(asciiPairs)
	for a := range 128 {
		for b := range 128 {
			t.asciiPairs[a<<7|b] = t.merges.pair(t.merges.rank(t.byteID[a], t.byteID[b]), 0)
		}
	}
}

// onlyRune returns the character that b consists of, if it is exactly one.
func onlyRune(b []byte) (rune, bool) {
	r, n := utf8.DecodeRune(b)
	return r, n > 0 && n == len(b)
}

// spaceInside reports whether a token has a space after a non-space.
func (v *vocab) spaceInside(id uint32) bool {
	return bytes.IndexByte(bytes.TrimLeft(v.bytes(id), " "), ' ') >= 0
}

// markWhole marks and returns the tokens that merging their own text yields: only these may be looked up
// instead of merged. With ignoreMerges every whole word that is a token may be looked up, so the
// mark matters only for parts of words, which have non-ASCII text.
func (t *Tokenizer) markWhole() []bool {
	var w merger
	var out []uint32
	return t.vocab.markWhole(func(id uint32) bool {
		if t.ignoreMerges && isASCII(t.vocab.bytes(id)) {
			return false
		}
		w.parts = t.symbols(w.parts[:0], t.vocab.bytes(id))
		out = w.run(t.merges, out[:0], new(watch))
		w.trim()
		return len(out) == 1 && out[0] == id
	})
}

package bpe

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Errors of Encode wrap ErrText for text that the reference rejects too, and ErrLimit for text that is longer than
// MaxText or exceeds the work limit of the tokenizer's split pattern. The reference has no such limits.
var (
	ErrText  = errors.New("text cannot be tokenized")
	ErrLimit = errors.New("text is too large to be tokenized here")
)

// MaxText is the maximum length of a text in bytes.
const MaxText = 1 << 28

// Tokenizer computes token ids. It is safe for concurrent use, and immutable except for its caches.
type Tokenizer struct {
	config       Config
	vocab        *vocab
	merges       *merges
	ignoreMerges bool
	splitter     splitter
	parter       splitter   // splitter, or one that cuts its words into parts
	adjacency    *adjacency // nil if words are not cut into parts
	short        *shortTokens
	cuts         *cutter
	nfc          bool
	// lazy reports that only segments that the memo lacks are checked and normalized, not the whole text beforehand. See cutter.
	lazy   bool
	prefix prefixSpace

	form       tokenForm
	pipe       *pipeline   // nil for the usual shapes
	sp         *spaceModel // nil for byte-level models
	unigram    *unigram    // nil for BPE
	byteID     [256]uint32 // of SentencePiece models, those of ASCII characters
	asciiPairs *asciiPairs
	units      units

	added     []AddedToken
	addedID   map[string]uint32
	raw       *addedSet
	normal    *addedSet
	before    []uint32
	after     []uint32
	literalOf map[uint32]string

	encoders *encoders
	memo     *memo

	mistral *Tokenizer // see Mistral

	longest int // see MinTokens
	maxRun  int // in bytes, see runs; 0: no limit
}

// prefixSpace defines where a space is put before a stretch of text.
type prefixSpace uint8

const (
	prefixNone   prefixSpace = iota
	prefixAlways             // normalizer Prepend: before each stretch between added tokens
	prefixUnless             // unless the stretch begins with a space
	prefixFirst              // the same, and only at the start of the text
)

// spaceModel is the model of SentencePiece-style tokenizers, which match characters instead of bytes.
type spaceModel struct {
	bmp    []uint32 // token of a character of the BMP, maxID if none
	astral map[rune]uint32
	bytes  [256]uint32
	unk    uint32 // of characters without bytes; maxID: all have bytes
	// marked: the normalizer writes U+2581 for spaces, so added tokens of normalized text are matched after it.
	marked bool
}

// Encode appends the ids of text to dst. With addSpecial it adds what the tokenizer's post-processor adds (such as a
// BOS token), as engines do for completions but not for rendered chats. Text must be valid UTF-8, otherwise the error
// wraps ErrText; a Python str cannot even hold such text. Time is nearly linear in the length for any text.
func (t *Tokenizer) Encode(dst []uint32, text string, addSpecial bool) ([]uint32, error) {
	return t.EncodeUntil(nil, dst, text, addSpecial)
}

// EncodeUntil is Encode, except that it returns ErrStopped soon after stop is closed.
func (t *Tokenizer) EncodeUntil(stop <-chan struct{}, dst []uint32, text string, addSpecial bool) ([]uint32, error) {
	if err := t.checkText(text); err != nil {
		return dst, err
	}
	if dst == nil {
		dst = make([]uint32, 0, len(text)/3+16)
	}
	enc := t.acquire(stop, 0)
	if enc == nil {
		return dst, ErrStopped
	}
	if addSpecial {
		dst = append(dst, t.before...)
	}
	dst, err := enc.encode(dst, text, 0)
	t.release(enc)
	if addSpecial && err == nil {
		dst = append(dst, t.after...)
	}
	return dst, err
}

// sglangBOS are the classes for which SGLang puts BOS before texts, and nothing after them, unless
// tokenizer_config.json disables it. tokenizer.json is then ignored.
var sglangBOS = strings.Fields("LlamaTokenizer LlamaTokenizerFast CodeLlamaTokenizer CodeLlamaTokenizerFast GemmaTokenizer GemmaTokenizerFast CohereTokenizerFast")

// ForSGLang returns the tokenizer as SGLang 0.5.23 uses it.
func (t *Tokenizer) ForSGLang() *Tokenizer {
	bos, ok := t.TokenID(t.config.Special["bos_token"])
	if !ok || !slices.Contains(sglangBOS, t.config.TokenizerClass) || t.config.llama.noBOS || slices.Equal(t.before, []uint32{bos}) && t.after == nil {
		return t
	}
	own := *t
	own.before, own.after = []uint32{bos}, nil
	return &own
}

// Added returns how many ids addSpecial puts before and after a text.
func (t *Tokenizer) Added() (before, after int) { return len(t.before), len(t.after) }

var errInvalid = fmt.Errorf("%w: not valid UTF-8", ErrText)

// checkText checks what encode does not.
func (t *Tokenizer) checkText(text string) error {
	if len(text) > MaxText {
		return fmt.Errorf("%w: %d bytes, the limit is %d", ErrLimit, len(text), MaxText)
	}
	if !t.lazy && !utf8.ValidString(text) {
		return errInvalid
	}
	return nil
}

// nfcShrinks exceeds the factor by which NFC can shorten a text in bytes: three for Hangul and some singletons, such as U+1FEF.
const nfcShrinks = 4

// MinTokens returns a lower bound of the number of ids of text without tokenizing it: its length divided by that of the longest
// token, in bytes. It is 0 if a token can stand for any number of bytes, such as one that consumes the adjacent white space.
func (t *Tokenizer) MinTokens(text string) int {
	if t.longest == 0 {
		return 0
	}
	n := len(text)
	switch {
	case t.nfc && composeAt(text, 0, new(watch)) < len(text):
		n /= nfcShrinks
	case t.sp != nil && strings.Contains(text, spaceMark):
		n /= len(spaceMark) // the text may consist of U+2581, three bytes each, which the vocabulary holds as a space
	}
	return n / t.longest
}

// longestToken returns the length of the longest token for MinTokens, in bytes, or 0 if the lengths
// do not bound the number of tokens.
func (t *Tokenizer) longestToken() (n int) {
	if t.pipe != nil || t.nfc && t.sp != nil {
		return 0
	}
	for id := range t.vocab.has {
		n = max(n, len(t.vocab.bytes(uint32(id))))
	}
	for _, a := range t.added {
		if a.Lstrip || a.Rstrip {
			return 0
		}
		n = max(n, len(a.Content))
	}
	return n
}

// TokenID returns the id of a token by its string in tokenizer.json; added tokens take precedence.
func (t *Tokenizer) TokenID(token string) (uint32, bool) {
	if id, ok := t.addedID[token]; ok {
		return id, true
	}
	if id, ok := t.vocab.literal[token]; ok {
		return id, true
	}
	b, ok := t.form.text(nil, []byte(token))
	if !ok {
		return 0, false
	}
	id, _, ok := t.vocab.find(b)
	return id, ok
}

// Token returns the string of an id as in tokenizer.json.
func (t *Tokenizer) Token(id uint32) (string, bool) {
	if s, ok := t.literalOf[id]; ok {
		return s, true
	}
	if int(id) >= len(t.vocab.has) || !t.vocab.has[id] {
		return "", false
	}
	return t.form.name(t.vocab.bytes(id)), true
}

// VocabSize returns the number of tokens, including added ones.
func (t *Tokenizer) VocabSize() int {
	n := t.vocab.count
	for _, a := range t.added {
		if int(a.ID) >= len(t.vocab.has) || !t.vocab.has[a.ID] {
			n++
		}
	}
	return n
}

// AddedTokens returns the added tokens, sorted by id.
func (t *Tokenizer) AddedTokens() []AddedToken { return slices.Clone(t.added) }

// Config returns the content of the files besides tokenizer.json.
func (t *Tokenizer) Config() *Config { return &t.config }

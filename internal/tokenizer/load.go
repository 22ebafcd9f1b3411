package tokenizer

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// ErrUnsupported is wrapped by Load's error for a tokenizer that this package
// cannot reproduce exactly; the text names the part. Such a model has to be
// routed without ids.
var ErrUnsupported = errors.New("tokenizer not supported")

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

// Load reads a model's tokenizer from the files that its repository has:
// tokenizer.json and, where they exist, tokenizer_config.json, config.json,
// generation_config.json, special_tokens_map.json and the chat templates. Each
// may be gzipped (tokenizer.json.gz). The result is what Hugging Face
// tokenizers computes for tokenizer.json with the added tokens that
// transformers 5 takes from the configuration.
func Load(fsys fs.FS) (*Tokenizer, error) {
	raw, err := readFile(fsys, "tokenizer.json")
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	if raw == nil {
		return nil, fmt.Errorf("load tokenizer: no tokenizer.json: %w", fs.ErrNotExist)
	}
	config, err := readConfig(fsys)
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	t, err := parse(raw, config)
	if err != nil {
		return nil, fmt.Errorf("load tokenizer.json: %w", err)
	}
	return t, nil
}

// file is tokenizer.json, its parts still raw.
type file struct {
	model, added, normalizer, preTokenizer, postProcessor []byte
}

func parse(raw []byte, config Config) (*Tokenizer, error) {
	var f file
	s := &scanner{b: raw}
	parts := map[string]*[]byte{
		"model": &f.model, "added_tokens": &f.added, "normalizer": &f.normalizer,
		"pre_tokenizer": &f.preTokenizer, "post_processor": &f.postProcessor,
	}
	if err := s.object(func(key []byte) error {
		to := parts[string(key)]
		value, err := s.raw()
		if to != nil {
			*to = value
		}
		return err
	}); err != nil {
		return nil, err
	}
	t := &Tokenizer{config: config, encoders: newEncoders(), memo: &memo{}, addedID: map[string]uint32{}, literalOf: map[uint32]string{}}
	head, err := readHead(f.model)
	if err != nil {
		return nil, err
	}
	if err := t.rebuild(&f, head); err != nil {
		return nil, err
	}
	if err := t.readPipeline(&f, head); err != nil {
		return nil, err
	}
	if err := t.readModel(head); err != nil {
		return nil, err
	}
	if err := t.readAdded(f.added); err != nil {
		return nil, err
	}
	if err := t.readPost(f.postProcessor); err != nil {
		return nil, err
	}
	t.cuts = newCutter(t.splitter)
	t.longest = t.longestToken()
	return t, nil
}

// component is any normalizer, pre-tokenizer or post-processor.
type component struct {
	Type          string      `json:"type"`
	Normalizers   []component `json:"normalizers"`
	Pretokenizers []component `json:"pretokenizers"`
	Processors    []component `json:"processors"`

	Prepend string `json:"prepend"`
	Content string `json:"content"`
	Pattern struct {
		String *string `json:"String"`
		Regex  *string `json:"Regex"`
	} `json:"pattern"`
	Behavior       string `json:"behavior"`
	Invert         bool   `json:"invert"`
	AddPrefixSpace *bool  `json:"add_prefix_space"`
	UseRegex       *bool  `json:"use_regex"`
	Individual     bool   `json:"individual_digits"`
	Replacement    string `json:"replacement"`
	PrependScheme  string `json:"prepend_scheme"`
	Split          *bool  `json:"split"`

	CLS *namedID `json:"cls"`
	SEP *namedID `json:"sep"`

	Single        []templatePiece `json:"single"`
	SpecialTokens map[string]struct {
		IDs []uint32 `json:"ids"`
	} `json:"special_tokens"`
}

// namedID is a token as ["</s>", 2].
type namedID struct{ id uint32 }

func (n *namedID) UnmarshalJSON(b []byte) error {
	var name string
	return json.Unmarshal(b, &[]any{&name, &n.id})
}

type templatePiece struct {
	SpecialToken *struct {
		ID string `json:"id"`
	} `json:"SpecialToken"`
	Sequence *struct {
		ID string `json:"id"`
	} `json:"Sequence"`
}

// readComponents is the list of components of a part: none for null, the
// members of a Sequence.
func readComponents(raw []byte, what string) ([]component, error) {
	var c *component
	if len(raw) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if c == nil {
		return nil, nil
	}
	return flatten(*c), nil
}

func flatten(c component) []component {
	if c.Type != "Sequence" {
		return []component{c}
	}
	var out []component
	for _, list := range [][]component{c.Normalizers, c.Pretokenizers, c.Processors} {
		for _, x := range list {
			out = append(out, flatten(x)...)
		}
	}
	return out
}

// errRebuilt is why a tokenizer is refused that no pipeline could follow either.
var errRebuilt = errors.New("rebuilt by the engine")

// readPipeline reads normalizer and pre-tokenizer: the usual shapes, which have
// fast ways, or any other as a pipeline.
func (t *Tokenizer) readPipeline(f *file, head *modelHead) error {
	norm, err := readComponents(f.normalizer, "normalizer")
	if err != nil {
		return err
	}
	pre, err := readComponents(f.preTokenizer, "pre_tokenizer")
	if err != nil {
		return err
	}
	err = t.usual(norm, pre, head)
	if !errors.Is(err, ErrUnsupported) || errors.Is(err, errRebuilt) {
		return err
	}
	t.nfc, t.prefix, t.sp, t.splitter, t.form = false, prefixNone, nil, wholeSplit{}, literalForm
	bytes := !head.ByteFallback && len(pre) > 0 && pre[len(pre)-1].Type == "ByteLevel"
	if bytes {
		t.form = byteForm
	}
	t.pipe, err = newPipeline(norm, pre, bytes)
	return err
}

// usual reads the shapes that most models have, and so whether the model is
// byte-level.
func (t *Tokenizer) usual(norm, pre []component, head *modelHead) error {
	for _, p := range pre {
		if p.Type == "ByteLevel" {
			if head.ByteFallback {
				return unsupported("byte-level model with byte_fallback")
			}
			t.form = byteForm
			return t.byteLevel(norm, pre)
		}
	}
	if !head.ByteFallback {
		return unsupported("model without bytes and without byte_fallback")
	}
	t.form = spaceForm
	return t.spaceLevel(norm, pre)
}

func (t *Tokenizer) byteLevel(norm, pre []component) error {
	for _, n := range norm {
		if n.Type != "NFC" {
			return unsupported("normalizer %s before a byte-level model", n.Type)
		}
		t.nfc = true
	}
	last := pre[len(pre)-1]
	if last.Type != "ByteLevel" {
		return unsupported("pre-tokenizer %s after ByteLevel", last.Type)
	}
	pre = pre[:len(pre)-1]
	if last.AddPrefixSpace == nil || *last.AddPrefixSpace {
		if len(pre) > 0 {
			return unsupported("ByteLevel with add_prefix_space after another pre-tokenizer")
		}
		t.prefix = prefixUnless
	}
	regex := last.UseRegex == nil || *last.UseRegex
	var types, found []string
	for _, p := range pre {
		types = append(types, p.Type)
		if p.Type == "Split" {
			if p.Pattern.Regex == nil {
				return unsupported("Split by a string before ByteLevel")
			}
			covers := p.Behavior == "Isolated" && !p.Invert || p.Behavior == "Removed" && p.Invert && len(pre) == 1
			if !covers {
				return unsupported("Split with behavior %s, invert %t", p.Behavior, p.Invert)
			}
			found = append(found, *p.Pattern.Regex)
		}
	}
	switch kinds := strings.Join(types, " "); {
	case regex && kinds == "":
		t.splitter = gpt2Split{}
	case regex && kinds == "Digits" && pre[0].Individual:
		t.splitter = gpt2Split{digits: true}
	case regex:
		return unsupported("pre-tokenizers [%s] before ByteLevel with its own pattern", kinds)
	case kinds == "Split":
		known, ok := patterns[found[0]]
		if !ok {
			return unsupported("unknown split pattern %q", found[0])
		}
		t.splitter = known
	case kinds == "Split Split Split" && slices.Equal(found, stages):
		t.splitter = stagedSplit{}
	case kinds == "":
		t.splitter = wholeSplit{}
	default:
		return unsupported("pre-tokenizers [%s] with patterns %q", kinds, found)
	}
	if t.rebuiltLlama() {
		return fmt.Errorf("%w: model_type %s with tokenizer_class %s and a byte-level tokenizer.json: engines of different"+
			" versions have it %w differently", ErrUnsupported, t.config.ModelType, t.config.TokenizerClass, errRebuilt)
	}
	return nil
}

// spaceLevel reads the pipeline of a SentencePiece-style model: spaces become
// U+2581 in the normalizer or in the pre-tokenizer Metaspace.
func (t *Tokenizer) spaceLevel(norm, pre []component) error {
	t.sp = &spaceModel{}
	replaced := false
	for _, n := range norm {
		switch {
		case n.Type == "Prepend" && n.Prepend == lowLine && !replaced:
			t.prefix = prefixAlways
		case n.Type == "Replace" && n.Pattern.String != nil && *n.Pattern.String == " " && n.Content == lowLine:
			replaced = true
		default:
			return unsupported("normalizer %s before a model without bytes", n.Type)
		}
	}
	if t.prefix == prefixAlways && !replaced {
		return unsupported("normalizer Prepend without Replace")
	}
	t.splitter = wholeSplit{}
	if t.rebuiltLlama() {
		t.prefix = prefixNone
		if t.config.llama.addPrefixSpace {
			t.prefix = prefixFirst
			if t.config.llama.legacy {
				t.prefix = prefixUnless
			}
		}
		return nil
	}
	t.sp.marked = replaced
	switch {
	case len(pre) == 0 && replaced:
		return nil
	case len(pre) == 1 && pre[0].Type == "Split" && replaced && pre[0].Pattern.String != nil &&
		*pre[0].Pattern.String == " ":
		return nil // Gemma 3: there are no spaces left to split at
	case len(pre) == 1 && pre[0].Type == "Metaspace" && t.prefix == prefixNone:
		return t.metaspace(pre[0])
	}
	return unsupported("pre-tokenizer of a model without bytes that is neither none nor Metaspace")
}

// rebuiltLlama tells whether transformers 5 ignores the pipeline of
// tokenizer.json, for its class LlamaTokenizer, which builds its own, without
// normalizer and with an unsplit Metaspace.
func (t *Tokenizer) rebuiltLlama() bool { return t.config.engineClass() == "LlamaTokenizer" }

func (t *Tokenizer) metaspace(p component) error {
	if p.Replacement != lowLine {
		return unsupported("Metaspace with replacement %q", p.Replacement)
	}
	scheme, err := p.prependScheme()
	if err != nil {
		return err
	}
	switch scheme {
	case "always":
		t.prefix = prefixUnless
	case "first":
		t.prefix = prefixFirst
	}
	if p.Split == nil || *p.Split {
		t.splitter = spaceSplit{each: true}
	}
	return nil
}

// modelHead is the model without its tables.
type modelHead struct {
	Type          string   `json:"type"`
	Dropout       *float64 `json:"dropout"`
	Unk           *string  `json:"unk_token"`
	FuseUnk       bool     `json:"fuse_unk"`
	Prefix        string   `json:"continuing_subword_prefix"`
	Suffix        string   `json:"end_of_word_suffix"`
	ByteFallback  bool     `json:"byte_fallback"`
	IgnoreMerges  bool     `json:"ignore_merges"`
	vocab, merges []byte
}

func readHead(raw []byte) (*modelHead, error) {
	head := &modelHead{}
	if len(raw) == 0 {
		return nil, fmt.Errorf("%w: no model", errJSON)
	}
	s := &scanner{b: raw}
	var rest strings.Builder
	if err := s.object(func(key []byte) error {
		name := string(key)
		value, err := s.raw()
		switch name {
		case "vocab":
			head.vocab = value
		case "merges":
			head.merges = value
		default:
			fmt.Fprintf(&rest, ",%q:%s", name, value)
		}
		return err
	}); err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte("{"+strings.TrimPrefix(rest.String(), ",")+"}"), head); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	switch {
	case head.Type != "BPE" && (head.Type != "" || head.merges == nil):
		return nil, unsupported("model %s, which is not BPE", cmp.Or(head.Type, "without a type"))
	case head.Dropout != nil && *head.Dropout != 0:
		return nil, unsupported("BPE with dropout")
	case head.Prefix != "" || head.Suffix != "":
		return nil, unsupported("BPE with continuing_subword_prefix %q, end_of_word_suffix %q", head.Prefix, head.Suffix)
	}
	return head, nil
}

func (t *Tokenizer) readModel(head *modelHead) error {
	t.ignoreMerges = head.IgnoreMerges
	var err error
	if t.vocab, err = readVocab(&scanner{b: head.vocab}, t.form.text); err != nil {
		return fmt.Errorf("vocab: %w", err)
	}
	if t.merges, err = readMerges(&scanner{b: head.merges}, t.vocab, t.form.text); err != nil {
		return fmt.Errorf("merges: %w", err)
	}
	for token, id := range t.vocab.literal {
		t.literalOf[id] = token
	}
	switch {
	case t.pipe != nil && !t.pipe.bytes:
		t.merges.pairs = nil
		return t.literalBPE(head)
	case t.sp != nil:
		err = t.spaceSymbols()
	default:
		err = t.byteSymbols()
	}
	if err != nil {
		return err
	}
	t.pairASCII()
	t.markWhole()
	if t.sp == nil {
		t.findUnits()
	}
	t.prepareWords()
	t.merges.pairs = nil
	return nil
}

// prepareWords makes what answers for words before merging does. Where words
// that are tokens are not merged at all, a part of a word must not be taken for
// such a word: so nothing is cut unless merging gives the same for each token
// that a part could be.
func (t *Tokenizer) prepareWords() {
	wholes := make([]bool, len(t.vocab.has))
	t.vocab.eachSlot(func(id uint32, whole bool) { wholes[id] = whole })
	t.short = newShortTokens(t.vocab, func(id uint32) bool { return t.ignoreMerges || wholes[id] })
	t.parter = t.splitter
	if t.sp != nil {
		if !t.ignoreMerges && !t.mergesBytes() {
			spaces, _ := t.splitter.(spaceSplit)
			t.parter = jointSplit{newJoints(t.vocab, false), spaces.each}
		}
		return
	}
	for id, whole := range wholes {
		if t.ignoreMerges && !whole && !isASCII(t.vocab.bytes(uint32(id))) {
			return
		}
	}
	t.joints = newJoints(t.vocab, true)
}

// mergesBytes tells whether a merge takes or makes a token that stands for a
// byte: the text of such a token is not what it stands for.
func (t *Tokenizer) mergesBytes() bool {
	for rank, p := range t.merges.pairs {
		for _, b := range t.sp.bytes {
			if p[0] == b || p[1] == b || t.merges.result[rank] == b {
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

// spaceSymbols finds the token of each character and of each byte, and whether
// text may be cut before spaces.
func (t *Tokenizer) spaceSymbols() error {
	for b := range 256 {
		token := fmt.Sprintf("<0x%02X>", b)
		id, _, ok := t.vocab.find([]byte(token))
		if !ok {
			return unsupported("byte_fallback without the token %s", token)
		}
		t.sp.bytes[b] = id
	}
	t.sp.bmp = make([]uint32, 0x10000)
	for i := range t.sp.bmp {
		t.sp.bmp[i] = maxID
	}
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
			t.byteID[b] = t.sp.bytes[b]
		}
	}
	if t.splitter == (wholeSplit{}) && !t.ignoreMerges && !t.spaceJoins() {
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

// onlyRune is the character that b is, if it is one.
func onlyRune(b []byte) (rune, bool) {
	var first rune
	n := 0
	for _, r := range string(b) {
		first = r
		n++
		if n > 1 {
			return 0, false
		}
	}
	return first, n == 1
}

// spaceJoins tells whether a merge joins something that ends in a non-space to
// something that begins with a space. Only tokens that merges make matter.
func (t *Tokenizer) spaceJoins() bool {
	for _, id := range t.merges.result {
		b := t.vocab.bytes(id)
		for i := 1; i < len(b); i++ {
			if b[i] == ' ' && b[i-1] != ' ' {
				return true
			}
		}
	}
	return false
}

// markWhole finds the tokens that merging their own text yields: only those may
// be looked up instead of merged. Where words that are tokens are not merged, the
// answer is only asked for tokens with more than ASCII.
func (t *Tokenizer) markWhole() {
	var w merger
	var out []uint32
	t.vocab.markWhole(func(id uint32) bool {
		if t.ignoreMerges && isASCII(t.vocab.bytes(id)) {
			return false
		}
		w.parts = t.symbols(w.parts[:0], t.vocab.bytes(id))
		out = w.run(t.merges, out[:0], new(watch))
		w.trim()
		return len(out) == 1 && out[0] == id
	})
}

// readAdded reads the added tokens, then those that transformers adds from the
// configuration.
func (t *Tokenizer) readAdded(raw []byte) error {
	var tokens []AddedToken
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &tokens); err != nil {
			return fmt.Errorf("added_tokens: %w", err)
		}
	}
	for _, a := range tokens {
		t.add(a)
	}
	for _, a := range t.config.decoder {
		t.add(a)
	}
	for _, name := range specialNames {
		t.addSpecial(t.config.Special[name])
	}
	for _, content := range t.config.ExtraSpecial {
		t.addSpecial(content)
	}
	slices.SortFunc(t.added, func(a, b AddedToken) int { return int(a.ID) - int(b.ID) })
	var raws, normals []AddedToken
	var rawText, normalText []string
	for _, a := range t.added {
		if a.Normalized {
			normals = append(normals, a)
			normalText = append(normalText, t.normalizedContent(a.Content))
		} else {
			raws = append(raws, a)
			rawText = append(rawText, a.Content)
		}
		t.addedID[a.Content] = a.ID
		t.literalOf[a.ID] = a.Content
	}
	t.raw = newAddedSet(raws, rawText)
	t.normal = newAddedSet(normals, normalText)
	t.raw.setHard(nil)
	if t.nfc || t.sp != nil || t.pipe != nil {
		// Offsets of normalized text are not those of the text.
		t.normal.hard = make([]bool, len(t.normal.tokens))
	} else {
		t.normal.setHard(t.raw)
	}
	return nil
}

// normalizedContent is the text that a token of normalized text is found by.
func (t *Tokenizer) normalizedContent(content string) string {
	if t.pipe != nil {
		w := &encoder{}
		w.match.allow(len(content))
		return t.pipe.normalized(w, content)
	}
	if t.nfc {
		return string(appendNFC(nil, content, new(watch)))
	}
	if t.sp != nil && t.sp.marked {
		return t.normalizedText(content)
	}
	return content
}

// add gives a token the id that the library gives it: that of the vocabulary,
// else the next free one, whatever the file says. A token that is there already
// changes its flags.
func (t *Tokenizer) add(a AddedToken) {
	if a.Content == "" {
		return
	}
	for i := range t.added {
		if t.added[i].Content == a.Content {
			a.ID = t.added[i].ID
			t.added[i] = a
			return
		}
	}
	id, ok := t.TokenID(a.Content)
	if !ok {
		id = uint32(t.vocab.count)
		for _, b := range t.added {
			id = max(id, b.ID+1)
		}
	}
	a.ID = id
	t.added = append(t.added, a)
}

// addSpecial adds a named special token that is not among the added tokens.
func (t *Tokenizer) addSpecial(content string) {
	for _, a := range t.added {
		if a.Content == content {
			return
		}
	}
	t.add(AddedToken{Content: content, Special: true})
}

// readPost reads what addSpecial adds. transformers 5 ignores add_bos_token and
// add_eos_token of the configuration when there is a tokenizer.json.
func (t *Tokenizer) readPost(raw []byte) error {
	processors, err := readComponents(raw, "post_processor")
	if err != nil {
		return err
	}
	adding := 0
	for _, p := range processors {
		if p.Type == "ByteLevel" {
			continue
		}
		if adding++; adding > 1 {
			return unsupported("several post-processors that add tokens") // the second one sees a pair of texts
		}
		switch p.Type {
		case "TemplateProcessing":
			if err := t.template(p); err != nil {
				return err
			}
		case "RobertaProcessing", "BertProcessing":
			if p.CLS == nil || p.SEP == nil {
				return unsupported("post-processor %s without its tokens", p.Type)
			}
			t.before, t.after = []uint32{p.CLS.id}, []uint32{p.SEP.id}
		default:
			return unsupported("post-processor %s", p.Type)
		}
	}
	return nil
}

func (t *Tokenizer) template(p component) error {
	seen := false
	var before, after []uint32
	for _, piece := range p.Single {
		switch {
		case piece.Sequence != nil && !seen && piece.Sequence.ID == "A":
			seen = true
		case piece.SpecialToken != nil:
			special, ok := p.SpecialTokens[piece.SpecialToken.ID]
			if !ok {
				return fmt.Errorf("post_processor: special token %q has no ids", piece.SpecialToken.ID)
			}
			if seen {
				after = append(after, special.IDs...)
			} else {
				before = append(before, special.IDs...)
			}
		default:
			return unsupported("post-processor template")
		}
	}
	if !seen {
		return unsupported("post-processor template without the text")
	}
	t.before, t.after = before, after
	return nil
}

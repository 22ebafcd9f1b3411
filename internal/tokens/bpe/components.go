package bpe

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// component is any normalizer, pre-tokenizer or post-processor.
type component struct {
	Type          string      `json:"type"`
	Normalizers   []component `json:"normalizers"`
	Pretokenizers []component `json:"pretokenizers"`
	Processors    []component `json:"processors"`

	Charsmap   []byte `json:"precompiled_charsmap"`
	StripLeft  bool   `json:"strip_left"`
	StripRight bool   `json:"strip_right"`

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

// namedID is a token in the form ["</s>", 2].
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

// readComponents returns the components of a part: nil for null, the members of a Sequence.
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

// errRebuilt marks errors for which the pipeline is not an alternative.
var errRebuilt = errors.New("rebuilt by the engine")

// stages are the components of the normalizer and the pre-tokenizer.
func (f *file) stages() (norm, pre []component, err error) {
	if norm, err = readComponents(f.normalizer, "normalizer"); err == nil {
		pre, err = readComponents(f.preTokenizer, "pre_tokenizer")
	}
	return norm, pre, err
}

// readPipeline reads normalizer and pre-tokenizer: one of the usual shapes, or any other as a pipeline.
func (t *Tokenizer) readPipeline(f *file, head *modelHead) error {
	norm, pre, err := f.stages()
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

// usual reads the shapes of most models, which have fast paths.
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
	t.sp = &spaceModel{unk: maxID}
	replaced := false
	for _, n := range norm {
		switch {
		case n.Type == "Prepend" && n.Prepend == spaceMark && !replaced:
			t.prefix = prefixAlways
		case n.Type == "Replace" && n.Pattern.String != nil && *n.Pattern.String == " " && n.Content == spaceMark:
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
		return nil // Gemma 3: no spaces are left to split at
	case len(pre) == 1 && pre[0].Type == "Metaspace" && t.prefix == prefixNone:
		return t.metaspace(pre[0])
	}
	return unsupported("pre-tokenizer of a model without bytes that is neither none nor Metaspace")
}

// rebuiltLlama reports whether transformers 5 ignores the pipeline of tokenizer.json because its
// class LlamaTokenizer builds its own, without a normalizer and with an unsplit Metaspace.
func (t *Tokenizer) rebuiltLlama() bool { return t.config.engineClass() == "LlamaTokenizer" }

func (t *Tokenizer) metaspace(p component) error {
	if p.Replacement != spaceMark {
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

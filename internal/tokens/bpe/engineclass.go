package bpe

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// What transformers 5 does with a model's files depends on its tokenizer class: most use tokenizer.json unchanged, some
// use only its vocabulary, merges and post-processor, with a normalizer and a pre-tokenizer of their own.

//go:embed classes.txt
var classesText string

// tokenizerClasses is the content of classes.txt.
type tokenizerClasses struct {
	byType map[string]string
	forced map[string]bool // model types whose tokenizer_class is ignored
	builds map[string]bool // classes that do not use tokenizer.json unchanged
}

var engineClasses = lazily(func() tokenizerClasses {
	c := tokenizerClasses{map[string]string{}, map[string]bool{}, map[string]bool{}}
	for line := range strings.Lines(classesText) {
		switch f := strings.Fields(line); f[0] {
		case "type":
			for _, model := range f[2:] {
				c.byType[model] = f[1]
			}
		case "forced":
			for _, model := range f[1:] {
				c.forced[model] = true
			}
		case "builds":
			for _, class := range f[1:] {
				c.builds[class] = true
			}
		}
	}
	return c
})

// plainClasses use tokenizer.json unchanged. If transformers maps a model type to one of them, tokenizer_class is ignored.
var plainClasses = map[string]bool{"TokenizersBackend": true, "PythonBackend": true, "PreTrainedTokenizerFast": true, "MistralCommonBackend": true}

// engineClass returns the class that transformers 5.19 uses for a directory with a config.json;
// "" if it uses tokenizer.json unchanged.
func (c *Config) engineClass() string {
	if c.ModelType == "" || c.ModelType == "deepseek_v41" { // vLLM ignores that one's class
		return "" // without a config.json tokenizer.json alone decides
	}
	all := engineClasses()
	of := all.byType[c.ModelType]
	class := strings.TrimSuffix(c.TokenizerClass, "Fast")
	switch {
	case class == "":
		class = of
	case of == "" || of == class:
	case plainClasses[of]:
		return ""
	case all.forced[c.ModelType]:
		class = of
	}
	if !all.builds[class] {
		return ""
	}
	return class
}

// ownParts are the parts with which a class replaces those of tokenizer.json.
type ownParts struct {
	normalizer, preTokenizer string // JSON; %t is add_prefix_space
	model                    modelHead
	noPost                   bool // removes the post-processor too
	// unkID is that of a Unigram model, which keeps the normalizer Precompiled of the file and
	// puts EOS after a text and, with bos, BOS before it.
	unkID int
	bos   bool
	// specials are the class's defaults for special tokens that the configuration does not name: "name content ...".
	specials string
}

const (
	endOfText    = "unk_token <|endoftext|> bos_token <|endoftext|> eos_token <|endoftext|>"
	qwenTokens   = "unk_token <|endoftext|> eos_token <|endoftext|> pad_token <|endoftext|>"
	ownByteLevel = `{"type":"ByteLevel","add_prefix_space":%t,"use_regex":true}`
	ownWords     = `{"type":"Sequence","pretokenizers":[{"type":"WhitespaceSplit"},{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}]}`
	ownNFC       = `{"type":"NFC"}`
)

// ownSplit returns the pre-tokenizer of a class with a split pattern.
func ownSplit(re string) string {
	return fmt.Sprintf(`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":%q},"behavior":"Isolated","invert":false},`+
		`{"type":"ByteLevel","add_prefix_space":%%t,"use_regex":false}]}`, re)
}

// ownPartsOf maps the classes of language models to their parts.
var ownPartsOf = map[string]ownParts{
	"GPT2Tokenizer":    {preTokenizer: ownByteLevel, specials: endOfText},
	"CodeGenTokenizer": {preTokenizer: ownByteLevel, specials: endOfText},
	"GPTNeoXTokenizer": {normalizer: ownNFC, preTokenizer: ownByteLevel, noPost: true, specials: endOfText + " pad_token <|padding|>"},
	"CohereTokenizer": {normalizer: ownNFC, preTokenizer: `{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},` +
		ownByteLevel + `]}`, specials: "unk_token <UNK> bos_token <BOS_TOKEN> eos_token <|END_OF_TURN_TOKEN|> pad_token <PAD> cls_token <CLS> sep_token <SEP> mask_token <MASK_TOKEN>"},
	"Qwen2Tokenizer":   {normalizer: ownNFC, specials: qwenTokens, preTokenizer: ownSplit(reQwen)},
	"Qwen3_5Tokenizer": {normalizer: ownNFC, specials: qwenTokens, preTokenizer: ownSplit(reQwenMarks)},
	"GemmaTokenizer": {normalizer: `{"type":"Replace","pattern":{"String":" "},"content":"▁"}`,
		preTokenizer: `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`,
		model:        modelHead{ByteFallback: true, FuseUnk: true},
		specials:     "unk_token <unk> bos_token <bos> eos_token <eos> pad_token <pad> mask_token <mask>"},
	"XLMRobertaTokenizer": {preTokenizer: ownWords, unkID: 3, bos: true,
		specials: "bos_token <s> eos_token </s> sep_token </s> cls_token <s> unk_token <unk> pad_token <pad> mask_token <mask>"},
	"T5Tokenizer": {preTokenizer: ownWords, unkID: 2,
		specials: "eos_token </s> unk_token <unk> pad_token <pad>"},
	"LlamaTokenizer": {specials: "unk_token <unk> bos_token <s> eos_token </s>"}, // see rebuiltLlama
}

// sameClasses build a tokenizer equal to the one that their models' tokenizer.json describes.
var sameClasses = map[string]bool{"RobertaTokenizer": true, "WhisperTokenizer": true}

// onlyCharsmap returns the first normalizer Precompiled among those of raw, nil if there is none.
func onlyCharsmap(raw []byte) ([]byte, error) {
	norm, err := readComponents(raw, "normalizer")
	for _, n := range norm {
		if n.Type == "Precompiled" && err == nil {
			return json.Marshal(map[string]any{"type": n.Type, "precompiled_charsmap": n.Charsmap})
		}
	}
	return nil, err
}

// ownPost sets what a class with a Unigram model adds to a text.
func (t *Tokenizer) ownPost() {
	own := ownPartsOf[t.config.engineClass()]
	if id, ok := t.TokenID(t.config.Special["bos_token"]); ok && own.bos {
		t.before = []uint32{id}
	}
	if id, ok := t.TokenID(t.config.Special["eos_token"]); ok && own.unkID != 0 {
		t.after = []uint32{id}
	}
}

// rebuild replaces the parts of f that the engine's class replaces.
func (t *Tokenizer) rebuild(f *file, head *modelHead) error {
	class := t.config.engineClass()
	own, ok := ownPartsOf[class]
	if class == "" || sameClasses[class] {
		return nil
	}
	if !ok {
		return unsupported("tokenizer class %s, which builds a tokenizer of its own", class)
	}
	specials := strings.Fields(own.specials)
	for i := 0; i < len(specials); i += 2 {
		if _, ok := t.config.Special[specials[i]]; !ok && !t.config.named[specials[i]] {
			t.config.Special[specials[i]] = specials[i+1]
		}
	}
	if own.preTokenizer == "" {
		return nil
	}
	prefix := t.config.llama.prefixSpaceSet && t.config.llama.addPrefixSpace
	part := func(text string) []byte {
		if strings.Contains(text, "%t") {
			text = fmt.Sprintf(text, prefix)
		}
		return []byte(text)
	}
	charsmap := f.normalizer
	f.normalizer, f.preTokenizer = part(own.normalizer), part(own.preTokenizer)
	if (own.unkID != 0) != (head.Type == "Unigram") {
		return unsupported("tokenizer class %s with a model of another type", class)
	}
	if own.unkID != 0 {
		head.UnkID = &own.unkID
		if class == "T5Tokenizer" && !slices.ContainsFunc(t.config.ExtraSpecial, func(s string) bool { return strings.Contains(s, "<extra_id_") }) {
			for i := range 100 {
				t.config.ExtraSpecial = append(t.config.ExtraSpecial, fmt.Sprintf("<extra_id_%d>", i))
			}
		}
		var err error
		if f.normalizer, err = onlyCharsmap(charsmap); err != nil || !t.config.llama.addPrefixSpace {
			return unsupported("tokenizer class %s without add_prefix_space or with an unknown normalizer", class)
		}
	}
	if own.noPost || own.unkID != 0 {
		f.postProcessor = nil
	}
	head.ByteFallback, head.FuseUnk, head.IgnoreMerges = own.model.ByteFallback, own.model.FuseUnk, false
	return nil
}

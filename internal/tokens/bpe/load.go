package bpe

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime"
)

// ErrUnsupported is wrapped by Load's error for a tokenizer that this package cannot reproduce
// exactly; the message names the part. Such a model must be routed without ids.
var ErrUnsupported = errors.New("tokenizer not supported")

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

// Load reads a model's tokenizer from the files of its repository: tokenizer.json and, if they exist, tokenizer_config.json,
// config.json, generation_config.json, special_tokens_map.json and the chat templates. Each may be gzipped (tokenizer.json.gz).
// The tokenizer behaves like Hugging Face tokenizers with this tokenizer.json and the added tokens that transformers 5 takes from
// the configuration. The error wraps ErrUnsupported if that cannot be reproduced exactly.
func Load(fsys fs.FS) (*Tokenizer, error) {
	config, err := readConfig(fsys)
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	raw, err := readFile(fsys, "tokenizer.json")
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	var own *Tokenizer
	if config.Mistral {
		if own, err = loadMistral(fsys, config); err != nil {
			return nil, fmt.Errorf("load tokenizer: %w", err)
		}
	}
	t := own
	switch {
	case raw != nil:
		if t, err = parse(raw, config); err != nil {
			return nil, fmt.Errorf("load tokenizer.json: %w", err)
		}
	case own == nil:
		if t, err = loadForeign(fsys, config); err != nil {
			return nil, fmt.Errorf("load tokenizer: %w", err)
		}
	}
	t.mistral = own
	return t, nil
}

// file is tokenizer.json with its parts unparsed.
type file struct {
	model, added, normalizer, preTokenizer, postProcessor []byte
}

func parse(raw []byte, config Config) (*Tokenizer, error) {
	var f file
	parts := map[string]*[]byte{
		"model": &f.model, "added_tokens": &f.added, "normalizer": &f.normalizer,
		"pre_tokenizer": &f.preTokenizer, "post_processor": &f.postProcessor,
	}
	if err := eachMember(bytes.TrimSpace(raw), func(key, value []byte) error {
		if to := parts[string(key)]; to != nil {
			*to = value
		}
		return nil
	}); err != nil {
		return nil, err
	}
	t := newTokenizer(config)
	head, err := readHead(f.model)
	if err != nil {
		return nil, err
	}
	if err := t.rebuild(&f, head); err != nil {
		return nil, err
	}
	if err := t.readPipelineAndModel(&f, head); err != nil {
		return nil, err
	}
	var added []AddedToken
	if len(f.added) > 0 {
		if err := json.Unmarshal(f.added, &added); err != nil {
			return nil, fmt.Errorf("added_tokens: %w", err)
		}
	}
	t.addTokens(added)
	if err := t.readPost(f.postProcessor); err != nil {
		return nil, err
	}
	t.ownPost()
	t.finish()
	return t, nil
}

func (t *Tokenizer) readPipelineAndModel(f *file, head *modelHead) error {
	if head.Type == "Unigram" {
		if err := t.unigramPipeline(f); err != nil {
			return err
		}
		return t.readUnigram(head, t.config.engineClass() != "")
	}
	if err := t.readPipeline(f, head); err != nil {
		return err
	}
	return t.readModel(head)
}

func newTokenizer(config Config) *Tokenizer {
	pool := &encoders{tickets: make(chan struct{}, max(2, runtime.GOMAXPROCS(0)))}
	return &Tokenizer{config: config, encoders: pool, memo: &memo{}, addedID: map[string]uint32{}, literalOf: map[uint32]string{}}
}

// finish derives what the other parts imply.
func (t *Tokenizer) finish() {
	t.lazy = t.pipe == nil && t.sp == nil && (!t.nfc || len(t.normal.starts) == 0)
	t.cuts = newCutter(t.splitter, t.nfc && t.lazy)
	t.longest = t.longestToken()
}

// readPost reads what addSpecial adds. With a tokenizer.json, transformers 5 ignores the
// configuration's add_bos_token and add_eos_token.
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
			return unsupported("several post-processors that add tokens") // how they combine is not reproduced
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

// maxAdded bounds the tokens that a template adds: one that repeats a list of ids could otherwise fill the memory.
const maxAdded = 1024

func (t *Tokenizer) template(p component) error {
	seen := false
	var before, after []uint32
	for _, piece := range p.Single {
		switch {
		case piece.Sequence != nil && !seen && piece.Sequence.ID == "A":
			seen = true
		case piece.SpecialToken != nil:
			special, ok := p.SpecialTokens[piece.SpecialToken.ID]
			if !ok || len(before)+len(after)+len(special.IDs) > maxAdded {
				return fmt.Errorf("post_processor: special token %q has no ids, or more than %d are added", piece.SpecialToken.ID, maxAdded)
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

// maxFile bounds a file after decompression. The largest tokenizer.json of a known model is about 33 MB.
const maxFile = 256 << 20

// usualRatio is the approximate gzip compression ratio of a tokenizer.json.
const usualRatio = 7

// readFile reads name or name.gz. It returns nil without an error if neither exists.
func readFile(fsys fs.FS, name string) ([]byte, error) {
	b, err := readOne(fsys, name, false)
	if errors.Is(err, fs.ErrNotExist) {
		b, err = readOne(fsys, name+".gz", true)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

func readOne(fsys fs.FS, name string, zipped bool) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := info.Size()
	in := io.Reader(f)
	if zipped {
		if in, err = gzip.NewReader(f); err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		size *= usualRatio
	}
	var out bytes.Buffer
	out.Grow(int(min(size, maxFile)) + bytes.MinRead)
	if _, err := out.ReadFrom(io.LimitReader(in, maxFile+1)); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if out.Len() > maxFile {
		return nil, fmt.Errorf("read %s: more than %d bytes", name, maxFile)
	}
	return out.Bytes(), nil
}

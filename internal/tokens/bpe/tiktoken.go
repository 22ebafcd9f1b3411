package bpe

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io/fs"
	"iter"
	"strconv"
	"strings"
)

// tokenList is a vocabulary that lists its tokens without their merges: two neighbours merge if
// the text of both is a token, and the token that comes first in order is merged first.
type tokenList struct {
	raw     []byte
	entries []vocabEntry
	top     uint32
	literal map[string]uint32
	// order holds the ids that merges may produce, the first to merge first; nil: all, by id.
	order []uint32
	// ranked: each way to a token has a rank of its own.
	ranked bool
}

// add appends a token. Empty text stands for a token that no text can produce.
func (l *tokenList) add(text []byte, id uint32) error {
	if id >= maxID-1 {
		return fmt.Errorf("token %d: want less than %d", id, maxID-1)
	}
	l.entries = append(l.entries, vocabEntry{uint32(len(l.raw)), uint32(len(l.raw) + len(text)), id})
	l.raw = append(l.raw, text...)
	l.top = max(l.top, id+1)
	return nil
}

// addNamed appends a token with a name; reachable is false if no text can produce it.
func (l *tokenList) addNamed(name, text []byte, reachable bool, id uint32) error {
	if !reachable {
		l.literal[string(name)], text = id, nil
	}
	return l.add(text, id)
}

func (l *tokenList) vocab() (*vocab, error) {
	v := &vocab{literal: l.literal}
	return v, v.fill(l.raw, l.entries, l.top)
}

// merges lists every way to make a token of two others. All ways to one token share a rank, so
// that the leftmost of them comes first.
func (l *tokenList) merges(v *vocab) (*merges, error) {
	order := l.order
	if order == nil {
		for id, has := range v.has {
			if has {
				order = append(order, uint32(id))
			}
		}
	}
	if len(order) >= maxRanks {
		return nil, fmt.Errorf("more than %d tokens", maxRanks)
	}
	var pairs [][2]uint32
	var ranks []uint32
	for rank, id := range order {
		b := v.bytes(id)
		for i := 1; i < len(b); i++ {
			left, _, ok := v.find(b[:i])
			if !ok {
				continue
			}
			if right, _, ok := v.find(b[i:]); ok {
				pairs, ranks = append(pairs, [2]uint32{left, right}), append(ranks, uint32(rank))
			}
		}
	}
	if l.ranked {
		result := make([]uint32, len(ranks))
		for i, rank := range ranks {
			result[i] = order[rank]
		}
		return newMerges(pairs, nil, result)
	}
	return newMerges(pairs, ranks, order)
}

// foreign is a tokenizer that is not a tokenizer.json, as its parts.
type foreign struct {
	list    tokenList
	pattern string // of the words, with the byte alphabet
	nfc     bool
	// added are cut out of the text; control tokens only have a name and an id.
	added, control []AddedToken
	bos            string // the control token that addSpecial puts before the text
}

// build returns the tokenizer of a byte-level vocabulary, with ignoreMerges.
func (f *foreign) build(config Config) (*Tokenizer, error) {
	t := newTokenizer(config)
	known, ok := patterns[f.pattern]
	if !ok {
		return nil, unsupported("unknown split pattern %q", f.pattern)
	}
	t.form, t.splitter, t.nfc = byteForm, known, f.nfc
	if err := t.readModel(&modelHead{IgnoreMerges: true, list: &f.list}); err != nil {
		return nil, err
	}
	t.added = f.added
	t.arrangeAdded()
	t.setControl(f.control, f.bos)
	t.finish()
	return t, nil
}

// setControl names tokens that no text contains.
func (t *Tokenizer) setControl(control []AddedToken, bos string) {
	for _, a := range control {
		t.addedID[a.Content], t.literalOf[a.ID] = a.ID, a.Content
	}
	t.added = append(t.added, control...)
	if id, ok := t.addedID[bos]; ok {
		t.before = []uint32{id}
	}
}

// tekkenSpecials are the special tokens of a tekken.json that has none of its own, in order of their ids.
var tekkenSpecials = strings.Fields("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> " +
	"[IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]")

// parseTekken reads tekken.json as mistral-common does: the special tokens come first and no text
// contains them, the others follow in order of their rank.
func parseTekken(raw []byte, _ string, config Config) (*Tokenizer, error) {
	var file struct {
		Config struct {
			Version  string `json:"version"`
			Pattern  string `json:"pattern"`
			Size     int    `json:"default_vocab_size"`
			Specials int    `json:"default_num_special_tokens"`
		} `json:"config"`
		Vocab []struct {
			Rank  int    `json:"rank"`
			Bytes []byte `json:"token_bytes"`
		} `json:"vocab"`
		Special []struct {
			Rank uint32 `json:"rank"`
			Text string `json:"token_str"`
		} `json:"special_tokens"`
		Settings *MistralSettings `json:"model_settings_builder"`
	}
	if err := json.Unmarshal(raw, &file); err != nil {
		return nil, err
	}
	c := file.Config
	if n := c.Size - c.Specials; c.Specials < len(file.Special) || n < 256 || n > len(file.Vocab) || c.Size >= maxID {
		return nil, fmt.Errorf("%d tokens of which %d are special, in a list of %d", c.Size, c.Specials, len(file.Vocab))
	}
	f := foreign{pattern: c.Pattern, bos: "<s>"}
	for i, token := range file.Vocab[:c.Size-c.Specials] {
		if token.Rank != i || len(token.Bytes) == 0 {
			return nil, fmt.Errorf("token %d has rank %d and %d bytes", i, token.Rank, len(token.Bytes))
		}
		if err := f.list.add(token.Bytes, uint32(c.Specials+i)); err != nil {
			return nil, err
		}
	}
	special := func(id uint32, text string) {
		f.control = append(f.control, AddedToken{ID: id, Content: text, Special: true})
	}
	for _, s := range file.Special {
		special(s.Rank, s.Text)
	}
	if file.Special == nil {
		for i, text := range tekkenSpecials {
			special(uint32(i), text)
		}
	}
	for i := len(f.control); i < c.Specials; i++ {
		special(uint32(i), fmt.Sprintf("<SPECIAL_%d>", i))
	}
	config.MistralFile = MistralFile{Version: mistralVersion(file.Config.Version), Tekken: true, Settings: file.Settings}
	return f.build(config)
}

// parseTiktoken reads a tiktoken file: a line per token with its bytes in base64 and its rank,
// which is its id. The rest is code of the model's folder and depends on the name of the file.
func parseTiktoken(raw []byte, name string, config Config) (*Tokenizer, error) {
	f := foreign{}
	for line := range bytes.Lines(raw) {
		text, rank, ok := strings.Cut(strings.TrimSpace(string(line)), " ")
		if !ok {
			continue
		}
		token, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("token %q: %w", text, err)
		}
		id, err := strconv.ParseUint(rank, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("token %q: %w", text, err)
		}
		if err := f.list.add(token, uint32(id)); err != nil {
			return nil, err
		}
	}
	n := uint32(len(f.list.entries))
	special := func(id uint32, text string) {
		f.added = append(f.added, AddedToken{ID: id, Content: text, Special: true})
	}
	switch name {
	case qwenFile:
		f.pattern, f.nfc = reQwen, true
		for i, text := range []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"} {
			special(n+uint32(i), text)
		}
		for i := range uint32(205) {
			special(n+3+i, fmt.Sprintf("<|extra_%d|>", i))
		}
	case kimiFile:
		f.pattern = reKimi
		named := map[uint32]string{}
		for _, a := range config.decoder {
			named[a.ID] = a.Content
		}
		for id := n; id < n+258; id++ {
			text, ok := named[id]
			if !ok {
				text = fmt.Sprintf("<|reserved_token_%d|>", id)
			}
			special(id, text)
		}
	default:
		return nil, unsupported("%s: only %s and %s are known", name, qwenFile, kimiFile)
	}
	t, err := f.build(config)
	if err == nil && name == kimiFile {
		t.maxRun = kimiRun
	}
	return t, err
}

// Names of tiktoken files whose models are known.
const (
	tekkenFile = "tekken.json"
	qwenFile   = "qwen.tiktoken"
	kimiFile   = "tiktoken.model"
	spmFile    = "tokenizer.model"
)

// foreignFiles are the files that are read in place of tokenizer.json, in order of precedence.
var foreignFiles = []struct {
	name  string
	parse func(raw []byte, name string, config Config) (*Tokenizer, error)
}{
	{tekkenFile, parseTekken}, {kimiFile, parseTiktoken}, {qwenFile, parseTiktoken}, {spmFile, parseSPM},
}

// loadForeign reads the tokenizer of a folder without tokenizer.json. The error wraps fs.ErrNotExist if there is none.
func loadForeign(fsys fs.FS, config Config) (*Tokenizer, error) {
	for _, file := range foreignFiles {
		raw, err := readFile(fsys, file.name)
		if err != nil {
			return nil, err
		}
		if raw == nil {
			continue
		}
		t, err := file.parse(raw, file.name, config)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file.name, err)
		}
		return t, nil
	}
	return nil, fmt.Errorf("no tokenizer.json: %w", fs.ErrNotExist)
}

// Bounds, in code points, of the texts that Kimi's code passes to tiktoken: of a whole text, and
// of a run of white space or of anything else.
const (
	kimiText = 400_000
	kimiRun  = 25_000
)

// runs returns the bounds of the parts of s that are encoded separately.
func runs(s string, most int) iter.Seq2[int, int] {
	return func(yield func(from, to int) bool) {
		from, total, run := 0, 0, 0
		was := false
		for i, r := range s {
			space := r >= 0x1c && r <= 0x1f || runeClass(r)&clsWS != 0
			if run++; space != was || total == 0 {
				run, was = 1, space
			}
			if run > most || total == kimiText {
				if !yield(from, i) {
					return
				}
				if from, run = i, 1; total == kimiText {
					total = 0
				}
			}
			total++
		}
		yield(from, len(s))
	}
}

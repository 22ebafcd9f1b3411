package enginesim

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// Tokenizer computes a model's prompts and holds the words of its answers. It is safe for concurrent use and may be
// shared by engines.
type Tokenizer struct {
	model    *shape.Model
	tokens   *bpe.Tokenizer
	plain    bool   // the model has no chat template: chats follow PlainTemplate
	starters []word // begin a chat answer: a capitalised word
	words    []word // continue any text: a space and a word
}

// word is a token of answers with its text.
type word struct {
	id   uint32
	text string
}

// PlainTemplate is the chat template of models that have none.
const PlainTemplate = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"

// LoadTokenizer reads the tokenizer and chat template of a model's files.
func LoadTokenizer(files fs.FS) (*Tokenizer, error) {
	tok, err := bpe.Load(files)
	if err != nil {
		return nil, err
	}
	t := &Tokenizer{tokens: tok}
	options := shape.Options{ToolParser: true}
	if _, ok := tok.Config().Template(""); !ok {
		t.plain, options.ChatTemplate = true, PlainTemplate
	}
	if t.model, err = shape.New(tok, options); err != nil {
		return nil, err
	}
	t.chooseWords()
	if len(t.words) == 0 {
		return nil, errors.New("tokenizer: no word is a single token")
	}
	return t, nil
}

// Plain reports whether the model has no chat template, so that its chats follow PlainTemplate.
func (t *Tokenizer) Plain() bool { return t.plain }

// chooseWords picks the tokens of answers. Each is the only token of its text, so that the text is encoded to the same
// ids and the next turn of a conversation repeats the generated ids.
func (t *Tokenizer) chooseWords() {
	_, sentencePiece := t.tokens.TokenID("<0x0A>")
	space := "Ġ"
	if sentencePiece {
		space = "▁"
	}
	for id := range uint32(t.tokens.VocabSize()) {
		content, _ := t.tokens.Token(id)
		text, spaced := strings.CutPrefix(content, space)
		if len(text) < 3 || len(text) > 8 || strings.Trim(text[1:], "abcdefghijklmnopqrstuvwxyz") != "" {
			continue
		}
		starts := text[0] >= 'A' && text[0] <= 'Z'
		if !starts && (text[0] < 'a' || text[0] > 'z') || spaced == starts || starts && sentencePiece {
			continue
		}
		own := word{id, text}
		list, limit := &t.starters, 1024
		if spaced {
			own.text = " " + text
			list, limit = &t.words, 4096
		}
		if !sentencePiece { // which puts a space before every text
			text = own.text
		}
		if len(*list) >= limit {
			continue
		}
		if ids := t.Encode(text, false); len(ids) == 1 && ids[0] == id {
			*list = append(*list, own)
		}
	}
	if len(t.starters) == 0 {
		t.starters = t.words
	}
}

// Encode returns the ids of text, nil if it cannot be tokenized; with special set, the ids that the tokenizer puts around
// every text are included.
func (t *Tokenizer) Encode(text string, special bool) []uint32 {
	ids, _ := t.tokens.Encode(nil, strings.ToValidUTF8(text, "\uFFFD"), special)
	return ids
}

// prompt returns the ids of a request's (first) prompt. The error is an *apiError.
func (t *Tokenizer) prompt(kind EngineKind, api body.API, raw []byte) ([]uint32, error) {
	engine, err := shape.ParseEngine(string(kind))
	if err != nil {
		return nil, err
	}
	req, err := body.Parse(api, raw)
	if err != nil {
		return nil, badRequest(err.Error())
	}
	res, err := t.model.Prompt(req, engine)
	if refusal, ok := errors.AsType[*shape.Refusal](err); ok {
		return nil, &apiError{refusal.Status, "BadRequestError", "", refusal.Reason}
	}
	if err == nil && res.Partial != "" {
		err = errors.New(res.Partial)
	}
	if err != nil {
		return nil, &apiError{http.StatusBadRequest, "BadRequestError", "", err.Error()}
	}
	return res.IDs, nil
}

// prompts returns the ids of all prompts of a request; list is the value that may hold several.
func (t *Tokenizer) prompts(kind EngineKind, api body.API, raw []byte, list json.RawMessage, special bool) ([][]uint32, error) {
	first, err := t.prompt(kind, api, raw)
	if err != nil {
		return nil, err
	}
	out := [][]uint32{first}
	var texts []string
	var lists [][]uint32
	switch {
	case json.Unmarshal(list, &texts) == nil:
		for _, text := range texts[min(1, len(texts)):] {
			out = append(out, t.Encode(text, special))
		}
	case json.Unmarshal(list, &lists) == nil:
		out = append(out, lists[min(1, len(lists)):]...)
	}
	return out, nil
}

// givenIDs reads a prompt that was sent as ids.
func (t *Tokenizer) givenIDs(raw json.RawMessage) ([][]uint32, error) {
	var ids []uint32
	if err := json.Unmarshal(raw, &ids); err != nil {
		return nil, badRequest("prompt: " + err.Error())
	}
	for _, id := range ids {
		if _, ok := t.tokens.Token(id); !ok {
			return nil, badRequest(fmt.Sprintf("Token id %d is out of vocabulary", id))
		}
	}
	return [][]uint32{ids}, nil
}

// placeholders replaces images in messages by text that has the images' hashes: the simulated engines know no vision model.
// Everything else keeps its bytes.
func placeholders(raw []byte) []byte {
	if !bytes.Contains(raw, []byte(`"image`)) {
		return raw
	}
	var top map[string]json.RawMessage
	var messages []map[string]json.RawMessage
	if json.Unmarshal(raw, &top) != nil || json.Unmarshal(top["messages"], &messages) != nil {
		return raw
	}
	for _, m := range messages {
		var parts []json.RawMessage
		if json.Unmarshal(m["content"], &parts) != nil {
			continue
		}
		for i, part := range parts {
			var p struct {
				Type string `json:"type"`
			}
			if json.Unmarshal(part, &p) == nil && slices.Contains([]string{"image_url", "image", "input_image"}, p.Type) {
				parts[i], _ = json.Marshal(object{"type": "text", "text": fmt.Sprintf("<|vision_start|>%.16x<|vision_end|>", sha256.Sum256(part))}) //nolint:errchkjson // plain values
			}
		}
		m["content"], _ = json.Marshal(parts) //nolint:errchkjson // was parsed
	}
	top["messages"], _ = json.Marshal(messages) //nolint:errchkjson // was parsed
	out, _ := json.Marshal(top)                 //nolint:errchkjson // was parsed
	return out
}

package enginesim

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// This file holds what clients use besides generated text: calls of tools, images, embeddings and counts of tokens. Answers have
// the engines' form; their contents mean nothing.

// tool is a function that a request offers, in OpenAI's form or in Anthropic's.
type tool struct {
	Name     string `json:"name"`
	Schema   schema `json:"input_schema"`
	Function struct {
		Name   string `json:"name"`
		Schema schema `json:"parameters"`
	} `json:"function"`
}

// schema is the part of a JSON schema that forced arguments are made of.
type schema struct {
	Type       string            `json:"type"`
	Properties map[string]schema `json:"properties"`
	Required   []string          `json:"required"`
}

// value returns a value of a schema, with the required properties only.
func (s *schema) value() any {
	switch s.Type {
	case "string":
		return "text"
	case "integer", "number":
		return 1
	}
	v := object{}
	for _, name := range s.Required {
		p := s.Properties[name]
		v[name] = p.value()
	}
	return v
}

// toolCall is the call that an answer consists of.
type toolCall struct {
	name      string
	arguments any
}

// forcedCall returns the call that tool_choice asks for, nil if text may be answered: a simulated engine calls no tool unasked.
func forcedCall(api body.API, raw []byte) (*toolCall, error) {
	if api != body.Chat && api != body.Messages || !bytes.Contains(raw, []byte(`"tool_choice"`)) {
		return nil, nil
	}
	var in struct {
		Tools  []tool          `json:"tools"`
		Choice json.RawMessage `json:"tool_choice"`
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		return nil, badRequest("tools: " + err.Error())
	}
	var mode string
	var named tool
	if json.Unmarshal(in.Choice, &mode) != nil {
		var choice struct {
			Type string `json:"type"`
			tool
		}
		if err := json.Unmarshal(in.Choice, &choice); err != nil {
			return nil, badRequest("tool_choice: " + err.Error())
		}
		mode, named = choice.Type, choice.tool
	}
	name := named.Name + named.Function.Name
	if mode != "required" && mode != "any" && name == "" {
		return nil, nil
	}
	for _, t := range in.Tools {
		if own := t.Name + t.Function.Name; name == "" || name == own {
			s := t.Schema
			if t.Function.Name != "" {
				s = t.Function.Schema
			}
			return &toolCall{own, s.value()}, nil
		}
	}
	return nil, badRequest("tool_choice: there is no such tool")
}

// chat returns the call in OpenAI's form.
func (t *toolCall) chat(id string) []any {
	arguments, _ := json.Marshal(t.arguments) //nolint:errchkjson // made of plain values
	return []any{object{"index": 0, "id": "call_" + id, "type": "function", "function": object{"name": t.name, "arguments": string(arguments)}}}
}

// block returns the call in Anthropic's form.
func (t *toolCall) block(id string, input any) object {
	return object{"type": "tool_use", "id": "toolu_" + id, "name": t.name, "input": input}
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

// countTokens is Anthropic's count_tokens.
func (s *service) countTokens(w http.ResponseWriter, r *http.Request) {
	raw, _, err := s.readBody(r)
	var ids []uint32
	if err == nil {
		ids, err = s.opts.Tokenizer.prompt(s.opts.Engine, body.Messages, placeholders(raw))
	}
	if err != nil {
		s.writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, object{"input_tokens": len(ids)})
}

// embeddingSize is the length of the vectors that embeddings answers.
const embeddingSize = 8

// embeddings answers vectors that are hashes of the tokens. It takes no time and leaves no blocks in the cache.
func (s *service) embeddings(w http.ResponseWriter, r *http.Request) {
	raw, b, err := s.readBody(r)
	var in struct {
		Input  json.RawMessage `json:"input"`
		Format string          `json:"encoding_format"`
	}
	var prompts [][]uint32
	if err == nil {
		if err = json.Unmarshal(raw, &in); err == nil {
			prompts, err = s.opts.Tokenizer.prompts(s.opts.Engine, body.Embeddings, raw, in.Input, true)
		}
	}
	if err != nil {
		s.writeError(w, err)
		return
	}
	data, total := []any{}, 0
	for i, ids := range prompts {
		total += len(ids)
		hash := sha256.Sum256(fmt.Append(nil, ids))
		vector := make([]float32, embeddingSize)
		for j := range vector {
			vector[j] = float32(hash[j])/128 - 1
		}
		var value any = vector
		if in.Format == "base64" {
			packed, _ := binary.Append(nil, binary.LittleEndian, vector) // numbers have a size
			value = base64.StdEncoding.EncodeToString(packed)
		}
		data = append(data, object{"object": "embedding", "index": i, "embedding": value})
	}
	writeJSON(w, http.StatusOK, object{
		"id": "embd-" + randomHex(16), "object": "list", "model": (&call{service: s, body: b}).modelName(), "data": data,
		"usage": object{"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0},
	})
}

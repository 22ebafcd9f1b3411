package enginesim

import (
	"bytes"
	"encoding/json"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// tool is a function that a request offers, in OpenAI's form or in Anthropic's. The contents of a call mean nothing.
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

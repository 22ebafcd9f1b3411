package model

import (
	"sync"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/pydantic"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

// vllmMessage is the type of a chat message in vLLM: a union of typed dictionaries, whose content may be an Iterable that is
// checked when the message is read.
var vllmMessage = sync.OnceValue(func() *pydantic.Schema { return vllmSchemas().Schema("chat").Field("messages").Item() })

// ordinary tells whether a message is one that every type takes: a role, and a content of text or of plain text parts. Most
// messages are, and need no further check.
func ordinary(msg *jinja.Dict) bool {
	plain := true
	msg.Range(func(k, v jinja.Value) bool {
		key, _ := k.AsString()
		switch key {
		case "role", "name", "tool_call_id":
			_, plain = v.AsString()
		case "content":
			_, plain = v.AsString()
			plain = plain || plainParts(v)
		default:
			plain = false
		}
		return plain
	})
	_, given := msg.Get("content")
	return plain && given
}

func plainParts(content jinja.Value) bool {
	parts, ok := content.AsList()
	if !ok {
		return false
	}
	for i := range parts {
		part, ok := parts[i].AsDict()
		if !ok || part.Len() != 2 {
			return false
		}
		kind, _, _ := textOf(part, "type")
		if _, has, _ := textOf(part, "text"); kind != "text" || !has {
			return false
		}
	}
	return true
}

// declared checks a message's types.
func (s *vllmShape) declared(raw []byte) error {
	if s.legacy {
		var err error
		if raw, err = withoutLegacy(raw); err != nil {
			return err
		}
	}
	if err := vllmMessage().CheckAll(raw); err != nil {
		return refuse("messages: %v", err)
	}
	return nil
}

// withoutLegacy is _normalize_messages_before: tool_calls become a list, and reasoning_content the reasoning where that is not
// given.
func withoutLegacy(raw []byte) ([]byte, error) {
	if calls := prompt.Member(raw, "tool_calls"); given(calls) && calls[0] != '[' {
		if calls[0] != '{' && calls[0] != '"' {
			return raw, refuseWith(500, "tool_calls: the object is not iterable")
		}
		if truthy(calls) {
			return raw, refuse("messages.tool_calls: input should be a valid dictionary")
		}
	}
	thought := prompt.Member(raw, "reasoning_content")
	if thought == nil {
		return raw, nil
	}
	edits := []prompt.Edit{prompt.Delete("reasoning_content")}
	if given(thought) && !given(prompt.Member(raw, "reasoning")) {
		edits = append(edits, prompt.Set(thought, "reasoning"))
	}
	return prompt.Apply(nil, raw, edits...)
}

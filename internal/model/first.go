package model

import (
	"bytes"
	"math"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/pydantic"
)

// firstPrompt is the prompt that a request is routed by and its form, after pydantic's choice among the types of prompts: the
// engine refuses a batch for any of its prompts, and takes some lists for others than they look like.
func (m *Model) firstPrompt(in input, engine Engine) (raw []byte, form prompt.Form, err error) {
	if usual(in) {
		return in.FirstPrompt(), in.Form, nil
	}
	field := prompt.FieldPrompt
	if in.API == prompt.Embeddings {
		field = prompt.FieldInput
	}
	all := in.Raw(field)
	schema := promptSchema(in.API, engine, field)
	if schema == nil || !given(all) {
		return in.FirstPrompt(), in.Form, nil
	}
	if err := schema.Check(all); err != nil {
		return nil, 0, refuse("%s: %v", field, err)
	}
	if in.Form != prompt.FormIDs {
		return in.FirstPrompt(), in.Form, nil
	}
	texts := false
	prompt.EachItem(all, func(item []byte) { texts = texts || item[0] == '"' })
	if !texts {
		return all, prompt.FormIDs, nil
	}
	return in.FirstPrompt(), in.Form, nil
}

// promptSchema is the type of the field that carries the prompt; nil if the engine's request model does not declare it.
func promptSchema(api prompt.API, engine Engine, field prompt.Field) *pydantic.Schema {
	set := vllmSchemas
	switch engine {
	case SGLang:
		set = sglangSchemas
	case TRTLLM:
		return nil
	default:
	}
	schema := set().Schema(api.String())
	if schema == nil {
		return nil
	}
	for _, choice := range schema.Choices() {
		if f := choice.Field(field.String()); f != nil {
			return f
		}
	}
	return nil
}

// usual tells whether the prompt is a text, token ids, or a batch of the one or the other, as every engine takes it.
func usual(in input) bool {
	switch in.Form {
	case prompt.FormText:
		return in.API != prompt.Tokenize || in.Raw(prompt.FieldPrompt)[0] == '"'
	case prompt.FormIDs:
		return in.API != prompt.Tokenize && plainIDs(in.FirstPrompt())
	case prompt.FormTexts, prompt.FormIDLists:
		if len(in.Elements) != in.Count || in.API == prompt.Tokenize {
			return false
		}
		first := in.Elements[0].Of(in.Body)[0]
		for _, e := range in.Elements {
			raw := e.Of(in.Body)
			if raw[0] != first {
				return false
			}
			if first == '[' && !plainIDs(raw) {
				return false
			}
		}
		return true
	default:
		return false
	}
}

// plainIDs tells whether a JSON list holds nothing but whole numbers, none below 0.
func plainIDs(raw []byte) bool {
	return len(raw) > 1 && raw[0] == '[' && len(bytes.Trim(raw[1:len(raw)-1], "0123456789, \n\t\r")) == 0
}

// laxIDs reads token ids as pydantic reads a list of integers.
func laxIDs(raw []byte) ([]uint32, error) {
	ids, err := prompt.AppendIDs(nil, raw)
	if err == nil {
		return ids, nil
	}
	ids = ids[:0]
	err = nil
	prompt.EachItem(raw, func(item []byte) {
		n, e := pydantic.Int(item)
		switch {
		case err != nil:
		case e != nil:
			err = refuse("%v", e)
		case n.Sign() < 0 || n.BitLen() > 32 || n.Uint64() > math.MaxUint32:
			err = refuse("Token id %v is out of vocabulary", n)
		default:
			ids = append(ids, uint32(n.Uint64()))
		}
	})
	return ids, err
}

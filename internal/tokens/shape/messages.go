package shape

import (
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// shapeKind distinguishes the ways of shaping a message.
type shapeKind uint64

const (
	shapeSGLang shapeKind = 1 << iota
	shapeOpenAI
	shapeReasoning
	shapeTRTLLM
	shapeValidated
	shapeReferences
	shapeConverted
	shapeOriginal
)

// shaper converts a message to the value that is passed to the template.
type shaper func(v jinja.Value) (jinja.Value, error)

func shaped(in input, texts *[]byte, raw []byte, shape shaper) (jinja.Value, error) {
	v, err := in.parse(texts, "messages", raw)
	if err == nil {
		v, err = shape(v)
	}
	select {
	case <-in.stop: // JSON in v that was not read to its end looks like none
		return v, jinja.ErrStopped
	default:
		return v, err
	}
}

// shapeMessages returns every message, shaped.
func (m *Model) shapeMessages(in input, kind shapeKind, p *plan, shape shaper) ([]jinja.Value, error) {
	if in.Form == body.FormMessages && len(in.Elements) == in.Count {
		return in.turn.Messages(in.Request, m.space+uint64(kind), func(texts *[]byte, raw []byte) (jinja.Value, bool, error) {
			images := p.images.count()
			v, err := shaped(in, texts, raw, shape)
			return v, !p.isCut() && p.images.count() == images, err
		})
	}
	raw := in.Raw(body.FieldMessages)
	if len(raw) == 0 || raw[0] != '[' {
		return nil, refuse("messages: input should be a valid list")
	}
	out := make([]jinja.Value, 0, in.Count)
	var first error
	body.EachItem(raw, func(item []byte) {
		if first == nil {
			var v jinja.Value
			v, first = shaped(in, nil, item, shape)
			out = append(out, v)
		}
	})
	return out, first
}

package model

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

// plan is what a profile makes of a request: either ids, or a text (plain or rendered) and how to encode it.
type plan struct {
	ids      []uint32
	haveIDs  bool
	text     string
	template *jinja.Template
	vars     *jinja.Dict
	brought  bool // the template came with the request
	size     int  // of the request, in bytes
	// flat, if not nil, are the tools for a second try when the template fails (SGLang).
	flat       []jinja.Value
	suffix     string // text that goes behind the rendered prompt (SGLang's continued message)
	continued  bool   // cut the rendered prompt behind the last message's content
	final      string // that content, where it is continued
	addSpecial bool
	keep       int // keep so many ids, 0 = all
	keepHead   bool
	limited    bool   // engines bound such prompts by their context
	partial    string // why only the front of the prompt is known
	media      bool   // the text is cut at mediaMark
	dated      bool   // the template prints the time
}

// mediaMark stands where the first image, audio or video would be. Text behind it is unknown here.
const mediaMark = "\ue3b0kvlane media\ue3b1"

// input gives the profiles typed access to the body's fields.
type input struct {
	*prompt.Request

	// wide integers become floats: SGLang reads bodies with orjson.
	wide bool
	// halves of surrogate pairs are taken as long as nobody prints them: vLLM reads bodies with Python's json.
	halves bool
	// counted: the request is only counted, by an engine that does not look at media then.
	counted bool
}

// value reads a field; absent fields and null give None.
func (in input) value(f prompt.Field) (jinja.Value, error) {
	raw := in.Raw(f)
	if raw == nil {
		return jinja.None(), nil
	}
	if in.wide {
		raw = wideIntegers(raw)
	}
	return in.parse(f.String(), raw)
}

func (in input) parse(name string, raw []byte) (jinja.Value, error) {
	if in.halves {
		v, err := jinja.ParseJSONSurrogates(raw)
		if err != nil {
			return v, fmt.Errorf("%s: %w", name, err)
		}
		return v, nil
	}
	return parseField(name, raw)
}

func parseField(name string, raw []byte) (jinja.Value, error) {
	v, err := jinja.ParseJSON(raw)
	if err != nil {
		if errors.Is(err, jinja.ErrLoneSurrogate) {
			return v, refuse("%s: surrogates are not allowed in text", name)
		}
		return v, fmt.Errorf("%s: %w", name, err)
	}
	return v, nil
}

// flag reads a boolean field as pydantic does in its lax mode; anything else is refused.
func (in input) flag(f prompt.Field, absent bool) (bool, error) {
	raw := in.Raw(f)
	if raw == nil {
		return absent, nil
	}
	b, ok := laxBool(raw)
	if !ok {
		return false, refuse("%s: input should be a valid boolean", f)
	}
	return b, nil
}

// listOf reads a field that must be a list; nil if it is absent or null.
func (in input) listOf(f prompt.Field) (items []jinja.Value, present bool, err error) {
	v, err := in.value(f)
	if err != nil || v.IsNone() {
		return nil, false, err
	}
	items, ok := v.AsList()
	if !ok {
		return nil, false, refuse("%s: input should be a valid list", f)
	}
	return items, true, nil
}

// dictOf reads a field that must be an object; nil if it is absent or null.
func (in input) dictOf(f prompt.Field) (*jinja.Dict, error) {
	v, err := in.value(f)
	if err != nil || v.IsNone() {
		return nil, err
	}
	d, ok := v.AsDict()
	if !ok {
		return nil, refuse("%s: input should be a valid dictionary", f)
	}
	return d, nil
}

// textOf is a member's text. ok is false if it is there and neither text nor null; has tells whether it is text.
func textOf(d *jinja.Dict, key string) (text string, has, ok bool) {
	if d == nil {
		return "", false, true
	}
	v, found := d.Get(key)
	if !found || v.IsNone() {
		return "", false, true
	}
	text, has = v.AsString()
	return text, has, has
}

// texts joins decoded strings.
func join(parts []string, sep string) jinja.Value { return jinja.String(strings.Join(parts, sep)) }

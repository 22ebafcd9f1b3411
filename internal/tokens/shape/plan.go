package shape

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// plan is a profile's output for a request: ids, or a text (plain or rendered) and how to tokenize it.
type plan struct {
	profile *profile
	size    int      // of the request, in bytes
	ids     []uint32 // the prompt if not nil; the other fields are then unused
	text    string
	// template, if not nil, renders the text from vars.
	template *template
	vars     *jinja.Dict
	// chat, if not nil, is what encoder renders instead of a template.
	chat    *encoders.Chat
	encoder encoders.Encoder
	// flat, if not nil, are the tools for a second attempt if the template raises (SGLang).
	flat   []jinja.Value
	suffix string // text after the rendered prompt that is tokenized separately (SGLang's continued message)
	// final, if not nil, is the content of the last message; the rendered prompt is cut after it.
	final      *string
	addSpecial bool
	keep       int  // 0: all ids are kept; n > 0: the last n; n < 0: the first -n
	sided      bool // the request chooses whether the first or the last ids are kept
	limited    bool // engines limit such prompts to their context length
	// partial is the reason why only the front of the prompt is known, "" if all of it is. A
	// partial rendered text is cut at mediaMark.
	partial string
	// images, if not nil, are the images before the first medium whose tokens are unknown.
	images *images
	stop   <-chan struct{} // the input's
}

// mediaMark replaces the first medium whose tokens are unknown. The prompt is known only up to it.
const mediaMark = "\ue3b0kvlane media\ue3b1"

// cutAtMedia marks the prompt as known only up to the first mediaMark.
func (p *plan) cutAtMedia() {
	p.partial = "the prompt after the first image, audio or video is not known"
}

// isCut reports whether a rendered prompt is cut at mediaMark.
func (p *plan) isCut() bool { return (p.template != nil || p.chat != nil) && p.partial != "" }

// hasMedia reports whether the messages contain more than text.
func (p *plan) hasMedia() bool { return p.isCut() || p.images.count() > 0 }

// input is a request as profiles read it.
type input struct {
	*body.Request

	turn    *conv.Turn
	profile *profile
	// origin is the API that the client called; Request may be a chat converted from its body.
	origin body.API
	// stop is closed when the caller's context ends; reading then stops with jinja.ErrStopped.
	stop <-chan struct{}
}

// value reads a field; absent fields and null yield None.
func (in input) value(f body.Field) (jinja.Value, error) {
	raw := in.Raw(f)
	if raw == nil {
		return jinja.None(), nil
	}
	return in.parse(nil, f.String(), raw)
}

// copyTo copies the fields that the request sets.
func (in input) copyTo(out *jinja.Dict, fields ...body.Field) error {
	for _, f := range fields {
		v, err := in.value(f)
		if err != nil {
			return err
		}
		if !v.IsNone() {
			out.Set(f.String(), v)
		}
	}
	return nil
}

// parse reads a JSON text. texts is for jinja.ParseJSONInto.
func (in input) parse(texts *[]byte, name string, raw []byte) (jinja.Value, error) {
	if in.profile.wide {
		raw = wideIntegers(raw)
	}
	v, err := jinja.ParseJSONInto(in.stop, texts, raw, in.profile.surrogates)
	switch {
	case errors.Is(err, jinja.ErrLoneSurrogate):
		return v, refuse("%s: surrogates are not allowed in text", name)
	case err != nil:
		return v, fmt.Errorf("%s: %w", name, err)
	}
	return v, nil
}

// flag reads a boolean field in pydantic's lax mode; anything else is refused.
func (in input) flag(f body.Field, absent bool) (bool, error) {
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
func (in input) listOf(f body.Field) (items []jinja.Value, present bool, err error) {
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
func (in input) dictOf(f body.Field) (*jinja.Dict, error) {
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

// listIn returns the converted items of the list under a message's key; given is false if it is absent or null.
func listIn(msg *jinja.Dict, key string, convert func(jinja.Value) (jinja.Value, error)) (list []jinja.Value, given bool, err error) {
	v := member(msg, key)
	if v.IsNone() {
		return nil, false, nil
	}
	items, ok := v.AsList()
	if !ok {
		return nil, false, refuse("messages.%s: input should be a valid list", key)
	}
	list, err = converted(items, convert)
	return list, err == nil, err
}

// converted returns the converted items of a list.
func converted(items []jinja.Value, convert func(jinja.Value) (jinja.Value, error)) ([]jinja.Value, error) {
	list := make([]jinja.Value, len(items))
	for i := range items {
		var err error
		if list[i], err = convert(items[i]); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// member returns the value of a key, None if d lacks it. d may be nil.
func member(d *jinja.Dict, key string) jinja.Value {
	if v, ok := d.Get(key); ok {
		return v
	}
	return jinja.None()
}

// dictAt returns the object under a key, nil if d has none.
func dictAt(d *jinja.Dict, key string) *jinja.Dict {
	inner, _ := member(d, key).AsDict()
	return inner
}

// textAt returns the text under a key, "" if d has none.
func textAt(d *jinja.Dict, key string) string {
	text, _ := member(d, key).AsString()
	return text
}

// firstOf returns the value of the first key that is present in d and not null, else None.
func firstOf(d *jinja.Dict, keys ...string) jinja.Value {
	for _, key := range keys {
		if v := member(d, key); !v.IsNone() {
			return v
		}
	}
	return jinja.None()
}

// textOf returns the text under a key. has reports whether there is a text; ok is false if the value is neither text
// nor null.
func textOf(d *jinja.Dict, key string) (text string, has, ok bool) {
	v, found := d.Get(key)
	if !found || v.IsNone() {
		return "", false, true
	}
	text, has = v.AsString()
	return text, has, has
}

// kv is a member of an object.
type kv struct {
	key   string
	value jinja.Value
}

// dict returns an object of members, with room for one more.
func dict(members ...kv) *jinja.Dict {
	d := jinja.NewDict(len(members) + 1)
	for _, m := range members {
		d.Set(m.key, m.value)
	}
	return d
}

// with returns a copy of d that has the value under the key.
func with(d *jinja.Dict, key string, v jinja.Value) jinja.Value {
	d = d.Clone()
	d.Set(key, v)
	return jinja.FromDict(d)
}

// object is dict as a value.
func object(members ...kv) jinja.Value { return jinja.FromDict(dict(members...)) }

// join is strings.Join as a value.
func join(texts []string, sep string) jinja.Value { return jinja.String(strings.Join(texts, sep)) }

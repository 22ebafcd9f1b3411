package model

import (
	"embed"
	"fmt"
	"sync"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/pydantic"
)

// The schemas are what the request models of stock engines declare, written by e2e/engines/schemas.py.
//
//go:embed schemas
var schemaFiles embed.FS

var (
	vllmSchemas   = sync.OnceValue(func() *pydantic.Set { return mustSchemas("vllm", vllmFunctions) })
	sglangSchemas = sync.OnceValue(func() *pydantic.Set { return mustSchemas("sglang", sglangFunctions) })
)

// mustSchemas reads an embedded file, which tests hold sound.
func mustSchemas(engine string, functions pydantic.Functions) *pydantic.Set {
	data, err := schemaFiles.ReadFile("schemas/" + engine + ".json")
	if err != nil {
		panic(err)
	}
	set, err := pydantic.Load(data, functions, pydantic.Tags{"_tool_discriminator": sglangToolTag})
	if err != nil {
		panic(err)
	}
	return set
}

// judgedElsewhere are the fields that the profiles check while they read them.
var judgedElsewhere = map[prompt.API]map[string]bool{
	prompt.Chat:         {"messages": true, "tools": true, "tool_choice": true, "input_ids": true},
	prompt.Completions:  {"prompt": true},
	prompt.Embeddings:   {"messages": true, "input": true},
	prompt.Tokenize:     {"messages": true, "tools": true, "tool_choice": true, "prompt": true},
	prompt.VLLMGenerate: {"token_ids": true},
}

// accepted refuses a request whose fields are not of the types that the engine declares, or break a rule of the engine for
// values. It judges the top level; what makes the prompt is judged where it is read.
func (m *Model) accepted(in input, engine Engine) error {
	var set *pydantic.Set
	switch engine {
	case VLLM:
		if in.LongInteger { // in a field that it does not know, too
			return refuse("There was an error parsing the body")
		}
		set = vllmSchemas()
	case SGLang:
		set = sglangSchemas()
		if err := orjsonReads(in.Body); err != nil {
			return err
		}
	default:
		return nil
	}
	if schema := set.Schema(in.API.String()); schema != nil {
		if err := declared(in, schema); err != nil {
			return err
		}
	}
	if engine == VLLM {
		return m.vllmRules(in)
	}
	return m.sglangRules(in)
}

// declared checks the types of fields. Of several models one has to fit.
func declared(in input, schema *pydantic.Schema) error {
	var first error
	for _, s := range schema.Choices() {
		err := declaredBy(in, s)
		if err == nil {
			return nil
		}
		if first == nil {
			first = err
		}
	}
	return first
}

func declaredBy(in input, schema *pydantic.Schema) error {
	for _, name := range schema.Required() {
		if name != "model" && in.Get(name) == nil { // which model it is for, the caller knows
			return refuse("%s: Field required", name)
		}
	}
	skip := judgedElsewhere[in.API]
	var first error
	in.EachField(func(name string, value []byte) {
		if first != nil || skip[name] {
			return
		}
		field := schema.Field(name)
		if field == nil {
			return
		}
		if in.API == prompt.Responses && name == "input" {
			value = completeItems(value)
		}
		if in.wide {
			value = wideIntegers(value)
		}
		if err := field.Check(value); err != nil {
			first = refuse("%s: %v", name, err)
		}
	})
	return first
}

// truthy is Python's bool() of a JSON value; nil, for an absent one, is false.
func truthy(raw []byte) bool {
	if len(raw) == 0 {
		return false
	}
	switch raw[0] {
	case 'n', 'f':
		return false
	case 't', 'N', 'I':
		return true
	case '"':
		return len(raw) > 2
	case '[', '{':
		some := false
		prompt.EachItem(raw, func([]byte) { some = true })
		prompt.EachMember(raw, func(_, _ []byte) { some = true })
		return some
	}
	x, ok := pydantic.Float(raw)
	return !ok || x != 0
}

// given tells whether a value is there and not null.
func given(raw []byte) bool { return len(raw) > 0 && raw[0] != 'n' }

// floatRule is a rule for a number.
type floatRule struct {
	field string
	holds func(float64) bool
	must  string
}

func checkFloats(get func(string) []byte, rules []floatRule) error {
	for _, r := range rules {
		raw := get(r.field)
		if !given(raw) {
			continue
		}
		if x, ok := pydantic.Float(raw); ok && !r.holds(x) {
			return refuse("%s must be %s, got %s.", r.field, r.must, clipRaw(raw))
		}
	}
	return nil
}

func clipRaw(raw []byte) string {
	const most = 40
	return fmt.Sprintf("%.*s", most, raw)
}

package shape

import (
	"bytes"
	"encoding/json"
	"math/big"
	"slices"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// naiveIDs are the numbers that pydantic may make of a value of SGLang's: of all in it, or if mayBeTexts of a list whose items are
// not all texts or objects.
func naiveIDs(v any, mayBeTexts bool) (ids []*big.Rat) {
	list, isList := v.([]any)
	if !isList {
		if n := naiveNumber(v); n != nil {
			ids = append(ids, n)
		}
		return ids
	}
	isText := func(v any) bool {
		switch v.(type) {
		case string, map[string]any:
			return true
		}
		return false
	}
	if mayBeTexts && !slices.ContainsFunc(list, func(v any) bool { return !isText(v) }) {
		return nil
	}
	for _, item := range list {
		ids = append(ids, naiveIDs(item, false)...)
	}
	return ids
}

// isPlain reports whether a value is what clients send: nothing, a text or a list of texts where one may stand, or ids below the limit.
func isPlain(v any, texts int, limit int64) bool {
	switch v := v.(type) {
	case nil:
		return true
	case string:
		return texts >= 0
	case []any:
		if texts > 0 && !slices.ContainsFunc(v, func(v any) bool { _, ok := v.(string); return !ok }) {
			return true
		}
		ids := func(list []any) bool {
			return !slices.ContainsFunc(list, func(v any) bool {
				n, ok := v.(json.Number)
				id, err := n.Int64()
				return !ok || err != nil || id < 0 || id >= limit || n.String() != big.NewInt(id).String()
			})
		}
		return ids(v) || !slices.ContainsFunc(v, func(v any) bool { list, ok := v.([]any); return !ok || !ids(list) })
	}
	return false
}

// What passes has no id beyond the vocabulary, however pydantic reads it; plain prompts and ids pass.
func FuzzEndsSGLang(f *testing.F) {
	for _, seed := range []string{
		`{"prompt":[1,"99999999"]}`, `{"prompt":["1",999]}`, `{"prompt":[true,"5000"]}`, `{"input":[[1],["7000"]],"items":["9999"]}`, `{"query":["99999"],"items":[[1,2]]}`,
		`{"input_ids":[[1,2],[1001]]}`, `{"token_ids_logprob":[[1],null]}`, `{"stop_token_ids":[-1],"prompt":"x"}`, `{"prompt":[1.0,2]}`, `{"prompt":[[[1]]]}`,
		`{"pr\u006fmpt":[5000],"prompt":"x"}`, `{"top_k":4294967296,"prompt":["a","b"]}`, `{"label_token_ids":"5000","min_tokens":"4_294_967_296"}`,
		`{"sampling_params":[{"stop_token_ids":[5000]},{"n":3,"top_k":1e10}],"text":["a","b"]}`,
	} {
		f.Add([]byte(seed))
	}
	m := &Model{idLimit: 1000}
	limit := big.NewRat(1000, 1)
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := body.Parse(body.Completions, raw)
		if err != nil {
			return
		}
		dec := json.NewDecoder(bytes.NewReader(r.Body))
		dec.UseNumber()
		var all map[string]any
		if dec.Decode(&all) != nil {
			return
		}
		code, _ := m.EndsSGLang(r)
		plain := true
		for _, f := range idFields {
			v, has := all[f.field.String()]
			plain = plain && (!has || isPlain(v, f.texts, 1000))
			if _, isText := v.(string); isText || code != "" {
				continue // ids stand in lists
			}
			for _, id := range naiveIDs(v, f.texts == 1) {
				if !id.IsInt() || id.Sign() < 0 || id.Cmp(limit) >= 0 {
					t.Errorf("%s: passes with %v in %s, want ids from 0 to 999", raw, id, f.field)
				}
			}
		}
		for _, name := range []string{"top_k", "min_tokens"} {
			if n := naiveNumber(all[name]); code == "" && n != nil && n.Cmp(big.NewRat(1<<31-1, 1)) > 0 {
				t.Errorf("%s: passes with %v in %s, want at most 31 bits", raw, n, name)
			}
		}
		for _, name := range []string{"logprobs", "top_logprobs", "top_logprobs_num", "n", "sampling_params", "top_k", "min_tokens"} {
			_, has := all[name]
			plain = plain && !has
		}
		if plain && code != "" {
			t.Errorf("%s: got %s, want plain prompts and ids to pass", raw, code)
		}
	})
}

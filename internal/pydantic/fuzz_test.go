package pydantic

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"
)

// FuzzCheck judges any JSON value by both schemas: whatever is wrong is said as an Error, and the same value is judged the
// same way again.
func FuzzCheck(f *testing.F) {
	for _, seed := range []string{
		`{"n":"1_0","x":1e400,"flag":"yes","kinds":{"a":"2"},"pair":[1,"x"],"by":{"type":"text","text":"x"}}`,
		`{"messages":[{"role":"user","content":["x",{"type":"text","text":"y"}]}]}`, `{"list":[1,2,3],"even":1,"one":{}}`, `[]`, `-1.5e3`, `"\ud800"`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if !json.Valid(raw) {
			return
		}
		raw = bytes.TrimLeft(raw, " \n\t\r") // as the scanner of requests does
		set := load(t)
		for _, name := range []string{"a", "m"} {
			schema := set.Schema(name)
			for _, check := range []func([]byte) error{schema.Check, schema.CheckAll} {
				err := check(raw)
				if _, ok := errors.AsType[*Error](err); err != nil && !ok {
					t.Errorf("%s: %v is no Error", raw, err)
				}
				if again := check(raw); (again == nil) != (err == nil) {
					t.Errorf("%s: first %v, then %v", raw, err, again)
				}
			}
		}
	})
}

package pydantic

import (
	"strings"
	"testing"
)

// deepSchemas have a type that holds itself: by its tag, in lists and dictionaries.
const deepSchemas = `{"engine":"test 1","apis":{"a":0},"parts":[
{"t":"tagged","by":"type","of":{"text":1,"optional":2,"sequence":3,"map":4}},
{"t":"model","of":{"type":[{"t":"literal","of":["text"]},0],"text":[{"t":"str"},1]}},
{"t":"model","of":{"type":[{"t":"literal","of":["optional"]},0],"content":[0,1]}},
{"t":"model","of":{"type":[{"t":"literal","of":["sequence"]},0],"elements":[{"t":"list","of":0},1]}},
{"t":"model","of":{"type":[{"t":"literal","of":["map"]},0],"of":[{"t":"dict","keys":{"t":"str"},"of":0},1]}}
]}`

// A value is judged in the same number of readings however deep it is nested: counted in
// bytes, not in time.
func TestDeepValuesAreReadAFewTimes(t *testing.T) {
	set, err := Load([]byte(deepSchemas), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	schema := set.Schema("a")
	inner := `{"type":"text","text":"` + strings.Repeat("x", 1<<18) + `"}`
	for name, c := range map[string]struct{ before, after string }{
		"optional":  {`{"content":`, `,"type":"optional"}`},
		"tag first": {`{"type":"optional","content":`, `}`},
		"sequence":  {`{"type":"sequence","elements":[{"type":"text","text":"y"},`, `]}`},
		"map":       {`{"type":"map","of":{"k":`, `}}`},
	} {
		for _, levels := range []int{1, 5, 40, 200} {
			for fits, end := range map[bool]string{true: inner, false: strings.Replace(inner, `"text":`, `"txt":`, 1)} {
				raw := []byte(strings.Repeat(c.before, levels) + end + strings.Repeat(c.after, levels))
				w := newWalk(raw)
				if _, err := schema.judge(w, raw); (err == nil) != fits {
					t.Fatalf("%s, %d levels: %v", name, levels, err)
				}
				read := w.read
				if w.known != nil {
					read -= w.known.Skipped
				}
				if read > (readings+8)*len(raw) {
					t.Errorf("%s, %d levels: %d bytes were read of %d", name, levels, read, len(raw))
				}
				if levels < 5 && w.known != nil {
					t.Errorf("%s, %d levels: the ends were looked for", name, levels)
				}
			}
		}
	}
}

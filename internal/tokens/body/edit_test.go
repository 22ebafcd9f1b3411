package body

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestApplyKeepsEveryOtherByte(t *testing.T) {
	set := func(raw string, path ...string) Edit { return Set([]byte(raw), path...) }
	for _, c := range []struct {
		body  string
		edits []Edit
		want  string
	}{
		{`{}`, nil, `{}`},
		{` { "a" : 1.0 } `, []Edit{set(`2`, "a")}, ` { "a" : 2 } `},
		{`{}`, []Edit{set(`2`, "a")}, `{"a":2}`},
		{`{ }`, []Edit{set(`2`, "a")}, `{"a":2 }`},
		{`{"a": 1 }`, []Edit{set(`2`, "b")}, `{"a": 1,"b":2 }`},
		{`{ "a":1, "b":2, "c":3 }`, []Edit{Delete("a")}, `{ "b":2, "c":3 }`},
		{`{ "a":1, "b":2, "c":3 }`, []Edit{Delete("b")}, `{ "a":1, "c":3 }`},
		{`{ "a":1, "b":2, "c":3 }`, []Edit{Delete("c")}, `{ "a":1, "b":2 }`},
		{`{ "a":1, "b":2, "c":3 }`, []Edit{Delete("a"), Delete("b"), Delete("c")}, `{  }`},
		{`{ "a":1 }`, []Edit{Delete("a"), set(`5`, "b")}, `{ "b":5 }`},
		{`{"a":1}`, []Edit{Delete("x")}, `{"a":1}`},
		{`{"a":1}`, []Edit{Delete("x", "y")}, `{"a":1}`},
		{`{"a":1}`, []Edit{Delete("a", "y")}, `{"a":1}`},
		{`{"k":{"x": 1,"y":2},"z":3}`, []Edit{set(`9`, "k", "x"), set(`8`, "k", "w"), Delete("k", "y")}, `{"k":{"x": 9,"w":8},"z":3}`},
		{`{"z":3}`, []Edit{set(`9`, "k", "x"), set(`8`, "k", "w")}, `{"z":3,"k":{"x":9,"w":8}}`},
		{`{"k":null}`, []Edit{set(`9`, "k", "x")}, `{"k":{"x":9}}`},
		{`{"k":{"a":1}}`, []Edit{set(`{"b":2}`, "k"), set(`3`, "k", "c")}, `{"k":{"b":2,"c":3}}`},
		{`{"k":{"a":1}}`, []Edit{set(`3`, "k", "c"), set(`{"b":2}`, "k")}, `{"k":{"b":2}}`},
		{`{"k":{"a":1}}`, []Edit{Delete("k"), set(`3`, "k", "c")}, `{"k":{"c":3}}`},
		{`{"k":{"a":1}}`, []Edit{set(`5`, "k"), Delete("k", "c")}, `{"k":5}`},
		{`{"a":1,"b":0,"a":2}`, []Edit{set(`3`, "a")}, `{"b":0,"a":3}`},
		{`{"a":1,"b":0,"a":2}`, []Edit{Delete("a")}, `{"b":0}`},
		{`{ "a":1, "b":0, "a" : 2, "c":4 }`, []Edit{set(`3`, "a"), set(`5`, "c")}, `{ "b":0, "a" : 3, "c":5 }`},
		{`{"b":0,"a":1,"\u0061":{"x":1},"a":{"x":2,"y":0,"x":3} }`, []Edit{Delete("a", "x")}, `{"b":0,"a":{"y":0} }`},
		{`{"a":1,"b":0,"a":2,"b":3 }`, []Edit{Delete("b"), Delete("a"), set(`7`, "a", "x")}, `{"a":{"x":7} }`},
		{`{"\u0061":1}`, []Edit{set(`3`, "a")}, `{"\u0061":3}`},
	} {
		got, err := Apply(nil, []byte(c.body), c.edits...)
		if err != nil || string(got) != c.want {
			t.Errorf("%s: %s (%v), want %s", c.body, got, err, c.want)
		}
	}
}

func TestApplyRefusesWhatIsNoObject(t *testing.T) {
	for _, body := range []string{``, `[]`, `"a"`, `{`, `{"a"`} {
		if out, err := Apply(nil, []byte(body), Set([]byte("1"), "a")); err == nil {
			t.Errorf("%q: got %q and no error, want one", body, out)
		}
	}
	if _, err := Apply(nil, []byte(`{}`), Delete()); err == nil {
		t.Error("got no error for an edit without a path, want one")
	}
}

// pair and doc are the naive model: an ordered object of raw values or objects.
type pair struct {
	key string
	raw string
	obj *doc
}
type doc struct{ pairs []pair }

func (d *doc) find(key string) int {
	for i := range d.pairs {
		if d.pairs[i].key == key {
			return i
		}
	}
	return -1
}

func (d *doc) set(raw string, path []string) {
	i := d.find(path[0])
	if i < 0 {
		i = len(d.pairs)
		d.pairs = append(d.pairs, pair{key: path[0], raw: "null"})
	}
	if len(path) == 1 {
		d.pairs[i] = pair{key: path[0], raw: raw}
		return
	}
	if d.pairs[i].obj == nil {
		d.pairs[i] = pair{key: path[0], obj: &doc{}}
	}
	d.pairs[i].obj.set(raw, path[1:])
}

func (d *doc) delete(path []string) {
	i := d.find(path[0])
	switch {
	case i < 0:
	case len(path) == 1:
		d.pairs = append(d.pairs[:i], d.pairs[i+1:]...)
	case d.pairs[i].obj != nil:
		d.pairs[i].obj.delete(path[1:])
	}
}

func (d *doc) write(b *strings.Builder, pad func() string) {
	b.WriteByte('{')
	for i, p := range d.pairs {
		if i > 0 {
			b.WriteString("," + pad())
		}
		fmt.Fprintf(b, "%q:%s", p.key, pad())
		if p.obj != nil {
			p.obj.write(b, pad)
		} else {
			b.WriteString(p.raw)
		}
		b.WriteString(pad())
	}
	b.WriteByte('}')
}

func drawDoc(t *rapid.T, depth int) *doc {
	d := &doc{}
	for _, key := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 0, 4, rapid.ID[string]).Draw(t, "keys") {
		p := pair{key: key, raw: rapid.SampledFrom([]string{"1", "1.0", `"x"`, "[1,2]", "null", "1e5"}).Draw(t, "raw")}
		if depth < 2 && rapid.Bool().Draw(t, "nest") {
			p = pair{key: key, obj: drawDoc(t, depth+1)}
		}
		d.pairs = append(d.pairs, p)
	}
	return d
}

// Applied one at a time, edits have the naive model's effect, order of members included. Applied
// together they must mean the same; the order is then that of the first edit of each key, which
// the table above covers.
func TestApplyAgreesWithNaiveModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := drawDoc(t, 0)
		var text strings.Builder
		d.write(&text, func() string { return rapid.SampledFrom([]string{"", " ", "\n "}).Draw(t, "pad") })
		body := []byte(text.String())
		var edits []Edit
		oneByOne := body
		for range rapid.IntRange(1, 4).Draw(t, "edits") {
			path := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 1, 3).Draw(t, "path")
			e := Delete(path...)
			if rapid.Bool().Draw(t, "set") {
				raw := rapid.SampledFrom([]string{"7", `{"a":8}`, `[9]`}).Draw(t, "value")
				e = Set([]byte(raw), path...)
				if raw == `{"a":8}` {
					d.set("null", path)
					d.set("8", append(slices.Clip(path), "a"))
				} else {
					d.set(raw, path)
				}
			} else {
				d.delete(path)
			}
			edits = append(edits, e)
			var err error
			if oneByOne, err = Apply(nil, oneByOne, e); err != nil {
				t.Fatal(err)
			}
		}
		var want strings.Builder
		d.write(&want, func() string { return "" })
		if got := compact(t, oneByOne); got != want.String() {
			t.Fatalf("one by one: %s\n%s\nwant %s", body, got, want.String())
		}
		together, err := Apply(nil, body, edits...)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := sorted(t, together), sorted(t, []byte(want.String())); got != want {
			t.Fatalf("together: %s\n%s\nwant %s", body, got, want)
		}
	})
}

// many returns an object of n members whose keys cycle through the list.
func many(n int, keys ...string) []byte {
	b := []byte{'{'}
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `"%s":%d`, keys[i%len(keys)], i)
	}
	return append(b, '}')
}

func TestApplyToManyEqualKeys(t *testing.T) {
	const n = 20_000
	for _, c := range []struct {
		edits []Edit
		want  string
	}{
		{[]Edit{Set([]byte("true"), "a")}, fmt.Sprintf(`"a":true,"b":%d}`, n-1)},
		{[]Edit{Delete("a")}, fmt.Sprintf(`,"b":%d}`, n-1)},
		{[]Edit{Delete("a"), Delete("b")}, `{}`},
		{[]Edit{Delete("a"), Set([]byte("true"), "b")}, `{"b":true}`},
		{[]Edit{Set([]byte("1"), "a", "x"), Delete("b")}, `{"a":{"x":1}}`},
	} {
		got, err := Apply(nil, many(n, "a", "b"), c.edits...)
		if err != nil || !bytes.HasSuffix(got, []byte(c.want)) || !json.Valid(got) {
			t.Errorf("got … %s (%v), want … %s", got[max(0, len(got)-64):], err, c.want)
		}
	}
}

// escaped is a key in which each byte of an ASCII name is an escape, the longest way to write it.
func escaped(name string) string {
	var b strings.Builder
	for _, c := range []byte(name) {
		fmt.Fprintf(&b, `\u%04X`, c)
	}
	return b.String()
}

// Every name is found in its longest spelling, also one longer than the room on the stack; a longer key is another one.
func TestEscapedKeysAreFound(t *testing.T) {
	for _, name := range append(slices.Clone(fieldNames[:]), "x", strings.Repeat("long", 100)) {
		long := escaped(name)
		for _, key := range []string{long, long[:6*len(name)-6] + name[len(name)-1:]} {
			raw := []byte(`{"` + key + `":1,"` + key + `x":2,"` + key + `\ud800":3}`)
			r, err := Parse(Unknown, raw)
			if err != nil {
				t.Fatal(err)
			}
			if got := r.Get(name); string(got) != "1" {
				t.Errorf("%s written as %s: got %q, want its value", name, key, got)
			}
			if got := Member(raw, name); string(got) != "1" {
				t.Errorf("member %s written as %s: got %q, want its value", name, key, got)
			}
			got, err := Apply(nil, raw, Delete(name))
			if want := string(raw[len(`"":1,`)+len(key):]); err != nil || string(got) != "{"+want[1:] {
				t.Errorf("%s written as %s: got %s, %v, want it removed and the others kept", name, key, got, err)
			}
		}
	}
}

// A long key of escapes is not a field, which is told without decoding it, and short ones take no memory.
func TestKeysAreNotDecodedInMemory(t *testing.T) {
	for name, members := range map[string]string{
		"a long key": `"` + strings.Repeat(`\u006b`, 1<<20) + `":1`,
		"many keys":  strings.Repeat(`"\u0064ata_parallel_ran":1,`, 1000) + `"a":1`,
	} {
		raw := []byte(`{"prompt":"x",` + members + `}`)
		out := make([]byte, 0, len(raw))
		edits := []Edit{Delete("data_parallel_rank"), Delete("sampling_params", "extra_args")}
		var r Request
		for pass, f := range map[string]func(){
			"parse":  func() { _ = r.Parse(Completions, raw) },
			"fields": func() { _, _ = r.ConversationID(ConversationFields) },
			"member": func() { _ = Member(raw, "data_parallel_rank") },
			"edit":   func() { _, _ = Apply(out, raw, edits...) },
		} {
			if err := r.Parse(Completions, raw); err != nil {
				t.Fatal(err)
			}
			if got := testing.AllocsPerRun(3, f); got > 12 {
				t.Errorf("%s, %s: got %v allocations, want those of the pass alone", name, pass, got)
			}
		}
	}
}

func TestApplyTakesManyEdits(t *testing.T) {
	const n = 20_000
	var edits []Edit
	for i := range n {
		edits = append(edits, Set([]byte("1"), fmt.Sprint(i)), Delete("a", fmt.Sprint(i)), Set([]byte("2"), "b", fmt.Sprint(i)))
	}
	out, err := Apply(nil, many(n, "a", "b"), edits...)
	if err != nil || !json.Valid(out) || !bytes.Contains(out, []byte(`"19999":1`)) || bytes.Count(out, []byte(`"19999":2`)) != 1 {
		t.Errorf("got %d bytes (%v), want every edit made once", len(out), err)
	}
}

// late is a context that ends after a number of calls of Err.
type late struct {
	context.Context
	looks int
}

func (l *late) Err() error {
	if l.looks--; l.looks < 0 {
		return context.Canceled
	}
	return nil
}

func TestApplyStopsWhenItsContextEnds(t *testing.T) {
	for _, c := range []struct {
		body  []byte
		looks int // in all
	}{{many(10*checkMembers, "a"), 20}, {many(10*checkMembers, "a", "b"), 20}, {[]byte(`{"x":{}}`), 1}} {
		for _, looks := range []int{0, 1, c.looks / 2, c.looks - 1, c.looks} {
			dst := []byte("before")
			ctx := &late{context.Background(), looks}
			got, err := ApplyContext(ctx, dst, c.body, Delete("a"))
			if stopped := looks < c.looks; stopped != errors.Is(err, context.Canceled) || stopped && !bytes.Equal(got, dst) {
				t.Errorf("%d looks: got %.20q, %v, want stopped %v", looks, got, err, stopped)
			}
			if ctx.looks < -1 {
				t.Errorf("got %d looks at a context that had ended, want 1", -ctx.looks)
			}
		}
	}
}

func compact(t *rapid.T, b []byte) string {
	var out bytes.Buffer
	if err := json.Compact(&out, b); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return out.String()
}

func sorted(t *rapid.T, b []byte) string {
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// applyReference applies edits to the values of encoding/json, one after the other.
func applyReference(doc map[string]any, e Edit) {
	at := doc
	for _, name := range e.path[:len(e.path)-1] {
		next, ok := at[name].(map[string]any)
		if !ok {
			if e.raw == nil {
				return
			}
			next = map[string]any{}
			at[name] = next
		}
		at = next
	}
	name := e.path[len(e.path)-1]
	if delete(at, name); e.raw != nil {
		at[name] = decoded(e.raw)
	}
}

// decoded is the value of a JSON text, with numbers as they are written, and nil if it is none.
func decoded(text []byte) any {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) != nil {
		return nil
	}
	return v
}

// Edits do what they do to the values that encoding/json reads, and the bytes around them stay.
func FuzzApply(f *testing.F) {
	for ops := range uint8(16) {
		f.Add([]byte(`{"a":1,"b":{"c":2}}`), "a", "c", ops)
		f.Add([]byte(`{"a":1,"b":0,"a":2 , "a":{"c":1,"c":2}}`), "a", "c", ops)
		f.Add([]byte(`{"c":1,"a":{"c":3,"b":1,"c":4},"c":{},"\u0061":{"\u0063":2,"c":1} }`), "a", "c", ops)
	}
	f.Fuzz(func(t *testing.T, body []byte, one, two string, ops uint8) {
		if Valid(body) != nil || !json.Valid(body) {
			_, _ = Apply(nil, body, Set([]byte("1"), one, two), Delete(two))
			return
		}
		choices := []Edit{Set([]byte(`{"z":[1]}`), one), Delete(one, two), Set([]byte("2.50"), two, one), Delete(two), Set([]byte("null"), one, one, two)}
		edits := []Edit{choices[ops%5], choices[ops/5%5], choices[ops/25%5]}
		out, err := Apply([]byte("before"), body, edits...)
		doc, object := decoded(body).(map[string]any)
		if object != (err == nil) {
			t.Fatalf("%q: got error %v, want one exactly if it is no object", body, err)
		}
		if err != nil {
			return
		}
		if out = out[len("before"):]; !json.Valid(out) {
			t.Fatalf("%q with %q became %q, want JSON", body, edits, out)
		}
		if limit := len(body) + len(edits)*(3*6*(len(one)+len(two))+64); len(out) > limit {
			t.Fatalf("got %d bytes of %d, want at most %d", len(out), len(body), limit)
		}
		if bytes.Contains(bytes.ToLower(body), []byte(`\ud`)) || !utf8.Valid(body) || !utf8.ValidString(one) || !utf8.ValidString(two) {
			return // encoding/json makes several keys equal that are not
		}
		for _, e := range edits {
			applyReference(doc, e)
		}
		if got := decoded(out); !reflect.DeepEqual(got, any(doc)) {
			t.Fatalf("%q with %q became %q, want %v", body, edits, out, doc)
		}
	})
}

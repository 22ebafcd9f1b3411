package body

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// naiveMedia is EachMediaURL by way of the members and items of each value.
func naiveMedia(raw []byte, in fetched, depth int, each func(text []byte)) {
	switch {
	case raw[0] == '"' && in == ofTexts && !strings.HasPrefix(string(raw), `"data:`):
		each(raw)
	case raw[0] == '[':
		EachItem(raw, func(item []byte) { naiveMedia(item, in, depth+1, each) })
	case raw[0] == '{':
		EachMember(raw, func(key, value []byte) { naiveMedia(value, in.member(key, depth+1), depth+1, each) })
	}
}

// TestMediaURLs compares random bodies with the naive way.
func TestMediaURLs(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	keys := []string{"image_url", "url", "content", "source", "tools", "input", "x", `im\u0061ge_url`, `ur\u006c`, `a\"b`, "images", "content_parts", ""}
	space := func() string { return []string{"", "", " ", "\n\t"}[r.IntN(4)] }
	var value func(depth int) string
	value = func(depth int) string {
		switch n := r.IntN(6); {
		case depth > 7 || n < 2:
			return space() + []string{`"http://a"`, `"data:,x"`, `"d\u0061ta:,x"`, `"{\"url\":\"b\"}"`, `"a\\"`, `":"`, "1", "null", "[]", "{}", "-1.5e3", "true"}[r.IntN(12)] + space()
		case n < 4:
			var items []string
			for range r.IntN(4) {
				items = append(items, value(depth+1))
			}
			return space() + "[" + strings.Join(items, ",") + "]" + space()
		}
		var members []string
		for range 1 + r.IntN(4) {
			members = append(members, space()+`"`+keys[r.IntN(len(keys))]+`"`+space()+":"+value(depth+1))
		}
		return space() + "{" + strings.Join(members, ",") + "}" + space()
	}
	found := 0
	for range 20_000 {
		text := `{"messages":` + value(1) + `,"` + keys[r.IntN(len(keys))] + `":` + value(1) + "}"
		q, err := Parse(Unknown, []byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		var got, want []string
		q.EachMediaURL(func(text []byte) { got = append(got, string(text)) })
		naiveMedia(q.Body, nothing, 0, func(text []byte) { want = append(want, string(text)) })
		if !slices.Equal(got, want) {
			t.Fatalf("%s: got %q, want %q", text, got, want)
		}
		found += len(got)
	}
	if found < 1000 {
		t.Error(fmt.Sprint("only ", found, " texts are media, want more"))
	}
}

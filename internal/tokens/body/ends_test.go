package body

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// randomValue returns JSON of at most levels levels, with strings that could confuse a scanner.
func randomValue(r *rand.Rand, levels int) string {
	var b strings.Builder
	space := func() { b.WriteString([]string{"", "", " ", "\n\t"}[r.IntN(4)]) }
	var value func(levels int)
	value = func(levels int) {
		space()
		switch k := r.IntN(8); {
		case levels > 0 && k < 3:
			b.WriteByte('{')
			for i := range r.IntN(5) {
				if i > 0 {
					b.WriteByte(',')
				}
				space()
				fmt.Fprintf(&b, `"%s":`, []string{"a", "b", `\u0061`, `}{`, `\"`}[r.IntN(5)])
				value(levels - 1)
			}
			space()
			b.WriteByte('}')
		case levels > 0 && k < 6:
			b.WriteByte('[')
			for i := range r.IntN(5) {
				if i > 0 {
					b.WriteByte(',')
				}
				value(levels - 1)
			}
			space()
			b.WriteByte(']')
		default:
			b.WriteString([]string{"1.5e3", "null", `"x]}\\"`, `"` + strings.Repeat(`{\"`, 40) + `"`, "true", "-Infinity", `""`}[r.IntN(7)])
		}
		space()
	}
	value(levels)
	return b.String()
}

// walked returns every value within raw, level by level.
func walked(e *Ends, raw []byte) (all []string) {
	all = append(all, strings.TrimSpace(string(raw)))
	e.EachItem(raw, func(item []byte) { all = append(all, walked(e, item)...) })
	e.EachMember(raw, func(key, value []byte) { all = append(append(all, string(key)), walked(e, value)...) })
	return append(all, string(e.Member(raw, "a")))
}

// Ends changes how much is scanned, never the result.
func TestEndsFindTheSame(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	skipped := 0
	for range 3000 {
		raw := []byte(randomValue(r, r.IntN(8)))
		if err := Valid(raw); err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		e := EndsOf(raw)
		if got, want := walked(e, raw), walked(nil, raw); !slices.Equal(got, want) {
			t.Fatalf("%s:\n%q\n%q", raw, got, want)
		}
		skipped += e.Skipped
	}
	if skipped == 0 {
		t.Error("nothing was skipped: the test sees nothing")
	}
}

// Deeply nested content is scanned once, not once per level.
func TestEndsReadDeepValuesOnce(t *testing.T) {
	const levels, inner = 400, 1 << 16
	raw := []byte(strings.Repeat(`{"a":[`, levels/2) + `"` + strings.Repeat("x", inner) + `"` + strings.Repeat(`]}`, levels/2))
	e := EndsOf(raw)
	would := 0
	for at := raw; len(at) > 0 && (at[0] == '{' || at[0] == '['); {
		would += len(at)
		if at[0] == '{' {
			at = e.Member(at, "a")
			continue
		}
		e.EachItem(at, func(item []byte) { at = item })
	}
	if read := would - e.Skipped; read > 2*len(raw) {
		t.Errorf("%d bytes were read of %d, %d without the ends", read, len(raw), would)
	}
}

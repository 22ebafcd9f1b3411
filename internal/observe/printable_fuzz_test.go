package observe

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// Nothing that a terminal obeys is left, and a text that has none stays.
func FuzzPrintable(f *testing.F) {
	for _, s := range []string{"plain\nlines", "\x1b[31mred", "\u202e\u0007\x9b", "\xff\xc3", "\ufffd", "a\\b", "\u00a0\u200b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := Printable(s)
		if !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
			t.Fatalf("got %q of %q, want what can be printed", got, s)
		}
		if again := Printable(got); again != got {
			t.Fatalf("got %q, then %q, want no change", got, again)
		}
		if line := inLine(s); strings.Contains(line, "\n") {
			t.Fatalf("got %q of %q, want one line", line, s)
		}
		if len(got) > 10*len(s) {
			t.Fatalf("got %d bytes of %d, want at most ten times", len(got), len(s))
		}
	})
}

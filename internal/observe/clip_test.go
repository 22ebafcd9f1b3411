package observe

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestClipCutsBetweenCharacters(t *testing.T) {
	for _, s := range []string{"", "short", strings.Repeat("é", MaxClient), "x" + strings.Repeat("é", MaxClient), strings.Repeat("\x80", 2*MaxClient)} {
		got := Clip(s)
		if len(got) > MaxClient || utf8.ValidString(s) && !utf8.ValidString(got) || Clip(got) != got {
			t.Errorf("%d bytes became %q", len(s), got)
		}
		if len(s) <= MaxClient && got != s {
			t.Errorf("%q became %q", s, got)
		}
	}
}

package observe

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestClipCutsBetweenCharacters(t *testing.T) {
	for _, s := range []string{"", "short", strings.Repeat("é", MaxClient), "x" + strings.Repeat("é", MaxClient), strings.Repeat("\x80", 2*MaxClient),
		"caf\xe9", strings.Repeat("x\xe9", MaxClient/2), strings.Repeat("\xe9", MaxClient) + "x", strings.Repeat("文", MaxClient)} {
		got := Clip(s)
		if len(got) > MaxClient || !utf8.ValidString(got) || Clip(got) != got {
			t.Errorf("%d bytes became %q", len(s), got)
		}
		if len(s) <= MaxClient && utf8.ValidString(s) && got != s {
			t.Errorf("%q became %q", s, got)
		}
	}
}

func TestClipReplacesWhatIsNotUTF8(t *testing.T) {
	if got, want := Clip("caf\xe9/\xff\xfe/é"), "caf\ufffd/\ufffd/é"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

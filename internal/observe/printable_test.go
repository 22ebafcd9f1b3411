package observe

import (
	"strings"
	"testing"
)

// Text that a client chooses can neither control a terminal nor imitate another line.
func TestAnEntryIsSafeForTerminals(t *testing.T) {
	const evil = "a\x1b[2J\x9b\u009b\u202e\nanswered 200"
	e := &Entry{ID: evil, Method: evil, Path: evil, Model: evil, Conversation: evil, Refusal: evil, Rejected: 400, Reason: "r", PrefillNotes: []string{evil}, Prefill: "p", Degraded: "d"}
	text := e.Text()
	for _, bad := range []string{"\x1b", "\x9b", "\u009b", "\u202e", "\nanswered"} {
		if strings.Contains(text, bad) {
			t.Errorf("got %q in %q, want it escaped", bad, text)
		}
	}
	if want := `a\x1b[2J\x9b`; !strings.Contains(text, want) {
		t.Errorf("got %q, want %s in it", text, want)
	}
	if got, want := Printable("größe 日本 \ufffd\n"), "größe 日本 \ufffd\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

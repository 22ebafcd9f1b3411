package decide

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// FuzzSession reads any metadata.user_id. Its session is never longer than the id can hold, and what Claude Code writes
// around a session gives that session.
func FuzzSession(f *testing.F) {
	for _, s := range []string{
		"", "{", "{}", "user_1_account__session_", "user_a_account_b_session_0f3c", "_session_a_session_b", "somebody",
		`{"session_id":"0f3c","device_id":"d"}`, `{"session_id":7}`, `{"session_id":null}`, `{"SESSION_ID":"a"}`, `{"session_id":"a","session_id":"b"}`,
		`{"session_id":"\ud800\u0000"}`, `{"session_id":"a"} `, `{"session_id":"a"}}`, ` {"session_id":"a"}`, "{\"session_id\":\"\xff\"}",
		strings.Repeat("{\"a\":", 20_000), `{"session_id":"` + strings.Repeat("a", 5000) + `"}`, "{_session_x",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, id string) {
		const longest = 4 << 10 // longer ids are not read
		got := body.SessionOfUser(id)
		if len(id) > longest {
			if got != "" {
				t.Fatalf("got session %q of %d bytes, want none", got, len(id))
			}
			return
		}
		if _, after, _ := strings.Cut(id, "_session_"); !strings.HasPrefix(id, "{") && got != after {
			t.Fatalf("%q: got session %q, want %q", id, got, after)
		}
		// Invalid UTF-8 becomes a replacement character of three bytes.
		if len(got) > 3*len(id) {
			t.Fatalf("%q: got %d bytes of a session, want at most three times those of the id", id, len(got))
		}
		clean := strings.ToValidUTF8(id, "")
		object, err := json.Marshal(map[string]string{"device_id": clean, "session_id": clean})
		if err != nil {
			t.Fatal(err)
		}
		if got := body.SessionOfUser(string(object)); got != clean && len(object) <= longest {
			t.Fatalf("%s: got session %q, want %q", object, got, clean)
		}
		if got := body.SessionOfUser("user_1_account_2_session_" + clean); got != clean && len(clean) < longest-100 {
			t.Fatalf("got session %q, want %q", got, clean)
		}
	})
}

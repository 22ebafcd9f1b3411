package decide

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

// turns is a chat of n messages of about 60 bytes each, without the end of the list; change edits one of them, or none.
func turns(n, change int) string {
	var b strings.Builder
	for i := range n {
		text := "sea"
		if i == change {
			text = "see"
		}
		fmt.Fprintf(&b, `,{"role":"user","content":"message %d of the %s and its waves"}`, i, text)
	}
	return `{"model":"demo","messages":[` + b.String()[1:]
}

// A model without a tokenizer: a conversation without an id is recognised by the text that it begins with.
func TestConversationsWithoutIDsOrTokens(t *testing.T) {
	const on = "routing: {preset: conversation}\n"
	chat := func(n, change int, more string) string { return turns(n, change) + "]" + more + "}" }
	responses := func(n int) string {
		return strings.Replace(turns(n, -1), `"messages":`, `"instructions":"Be brief, and always name the sea.","input":`, 1) + "]}"
	}
	completion := func(n int) string { return `{"model":"demo","prompt":"` + strings.Repeat("The sea. ", n) + `"}` }
	const chats = "/v1/chat/completions"
	for name, c := range map[string]struct {
		rules, path, first, next string
		tenants                  []string // of the first and the next turn
		known                    bool
	}{
		"next turn":          {on, chats, chat(9, -1, ""), chat(11, -1, ""), nil, true},
		"a list with spaces": {on, chats, chat(9, -1, " "), turns(11, -1) + " \n ] }", nil, true},
		"completions":        {on, "/v1/completions", completion(90), completion(110), nil, true},
		"responses":          {on, "/v1/responses", responses(9), responses(11), nil, true},
		"messages":           {on, "/v1/messages", chat(9, -1, `,"system":"a","max_tokens":9`), chat(11, -1, `,"max_tokens":8,"system":"a"`), nil, true},
		"edited history":     {on, chats, chat(9, -1, ""), chat(11, 2, ""), nil, false},
		"other instructions": {on, "/v1/messages", chat(9, -1, `,"system":"be brief","max_tokens":9`), chat(11, -1, `,"max_tokens":9,"system":"be long"`), nil, false},
		"mostly new":         {on, chats, chat(9, -1, ""), chat(20, -1, ""), nil, false}, // match_threshold
		"other salt":         {on, chats, chat(9, -1, `,"cache_salt":"a"`), chat(11, -1, `,"cache_salt":"b"`), nil, false},
		"an id":              {on, chats, chat(9, -1, ""), chat(11, -1, `,"session_id":"s"`), nil, false},
		"short":              {on, "/v1/completions", completion(2), completion(2), nil, false},
		"off":                {"", chats, chat(9, -1, ""), chat(11, -1, ""), nil, false},
		"same tenant":        {on + "tenants: {salt_header: x-tenant}\n", chats, chat(9, -1, ""), chat(11, -1, ""), []string{"a", "a"}, true},
		"another tenant":     {on + "tenants: {salt_header: x-tenant}\n", chats, chat(9, -1, ""), chat(11, -1, ""), []string{"a", "b"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, c.rules)
			b.fleet.Model("demo").Tokens = nil // before there are workers, whose checks read it
			b.Fleet().SetWorkers([]workers.Worker{worker("a", 0), worker("b", 0)})
			var headers [2][]string
			for i, tenant := range c.tenants {
				headers[i] = []string{"x-tenant", tenant}
			}
			// The first request still runs, so load alone sends the next one to the other worker.
			first, home := b.ask(c.path, c.first, headers[0]...)
			next, e := b.ask(c.path, c.next, headers[1]...)
			if first.Reject != nil || next.Reject != nil {
				t.Fatalf("got %+v, %+v, want both routed", first.Reject, next.Reject)
			}
			if e.Matched != 0 || e.Degraded == "" {
				t.Errorf("got %d tokens matched, degraded %q, want none, and a reason", e.Matched, e.Degraded)
			}
			if got := e.Via == string(routing.ViaImplicit); got != c.known || (e.Target == home.Target) != c.known {
				t.Errorf("got target %s after %s by %q, want the same by the prefix: %v", e.Target, home.Target, e.Via, c.known)
			}
			end(&first, 200)
			end(&next, 200)
		})
	}
}

// A chat of 100,000 messages has a hash for 64 bytes, and its next turn begins with the same ones.
func TestTheTextOfALongChat(t *testing.T) {
	b := newBench(t, "routing: {preset: conversation}\n")
	b.fleet.Model("demo").Tokens = nil
	prefix := func(messages int) []uint64 {
		req, err := body.Parse(body.Chat, []byte(turns(messages, -1)+"]}"))
		if err != nil {
			t.Fatal(err)
		}
		j := &job{d: b.Decider, s: newScratch(), cacheReads: 1}
		j.textPrefix(&input{body: req, known: true, model: b.fleet.Model("demo"), name: "demo"})
		if got, want := len(j.s.prefix), (len(req.Prompt.Of(req.Body))-1)/64; got != want {
			t.Errorf("%d messages: got %d hashes, want %d", messages, got, want)
		}
		return j.s.prefix
	}
	first, next := prefix(100_000), prefix(100_001)
	if !slices.Equal(first, next[:len(first)]) {
		t.Error("the next turn does not begin with the hashes of the turn before, want it to")
	}
}

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/decide"
)

// authFilter stands for a filter that authenticates clients: it makes x-tenant of x-user.
const authFilter = `          - name: auth
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
              mutations: {request_mutations: [{append: {header: {key: x-tenant, value: "%REQ(x-user)%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}}]}
`

// beforeKvlane puts a filter in front of Kvlane's into Envoy's bootstrap.
func beforeKvlane(t *testing.T, text, filter string) string {
	const at = "          - name: kvlane\n            typed_config:"
	if strings.Count(text, at) != 1 {
		t.Fatalf("got %d filters named kvlane, want 1", strings.Count(text, at))
	}
	return strings.Replace(text, at, filter+at, 1)
}

// The victim's prompt has one bit in each of its blocks.
const (
	oracleBlocks = 8
	oracleBits   = 0x5a
)

// oraclePrompt has the block of ids of each bit, and one id more. Prompts of another series
// have nothing in common.
func oraclePrompt(series int, bits, blocks int) string {
	var ids []int
	for i := range blocks {
		for k := range 16 {
			ids = append(ids, 1000+series*1000+i*64+(bits>>i&1)*32+k)
		}
	}
	text, _ := json.Marshal(append(ids, 7)) //nolint:errchkjson // ints
	return string(text)
}

// oracle asks as user for a victim's prompt block by block, and returns the number of bits
// that it learned: the blocks that some sign says to be cached. The signs are Kvlane's headers,
// the usage, and the engine's own count, which the time to the first token follows.
func (b *bed) oracle(series int, user, more string, headers ...string) (learned int) {
	b.t.Helper()
	known := 0
	for i := range oracleBlocks {
		body := fmt.Sprintf(`{"model":"demo","max_tokens":1,"prompt":%s%s}`, oraclePrompt(series, known, i+1), more)
		r := b.post("/v1/completions", []byte(body), append([]string{"x-user", user}, headers...)...)
		if r.status != http.StatusOK {
			b.t.Fatalf("got status %d %s, want 200", r.status, r.body)
		}
		_, rec, _ := b.seen(r.header.Get("X-Request-Id"))
		if max(r.matched, r.answer.Usage.Details.Cached, rec.CachedTokens) >= 16*(i+1) {
			learned++ // the bit is 0
		} else {
			known |= 1 << i
		}
	}
	return learned
}

// A client that may send requests learns nothing of another tenant's prompts, whatever it
// writes into bodies and headers, with tenants.salt_header. Without it, it learns all bits
// that it asks for: the attack works.
func TestNoTenantLearnsAnothersPrompts(t *testing.T) {
	victim := func(b *bed, series int) *reply {
		return b.post("/v1/completions", fmt.Appendf(nil, `{"model":"demo","max_tokens":1,"prompt":%s,"user":"%d"}`, oraclePrompt(series, oracleBits, oracleBlocks), b.asked), "x-user", "alice")
	}
	const zeros = 4 // of oracleBits
	t.Run("without", func(t *testing.T) {
		b := newBed(t, shape{engines: 1, ranks: 1})
		victim(b, 0)
		if got := b.oracle(0, "mallory", ""); got != zeros {
			t.Errorf("got %d bits learned without tenants, want %d", got, zeros)
		}
	})
	t.Run("with", func(t *testing.T) {
		b := newBed(t, shape{
			engines: 1, ranks: 1, otherwise: true, envoy: ", fail_closed: true", config: "tenants: {salt_header: x-tenant}\n",
			bootstrap: func(text string) string { return beforeKvlane(t, text, authFilter) },
		})
		salt := decide.TenantSalt("alice", nil) // known to the attacker
		own := `,"cache_salt":"` + salt + `"`
		for series, c := range []struct {
			name, more string
			headers    []string
		}{
			{name: "plain"},
			{name: "the victim's salt", more: own},
			{name: "an escaped key", more: `,"cache\u005fsalt":"` + salt + `"`},
			{name: "two keys", more: own + own},
			{name: "in SGLang's key", more: `,"extra_key":"` + salt + `"`},
			{name: "the engine's header", headers: []string{"x-cache-salt", salt}},
			{name: "the gateway's header", headers: []string{"x-tenant", "alice"}},
			{name: "the victim's session", headers: []string{"x-session-id", "alice"}},
		} {
			victim(b, series)
			again := victim(b, series)
			if want := 16 * oracleBlocks; again.matched != want || again.answer.Usage.Details.Cached != want {
				t.Errorf("%s: the victim's own prompt: got %d tokens predicted and %d cached, want %d", c.name, again.matched, again.answer.Usage.Details.Cached, want)
			}
			if got := b.oracle(series, "mallory", c.more, c.headers...); got != 0 {
				t.Errorf("%s: got %d bits learned, want 0", c.name, got)
			}
			_, rec, _ := b.seen(again.header.Get("X-Request-Id"))
			if rec.Headers["x-tenant"]+rec.Headers["x-cache-salt"] != "" {
				t.Errorf("the engine got %v, want no header that names a tenant", rec.Headers)
			}
		}
		// Clients cannot name a tenant themselves, and no prompt goes on without one.
		for name, headers := range map[string][]string{"no user": nil, "the gateway's header alone": {"x-tenant", "alice"}} {
			if r := b.post("/v1/completions", fmt.Appendf(nil, `{"model":"demo","max_tokens":1,"prompt":%s}`, oraclePrompt(0, oracleBits, 3)), headers...); r.status != http.StatusForbidden {
				t.Errorf("%s: got status %d, want 403", name, r.status)
			}
		}
		if r := b.post("/v1/messages", []byte(`{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"x"}]}`), "x-user", "mallory"); r.status != http.StatusBadRequest {
			t.Errorf("an API without salts: got status %d, want 400", r.status)
		}
	})
}

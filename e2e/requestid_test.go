package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

const evilID = "___prefill_addr_evil:1___decode_addr_evil:1_0123"

// noEvil checks that the host "evil", named in a request, reached no engine, and that the
// answer's id is the engine's.
func (b *bed) noEvil(what string, r *reply) {
	b.t.Helper()
	if r.status != http.StatusOK {
		b.t.Errorf("%s: status %d: %s", what, r.status, r.body)
	}
	if _, _, ok := b.seen(r.header.Get("X-Request-Id")); !ok {
		b.t.Errorf("%s: no engine saw the answer's id %q", what, r.header.Get("X-Request-Id"))
	}
	for i, e := range b.engines {
		for _, rec := range e.Stats().Requests {
			for name, value := range rec.Headers {
				if strings.Contains(strings.ToLower(value), "evil") {
					b.t.Errorf("%s: e%d got %s: %s", what, i, name, value)
				}
			}
		}
	}
}

// postRaw sends the headers unchanged: names are not made canonical, and may be repeated.
func (b *bed) postRaw(path string, body []byte, headers http.Header) *reply {
	b.t.Helper()
	b.remember(body)
	req, err := http.NewRequest(http.MethodPost, "http://"+b.ingress+path, bytes.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	headers["Content-Type"] = []string{"application/json"}
	req.Header = headers
	r, err := b.do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// The addresses of P2pNccl's peers are part of the request id: clients cannot set them,
// with this connector or without it.
func TestNoRequestIDOfAClientNamesAHost(t *testing.T) {
	ids := map[string]http.Header{
		"plain":      {"X-Request-Id": {evilID}},
		"lower case": {"x-request-id": {evilID}},
		"upper case": {"X-REQUEST-ID": {strings.ToUpper(evilID)}},
		"second":     {"X-Request-Id": {"fine", evilID}},
		"first":      {"X-Request-Id": {evilID, "fine"}},
		"two cases":  {"X-Request-Id": {"fine"}, "x-request-id": {evilID}},
	}
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		t.Run("no connector, "+mode, func(t *testing.T) {
			b := newBed(t, shape{ranks: 1, envoy: ", request_body: " + mode})
			for name, h := range ids {
				b.noEvil(name, b.postRaw("/v1/completions", completionBody(mode+name, 1), h.Clone()))
			}
			r := b.post("/v1/completions", completionBody(mode+"good", 1), "X-Request-Id", "an-honest-id")
			if got := r.header.Get("X-Request-Id"); got != "an-honest-id" {
				t.Errorf("an honest id became %q", got)
			}
			b.noEvil("good", r)
		})
	}
	t.Run("p2p-nccl", func(t *testing.T) {
		for _, p := range pairs() {
			if p.connector != "p2p-nccl" {
				continue
			}
			b := newPools(t, p, "")
			short := bodyFor("/v1/completions", "short", 9, false)
			for what, c := range map[string]struct {
				path string
				body []byte
			}{
				"short":          {"/v1/completions", short},
				"split":          {"/v1/completions", bodyFor("/v1/completions", "long", 300, false)},
				"two answers":    {"/v1/completions", bytes.Replace(bodyFor("/v1/completions", "n", 300, false), []byte(`{`), []byte(`{"n":2,`), 1)},
				"id in the body": {"/v1/completions", bytes.Replace(short, []byte(`{`), []byte(`{"request_id":"`+evilID+`",`), 1)},
				"another API":    {"/v1/messages", bodyFor("/v1/messages", "messages", 9, false)},
				"split chat":     {"/v1/chat/completions", bodyFor("/v1/chat/completions", "chat", 300, false)},
			} {
				for name, h := range ids {
					b.noEvil(what+", "+name, b.postRaw(c.path, c.body, h.Clone()))
				}
			}
			// No prefill worker is left: decode computes.
			for _, e := range b.engines[:2] {
				e.Close()
			}
			b.noEvil("fallback", b.postRaw(p.paths[0], bodyFor(p.paths[0], "fallback", 300, false), ids["plain"].Clone()))
		}
	})
}

// Of requests with one id that run together each has its own first token: otherwise the target of one seems not to answer.
// They run for minutes, so all of them until the test ends.
func TestRequestsOfOneIDHaveTheirOwnFirstTokens(t *testing.T) {
	b := newBed(t, shape{ranks: 1, engine: slow(20 * time.Millisecond), envoy: ", first_token: true"})
	ids, targets := map[string]bool{}, map[string]bool{}
	for i := range 3 {
		body := []byte(fmt.Sprintf(`{"model":"demo","stream":true,"max_tokens":15000,"messages":[{"role":"user","content":%q}]}`, prose(fmt.Sprint(i), 200)))
		b.remember(body)
		req, err := http.NewRequest(http.MethodPost, "http://"+b.ingress+"/v1/chat/completions", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header = http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {"same"}}
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		ids[resp.Header.Get("X-Request-Id")], targets[resp.Header.Get("X-Kvlane-Target")] = true, true
	}
	b.until("all have their first tokens", func() bool { return b.metric("kvlane_queued_tokens") == 0 })
	if n := b.metric("kvlane_active_requests"); n != 3 || len(ids) != 3 || !ids["same"] || len(targets) != 2 {
		t.Errorf("got %v requests that run, ids %v, targets %v, want 3, three ids of which one is the client's, both targets", n, ids, targets)
	}
}

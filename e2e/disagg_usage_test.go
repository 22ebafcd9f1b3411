package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

// usageOf returns the usage of an answer, streamed or not, of any API.
func usageOf(raw []byte) body.Usage {
	s := body.NewUsageScanner(!bytes.HasPrefix(raw, []byte("{")))
	_, _ = s.Write(raw)
	u, _ := s.Usage()
	return u
}

// decodeCounts makes decode engines report more cached tokens than they had. They are slow,
// so that a concurrent prefill leg ends first.
const decodeCounts = 1000

func decodeLies(i int, o *enginesim.Options) {
	if i >= 2 {
		o.Faults.CachedTokensLie = decodeCounts
		slow(10*time.Millisecond)(i, o)
	}
}

// With disagg.usage the client gets the prefill leg's usage: the cached tokens of the
// prefill engine, which decode does not know. All other bytes are the engine's, and answers
// to requests that are not split keep their length.
func TestUsageOfThePrefillLeg(t *testing.T) {
	for _, p := range pairs() {
		switch p.connector {
		case "nixl", "mooncake", "lmcache", "sglang":
		default:
			continue
		}
		for _, mode := range []string{"NONE", "STREAMED", "FULL_DUPLEX_STREAMED"} {
			if mode != "NONE" && p.connector != "nixl" {
				continue
			}
			t.Run(p.connector+" "+mode, func(t *testing.T) {
				p := p
				p.shape.engine = decodeLies
				p.shape.envoy = ", response_body: " + mode
				disagg := ", usage: prefill"
				if p.connector == "lmcache" {
					disagg += ", first_token: append" // decode's prompt is longer by a token
				}
				b := newPools(t, p, disagg)
				for _, path := range p.paths {
					for _, stream := range []bool{false, true} {
						b.tellsPrefillUsage(&p, path, stream)
					}
				}
				if p.always {
					return
				}
				before := b.metric("kvlane_extproc_messages_total", `kind="response_body"`)
				r := b.post("/v1/completions", bodyFor("/v1/completions", "short", 20, false))
				if n := r.header.Get("Content-Length"); r.status != http.StatusOK || mode == "NONE" && n != strconv.Itoa(len(r.body)) {
					t.Errorf("a request that is not split: status %d, content-length %q of %d bytes", r.status, n, len(r.body))
				}
				if n := b.metric("kvlane_extproc_messages_total", `kind="response_body"`); mode == "NONE" && n != before {
					t.Errorf("%v pieces of an answer came that nobody looks at", n-before)
				}
			})
		}
	}
}

// inBody returns a prompt as bodyFor writes it.
func inBody(path, text string) []byte {
	if path != "/inference/v1/generate" {
		return []byte(text)
	}
	ids, err := json.Marshal(tokenizer.Encode(text, false))
	if err != nil {
		panic(err)
	}
	return ids
}

// tellsPrefillUsage sends a prompt twice, the second time extended, and compares the second
// answer's usage with the prefill engine's record.
func (b *bed) tellsPrefillUsage(p *pair, path string, stream bool) {
	b.t.Helper()
	what := fmt.Sprintf("%s %s stream=%v", p.connector, path, stream)
	body := bodyFor(path, what, 400, stream)
	b.post(path, body)
	r := b.post(path, bytes.ReplaceAll(body, inBody(path, prose(what, 400)), inBody(path, prose(what, 400)+" "+prose(what+" more", 120))))
	s := b.legsOf(r.header.Get("X-Request-Id"))
	if r.status != http.StatusOK || s.prefill == nil || s.decode == nil || textOf(r.body) == "" {
		b.t.Fatalf("%s: status %d, legs %+v: %s", what, r.status, s, r.body)
	}
	got := usageOf(r.body)
	if path == "/inference/v1/generate" { // has no usage
		return
	}
	if got.Prompt != int64(s.prefill.PromptTokens) || got.Cached != int64(s.prefill.CachedTokens) || got.Cached < 64 {
		b.t.Errorf("%s: usage %+v, the prefill leg had %d tokens, %d of them cached\n%s", what, got, s.prefill.PromptTokens, s.prefill.CachedTokens, r.body)
	}
}

// By default the client gets the usage that the decode engine reports.
func TestUsageOfTheDecodeLeg(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings, shape: shape{engine: decodeLies}}, "")
	r := b.post("/v1/completions", bodyFor("/v1/completions", "plain", 150, false))
	if u := usageOf(r.body); u.Cached != decodeCounts || r.header.Get("Content-Length") != strconv.Itoa(len(r.body)) || r.header.Get("X-Kvlane-Prefill") == "" {
		t.Errorf("usage %+v, content-length %q", u, r.header.Get("Content-Length"))
	}
}

// If the engine dies during an answer that Kvlane edits, the client sees a broken answer.
func TestUsageOfAnAnswerThatDies(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings}, ", usage: prefill")
	for _, e := range b.engines[2:] {
		if err := e.SetFaults(enginesim.Faults{DieAfterTokens: 3}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+b.ingress+"/v1/completions", bytes.NewReader(bodyFor("/v1/completions", "dies", 150, true)))
	if err != nil {
		t.Fatal(err)
	}
	var seen bytes.Buffer
	if resp, err := b.client.Do(req); err == nil {
		_, err = seen.ReadFrom(resp.Body)
		resp.Body.Close()
		if err == nil && resp.StatusCode == http.StatusOK {
			t.Errorf("the client saw a good end: %s", seen.Bytes())
		}
	}
	if bytes.Contains(seen.Bytes(), []byte("[DONE]")) {
		t.Errorf("%s", seen.Bytes())
	}
	for _, e := range b.engines {
		if err := e.SetFaults(enginesim.Faults{}); err != nil {
			t.Fatal(err)
		}
	}
	b.until("nothing is reserved", func() bool { return b.metric("kvlane_reservations") == 0 })
}

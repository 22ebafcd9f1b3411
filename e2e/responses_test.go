package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// An engine knows only the answers of its own process. Each turn is sent to the engine that has the
// one before, streamed or not, and after Kvlane was replaced.
func TestAStoredResponseIsContinuedByTheEngineThatHasIt(t *testing.T) {
	b := newBed(t, shape{engines: 3, ranks: 1, otherwise: true, config: "index: {key: stable}\n"})
	const conversations, turns = 6, 4
	last := make([]string, conversations)
	for turn := range turns {
		if turn == 2 {
			b.stopKvlane(syscall.SIGTERM)
			b.startKvlane()
		}
		for i := range last {
			stream := (i+turn)%2 == 1
			body := fmt.Sprintf(`{"model":"demo","max_output_tokens":4,"stream":%v,"input":%q,"previous_response_id":%s}`, stream, strings.Repeat(fmt.Sprint("sea ", i), 50), last[i])
			if last[i] == "" {
				body = strings.Replace(body, `,"previous_response_id":`, "", 1)
			}
			r := b.post("/v1/responses", []byte(body))
			if r.status != http.StatusOK {
				t.Fatalf("conversation %d, turn %d: got status %d %s, want 200", i, turn, r.status, r.body)
			}
			_, id, _ := strings.Cut(string(r.body), `"id":"resp_`)
			id, _, _ = strings.Cut(id, `"`)
			last[i] = `"resp_` + id + `"`
			_, rec, _ := b.seen(r.header.Get("X-Request-Id"))
			if turn > 0 && rec.CachedTokens < 32 {
				t.Errorf("conversation %d, turn %d: got %d cached tokens, want the history's", i, turn, rec.CachedTokens)
			}
		}
	}
	used := map[string]bool{}
	for i := range last {
		var id string
		_ = json.Unmarshal([]byte(last[i]), &id)
		for method, want := range map[string]int{http.MethodGet: http.StatusOK, http.MethodPost: http.StatusBadRequest} {
			path := "/v1/responses/" + id
			if method == http.MethodPost {
				path += "/cancel" // one that has ended cannot be cancelled; elsewhere it does not exist
			}
			req, err := http.NewRequestWithContext(t.Context(), method, "http://"+b.ingress+path, http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			r, err := b.do(req)
			if err != nil {
				t.Fatal(err)
			}
			if r.status != want {
				t.Errorf("%s %s: got status %d %s, want %d", method, path, r.status, r.body, want)
			}
			used[r.target] = true
		}
	}
	if len(used) < 2 {
		t.Errorf("got answers of %v, want several engines", used)
	}
}

// emptyBody is a body that ends before its first byte; net/http sends no trailers after one that it knows to be empty.
type emptyBody struct{}

func (emptyBody) Read([]byte) (int, error) { return 0, io.EOF }

// A request of trailers without a body is decided: whatever its form, no tenant reads another's stored answer.
func TestTrailersDoNotEscapeTheDecision(t *testing.T) {
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		t.Run(mode, func(t *testing.T) {
			b := newBed(t, shape{engines: 1, ranks: 1, otherwise: true, envoy: ", request_body: " + mode, config: "tenants: {salt_header: x-user, trust_ingress: true}\n"})
			r := b.post("/v1/responses", []byte(`{"model":"demo","max_output_tokens":4,"input":"a secret"}`), "x-user", "alice")
			_, id, _ := strings.Cut(string(r.body), `"id":"`)
			id, _, _ = strings.Cut(id, `"`)
			if r.status != http.StatusOK || id == "" {
				t.Fatalf("got status %d %s, want an answer with an id", r.status, r.body)
			}
			transport := &http.Transport{Protocols: new(http.Protocols)}
			transport.Protocols.SetUnencryptedHTTP2(true)
			defer transport.CloseIdleConnections()
			for user, want := range map[string]int{"alice": http.StatusOK, "mallory": http.StatusNotFound} {
				for _, trailer := range []http.Header{nil, {"X-Sum": {"1"}}} {
					req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+b.ingress+"/v1/responses/"+id, emptyBody{})
					if err != nil {
						t.Fatal(err)
					}
					req.Header.Set("X-User", user)
					req.Trailer = trailer
					resp, err := transport.RoundTrip(req)
					if err != nil {
						t.Fatal(err)
					}
					text, err := io.ReadAll(resp.Body)
					_ = resp.Body.Close()
					if err != nil || resp.StatusCode != want {
						t.Errorf("%s, trailers %v: got status %d %s %v, want %d", user, trailer, resp.StatusCode, text, err, want)
					}
				}
			}
			if n := b.metric("kvlane_extproc_failures_total", `kind="abandoned"`); n != 0 {
				t.Errorf("got %v requests that were not decided, want 0", n)
			}
		})
	}
}

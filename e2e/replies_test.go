package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// failureShapes are error answers as read by OpenAI's and Anthropic's clients.
type failureShapes struct {
	Type  string `json:"type"`
	Error struct {
		Message string `json:"message"`
		Type    string `json:"type"`
	} `json:"error"`
}

// Envoy's own answers have the API's format too: for a worker that refuses, dies before its
// answer, or does not exist, with Kvlane and without it, and for a body over the limit.
func TestEnvoysOwnAnswersHaveTheAPIsShape(t *testing.T) {
	b := newBed(t, shape{engines: 1, maxBodyMB: 1})
	check := func(what string, status int) {
		t.Helper()
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/messages"} {
			r := b.post(path, bodyFor(path, what, 20, false))
			var got failureShapes
			if err := json.Unmarshal(r.body, &got); err != nil || r.status != status || got.Error.Message == "" || got.Error.Type == "" ||
				(got.Type == "error") != (path == "/v1/messages") || !strings.HasPrefix(r.header.Get("Content-Type"), "application/json") {
				t.Errorf("%s, %s: status %d, %s: %s", what, path, r.status, r.header.Get("Content-Type"), r.body)
			}
		}
	}
	large := strings.Replace(string(bodyFor("/v1/completions", "large", 20, false)), `"prompt":"`, `"prompt":"`+strings.Repeat("a ", 1<<20), 1)
	r := b.post("/v1/completions", []byte(large))
	if want := `{"error":{"message":"request body is larger than 1048576 bytes","type":"invalid_request_error","param":null,"code":"request_too_large"}}`; r.status != http.StatusRequestEntityTooLarge || string(r.body) != want {
		t.Errorf("status %d: %s", r.status, r.body)
	}
	r = b.post("/v1/messages", []byte(strings.Replace(large, `"prompt"`, `"messages"`, 1)))
	if want := `{"type":"error","error":{"type":"request_too_large","message":"request body is larger than 1048576 bytes"}}`; r.status != http.StatusRequestEntityTooLarge || string(r.body) != want {
		t.Errorf("status %d: %s", r.status, r.body)
	}
	b.fault(enginesim.Faults{DieAfterTokens: 1}, 0)
	check("dies", http.StatusServiceUnavailable)
	b.fault(enginesim.Faults{}, 0)
	b.until("all is well", func() bool { return b.metric("kvlane_worker_ready") == 1 })
	b.stopKvlane(syscall.SIGKILL)
	b.fault(enginesim.Faults{Refuse: true}, 0)
	check("refuses, and Kvlane is down", http.StatusServiceUnavailable)
	b.fault(enginesim.Faults{}, 0)
	b.startKvlane()
	b.until("all is well again", func() bool { return b.metric("kvlane_worker_ready") == 1 })
	b.fault(enginesim.Faults{Refuse: true}, 0)
	b.until("the worker is out", func() bool { return b.metric("kvlane_worker_ready") == 0 })
	check("no worker is ready", http.StatusServiceUnavailable)
	b.fault(enginesim.Faults{}, 0)
}

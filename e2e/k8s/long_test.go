//go:build linux

package k8s

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// long starts answers that their engines pause in the middle, because those of load are too
// short. The returned function resumes them and requires that each one is complete; call it
// once.
func (c *cluster) long(t *testing.T, in, chat string) (finish func()) {
	t.Helper()
	const answers, held, tokens = 4, 20, 32
	c.fault(t, in, fmt.Sprintf(`{"hold_after_tokens": %d}`, held))
	var open []*bufio.Scanner
	for i := range answers {
		body, err := json.Marshal(map[string]any{"model": "demo", "max_tokens": tokens, "stream": true,
			"messages": []any{map[string]any{"role": "user", "content": essay(fmt.Sprint("long ", i), 30)}}})
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, chat, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultTransport.RoundTrip(req) // without the time limit of client
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		lines := bufio.NewScanner(resp.Body)
		if err := pieces(lines, 1+held); err != nil { // the first names the role
			t.Fatalf("long answer %d: %d %v", i, resp.StatusCode, err)
		}
		open = append(open, lines)
	}
	return func() {
		t.Helper()
		c.fault(t, in, `{}`)
		for i, lines := range open {
			if err := remaining(lines, tokens-held); err != nil {
				t.Errorf("long answer %d was cut: %v", i, err)
			}
		}
	}
}

// event reads the next piece of an answer by SSE, "" if none comes.
func event(lines *bufio.Scanner) string {
	for lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			return data
		}
	}
	return ""
}

// pieces reads n tokens.
func pieces(lines *bufio.Scanner, n int) error {
	for i := range n {
		if data := event(lines); !strings.Contains(data, `"delta"`) {
			return fmt.Errorf("of %d pieces number %d is %q: %w", n, i, data, lines.Err())
		}
	}
	return nil
}

// remaining reads n tokens and the end.
func remaining(lines *bufio.Scanner, n int) error {
	if err := pieces(lines, n); err != nil {
		return err
	}
	if last := event(lines); last != "[DONE]" {
		return fmt.Errorf("the last piece is %q: %w", last, lines.Err())
	}
	return nil
}

// answerPath is how an answer is affected when the Kvlane that chose its worker ends.
type answerPath int

const (
	past    answerPath = iota // it does not pass through Kvlane, and continues
	through                   // it passes through Kvlane, which waits for its end
)

// replacesKvlane makes Kvlane's pods anew under load, while long answers run for
// three times drain_quiet of the manifests at least. All of them are whole, and
// Kvlane's old pods end long before drain.
func replacesKvlane(t *testing.T, c *cluster, in, chat string, answers answerPath) {
	finish := c.long(t, in, chat)
	steadily(t, chat, answers == through, func() {
		c.kubectl(t, "", "-n", in, "rollout", "restart", "deployment/kvlane")
		c.ready(t, in, "kvlane", 2)
		ended := func() error { return c.node.leaving(in) }
		if answers == through {
			time.Sleep(15 * time.Second)
			if ended() == nil {
				t.Error("Kvlane did not wait for the answers that pass through it")
			}
			finish()
		}
		eventually(t, reasonable, "the end of Kvlane's old pods", ended)
		if answers == past {
			finish()
		}
	})
	c.nothingBooked(t, in)
}

// meanwhile runs f concurrently, and returns how to wait for it.
func meanwhile(f func()) (wait func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	return func() { <-done }
}

// overrides looks at what Envoy makes of Kvlane's mode_override: where it may, Kvlane
// sends back no piece of an answer that the policy gives to it.
func overrides(t *testing.T, c *cluster, chat string) {
	const (
		entry = `  - backendRefs: [{name: kvlane, port: 9002}]
    shadowMode: true
    failOpen: true
    processingMode:
      response: {body: Streamed, attributes: [request.id]}
`
		response = "response: {attributes: [upstream.address]}"
		streamed = "response: {body: Streamed, attributes: [upstream.address]}"
		allowed  = "allowModeOverride: true"
	)
	came := func(want bool) func() error {
		return func() error {
			const name = `kvlane_extproc_messages_total{kind="response_body"}`
			before := c.metric(t, ns, name)
			for i := range 4 {
				if r, err := post(t.Context(), chat, chatBody("demo", essay(fmt.Sprint("override ", i), 30), true)); err != nil || r.status != http.StatusOK {
					return fmt.Errorf("%d %w", r.status, err)
				}
			}
			c.nothingBooked(t, ns)
			if n := c.metric(t, ns, name) - before; (n > 0) != want {
				return errors.New(fmt.Sprint(n))
			}
			return nil
		}
	}
	for _, step := range []struct {
		what  string
		pairs []string
		want  bool
	}{
		{"no pieces of answers without the entry that observes", []string{entry, ""}, false},
		{"pieces of answers where the policy gives them and lets Kvlane not refuse", []string{entry, "", response, streamed, allowed, "allowModeOverride: false"}, true},
		{"no pieces of answers where Kvlane may refuse them", []string{entry, "", response, streamed}, false},
	} {
		c.applyText(t, edited(t, "envoy-gateway/policies.yaml", step.pairs...))
		eventually(t, reasonable, step.what, came(step.want))
	}
	// The stream that gets no pieces still lives until the end of its answer.
	finish := c.long(t, ns, chat)
	if n := c.metric(t, ns, "kvlane_reservations"); n != 4 {
		t.Errorf("%v requests are booked while four answers run", n)
	}
	finish()
	c.nothingBooked(t, ns)
	c.apply(t, "-f", manifest("envoy-gateway/policies.yaml"))
	eventually(t, reasonable, "the entry that observes", came(true))
	accepted(t, c, ns)
}

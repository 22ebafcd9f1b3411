//go:build linux

package k8s

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// streams holds every engine's answer behind its third token, and lets it go on
// only when the client has what was made until then: whoever on the road keeps
// pieces back until the end, waits for ever.
func streams(t *testing.T, c *cluster, in, chat string) {
	t.Helper()
	const held, tokens = 3, 8 // of chatBody
	c.fault(t, in, fmt.Sprintf(`{"hold_after_tokens": %d}`, held))
	defer c.fault(t, in, `{}`)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, chat, bytes.NewReader(chatBody("demo", "Tell me more.", true)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	event := func() string {
		for lines.Scan() {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				return data
			}
		}
		return ""
	}
	for i := range 1 + held { // the first names the role
		if data := event(); !strings.Contains(data, `"delta"`) {
			t.Fatalf("of an answer that is held behind %d tokens, piece %d is %q: %v", held, i, data, lines.Err())
		}
	}
	c.fault(t, in, `{}`)
	for range tokens - held {
		if data := event(); !strings.Contains(data, `"delta"`) {
			t.Fatalf("when it goes on, a piece is %q: %v", data, lines.Err())
		}
	}
	if last := event(); last != "[DONE]" {
		t.Errorf("the last piece is %q: %v", last, lines.Err())
	}
}

// fault sets the faults of all simulated engines of a namespace.
func (c *cluster) fault(t *testing.T, in, faults string) {
	t.Helper()
	engines := c.node.sandboxes(in, map[string]string{"app": "llm"})
	if len(engines) == 0 {
		t.Fatalf("no engines in %s", in)
	}
	for _, s := range engines {
		r, err := post(t.Context(), "http://"+s.ip+":8000/sim/faults", []byte(faults))
		if err != nil || r.status != http.StatusOK {
			t.Errorf("faults of %s: %d %s %v", s.pod.Metadata.Name, r.status, r.body, err)
		}
	}
}

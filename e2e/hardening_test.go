package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// A client that sends a byte now and then holds no request open; one that is merely
// slow is served.
func TestASlowUploadIsCut(t *testing.T) {
	b := newBed(t, shape{envoy: ", upload_timeout: 3s"})
	const body = `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"slow but in time"}]}`
	b.remember([]byte(body))
	for name, c := range map[string]struct{ bytes, want int }{"cut": {1, http.StatusRequestTimeout}, "in time": {len(body)/3 + 1, http.StatusOK}} {
		conn, err := net.Dial("tcp", b.ingress)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body))
		done := make(chan struct{})
		go func() {
			defer close(done)
			for rest := body; rest != ""; time.Sleep(200 * time.Millisecond) {
				n := min(c.bytes, len(rest))
				if _, err := io.WriteString(conn, rest[:n]); err != nil {
					return
				}
				rest = rest[n:]
			}
		}()
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s: got status %d, want %d", name, resp.StatusCode, c.want)
		}
		conn.Close()
		<-done
	}
}

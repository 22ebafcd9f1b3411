package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// echoing is an engine that takes WebSockets at every path, and sends back what they carry.
func echoing(t *testing.T) func(int, *enginesim.Engine) string {
	return func(_ int, e *enginesim.Engine) string {
		t.Helper()
		target, err := url.Parse("http://" + e.Addr())
		if err != nil {
			t.Fatal(err)
		}
		proxy := httputil.NewSingleHostReverseProxy(target)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
				proxy.ServeHTTP(w, r)
				return
			}
			conn, both, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Path: %s\r\n\r\n", r.URL)
			_, _ = io.Copy(conn, both)
		}))
		t.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}
}

// upgrade asks for a WebSocket. The caller closes the connection.
func (b *bed) upgrade(method, path string) (conn net.Conn, status int, header http.Header, r *bufio.Reader) {
	b.t.Helper()
	conn, err := net.Dial("tcp", b.ingress)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		b.t.Fatal(err)
	}
	fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: kvlane\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", method, path)
	r = bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	_ = resp.Body.Close()
	return conn, resp.StatusCode, resp.Header, r
}

// WebSockets of /v1/realtime go to a worker that Kvlane picks, both ways and as long as they like, also when Kvlane dies
// meanwhile; those of other paths are refused.
func TestWebSocketsOfRealtime(t *testing.T) {
	for name, keys := range map[string]string{"default": "", "streamed": ", first_token: true, request_body: FULL_DUPLEX_STREAMED, response_body: STREAMED"} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, shape{envoy: keys, addressOf: echoing(t)})
			conn, status, header, r := b.upgrade("GET", "/v1/realtime?model=demo")
			if target := header.Get("X-Kvlane-Target"); status != http.StatusSwitchingProtocols || target == "" || header.Get("X-Path") != "/v1/realtime?model=demo" {
				t.Fatalf("got %d with target %q and path %q, want 101 from a picked worker", status, target, header.Get("X-Path"))
			}
			echo := func(text []byte) {
				t.Helper()
				go func() { _, _ = conn.Write(text) }()
				got := make([]byte, len(text))
				if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, text) {
					t.Fatalf("got %d bytes, %v, want the %d that were sent", len(got), err, len(text))
				}
			}
			echo([]byte("hello"))
			echo(bytes.Repeat([]byte("0123456789abcdef"), 2<<20)) // more than a body may have
			if n := b.metric("kvlane_requests_total", `api="realtime"`, `outcome="routed"`); n != 1 {
				t.Errorf("got %v realtime requests routed, want 1", n)
			}
			if n := b.metric("kvlane_active_requests"); n != 1 {
				t.Errorf("got %v active requests, want the open WebSocket", n)
			}
			second, _, _, _ := b.upgrade("GET", "/v1/realtime")
			_ = second.Close()
			b.until("the second one has ended", func() bool { return b.metric("kvlane_active_requests") == 1 })
			b.stopKvlane(syscall.SIGKILL)
			echo([]byte("still here"))
			_ = conn.Close()

			for _, c := range []struct{ method, path string }{{"GET", "/v1/chat/completions"}, {"POST", "/v1/realtime"}, {"GET", "/v1/realtimes"}} {
				if _, status, _, _ := b.upgrade(c.method, c.path); status != http.StatusForbidden {
					t.Errorf("%s %s: got %d, want 403", c.method, c.path, status)
				}
			}
		})
	}
	for paths, refused := range map[string][]string{"/v1/chat/completions": {"/v1/realtime"}, "/*": {"/v1/realtimes", "/v1/realtime/x?model=demo"}} {
		b := newBed(t, shape{envoy: fmt.Sprintf(", paths: [%q]", paths), addressOf: echoing(t)})
		for _, path := range refused {
			if _, status, _, _ := b.upgrade("GET", path); status != http.StatusForbidden {
				t.Errorf("paths %s: %s: got %d, want 403", paths, path, status)
			}
		}
	}
}

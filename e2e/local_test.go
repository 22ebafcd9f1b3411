package e2e

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// between is a proxy in front of an engine that fails requests for generation while told
// to.
type between struct {
	to    http.Handler
	spoil atomic.Pointer[func(net.Conn)]
}

func (m *between) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	spoil := m.spoil.Load()
	if spoil == nil || r.Method != http.MethodPost || !strings.HasPrefix(r.URL.Path, "/v1/") {
		// A ReverseProxy that still reads the body of a client that leaves cuts the answers of others.
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler) // the client has left
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		m.to.ServeHTTP(w, r)
		return
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	(*spoil)(conn)
}

// newBetween starts a proxy on its own port.
func newBetween(t *testing.T, e *enginesim.Engine) (m *between, address string) {
	t.Helper()
	u, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	to := httputil.NewSingleHostReverseProxy(u)
	to.ErrorLog = log.New(io.Discard, "", 0) // clients that leave
	m = &between{to: to}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: m, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return m, l.Addr().String()
}

// Envoy itself answers after a pick was made: Kvlane sees the answer, the booking ends, and
// the worker's counters have Envoy's response flags.
func TestEnvoyAnswersForItselfAfterAPick(t *testing.T) {
	replace := func(pairs ...string) func(string) string {
		return func(boot string) string {
			for i := 0; i < len(pairs); i += 2 {
				if !strings.Contains(boot, pairs[i]) {
					panic("the bootstrap has no " + pairs[i])
				}
				boot = strings.ReplaceAll(boot, pairs[i], pairs[i+1])
			}
			return boot
		}
	}
	for _, c := range []struct {
		name, flag string
		status     int
		spoil      func(net.Conn)
		boot       func(string) string
		busy       bool // another request runs at the same time
		lasting    bool // the fault is in Envoy's configuration
	}{
		{name: "the worker resets", flag: "upstream_connection_termination", status: 503, spoil: func(c net.Conn) {
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
		}},
		{name: "the worker speaks no HTTP", flag: "upstream_protocol_error", status: 502, spoil: func(c net.Conn) { fmt.Fprint(c, "220 mail ready\r\n\r\n") }},
		{name: "its headers are too large", flag: "upstream_protocol_error", status: 502, spoil: func(c net.Conn) {
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nx-large: %s\r\ncontent-length: 0\r\n\r\n", strings.Repeat("x", 200_000))
		}},
		{name: "a circuit breaker is open", flag: "upstream_overflow", status: 503, boot: replace("max_requests: 65535, max_retries: 1024", "max_requests: 1, max_retries: 1024"), busy: true},
		{name: "no worker is healthy", flag: "no_healthy_upstream", status: 503, lasting: true,
			boot: replace("type: EDS", "type: STATIC", "eds_cluster_config: {service_name: model_servers, eds_config: {ads: {}, resource_api_version: V3}}",
				"load_assignment: {cluster_name: model_servers}")},
		{name: "the answer takes too long", flag: "upstream_request_timeout", status: 504, lasting: true, boot: replace("timeout: 0s ", "timeout: 0.2s "), spoil: func(net.Conn) { time.Sleep(time.Second) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			var m *between
			b := newBed(t, shape{engines: 1, ranks: 1, bootstrap: c.boot, engine: slow(10 * time.Millisecond),
				addressOf: func(_ int, e *enginesim.Engine) (address string) {
					m, address = newBetween(t, e)
					return address
				}})
			if c.spoil != nil {
				m.spoil.Store(&c.spoil)
			}
			var held chan *reply
			if c.busy {
				held = b.hold(1, 100)
			}
			r := b.post("/v1/completions", completionBody(c.name, 1))
			if r.status != c.status || r.target != "e0/0" {
				t.Errorf("status %d, target %q: %.200s", r.status, r.target, r.body)
			}
			b.until("the counters say so", func() bool {
				return b.metric("kvlane_envoy_flags_total", `worker="e0"`, fmt.Sprintf("flag=%q", c.flag)) >= 1 &&
					b.metric("kvlane_responses_total", `worker="e0"`, `class="5xx"`) >= 1
			})
			if held != nil {
				if r := <-held; r.status != http.StatusOK {
					t.Errorf("the request beside: status %d", r.status)
				}
			}
			m.spoil.Store(nil)
			if c.lasting {
				b.quiet()
				return
			}
			b.sound()
		})
	}
}

// Kvlane gets no message for the pieces of an answer, so they cost nothing.
func TestAPieceOfAnAnswerIsNoMessage(t *testing.T) {
	b := newBed(t, shape{})
	const requests = 20
	stream := func(tokens int) (messages float64) {
		before, used := b.metric("kvlane_extproc_messages_total"), processorTime(t, b.kvlane.Process.Pid)
		began := time.Now()
		for range requests {
			r := b.post("/v1/completions", fmt.Appendf(nil, `{"model":"demo","stream":true,"max_tokens":%d,"ignore_eos":true,"prompt":"x"}`, tokens))
			if n := strings.Count(string(r.body), "data: {"); r.status != http.StatusOK || n < tokens {
				t.Fatalf("status %d, %d pieces of %d", r.status, n, tokens)
			}
		}
		took := time.Since(began)
		b.until("all streams have ended", func() bool { return b.metric("kvlane_extproc_streams") == 0 })
		messages = b.metric("kvlane_extproc_messages_total") - before
		t.Logf("%d answers of %d pieces: %.1f messages an answer; Kvlane used %s of a processor, health checks and this test's questions included, in %s",
			requests, tokens, messages/requests, processorTime(t, b.kvlane.Process.Pid)-used, took.Round(time.Millisecond))
		return messages
	}
	if few, many := stream(1), stream(1000); few != many || few == 0 {
		t.Errorf("%v messages for answers of one piece, %v for answers of 1,000", few, many)
	}
}

// processorTime is the CPU time of a process, to a hundredth of a second.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Skip(err)
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	var user, system int64
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond
}

package extproc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"text/template"
	"time"

	"google.golang.org/grpc"
)

// shape is a processing mode as a gateway may configure it.
type shape struct {
	name                string
	request, response   string // body modes
	reqTrailer, respEnd string // trailer modes
	eager               bool
	unlogged            bool // without access log, whose stream keeps a connection open
}

var shapes = []shape{
	{name: "standalone", request: "BUFFERED", response: "NONE", reqTrailer: "SEND", respEnd: "SEND"},
	{name: "none", request: "NONE", response: "NONE", reqTrailer: "SKIP", respEnd: "SEND"},
	{name: "partial", request: "BUFFERED_PARTIAL", response: "STREAMED", reqTrailer: "SKIP", respEnd: "SKIP"},
	{name: "streamed", request: "STREAMED", response: "STREAMED", reqTrailer: "SEND", respEnd: "SEND"},
	{name: "held", request: "STREAMED", response: "NONE", reqTrailer: "SKIP", respEnd: "SEND", eager: true},
	{name: "duplex", request: "FULL_DUPLEX_STREAMED", response: "FULL_DUPLEX_STREAMED", reqTrailer: "SEND", respEnd: "SEND"},
	{name: "buffered both", request: "BUFFERED", response: "BUFFERED", reqTrailer: "SEND", respEnd: "SEND"},
}

var bootstrap = template.Must(template.New("bootstrap").Parse(`
node: {id: test, cluster: test}
static_resources:
  listeners:
  - name: ingress
    address: {pipe: {path: {{.Dir}}/in}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          generate_request_id: true
          stream_idle_timeout: 0s
          {{- if not .Shape.Unlogged}}
          access_log:
          - name: envoy.access_loggers.http_grpc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig
              common_config: {log_name: kv, transport_api_version: V3, grpc_service: {envoy_grpc: {cluster_name: epp}}, buffer_flush_interval: 0.02s}
          {{- end}}
          http_filters:
          - name: first-token
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: epp}}
              observability_mode: true
              failure_mode_allow: true
              processing_mode: {request_header_mode: SKIP, request_body_mode: NONE, request_trailer_mode: SKIP,
                response_header_mode: SKIP, response_body_mode: STREAMED, response_trailer_mode: SKIP}
              response_attributes: [request.id]
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: epp}}
              failure_mode_allow: false
              message_timeout: 60s
              allow_mode_override: true
              {{- if .Shape.Eager}}
              send_body_without_waiting_for_header_response: true
              {{- end}}
              processing_mode: {request_header_mode: SEND, request_body_mode: {{.Shape.Request}}, request_trailer_mode: {{.Shape.ReqTrailer}},
                response_header_mode: SEND, response_body_mode: {{.Shape.Response}}, response_trailer_mode: {{.Shape.RespEnd}}}
              request_attributes: [request.id]
              response_attributes: [upstream.address]
              metadata_options: {receiving_namespaces: {untyped: [envoy.lb]}, forwarding_namespaces: {untyped: [envoy.lb]}}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: /}
                request_body_buffer_limit: 16777216
                route: {cluster: workers, timeout: 0s}
  clusters:
  - name: epp
    type: STATIC
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment: {cluster_name: epp, endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: {{.Dir}}/epp}}}}]}]}
  - name: workers
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: workers
      endpoints:
      - lb_endpoints:
        {{- range .Workers}}
        - endpoint: {address: {socket_address: {address: {{.Host}}, port_value: {{.Port}}}}}
        {{- end}}
    load_balancing_policy:
      policies:
      - typed_extension_config:
          name: envoy.load_balancing_policies.override_host
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
            override_host_sources: [{metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}}]
            selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}
            fallback_policy: {policies: [{typed_extension_config: {name: envoy.load_balancing_policies.round_robin,
              typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin}}}]}
`))

// worker is a scripted model server.
func worker(name string, hanging *atomic.Int64) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/hang", func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		hanging.Add(1)
		<-r.Context().Done()
		hanging.Add(-1)
	})
	mux.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		n, err := io.Copy(sum, r.Body)
		if err != nil {
			return
		}
		w.Header().Set("X-Worker", name)
		w.Header().Set("X-Steer", r.Header.Get("X-Gateway-Destination-Endpoint"))
		w.Header().Set("X-Length", r.Header.Get("Content-Length"))
		fmt.Fprintf(w, "%d %s", n, hex.EncodeToString(sum.Sum(nil)))
	})
	mux.HandleFunc("/sse", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := 0; ; i++ {
			if _, err := fmt.Fprintf(w, "data: %d\n\n", i); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			if r.URL.Query().Get("n") == fmt.Sprint(i) {
				return
			}
			select {
			case <-r.Context().Done():
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	mux.HandleFunc("/none", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("/early", func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Content-Length", "9") // complete immediately, whatever happens to the request
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, "too early")
		w.(http.Flusher).Flush()
		if r.URL.Query().Has("unread") {
			select {
			case <-r.Context().Done():
			case <-time.After(time.Second):
			}
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
	})
	return mux
}

// envoyBed is a real Envoy between a client, our server and two workers.
type envoyBed struct {
	h       *recorder
	srv     *Server
	workers map[string]string // name to ip:port
	hanging atomic.Int64      // requests for /hang
	// accepted counts Envoy's connections to the server.
	accepted atomic.Int64
	h1, h2   *http.Client
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
}

type countingListener struct {
	net.Listener
	n *atomic.Int64
}

func (l countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

func startEnvoy(t *testing.T, sh shape, o Options) *envoyBed {
	t.Helper()
	binary := os.Getenv("ENVOY")
	if binary == "" {
		t.Skip("ENVOY is not set: no real Envoy to test with")
	}
	dir, err := os.MkdirTemp("", "kvx") // short: the length of socket names is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	e := &envoyBed{workers: map[string]string{}}
	e.h = &recorder{decide: func(_ context.Context, r *Request) Decision {
		want, _ := r.Header("x-want")
		return Decision{Endpoint: e.workers[want], Set: []Header{{"x-data-parallel-rank", "1"}}}
	}}
	type address struct{ Host, Port string }
	var addrs []address
	for _, name := range []string{"a", "b"} {
		ts := httptest.NewServer(worker(name, &e.hanging))
		t.Cleanup(ts.Close)
		host, port, err := net.SplitHostPort(ts.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		addrs = append(addrs, address{host, port})
		e.workers[name] = net.JoinHostPort(host, port)
	}
	e.srv = NewServer(o, e.h)
	g := grpc.NewServer(GRPCOptions(o)...)
	e.srv.Register(g)
	lis, err := Listen(t.Context(), "unix:"+filepath.Join(dir, "epp"), nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = g.Serve(countingListener{lis, &e.accepted}) }()
	t.Cleanup(g.Stop)

	var conf bytes.Buffer
	if err := bootstrap.Execute(&conf, map[string]any{"Dir": dir, "Workers": addrs, "Shape": map[string]any{
		"Request": sh.request, "Response": sh.response, "ReqTrailer": sh.reqTrailer, "RespEnd": sh.respEnd, "Eager": sh.eager, "Unlogged": sh.unlogged}}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "envoy.yaml")
	if err := os.WriteFile(path, conf.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(binary, "-c", path, "--concurrency", "1", "--use-dynamic-base-id", "--disable-hot-restart", "-l", "warn")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("envoy:\n%s", log.String())
		}
	})
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(dir, "in"))
	}
	e.dial = dial
	waitFor(t, func() bool {
		c, err := dial(t.Context(), "", "")
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	client := func(h2 bool) *http.Client {
		tr := &http.Transport{DialContext: dial, Protocols: &http.Protocols{}}
		tr.Protocols.SetHTTP1(!h2)
		tr.Protocols.SetUnencryptedHTTP2(h2)
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	e.h1, e.h2 = client(false), client(true)
	return e
}

func payload(n int) []byte {
	b := make([]byte, n)
	x := uint32(n)*2654435761 + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

func digest(b []byte) string {
	s := sha256.Sum256(b)
	return fmt.Sprintf("%d %s", len(b), hex.EncodeToString(s[:]))
}

// post sends a body to a worker by name and checks that all of it arrived there.
func (e *envoyBed) post(t *testing.T, c *http.Client, want string, body []byte, mod func(*http.Request)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://llm/echo", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Want", want)
	req.Header.Set("X-Gateway-Destination-Endpoint", "6.6.6.6:6") // a client that tries to choose the worker
	if mod != nil {
		mod(req)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || string(got) != digest(body) {
		t.Fatalf("got status %d and a request %q at the worker, want %q", resp.StatusCode, got, digest(body))
	}
	if w := resp.Header.Get("X-Worker"); w != want {
		t.Fatalf("got worker %q, want %q", w, want)
	}
	if s := resp.Header.Get("X-Steer"); s != e.workers[want] {
		t.Fatalf("got pick %q at the worker, want %q", s, e.workers[want])
	}
}

func TestRealEnvoy(t *testing.T) {
	for _, sh := range shapes {
		t.Run(sh.name, func(t *testing.T) {
			e := startEnvoy(t, sh, Options{})
			t.Run("bodies", func(t *testing.T) {
				for i, n := range []int{1, 3000, 100_000, 1 << 20} {
					for _, c := range []*http.Client{e.h1, e.h2} {
						e.post(t, c, string("ab"[i%2]), payload(n), nil)
					}
				}
				for i := range 2 {
					e.post(t, e.h1, "b", payload(10<<20), func(r *http.Request) {
						if i == 1 {
							r.ContentLength = -1 // chunked
						}
					})
				}
			})
			t.Run("no body", func(t *testing.T) {
				e.post(t, e.h1, "b", nil, func(r *http.Request) { r.Method = http.MethodGet })
			})
			t.Run("client trailers", func(t *testing.T) {
				// With a content-length, so that an eager STREAMED body is known to be complete.
				e.post(t, e.h2, "a", payload(50_000), func(r *http.Request) { r.Trailer = http.Header{"X-Sum": {"1"}} })
			})
			t.Run("ticket", func(t *testing.T) { e.checkTicket(t, sh) })
			if sh.response != "BUFFERED" {
				t.Run("client abort", func(t *testing.T) { e.checkAbort(t, sh) })
			}
			t.Run("client leaves mid-body", func(t *testing.T) { e.checkLeave(t) })
			t.Run("early answer", func(t *testing.T) { e.checkEarly(t) })
			waitFor(t, func() bool { return e.srv.streamsOpen() == 0 })
			for i := range e.h.count() {
				e.h.ticket(i).mustEnd(t)
			}
		})
	}
}

// checkTicket plays an SSE response to its end.
func (e *envoyBed) checkTicket(t *testing.T, sh shape) {
	before := e.h.count()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://llm/sse?n=9", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Want", "a")
	resp, err := e.h1.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || bytes.Count(got, []byte("data: ")) != 10 || resp.Header.Get("X-Kvlane-Target") != "w" {
		t.Fatalf("%v, answer %q, headers %v", err, got, resp.Header)
	}
	tk := e.h.ticket(before)
	tk.mustEnd(t)
	if tk.status != 200 || tk.served != e.workers["a"] {
		t.Errorf("got status %d, served %q, want %q", tk.status, tk.served, e.workers["a"])
	}
	if sh.response != "NONE" && !bytes.Equal(tk.body, got) {
		t.Errorf("got %q at the ticket, want the whole response", tk.body)
	}
	waitFor(t, func() bool { return len(tk.gotOutcomes()) > 0 })
	o := tk.gotOutcomes()[0]
	if o.Status != 200 || o.Details != "via_upstream" || o.Upstream != e.workers["a"] || o.BytesSent != uint64(len(got)) || o.BytesReceived != 2 {
		t.Errorf("outcome %+v", o)
	}
	if tk.tokens != 1 && o.FirstToken.IsZero() {
		t.Error("got no first token, want it in FirstToken or Outcome")
	}
}

// checkAbort cancels in the middle of a response.
func (e *envoyBed) checkAbort(t *testing.T, sh shape) {
	before := e.h.count()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://llm/sse", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := e.h1.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	_ = resp.Body.Close()
	tk := e.h.ticket(before)
	tk.mustEnd(t)
	if sh.response != "NONE" && tk.bodyDone {
		t.Error("got a complete response after an abort, want an error")
	}
	waitFor(t, func() bool { return len(tk.gotOutcomes()) > 0 })
	if o := tk.gotOutcomes()[0]; len(o.Flags) == 0 {
		t.Errorf("got outcome %+v of an abort", o)
	}
}

// checkLeave sends half a body and closes the connection.
func (e *envoyBed) checkLeave(t *testing.T) {
	conn, err := e.dial(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	seen := e.srv.streams()
	if _, err := fmt.Fprintf(conn, "POST /echo HTTP/1.1\r\nHost: llm\r\nX-Want: a\r\nContent-Length: 100000\r\n\r\n%s", payload(50_000)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return e.srv.streams() > seen })
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return e.srv.streamsOpen() == 0 })
}

// streamsOpen returns the number of open ext_proc streams.
func (s *Server) streamsOpen() int {
	n, _ := s.counts()
	return n
}

// streams returns the number of ext_proc streams opened so far.
func (s *Server) streams() int {
	_, n := s.counts()
	return n
}

// Envoy loses no request while its idle connections are closed: of requests at random times, many come when one is just closed.
func TestRealEnvoyIdleConnections(t *testing.T) {
	idleAfter(t, 20*time.Millisecond)
	for _, sh := range shapes {
		t.Run(sh.name, func(t *testing.T) {
			sh.unlogged = true
			e := startEnvoy(t, sh, Options{})
			for range 60 {
				time.Sleep(time.Duration(15+rand.IntN(20)) * time.Millisecond)
				e.post(t, e.h1, "a", payload(3000), nil)
			}
			if n := e.accepted.Load(); n < 8 {
				t.Errorf("got %d connections of Envoy, want many", n)
			}
		})
	}
}

// A response body that we do not need is not sent to us if Envoy allows skipping it.
func TestRealEnvoySkipsResponseBody(t *testing.T) {
	e := startEnvoy(t, shape{request: "BUFFERED", response: "STREAMED", reqTrailer: "SKIP", respEnd: "SKIP"}, Options{SkipResponseBody: true})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://llm/sse?n=9", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := e.h1.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || bytes.Count(got, []byte("data: ")) != 10 {
		t.Fatalf("%v, answer %q", err, got)
	}
	tk := e.h.ticket(0)
	tk.mustEnd(t)
	if len(tk.body) != 0 || tk.status != http.StatusOK {
		t.Errorf("got status %d and %d response bytes at the ticket, want none", tk.status, len(tk.body))
	}
}

// A changed response body, longer than the original, reaches the client completely, in every
// mode, by HTTP/1.1 and HTTP/2. Where Envoy ignores mode_override it stays unchanged.
func TestRealEnvoyEditsResponseBody(t *testing.T) {
	for _, sh := range shapes {
		t.Run(sh.name, func(t *testing.T) {
			e := startEnvoy(t, sh, Options{SkipResponseBody: sh.response == "NONE"})
			e.h.edits = true
			for path, whole := range map[string]string{"/sse?n=9": "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\ndata: 5\n\ndata: 6\n\ndata: 7\n\ndata: 8\n\ndata: 9\n\n",
				"/echo": digest(payload(3000)), "/early": "too early", "/none": ""} {
				want := string(twice([]byte(whole)))
				if sh.eager {
					want = whole
				}
				for _, c := range []*http.Client{e.h1, e.h2} {
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://llm"+path, bytes.NewReader(payload(3000)))
					if err != nil {
						t.Fatal(err)
					}
					resp, err := c.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					got, err := io.ReadAll(resp.Body)
					_ = resp.Body.Close()
					if err != nil || string(got) != want {
						t.Errorf("%s: %v: %q", path, err, got)
					}
				}
			}
			for i := range e.h.count() {
				e.h.ticket(i).mustEnd(t)
			}
		})
	}
}

// A request that is given up before its worker responds gets our answer, and the worker's
// request is reset; one whose response has begun continues.
func TestRealEnvoyAborts(t *testing.T) {
	for _, sh := range shapes {
		t.Run(sh.name, func(t *testing.T) {
			e := startEnvoy(t, sh, Options{SkipResponseBody: sh.response == "NONE"})
			abort := make(chan *Reject, 1)
			e.h.decide = func(context.Context, *Request) Decision {
				return Decision{Endpoint: e.workers["a"], Abort: abort}
			}
			post := func(c *http.Client, path string) *http.Response {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://llm"+path, bytes.NewReader(payload(3000)))
				if err != nil {
					t.Error(err)
					return nil
				}
				resp, err := c.Do(req)
				if err != nil {
					t.Error(err)
					return nil
				}
				return resp
			}
			for _, c := range []*http.Client{e.h1, e.h2} {
				done := make(chan *http.Response)
				go func() { done <- post(c, "/hang") }() //nolint:bodyclose // closed below
				waitFor(t, func() bool { return e.hanging.Load() == 1 })
				abort <- &Reject{Status: 503, Body: []byte(`{"error":{"code":"gone"}}`), Details: "kvlane_test"}
				resp := <-done
				if resp == nil {
					return
				}
				got, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusServiceUnavailable || string(got) != `{"error":{"code":"gone"}}` {
					t.Errorf("%v: status %d: %s", err, resp.StatusCode, got)
				}
				waitFor(t, func() bool { return e.hanging.Load() == 0 })

				resp = post(c, "/sse?n=20")
				if resp == nil {
					return
				}
				abort <- &Reject{Status: 503}
				got, err = io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusOK || !bytes.HasSuffix(got, []byte("data: 20\n\n")) {
					t.Errorf("%v: status %d: %q", err, resp.StatusCode, got)
				}
				select { // a stream that ended before the abort did not receive it
				case <-abort:
				default:
				}
			}
			for i := range e.h.count() {
				e.h.ticket(i).mustEnd(t)
			}
		})
	}
}

// checkEarly gets a response while the request is still being sent, from a worker that reads the
// rest and from one that does not.
func (e *envoyBed) checkEarly(t *testing.T) {
	for _, path := range []string{"/early", "/early?unread"} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://llm"+path, bytes.NewReader(payload(10<<20)))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := e.h2.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusTeapot || string(got) != "too early" {
			t.Fatalf("%s: %v: %d %q", path, err, resp.StatusCode, got)
		}
	}
}

// Rejections and the body limit reach the client unchanged, in every mode.
func TestRealEnvoyRejects(t *testing.T) {
	for _, sh := range shapes {
		t.Run(sh.name, func(t *testing.T) {
			e := startEnvoy(t, sh, Options{BodyLimit: 100_000})
			e.h.decide = func(_ context.Context, r *Request) Decision {
				return Decision{Reject: &Reject{Status: 429, Body: []byte(`{"error":{"code":"shed"}}`), Headers: []Header{{"retry-after", "3"}}, Details: "kvlane_shed"}}
			}
			send := func(n int, told bool) (int, string, http.Header) {
				t.Helper()
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://llm/echo", bytes.NewReader(payload(n)))
				if err != nil {
					t.Fatal(err)
				}
				if !told {
					req.ContentLength = -1
				}
				resp, err := e.h2.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				b, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Fatal(err)
				}
				return resp.StatusCode, string(b), resp.Header
			}
			code, body, hs := send(10, true)
			if code != 429 || body != `{"error":{"code":"shed"}}` || hs.Get("Retry-After") != "3" || hs.Get("Content-Type") != "application/json" {
				t.Fatalf("%d %q %v", code, body, hs)
			}
			holds := sh.request == "BUFFERED" || sh.eager || sh.request == "FULL_DUPLEX_STREAMED"
			for _, told := range []bool{true, false} {
				for _, n := range []int{3 << 20, 9 << 20} { // this Envoy buffers more than the server takes, and continues without it
					code, body, _ := send(n, told)
					if holds && (code != 413 || !strings.Contains(body, "request_too_large")) {
						t.Errorf("%d bytes, length told %v: %d %.200q", n, told, code, body)
					}
				}
			}
			waitFor(t, func() bool { return e.srv.streamsOpen() == 0 })
		})
	}
}

// Running responses survive a drain in the standalone shape.
func TestRealEnvoyDrain(t *testing.T) {
	e := startEnvoy(t, shapes[0], Options{DrainQuiet: time.Millisecond})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://llm/sse?n=40", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := e.h1.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	e.srv.Drain(t.Context())
	if n := e.srv.streamsOpen(); n != 0 {
		t.Errorf("got %d open streams after the drain, want 0", n)
	}
	got, err := io.ReadAll(resp.Body)
	if err != nil || bytes.Count(got, []byte("data: ")) != 41 {
		t.Fatalf("%v, %d events", err, bytes.Count(got, []byte("data: ")))
	}
}

// An edited body reaches the worker as edited, in every mode that allows edits, with and without
// content-length.
func TestRealEnvoyEdits(t *testing.T) {
	for _, sh := range shapes {
		if sh.request == "NONE" || sh.request == "STREAMED" && !sh.eager {
			continue
		}
		t.Run(sh.name, func(t *testing.T) {
			e := startEnvoy(t, sh, Options{})
			body := payload(60_000)
			for name, d := range map[string]Decision{
				"longer":  {Body: payload(60_010)},
				"shorter": {Body: payload(20_000)},
				"new":     {Body: []byte("brand new")},
			} {
				want := d.Body
				e.h.mu.Lock()
				e.h.decide = func(context.Context, *Request) Decision { return d }
				e.h.mu.Unlock()
				for _, c := range []*http.Client{e.h1, e.h2} {
					for _, told := range []bool{true, false} {
						req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://llm/echo", bytes.NewReader(body))
						if err != nil {
							t.Fatal(err)
						}
						if !told {
							req.ContentLength = -1
						}
						resp, err := c.Do(req)
						if err != nil {
							t.Fatal(err)
						}
						got, err := io.ReadAll(resp.Body)
						_ = resp.Body.Close()
						if err != nil || string(got) != digest(want) {
							t.Errorf("%s, length told %v: %v, status %d, worker saw %q, want %q", name, told, err, resp.StatusCode, got, digest(want))
						}
					}
				}
			}
		})
	}
}

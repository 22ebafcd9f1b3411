package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpchealth "google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/decide"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
)

func TestWhoMayUseTheAdminPort(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ok := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	for name, c := range map[string]struct {
		file, from, header string
		want               int
	}{
		"the same machine":          {"", "127.0.0.1:1", "", 200},
		"the same machine, IPv6":    {"", "[::1]:1", "", 200},
		"Istio's sidecar":           {"", "127.0.0.6:1", "", 403},
		"another machine":           {"", "10.0.0.1:1", "", 403},
		"no address":                {"", "", "", 403},
		"the token":                 {file, "10.0.0.1:1", "Bearer secret", 200},
		"another token":             {file, "10.0.0.1:1", "Bearer secre", 401},
		"no token":                  {file, "127.0.0.1:1", "", 401},
		"another scheme":            {file, "127.0.0.1:1", "Basic secret", 401},
		"no file":                   {file + "x", "127.0.0.1:1", "Bearer ", 401},
		"an empty file is no token": {empty, "127.0.0.1:1", "Bearer ", 401},
	} {
		r := httptest.NewRequest(http.MethodGet, "/debug/pprof/", nil)
		r.RemoteAddr = c.from
		if c.header != "" {
			r.Header.Set("Authorization", c.header)
		}
		w := httptest.NewRecorder()
		guarded(c.file, ok).ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("%s: got status %d, want %d", name, w.Code, c.want)
		}
	}
}

// newDecider returns a decider with a configuration file's text, which is closed when the test ends.
func newDecider(t *testing.T, text []byte) (*config.Config, *decide.Decider, *observe.Metrics) {
	t.Helper()
	c, err := config.Parse("k.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	metrics := observe.New("test")
	decider, err := decide.New(decide.Options{Config: c, Metrics: metrics, Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(decider.Close)
	return c, decider, metrics
}

// secretFile holds the token "secret".
func secretFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// With a token file, what is below /debug/ needs the token; the page, the probes and the metrics do
// not.
func TestWhatMayBeReadWithoutTheToken(t *testing.T) {
	t.Parallel()
	file := secretFile(t)
	c, decider, metrics := newDecider(t, nil)
	registry := workers.New(workers.Options{Log: zerolog.Nop()})
	defer registry.Close()
	s := &service{decider: decider, registry: registry}
	s.config.Store(c)
	with, without := s.adminMux(file, metrics), s.adminMux("", metrics)
	for path, open := range map[string]bool{
		"/": true, "/page.js": true, "/metrics": true, "/healthz": true, "/debug/status": false, "/debug/stream?follow=false": false,
		"/debug/decisions": false, "/debug/workers": false, "/debug/index": false, "/debug/config": false,
	} {
		get := func(h http.Handler, header string) int {
			r := httptest.NewRequest(http.MethodGet, path, nil)
			r.RemoteAddr = "10.0.0.1:1"
			r.Header.Set("Authorization", header)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			return w.Code
		}
		want := http.StatusUnauthorized
		if open {
			want = http.StatusOK
		}
		if got := get(with, ""); got != want {
			t.Errorf("%s without the token: got status %d, want %d", path, got, want)
		}
		if got := get(with, "Bearer secret"); got != http.StatusOK {
			t.Errorf("%s with the token: got status %d, want 200", path, got)
		}
		if got := get(without, ""); got != http.StatusOK {
			t.Errorf("%s without admin.token_file: got status %d, want 200", path, got)
		}
	}
}

// Profiles and changes need the token; without a token file they are served to the same machine only.
func TestWhatChangesOrProfilesIsGuarded(t *testing.T) {
	t.Parallel()
	file := secretFile(t)
	_, decider, metrics := newDecider(t, nil)
	for _, request := range []string{"GET /debug/pprof/", "GET /debug/pprof/heap", "POST /debug/record?n=1"} {
		for _, test := range []struct {
			tokenFile, from, header string
			want                    int
		}{
			{"", "10.0.0.1:1", "", 403},
			{"", "10.0.0.1:1", "Bearer secret", 403},
			{"", "127.0.0.1:1", "", 200},
			{file, "127.0.0.1:1", "", 401},
			{file, "10.0.0.1:1", "Bearer wrong", 401},
			{file, "10.0.0.1:1", "Bearer secret", 200},
		} {
			method, path, _ := strings.Cut(request, " ")
			r := httptest.NewRequest(method, path, nil)
			r.RemoteAddr = test.from
			if test.header != "" {
				r.Header.Set("Authorization", test.header)
			}
			w := httptest.NewRecorder()
			(&service{decider: decider}).adminMux(test.tokenFile, metrics).ServeHTTP(w, r)
			if w.Code != test.want {
				t.Errorf("%s from %s with %q, token file %q: got status %d, want %d", request, test.from, test.header, test.tokenFile, w.Code, test.want)
			}
		}
	}
}

// A proxy on the same machine passes on requests of others; with the token they are served.
func TestForwardedRequestsNeedTheToken(t *testing.T) {
	t.Parallel()
	file := secretFile(t)
	ok := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	for header, want := range map[string]int{"forwarded": 403, "x-forwarded-for": 403, "X-Forwarded-Proto": 403, "X-Forward": 200, "Accept": 200} {
		for file, want := range map[string]int{"": want, file: 200} {
			r := httptest.NewRequest(http.MethodPost, "/debug/record", nil)
			r.RemoteAddr = "127.0.0.1:1"
			r.Header.Set(header, "x")
			r.Header.Set("Authorization", "Bearer secret")
			w := httptest.NewRecorder()
			guarded(file, ok).ServeHTTP(w, r)
			if w.Code != want {
				t.Errorf("header %s, token file %q: got status %d, want %d", header, file, w.Code, want)
			}
		}
	}
}

// One profile is made at a time, and none takes longer than its bound.
func TestProfilesAreBounded(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(profiles())
	defer s.Close()
	get := func(path string) int {
		t.Helper()
		resp, err := s.Client().Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	for path, want := range map[string]int{"/debug/pprof/": 200, "/debug/pprof/goroutine": 200, "/debug/pprof/trace?seconds=61": 400, "/debug/pprof/heap?seconds=1e9": 400} {
		if got := get(path); got != want {
			t.Errorf("%s: got status %d, want %d", path, got, want)
		}
	}
	first := make(chan int)
	go func() {
		got := http.StatusTooManyRequests // while the other one is made
		for got == http.StatusTooManyRequests {
			got = get("/debug/pprof/trace?seconds=3")
		}
		first <- got
	}()
	second := 0
	for second != http.StatusTooManyRequests {
		select {
		case got := <-first:
			t.Fatalf("the first ended with %d before another was refused", got)
		default:
			second = get("/debug/pprof/goroutine")
		}
	}
	if got := <-first; got != http.StatusOK {
		t.Errorf("the first: got status %d, want 200", got)
	}
}

// A web site that a user of this machine visits can neither read the admin port nor change anything there.
func TestOtherWebSitesAreRefused(t *testing.T) {
	t.Parallel()
	srv := httptest.NewUnstartedServer(nil)
	srv.Config = newAdminServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	srv.Start()
	defer srv.Close()
	for _, c := range []struct {
		method, host, origin string
		want                 int
	}{
		{"GET", "", "", 200}, {"GET", "localhost:9090", "", 200}, {"GET", "[::1]:9090", "", 200}, {"GET", "127.0.0.1", "", 200},
		{"GET", "evil.example", "", 403}, {"GET", "evil.example:9090", "", 403},
		{"POST", "", "", 200}, {"POST", "localhost:9090", "http://localhost:9090", 200},
		{"POST", "localhost:9090", "http://evil.example", 403}, {"POST", "localhost:9090", "null", 403}, {"GET", "localhost", "http://evil.example", 200},
	} {
		req, err := http.NewRequest(c.method, srv.URL+"/debug/record", nil)
		if err != nil {
			t.Fatal(err)
		}
		if req.Host = c.host; c.origin != "" {
			req.Header.Set("Origin", c.origin)
		}
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%+v: got status %d", c, resp.StatusCode)
		}
	}
}

// A client that does not read its answer is cut off, but not one that waits for a profile.
func TestAdminAnswersHaveATimeLimit(t *testing.T) {
	t.Parallel()
	if got := newAdminServer(nil).WriteTimeout; got <= maxProfile*time.Second {
		t.Errorf("got a limit of %v, want one longer than a profile of %d s", got, maxProfile)
	}
}

// endless is a listener with a connection for everybody.
type endless struct{ net.Listener }

func (endless) Accept() (net.Conn, error) { c, _ := net.Pipe(); return c, nil }

// Clients that connect and send nothing hold a bounded number of connections, for a bounded time.
func TestIdleAdminConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	if s := newAdminServer(nil); s.IdleTimeout <= 0 || s.ReadHeaderTimeout <= 0 || s.ReadHeaderTimeout > s.IdleTimeout {
		t.Errorf("got limits of %v until a request's headers and %v between requests, want both", s.ReadHeaderTimeout, s.IdleTimeout)
	}
	l := limitAdmin(endless{}, zerolog.Nop())
	var open []net.Conn
	for range maxAdminConnections {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	more := make(chan net.Conn)
	go func() {
		c, _ := l.Accept()
		more <- c
	}()
	select {
	case <-more:
		t.Fatalf("got a connection above %d, want it to wait", maxAdminConnections)
	case <-time.After(50 * time.Millisecond):
	}
	_ = open[0].Close()
	_ = (<-more).Close()
	for _, c := range open[1:] {
		_ = c.Close()
	}
}

// A host that holds all the connections that it may keeps no other host from connecting, and gets further ones when it closes some.
func TestNoHostTakesAllConnections(t *testing.T) {
	t.Parallel()
	from := make(chan string, 2)
	var said bytes.Buffer
	l := limitAdmin(hosts{from: from}, zerolog.New(&said))
	connect := func(host string) net.Conn {
		t.Helper()
		from <- host
		c, err := l.Accept()
		if err != nil || !strings.HasPrefix(c.RemoteAddr().String(), host) {
			t.Fatalf("got %v, %v, want a connection of %s", c, err, host)
		}
		return c
	}
	var open []net.Conn
	for range maxOfHost {
		open = append(open, connect("10.0.0.1"))
	}
	from <- "10.0.0.1" // refused: the next one is another host's
	open = append(open, connect("10.0.0.2"))
	_ = open[0].Close()
	_ = open[0].Close() // counts once
	open[0] = connect("10.0.0.1")
	from <- "10.0.0.1"
	open = append(open, connect("10.0.0.3"))
	if text := said.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, `"host":"10.0.0.1","limit":64,`) {
		t.Errorf("got the log %q, want one line a minute about 10.0.0.1", text)
	}
	for _, c := range open {
		_ = c.Close()
	}
}

// The ports of a running Kvlane have this bound too.
func TestPortsHaveTheirBound(t *testing.T) {
	port, err := enginesim.FreePorts(3)
	if err != nil {
		t.Fatal(err)
	}
	health, requests, events := fmt.Sprint("127.0.0.1:", port), fmt.Sprint("127.0.0.1:", port+1), fmt.Sprint("127.0.0.1:", port+2)
	_, admin, _ := started(t, fmt.Sprintf("listen: {address: %q, events: %q, health: %q}\n", requests, events, health))
	for address, limit := range map[string]int{
		strings.TrimPrefix(admin, "http://"): maxOfHost, health: maxOfHost, requests: maxRequestsOf, events: maxRequestsOf,
	} {
		var all []net.Conn // the kernel accepts them in order
		for range limit + 1 {
			c, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			all = append(all, c)
		}
		_, _ = io.Copy(io.Discard, all[limit]) // until it is closed: immediately, or when nothing has come for long
		_ = all[0].SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if _, err := io.Copy(io.Discard, all[0]); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: got an end of the first connection (%v) before that of number %d, want the last one refused", address, err, limit+1)
		}
	}
}

// hosts has a connection of each host that it is told.
type hosts struct {
	net.Listener

	from chan string
}

func (h hosts) Accept() (net.Conn, error) {
	c, _ := net.Pipe()
	return hostOf{c, net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(<-h.from), 5000))}, nil
}

type hostOf struct {
	net.Conn

	remote net.Addr
}

func (c hostOf) RemoteAddr() net.Addr { return c.remote }

// The port for probes answers them, and holds nothing large for strangers.
func TestProbesAreShort(t *testing.T) {
	t.Parallel()
	g := newProbe()
	grpc_health_v1.RegisterHealthServer(g, grpchealth.NewServer())
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = g.Serve(lis) }()
	defer g.Stop()
	conn, err := grpc.NewClient("passthrough:///"+lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := grpc_health_v1.NewHealthClient(conn)
	if r, err := client.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil || r.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("got %v, %v, want an answer", r, err)
	}
	watch := func(ctx context.Context, name string) error {
		s, err := client.Watch(ctx, &grpc_health_v1.HealthCheckRequest{Service: name})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	if err := watch(t.Context(), strings.Repeat("n", 64<<10)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v for a name of 64 KB, want that it is refused", err)
	}
	for range 8 {
		if err := watch(t.Context(), "liveness"); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := watch(ctx, "liveness"); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got %v of another watch on the connection, want that it waits", err)
	}
}

// slowSeries is a collector whose scrapes wait.
type slowSeries struct {
	arrived chan struct{}
	release chan struct{}
}

func (slowSeries) Describe(chan<- *prometheus.Desc) {}

func (s slowSeries) Collect(chan<- prometheus.Metric) {
	s.arrived <- struct{}{}
	<-s.release
}

func TestConcurrentScrapesAreBounded(t *testing.T) {
	t.Parallel()
	_, decider, metrics := newDecider(t, nil)
	slow := slowSeries{make(chan struct{}, 2*maxScrapes), make(chan struct{})}
	metrics.Registry.MustRegister(slow)
	mux := (&service{decider: decider}).adminMux("", metrics)
	get := func(path string) int {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code
	}
	codes := make(chan int, maxScrapes)
	for range maxScrapes {
		go func() { codes <- get("/metrics") }()
	}
	for range maxScrapes {
		<-slow.arrived
	}
	more := make(chan int, 1)
	go func() { more <- get("/metrics") }()
	select {
	case got := <-more:
		if got != http.StatusServiceUnavailable {
			t.Errorf("one more scrape: got status %d, want 503", got)
		}
	case <-slow.arrived:
		t.Errorf("got %d concurrent scrapes, want at most %d", maxScrapes+1, maxScrapes)
	}
	if got := get("/healthz"); got != http.StatusOK {
		t.Errorf("/healthz: got status %d, want 200", got)
	}
	close(slow.release)
	for range maxScrapes {
		if got := <-codes; got != http.StatusOK {
			t.Errorf("a scrape: got status %d, want 200", got)
		}
	}
	if got := get("/metrics"); got != http.StatusOK {
		t.Errorf("after the others: got status %d, want 200", got)
	}
}

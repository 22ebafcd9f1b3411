package main

import (
	"crypto/subtle"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/kvlane/kvlane/internal/config"
)

const (
	needsToken = "needs the token of admin.token_file"
	stillLoads = "tokenizers are being loaded"

	// maxAdminConnections bounds the open connections of the admin port, where idle ones are closed, and of fleet.embedded.listen.
	maxAdminConnections = 512
	// maxOfHost bounds the connections of one host, so that it cannot keep the kubelet's probes from connecting. maxRequestsOf
	// bounds those to listen.address and listen.events, which take up to 288 KiB each: Envoy opens a few per thread.
	maxOfHost, maxRequestsOf = 64, 1024
	adminIdle                = 30 * time.Second
	// maxScrapes bounds the concurrent requests of /metrics: each holds all series in memory.
	maxScrapes = 8
	// maxProfile is the longest CPU profile or trace, in seconds. Only one runs at a time.
	maxProfile = 60
)

// newAdminServer returns the server of the admin port. A connection whose answer is
// not read is closed; the limit leaves time for profiles of maxProfile.
func newAdminServer(h http.Handler) *http.Server {
	return &http.Server{Handler: sameSite(h), ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: (maxProfile + 30) * time.Second, IdleTimeout: adminIdle, MaxHeaderBytes: 64 << 10}
}

// limitAdmin bounds the connections to ports that others than Envoy use.
func limitAdmin(l net.Listener, log zerolog.Logger) net.Listener {
	return netutil.LimitListener(limitHosts(l, maxOfHost, log), maxAdminConnections)
}

func limitHosts(l net.Listener, limit int, log zerolog.Logger) net.Listener {
	return &fairListener{Listener: l, limit: limit, log: log, open: map[string]int{}}
}

// fairListener closes connections of a host that has as many open ones as limit, and logs that at most once a minute.
type fairListener struct {
	net.Listener

	limit int
	log   zerolog.Logger
	said  time.Time // of the last warning; only Accept uses it

	mu   sync.Mutex
	open map[string]int // connections by host
}

// Accept implements net.Listener.
func (l *fairListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host, _, err := net.SplitHostPort(c.RemoteAddr().String())
		if err != nil {
			return c, nil //nolint:nilerr // an address without a host is no error: nothing is counted
		}
		l.mu.Lock()
		full := l.open[host] >= l.limit
		if !full {
			l.open[host]++
		}
		l.mu.Unlock()
		if !full {
			return &hostConn{Conn: c, closed: sync.OnceFunc(func() { l.release(host) })}, nil
		}
		_ = c.Close()
		if now := time.Now(); now.Sub(l.said) >= time.Minute {
			l.said = now
			l.log.Warn().Str("host", host).Int("limit", l.limit).Msg("a host has too many connections: further ones are closed")
		}
	}
}

func (l *fairListener) release(host string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[host]--; l.open[host] == 0 {
		delete(l.open, host)
	}
}

type hostConn struct {
	net.Conn

	closed func()
}

// Close implements net.Conn.
func (c *hostConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// newProbe returns the server of listen.health. Any client may use it, so messages and streams have tight bounds.
func newProbe() *grpc.Server {
	return grpc.NewServer(grpc.MaxRecvMsgSize(4<<10), grpc.MaxHeaderListSize(16<<10), grpc.MaxConcurrentStreams(8), grpc.ConnectionTimeout(10*time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: adminIdle}))
}

// profiles serves net/http/pprof.
func profiles() http.Handler {
	one := make(chan struct{}, 1)
	timed := func(h http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if n, err := strconv.ParseFloat(r.FormValue("seconds"), 64); err == nil && n > maxProfile {
				http.Error(w, "seconds: at most "+strconv.Itoa(maxProfile), http.StatusBadRequest)
				return
			}
			select {
			case one <- struct{}{}:
				defer func() { <-one }()
				h(w, r)
			default:
				http.Error(w, "another profile is being made", http.StatusTooManyRequests)
			}
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", timed(pprof.Index))
	mux.HandleFunc("GET /debug/pprof/profile", timed(pprof.Profile))
	mux.HandleFunc("GET /debug/pprof/trace", timed(pprof.Trace))
	return mux
}

// local reports whether a request probably comes from this machine itself. A proxy on this machine forwards requests of
// others: Istio's sidecar connects from 127.0.0.6, so not all of 127.0.0.0/8 is trusted, and most proxies add a header.
func local(r *http.Request) bool {
	for name := range r.Header {
		if name == "Forwarded" || strings.HasPrefix(name, "X-Forwarded-") {
			return false
		}
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	return err == nil && (host == "127.0.0.1" || host == "::1")
}

// guarded serves h to clients that have the token in a file; without a file, to clients on this machine.
func guarded(tokenFile string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, err := config.ReadFile(tokenFile)
		want := strings.TrimSpace(string(text))
		got, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		switch {
		case tokenFile == "" && !local(r):
			http.Error(w, "served to the same machine only, or with admin.token_file", http.StatusForbidden)
		case tokenFile != "" && (err != nil || want == "" || !ok || subtle.ConstantTimeCompare([]byte(got), []byte(want)) != 1):
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, needsToken, http.StatusUnauthorized)
		default:
			h.ServeHTTP(w, r)
		}
	})
}

// sameSite refuses requests that other web sites make a browser send: changes from another origin and, where the
// connection does not leave this machine, host names that a site may have bound to 127.0.0.1 (DNS rebinding).
func sameSite(h http.Handler) http.Handler {
	return http.NewCrossOriginProtection().Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		addr, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		if name := (&url.URL{Host: r.Host}).Hostname(); addr != nil && addr.IP.IsLoopback() && name != "" && name != "localhost" && net.ParseIP(name) == nil {
			http.Error(w, "ask for 127.0.0.1 or localhost, not for another name", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	}))
}

// readable serves pages without effects: to everyone, or with a token file, to clients that have the token.
func readable(tokenFile string, h http.Handler) http.Handler {
	if tokenFile == "" {
		return h
	}
	return guarded(tokenFile, h)
}

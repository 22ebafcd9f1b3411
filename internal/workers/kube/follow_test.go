package kube

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"maps"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// What a reflector of client-go does, each on its own: a follower of pods against
// a fake API server.

// seen is what a follower knows.
type seen struct {
	mu  sync.Mutex
	all map[string]Pod
}

func (k *seen) names() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(k.all)), " ")
}

// followPods follows the pods of the fake server until the test ends.
func followPods(t *testing.T, c *Client, change func(f *follower[Pod])) *seen {
	t.Helper()
	k := &seen{}
	f := &follower[Pod]{client: c, query: Query{Path: podsPath, Labels: "app=llm"}, log: zerolog.Nop(), changed: func(all map[string]Pod) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.all = maps.Clone(all)
	}}
	if change != nil {
		change(f)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { f.run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return k
}

func (k *seen) until(t *testing.T, want string) {
	t.Helper()
	waitFor(t, func() bool { return k.names() == want })
}

func TestABookmarkMovesTheVersionSoThatAForgottenHistoryIsNotMissed(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	k := followPods(t, c, nil)
	k.until(t, "a")
	waitFor(t, func() bool { return api.count(&api.watches) == 1 })
	api.bookmark(podsPath)
	// Known by what comes after it on the same watch.
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", ""))
	k.until(t, "a b")
	api.bookmark(podsPath)
	lists := api.count(&api.lists)
	api.set(func() { api.oldest = api.version }) // all but the bookmark's version is too old
	before := api.count(&api.watches)
	api.cutWatches()
	waitFor(t, func() bool { return api.count(&api.watches) > before })
	api.put(podsPath, "c", podText("u3", "10.0.0.3", "True", ""))
	k.until(t, "a b c")
	if n := api.count(&api.lists); n != lists {
		t.Errorf("%d lists, want %d: the bookmark was not used", n, lists)
	}
}

func TestAVersionThatTheServerDoesNotKnowIsListedAnew(t *testing.T) {
	for name, lose := range map[string]func(api *apiServer){
		"too old, in the stream": func(api *apiServer) { api.forget() },
		"too old, by status":     func(api *apiServer) { api.set(func() { api.byStatus = true }); api.forget() },
		// Without a new list the watch would wait until versions come that far again.
		"newer than the server's, in the stream": func(api *apiServer) { api.restore() },
		"newer than the server's, by status":     func(api *apiServer) { api.set(func() { api.byStatus = true }); api.restore() },
	} {
		t.Run(name, func(t *testing.T) {
			api, c := newAPIServer(t)
			for _, n := range []string{"a", "b", "c", "d"} {
				api.put(podsPath, n, podText("u"+n, "10.0.0.1", "True", ""))
			}
			k := followPods(t, c, nil)
			k.until(t, "a b c d")
			api.setDown(true)
			api.cutWatches()
			api.remove(podsPath, "b")
			api.put(podsPath, "e", podText("ue", "10.0.0.2", "True", ""))
			lose(api)
			api.setDown(false)
			k.until(t, "a c d e")
		})
	}
}

func TestAListWhoseFurtherPagesExpireIsBegunAgain(t *testing.T) {
	api, c := newAPIServer(t)
	for _, n := range []string{"a", "b", "c", "d", "e"} {
		api.put(podsPath, n, podText("u"+n, "10.0.0.1", "True", ""))
	}
	api.expiring = 2
	k := followPods(t, c, nil)
	k.until(t, "a b c d e")
	if n := api.count(&api.lists); n != 3 {
		t.Errorf("%d lists, want 3", n)
	}
}

func TestDeletionTakesAwayWhatWasThereAndAMissedOneToo(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", ""))
	k := followPods(t, c, nil)
	k.until(t, "a b")
	// Its labels were changed at the same time: the event carries the last state, which the selector does not match.
	api.put(podsPath, "a", strings.Replace(podText("u1", "10.0.0.1", "True", ""), `"llm"`, `"off"`, 1))
	k.until(t, "b")
	api.remove(podsPath, "a")
	// Deleted and made anew, with another UID, while nobody watched.
	api.setDown(true)
	api.cutWatches()
	api.remove(podsPath, "b")
	api.put(podsPath, "b", podText("u3", "10.0.0.3", "True", ""))
	api.setDown(false)
	waitFor(t, func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return len(k.all) == 1 && k.all["b"].Metadata.UID == "u3"
	})
}

func TestABusyServerIsLeftAloneForAsLongAsItSays(t *testing.T) {
	api, c := newAPIServer(t)
	api.busy = 2
	k := followPods(t, c, nil)
	waitFor(t, func() bool { return api.count(&api.watches) > 0 })
	k.until(t, "")
	api.mu.Lock()
	defer api.mu.Unlock()
	for i := range 2 {
		if gap := api.at[i+1].Sub(api.at[i]); gap < time.Second {
			t.Errorf("asked again after %s", gap)
		}
	}
}

func TestAWaitGrowsAndIsNotTheSameForAll(t *testing.T) {
	api, c := newAPIServer(t)
	api.setDown(true)
	followPods(t, c, nil)
	waitFor(t, func() bool { api.mu.Lock(); defer api.mu.Unlock(); return len(api.at) >= 5 })
	api.mu.Lock()
	defer api.mu.Unlock()
	for i, least := range []time.Duration{firstWait / 2, firstWait, 2 * firstWait, 4 * firstWait} {
		if gap := api.at[i+1].Sub(api.at[i]); gap < least {
			t.Errorf("attempt %d came after %s, not before %s was meant", i+1, gap, least)
		}
	}
}

func TestATokenThatIsReplacedIsTakenUp(t *testing.T) {
	api, _ := newAPIServer(t)
	// As a kubelet projects it: a link to a folder, replaced as a whole.
	dir := t.TempDir()
	project := func(folder, token string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, folder), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, folder, "token"), []byte(token), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(folder, filepath.Join(dir, "next")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	project("one", "one")
	if err := os.Symlink("..data/token", filepath.Join(dir, "token")); err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(Access{Server: api.URL, Insecure: true, TokenFile: filepath.Join(dir, "token")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	k := followPods(t, c, nil)
	k.until(t, "a")
	project("two", "two")
	api.set(func() { api.accepted = "two" }) // the old one has expired
	api.cutWatches()
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", ""))
	k.until(t, "a b")
}

// A token is read again in time, not only when it is refused.
func TestATokenIsReadAgainAfterAWhile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	c, err := NewClient(Access{TokenFile: file})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		written string
		age     bool
		want    string
	}{{"one", false, "one"}, {"two", false, "one"}, {"two", true, "two"}} {
		if err := os.WriteFile(file, []byte(step.written), 0o600); err != nil {
			t.Fatal(err)
		}
		if step.age {
			if left := time.Until(c.renewAt); left > tokenAge {
				t.Errorf("kept for %s", left)
			}
			c.renewAt = time.Now().Add(-time.Second)
		}
		if got, err := c.bearer(); err != nil || got != step.want {
			t.Errorf("%q %v, want %q", got, err, step.want)
		}
	}
}

// relay passes bytes on until it is frozen: then it holds both ends open and says
// nothing, as a firewall does that has forgotten a connection.
type relay struct {
	net.Listener
	to     string
	frozen atomic.Bool
	wg     sync.WaitGroup
	mu     sync.Mutex
	conns  []net.Conn
	count  int
}

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: l, to: to}
	r.wg.Go(r.serve)
	t.Cleanup(func() {
		_ = l.Close()
		r.mu.Lock()
		for _, c := range r.conns {
			_ = c.Close()
		}
		r.mu.Unlock()
		r.wg.Wait()
	})
	return r
}

func (r *relay) serve() {
	for {
		from, err := r.Accept()
		if err != nil {
			return
		}
		to, err := net.Dial("tcp", r.to)
		if err != nil {
			_ = from.Close()
			continue
		}
		r.mu.Lock()
		r.conns = append(r.conns, from, to)
		r.count++
		mine := r.count
		r.mu.Unlock()
		for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
			r.wg.Go(func() {
				buf := make([]byte, 4096)
				for {
					n, err := pair[0].Read(buf)
					if err != nil {
						_ = pair[1].Close()
						return
					}
					if r.frozen.Load() && mine == 1 {
						continue
					}
					if _, err := pair[1].Write(buf[:n]); err != nil {
						return
					}
				}
			})
		}
	}
}

// A watch over a connection that died without a word is noticed: over HTTP/2 by
// pings, and whatever the connection by its own end.
func TestAConnectionThatFallsSilentIsGivenUp(t *testing.T) {
	for name, set := range map[string]func(transport *http.Transport, f *follower[Pod]){
		"HTTP/2, by pings": func(transport *http.Transport, _ *follower[Pod]) {
			transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: 100 * time.Millisecond, PingTimeout: 200 * time.Millisecond}
		},
		"HTTP/1.1, by the watch's own end": func(transport *http.Transport, f *follower[Pod]) {
			transport.ForceAttemptHTTP2 = false
			f.watchFor, f.watchGrace = 300*time.Millisecond, 100*time.Millisecond
		},
	} {
		t.Run(name, func(t *testing.T) {
			api, _ := newAPIServer(t)
			way := newRelay(t, strings.TrimPrefix(api.URL, "https://"))
			c, err := NewClient(Access{Server: "https://" + way.Addr().String(), Insecure: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(c.Close)
			api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
			k := followPods(t, c, func(f *follower[Pod]) { set(c.http.Transport.(*http.Transport), f) })
			k.until(t, "a")
			waitFor(t, func() bool { return api.count(&api.watches) > 0 })
			way.frozen.Store(true)
			api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", ""))
			k.until(t, "a b")
		})
	}
}

func TestTheClientPingsAndWatchesEnd(t *testing.T) {
	c, err := NewClient(Access{})
	if err != nil {
		t.Fatal(err)
	}
	h2 := c.http.Transport.(*http.Transport).HTTP2
	if h2 == nil || h2.SendPingTimeout != 20*time.Second || h2.PingTimeout != 10*time.Second {
		t.Errorf("pings: %+v", h2)
	}
	if watchFor <= 0 || watchGrace <= 0 {
		t.Error("watches have no end")
	}
}

// authority is a CA that is replaced.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{key: key}
	a.cert = a.sign(t, &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, &key.PublicKey)
	return a
}

func (a *authority) sign(t *testing.T, c *x509.Certificate, public *ecdsa.PublicKey) *x509.Certificate {
	t.Helper()
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent := a.cert
	if parent == nil {
		parent = c
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, public, a.key)
	if err != nil {
		t.Fatal(err)
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// server is a certificate for an address.
func (a *authority) server(t *testing.T, ip string) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := a.sign(t, &x509.Certificate{IPAddresses: []net.IP{net.ParseIP(ip)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, &key.PublicKey)
	return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key}
}

func (a *authority) write(t *testing.T, file string) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestACAThatIsReplacedIsTakenUpAndOthersAreRefused(t *testing.T) {
	old, next := newAuthority(t, "old"), newAuthority(t, "next")
	var now atomic.Pointer[tls.Certificate]
	now.Store(old.server(t, "127.0.0.1"))
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return now.Load(), nil }})
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") })}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	file := filepath.Join(t.TempDir(), "ca.crt")
	old.write(t, file)
	c, err := NewClient(Access{Server: "https://" + l.Addr().String(), CAFile: file})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	get := func() error {
		c.Close() // a new handshake
		return c.Get(t.Context(), podsPath, nil)
	}
	if err := get(); err != nil {
		t.Fatal(err)
	}
	now.Store(next.server(t, "127.0.0.1"))
	var unknown x509.UnknownAuthorityError
	if err := get(); !errors.As(err, &unknown) {
		t.Errorf("another authority's certificate: %v", err)
	}
	next.write(t, file)
	if err := get(); err != nil {
		t.Errorf("after the bundle was replaced: %v", err)
	}
	now.Store(next.server(t, "127.0.0.2"))
	var name x509.HostnameError
	if err := get(); !errors.As(err, &name) {
		t.Errorf("another address's certificate: %v", err)
	}
	for what, access := range map[string]Access{"no file": {CAFile: file + ".none"}, "no certificate": {CA: []byte("x")}} {
		if _, err := NewClient(access); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

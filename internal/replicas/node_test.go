package replicas

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"
	"golang.org/x/net/netutil"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

// member is a replica of a test: a router under a lock, and its node.
type member struct {
	t      testing.TB
	mu     sync.Mutex
	router *routing.Router
	start  time.Time
	*Node
}

func (m *member) update(change func(r *routing.Router, now time.Duration)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(m.router, time.Since(m.start))
}

func startMember(t testing.TB, fleet *config.Fleet, delay interface{ Observe(seconds float64) }) *member {
	t.Helper()
	return startMemberWith(t, fleet, delay, newRouter(t, 4))
}

func startMemberWith(t testing.TB, fleet *config.Fleet, delay interface{ Observe(seconds float64) }, router *routing.Router) *member {
	t.Helper()
	m := &member{t: t, router: router, start: time.Now()}
	n, err := Start(t.Context(), Options{Config: fleet, Update: m.update, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel), Delay: delay})
	if err != nil {
		t.Fatal(err)
	}
	m.Node = n
	return m
}

func (m *member) pick(conversation string) routing.Plan {
	m.t.Helper()
	var plan routing.Plan
	var err error
	m.update(func(r *routing.Router, now time.Duration) {
		plan, err = r.Pick(now, &routing.Query{ID: conversation, Conversation: conversation, PromptTokens: 100}, nil, nil)
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return plan
}

func (m *member) live() (n int) {
	m.update(func(r *routing.Router, _ time.Duration) { n = r.Live() })
	return n
}

// eventually waits for a condition; the bound is generous because machines are busy.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	within(t, 30*time.Second, what, is)
}

func within(t testing.TB, limit time.Duration, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("got no %s within %v", what, limit)
		}
	}
}

func defaultFleet(mode string) config.Fleet {
	f := config.Default().Fleet
	f.Mode = mode
	return f
}

// freePorts returns addresses on loopback that are free now.
func freePorts(t testing.TB, n int) (addresses []string) {
	t.Helper()
	first, err := enginesim.FreePorts(n)
	if err != nil {
		t.Fatal(err)
	}
	for port := first; port < first+n; port++ {
		addresses = append(addresses, fmt.Sprint("127.0.0.1:", port))
	}
	return addresses
}

func cluster(t testing.TB, addresses []string, change func(*config.Fleet)) []*member {
	t.Helper()
	members := make([]*member, len(addresses))
	for i := range addresses {
		f := defaultFleet(config.FleetEmbedded)
		f.Replica, f.Embedded.Listen, f.Embedded.Routes = fmt.Sprint("r", i), addresses[i], addresses
		change(&f)
		members[i] = startMember(t, &f, nil)
	}
	return members
}

func TestEmbeddedClusterOfThree(t *testing.T) {
	defer goleak.VerifyNone(t)
	m := cluster(t, freePorts(t, 3), func(*config.Fleet) {})
	for _, n := range m {
		eventually(t, "replica that is ready with two others", func() bool { return n.Waiting() == "" && len(n.State().Peers) == 2 })
	}
	first := m[0].pick("c")
	eventually(t, "booking at all", func() bool { return m[1].live() == 1 && m[2].live() == 1 })
	if got := m[1].pick("c"); got.Decode != first.Decode {
		t.Errorf("the conversation at another replica: got target %d, want %d", got.Decode, first.Decode)
	}
	eventually(t, "two bookings", func() bool { return m[0].live() == 2 && m[2].live() == 2 })
	m[0].Close()
	eventually(t, "end of the bookings of the replica that left", func() bool { return m[1].live() == 1 && m[2].live() == 1 })
	if got := m[2].pick("c"); got.Decode != first.Decode {
		t.Errorf("the conversation after its replica left: got target %d, want %d", got.Decode, first.Decode)
	}
	m[1].Close()
	m[2].Close()
}

// A replica that comes and goes changes the routes of the others: their own connections to NATS stay.
func TestConnectionsStayWhenRoutesChange(t *testing.T) {
	a := freePorts(t, 2)
	first := cluster(t, a[:1], func(f *config.Fleet) { f.Embedded.Routes = a })[0]
	defer first.Close()
	for range 3 {
		second := cluster(t, a[1:], func(*config.Fleet) {})[0] // found by the first
		eventually(t, "another replica", func() bool { return len(first.State().Peers) == 1 && second.Waiting() == "" })
		second.Close()
		eventually(t, "no other replica", func() bool { return len(first.State().Peers) == 0 })
	}
	if got := first.conn.Stats(); got.Reconnects != 0 {
		t.Errorf("got %d new connections to the NATS server of the same process, want none", got.Reconnects)
	}
}

func TestAnotherSecretNeitherReadsNorWrites(t *testing.T) {
	defer goleak.VerifyNone(t)
	secrets := []string{secretFile(t, "one"), secretFile(t, "one"), secretFile(t, "two"), ""}
	n := 0
	m := cluster(t, freePorts(t, len(secrets)), func(f *config.Fleet) {
		f.Embedded.SecretFile = secrets[n]
		f.SyncTimeout = config.Duration(2 * time.Second)
		n++
	})
	eventually(t, "pair", func() bool { return len(m[0].State().Peers) == 1 && len(m[1].State().Peers) == 1 })
	m[0].pick("c")
	m[2].pick("d")
	m[3].pick("e")
	eventually(t, "booking at the other", func() bool { return m[1].live() == 1 })
	for _, x := range m { // bounded by sync_timeout
		eventually(t, "readiness", func() bool { return x.Waiting() == "" })
	}
	for i, x := range m {
		s := x.State()
		if want := []int{1, 1, 0, 0}[i]; len(s.Peers) != want || x.live() != 1 {
			t.Errorf("replica %d: got %d others and %d bookings, want %d and 1", i, len(s.Peers), x.live(), want)
		}
		others := len(secrets) - 1 - len(s.Peers)
		eventually(t, "warning of those with another secret", func() bool {
			text := warningOf(x, "replicas_apart")
			return strings.Contains(text, fmt.Sprintf("%d of 3 others", len(s.Peers))) && strings.Contains(text, oneSecret) && others > 0
		})
		if i > 1 && s.Stats.Received > 0 {
			t.Errorf("replica %d: got %d messages, want none", i, s.Stats.Received)
		}
	}
	for _, x := range m {
		x.Close()
	}
}

// A file that is read again for each connection, and has become too long or is gone, is told while the connections last.
func TestFilesThatCannotBeReadAreTold(t *testing.T) {
	defer goleak.VerifyNone(t)
	dir := t.TempDir()
	ca, caKey := newCA(t, filepath.Join(dir, "ca.pem"))
	files := config.FleetTLS{CertFile: filepath.Join(dir, "crt"), KeyFile: filepath.Join(dir, "key"), CAFile: filepath.Join(dir, "ca.pem")}
	issue(t, ca, caKey, files)
	embedded := cluster(t, freePorts(t, 1), func(f *config.Fleet) { f.Embedded.TLS = files })[0]
	defer embedded.Close()
	s := startNATS(t, server.RANDOM_PORT)
	defer s.Shutdown()
	f := defaultFleet(config.FleetExternal)
	password := secretFile(t, "p")
	f.External = config.FleetExtern{URL: s.ClientURL(), User: "u", PasswordFile: password}
	external := &member{t: t, router: newRouter(t, 4), start: time.Now()}
	external.Node = must(Start(t.Context(), Options{Config: &f, Update: external.update}))
	defer external.Close()
	for _, c := range []struct {
		m            *member
		file, advice string
	}{
		{embedded, files.CertFile, "the last good files are used"}, {embedded, files.CAFile, "the last good files are used"},
		{external, password, "the next connection to NATS will be refused"},
	} {
		text := must(os.ReadFile(c.file))
		write := func(text []byte) {
			if err := os.WriteFile(c.file, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for name, change := range map[string]func(){"too long": func() { write(append(slices.Clone(text), bytes.Repeat([]byte("\n"), 4<<20)...)) }, "gone": func() { _ = os.Remove(c.file) }} {
			if got := warningOf(c.m, "files_unread"); got != "" {
				t.Errorf("%s as it was: got %q, want no warning", c.file, got)
			}
			change()
			if got := warningOf(c.m, "files_unread"); !strings.Contains(got, c.file) || !strings.HasSuffix(got, c.advice) {
				t.Errorf("%s, %s: got %q, want a warning that ends in %q", c.file, name, got, c.advice)
			}
			write(text)
		}
	}
}

// warningOf returns the text of a replica's warning, "" if it has none for the reason.
func warningOf(m *member, reason string) string {
	for _, w := range m.Warnings() {
		if w.Reason == reason {
			return w.Text
		}
	}
	return ""
}

func TestOtherSettingsAreTold(t *testing.T) {
	defer goleak.VerifyNone(t)
	index := func(key string, size int) *config.Index { return &config.Index{Key: key, BlockSize: size} }
	same := Settings(index("k", 16))
	if Settings(index("k", 16)) != same || Settings(index("l", 16)) == same || Settings(index("k", 32)) == same || same == 0 {
		t.Error("got a hash that does not tell key and block size")
	}
	addresses := freePorts(t, 3)
	m := make([]*member, 3)
	for i, settings := range []uint32{same, Settings(index("l", 16)), 0} { // an earlier version sends 0
		f := defaultFleet(config.FleetEmbedded)
		f.Replica, f.Embedded.Listen, f.Embedded.Routes = fmt.Sprint("r", i), addresses[i], addresses
		m[i] = &member{t: t, router: newRouter(t, 4), start: time.Now()}
		m[i].Node = must(Start(t.Context(), Options{Config: &f, Settings: settings, Update: m[i].update}))
	}
	for i := range 2 {
		eventually(t, "warning", func() bool { return strings.Contains(warningOf(m[i], "other_settings"), m[1-i].id) })
	}
	eventually(t, "all without another warning", func() bool {
		return len(m[0].Warnings()) == 1 && len(m[1].Warnings()) == 1 && len(m[2].Warnings()) == 0
	})
	for _, x := range m {
		x.Close()
	}
}

func TestAClockThatIsAheadIsTold(t *testing.T) {
	defer goleak.VerifyNone(t)
	m := cluster(t, freePorts(t, 2), func(*config.Fleet) {})
	eventually(t, "pair", func() bool { return len(m[0].State().Peers) == 1 && len(m[1].State().Peers) == 1 })
	m[1].pick("in time")
	eventually(t, "warning of the clock", func() bool {
		m[0].since.Store(time.Now().Add(time.Hour).UnixNano()) // as of a change made then
		m[0].pick("ahead")
		return strings.Contains(warningOf(m[1], "clocks_differ"), m[0].id)
	})
	if got := warningOf(m[0], "clocks_differ"); got != "" {
		t.Errorf("the replica that is ahead: got %q, want no warning", got)
	}
	for _, x := range m {
		x.Close()
	}
	if got := (*Node)(nil).Warnings(); got != nil {
		t.Errorf("without replicas: got %v, want none", got)
	}
}

func secretFile(t testing.TB, secret string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// issue writes a certificate of a CA to the files of a replica.
func issue(t testing.TB, ca *x509.Certificate, caKey *ecdsa.PrivateKey, files config.FleetTLS, addresses ...net.IP) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotAfter: time.Now().Add(time.Hour), Subject: pkix.Name{CommonName: "replica"}, IPAddresses: addresses,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, key.Public(), caKey)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, files.CertFile, "CERTIFICATE", der)
	writePEM(t, files.KeyFile, "PRIVATE KEY", secret)
}

func writePEM(t testing.TB, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

func newCA(t testing.TB, file string) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		Subject: pkix.Name{CommonName: file},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, file, "CERTIFICATE", der)
	ca, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return ca, key
}

func TestRoutesWithTLSAndNewCertificates(t *testing.T) {
	defer goleak.VerifyNone(t)
	dir := t.TempDir()
	caFile := filepath.Join(dir, "ca.pem")
	ca, caKey := newCA(t, caFile)
	stranger, strangerKey := newCA(t, filepath.Join(dir, "stranger.pem"))
	addresses := freePorts(t, 3)
	n := 0
	fleet := func(f *config.Fleet) {
		name := fmt.Sprint(filepath.Join(dir, "r"), n)
		f.Embedded.TLS = config.FleetTLS{CertFile: name + ".crt", KeyFile: name + ".key", CAFile: caFile}
		if n < 2 {
			issue(t, ca, caKey, f.Embedded.TLS)
		} else {
			issue(t, stranger, strangerKey, f.Embedded.TLS)
		}
		f.SyncTimeout = config.Duration(time.Second)
		n++
	}
	m := cluster(t, addresses, fleet)
	eventually(t, "pair over TLS", func() bool { return len(m[0].State().Peers) == 1 && len(m[1].State().Peers) == 1 })
	if got := len(m[2].State().Peers); got != 0 {
		t.Errorf("a replica with a certificate of another CA: got %d others, want none", got)
	}
	eventually(t, "warning of the other CA", func() bool { return strings.Contains(warningOf(m[0], "replicas_apart"), oneAuthority) })
	// Certificates and CA are replaced while all run; then one replica starts anew.
	newOne, newKey := newCA(t, caFile)
	for i := range 2 {
		issue(t, newOne, newKey, m[i].o.Config.Embedded.TLS)
	}
	m[1].Close()
	eventually(t, "end of the replica that left", func() bool { return len(m[0].State().Peers) == 0 })
	f := *m[1].o.Config
	again := startMember(t, &f, nil)
	eventually(t, "replica with a new certificate", func() bool { return len(m[0].State().Peers) == 1 && len(again.State().Peers) == 1 })
	again.Close()
	m[0].Close()
	m[2].Close()
}

// While files of a certificate cannot be loaded, or are not what they should be, handshakes use the last good ones.
func TestTheLastGoodCertificateIsUsed(t *testing.T) {
	dir := t.TempDir()
	files := config.FleetTLS{CertFile: filepath.Join(dir, "crt"), KeyFile: filepath.Join(dir, "key"), CAFile: filepath.Join(dir, "ca")}
	if _, err := routeTLS(files); err == nil {
		t.Fatal("got no error for missing files, want one")
	}
	ca, caKey := newCA(t, files.CAFile)
	issue(t, ca, caKey, files)
	c, err := routeTLS(files)
	if err != nil {
		t.Fatal(err)
	}
	handshake := func() (*tls.Certificate, error) {
		own, err := c.GetCertificate(nil)
		if err == nil {
			var leaf *x509.Certificate
			if leaf, err = x509.ParseCertificate(own.Certificate[0]); err == nil {
				err = c.VerifyConnection(tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}})
			}
		}
		return own, err
	}
	want, err := handshake()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{files.CertFile, files.KeyFile, files.CAFile} {
		for name, replace := range map[string]func() error{
			"garbage": func() error { return os.WriteFile(file, []byte("half"), 0o600) }, "FIFO": func() error { return syscall.Mkfifo(file, 0o600) },
		} {
			if err := errors.Join(os.Remove(file), replace()); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() {
				got, err := handshake()
				if err == nil && !bytes.Equal(got.Certificate[0], want.Certificate[0]) {
					err = errors.New("another certificate")
				}
				done <- err
			}()
			select {
			case err := <-done:
				if err != nil {
					t.Errorf("%s for %s: got %v, want the last good one", name, file, err)
				}
			case <-time.After(5 * time.Second):
				t.Fatalf("%s for %s: a handshake waits for it", name, file)
			}
		}
	}
	if err := errors.Join(os.Remove(files.CertFile), os.Remove(files.KeyFile), os.Remove(files.CAFile)); err != nil {
		t.Fatal(err)
	}
	ca, caKey = newCA(t, files.CAFile)
	issue(t, ca, caKey, files)
	got, err := handshake()
	if err != nil || bytes.Equal(got.Certificate[0], want.Certificate[0]) {
		t.Errorf("after a new pair: got the old certificate, or %v", err)
	}
}

func startNATS(t testing.TB, port int) *server.Server {
	t.Helper()
	return startServerWith(t, &server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true, Username: "u", Password: "p"})
}

func startServerWith(t testing.TB, options *server.Options) *server.Server {
	t.Helper()
	s, err := server.NewServer(options)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("got no NATS server, want one")
	}
	return s
}

func TestExternalServerIsKilledAndComesBack(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := startNATS(t, server.RANDOM_PORT)
	port := s.Addr().(*net.TCPAddr).Port
	var log strings.Builder // read after all have closed
	writer := zerolog.SyncWriter(&log)
	start := func(name, password string) *member {
		f := defaultFleet(config.FleetExternal)
		f.Name, f.SyncTimeout = name, config.Duration(2*time.Second)
		f.External = config.FleetExtern{URL: fmt.Sprint("nats://127.0.0.1:", port), User: "u", PasswordFile: secretFile(t, password)}
		m := &member{t: t, router: newRouter(t, 4), start: time.Now()}
		m.Node = must(Start(t.Context(), Options{Config: &f, Update: m.update, Log: zerolog.New(writer)}))
		return m
	}
	connected := func(m *member) (got float64) {
		m.Collect(func(name, _ string, value float64, _ ...string) {
			if name == "replicas_connected" {
				got = value
			}
		})
		return got
	}
	a, b, other, stranger := start("one", "p"), start("one", "p"), start("two", "p"), start("one", "wrong")
	eventually(t, "pair", func() bool { return len(a.State().Peers) == 1 && len(b.State().Peers) == 1 })
	plan := a.pick("c")
	eventually(t, "booking at the other", func() bool { return b.live() == 1 })
	if got := connected(a); got != 1 {
		t.Errorf("got replicas_connected %v, want 1", got)
	}
	s.Shutdown()
	s.WaitForShutdown()
	eventually(t, "loss of the connection", func() bool { return !a.State().Connected && !b.State().Connected })
	if got := connected(a); got != 0 {
		t.Errorf("without NATS: got replicas_connected %v, want 0", got)
	}
	for _, m := range []*member{a, b} {
		eventually(t, "warning of the connection", func() bool {
			return strings.HasPrefix(warningOf(m, "replicas_apart"), "replicas: no connection to NATS")
		})
	}
	b.pick("d") // decided alone
	a.update(func(r *routing.Router, now time.Duration) { r.Release(now, plan.Reservation) })
	eventually(t, "drop of the silent replica", func() bool { return len(a.State().Peers) == 0 && a.live() == 0 && b.live() == 1 })
	s = startNATS(t, port)
	eventually(t, "agreement", func() bool { return len(a.State().Peers) == 1 && a.live() == 1 && b.live() == 1 })
	if got := a.Warnings(); len(got) > 0 {
		t.Errorf("with NATS again: got %v, want no warning", got)
	}
	eventually(t, "warning of a wrong password with NATS' reason, which it has not during an attempt", func() bool {
		got := warningOf(stranger, "replicas_apart")
		if strings.Contains(got, "<nil>") {
			t.Errorf("with a wrong password: got %q, want a reason", got)
		}
		return strings.Contains(got, "Authorization Violation")
	})
	if got := len(other.State().Peers) + len(stranger.State().Peers); got != 0 {
		t.Errorf("replicas of another fleet and with a wrong password: got %d others, want none", got)
	}
	if stranger.conn.IsClosed() {
		t.Error("after two refusals: got a closed connection, want further attempts")
	}
	for _, m := range []*member{a, b, other, stranger} {
		m.Close()
	}
	s.Shutdown()
	s.WaitForShutdown()
	for _, m := range []*member{a, b} {
		if want := fmt.Sprintf(`"replica":%q`, m.id); !slices.ContainsFunc(strings.Split(log.String(), "\n"), func(line string) bool {
			return strings.Contains(line, want) && strings.Contains(line, "NATS connection lost, routing alone")
		}) {
			t.Errorf("%s: got the log\n%swant it to say that the connection is lost", m.id, log.String())
		}
	}
}

// The password and the token of an external NATS are replaced while replicas run.
func TestExternalSecretsAreReadForEachConnection(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, kind := range []string{"password", "token"} {
		serve := func(secret string, port int) *server.Server {
			o := &server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true, Username: "u", Password: secret}
			if kind == "token" {
				o.Username, o.Password, o.Authorization = "", "", secret
			}
			return startServerWith(t, o)
		}
		s := serve("old", server.RANDOM_PORT)
		port := s.Addr().(*net.TCPAddr).Port
		f := external(t, port)
		f.External.PasswordFile = secretFile(t, "old")
		if kind == "token" {
			f.External.User, f.External.PasswordFile, f.External.TokenFile = "", "", f.External.PasswordFile
		}
		m := startMember(t, &f, nil)
		eventually(t, "connection by "+kind, func() bool { return m.State().Connected })
		s.Shutdown()
		s.WaitForShutdown()
		s = serve("new", port)
		eventually(t, "refusal of the old "+kind, func() bool { return errors.Is(m.conn.LastError(), nats.ErrAuthorization) })
		if m.State().Connected {
			t.Errorf("%s: got a connection with the old one, want it refused", kind)
		}
		if err := os.WriteFile(f.External.PasswordFile+f.External.TokenFile, []byte("new\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		eventually(t, "connection by the new "+kind, func() bool { return m.State().Connected })
		m.Close()
		s.Shutdown()
		s.WaitForShutdown()
	}
}

// external returns a fleet on a server of startNATS.
func external(t testing.TB, port int) config.Fleet {
	f := defaultFleet(config.FleetExternal)
	f.SyncTimeout = config.Duration(time.Hour)
	f.External = config.FleetExtern{URL: fmt.Sprint("nats://127.0.0.1:", port), User: "u", PasswordFile: secretFile(t, "p")}
	return f
}

// An external NATS whose certificate is of another authority is said with what to correct; with its authority all is well.
func TestCertificateOfAnExternalServerIsAdvised(t *testing.T) {
	defer goleak.VerifyNone(t)
	dir := t.TempDir()
	caFile, otherFile := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "other.pem")
	ca, caKey := newCA(t, caFile)
	newCA(t, otherFile)
	own := config.FleetTLS{CertFile: filepath.Join(dir, "s.crt"), KeyFile: filepath.Join(dir, "s.key")}
	issue(t, ca, caKey, own, net.IPv4(127, 0, 0, 1))
	pair := must(tls.LoadX509KeyPair(own.CertFile, own.KeyFile))
	s := startServerWith(t, &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, Username: "u", Password: "p",
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
	})
	port := s.Addr().(*net.TCPAddr).Port
	member := func(ca string) *member {
		f := external(t, port)
		f.External.TLS.CAFile = ca
		return startMember(t, &f, nil)
	}
	right, wrong := member(caFile), member(otherFile)
	eventually(t, "connection", func() bool { return right.State().Connected })
	const advice = "x509: certificate signed by unknown authority"
	eventually(t, "advice", func() bool {
		text := warningOf(wrong, "replicas_apart")
		return strings.Contains(text, advice) && strings.HasSuffix(text, ": correct "+externalCA+", or a clock")
	})
	if got := warningOf(right, "replicas_apart"); got != "" {
		t.Errorf("got the warning %q with the authority of the server, want none", got)
	}
	right.Close()
	wrong.Close()
	s.Shutdown()
	s.WaitForShutdown()
	late := member(caFile) // no certificate to blame
	eventually(t, "warning of a server that is away", func() bool { return warningOf(late, "replicas_apart") != "" })
	if got := warningOf(late, "replicas_apart"); strings.Contains(got, externalCA) {
		t.Errorf("got %q, want no advice for certificates", got)
	}
	late.Close()
}

// Others can answer only once there is a route, or a connection.
func TestReadinessBeginsWithTheConnection(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, mode := range []string{config.FleetEmbedded, config.FleetExternal} {
		_, text, _ := net.SplitHostPort(freePorts(t, 1)[0])
		port := must(strconv.Atoi(text))
		f := external(t, port)
		options := &server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true, Username: "u", Password: "p"}
		if f.Mode = mode; mode == config.FleetEmbedded {
			f.Embedded.Listen, f.Embedded.Routes = freePorts(t, 1)[0], []string{fmt.Sprint("127.0.0.1:", port)}
			options.Port, options.Cluster = server.RANDOM_PORT, server.ClusterOpts{Name: f.Name, Host: "127.0.0.1", Port: port, PoolSize: -1}
		}
		m := startMember(t, &f, nil)
		var before, changed time.Duration
		m.update(func(_ *routing.Router, now time.Duration) { before = now })
		if m.Waiting() == "" {
			t.Errorf("%s: got ready without a connection, want not ready", mode)
		}
		s := startServerWith(t, options)
		eventually(t, "readiness", func() bool { return m.Waiting() == "" })
		m.update(func(*routing.Router, time.Duration) { changed = m.core.changed })
		if changed < before {
			t.Errorf("%s: got a wait from %v on, want from the connection on, after %v", mode, changed, before)
		}
		m.Close()
		s.Shutdown()
		s.WaitForShutdown()
	}
}

// The connection comes when the wait would end, after the question for it.
func TestReadinessAndAConnectionAtTheSameTime(t *testing.T) {
	defer goleak.VerifyNone(t)
	_, text, _ := net.SplitHostPort(freePorts(t, 1)[0])
	port := must(strconv.Atoi(text))
	f := external(t, port)
	m := startMember(t, &f, nil)
	defer m.Close()
	time.Sleep(settled)
	m.stop() // the test makes the steps of send
	m.wg.Wait()
	m.found()
	s := startServerWith(t, &server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true, Username: "u", Password: "p"})
	defer s.WaitForShutdown()
	defer s.Shutdown()
	eventually(t, "connection", m.conn.IsConnected)
	if m.look(); m.Waiting() == "" {
		t.Error("got ready at the connection, want a wait for the others' answers")
	}
	if !m.found() {
		t.Error("got no connection found, want one")
	}
	if m.look(); m.Waiting() != "" {
		t.Error("got not ready after the wait, want ready")
	}
}

func TestNamesThatAreNotResolvedAreWaitedFor(t *testing.T) {
	for route, want := range map[string]int32{"a..b:6222": 1, "127.0.0.1:6222": 0, "127.0.0.1:6223": 1} { // a..b is not a name; 6222 is its own
		s := &natsServer{config: &config.FleetEmbed{Routes: []string{route}}, opts: &server.Options{Cluster: server.ClusterOpts{Host: "127.0.0.1", Port: 6222}}}
		s.resolve(t.Context())
		if got := s.others.Load(); got != want {
			t.Errorf("route %s: got %d others, want %d", route, got, want)
		}
	}
}

// A replica that starts cut off binds a conversation that the fleet bound before, then meets
// the fleet.
func TestClockOfAReplicaThatStartsAlone(t *testing.T) {
	f := defaultFleet(config.FleetEmbedded)
	f.Embedded.Listen = freePorts(t, 1)[0]
	a, b := pair(t)
	a.clock = uint64(time.Now().UnixMilli()) << 4
	for range 100 {
		bound(t, a, "x", 1)
	}
	bound(t, a, "c", 1)
	m := startMember(t, &f, nil)
	m.Close()
	late := m.core // the test drives it from here on
	m.router.Share(late)
	late.Hello()
	bound(t, late, "c", 2)
	deliver(t, time.Millisecond, a, b, late)
	for _, c := range []*Core{a, b, late} {
		for key := range c.legs[0].byKey {
			if got, _ := c.router.Bound(0, key); got != target(1) {
				t.Errorf("conversation at %s: got %v, want the fleet's binding %v", c.id, got, target(1))
			}
		}
	}
}

func TestStrangersMessages(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := startNATS(t, server.RANDOM_PORT)
	f := external(t, s.Addr().(*net.TCPAddr).Port)
	m := startMember(t, &f, nil)
	conn := must(nats.Connect(f.External.URL, nats.UserInfo("u", "p")))
	answers := must(conn.SubscribeSync(m.parts("*")))
	eventually(t, "readiness", func() bool { return m.Waiting() == "" })
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}

	m.mu.Lock() // the decision path
	for range 3 {
		_ = conn.Publish(m.changes("x"), []byte("not a message"))
	}
	eventually(t, "malformed message counted while the router is locked", func() bool { return m.malformed.Load() == 3 })
	m.mu.Unlock()
	if got := m.State().Stats; got.Malformed != 3 || got.Received != 0 {
		t.Errorf("got %d malformed and %d received messages, want 3 and 0", got.Malformed, got.Received)
	}

	request := must(proto.Marshal(&message{Version: 1, Replica: "x", StateRequest: &kvlanev1.ReplicaStateRequest{Id: 1}}))
	for _, id := range []string{"y", "x"} { // y did not ask
		_ = conn.PublishRequest(m.requests(m.id), m.parts(id), request)
	}
	msg, err := answers.NextMsg(30 * time.Second)
	if err != nil || msg.Subject != m.parts("x") {
		t.Errorf("got the first answer %+v, %v, want it at %s", msg, err, m.parts("x"))
	}
	conn.Close()
	m.Close()
	s.Shutdown()
	s.WaitForShutdown()
}

// Messages that wait for the router are bounded in bytes, too: they may have 1 MB each.
func TestMessagesThatWaitAreBounded(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := startNATS(t, server.RANDOM_PORT)
	f := external(t, s.Addr().(*net.TCPAddr).Port)
	m := startMember(t, &f, nil)
	conn := must(nats.Connect(f.External.URL, nats.UserInfo("u", "p")))
	eventually(t, "readiness", func() bool { return m.Waiting() == "" })
	const count = 80
	big := &message{Version: 1, Replica: "x"}
	big.ProtoReflect().SetUnknown(append([]byte{0xfa, 0x7f, 0x80, 0x80, 0x3c}, make([]byte, 60<<14)...)) // 960 KiB
	m.mu.Lock()
	for n := range uint64(count) {
		big.Number = n + 1
		if err := conn.Publish(m.changes("x"), must(proto.Marshal(big))); err != nil {
			t.Fatal(err)
		}
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "last message", func() bool { return m.conn.Stats().InMsgs >= count })
	m.mu.Unlock()
	conn.Close()
	var got uint64
	eventually(t, "end of the messages", func() bool {
		before := got
		got = m.State().Stats.Received
		time.Sleep(50 * time.Millisecond)
		return got > 0 && got == before
	})
	if want := uint64(nats.DefaultSubPendingBytesLimit/(60<<14) + 1); got > want || m.malformed.Load() > 0 {
		t.Errorf("got %d messages kept of %d and %d malformed, want at most %d and 0", got, count, m.malformed.Load(), want)
	}
	m.Close()
	s.Shutdown()
	s.WaitForShutdown()
}

func TestGoodbyeDoesNotWaitForTheStore(t *testing.T) {
	defer goleak.VerifyNone(t)
	m := cluster(t, freePorts(t, 2), func(*config.Fleet) {})
	eventually(t, "pair", func() bool { return len(m[0].State().Peers) == 1 && len(m[1].State().Peers) == 1 })
	written, closed := make(chan struct{}), make(chan struct{})
	m[0].storing.Go(func() { <-written })
	go func() { m[0].Close(); close(closed) }()
	eventually(t, "end of the replica that leaves", func() bool { return len(m[1].State().Peers) == 0 })
	if got := m[1].State().Stats.Dropped; got != 0 {
		t.Errorf("got %d replicas dropped for silence, want a goodbye before the store is written", got)
	}
	close(written)
	<-closed
	m[1].Close()
}

// Writing to a server that hangs blocks send, and Close, until the timeout.
func TestAServerThatHangsIsNotWaitedForLong(t *testing.T) {
	n := &Node{o: Options{Config: new(defaultFleet(config.FleetOff))}}
	o := nats.GetDefaultOptions()
	for _, option := range must(n.options()) {
		if err := option(&o); err != nil {
			t.Fatal(err)
		}
	}
	if o.FlusherTimeout <= 0 || o.FlusherTimeout > silence {
		t.Errorf("got %v, want at most the silence after which replicas are dropped, %v", o.FlusherTimeout, silence)
	}
}

func TestThePasswordOfRoutesIsNotLogged(t *testing.T) {
	var text strings.Builder
	route := must(url.Parse("nats-route://kvlane:hidden@10.0.0.1:6222"))
	natsLog{log: zerolog.New(&text)}.Noticef("Removed route %v", route)
	if strings.Contains(text.String(), "hidden") || !strings.Contains(text.String(), "10.0.0.1:6222") {
		t.Errorf("got %s, want the address without the password", text.String())
	}
	if got, _ := route.User.Password(); got != "hidden" {
		t.Errorf("the route's own password: got %q, want it kept", got)
	}
}

func TestTheLogTellsAStartInStepFromATimeout(t *testing.T) {
	defer goleak.VerifyNone(t)
	const inStep, late = "in step", "fleet.sync_timeout has passed"
	for _, connected := range []bool{true, false} {
		s := startNATS(t, server.RANDOM_PORT)
		f := external(t, s.Addr().(*net.TCPAddr).Port)
		want, other := inStep, late
		if !connected {
			s.Shutdown()
			s.WaitForShutdown()
			want, other, f.SyncTimeout = late, inStep, config.Duration(time.Millisecond)
		}
		m := &member{t: t, router: newRouter(t, 4), start: time.Now()}
		var text strings.Builder // read after Close
		m.Node = must(Start(t.Context(), Options{Config: &f, Update: m.update, Log: zerolog.New(zerolog.SyncWriter(&text))}))
		eventually(t, "readiness", func() bool { return m.Waiting() == "" })
		m.Close()
		s.Shutdown()
		s.WaitForShutdown()
		warned := strings.Contains(text.String(), `"level":"warn"`)
		if got := text.String(); !strings.Contains(got, want) || strings.Contains(got, other) || warned == connected {
			t.Errorf("connected %v: got\n%swant %q, not %q, a warning %v", connected, got, want, other, !connected)
		}
	}
}

func TestTheLogTellsAGoodbyeFromADeath(t *testing.T) {
	m := &member{t: t, router: newRouter(t, 4), start: time.Now()}
	var text strings.Builder
	n := &Node{o: Options{Config: new(defaultFleet(config.FleetEmbedded)), Update: m.update}, conn: &nats.Conn{}, log: zerolog.New(&text), started: time.Now(),
		core: New("here", m.router, 0, func() {}), known: map[string]bool{"left": true, "dead": true}}
	n.core.peers = map[string]*peer{"left": {id: "left", gone: true}, "dead": {id: "dead", gone: true, silent: 2 * time.Second}, "strange": {id: "strange", gone: true}}
	n.look()
	n.look()
	const want = `{"level":"warn","other":"dead","left":0,"silent_seconds":2,"message":"replicas: gone, its bookings are dropped"}
{"level":"info","other":"left","left":0,"message":"replicas: one has taken leave"}
`
	if got := text.String(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// A replica that reads slowly and answers pings is cut off: what it has not read would grow without bound.
func TestARouteThatReadsSlowlyIsCutOff(t *testing.T) {
	t.Parallel()
	address := freePorts(t, 1)
	m := cluster(t, address, func(*config.Fleet) {})[0]
	defer m.Close()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	say := func(format string, values ...any) error {
		_, err := fmt.Fprintf(c, format, values...)
		return err
	}
	_ = say("CONNECT {\"name\":\"slow\",\"cluster\":%q,\"lnoc\":true}\r\n", m.o.Config.Name)
	_ = say("INFO {\"server_id\":\"slow\",\"server_name\":\"slow\",\"cluster\":%q,\"route_pool_size\":-1,\"lnoc\":true}\r\nRS+ $G flood\r\n", m.o.Config.Name)
	eventually(t, "route", func() bool { return m.server.NumRoutes() == 1 })
	eventually(t, "subscription", func() bool { return m.server.NumSubscriptions() > 3 })
	go func() {
		for range 64 {
			if m.conn.Publish("flood", make([]byte, maxPayload)) != nil {
				return
			}
		}
	}()
	piece := make([]byte, 30_000)
	within(t, 40*time.Second, "end of the route", func() bool {
		time.Sleep(200 * time.Millisecond)
		_, err := c.Read(piece)
		return errors.Join(err, say("PONG\r\n")) != nil
	})
	eventually(t, "end at the server", func() bool { return m.server.NumRoutes() == 0 })
}

// Connections of processes without the secret take the places of Options.Limit, not more, and only until they have to show it.
func TestConnectionsOfRoutesAreBounded(t *testing.T) {
	t.Parallel()
	address := freePorts(t, 1)[0]
	f := defaultFleet(config.FleetEmbedded)
	f.Embedded.Listen, f.Embedded.SecretFile = address, secretFile(t, "secret")
	m := &member{t: t, router: newRouter(t, 4), start: time.Now()}
	const places = 4
	m.Node = must(Start(t.Context(), Options{Config: &f, Update: m.update, Log: zerolog.Nop(), Limit: func(l net.Listener) net.Listener {
		return netutil.LimitListener(l, places)
	}}))
	defer m.Close()
	var conns []net.Conn
	greeted := func(c net.Conn, within time.Duration) bool {
		_ = c.SetReadDeadline(time.Now().Add(within))
		_, err := io.ReadFull(c, make([]byte, len("INFO ")))
		return err == nil
	}
	for i := range places + 1 {
		c := must((&net.Dialer{}).DialContext(t.Context(), "tcp", address))
		defer c.Close()
		if conns = append(conns, c); i < places && !greeted(c, 10*time.Second) {
			t.Fatalf("connection %d: got no greeting", i)
		}
	}
	if greeted(conns[places], 500*time.Millisecond) {
		t.Errorf("connection %d of %d places was passed on", places+1, places)
	}
	fmt.Fprint(conns[0], "CONNECT {\"user\":\"kvlane\",\"pass\":\"guessed\"}\r\n")
	eventually(t, "refusal with its address", func() bool {
		why, _ := m.server.refused.Load().(string)
		return strings.HasPrefix(why, conns[0].LocalAddr().String()+" - rid:") && strings.Contains(why, oneSecret)
	})
	if !greeted(conns[places], 10*time.Second) {
		t.Error("the last connection: got no greeting after another one was refused")
	}
}

// Names may resolve to many addresses, most of them dead: those that are there are found as fast, and there are not too many.
func TestManyDeadAddresses(t *testing.T) {
	deaf, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4zero})
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	raw, err := deaf.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(raw.Control(func(fd uintptr) { err = syscall.Listen(int(fd), 0) }), err); err != nil {
		t.Fatal(err)
	}
	port := deaf.Addr().(*net.TCPAddr).Port
	for { // its queue is full
		c, err := net.DialTimeout("tcp", fmt.Sprint("127.0.0.1:", port), 300*time.Millisecond)
		if err != nil {
			break
		}
		defer c.Close()
	}
	address := freePorts(t, 1)
	m := cluster(t, address, func(*config.Fleet) {})[0]
	defer m.Close()
	names := *m.server.config
	for i := range 1000 {
		names.Routes = append(names.Routes, fmt.Sprintf("127.0.%d.%d:%d", i/200, i%200+1, port))
	}
	s := &natsServer{Server: m.server.Server, config: &names, opts: m.server.opts.Clone(), reached: map[string]bool{}}
	if s.opts.Routes = s.resolve(t.Context()); len(s.opts.Routes) > maxPeers || s.others.Load() > maxPeers {
		t.Errorf("got %d routes to %d addresses, want at most %d", len(s.opts.Routes), s.others.Load(), maxPeers)
	}
	start := time.Now()
	s.probe(t.Context())
	if took := time.Since(start); took > 20*probeTimeout {
		t.Errorf("a probe of %d addresses took %v", len(s.opts.Routes), took)
	}
}

package replicas

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/internal/config"
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
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("got no %s within 30 s", what)
		}
	}
}

func defaultFleet(mode string) config.Fleet {
	f := config.Default().Fleet
	f.Mode = mode
	return f
}

// freePorts returns addresses on loopback that are free now.
func freePorts(t testing.TB, n int) []string {
	t.Helper()
	var list []string
	for range n {
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		list = append(list, l.Addr().String())
	}
	return list
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
		if i > 1 && s.Stats.Received > 0 {
			t.Errorf("replica %d: got %d messages, want none", i, s.Stats.Received)
		}
	}
	for _, x := range m {
		x.Close()
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
func issue(t testing.TB, ca *x509.Certificate, caKey *ecdsa.PrivateKey, files config.FleetTLS) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), NotAfter: time.Now().Add(time.Hour), Subject: pkix.Name{CommonName: "replica"}}
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

func startNATS(t testing.TB, port int) *server.Server {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true, Username: "u", Password: "p"})
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
	start := func(name, password string) *member {
		f := defaultFleet(config.FleetExternal)
		f.Name, f.SyncTimeout = name, config.Duration(2*time.Second)
		f.External = config.FleetExtern{URL: fmt.Sprint("nats://127.0.0.1:", port), User: "u", PasswordFile: secretFile(t, password)}
		return startMember(t, &f, nil)
	}
	a, b, other, stranger := start("one", "p"), start("one", "p"), start("two", "p"), start("one", "wrong")
	eventually(t, "pair", func() bool { return len(a.State().Peers) == 1 && len(b.State().Peers) == 1 })
	plan := a.pick("c")
	eventually(t, "booking at the other", func() bool { return b.live() == 1 })
	s.Shutdown()
	s.WaitForShutdown()
	eventually(t, "loss of the connection", func() bool { return !a.State().Connected && !b.State().Connected })
	b.pick("d") // decided alone
	a.update(func(r *routing.Router, now time.Duration) { r.Release(now, plan.Reservation) })
	eventually(t, "drop of the silent replica", func() bool { return len(a.State().Peers) == 0 && a.live() == 0 && b.live() == 1 })
	s = startNATS(t, port)
	eventually(t, "agreement", func() bool { return len(a.State().Peers) == 1 && a.live() == 1 && b.live() == 1 })
	if got := len(other.State().Peers) + len(stranger.State().Peers); got != 0 {
		t.Errorf("replicas of another fleet and with a wrong password: got %d others, want none", got)
	}
	for _, m := range []*member{a, b, other, stranger} {
		m.Close()
	}
	s.Shutdown()
	s.WaitForShutdown()
}

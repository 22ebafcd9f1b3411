package peers

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvlane/kvlane/internal/config"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve puts a service on a port of its own.
func serve(t *testing.T, s kvlanev1.SnapshotsServer, creds credentials.TransportCredentials) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(grpc.Creds(creds))
	kvlanev1.RegisterSnapshotsServer(g, s)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	t.Cleanup(func() { g.Stop(); <-done })
	return l.Addr().String()
}

// peer is a server whose content is text.
func peer(text []byte, ready bool) *Server {
	s := NewServer(Content{Secret: []byte("secret"), BlockSize: 16, Dump: func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	}}, zerolog.Nop())
	if ready {
		s.SetReady()
	}
	return s
}

func ask(addresses ...string) *Want {
	return &Want{
		Peers:  config.Peers{Addresses: addresses, Timeout: config.Duration(20 * time.Second)},
		Secret: []byte("secret"), BlockSize: 16, MaxBytes: 8 << 20, Log: zerolog.Nop(),
	}
}

func TestACopyArrives(t *testing.T) {
	for _, size := range []int{0, 1, pieceSize, 5<<20 + 17} {
		text := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)[:size]
		s := peer(text, true)
		var got []byte
		err := Fetch(t.Context(), ask(serve(t, s, insecure.NewCredentials())), func(r io.Reader) (err error) {
			got, err = io.ReadAll(r)
			return err
		})
		if err != nil || !bytes.Equal(got, text) {
			t.Errorf("%d bytes: got %d, %v", size, len(got), err)
		}
		served := map[string]float64{}
		s.Collect(func(name, _ string, v float64, labels ...string) {
			served[strings.Join(append([]string{name}, labels...), " ")] = v
		})
		if served["snapshots_served_total outcome sent"] != 1 || served["snapshot_sent_bytes_total"] != float64(size) {
			t.Errorf("%v", served)
		}
	}
}

// A replica that gets no copy reports each peer's reason.
func TestRefusals(t *testing.T) {
	good := serve(t, peer([]byte("x"), true), insecure.NewCredentials())
	big := serve(t, peer(make([]byte, 9<<20), true), insecure.NewCredentials())
	busy := peer(nil, true)
	for range maxTransfers {
		busy.transfers <- struct{}{}
	}
	broken := NewServer(Content{Secret: []byte("secret"), BlockSize: 16, Dump: func(io.Writer) error { return errors.New("disk full") }}, zerolog.Nop())
	broken.SetReady()
	for name, tt := range map[string]struct {
		want   *Want
		change func(*Want)
		text   string
	}{
		"another key":        {ask(good), func(w *Want) { w.Secret = []byte("other") }, "another key of the block hash"},
		"no key":             {ask(good), func(w *Want) { w.Secret = nil }, "another key of the block hash"},
		"another block size": {ask(good), func(w *Want) { w.BlockSize = 32 }, "index blocks of 16 tokens here, 32 there"},
		"not ready":          {ask(serve(t, peer(nil, false), insecure.NewCredentials())), nil, "not ready itself"},
		"too large":          {ask(big), nil, errLarge.Error()},
		"busy":               {ask(serve(t, busy, insecure.NewCredentials())), nil, "other replicas"},
		"cannot copy":        {ask(serve(t, broken, insecure.NewCredentials())), nil, "disk full"},
		"nobody there":       {ask("127.0.0.1:1"), nil, "refused"},
		"unknown name":       {ask("no-such-host.invalid:1"), nil, ErrNone.Error()},
		"no service":         {ask(serve(t, kvlanev1.UnimplementedSnapshotsServer{}, insecure.NewCredentials())), nil, "not implemented"},
	} {
		if tt.change != nil {
			tt.change(tt.want)
		}
		err := Fetch(t.Context(), tt.want, func(r io.Reader) error {
			_, err := io.Copy(io.Discard, r)
			return err
		})
		if !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// speaker is a peer that sends what the test sets.
type speaker struct {
	kvlanev1.UnimplementedSnapshotsServer
	say func(kvlanev1.Snapshots_FetchServer) error
}

func (s speaker) Fetch(_ *kvlanev1.FetchRequest, out kvlanev1.Snapshots_FetchServer) error {
	return s.say(out)
}

func header(format uint32, size uint64) *kvlanev1.FetchResponse {
	return &kvlanev1.FetchResponse{Message: &kvlanev1.FetchResponse_Header{Header: &kvlanev1.SnapshotHeader{Format: format, Bytes: size}}}
}

func chunk(b []byte) *kvlanev1.FetchResponse {
	return &kvlanev1.FetchResponse{Message: &kvlanev1.FetchResponse_Chunk{Chunk: b}}
}

// Peers that fail or fall silent use up their share of the timeout; then another one is
// asked, and the total time is bounded.
func TestBadPeers(t *testing.T) {
	silent := func(first ...*kvlanev1.FetchResponse) func(kvlanev1.Snapshots_FetchServer) error {
		return func(out kvlanev1.Snapshots_FetchServer) error {
			for _, m := range first {
				if err := out.Send(m); err != nil {
					return err
				}
			}
			<-out.Context().Done()
			return nil
		}
	}
	for name, tt := range map[string]struct {
		say  func(kvlanev1.Snapshots_FetchServer) error
		want error
	}{
		"never answers":        {silent(), errSlow},
		"stops after a header": {silent(header(Format, 100)), errSlow},
		"stops in the middle":  {silent(header(Format, 100), chunk(make([]byte, nonceSize))), errSlow},
		"no header":            {silent(chunk([]byte("a"))), nil},
		"another format":       {silent(header(Format+1, 1)), nil},
		"unsealed": {func(out kvlanev1.Snapshots_FetchServer) error {
			if err := out.Send(header(Format, 1)); err != nil {
				return err
			}
			for out.Send(chunk(make([]byte, nonceSize))) == nil {
			}
			return nil
		}, errForged},
	} {
		t.Run(name, func(t *testing.T) {
			w := ask(serve(t, speaker{say: tt.say}, insecure.NewCredentials()))
			if errors.Is(tt.want, errSlow) {
				w.Peers.Timeout = config.Duration(400 * time.Millisecond)
			}
			load := func(r io.Reader) error {
				_, err := io.Copy(io.Discard, r)
				return err
			}
			err := Fetch(t.Context(), w, load)
			if !errors.Is(err, ErrNone) || tt.want != nil && !errors.Is(err, tt.want) {
				t.Error(err)
			}
			// With one good peer the copy arrives, whatever the order.
			w.Peers.Timeout = config.Duration(8 * time.Second)
			w.Peers.Addresses = append(w.Peers.Addresses, serve(t, peer([]byte("x"), true), insecure.NewCredentials()))
			if err := Fetch(t.Context(), w, load); err != nil {
				t.Errorf("beside a good one: %v", err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Fetch(ctx, ask(serve(t, peer(nil, true), insecure.NewCredentials())), func(io.Reader) error { return nil }); !errors.Is(err, context.Canceled) && !errors.Is(err, ErrNone) {
		t.Error(err)
	}
}

// liar is a peer with the secret that sends more than it says.
type liar struct {
	kvlanev1.UnimplementedSnapshotsServer
}

func (liar) Fetch(req *kvlanev1.FetchRequest, out kvlanev1.Snapshots_FetchServer) error {
	answered := newNonce()
	sealed := newSeal([]byte("secret"), req.GetKeyProof()[:nonceSize], answered)
	_ = out.Send(header(Format, 1))
	for err := out.Send(chunk(answered)); err == nil; err = out.Send(chunk(sealed.close(make([]byte, 1<<20)))) {
	}
	return nil
}

// witness records what goes over the wire of a good peer.
type witness struct {
	*Server

	requests []*kvlanev1.FetchRequest
	chunks   [][]byte
}

type recorder struct {
	kvlanev1.Snapshots_FetchServer
	w *witness
}

func (r recorder) Send(m *kvlanev1.FetchResponse) error {
	if b := m.GetChunk(); b != nil {
		r.w.chunks = append(r.w.chunks, b)
	}
	return r.Snapshots_FetchServer.Send(m)
}

func (w *witness) Fetch(req *kvlanev1.FetchRequest, out kvlanev1.Snapshots_FetchServer) error {
	w.requests = append(w.requests, req)
	return w.Server.Fetch(req, recorder{out, w})
}

// An eavesdropper sees no content, and can use neither the request nor the answer again.
func TestAnOverheardCopyIsUseless(t *testing.T) {
	text := bytes.Repeat([]byte("a prompt of a tenant "), 40_000)
	w := &witness{Server: peer(text, true)}
	address := serve(t, w, insecure.NewCredentials())
	fetch := func(address string) (got []byte, err error) {
		err = Fetch(t.Context(), ask(address), func(r io.Reader) (err error) {
			got, err = io.ReadAll(r)
			return err
		})
		return got, err
	}
	got, err := fetch(address)
	if err != nil || !bytes.Equal(got, text) {
		t.Fatalf("got %d bytes, %v, want %d", len(got), err, len(text))
	}
	if len(w.chunks) < 3 {
		t.Fatalf("got %d chunks, want a nonce and some pieces", len(w.chunks))
	}
	overheard := w.chunks
	for i, c := range overheard {
		if bytes.Contains(c, []byte("tenant")) {
			t.Errorf("chunk %d has plaintext", i)
		}
	}
	// The request again: an answer comes, under another key.
	w.chunks = nil
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	again, err := kvlanev1.NewSnapshotsClient(conn).Fetch(t.Context(), w.requests[0])
	for err == nil {
		_, err = again.Recv()
	}
	if len(w.chunks) != len(overheard) || bytes.Equal(w.chunks[1], overheard[1]) {
		t.Error("got the same sealed copy for a repeated request, want another")
	}
	// The answer again: it is not for the next request.
	said := append([]*kvlanev1.FetchResponse{header(Format, uint64(len(text)))}, chunk(overheard[0]))
	for _, c := range overheard[1:] {
		said = append(said, chunk(c))
	}
	if _, err := fetch(serve(t, speaker{say: func(out kvlanev1.Snapshots_FetchServer) error {
		for _, m := range said {
			if err := out.Send(m); err != nil {
				return err
			}
		}
		return nil
	}}, insecure.NewCredentials())); !errors.Is(err, errForged) {
		t.Errorf("a repeated answer: got %v, want %v", err, errForged)
	}
	if _, err := fetch(serve(t, liar{}, insecure.NewCredentials())); !errors.Is(err, errLarge) {
		t.Errorf("more than was said: got %v, want %v", err, errLarge)
	}
}

// A replica of an older version gets a reason that names it, not a copy.
func TestOlderReplicasGetNoCopy(t *testing.T) {
	conn, err := grpc.NewClient("passthrough:///"+serve(t, peer([]byte("x"), true), insecure.NewCredentials()), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, formats := range [][]uint32{{1}, {1, Format}} { // the constant proof
		s, err := kvlanev1.NewSnapshotsClient(conn).Fetch(t.Context(), &kvlanev1.FetchRequest{Formats: formats, BlockSize: 16, KeyProof: keyed([]byte("secret"), "kvlane snapshot")})
		if err == nil {
			_, err = s.Recv()
		}
		const want = "another key of the block hash (index.key), " + orOlder
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("formats %v: got %v, want %q", formats, err, want)
		}
	}
}

// A stranger's formats reach no error and no log, those of a holder of the secret a few; strangers
// cannot fill the log.
func TestRefusalsAreBounded(t *testing.T) {
	var log bytes.Buffer
	s := NewServer(peer(nil, true).content, zerolog.New(&log))
	formats := slices.Repeat([]uint32{77}, 1000)
	for _, guess := range [][]byte{nil, []byte("guess"), proof([]byte("other"), newNonce()), proof(nil, newNonce())} {
		_, err := s.check(&kvlanev1.FetchRequest{Formats: formats, KeyProof: guess})
		if status.Code(err) != codes.PermissionDenied || strings.Contains(err.Error(), "77") {
			t.Errorf("a stranger: got %v, want another key", err)
		}
	}
	_, err := s.check(&kvlanev1.FetchRequest{Formats: formats, KeyProof: proof([]byte("secret"), newNonce())})
	if status.Code(err) != codes.FailedPrecondition || strings.Count(err.Error(), "77") != maxFormats {
		t.Errorf("another version: got %v, want %d of its formats", err, maxFormats)
	}
	const asked = 100_000
	for range asked {
		if err := s.Fetch(&kvlanev1.FetchRequest{Formats: formats}, nil); status.Code(err) != codes.PermissionDenied {
			t.Fatalf("got %v, want another key", err)
		}
	}
	if n := bytes.Count(log.Bytes(), []byte("\n")); n < 1 || n > asked/1000 {
		t.Errorf("got %d lines for %d requests, want one a second", n, asked)
	}
	if n := s.refused.Load(); n != asked {
		t.Errorf("got %d refusals counted, want %d", n, asked)
	}
}

// A copy that cannot be loaded is an error, and the next peer's is tried.
func TestALoadThatFails(t *testing.T) {
	tries := 0
	err := Fetch(t.Context(), ask(serve(t, peer([]byte("a"), true), insecure.NewCredentials()), serve(t, peer([]byte("b"), true), insecure.NewCredentials())),
		func(io.Reader) error {
			if tries++; tries == 1 {
				return errors.New("damaged")
			}
			return nil
		})
	if err != nil || tries != 2 {
		t.Errorf("%v after %d tries", err, tries)
	}
}

func TestTLS(t *testing.T) {
	load := func(r io.Reader) error { _, err := io.Copy(io.Discard, r); return err }
	replica := func(until time.Time) (w *Want, ca string) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: until, DNSNames: []string{"kvlane"}, IsCA: true, BasicConstraintsValid: true}
		der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		ca = filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		creds := credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12})
		return ask(serve(t, peer([]byte("x"), true), creds)), ca
	}
	w, ca := replica(time.Now().Add(time.Hour))
	old, past := replica(time.Now().Add(-time.Hour))
	for name, c := range map[string]struct {
		of       *Want
		ca, name string
		want     string
	}{
		"right":             {w, ca, "kvlane", ""},
		"another name":      {w, ca, "", "x509: cannot validate certificate for 127.0.0.1 because it doesn't contain any IP SANs"},
		"another authority": {w, past, "kvlane", "x509: certificate signed by unknown authority"},
		"expired":           {old, past, "kvlane", "x509: certificate has expired or is not yet valid"},
	} {
		c.of.Peers.CAFile, c.of.Peers.Name = c.ca, c.name
		err := Fetch(t.Context(), c.of, load)
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, ErrNone) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), ": correct index.peers.ca_file or server_name,")) {
			t.Errorf("%s: got %v, want %q with advice", name, err, c.want)
		}
	}
	for _, file := range []string{ca + "x", "peers_test.go"} {
		w.Peers.CAFile = file
		if err := Fetch(t.Context(), w, load); err == nil {
			t.Errorf("%s was taken as certificates", file)
		}
	}
}

// Peers that do not read hold the transfers for a time only.
func TestAStalledPeerLosesItsTransfer(t *testing.T) {
	s := peer(make([]byte, 5<<20), true)
	s.within = 50 * time.Millisecond
	address := serve(t, s, insecure.NewCredentials())
	for range maxTransfers {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(64<<10))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := kvlanev1.NewSnapshotsClient(conn).Fetch(t.Context(), &kvlanev1.FetchRequest{Formats: []uint32{Format}, BlockSize: 16, KeyProof: proof([]byte("secret"), newNonce())}); err != nil {
			t.Fatal(err)
		}
	}
	for s.failed.Load() < maxTransfers { // the test's timeout ends it
		time.Sleep(5 * time.Millisecond)
	}
	s.within = time.Minute
	if err := Fetch(t.Context(), ask(address), func(r io.Reader) error {
		_, err := io.Copy(io.Discard, r)
		return err
	}); err != nil {
		t.Errorf("after the stalled ones: got %v, want a copy", err)
	}
}

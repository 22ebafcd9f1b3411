package extproc

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// listening returns the listener of a server with a certificate of its own, which serves until the test ends.
func listening(t *testing.T) net.Listener {
	t.Helper()
	cfg, err := TLSConfig("", "")
	if err != nil {
		t.Fatal(err)
	}
	lis, err := Listen(t.Context(), "127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{}
	srv := NewServer(o, &recorder{})
	g := grpc.NewServer(GRPCOptions(o)...)
	srv.Register(g)
	go func() { _ = g.Serve(lis) }()
	t.Cleanup(g.Stop)
	return lis
}

// TLS (1.2 and 1.3) and plaintext clients are served on one port, and a silent client does not
// block the others.
func TestOnePortForTLSAndPlaintext(t *testing.T) {
	lis := listening(t)
	silent, err := net.Dial("tcp", lis.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, creds := range map[string]credentials.TransportCredentials{
		"plaintext": insecure.NewCredentials(),
		"tls 1.2":   credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}),
		"tls 1.3":   credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}),
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(creds))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			b := &bed{client: epv3.NewExternalProcessorClient(conn)}
			res, err := b.play(t.Context(), &call{request: 2, chunks: [][]byte{make([]byte, 300000)}, halfClose: true})
			if err != nil || len(res.body) != 300000 || res.pick == "" {
				t.Fatalf("%v, %d bytes, pick %q", err, len(res.body), res.pick)
			}
		})
	}
}

// A connection that says nothing, or only begins to, is closed after handshakeTimeout.
func TestSilentConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	lis := listening(t)
	began, ended := time.Now(), make(chan string)
	starts := []string{"", "PRI * HTTP/2.0", "\x16", "\x16\x03\x01\x02\x00\x01", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"}
	for _, start := range starts {
		c, err := net.Dial("tcp", lis.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte(start)); err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = io.Copy(io.Discard, c)
			ended <- start
		}()
	}
	for late := time.After(3 * handshakeTimeout); len(starts) > 0; {
		select {
		case start := <-ended:
			if after := time.Since(began); after < handshakeTimeout-time.Second {
				t.Errorf("%q: closed after %v, want about %v", start, after, handshakeTimeout)
			}
			starts = slices.DeleteFunc(starts, func(s string) bool { return s == start })
		case <-late:
			t.Fatalf("%q: still open after %v, want closed after about %v", starts, 3*handshakeTimeout, handshakeTimeout)
		}
	}
}

// idleAfter gives the servers that a test starts a shorter idleTimeout. Such tests do not run in parallel with others.
func idleAfter(t *testing.T, d time.Duration) {
	t.Helper()
	before := idleTimeout
	idleTimeout = d
	t.Cleanup(func() { idleTimeout = before })
}

// A connection on which no stream was opened, or whose streams have ended, is closed; one with a stream stays.
func TestIdleConnectionsAreClosed(t *testing.T) {
	idleAfter(t, 300*time.Millisecond)
	lis := listening(t)
	c, err := net.Dial("tcp", lis.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began := time.Now()
	if _, err := c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")); err != nil { // and empty settings
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(began.Add(20 * time.Second)); err != nil { // gRPC waits 5 s for the client's word that it was told
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); err != nil || time.Since(began) < idleTimeout {
		t.Errorf("a silent connection: got %v after %v, want its end after %v and a grace of 5 s", err, time.Since(began), idleTimeout)
	}
	conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	b := &bed{client: epv3.NewExternalProcessorClient(conn)}
	open, err := b.client.Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * idleTimeout)
	if state := conn.GetState(); state != connectivity.Ready {
		t.Errorf("a connection with a stream: got %v, want it open", state)
	}
	if err := open.CloseSend(); err != nil {
		t.Fatal(err)
	}
	_, _ = open.Recv()
	waitFor(t, func() bool { return conn.GetState() == connectivity.Idle })
	if res, err := b.play(t.Context(), &call{request: 2, chunks: [][]byte{[]byte("x")}, halfClose: true}); err != nil || res.pick == "" {
		t.Errorf("a stream on the next connection: got %v, want a pick", err)
	}
}

func writePair(t *testing.T, dir string) []byte {
	t.Helper()
	c, err := selfSigned(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalECPrivateKey(c.PrivateKey.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: c.Certificate[0]}, "tls.key": {Type: "EC PRIVATE KEY", Bytes: key}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return c.Certificate[0]
}

// A certificate is read again when its files change; a broken pair is not used.
func TestCertificateReload(t *testing.T) {
	dir := t.TempDir()
	crt, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	if _, err := TLSConfig(crt, key); err == nil {
		t.Fatal("got no error for missing files, want one")
	}
	first := writePair(t, dir)
	cfg, err := TLSConfig(crt, key)
	if err != nil {
		t.Fatal(err)
	}
	current := func() []byte {
		t.Helper()
		c, err := cfg.GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		return c.Certificate[0]
	}
	if string(current()) != string(first) {
		t.Fatal("got another certificate, want the same")
	}
	if err := os.WriteFile(key, []byte("half written"), 0o600); err != nil {
		t.Fatal(err)
	}
	if string(current()) != string(first) {
		t.Fatal("got another certificate after a broken pair, want the old one")
	}
	second := writePair(t, dir)
	later := time.Now().Add(time.Minute)
	if err := os.Chtimes(crt, later, later); err != nil {
		t.Fatal(err)
	}
	if string(current()) != string(second) {
		t.Fatal("got the old certificate, want the new one")
	}
	long := append(bytes.Repeat([]byte{'\n'}, maxPEM), readAll(t, key)...) // parsed, it is the same key
	for name, replace := range map[string]func() error{
		"FIFO": func() error { return syscall.Mkfifo(key, 0o600) }, "folder": func() error { return os.Mkdir(key, 0o700) },
		"device": func() error { return os.Symlink("/dev/zero", key) }, "long file": func() error { return os.WriteFile(key, long, 0o600) },
	} {
		if err := errors.Join(os.Remove(key), replace()); err != nil {
			t.Fatal(err)
		}
		done := make(chan string, 1)
		go func() { done <- string(current()) }()
		select {
		case got := <-done:
			if got != string(second) {
				t.Errorf("a %s for a key: got another certificate, want the old one", name)
			}
			if _, err := TLSConfig(crt, key); err == nil || !strings.Contains(err.Error(), "not a regular file of at most") {
				t.Errorf("a %s for a key: got %v, want an error", name, err)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("a %s for a key: a handshake waits for it", name)
		}
	}
}

func readAll(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestUnixSocketIsTakenOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	a, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	a.SetUnlinkOnClose(false)
	if _, err := Listen(context.Background(), "unix:"+path, nil); err == nil {
		t.Fatal("got no error for a socket in use, want one")
	}
	_ = a.Close() // leaves the file behind, as a killed process does
	b, err := Listen(context.Background(), "unix:"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = b.Close()
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(context.Background(), "unix:"+file, nil); err == nil {
		t.Fatal("got no error for a regular file, want one")
	}
}

// The byte that was inspected is returned again, whatever the size of reads.
func TestSniffedByteIsGivenBack(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	c := &sniffConn{Conn: server}
	defer c.Close()
	go func() {
		_, _ = client.Write([]byte("PRI * HTTP"))
		_ = client.Close()
	}()
	if n, err := c.Read(nil); n != 0 || err != nil {
		t.Fatalf("empty read: %d, %v", n, err)
	}
	b, err := io.ReadAll(c)
	if err != nil || string(b) != "PRI * HTTP" {
		t.Fatalf("%q, %v", b, err)
	}
}

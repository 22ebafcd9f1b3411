package extproc

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// authority is a CA with a client certificate that it has signed.
type authority struct {
	pem    []byte
	client tls.Certificate
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	client := &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	signed, err := x509.CreateCertificate(rand.Reader, client, ca, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return authority{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), tls.Certificate{Certificate: [][]byte{signed}, PrivateKey: key}}
}

// Only clients with a certificate of the CA get an answer, and the CA may be replaced.
func TestRequiredClientCertificates(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.crt")
	write := func(text []byte, at time.Time) {
		t.Helper()
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	write([]byte("not a certificate"), now)
	cfg, err := TLSConfig("", "")
	if err != nil {
		t.Fatal(err)
	}
	if err := RequireClients(cfg, file); err == nil {
		t.Error("got no error for a file without certificates, want one")
	}
	write(a.pem, now)
	if err := RequireClients(cfg, file); err != nil {
		t.Fatal(err)
	}
	lis, err := Listen(t.Context(), "127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	go func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	// served reports whether the server answers a client with these certificates; nil: in
	// plaintext.
	served := func(certificates []tls.Certificate) bool {
		t.Helper()
		c, err := net.Dial("tcp", lis.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if certificates != nil {
			c = tls.Client(c, &tls.Config{InsecureSkipVerify: true, Certificates: certificates})
		}
		if _, err := c.Write([]byte("PRI")); err != nil {
			return false
		}
		_, err = io.ReadFull(c, make([]byte, 3))
		return err == nil
	}
	check := func(when string, ofA, ofB bool) {
		t.Helper()
		for _, c := range []struct {
			name         string
			certificates []tls.Certificate
			want         bool
		}{
			{"plaintext", nil, false},
			{"no certificate", []tls.Certificate{}, false},
			{"a certificate of A", []tls.Certificate{a.client}, ofA},
			{"a certificate of B", []tls.Certificate{b.client}, ofB},
		} {
			if got := served(c.certificates); got != c.want {
				t.Errorf("%s, %s: got served %v, want %v", when, c.name, got, c.want)
			}
		}
	}
	check("with CA A", true, false)
	write([]byte("half written"), now.Add(time.Minute))
	check("with a broken file", true, false)
	write(b.pem, now.Add(2*time.Minute))
	check("with CA B", false, true)
}

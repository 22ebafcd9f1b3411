package extproc

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"sync"
	"time"
)

// selfSignedFor is the validity of a generated certificate. Data planes that use
// one do not verify it.
const selfSignedFor = 10 * 365 * 24 * time.Hour

// TLSConfig returns a server configuration for HTTP/2 with the certificate of the two PEM files.
// The files are read again when one of them has changed; without file names a self-signed
// certificate is generated. TLS 1.2 is allowed because Envoy's client uses it by default.
// TLSConfig fails if the files cannot be read; if a later read fails, the last good certificate
// stays in use.
func TLSConfig(certFile, keyFile string) (*tls.Config, error) {
	var get func() *tls.Certificate
	if certFile == "" && keyFile == "" {
		cert, err := selfSigned(time.Now())
		if err != nil {
			return nil, fmt.Errorf("make a self-signed certificate: %w", err)
		}
		get = func() *tls.Certificate { return cert }
	} else {
		f := &certificateFiles{cert: certFile, key: keyFile}
		if err := f.load(); err != nil {
			return nil, err
		}
		get = f.current
	}
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return get(), nil },
	}, nil
}

func selfSigned(now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "kvlane"},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(selfSignedFor),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{"localhost", "kvlane"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// certificateFiles holds a certificate and checks at each handshake whether its files have
// changed. Two stat calls are cheap compared with the handshake's asymmetric cryptography.
type certificateFiles struct {
	cert, key string

	mu      sync.Mutex
	loaded  *tls.Certificate
	version [2]fileVersion
}

type fileVersion struct {
	modified time.Time
	size     int64
}

func (f *certificateFiles) versions() (v [2]fileVersion, err error) {
	for i, name := range [...]string{f.cert, f.key} {
		st, err := os.Stat(name)
		if err != nil {
			return v, fmt.Errorf("look at certificate: %w", err)
		}
		v[i] = fileVersion{st.ModTime(), st.Size()}
	}
	return v, nil
}

func (f *certificateFiles) load() error {
	v, err := f.versions()
	if err != nil {
		return err
	}
	c, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return fmt.Errorf("load certificate: %w", err)
	}
	f.loaded, f.version = &c, v
	return nil
}

// current returns the newest certificate that could be read. A pair of files that is half
// replaced does not load; the next handshake tries again.
func (f *certificateFiles) current() *tls.Certificate {
	f.mu.Lock()
	defer f.mu.Unlock()
	if v, err := f.versions(); err == nil && v != f.version {
		_ = f.load() // the old one stays in use
	}
	return f.loaded
}

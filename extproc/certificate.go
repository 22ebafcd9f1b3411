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
	"slices"
	"sync"
	"time"
)

// selfSignedFor is the validity of a generated certificate. Data planes that use one do not verify it.
const selfSignedFor = 10 * 365 * 24 * time.Hour

// TLSConfig returns a server configuration for HTTP/2 with the certificate of the two PEM files. The files are read
// again when one of them has changed; without file names a self-signed certificate for names and localhost is generated.
// TLS 1.2 is allowed because Envoy's client uses it by default. TLSConfig fails if the files cannot be read; if a later
// read fails, the last good certificate stays in use.
func TLSConfig(certFile, keyFile string, names ...string) (*tls.Config, error) {
	var get func() *tls.Certificate
	if certFile == "" && keyFile == "" {
		cert, err := selfSigned(time.Now(), names...)
		if err != nil {
			return nil, fmt.Errorf("make a self-signed certificate: %w", err)
		}
		get = func() *tls.Certificate { return cert }
	} else {
		f := &watched[*tls.Certificate]{files: []string{certFile, keyFile}, read: func() (*tls.Certificate, error) {
			c, err := tls.LoadX509KeyPair(certFile, keyFile)
			return &c, err
		}}
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

func selfSigned(now time.Time, names ...string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	names = append(slices.Clip(names), "localhost")
	tmpl := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: names[0]},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(selfSignedFor),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     names,
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// RequireClients makes a server demand TLS with a client certificate that one of the CAs in a
// PEM file has signed. SniffTLS then closes plaintext connections. The file is read again when
// it has changed; if that fails, the last good CAs stay in use. Connections that are open stay.
func RequireClients(cfg *tls.Config, caFile string) error {
	cas := &watched[*x509.CertPool]{files: []string{caFile}, read: func() (*x509.CertPool, error) {
		pem, err := os.ReadFile(caFile)
		pool := x509.NewCertPool()
		if err == nil && !pool.AppendCertsFromPEM(pem) {
			err = fmt.Errorf("%s holds no certificate", caFile)
		}
		return pool, err
	}}
	if err := cas.load(); err != nil {
		return err
	}
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	cfg.SessionTicketsDisabled = true // each handshake checks the certificate
	plain := cfg.Clone()
	cfg.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		c := plain.Clone()
		c.ClientCAs = cas.current()
		return c, nil
	}
	return nil
}

// watched is what has been read from files. It checks at each handshake whether they have
// changed: stat calls are cheap compared with the handshake's asymmetric cryptography.
type watched[T any] struct {
	files []string
	read  func() (T, error)

	mu      sync.Mutex
	loaded  T
	version [2]fileVersion
}

const maxPEM = 4 << 20

type fileVersion struct {
	modified time.Time
	size     int64
}

func (w *watched[T]) versions() (v [2]fileVersion, err error) {
	for i, name := range w.files {
		st, err := os.Stat(name)
		if err != nil {
			return v, fmt.Errorf("look at certificate: %w", err)
		}
		if !st.Mode().IsRegular() || st.Size() > maxPEM { // a FIFO would be waited for
			return v, fmt.Errorf("look at certificate: %s is not a regular file of at most %d bytes", name, maxPEM)
		}
		v[i] = fileVersion{st.ModTime(), st.Size()}
	}
	return v, nil
}

func (w *watched[T]) load() error {
	v, err := w.versions()
	if err != nil {
		return err
	}
	c, err := w.read()
	if err != nil {
		return fmt.Errorf("load certificate: %w", err)
	}
	w.loaded, w.version = c, v
	return nil
}

// current returns the newest content that could be read. A pair of files that is half
// replaced does not load; the next handshake tries again.
func (w *watched[T]) current() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	if v, err := w.versions(); err == nil && v != w.version {
		_ = w.load() // the old one stays in use
	}
	return w.loaded
}

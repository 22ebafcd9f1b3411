package replicas

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/kvlane/kvlane/internal/config"
)

// routeTLS returns the mutual TLS of routes. Files are read at every handshake, so that they may be replaced; while one
// cannot be read, the last good ones are used. Certificates are verified by the CA alone: replicas reach each other by
// addresses that no certificate names.
func routeTLS(files config.FleetTLS) (*tls.Config, error) {
	own, err := kept(func() (tls.Certificate, error) { return config.KeyPair(files.CertFile, files.KeyFile) })
	roots, unread := kept(func() (*x509.CertPool, error) { return config.Authorities(files.CAFile) })
	if err = cmp.Or(err, unread); err != nil {
		return nil, fmt.Errorf("fleet.embedded.tls: %w", err)
	}
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		ClientAuth:           tls.RequireAnyClientCert,
		InsecureSkipVerify:   true, //nolint:gosec // VerifyConnection verifies both ends, without names
		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return own(), nil },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own(), nil },
		VerifyConnection:     func(s tls.ConnectionState) error { return verify(*roots(), s.PeerCertificates) },
	}, nil
}

// kept returns a function that reads again, and returns the last good result on an error. The first read must succeed.
func kept[T any](read func() (T, error)) (func() *T, error) {
	var last atomic.Pointer[T]
	again := func() error {
		v, err := read()
		if err == nil {
			last.Store(&v)
		}
		return err
	}
	return func() *T {
		_ = again()
		return last.Load()
	}, again()
}

func verify(roots *x509.CertPool, chain []*x509.Certificate) error {
	if len(chain) == 0 {
		return errors.New("no certificate")
	}
	others := x509.NewCertPool()
	for _, c := range chain[1:] {
		others.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: others, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err
}

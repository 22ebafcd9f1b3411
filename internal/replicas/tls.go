package replicas

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"

	"github.com/kvlane/kvlane/internal/config"
)

// routeTLS returns the mutual TLS of routes. Files are read at every handshake, so that they may be replaced.
// Certificates are verified by the CA alone: replicas reach each other by addresses that no certificate names.
func routeTLS(files config.FleetTLS) (*tls.Config, error) {
	load := func() (*tls.Certificate, error) {
		c, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
		return &c, err
	}
	_, err := load()
	_, unread := authorities(files.CAFile)
	if err = cmp.Or(err, unread); err != nil {
		return nil, fmt.Errorf("fleet.embedded.tls: %w", err)
	}
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		ClientAuth:           tls.RequireAnyClientCert,
		InsecureSkipVerify:   true, //nolint:gosec // VerifyConnection verifies both ends, without names
		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return load() },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() },
		VerifyConnection:     func(s tls.ConnectionState) error { return verify(files.CAFile, s.PeerCertificates) },
	}, nil
}

func authorities(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("no certificate in %s", file)
	}
	return pool, nil
}

func verify(caFile string, chain []*x509.Certificate) error {
	if len(chain) == 0 {
		return errors.New("no certificate")
	}
	roots, err := authorities(caFile)
	if err != nil {
		return err
	}
	others := x509.NewCertPool()
	for _, c := range chain[1:] {
		others.AddCert(c)
	}
	_, err = chain[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: others, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err
}

package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// certificates writes a CA, Kvlane's certificate and Envoy's, and returns Envoy's.
func certificates(t *testing.T, dir string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, kind string, der []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("tls.key", "PRIVATE KEY", secret)
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	var client tls.Certificate
	for i, name := range []string{"ca.crt", "server.crt", "client.crt"} {
		c := ca
		switch i {
		case 1:
			c = &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: ca.NotAfter, DNSNames: []string{"kvlane.test"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
		case 2:
			c = &x509.Certificate{SerialNumber: big.NewInt(3), NotAfter: ca.NotAfter, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		}
		der, err := x509.CreateCertificate(rand.Reader, c, ca, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		write(name, "CERTIFICATE", der)
		client = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	}
	return client
}

// With listen.client_ca_file Envoy works by its certificate, and nothing answers a client
// without one: no pick, no list of workers, no push. Pushed events have a port of their own.
func TestOnlyEnvoyReachesKvlane(t *testing.T) {
	dir := t.TempDir()
	client := certificates(t, dir)
	ports, err := enginesim.FreePorts(3)
	if err != nil {
		t.Fatal(err)
	}
	address := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", ports+i) }
	b := newBed(t, shape{
		engines: 1, ranks: 1,
		listen: fmt.Sprintf("address: %q, events: %q, health: %q, cert_file: %[4]s/server.crt, key_file: %[4]s/tls.key, client_ca_file: %[4]s/ca.crt, tls_min_version: VersionTLS13", address(0), address(1), address(2), dir),
		envoy:  fmt.Sprintf(", client_cert_file: %[1]s/client.crt, client_key_file: %[1]s/tls.key, ca_file: %[1]s/ca.crt, server_name: kvlane.test", dir),
	})
	if r := b.chat(message{"user", prose("mtls", 100)}); r.status != http.StatusOK || r.target == "" {
		t.Fatalf("got status %d from %q, want 200 from a picked worker", r.status, r.target)
	}
	with := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{client}})
	without := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	old := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{client}, MaxVersion: tls.VersionTLS12})
	call := func(address string, creds credentials.TransportCredentials, method string) codes.Code {
		conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		switch method {
		case "health":
			_, err = grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		case "xds":
			var s grpc.BidiStreamingClient[discoveryv3.DiscoveryRequest, discoveryv3.DiscoveryResponse]
			if s, err = discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx); err == nil {
				_ = s.Send(&discoveryv3.DiscoveryRequest{TypeUrl: "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", ResourceNames: []string{"model_servers"}})
				_, err = s.Recv()
			}
		case "push":
			var s grpc.BidiStreamingClient[kvlanev1.PushRequest, kvlanev1.PushResponse]
			if s, err = kvlanev1.NewKVEventsClient(conn).Push(ctx); err == nil {
				_ = s.CloseSend()
				_, err = s.Recv()
			}
		}
		return status.Code(err)
	}
	const main, events, health = 0, 1, 2
	for _, c := range []struct {
		name   string
		port   int
		creds  credentials.TransportCredentials
		method string
		want   codes.Code
	}{
		{"the workers, with a certificate", main, with, "xds", codes.OK},
		{"the workers, by an older TLS", main, old, "xds", codes.Unavailable},
		{"the workers, without", main, without, "xds", codes.Unavailable},
		{"the workers, in plaintext", main, insecure.NewCredentials(), "xds", codes.Unavailable},
		{"health, without", main, without, "health", codes.Unavailable},
		{"a push, without", events, without, "push", codes.Unavailable},
		{"a push, in plaintext", events, insecure.NewCredentials(), "push", codes.Unavailable},
		{"a push to Envoy's port", main, with, "push", codes.Unimplemented},
		{"the workers from the relays' port", events, with, "xds", codes.Unimplemented},
		{"a probe", health, insecure.NewCredentials(), "health", codes.OK},
		{"the workers from the probes' port", health, insecure.NewCredentials(), "xds", codes.Unimplemented},
	} {
		if got := call(address(c.port), c.creds, c.method); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
	if got := call(address(events), with, "push"); got == codes.Unimplemented || got == codes.Unavailable {
		t.Errorf("a push with a certificate: got %v, want the service's own answer", got)
	}
}

package observe

import (
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel"

	"github.com/kvlane/kvlane/extproc"
)

// A collector that refuses each batch, with a page about it, does not fill the log.
func TestErrorsOfACollectorAreBounded(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
	var out strings.Builder
	tracer, err := NewTracer(t.Context(), "test", zerolog.New(&out))
	if err != nil {
		t.Fatal(err)
	}
	defer tracer.Close()
	for range 100 {
		otel.Handle(errors.New("400 Bad Request: " + strings.Repeat("x", 1<<20)))
	}
	got := out.String()
	if n := strings.Count(got, "spans not exported"); n != 2 || len(got) > 2000 || !strings.Contains(got, "400 Bad Request") {
		t.Errorf("got %d lines of %d bytes for 100 errors, want 2 short ones: %.300s", n, len(got), got)
	}
}

// A collector whose certificate cannot be verified is said with what to correct, by both protocols; spans reach one that is
// trusted, and an error of another kind has no such advice.
func TestCertificateOfACollectorIsAdvised(t *testing.T) {
	var spans atomic.Int32
	collector := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { spans.Add(1) }))
	collector.Config.ErrorLog = log.New(io.Discard, "", 0)
	collector.EnableHTTP2 = true
	collector.StartTLS()
	defer collector.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: collector.Certificate().Raw})
	if err := os.WriteFile(ca, text, 0o600); err != nil {
		t.Fatal(err)
	}
	const unknown, advice = "x509: certificate signed by unknown authority", ": correct OTEL_EXPORTER_OTLP_CERTIFICATE, the collector's certificate, or a clock"
	const handshake = "authentication handshake failed: tls: failed to verify certificate: " + unknown // as gRPC says it
	for _, c := range []struct {
		protocol, endpoint, ca string
		want                   string // of the error
	}{ // in this order, as errors of the one before may come late
		{"http/protobuf", collector.URL, ca, ""},
		{"http/protobuf", "http://127.0.0.1:1", "", "connection refused"},
		{"http/protobuf", collector.URL, "", unknown},
		{"grpc", collector.URL, "", handshake},
	} {
		t.Run(fmt.Sprint(c.protocol, " ", c.ca != "", " ", c.want), func(t *testing.T) {
			for name, value := range map[string]string{"ENDPOINT": c.endpoint, "PROTOCOL": c.protocol, "CERTIFICATE": c.ca, "TIMEOUT": "2000"} {
				t.Setenv("OTEL_EXPORTER_OTLP_"+name, value)
			}
			t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
			var out guarded
			tracer, err := NewTracer(t.Context(), "test", zerolog.New(&out))
			if err != nil {
				t.Fatal(err)
			}
			defer tracer.Close()
			before, got := spans.Load(), ""
			// On a busy machine a handshake may take longer than the exporter waits.
			for end := time.Now().Add(time.Minute); time.Now().Before(end); {
				e := &Entry{At: time.Now()}
				tracer.Start(e, &extproc.Request{})
				e.endSpan(time.Now(), http.StatusOK)
				time.Sleep(50 * time.Millisecond)
				if got = out.String(); spans.Load() > before || c.want != "" && strings.Contains(got, c.want) {
					break
				}
			}
			if !strings.Contains(got, c.want) || strings.Contains(got, advice) != strings.HasSuffix(c.want, unknown) || c.want == "" && got != "" {
				t.Errorf("got the log %q, want %q", got, c.want)
			}
			if arrived := spans.Load() > before; arrived != (c.want == "") {
				t.Errorf("spans arrived: got %v", arrived)
			}
		})
	}
}

// guarded is a log that is written and read concurrently.
type guarded struct {
	mu   sync.Mutex
	text strings.Builder
}

func (g *guarded) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.text.Write(p)
}

func (g *guarded) String() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.text.String()
}

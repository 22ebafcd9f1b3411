package observe

import (
	"errors"
	"strings"
	"testing"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel"
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

package decide

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
)

// collector is an OTLP collector on loopback.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer

	t      *testing.T
	tracer *observe.Tracer
	mu     sync.Mutex
	spans  []*tracepb.Span
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{t: t}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		var req collectorpb.ExportTraceServiceRequest
		if err := proto.Unmarshal(text, &req); err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("got %s %v, want spans at /v1/traces", r.URL.Path, err)
		}
		_, _ = c.Export(r.Context(), &req)
	}))
	t.Cleanup(srv.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", srv.URL)
	var err error
	if c.tracer, err = observe.NewTracer(context.Background(), "test", zerolog.Nop()); err != nil || c.tracer == nil {
		t.Fatalf("got %v, %v, want a tracer", c.tracer, err)
	}
	t.Cleanup(c.tracer.Close)
	return c
}

// named returns the spans with a name, after all were exported.
func (c *collector) named(name string) (out []*tracepb.Span) {
	c.t.Helper()
	c.tracer.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if s.GetName() == name {
			out = append(out, s)
		}
	}
	return out
}

func (c *collector) one(name string) *tracepb.Span {
	c.t.Helper()
	spans := c.named(name)
	if len(spans) != 1 {
		c.t.Fatalf("got %d spans %q, want 1", len(spans), name)
	}
	return spans[0]
}

func attributes(s *tracepb.Span) map[string]any {
	out := map[string]any{}
	for _, a := range s.GetAttributes() {
		if v := a.GetValue().GetStringValue(); v != "" {
			out[a.GetKey()] = v
		} else {
			out[a.GetKey()] = a.GetValue().GetIntValue()
		}
	}
	return out
}

func wantAttributes(t *testing.T, s *tracepb.Span, want map[string]any) {
	t.Helper()
	got := attributes(s)
	for key, v := range want {
		if got[key] != v {
			t.Errorf("span %s, %s: got %v, want %v", s.GetName(), key, got[key], v)
		}
	}
}

const (
	traceID     = "0af7651916cd43dd8448eb211c80319c"
	traceparent = "00-" + traceID + "-b7ad6b7169203331-01"
)

func TestARequestIsTracedFromTheClientsTraceToItsEnd(t *testing.T) {
	c := newCollector(t)
	b := newBench(t, "routing: {wait: {max_requests: 8, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0))
	first, _ := b.ask("/v1/completions", completion(10, ""))
	b.tracer = c.tracer // the first request is not traced
	waiter := b.send(1, "traceparent", traceparent)
	first.Ticket.End(time.Now())
	d := <-waiter.done
	b.tracer = nil
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	d.Ticket.FirstToken(time.Now())
	d.Ticket.ResponseBody([]byte(`{"usage":{"prompt_tokens":11,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}`), true)
	d.Ticket.End(time.Now())
	if n := len(c.named("text_completion demo")); n != 1 {
		t.Fatalf("got %d spans of requests, want one", n)
	}
	root, decision, wait := c.one("text_completion demo"), c.one("decision"), c.one("wait")
	if got := hex.EncodeToString(root.GetParentSpanId()); got != "b7ad6b7169203331" || hex.EncodeToString(root.GetTraceId()) != traceID {
		t.Errorf("got parent %s in trace %x, want the client's", got, root.GetTraceId())
	}
	wantAttributes(t, root, map[string]any{
		"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "demo", "gen_ai.usage.input_tokens": int64(11),
		"gen_ai.usage.output_tokens": int64(7), "gen_ai.usage.cache_read.input_tokens": int64(4), "http.response.status_code": int64(200),
	})
	e := b.decisions.Find(waiter.id)
	host, port, _ := net.SplitHostPort(e.Endpoint)
	if n, _ := strconv.Atoi(port); host == "" || n == 0 {
		t.Errorf("got endpoint %q, want host and port", e.Endpoint)
	} else {
		wantAttributes(t, root, map[string]any{"server.address": host, "server.port": int64(n), "error.type": nil})
	}
	wantAttributes(t, decision, map[string]any{"kvlane.target": "a", "kvlane.matched_tokens": e.Matched, "kvlane.prompt_tokens": e.PromptTokens})
	if string(decision.GetParentSpanId()) != string(root.GetSpanId()) || string(wait.GetParentSpanId()) != string(decision.GetSpanId()) {
		t.Error("got other parents, want wait below decision below request")
	}
	if got := time.Duration(wait.GetEndTimeUnixNano() - wait.GetStartTimeUnixNano()); got != e.Waited {
		t.Errorf("got a wait of %v, want %v", got, e.Waited)
	}
	for _, stage := range []string{"queue", "parse", "tokens", "plan"} {
		if s := c.one(stage); string(s.GetParentSpanId()) != string(decision.GetSpanId()) || s.GetStartTimeUnixNano() < decision.GetStartTimeUnixNano() || s.GetEndTimeUnixNano() > decision.GetEndTimeUnixNano() {
			t.Errorf("%s: got a span outside of the decision", stage)
		}
	}
}

// The stages of a decision by cache are spans, one after the other.
func TestStagesOfADecisionAreSpans(t *testing.T) {
	c := newCollector(t)
	b := newBench(t, "", worker("a", 0), worker("b", 0))
	b.tracer = c.tracer
	d, _ := b.ask("/v1/completions", completion(200, ""))
	d.Ticket.End(time.Now())
	decision, at := c.one("decision"), uint64(0)
	for _, stage := range []string{"queue", "parse", "tokens", "hash", "index", "plan"} {
		s := c.one(stage)
		if string(s.GetParentSpanId()) != string(decision.GetSpanId()) || s.GetStartTimeUnixNano() < at || s.GetEndTimeUnixNano() < s.GetStartTimeUnixNano() {
			t.Errorf("%s: got a span from %d to %d, want one below the decision that begins at %d or later", stage, s.GetStartTimeUnixNano(), s.GetEndTimeUnixNano(), at)
		}
		at = s.GetEndTimeUnixNano()
	}
	if at != decision.GetEndTimeUnixNano() {
		t.Errorf("got the last stage's end at %d, want that of the decision, %d", at, decision.GetEndTimeUnixNano())
	}
}

// The series by model have the trace as exemplar in a scrape that asks for OpenMetrics, and only there.
func TestSeriesHaveExemplars(t *testing.T) {
	c := newCollector(t)
	b := newBench(t, "", worker("a", 0))
	ask := func(header ...string) {
		d := b.Decide(t.Context(), b.request("/v1/completions", `{"model": "demo", "stream": true, "prompt": "hi"}`, header...))
		d.Ticket.ResponseHeaders(200, d.Endpoint)
		d.Ticket.FirstToken(time.Now())
		d.Ticket.ResponseBody([]byte("data: {\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n"), true)
		d.Ticket.End(time.Now())
	}
	scrape := func(accept string) string {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody)
		r.Header.Set("Accept", accept)
		promhttp.HandlerFor(b.metrics.Registry, promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, r)
		return w.Body.String()
	}
	const openMetrics = "application/openmetrics-text; version=1.0.0"
	ask()
	if text := scrape(openMetrics); strings.Contains(text, "trace_id") {
		t.Error("got an exemplar of a request that is not traced")
	}
	b.tracer = c.tracer
	ask("traceparent", traceparent)
	text := scrape(openMetrics)
	for series, value := range map[string]string{
		`kvlane_request_duration_seconds_bucket{model="demo",le=`: "", `kvlane_time_to_first_token_seconds_bucket{model="demo",le=`: "",
		`kvlane_time_per_output_token_seconds_bucket{model="demo",le=`: "",
		`kvlane_input_tokens_total{model="demo"}`:                      " 22.0", `kvlane_cached_tokens_total{model="demo"}`: " 8.0", `kvlane_output_tokens_total{model="demo"}`: " 14.0",
	} {
		if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + `.*` + regexp.QuoteMeta(value) + ` # \{trace_id="` + traceID + `"\} `).MatchString(text) {
			t.Errorf("%s%s: got no exemplar of the trace:\n%s", series, value, regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(series)+`.*`).FindAllString(text, -1))
		}
	}
	if text := scrape("text/plain"); strings.Contains(text, "trace_id") || !strings.Contains(text, `kvlane_input_tokens_total{model="demo"} 22`) {
		t.Error("got an exemplar, or no counter, in a scrape that does not ask for OpenMetrics")
	}
}

func TestARejectionIsTraced(t *testing.T) {
	c := newCollector(t)
	b := newBench(t, "") // no worker
	b.tracer = c.tracer
	if d, _ := b.ask("/v1/completions", completion(10, "")); d.Reject == nil {
		t.Fatal("got a decision, want a rejection")
	}
	root := c.one("text_completion demo")
	wantAttributes(t, root, map[string]any{"http.response.status_code": int64(503), "error.type": "kvlane_no_eligible_worker", "gen_ai.provider.name": "kvlane", "server.address": nil})
	wantAttributes(t, c.one("decision"), map[string]any{"kvlane.reason": "kvlane_no_eligible_worker"})
	if root.GetStatus().GetCode() != tracepb.Status_STATUS_CODE_ERROR {
		t.Errorf("got status %v, want an error", root.GetStatus())
	}
}

// A client's bytes that are not UTF-8 cost no spans, of its request or of others in the batch.
func TestTextsOfClientsThatAreNotUTF8AreTraced(t *testing.T) {
	c := newCollector(t)
	b := newBench(t, "", worker("a", 0))
	b.tracer = c.tracer
	r := b.request("/caf\xe9/v1/completions", completion(10, ""), "x-session-id", "caf\xe9")
	r.ID = "caf\xe9"
	for _, r := range []*extproc.Request{r, b.request("/v1/completions", completion(10, ""))} {
		d := b.Decide(t.Context(), r)
		d.Ticket.ResponseHeaders(200, d.Endpoint)
		d.Ticket.End(time.Now())
	}
	roots, decisions := c.named("text_completion demo"), c.named("decision")
	if len(roots) != 2 || len(decisions) != 2 {
		t.Fatalf("got %d requests and %d decisions, want 2 of both", len(roots), len(decisions))
	}
	wantAttributes(t, roots[0], map[string]any{"url.path": "/caf\ufffd/v1/completions", "kvlane.request_id": "caf\ufffd", "gen_ai.conversation.id": "caf\ufffd"})
	wantAttributes(t, roots[1], map[string]any{"url.path": "/v1/completions", "kvlane.request_id": "r2"})
}

func TestAPrefillLegIsTraced(t *testing.T) {
	p := newPoolsOf(t, "nixl")
	c := newCollector(t)
	p.tracer = c.tracer
	d := p.ask(context.Background(), "r1")
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	d.Ticket.End(time.Now())
	leg := c.one("leg")
	if to, _ := attributes(leg)["kvlane.target"].(string); !strings.HasPrefix(to, "p") || leg.GetKind() != tracepb.Span_SPAN_KIND_CLIENT {
		t.Errorf("got a leg to %q of kind %v, want a client's to a prefill worker", to, leg.GetKind())
	}
}

// Without a collector no request has a span, and no more is allocated.
func TestTracingIsOffWithoutACollector(t *testing.T) {
	for _, env := range [][2]string{{"", ""}, {"OTEL_SDK_DISABLED", "true"}, {"OTEL_TRACES_EXPORTER", "none"}} {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
		if env[0] != "" {
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
			t.Setenv(env[0], env[1])
		}
		if tracer, err := observe.NewTracer(context.Background(), "test", zerolog.Nop()); tracer != nil || err != nil {
			t.Errorf("%v: got %v, %v, want no tracer", env, tracer, err)
		}
	}
	var off *observe.Tracer
	b := newBench(t, "", worker("a", 0))
	r := b.request("/v1/completions", completion(10, ""), "traceparent", traceparent)
	_, e := b.ask("/v1/completions", completion(10, ""))
	if n := testing.AllocsPerRun(100, func() {
		off.Start(e, r)
		off.Decided(e, time.Time{}, false)
	}); n != 0 {
		t.Errorf("got %v allocations by a tracer that is off, want none", n)
	}
}

// traceAllocations is the number of allocations in tracing, ours or the SDK's, since the process began.
func traceAllocations() (n int64) {
	for range 3 { // the profile is that of the last collection but one
		runtime.GC()
	}
	records := make([]runtime.MemProfileRecord, 1<<17)
	size, _ := runtime.MemProfile(records, true)
	for i := range records[:min(size, len(records))] {
		for frames, more := runtime.CallersFrames(records[i].Stack()), true; more; {
			var f runtime.Frame
			if f, more = frames.Next(); strings.Contains(f.Function, "opentelemetry") || strings.HasSuffix(f.File, "/internal/observe/trace.go") {
				n += records[i].AllocObjects
				break
			}
		}
	}
	return n
}

// A whole request allocates nothing in tracing without a collector.
func TestARequestAllocatesNothingForTracesThatAreOff(t *testing.T) {
	defer func(rate int) { runtime.MemProfileRate = rate }(runtime.MemProfileRate)
	runtime.MemProfileRate = 1
	b := newBench(t, "", worker("a", 0))
	for _, traced := range []bool{false, true} {
		if traced {
			b.tracer = newCollector(t).tracer
		}
		before := traceAllocations()
		d, _ := b.ask("/v1/completions", completion(200, ""), "traceparent", traceparent)
		d.Ticket.ResponseHeaders(200, d.Endpoint)
		d.Ticket.End(time.Now())
		if n := traceAllocations() - before; (n > 0) != traced {
			t.Errorf("traced %v: got %d allocations in tracing, want some: %v", traced, n, traced)
		}
	}
}

// Export implements the collector's gRPC service.
func (c *collector) Export(_ context.Context, req *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range req.GetResourceSpans() {
		for _, s := range rs.GetScopeSpans() {
			c.spans = append(c.spans, s.GetSpans()...)
		}
	}
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

func TestSpansAreExportedByGRPC(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &collector{t: t}
	srv := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(srv, c)
	go func() { _ = srv.Serve(lis) }()
	t.Cleanup(srv.Stop)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+lis.Addr().String())
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	if c.tracer, err = observe.NewTracer(context.Background(), "test", zerolog.Nop()); err != nil {
		t.Fatal(err)
	}
	b := newBench(t, "")
	b.tracer = c.tracer
	b.ask("/v1/completions", completion(10, ""))
	c.one("decision")
}

func TestWrongVariablesOfTraces(t *testing.T) {
	const endpoint, traces, protocol, sampler, arg = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
	for _, c := range []struct {
		env       map[string]string
		err, warn string
	}{
		{map[string]string{protocol: "carrier-pigeon"}, "http/protobuf or grpc", ""},
		{map[string]string{endpoint: "127.0.0.1:4318"}, endpoint + "=127.0.0.1:4318: want a URL such as http://collector:4318", ""},
		{map[string]string{endpoint: "collector:4317", protocol: "grpc"}, endpoint + "=collector:4317: want a URL", ""},
		{map[string]string{traces: "collector"}, traces + "=collector: want a URL", ""},
		{map[string]string{endpoint: "http://"}, "want a URL", ""},
		{map[string]string{endpoint: "unix:///none", protocol: "grpc"}, "", ""},
		{map[string]string{sampler: "sometimes"}, "", "unsupported sampler: sometimes"},
		{map[string]string{sampler: "traceidratio", arg: "2"}, "", "OTEL_TRACES_SAMPLER_ARG is wrong"},
		{map[string]string{sampler: "traceidratio", arg: "0.5"}, "", ""},
	} {
		t.Run(fmt.Sprint(c.env), func(t *testing.T) {
			t.Setenv(endpoint, "http://127.0.0.1:1")
			for name, value := range c.env {
				t.Setenv(name, value)
			}
			var log bytes.Buffer
			tracer, err := observe.NewTracer(context.Background(), "test", zerolog.New(&log))
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("got %v, want an error with %q", err, c.err)
			}
			tracer.Close()
			if got := log.String(); !strings.Contains(got, c.warn) || (got == "") != (c.warn == "") {
				t.Errorf("got log %q, want %q", got, c.warn)
			}
		})
	}
}

// The collector answers only when the tracer has been closed.
func TestACollectorThatHangsDoesNotHoldTheEnd(t *testing.T) {
	closed := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-closed }))
	t.Cleanup(srv.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", srv.URL)
	tracer, err := observe.NewTracer(context.Background(), "test", zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, "")
	b.tracer = tracer
	b.ask("/v1/completions", completion(10, ""))
	tracer.Close()
	close(closed)
}

package observe

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvlane/kvlane/extproc"
)

// Tracer makes a span for each request, with child spans for the decision, its stages, the wait for capacity and the
// prefill leg. It exports them by OTLP. A nil Tracer does nothing.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// NewTracer returns a Tracer that is configured by OpenTelemetry's environment variables; nil without an OTLP endpoint for
// traces. Close ends it.
func NewTracer(ctx context.Context, version string, log zerolog.Logger) (*Tracer, error) {
	name := "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	if os.Getenv(name) == "" {
		name = "OTEL_EXPORTER_OTLP_ENDPOINT"
	}
	endpoint := os.Getenv(name)
	if endpoint == "" || os.Getenv("OTEL_SDK_DISABLED") == "true" || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return nil, nil
	}
	// The SDK takes "collector:4318" as a URL without a host and would drop every span.
	u, err := url.Parse(strings.TrimSpace(endpoint))
	if err != nil || u.Host == "" && u.Scheme != "unix" || !slices.Contains([]string{"http", "https", "unix"}, strings.ToLower(u.Scheme)) {
		return nil, fmt.Errorf("%s=%s: want a URL such as http://collector:4318", name, endpoint)
	}
	var client otlptrace.Client
	switch protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), "http/protobuf"); protocol {
	case "http/protobuf":
		client = otlptracehttp.NewClient()
	case "grpc":
		client = otlptracegrpc.NewClient()
	default:
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%s: want http/protobuf or grpc", protocol)
	}
	exporter, err := otlptrace.New(ctx, client)
	if err != nil {
		return nil, err
	}
	res, err := resource.New(ctx, resource.WithTelemetrySDK(),
		resource.WithAttributes(attribute.String("service.name", "kvlane"), attribute.String("service.version", version)), resource.WithFromEnv())
	if err != nil {
		return nil, err
	}
	log = log.Sample(&zerolog.BurstSampler{Burst: 2, Period: 10 * time.Second}) // each batch may fail
	warn := func(text string) {
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
			err = Certificate(err, "OTEL_EXPORTER_OTLP_CERTIFICATE, the collector's certificate")
			log.Warn().Str("error", fmt.Sprintf("%.512s", err)).Msg(text)
		}))
	}
	warn("OTEL_TRACES_SAMPLER or OTEL_TRACES_SAMPLER_ARG is wrong: all requests are traced")
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
	warn("spans not exported")
	return &Tracer{provider, provider.Tracer("github.com/kvlane/kvlane")}, nil
}

// Close exports what is left, for at most 2 s, so that a collector that hangs does not delay the end of the process.
func (t *Tracer) Close() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = t.provider.Shutdown(ctx) // reported by the error handler
}

// Start starts the span of a request. Its parent is the traceparent header's.
func (t *Tracer) Start(e *Entry, r *extproc.Request) {
	if t == nil {
		return
	}
	parent := propagation.MapCarrier{}
	for _, name := range []string{"traceparent", "tracestate"} {
		value, _ := r.Header(name)
		parent[name] = strings.Clone(value) // the span stays, the other headers need not
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), parent)
	_, e.span = t.tracer.Start(ctx, "request", trace.WithTimestamp(e.At), trace.WithSpanKind(trace.SpanKindServer)) //nolint:spancheck // endSpan ends it
}

// operations are the GenAI semantic conventions' names of the APIs; the others are named as in metrics.
var operations = map[string]string{"messages": "chat", "responses": "chat", "completions": "text_completion"}

// kinds are the span kinds of stages; all others are internal.
var kinds = map[string]trace.SpanKind{StageLeg.String(): trace.SpanKindClient}

// Decided records in the request's span that its decision ended at end. final also ends the span: no Answer follows.
func (t *Tracer) Decided(e *Entry, end time.Time, final bool) {
	if e == nil || e.span == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if final {
		defer e.endSpan(end, cmp.Or(e.Rejected, e.After.Status))
	}
	if !e.span.IsRecording() {
		return
	}
	operation := cmp.Or(operations[e.API], e.API)
	e.span.SetName(operation + " " + e.Model)
	host, port, _ := net.SplitHostPort(e.Endpoint)
	if n, err := strconv.Atoi(port); err == nil {
		e.span.SetAttributes(attribute.String("server.address", host), attribute.Int("server.port", n))
	}
	if e.Conversation != "" {
		e.span.SetAttributes(attribute.String("gen_ai.conversation.id", e.Conversation))
	}
	// A request without a target is answered by Kvlane.
	e.span.SetAttributes(attribute.String("gen_ai.provider.name", cmp.Or(e.Engine, "kvlane")),
		attribute.String("gen_ai.operation.name", operation), attribute.String("gen_ai.request.model", e.Model),
		attribute.String("http.request.method", e.Method), attribute.String("url.path", e.Path), attribute.String("kvlane.request_id", e.ID))
	ctx := trace.ContextWithSpan(context.Background(), e.span)
	at := end
	for _, s := range e.Stages {
		at = at.Add(-s.Took)
	}
	ctx, decision := t.tracer.Start(ctx, "decision", trace.WithTimestamp(at))
	decision.SetAttributes(attribute.String("kvlane.target", e.Target), attribute.Int64("kvlane.prompt_tokens", e.PromptTokens),
		attribute.Int64("kvlane.matched_tokens", e.Matched), attribute.String("kvlane.via", e.Via))
	for _, a := range []attribute.KeyValue{
		attribute.String("kvlane.degraded", e.Degraded), attribute.String("kvlane.prefill_target", e.Prefill), attribute.String("kvlane.reason", e.Reason),
	} {
		if a.Value.AsString() != "" {
			decision.SetAttributes(a)
		}
	}
	for _, s := range e.Stages {
		_, span := t.tracer.Start(ctx, s.Stage, trace.WithTimestamp(at), trace.WithSpanKind(kinds[s.Stage]))
		at = at.Add(s.Took)
		if s.Stage == StageLeg.String() {
			span.SetAttributes(attribute.String("kvlane.target", e.Prefill))
			for _, note := range e.PrefillNotes {
				span.AddEvent(note, trace.WithTimestamp(at))
			}
		}
		span.End(trace.WithTimestamp(at))
	}
	decision.End(trace.WithTimestamp(end))
}

// endSpan ends the request's span at the end of its answer. status is the client's, 0 if it got none.
func (e *Entry) endSpan(at time.Time, status int) {
	if e == nil || e.span == nil {
		return
	}
	if status != 0 {
		e.span.SetAttributes(attribute.Int("http.response.status_code", status))
	}
	if status == 0 || status >= 500 {
		e.span.SetStatus(codes.Error, http.StatusText(status))
		e.span.SetAttributes(attribute.String("error.type", cmp.Or(e.Reason, strings.TrimPrefix(strconv.Itoa(status), "0"), "_OTHER")))
	}
	e.span.End(trace.WithTimestamp(at))
}

// exemplar returns the labels of an exemplar, nil if the request's trace is not sampled.
func (e *Entry) exemplar() prometheus.Labels {
	if e.span == nil || !e.span.SpanContext().IsSampled() {
		return nil
	}
	return prometheus.Labels{"trace_id": e.span.SpanContext().TraceID().String()}
}

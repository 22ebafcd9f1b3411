// Package observe is Kvlane's observability: the metrics, the decision log, the debug pages and the logger.
package observe

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/kvindex"
)

// Stage is a part of the time from the last body byte to the answer.
type Stage int

const (
	StageQueue Stage = iota // until a processor is free
	StageParse
	StageTokens
	StageHash
	StageIndex
	StagePlan
	StageLeg
	StageTotal
	numStages
)

var stageNames = [numStages]string{"queue", "parse", "tokens", "hash", "index", "plan", "leg", "total"}

// String is the metric's label.
func (s Stage) String() string { return stageNames[s] }

// Metrics are the metrics counted on the request path; those that can be derived from state are collected on demand
// (see Collect). The help texts in New say what each one counts. Safe for concurrent use.
type Metrics struct {
	Registry *prometheus.Registry

	// Of requests. A request is unrouted if its client disconnected or its decision panicked, answered if it needed no
	// worker.
	Requests, FirstTurns, Rejected, Degraded *prometheus.CounterVec
	// Of the policies of routing.shadow, and of the one that acts, as "live".
	Shadows, ShadowMiss, ShadowQueue *prometheus.CounterVec
	// Of targets. MatchedTokens has the sources "event" and "speculative".
	Picks, PromptTokens, MatchedTokens *prometheus.CounterVec
	// Of workers. Predicted and Observed are sums over the same answers: their ratio shows the error of predictions.
	Moved, Predicted, Observed, Responses, Flags, Checks, Legs *prometheus.CounterVec

	FirstToken *prometheus.HistogramVec // from the decision, by worker

	ExtProcStreams                   *prometheus.GaugeVec
	ExtProcMessages, ExtProcFailures *prometheus.CounterVec
	ExtProcAnswers                   *prometheus.HistogramVec
	LateFirstTokens                  prometheus.Counter

	Reloads, TokenChecks, Renders *prometheus.CounterVec
	ReplicasDelay                 prometheus.Observer

	stages  [numStages]prometheus.Observer
	answers answers
	vectors []*prometheus.MetricVec // all counters and histograms with labels
}

// Decision times range from microseconds (a repeated short prompt) to a second. They do not include the prefill leg,
// which is a separate stage.
var decisionBuckets = []float64{
	10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1,
}

// answerBuckets range from short completions to long generations, in seconds.
var answerBuckets = []float64{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640}

// ratioBuckets are for an observed time divided by a predicted one. Between 0.83 and 1.25 the error is at most 20 % of
// the observed time.
var ratioBuckets = []float64{0.25, 0.5, 0.67, 0.83, 0.9, 1, 1.1, 1.25, 1.5, 2, 4}

// New returns metrics in their own registry, which also has those of Go and of the process.
func New(version string) *Metrics {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m := &Metrics{Registry: reg}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvlane", Name: name, Help: help}, labels)
		reg.MustRegister(c)
		m.vectors = append(m.vectors, c.MetricVec)
		return c
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kvlane", Name: name, Help: help, Buckets: buckets}, labels)
		reg.MustRegister(h)
		m.vectors = append(m.vectors, h.MetricVec)
		return h
	}
	m.Requests = counter("requests_total", "Requests by API and outcome (routed, unrouted, rejected, answered).", "api", "outcome")
	m.Rejected = counter("rejected_total", "Requests answered by Kvlane itself, by status and reason.", "status", "reason")
	m.Degraded = counter("degraded_total", "Decisions that lacked useful information, by reason.", "reason")
	m.Shadows = counter("shadow_decisions_total", "Decisions compared with a policy of routing.shadow, by result (same or differs: the target).", "policy", "result")
	m.ShadowMiss = counter("shadow_uncached_tokens_total", "Uncached prompt tokens on the target that a policy of routing.shadow would choose; policy live is the actual choice.", "policy")
	m.ShadowQueue = counter("shadow_queued_tokens_total", "Tokens queued on that target before the request.", "policy")
	m.FirstTurns = counter("first_turns_total", "Requests with an unknown conversation id, by API.", "api")
	m.Picks = counter("picks_total", "Requests sent to a target.", "worker", "rank", "leg")
	m.PromptTokens = counter("prompt_tokens_total", "Prompt tokens of answered requests, by the target that computed the prompt.", "worker", "rank")
	m.MatchedTokens = counter("matched_tokens_total", "Prompt tokens of answered requests that the target was predicted to hold, by source (event, speculative).", "worker", "rank", "source")
	m.Moved = counter("moved_total", "Requests served by another endpoint than the pick.", "worker")
	m.Predicted = counter("predicted_cached_tokens_total", "Cached tokens predicted, over answers whose usage was seen.", "worker")
	m.Observed = counter("observed_cached_tokens_total", "Cached tokens reported by engines, over answers whose usage was seen.", "worker")
	m.Responses = counter("responses_total", "Responses by worker and status class.", "worker", "class")
	m.Flags = counter("envoy_flags_total", "Failures of decided requests in Envoy's access log, by worker and response flag.", "worker", "flag")
	m.FirstToken = histogram("first_token_seconds", "Time from the decision to the first token.", prometheus.ExponentialBuckets(0.005, 2, 15), "worker")
	m.ExtProcMessages = counter("extproc_messages_total", "ext_proc messages received, by kind.", "kind")
	m.ExtProcFailures = counter("extproc_failures_total", "Protocol failures survived, by kind.", "kind")
	m.Checks = counter("health_checks_total", "Health checks by worker and outcome.", "worker", "outcome")
	m.Reloads = counter("config_reloads_total", "Reloads of the configuration, by result (taken, unchanged, rejected).", "result")
	m.Legs = counter("prefill_legs_total", "Prefill legs by worker and outcome.", "worker", "outcome")
	m.Renders = counter("renders_total", "Calls to remote renderers, by model and outcome (ok, refused, failed, breaker_open).", "model", "outcome")
	m.TokenChecks = counter("token_checks_total", "Comparisons with the engine's tokenizer, by model, worker, API and outcome.", "model", "worker", "api", "outcome")
	m.LateFirstTokens = counter("extproc_late_first_tokens_total",
		"Answers whose first piece was observed after their end: usual for answers that come in one piece.").WithLabelValues()
	m.ExtProcStreams = prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "kvlane", Name: "extproc_streams", Help: "Open ext_proc streams, by request body mode."}, []string{"mode"})
	reg.MustRegister(m.ExtProcStreams)
	m.ExtProcAnswers = histogram("extproc_answer_seconds", "Time from the last body byte to the last byte of the decision handed to gRPC, by request body mode.", decisionBuckets, "mode")
	m.ReplicasDelay = histogram("replicas_delay_seconds", "Time from a change at another replica to its effect here, by their wall clocks.", decisionBuckets).WithLabelValues()
	stages := histogram("decision_seconds", "Time from the last body byte to the answer, by stage.", decisionBuckets, "stage")
	for s := range numStages {
		m.stages[s] = stages.WithLabelValues(s.String())
	}
	m.answers = answers{
		byModel:       map[string]*modelSeries{},
		duration:      histogram("request_duration_seconds", "Time from the arrival of a request to the end of its answer.", answerBuckets, "model"),
		firstToken:    histogram("time_to_first_token_seconds", "Time from the arrival of a request to its first token.", prometheus.ExponentialBuckets(0.005, 2, 15), "model"),
		perToken:      histogram("time_per_output_token_seconds", "Mean time between the output tokens of a streamed answer whose usage was seen.", prometheus.ExponentialBuckets(0.001, 2, 12), "model"),
		firstRatio:    histogram("first_token_prediction_ratio", "Time from the decision to the first token of a streamed answer, divided by the predicted time.", ratioBuckets, "model"),
		perTokenRatio: histogram("per_token_prediction_ratio", "Time per output token of a streamed answer whose usage was seen, divided by the predicted time.", ratioBuckets, "model"),
		targets:       counter("first_token_targets_total", "Streamed answers to requests with a target for the first token, by result (met, missed).", "model", "result"),
		input:         counter("input_tokens_total", "Prompt tokens reported by engines.", "model"),
		cached:        counter("cached_tokens_total", "Prompt tokens reported by engines as read from their caches.", "model"),
		output:        counter("output_tokens_total", "Output tokens reported by engines.", "model"),
	}
	for _, result := range []string{"taken", "unchanged", "rejected"} {
		m.Reloads.WithLabelValues(result)
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "kvlane", Name: "build_info", Help: "Always 1; the version is a label.", ConstLabels: prometheus.Labels{"version": version}})
	info.Set(1)
	reg.MustRegister(info)
	return m
}

// Observe records the duration of a stage.
func (m *Metrics) Observe(s Stage, d time.Duration) { m.stages[s].Observe(d.Seconds()) }

// ForgetWorker deletes all series of a worker.
func (m *Metrics) ForgetWorker(worker string) { m.forget("worker", worker) }

// ForgetModel deletes all series of a model. A later request for it creates new ones.
func (m *Metrics) ForgetModel(model string) {
	m.answers.mu.Lock()
	delete(m.answers.byModel, Clip(model))
	m.answers.mu.Unlock()
	m.forget("model", model)
	m.forget("model", Clip(model))
}

// ForgetWorkers deletes all series of the given workers, in one pass over all series.
func (m *Metrics) ForgetWorkers(gone func(worker string) bool) {
	for _, v := range m.vectors {
		all, _ := series(v)
		for _, labels := range all {
			if gone(labels["worker"]) {
				v.Delete(labels)
			}
		}
	}
}

func (m *Metrics) forget(label, value string) {
	for _, v := range m.vectors {
		v.DeletePartialMatch(prometheus.Labels{label: value})
	}
}

// Collect registers a function that reads gauges, and counters (named *_total), from state
// on each scrape. It must be quick and safe for concurrent use.
func (m *Metrics) Collect(f func(emit Emit)) { m.Registry.MustRegister(collector{f}) }

type collector struct{ f func(emit Emit) }

// Describe sends nothing: the collector is unchecked, because its targets change.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect calls the function. Labels are pairs of name and value.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	c.f(func(name, help string, value float64, labels ...string) {
		names, values := make([]string, 0, len(labels)/2), make([]string, 0, len(labels)/2)
		for i := 0; i+1 < len(labels); i += 2 {
			names, values = append(names, labels[i]), append(values, labels[i+1])
		}
		kind := prometheus.GaugeValue
		if strings.HasSuffix(name, "_total") {
			kind = prometheus.CounterValue
		}
		desc := prometheus.NewDesc("kvlane_"+name, help, names, nil)
		ch <- prometheus.MustNewConstMetric(desc, kind, value, values...)
	})
}

// Rank is the label value of a rank: "" if it is unset, which is not 0.
func Rank(rank int32) string {
	if rank == kvindex.NoRank {
		return ""
	}
	return strconv.Itoa(int(rank))
}

// Logger returns a human-readable logger if w is a terminal, else one that writes JSON lines with times in UTC.
func Logger(w io.Writer, level string) (zerolog.Logger, error) {
	l, err := zerolog.ParseLevel(level)
	if err != nil {
		return zerolog.Nop(), err
	}
	if Terminal(w) { // zerolog quotes values but not messages, which may contain texts of clients and engines
		w = zerolog.ConsoleWriter{Out: w, TimeFormat: "15:04:05.000", TimeLocation: time.UTC, FormatMessage: func(text any) string { return inLine(fmt.Sprint(text)) }}
	}
	at := zerolog.HookFunc(func(e *zerolog.Event, _ zerolog.Level, _ string) {
		e.Str(zerolog.TimestampFieldName, time.Now().UTC().Format("2006-01-02T15:04:05.000Z07:00"))
	})
	return zerolog.New(w).Level(l).Hook(at), nil
}

// Terminal reports whether a reader or writer is a terminal.
func Terminal(f any) bool {
	file, ok := f.(*os.File)
	return ok && isatty.IsTerminal(file.Fd())
}

package observe

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// maxModels bounds the values of the label model. Requests for further models and for unknown ones are counted as
// otherModel.
const (
	maxModels  = 64
	otherModel = "other"
)

// answers are the series of answers by model.
type answers struct {
	duration, firstToken, perToken *prometheus.HistogramVec
	firstRatio, perTokenRatio      *prometheus.HistogramVec
	input, cached, output, targets *prometheus.CounterVec

	mu      sync.Mutex
	byModel map[string]*modelSeries
}

// modelSeries are the series of one model.
type modelSeries struct {
	duration, firstToken, perToken prometheus.Observer
	firstRatio, perTokenRatio      prometheus.Observer
	input, cached, output          prometheus.Counter
	met, missed                    prometheus.Counter
}

// of returns the series of a known model; "" stands for any other.
func (a *answers) of(model string) *modelSeries {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.byModel[model]; s != nil {
		return s
	}
	name := Clip(model)
	if name == "" || len(a.byModel) >= maxModels {
		if s := a.byModel[""]; s != nil {
			return s
		}
		model, name = "", otherModel
	}
	s := &modelSeries{a.duration.WithLabelValues(name), a.firstToken.WithLabelValues(name), a.perToken.WithLabelValues(name),
		a.firstRatio.WithLabelValues(name), a.perTokenRatio.WithLabelValues(name),
		a.input.WithLabelValues(name), a.cached.WithLabelValues(name), a.output.WithLabelValues(name),
		a.targets.WithLabelValues(name, "met"), a.targets.WithLabelValues(name, "missed")}
	if model != "" {
		model = name // a copy: model shares memory with the request
	}
	a.byModel[model] = s
	return s
}

// Expected is the prediction for an answer when its request was placed, at From. Target is the limit (SLO) for the time
// from the request's arrival to its first token. 0 means that nothing was predicted, or no limit is set.
type Expected struct {
	From                    time.Time
	First, PerToken, Target time.Duration
}

// Answer follows the answer to a request, for the metrics by model and the request's span. Calls must not overlap.
type Answer struct {
	// Streamed reports that the answer comes as server-sent events.
	Streamed bool
	Expected Expected

	entry  *Entry
	series *modelSeries
	first  time.Time
	output int64
}

// Answer returns the Answer of a decided request. model is "" if it is not known.
func (m *Metrics) Answer(e *Entry, model string) Answer {
	return Answer{entry: e, series: m.answers.of(model)}
}

// FirstToken records the time of the first token.
func (a *Answer) FirstToken(at time.Time) {
	a.first = at
	a.observe(a.series.firstToken, at.Sub(a.entry.At))
	if e := &a.Expected; a.entry.Succeeded() {
		if e.First > 0 {
			a.series.firstRatio.Observe(float64(max(at.Sub(e.From), 0)) / float64(e.First))
		}
		if e.Target > 0 && at.Sub(a.entry.At) <= e.Target {
			a.series.met.Inc()
		} else if e.Target > 0 {
			a.series.missed.Inc()
		}
	}
	if a.entry.span != nil {
		a.entry.span.AddEvent("first_token", trace.WithTimestamp(at))
	}
}

// Usage records the tokens that the engine reports; less than 0 means not reported.
func (a *Answer) Usage(input, cached, output int64) {
	a.output = output
	for i, c := range [...]prometheus.Counter{a.series.input, a.series.cached, a.series.output} {
		n := [...]int64{input, cached, output}[i]
		if labels := a.entry.exemplar(); labels != nil && n > 0 {
			c.(prometheus.ExemplarAdder).AddWithExemplar(float64(n), labels)
		} else {
			c.Add(float64(max(0, n)))
		}
	}
	if a.entry.span != nil {
		a.entry.span.SetAttributes(attribute.Int64("gen_ai.usage.input_tokens", max(0, input)),
			attribute.Int64("gen_ai.usage.cache_read.input_tokens", max(0, cached)), attribute.Int64("gen_ai.usage.output_tokens", max(0, output)))
	}
}

// Output is the number of output tokens that the engine has reported so far, 0 or less for none.
func (a *Answer) Output() int64 { return a.output }

// End records the end of the answer.
func (a *Answer) End(at time.Time) {
	a.observe(a.series.duration, at.Sub(a.entry.At))
	if a.Streamed && a.output > 1 && !a.first.IsZero() {
		perToken := at.Sub(a.first) / time.Duration(a.output-1)
		a.observe(a.series.perToken, perToken)
		if a.Expected.PerToken > 0 {
			a.series.perTokenRatio.Observe(float64(max(perToken, 0)) / float64(a.Expected.PerToken))
		}
	}
	a.entry.mu.Lock()
	defer a.entry.mu.Unlock()
	a.entry.After.Ended = &at
	a.entry.endSpan(at, a.entry.After.Status)
}

func (a *Answer) observe(h prometheus.Observer, d time.Duration) {
	seconds := max(0, d.Seconds())
	if labels := a.entry.exemplar(); labels != nil {
		h.(prometheus.ExemplarObserver).ObserveWithExemplar(seconds, labels)
		return
	}
	h.Observe(seconds)
}

package decide

import (
	"strconv"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/telemetry"
	"github.com/kvlane/kvlane/kvindex"
)

// tally are the counters of a target that every request moves, looked up when its
// worker joins. What is counted after the worker has left is lost, as all that was
// counted before.
type tally struct {
	picks, prompt, byEvents, speculative prometheus.Counter
	// batches of events that came from the target.
	batches atomic.Uint64
}

func newTally(m *telemetry.Metrics, t kvindex.Target) *tally {
	rank := telemetry.Rank(t.Rank)
	return &tally{
		picks:       m.Picks.WithLabelValues(t.Worker, rank, "decode"),
		prompt:      m.PromptTokens.WithLabelValues(t.Worker, rank),
		byEvents:    m.MatchedTokens.WithLabelValues(t.Worker, rank, "event"),
		speculative: m.MatchedTokens.WithLabelValues(t.Worker, rank, "speculative"),
	}
}

// newRouted are the counters of requests that got a target, by API.
func newRouted(m *telemetry.Metrics) (out []prometheus.Counter) {
	for api := prompt.Unknown; api == prompt.Unknown || api.String() != prompt.Unknown.String(); api++ {
		out = append(out, m.Requests.WithLabelValues(api.String(), "routed"))
	}
	return out
}

// countResponse counts an answer by the class of its status.
func (d *Decider) countResponse(m *member, status int) {
	if status/100 == 2 {
		m.answered.Inc()
		return
	}
	d.metrics.Responses.WithLabelValues(m.Name, strconv.Itoa(status/100)+"xx").Inc()
}

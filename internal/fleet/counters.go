package fleet

import (
	"strconv"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/kvindex"
)

// Counters are the per-request counters of a target, looked up when its worker joins.
// Counts made after the worker has left are lost.
type Counters struct {
	Picks, Prompt, ByEvents, Speculative prometheus.Counter
	// Batches counts the event batches received from the target.
	Batches atomic.Uint64
	// Broken reports that the engine broke off the answer that ended last on the target.
	Broken atomic.Bool
}

func newCounters(m *observe.Metrics, t kvindex.Target) *Counters {
	rank := observe.Rank(t.Rank)
	return &Counters{
		Picks:       m.Picks.WithLabelValues(t.Worker, rank, "decode"),
		Prompt:      m.PromptTokens.WithLabelValues(t.Worker, rank),
		ByEvents:    m.MatchedTokens.WithLabelValues(t.Worker, rank, "event"),
		Speculative: m.MatchedTokens.WithLabelValues(t.Worker, rank, "speculative"),
	}
}

// CountResponse counts a response by the class of its status.
func (f *Fleet) CountResponse(m *Member, status int) {
	if status/100 == 2 {
		m.answered.Inc()
		return
	}
	f.Metrics.Responses.WithLabelValues(m.Name, strconv.Itoa(status/100)+"xx").Inc()
}

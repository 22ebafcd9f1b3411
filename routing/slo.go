package routing

import (
	"cmp"
	"fmt"
	"math"
	"time"
)

// Unmet selects what happens to a request whose TTFT no target is predicted to meet.
type Unmet string

const (
	// UnmetRoute places it by the policy.
	UnmetRoute Unmet = "route"
	// UnmetQueue holds it until the target that the policy chooses has no prompt to compute, so that it does not delay
	// requests that can still be in time.
	UnmetQueue Unmet = "queue"
	// UnmetRefuse refuses it with an UnmetError, unless a target without requests can try it.
	UnmetRefuse Unmet = "refuse"
)

// retryOverdue is how often a target is tried although an overdue first token makes it miss Query.TTFT, or although it
// misses that without any request: only a first token shows that the prediction is wrong.
const retryOverdue = 2 * time.Second

// UnmetError means that no target is predicted to produce the first token in time.
type UnmetError struct {
	// TTFT is the request's limit. Best is the lowest prediction for any target, including the request's wait so far.
	TTFT, Best time.Duration
	// RetryAfter is when the best target is expected to meet it, 1 s to 30 s.
	RetryAfter time.Duration
}

// Error names both times.
func (e *UnmetError) Error() string {
	return fmt.Sprintf("no target meets a first token within %s: %s predicted at best", e.TTFT, e.Best.Round(time.Millisecond))
}

// meet drops the candidates that are not predicted to meet Query.TTFT, unless none is. Targets
// without a prediction pass. The margin is the usual error of predictions.
func (d *decision) meet() error {
	if d.q.TTFT <= 0 || d.req.pool == Decode {
		return nil
	}
	limit, best, met := (d.q.TTFT - max(d.q.Waited, 0)).Seconds(), math.Inf(1), 0
	for i := range d.cands {
		c := &d.cands[i]
		c.ttft = d.ttft(c) * (1 + d.r.targets[c.slot].fitOf().Spread)
		if best = min(best, c.ttft); c.ttft <= limit {
			met++
		}
	}
	total, says, meets := len(d.cands), "are predicted to meet", func(c *candidate) bool { return c.ttft <= limit }
	if met == 0 && d.r.config.Unmet == UnmetRefuse {
		says, meets = "are tried, as none is predicted to meet", func(c *candidate) bool { // also where nothing runs: else nothing is learned
			t := &d.r.targets[c.slot]
			late := t.progress.overdue(d.now, t.progress.Due) * (1 + t.fitOf().Spread)
			return (c.ttft-late <= limit || t.load.Active == 0) && d.now >= t.health.Probe-probeEvery+retryOverdue
		}
		for i := range d.cands {
			if meets(&d.cands[i]) {
				met++
			}
		}
	}
	if met > 0 {
		d.keep("ttft", ReasonTTFT, meets)
		d.findBestOverlap()
		d.ex.sayf("ttft", "%d of %d targets %s %.2f s", met, total, says, limit)
		return nil
	}
	d.ex.sayf("ttft", "no target is predicted to meet %.2f s, the best has %.2f: %s", limit, best, string(cmp.Or(d.r.config.Unmet, UnmetRoute)))
	switch d.r.config.Unmet {
	case UnmetQueue:
		d.unmet = d.q.Waited >= 0
	case UnmetRefuse:
		late := toDuration(best - limit)
		return &UnmetError{TTFT: d.q.TTFT, Best: d.q.TTFT + late, RetryAfter: min(max(late.Round(time.Second), time.Second), 30*time.Second)}
	}
	return nil
}

package decide

import (
	"context"
	"runtime"
)

// largeBody is the size in bytes above which a body counts as large: more than 100,000
// tokens of prose.
const largeBody = 512 << 10

// cpuLimit limits concurrent decisions to the number of processors: decisions are
// CPU-bound and each holds a token buffer. Later requests queue holding only their body.
//
// At most half of the places, rounded down, are for large bodies, so that small ones never
// wait for those alone. Safe for concurrent use.
type cpuLimit struct {
	all, large chan struct{}
}

// newCPULimit has a place for each processor and at least two, so that one is always left
// for small bodies.
func newCPULimit() *cpuLimit {
	n := max(2, runtime.GOMAXPROCS(0))
	return &cpuLimit{all: make(chan struct{}, n), large: make(chan struct{}, n/2)}
}

// acquire waits for a place for a decision about a body of that many bytes. It returns
// false, and a place that holds nothing, if ctx ends first.
func (l *cpuLimit) acquire(ctx context.Context, body int) (cpuPlace, bool) {
	p := cpuPlace{limit: l, large: body > largeBody}
	if p.large && !enter(ctx, l.large) {
		return cpuPlace{}, false
	}
	if !enter(ctx, l.all) {
		if p.large {
			<-l.large
		}
		return cpuPlace{}, false
	}
	return p, true
}

// enter puts a token into c. A free place is taken even if ctx has ended.
func enter(ctx context.Context, c chan struct{}) bool {
	select {
	case c <- struct{}{}:
		return true
	default:
	}
	select {
	case c <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// cpuPlace is a place that one decision holds; the zero value holds none. It belongs to
// one goroutine.
type cpuPlace struct {
	limit *cpuLimit
	large bool
}

// release gives the place back. Further calls do nothing.
func (p *cpuPlace) release() {
	if p.limit == nil {
		return
	}
	<-p.limit.all
	if p.large {
		<-p.limit.large
	}
	*p = cpuPlace{}
}

// withTimeout returns a context that ends with the client's, or when a decision that starts
// now has no time left for exact tokens (limits.decision_timeout).
func (d *Decider) withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if timeout := d.live.Load().Limits.DecisionTimeout.Std(); timeout > 0 {
		return context.WithTimeout(ctx, timeout)
	}
	return ctx, func() {}
}

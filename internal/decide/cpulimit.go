package decide

import (
	"context"
	"runtime"

	"golang.org/x/sync/semaphore"
)

// largeBody is the size in bytes above which a body counts as large: more than 100,000 tokens of prose.
const largeBody = 512 << 10

// cpuLimit limits concurrent decisions to the number of processors: decisions are
// CPU-bound and each holds a token buffer. Later requests queue holding only their body.
//
// At most half of the places, rounded down, are for large bodies, so that small ones never
// wait for those alone. Since a decision may allocate many times its body, large ones also
// share a number of bytes. A body that got no place before decision_timeout is only parsed, not tokenized: as many small
// ones at a time as there are places, and one large one. Safe for concurrent use.
type cpuLimit struct {
	all, large           chan struct{}
	lateSmall, lateLarge chan struct{}
	bytes                *semaphore.Weighted // of large bodies
	most                 int64
}

// newCPULimit has a place for each processor, at least two so that small bodies have one, and room for a largest body.
func newCPULimit(maxBody int64) *cpuLimit {
	n := max(2, runtime.GOMAXPROCS(0))
	return &cpuLimit{all: make(chan struct{}, n), large: make(chan struct{}, n/2), lateSmall: make(chan struct{}, n), lateLarge: make(chan struct{}, 1),
		bytes: semaphore.NewWeighted(maxBody), most: maxBody}
}

// place waits until exact ends for a place to make a decision with tokens, then until ctx ends for one without. If ctx
// ends first, the returned place holds nothing.
func (l *cpuLimit) place(ctx, exact context.Context, body int) cpuPlace {
	p, ok := l.acquire(exact, body)
	late := l.lateSmall
	if body > largeBody {
		late = l.lateLarge
	}
	if !ok {
		p.enter(ctx, late)
	}
	return p
}

// acquire waits for a place for a body of that many bytes; false, and a place that holds nothing, if ctx ends first.
func (l *cpuLimit) acquire(ctx context.Context, body int) (p cpuPlace, ok bool) {
	ok = true
	if body > largeBody {
		n := min(int64(body), l.most)
		if !l.bytes.TryAcquire(n) && l.bytes.Acquire(ctx, n) != nil {
			return p, false
		}
		p.bytes, p.of = n, l.bytes
		ok = p.enter(ctx, l.large)
	}
	if ok = ok && p.enter(ctx, l.all); !ok {
		p.release()
	}
	return p, ok
}

// cpuPlace is a place that one decision holds; the zero value holds none. It belongs to one goroutine.
type cpuPlace struct {
	held  [2]chan struct{} // those that have a token of this place; nil for none
	bytes int64            // of a large body, taken from of
	of    *semaphore.Weighted
}

// enter puts a token into c. A free place is taken even if ctx has ended.
func (p *cpuPlace) enter(ctx context.Context, c chan struct{}) bool {
	select {
	case c <- struct{}{}:
	default:
		select {
		case c <- struct{}{}:
		case <-ctx.Done():
			return false
		}
	}
	p.held[0], p.held[1] = c, p.held[0]
	return true
}

// release gives the place back. Further calls do nothing.
func (p *cpuPlace) release() {
	for _, c := range p.held {
		if c != nil {
			<-c
		}
	}
	if p.bytes > 0 {
		p.of.Release(p.bytes)
	}
	*p = cpuPlace{}
}

// withTimeout returns a context that ends with ctx, or when no time is left for tokens (limits.decision_timeout).
func (d *Decider) withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if timeout := d.live.Load().Limits.DecisionTimeout.Std(); timeout > 0 {
		return context.WithTimeout(ctx, timeout)
	}
	return ctx, func() {}
}

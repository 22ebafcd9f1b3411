package decide

import (
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/disagg"
)

// usagePatience is how long an answer's usage waits for a prefill leg that runs
// beside the decode leg: it answers about when decode has its blocks.
const usagePatience = 500 * time.Millisecond

// legUsage is what a prefill leg cost, once it has ended. The methods of a nil one do
// nothing.
type legUsage struct {
	ended chan struct{}
	usage disagg.Usage // not to be read before ended is closed
}

// newLegUsage returns nil if clients are told decode's usage.
func (d *Decider) newLegUsage() *legUsage {
	if d.cfg.Disagg.Usage != config.UsageOfPrefill {
		return nil
	}
	return &legUsage{ended: make(chan struct{})}
}

// keep takes the leg's answer, nil if there is none. It is called once.
func (u *legUsage) keep(answer []byte) {
	if u == nil {
		return
	}
	u.usage = disagg.UsageOf(answer)
	close(u.ended)
}

// wait waits for the leg's end, and reports whether it came.
func (u *legUsage) wait(most time.Duration) bool {
	select {
	case <-u.ended:
		return true
	default:
	}
	if most <= 0 {
		return false
	}
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-u.ended:
		return true
	case <-t.C:
		return false
	}
}

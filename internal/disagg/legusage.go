package disagg

import "time"

// LegUsage is the usage that a prefill leg reports when it ends. Keep does nothing on a nil
// LegUsage. It is safe for concurrent use.
type LegUsage struct {
	ended chan struct{}
	usage Usage // must not be read before ended is closed
}

// NewLegUsage returns the usage of a leg that has not ended.
func NewLegUsage() *LegUsage { return &LegUsage{ended: make(chan struct{})} }

// Keep reads the leg's answer, nil if there is none. It must be called once.
func (u *LegUsage) Keep(answer []byte) {
	if u == nil {
		return
	}
	u.usage = UsageOf(answer)
	close(u.ended)
}

// Wait waits for the leg's end, at most for most, and reports whether it has come.
func (u *LegUsage) Wait(most time.Duration) bool {
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

// Edit is Usage.Edit with the leg's usage. Call it only after Wait has returned true.
func (u *LegUsage) Edit(dst, usage []byte) []byte { return u.usage.Edit(dst, usage) }

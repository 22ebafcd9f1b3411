package decide

import (
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/routing"
)

// shadow is a policy that decides without acting.
type shadow struct {
	name   string
	policy routing.Policy
}

func shadows(c *config.Config) []shadow {
	var all []shadow
	for _, name := range c.Routing.Shadow {
		policy, _ := routing.Preset(name) // config has checked the name
		all = append(all, shadow{name, policy})
	}
	return all
}

// shadow records what each shadow policy would choose. Only explained decisions are compared, which bounds the cost in
// large fleets. The caller holds d.mu and picks afterwards.
func (w *work) shadow(now time.Duration) {
	w.entry.Shadows = nil
	if w.ex == nil {
		return
	}
	for i := range w.d.shadows {
		s := &w.d.shadows[i]
		if slot, miss, queue, ok := w.d.router.Shadow(now, &w.query, w.s.overlaps, &s.policy); ok {
			info, _ := w.d.router.Target(slot)
			w.entry.Shadows = append(w.entry.Shadows, observe.Shadow{Policy: s.name, Target: info.String(), Miss: miss, Queue: queue})
		}
	}
}

// compareShadows counts the choices of the shadow policies and of the plan.
func (w *work) compareShadows(plan *routing.Plan) {
	if len(w.entry.Shadows) == 0 {
		return
	}
	m, live, ahead := w.d.metrics, "", int64(0)
	count := func(policy string, miss, queue int64) {
		m.ShadowMiss.WithLabelValues(policy).Add(float64(miss))
		m.ShadowQueue.WithLabelValues(policy).Add(float64(queue))
	}
	for i := range w.ex.Candidates {
		if c := &w.ex.Candidates[i]; c.Slot == plan.Decode {
			live, ahead = c.Target, c.Miss+c.Queue
			count("live", c.Miss, c.Queue)
		}
	}
	for i := range w.entry.Shadows {
		s := &w.entry.Shadows[i]
		s.Regret = ahead - s.Miss - s.Queue
		result := map[bool]string{true: "same", false: "differs"}[s.Target == live]
		m.Shadows.WithLabelValues(s.Policy, result).Inc()
		count(s.Policy, s.Miss, s.Queue)
	}
}

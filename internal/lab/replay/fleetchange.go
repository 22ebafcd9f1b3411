package replay

import (
	"cmp"
	"math"
	"slices"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// fleetChange is what happens to the last worker of a fleet during a run, in seconds since the start; 0 is never. The
// requests on a worker that is lost are sent again immediately, with their first arrival; the clients of a hung one give up.
type fleetChange struct{ Lost, Added, Hung float64 }

// patience is the seconds that a client waits for a hung worker.
const patience = 10

// engine returns the engine of a rank. The last Slow workers take twice as long.
func (f *Fleet) engine(rank int) *Engine {
	e := f.Engine
	if rank/f.Ranks >= f.Workers-f.Slow {
		for _, v := range []*float64{&e.Base, &e.PerToken, &e.PerPair, &e.PerDecode, &e.PerResident} {
			*v *= 2
		}
	}
	return &e
}

// ready reports whether a rank's worker is there at the start.
func (f *Fleet) ready(rank int) bool { return f.Change.Added == 0 || rank/f.Ranks < f.Workers-1 }

// info describes a rank to the router.
func (f *Fleet) info(rank int, ready bool) routing.TargetInfo {
	info := routing.TargetInfo{Target: targetOf(kvindex.Slot(rank), *f), Ready: ready, Role: f.role(rank)}
	if f.SlowKnown && rank/f.Ranks >= f.Workers-f.Slow {
		info.Speed = 0.5
	}
	return info
}

// up reports whether a rank may get requests.
func (s *simulation) up(slot int) bool { return s.present[slot] }

// changeFleet removes or adds the last worker when it is due, and reports whether it did.
func (s *simulation) changeFleet(next float64) (bool, error) {
	c := &s.fleet.Change
	at := max(c.Lost, c.Added, c.Hung)
	if at == 0 || at > next || (math.IsInf(next, 1) && s.live == 0) {
		return false, nil
	}
	if c.Hung > 0 {
		s.now = at
		s.hang()
		return true, nil
	}
	lost := c.Lost > 0
	*c = fleetChange{}
	s.now = at
	var again []Request
	for n := s.ranks() - s.fleet.Ranks; n < s.ranks(); n++ {
		slot := kvindex.Slot(n)
		s.present[n] = !lost
		for _, r := range s.replicas {
			r.router.SetTarget(slot, s.fleet.info(n, !lost))
		}
		if !lost {
			continue
		}
		w, k := s.at(slot)
		for _, j := range slices.Concat(k.waiting, k.prefill, k.decode) {
			s.live--
			s.replicas[j.replica].router.Release(s.clock(), j.plan)
			s.records = slices.DeleteFunc(s.records, func(r *record) bool { return r == j.record })
			again = append(again, j.Request)
		}
		w.ranks[n%len(w.ranks)], w.until = newRank(k.engine, k.size, k.shared), math.Inf(1)
		for _, r := range s.replicas {
			if err := r.index.Apply(slot, &kvindex.Event{Kind: kvindex.Cleared}); err != nil {
				return false, err
			}
		}
	}
	for _, r := range again {
		if err := s.arrive(r); err != nil {
			return false, err
		}
	}
	return true, nil
}

// hang stops the last worker. It is called again after patience and then every second, for the clients that have given up.
func (s *simulation) hang() {
	s.fleet.Change.Hung++
	for n := s.ranks() - s.fleet.Ranks; n < s.ranks(); n++ {
		w, k := s.at(kvindex.Slot(n))
		if !k.hung {
			stopped := newRank(k.engine, k.size, k.shared)
			stopped.hung, stopped.waiting = true, slices.Concat(k.waiting, k.prefill, k.decode)
			w.ranks[n%len(w.ranks)], w.until = stopped, math.Inf(1)
			s.fleet.Change.Hung = s.now + patience
		}
		for len(k.waiting) > 0 && k.hung && k.waiting[0].placed <= s.now-patience {
			j := k.waiting[0]
			k.waiting = k.waiting[1:]
			j.matched, j.first = max(j.matched, 0), cmp.Or(j.first, s.now)
			s.over(j)
		}
	}
}

package decide

import (
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// Headers that steer a decision. They count only with routing.trust_overrides, and
// never reach a worker.
const (
	// pinHeader names a worker, or a target as "worker/rank".
	pinHeader = "x-kvlane-pin"
	// excludeHeader lists workers and targets.
	excludeHeader = "x-kvlane-exclude"
	// priorityHeader is a whole number; below 0 may be shed early.
	priorityHeader = "x-kvlane-priority"
	// objectiveHeader is the Gateway API inference extension's; routing.objectives maps
	// it to a priority.
	objectiveHeader = "x-gateway-inference-objective"
)

// steer takes overrides from headers.
func (j *job) steer() {
	if !j.d.cfg.Routing.Trusted {
		return
	}
	if v, ok := j.r.Header(pinHeader); ok {
		pin := j.target(strings.TrimSpace(v))
		j.query.Pin = &routing.Pin{Worker: pin.Worker, Rank: pin.Rank, Relaxed: new(bool)}
	}
	if v, ok := j.r.Header(excludeHeader); ok {
		j.exclude(v)
	}
	if v, ok := j.r.Header(objectiveHeader); ok {
		j.query.Priority = j.d.cfg.Routing.Objectives[strings.TrimSpace(v)]
	}
	if v, ok := j.r.Header(priorityHeader); ok {
		if n, err := strconv.Atoi(strings.TrimSpace(v)); err == nil {
			j.query.Priority = n
		}
	}
}

// target reads "worker" or "worker/rank". A worker's own name may hold a slash.
func (j *job) target(text string) kvindex.Target {
	if j.d.fleet.View().Member(text) != nil {
		return kvindex.Target{Worker: text, Rank: kvindex.NoRank}
	}
	if at := strings.LastIndexByte(text, '/'); at >= 0 {
		if n, err := strconv.ParseInt(text[at+1:], 10, 32); err == nil && n >= 0 {
			return kvindex.Target{Worker: text[:at], Rank: int32(n)}
		}
	}
	return kvindex.Target{Worker: text, Rank: kvindex.NoRank}
}

func (j *job) exclude(list string) {
	v := j.d.fleet.View()
	j.s.exclude = j.s.exclude[:0]
	for name := range strings.SplitSeq(list, ",") {
		t := j.target(strings.TrimSpace(name))
		m := v.Member(t.Worker)
		if m == nil {
			continue
		}
		for _, slot := range m.Slots {
			if t.Rank == kvindex.NoRank || v.Endpoint(slot).Target.Rank == t.Rank {
				j.s.exclude = append(j.s.exclude, slot)
			}
		}
	}
	j.query.Exclude = j.s.exclude
}

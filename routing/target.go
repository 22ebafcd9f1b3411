package routing

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// NoSlot means "no target" where a Slot is optional.
const NoSlot = ^kvindex.Slot(0)

// Role is what a worker may do.
type Role uint8

const (
	// Both is a worker that prefills and decodes its own requests.
	Both Role = iota
	// Prefill workers compute prompts and send the KV cache to a decode worker.
	Prefill
	// Decode workers receive KV caches; they can compute prompts too.
	Decode
)

// String returns the name used in configuration and explanations.
func (r Role) String() string {
	switch r {
	case Prefill:
		return "prefill"
	case Decode:
		return "decode"
	default:
		return "both"
	}
}

// TargetInfo describes a target.
type TargetInfo struct {
	kvindex.Target `json:"target"`
	Role           Role `json:"role,omitempty"`
	// Models are the names (adapters too) that the target serves. Without names the list is unknown, and the target may
	// get requests for every model.
	Models []string `json:"models,omitempty"`
	// Ready is true while the worker passes its health check.
	Ready bool `json:"ready,omitempty"`
	// Draining targets get no new requests.
	Draining bool `json:"draining,omitempty"`
	// Speed divides the cost of computing on this target: 0.5 takes twice as long. 0 means 1. Useful range 0.1 to 10.
	Speed float64 `json:"speed,omitempty"`
	// Zone is a topology label; see Disagg.SameZone.
	Zone string `json:"zone,omitempty"`
	// Address is "ip:port" of the worker's HTTP server, for AddressSet.
	Address string `json:"address,omitempty"`
}

func (t *TargetInfo) equal(o *TargetInfo) bool {
	return t.Target == o.Target && t.Role == o.Role && t.Ready == o.Ready && t.Draining == o.Draining && t.Speed == o.Speed && t.Zone == o.Zone &&
		t.Address == o.Address && slices.Equal(t.Models, o.Models)
}

// target is a slot's state. What every decision reads comes first: 128 bytes of it.
// Invariant: all loads of an unused slot are zero.
type target struct {
	used, warm bool
	// role and state are copied from info to share a cache line.
	role  Role
	state Reason
	// gen counts the targets that had this slot: bookings of earlier ones are void.
	gen    uint32
	worker int32
	pos    int32 // in Router.order
	speed  float64
	load   Load
	report reported
	// key identifies the target in tie-breaks, the same in all replicas.
	key  uint64
	info TargetInfo
	name string // of info.Target
	// health is a pointer to keep targets small: decisions read it only while targets are suspect. Free slots have none.
	health *health
	// startedTokens is the part of load.Queue that the engine has started on, see reported.Started, waiting the part of
	// load.KV that has no first token; booked and released are when the last request was booked and when one ended.
	startedTokens, waiting int64
	booked, released       time.Duration
	// paces are those of its model.
	paces    *paces
	progress progress
	tenants  tenants
}

// SlotSet is a set of slots. The zero value is empty.
type SlotSet struct{ bits []uint64 }

// Add puts a slot into the set.
func (s *SlotSet) Add(slot kvindex.Slot) {
	for int(slot/64) >= len(s.bits) {
		s.bits = append(s.bits, 0)
	}
	s.bits[slot/64] |= 1 << (slot % 64)
}

// Remove takes a slot out of the set.
func (s *SlotSet) Remove(slot kvindex.Slot) {
	if int(slot/64) < len(s.bits) {
		s.bits[slot/64] &^= 1 << (slot % 64)
	}
}

// Has reports whether the slot is in the set.
func (s *SlotSet) Has(slot kvindex.Slot) bool {
	return int(slot/64) < len(s.bits) && s.bits[slot/64]&(1<<(slot%64)) != 0
}

// Reset empties the set and keeps its memory.
func (s *SlotSet) Reset() { clear(s.bits) }

// pool holds the targets of a model with its round-robin cursors, which requests for other models must not move.
type pool struct {
	slots SlotSet
	size  int
	PoolState
}

// starts records when this replica last placed a new conversation of a leg by round robin, and when it last received
// one from another replica. Own reports that it ignores the others' cursors, because they arrive too late.
type starts struct {
	Placed time.Duration `json:"placed,omitempty"`
	Heard  time.Duration `json:"heard,omitempty"`
	Own    bool          `json:"own,omitempty"`
}

const returningOver = 512

// growth holds the tokens that conversations computed after their first turns, and the number of first turns. Both
// decay over about growthOver turns counted by conversations.countTurn here. Each replica sees a part of the traffic.
type growth struct {
	Tokens float64 `json:"tokens,omitempty"`
	Firsts float64 `json:"firsts,omitempty"`
}

const growthOver = 4096

func (g *growth) count(turn uint8, brings int64) {
	if turn == 0 {
		return
	}
	g.Tokens, g.Firsts = g.Tokens*(1-1.0/growthOver), g.Firsts*(1-1.0/growthOver)
	if turn == 1 {
		g.Firsts++
	} else {
		g.Tokens += float64(brings)
	}
}

// count updates the share of returning conversations by one leg of a Booking.Turn.
func (p *pool) count(leg int, turn uint8) {
	if turn != 0 {
		p.Returning[leg] += (float64(turn-1) - p.Returning[leg]) / returningOver
		p.Alone[leg] += (float64(2-turn) - p.Alone[leg]) / returningOver
	}
}

// SetTarget adds a target or replaces its TargetInfo; its load stays. Another target in the same slot is removed first.
func (r *Router) SetTarget(slot kvindex.Slot, info TargetInfo) {
	for int(slot) >= len(r.targets) {
		r.targets = append(r.targets, target{})
		r.match = append(r.match, match{})
	}
	t := &r.targets[slot]
	if t.used && t.info.equal(&info) {
		return // callers repeat the whole fleet for each change
	}
	if t.used && t.info.Target != info.Target {
		r.RemoveTarget(slot)
	}
	added := !t.used
	moved := added || !slices.Equal(t.info.Models, info.Models) // a model's last target keeps what is learned
	if !added {
		if moved {
			r.leaveModels(slot, t.info.Models)
		}
		r.roles[t.info.Role]--
	} else {
		t.used, t.health = true, new(health)
		t.progress.Factor, t.progress.TokenFactor = 1, 1
		t.key = mix(hashString(uint64(uint32(info.Rank))+1, info.Worker))
		t.worker = r.workerNumber(info.Worker)
		r.enterOrder(slot, info.Target)
	}
	t.info, t.name = info, info.String()
	t.info.Models = append([]string(nil), info.Models...)
	t.speed = info.Speed
	if t.speed <= 0 {
		t.speed = 1
	}
	if info.Ready && t.state == ReasonNotReady {
		r.whole(t) // the engine that broke its answers off has ended
	}
	t.role, t.state = info.Role, eligible
	switch {
	case !info.Ready:
		t.state = ReasonNotReady
	case info.Draining:
		t.state = ReasonDraining
	}
	r.roles[info.Role]++
	if moved {
		r.joinModels(slot, t.info.Models)
	}
	if t.paces = &r.anyModel.Paces; t.model() != "" {
		t.paces = &r.models[t.model()].Paces
	}
	if added && r.sharer != nil {
		r.sharer.Added(info.Target)
	}
}

// RemoveTarget removes a target with its load, its report and the conversations bound
// to it. Releasing its bookings has no effect then. Unknown slots are ignored.
func (r *Router) RemoveTarget(slot kvindex.Slot) {
	t := r.at(slot)
	if t == nil {
		return
	}
	r.leaveModels(slot, t.info.Models)
	r.roles[t.info.Role]--
	r.leaveOrder(slot)
	r.releaseWorker(t.info.Worker)
	if t.health.Suspect != "" {
		r.suspects--
	}
	for leg := range r.conversations {
		r.conversations[leg].removeSlot(slot)
	}
	*t = target{gen: t.gen + 1}
}

// Target returns the TargetInfo of a slot. The caller must not change its slices.
func (r *Router) Target(slot kvindex.Slot) (TargetInfo, bool) {
	if t := r.at(slot); t != nil {
		return t.info, true
	}
	return TargetInfo{}, false
}

// at returns the target of a slot, nil if it is unknown.
func (r *Router) at(slot kvindex.Slot) *target {
	if int(slot) >= len(r.targets) || !r.targets[slot].used {
		return nil
	}
	return &r.targets[slot]
}

// Load returns the load booked on a slot, zero for unknown ones.
func (r *Router) Load(slot kvindex.Slot) Load {
	if t := r.at(slot); t != nil {
		return t.load
	}
	return Load{}
}

// Targets calls f for every target, sorted by worker and rank, until f returns false. f must not change the router.
func (r *Router) Targets(f func(slot kvindex.Slot, info *TargetInfo, load Load) bool) {
	for _, slot := range r.order {
		if t := &r.targets[slot]; !f(slot, &t.info, t.load) {
			return
		}
	}
}

// AddressSet adds to dst the slots whose address is among the given ones; an entry
// without a port matches every port of that host.
func (r *Router) AddressSet(dst *SlotSet, addresses []string) {
	for _, slot := range r.order {
		have := r.targets[slot].info.Address
		for _, want := range addresses {
			if have == want || (len(have) > len(want) && have[len(want)] == ':' &&
				strings.LastIndexByte(have, ':') == len(want) && strings.HasPrefix(have, want)) {
				dst.Add(slot)
				break
			}
		}
	}
}

// position returns the place of a target in the order, or where it would be, and whether it is there.
func (r *Router) position(id kvindex.Target) (int, bool) {
	return slices.BinarySearchFunc(r.order, id, func(slot kvindex.Slot, id kvindex.Target) int {
		t := &r.targets[slot].info.Target
		return cmp.Or(cmp.Compare(t.Worker, id.Worker), cmp.Compare(t.Rank, id.Rank))
	})
}

func (r *Router) slotOf(id kvindex.Target) kvindex.Slot {
	if at, ok := r.position(id); ok {
		return r.order[at]
	}
	return NoSlot
}

// enterOrder keeps order sorted by worker and rank. Cursors keep their targets.
func (r *Router) enterOrder(slot kvindex.Slot, id kvindex.Target) {
	at, _ := r.position(id)
	r.order = slices.Insert(r.order, at, slot)
	r.shift(at, 1)
}

func (r *Router) leaveOrder(slot kvindex.Slot) {
	at := int(r.targets[slot].pos)
	r.order = slices.Delete(r.order, at, at+1)
	r.shift(at, -1)
}

// shift moves positions and cursors from at on.
func (r *Router) shift(at int, by int32) {
	for i, slot := range r.order[at:] {
		r.targets[slot].pos = int32(at + i)
	}
	for _, p := range r.pools() {
		for leg := range p.Cursor {
			if int(p.Cursor[leg]) > at {
				p.Cursor[leg] += by
			}
		}
	}
}

// pools returns the pools of all models, and the one of requests without a model.
func (r *Router) pools() []*pool { return append(slices.Collect(maps.Values(r.models)), &r.anyModel) }

// Lists reports whether a target lists the model.
func (r *Router) Lists(model string) bool { return r.models[model] != nil }

func (r *Router) joinModels(slot kvindex.Slot, models []string) {
	if len(models) == 0 {
		r.anyModel.slots.Add(slot)
		r.anyModel.size++
	}
	for _, m := range models {
		p := r.models[m]
		if p == nil {
			p = &pool{PoolState: PoolState{Model: m}}
			r.models[m] = p
		}
		if !p.slots.Has(slot) {
			p.slots.Add(slot)
			p.size++
		}
	}
}

func (r *Router) leaveModels(slot kvindex.Slot, models []string) {
	if len(models) == 0 {
		r.anyModel.slots.Remove(slot)
		r.anyModel.size--
	}
	for _, m := range models {
		p := r.models[m]
		if p == nil || !p.slots.Has(slot) {
			continue
		}
		p.slots.Remove(slot)
		if p.size--; p.size == 0 {
			delete(r.models, m)
		}
	}
}

// workerNumber gives workers small numbers for the tables of one decision.
func (r *Router) workerNumber(name string) int32 {
	if w, ok := r.workers[name]; ok {
		w.ranks++
		r.workers[name] = w
		return w.number
	}
	n := int32(len(r.perWorker))
	if k := len(r.freeWorkers); k > 0 {
		n, r.freeWorkers = r.freeWorkers[k-1], r.freeWorkers[:k-1]
	} else {
		r.perWorker = append(r.perWorker, 0)
	}
	r.workers[name] = workerEntry{number: n, ranks: 1}
	return n
}

func (r *Router) releaseWorker(name string) {
	w := r.workers[name]
	if w.ranks--; w.ranks > 0 {
		r.workers[name] = w
		return
	}
	delete(r.workers, name)
	r.freeWorkers = append(r.freeWorkers, w.number)
}

type workerEntry struct {
	number, ranks int32
}

// suspended reports whether a target's reports have stopped. A target that never reported is not suspended.
func (t *target) suspended(now, after time.Duration) bool {
	return after > 0 && t.report.known && now-t.report.Received > after
}

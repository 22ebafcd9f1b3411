package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// State is all of a Router's state that a decision depends on. It is for debugging: the JSON form may change in every
// version.
type State struct {
	Config        Config                       `json:"config"`
	Targets       []TargetState                `json:"targets"`
	Pools         []PoolState                  `json:"pools"`
	Slab          []SlabState                  `json:"slab"`
	Free          []uint32                     `json:"free"`
	Conversations [numLegs][]ConversationState `json:"conversations"`
	Shared        [numLegs][]SharedState       `json:"shared"`
	Generated     [numLegs]uint64              `json:"generated"`
	Judged        time.Duration                `json:"judged,omitempty"`
	JudgeNext     bool                         `json:"judge_next,omitempty"`
	Others        others                       `json:"others,omitzero"`
	// Begun is the query's conversation if it is a live program (see program), and BegunModel its model.
	Begun      Key    `json:"begun,omitzero"`
	BegunModel string `json:"begun_model,omitempty"`
}

// TargetState is one target.
type TargetState struct {
	Slot kvindex.Slot `json:"slot"`
	Info TargetInfo   `json:"info"`
	Warm bool         `json:"warm,omitempty"`
	// Held is the number of prompt tokens of the waiting requests that the target is reserved for.
	Held int64 `json:"held,omitempty"`
	// Health is what the target's answers have shown.
	Health health `json:"health,omitzero"`
	// Progress is what is predicted from.
	Progress progress `json:"progress"`
	// Report is the last report that was accepted.
	Report *reported `json:"report,omitempty"`
	// Asked is the last two tenants that may have been placed there.
	Asked [2]asker `json:"asked,omitzero"`
}

// PoolState is what is known about a model's requests; Model is "" for requests without one.
type PoolState struct {
	Model string `json:"model"`
	// Cursor is the next position in Router.order, per leg.
	Cursor [numLegs]int32  `json:"cursor"`
	Starts [numLegs]starts `json:"starts,omitzero"`
	// Rotation counts picks, per leg, for ties that rotate.
	Rotation [numLegs]uint32 `json:"rotation"`
	// Returning is the share of turns whose conversation was known, a moving mean over about returningOver of those
	// that conversations.countTurn counts, per leg. Alone is the share of turns that begin a conversation. Both start
	// at 0, so neither is high before enough turns were seen.
	Returning [numLegs]float64 `json:"returning"`
	Alone     [numLegs]float64 `json:"alone,omitzero"`
	Grown     [numLegs]growth  `json:"grown,omitzero"`
	Paces     paces            `json:"paces,omitzero"`
	// Live is the tokens of the live programs.
	Live int64 `json:"live,omitempty"`
}

// SlabState is one entry of the ledger.
type SlabState struct {
	reservation
	Serial uint32 `json:"serial"`
	// DecodeVoid and PrefillVoid are set if the booked target was removed.
	DecodeVoid   bool          `json:"decode_void,omitempty"`
	PrefillVoid  bool          `json:"prefill_void,omitempty"`
	Conversation Key           `json:"conversation"`
	Replica      string        `json:"replica,omitempty"`
	RemoteID     ReservationID `json:"remote_id,omitempty"`
	Expires      time.Duration `json:"expires,omitempty"`
}

// ConversationState is one conversation, least recently used first.
type ConversationState struct {
	Key  Key          `json:"key"`
	Slot kvindex.Slot `json:"slot,omitzero"`
	Path []uint64     `json:"path,omitempty"`
	// Turns is the number of its turns that count for PoolState.Returning.
	Turns uint32 `json:"turns,omitempty"`
}

// SharedState is a block of the query's prefix and the conversations that have it, in the
// order in which they are tried.
type SharedState struct {
	Hash          uint64 `json:"hash"`
	Conversations []Key  `json:"conversations"`
}

// export returns the state. A query limits the conversations to those that its decision can depend on; nil exports all.
func (r *Router) export(q *Query) *State {
	s := &State{Config: r.config, Judged: r.judged, JudgeNext: r.judgeNext, Others: r.others, Free: append([]uint32(nil), r.ledger.free...)}
	for _, slot := range r.order {
		t := &r.targets[slot]
		ts := TargetState{Slot: slot, Info: t.info, Warm: t.warm, Held: r.held(slot), Health: *t.health, Progress: t.progress, Asked: t.tenants.asked}
		if t.report.known {
			report := t.report
			ts.Report = &report
		}
		s.Targets = append(s.Targets, ts)
	}
	for _, p := range r.pools() {
		s.Pools = append(s.Pools, p.PoolState)
	}
	sort.Slice(s.Pools, func(i, j int) bool { return s.Pools[i].Model < s.Pools[j].Model })
	for i := range r.ledger.slab {
		res := &r.ledger.slab[i]
		s.Slab = append(s.Slab, SlabState{reservation: *res, Serial: res.serial, Conversation: res.conversation,
			DecodeVoid:  res.Phase != unused && r.targetOf(res.Decode, res.decodeGen) == nil,
			PrefillVoid: res.Phase != unused && res.Prefill != NoSlot && r.targetOf(res.Prefill, res.prefillGen) == nil,
			Replica:     res.remote.key.replica, RemoteID: res.remote.key.id, Expires: res.remote.expires})
	}
	var key Key
	if q != nil {
		key = r.config.keyOf(q.Conversation)
		if r.programs.byKey[programKey{key, r.poolOf(q.Model)}] != nil {
			s.Begun, s.BegunModel = key, q.Model
		}
	}
	for leg := range r.conversations {
		s.Conversations[leg], s.Shared[leg] = r.conversations[leg].export(q, key)
		s.Generated[leg] = r.conversations[leg].generated
	}
	return s
}

// export lists the conversations that can matter to a query, whose own conversation has the key; all of them if q is nil.
func (c *conversations) export(q *Query, key Key) (list []ConversationState, shared []SharedState) {
	var wanted map[uint32]bool
	if q != nil {
		wanted = map[uint32]bool{c.find(key): true}
		for _, h := range q.Prefix {
			s, node := c.byHash.places[c.node(h)].entry, SharedState{Hash: h}
			for n := 0; s != none && n < maxSiblings; n++ {
				wanted[c.steps[s].conv] = true
				node.Conversations = append(node.Conversations, c.entries[c.steps[s].conv].key)
				s = c.steps[s].next
			}
			if len(node.Conversations) > 1 {
				shared = append(shared, node)
			}
		}
	}
	for i := c.oldest; i != none; i = c.entries[i].newer {
		if wanted != nil && !wanted[i] {
			continue
		}
		e := &c.entries[i]
		cs := ConversationState{Key: e.key, Slot: e.slot, Turns: e.turns}
		if e.depth > 0 {
			cs.Path = make([]uint64, e.depth)
			at := e.path
			for d := int(e.depth) - 1; d >= 0; d-- {
				cs.Path[d] = c.steps[at].hash
				at = c.steps[at].up
			}
		}
		list = append(list, cs)
	}
	return list, shared
}

// arrange puts the conversations that share a block into the order in which they are tried. Unknown ones are ignored.
func (c *conversations) arrange(node SharedState) {
	at, steps := c.node(node.Hash), map[uint32]uint32{}
	for s := c.byHash.places[at].entry; s != none; s = c.steps[s].next {
		steps[c.steps[s].conv] = s
	}
	for _, key := range slices.Backward(node.Conversations) {
		head := c.byHash.places[at].entry
		s, ok := steps[c.find(key)]
		if !ok || s == head {
			continue
		}
		st := &c.steps[s]
		if c.steps[st.prev].next = st.next; st.next != none {
			c.steps[st.next].prev = st.prev
		}
		st.prev, st.next = none, head
		c.steps[head].prev, c.byHash.places[at].entry = s, s
	}
}

// maxImportedSlot bounds what a state from outside can make a router allocate.
const maxImportedSlot = 1 << 16

// importState returns a router in the given state, which decides as the exported one did.
func importState(s *State) (*Router, error) {
	if s == nil {
		return nil, errors.New("import: there is no state")
	}
	r, err := New(s.Config)
	if err != nil {
		return nil, err
	}
	r.queue = new(Queue)
	if o := s.Others; o.Place < 0 || o.Place > 0 && o.Place >= o.Replicas || o.Replicas < 0 || o.Replicas > maxImportedSlot {
		return nil, fmt.Errorf("import: place %d among %d replicas is out of range", o.Place, o.Replicas)
	}
	r.others = s.Others
	for i := range s.Targets {
		ts := &s.Targets[i]
		if ts.Slot > maxImportedSlot {
			return nil, fmt.Errorf("import: slot %d is out of range", ts.Slot)
		}
		if ts.Info.Role > Decode {
			return nil, fmt.Errorf("import: role %d is unknown", ts.Info.Role)
		}
		r.SetTarget(ts.Slot, ts.Info)
		t := &r.targets[ts.Slot]
		if t.warm, *t.health, t.progress = ts.Warm, ts.Health, ts.Progress; t.health.Suspect != "" {
			r.suspects++
		}
		if t.tenants.asked = ts.Asked; ts.Held > 0 {
			r.queue.hold(&waiting{Waiter: Waiter{Lane: Lane{Slot: ts.Slot}, Tokens: ts.Held}}, 1)
		}
		if p := ts.Report; p != nil {
			t.report, t.report.known = *p, true
			r.bookings = max(r.bookings, p.Started)
		}
	}
	for _, ps := range s.Pools {
		p := &r.anyModel
		if ps.Model != "" {
			p = r.models[ps.Model]
		}
		if p == nil {
			return nil, fmt.Errorf("import: model %q has no target", ps.Model)
		}
		p.PoolState = ps
	}
	if s.Begun != (Key{}) {
		r.programs.begin(programKey{s.Begun, r.poolOf(s.BegunModel)}, 0, false)
	}
	r.judged, r.judgeNext = s.Judged, s.JudgeNext
	if err := r.importLedger(s); err != nil {
		return nil, err
	}
	for leg := range r.conversations {
		c := &r.conversations[leg]
		for _, cs := range s.Conversations[leg] {
			if cs.Slot != NoSlot && r.at(cs.Slot) == nil {
				return nil, fmt.Errorf("import: a conversation is bound to slot %d, which is not used", cs.Slot)
			}
			if cs.Key == (Key{}) || c.find(cs.Key) != none {
				return nil, fmt.Errorf("import: conversation %x is there twice or has no key", cs.Key)
			}
			at := c.put(cs.Key, cs.Slot)
			c.entries[at].turns = cs.Turns
			c.setPath(at, cs.Path)
		}
		for _, node := range s.Shared[leg] {
			c.arrange(node)
		}
		c.generated = s.Generated[leg]
	}
	return r, nil
}

func (r *Router) importLedger(s *State) error {
	isFree := map[uint32]bool{}
	for _, i := range s.Free {
		if int(i) >= len(s.Slab) || s.Slab[i].Phase != unused || isFree[i] {
			return fmt.Errorf("import: place %d of the ledger is not free", i)
		}
		isFree[i] = true
	}
	r.ledger.free = append([]uint32(nil), s.Free...)
	for i := range s.Slab {
		ss := &s.Slab[i]
		res := ss.reservation
		res.serial, res.conversation = ss.Serial, ss.Conversation
		// In a new router every target is the first in its slot: generation 0.
		res.decodeGen, res.prefillGen, res.remote = 0, 0, remoteLink{}
		if res.Phase == unused {
			r.ledger.slab = append(r.ledger.slab, reservation{serial: ss.Serial})
			continue
		}
		if res.Phase > decoding {
			return fmt.Errorf("import: reservation %d is in phase %d", i, res.Phase)
		}
		if (!ss.DecodeVoid && r.at(res.Decode) == nil) || (!ss.PrefillVoid && res.Prefill != NoSlot && r.at(res.Prefill) == nil) {
			return fmt.Errorf("import: reservation %d is on a slot that is not used", i)
		}
		if ss.DecodeVoid {
			res.decodeGen = ^uint32(0)
		}
		if ss.PrefillVoid {
			res.prefillGen = ^uint32(0)
		}
		if ss.Replica != "" {
			id := ReservationID(uint64(res.serial)<<32 | uint64(len(r.ledger.slab)))
			res.remote = remoteLink{remoteKey{ss.Replica, ss.RemoteID}, ss.Expires}
			r.remotes.byKey[res.remote.key] = id
			r.remotes.fifo = append(r.remotes.fifo, id)
		}
		r.bookings = max(r.bookings, res.Number)
		r.apply(&res, 1)
		r.ledger.slab = append(r.ledger.slab, res)
		r.ledger.live++
	}
	sort.Slice(r.remotes.fifo, func(i, j int) bool {
		return r.ledger.get(r.remotes.fifo[i]).remote.expires < r.ledger.get(r.remotes.fifo[j]).remote.expires
	})
	return nil
}

// Decision is a recorded decision with everything needed to repeat it.
type Decision struct {
	State    *State        `json:"state"`
	Now      time.Duration `json:"now"`
	Query    Query         `json:"query"`
	Overlaps []Overlap     `json:"overlaps"`
	// Plan is what was decided; Error if nothing was.
	Plan  Plan   `json:"plan"`
	Error string `json:"error,omitempty"`
}

// UnmarshalJSON reads a slot that is left out as NoSlot.
func (p *Plan) UnmarshalJSON(text []byte) error {
	type plain Plan
	*p = Plan{Prefill: NoSlot}
	return strict(text, (*plain)(p))
}

// UnmarshalJSON reads a slot that is left out as NoSlot.
func (s *SlabState) UnmarshalJSON(text []byte) error {
	type plain SlabState
	*s = SlabState{reservation: reservation{Prefill: NoSlot}}
	return strict(text, (*plain)(s))
}

// UnmarshalJSON reads a slot that is left out as NoSlot.
func (s *ConversationState) UnmarshalJSON(text []byte) error {
	type plain ConversationState
	*s = ConversationState{Slot: NoSlot}
	return strict(text, (*plain)(s))
}

// strict refuses unknown keys: a record of a version with other keys must not be repeated without them.
func strict(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// PickRecorded is Pick, and returns the decision with the state before it. It copies
// the state: use it for debugging, not for every request.
func (r *Router) PickRecorded(now time.Duration, q *Query, overlaps []Overlap, ex *Explanation) (*Decision, error) {
	r.awake(now) // not recorded
	r.programs.expire(now)
	d := &Decision{State: r.export(q), Now: now, Query: *q, Overlaps: append([]Overlap(nil), overlaps...)}
	plan, err := r.Pick(now, q, overlaps, ex)
	d.Plan = plan
	if err != nil {
		d.Error = err.Error()
	}
	return d, err
}

// Rerun repeats the decision from its recorded state. It does not trust the record: a bad one is an error.
func (d *Decision) Rerun() (Plan, *Explanation, error) {
	r, err := importState(d.State)
	if err != nil {
		return Plan{}, nil, err
	}
	ex := new(Explanation)
	plan, err := r.Pick(d.Now, &d.Query, d.Overlaps, ex)
	return plan, ex, err
}

// MarshalJSON writes the set as a list of slots.
func (s *SlotSet) MarshalJSON() ([]byte, error) {
	list := []kvindex.Slot{}
	for i := range s.bits {
		for slot := kvindex.Slot(i * 64); slot < kvindex.Slot(i*64+64); slot++ {
			if s.Has(slot) {
				list = append(list, slot)
			}
		}
	}
	return json.Marshal(list)
}

// UnmarshalJSON reads a list of slots.
func (s *SlotSet) UnmarshalJSON(data []byte) error {
	var list []kvindex.Slot
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("slot set: %w", err)
	}
	s.bits = nil
	for _, slot := range list {
		if slot > maxImportedSlot {
			return fmt.Errorf("slot set: %d is out of range", slot)
		}
		s.Add(slot)
	}
	return nil
}

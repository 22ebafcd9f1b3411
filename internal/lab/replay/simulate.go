package replay

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// Conditions are imperfections of the router's knowledge.
type Conditions struct {
	// EventDelay is the time in seconds from the end of a step until its events arrive.
	EventDelay float64 `yaml:"event_delay"`
	// EventLoss is the fraction of event batches that are lost: for good and unnoticed, or, if EventReplay is above 0,
	// until they are replayed that many seconds later. Later batches of the rank wait for a replay.
	EventLoss   float64 `yaml:"event_loss"`
	EventReplay float64 `yaml:"event_replay"`
	// Replicas is the number of routers that get requests in turn, 0 for one. Each has its
	// own index, which sees all events.
	Replicas int `yaml:"replicas"`
	// Skew is the fraction of requests that the first replica gets; the others get the rest in
	// turn. 0 means that all take turns.
	Skew float64 `yaml:"skew"`
	// ShareDelay is the seconds until replicas hear of each other's bookings and conversations; nil: they share nothing.
	// With ShareCredit they also share the prompts that they sent.
	ShareDelay  *float64 `yaml:"share_delay"`
	ShareCredit bool     `yaml:"share_credit"`
}

// indexBlock is the number of tokens by which the index represents a block of the workload:
// a few made-up tokens are enough for distinct hashes.
const indexBlock = 4

// record is what happened to a request.
type record struct {
	Request
	slot    kvindex.Slot
	replica int
	matched int
	// disaggregated requests have a prefill leg.
	disaggregated bool
	plan          routing.ReservationID
	booked        routing.Plan
	hashes        []kvindex.Hash
	first, ended  float64
	// placed is when it was placed, predicted and perToken what the router expected then.
	placed, predicted, perToken float64
}

// simulation is one run of one policy.
type simulation struct {
	w      *Workload
	fleet  Fleet
	policy *Policy
	cond   Conditions
	rng    *rand.Rand
	now    float64

	replicas []*replica
	matches  kvindex.Matches
	overlap  []routing.Overlap
	seed     kvindex.Hash
	tokens   []uint32

	workers  []*worker
	arrivals heapOf[Request]
	late     []batch
	notes    []note
	// heldUntil is when a rank's lost batch has been replayed.
	nextLook  float64 // when all held requests are looked at again
	heldUntil map[kvindex.Slot]float64

	handovers heapOf[handover]
	scrape    scrape
	peers     peerState
	present   []bool // by slot
	records   []*record
	live      int
	lost      int
	refused   int
	stuck     int // requests sent to a hung worker
}

// replica is one router and its index.
type replica struct {
	name   string
	router *routing.Router
	index  *kvindex.Index
	// queue holds back requests whose best target is saturated, with Policy.Config.Hold.
	queue routing.Queue
	held  map[uint64]*held
	last  uint64
}

// held is a request in a replica's queue.
type held struct {
	*record

	query routing.Query
	since time.Duration
}

// note is a replica's message to the others.
type note struct {
	at   float64
	from int
	tell func(to *replica)
}

// sharer sends a replica's changes to the others. It implements routing.Sharer.
type sharer struct {
	s    *simulation
	from int
}

func (h sharer) send(tell func(to *replica)) {
	h.s.notes = append(h.s.notes, note{h.s.now + *h.s.cond.ShareDelay, h.from, tell})
}

func (h sharer) Booked(b *routing.Booking) {
	c := *b
	c.Replica = h.s.replicas[h.from].name
	h.send(func(to *replica) { to.router.ApplyRemote(h.s.clock(), c) })
}

func (h sharer) Progressed(id routing.ReservationID, phase uint8) {
	h.send(func(to *replica) { to.router.RemotePhase(h.s.clock(), h.s.replicas[h.from].name, id, phase) })
}

func (h sharer) Released(id routing.ReservationID) {
	h.send(func(to *replica) { to.router.RemoteRelease(h.s.clock(), h.s.replicas[h.from].name, id) })
}

func (h sharer) Used(leg int, key routing.Key, tail uint64, turns uint32, target kvindex.Target, _ bool) {
	h.send(func(to *replica) { to.router.BindRemote(leg, key, tail, turns, target) })
}

func (h sharer) Added(kvindex.Target) {}

// worker is a group of ranks that step together.
type worker struct {
	ranks []*rank
	first kvindex.Slot
	// until is the end of the running step, infinite if none runs.
	until float64
}

// batch is the events of a step on their way to the router.
type batch struct {
	at     float64
	slot   kvindex.Slot
	events []change
}

// A KV transfer takes 5 ms and 320 KB per token over 25 GB/s.
const transferFixed, transferPerToken = 5e-3, 12.8e-6

// handover is a job whose KV cache arrives at its decode target.
type handover struct {
	at  float64
	job *job
}

func (h handover) Before(o handover) bool { return h.at < o.at }

func (r Request) Before(o Request) bool { return r.At < o.At }

// heapOf implements heap.Interface.
type heapOf[T interface{ Before(o T) bool }] []T

func (h *heapOf[T]) Len() int           { return len(*h) }
func (h *heapOf[T]) Less(i, j int) bool { return (*h)[i].Before((*h)[j]) }
func (h *heapOf[T]) Swap(i, j int)      { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }
func (h *heapOf[T]) Push(x any)         { *h = append(*h, x.(T)) }
func (h *heapOf[T]) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

func newSimulation(w *Workload, fleet Fleet, policy *Policy, cond Conditions, seed uint64) (*simulation, error) {
	s := &simulation{heldUntil: map[kvindex.Slot]float64{}, w: w, fleet: fleet, policy: policy, cond: cond, rng: rand.New(rand.NewPCG(seed, 0x6C6F7373))}
	for n := range max(cond.Replicas, 1) {
		config := policy.Config
		config.Node = uint64(n)
		if policy.Programs {
			config.KVTokens = int64(fleet.Engine.Capacity / max(cond.Replicas, 1))
		}
		router, err := routing.New(config)
		if err != nil {
			return nil, err
		}
		index, err := kvindex.New(kvindex.Config{BlockSize: indexBlock})
		if err != nil {
			return nil, err
		}
		if cond.ShareDelay != nil && cond.Replicas > 1 {
			router.Share(sharer{s, n})
			router.Among(n, cond.Replicas, time.Duration(*cond.ShareDelay*1e9))
		}
		s.replicas = append(s.replicas, &replica{name: fmt.Sprintf("replica%d", n), router: router, index: index,
			queue: routing.Queue{Bounds: routing.Bounds{Requests: math.MaxInt}}, held: map[uint64]*held{}})
	}
	for _, r := range s.replicas {
		r.router.UseQueue(&r.queue)
	}
	s.seed = s.replicas[0].index.Hasher().Seed("", "", "")
	var shared map[uint64]bool
	if policy.Oracle {
		shared = map[uint64]bool{}
	}
	for n := range fleet.Workers * fleet.Ranks {
		t := targetOf(kvindex.Slot(n), fleet)
		slot := kvindex.Slot(n)
		for _, r := range s.replicas {
			got, err := r.index.Add(t, "", indexBlock)
			if err != nil {
				return nil, err
			}
			if got != slot {
				return nil, errors.New("slots of a new index are not dense")
			}
			r.router.SetTarget(slot, fleet.info(n, fleet.ready(n)))
		}
		s.present = append(s.present, fleet.ready(n))
		if n%fleet.Ranks == 0 || !fleet.Coupled {
			s.workers = append(s.workers, &worker{first: slot, until: math.Inf(1)})
		}
		last := s.workers[len(s.workers)-1]
		last.ranks = append(last.ranks, newRank(fleet.engine(n), w.BlockSize, shared))
	}
	s.arrivals = w.Generate(seed)
	heap.Init(&s.arrivals)
	return s, nil
}

// run processes events until nothing is left. Ties are resolved in favour of late events,
// then of the workers in order, then of arrivals.
func (s *simulation) run() error {
	for {
		at, next := math.Inf(1), -1
		for i, w := range s.workers {
			if w.until < at {
				at, next = w.until, i
			}
		}
		arrival := math.Inf(1)
		if len(s.arrivals) > 0 {
			arrival = s.arrivals[0].At
		}
		if len(s.notes) > 0 && s.notes[0].at <= min(at, arrival) {
			s.tellReplicas()
			continue
		}
		if len(s.handovers) > 0 && s.handovers[0].at <= min(at, arrival) {
			h := heap.Pop(&s.handovers).(handover)
			s.now = h.at
			s.enqueue(h.job.slot, h.job)
			continue
		}
		if changed, err := s.changeFleet(min(at, arrival)); changed || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		switch {
		case len(s.late) > 0 && s.late[0].at <= at && s.late[0].at <= arrival:
			s.now = s.late[0].at
			if err := s.apply(s.late[0]); err != nil {
				return err
			}
			s.late = s.late[1:]
		case next >= 0 && at <= arrival:
			s.now = at
			if err := s.step(s.workers[next]); err != nil {
				return err
			}
			s.serve()
		case s.holdsAny() && (len(s.arrivals) == 0 || s.nextLook < arrival):
			s.now = max(s.now, s.nextLook) // the product looks four times a second
			s.serve()
		case len(s.arrivals) > 0:
			r := heap.Pop(&s.arrivals).(Request)
			s.now = max(r.At, s.now)
			if err := s.arrive(r); err != nil {
				return err
			}
		default:
			return s.atRest()
		}
	}
}

// tellReplicas passes the next note to all replicas but its sender.
func (s *simulation) tellReplicas() {
	note := s.notes[0]
	s.now, s.notes = note.at, s.notes[1:]
	for i, to := range s.replicas {
		if i != note.from {
			note.tell(to)
		}
	}
}

func (s *simulation) holdsAny() bool {
	return s.policy.Programs && slices.ContainsFunc(s.replicas, func(r *replica) bool { return len(r.held) > 0 })
}

func (s *simulation) clock() time.Duration { return time.Duration(s.now * 1e9) }

// arrive routes a request. One that no rank could ever admit is an error.
func (s *simulation) arrive(r Request) error {
	if size, room := s.w.BlockSize, s.fleet.Engine.Capacity; (r.Prompt+r.Output+size-1)/size > room/size {
		return fmt.Errorf("a request of %d prompt and %d output tokens does not fit into a rank's KV cache of %d tokens (--capacity), in blocks of %d", r.Prompt, r.Output, room, size)
	}
	rec := &record{Request: r, matched: -1, replica: s.receiver()}
	to := s.replicas[rec.replica]
	rec.hashes = to.index.Hasher().AppendHashes(nil, s.seed, s.tokensOf(r.Blocks), indexBlock)
	to.queue.Place(s.clock(), to.router, false, to.offer(s))
	s.lookup(to, rec)
	q := routing.Query{ID: fmt.Sprintf("r%d", len(s.records)), PromptTokens: int64(r.Prompt), Conversation: r.Conversation, TTFT: s.policy.TTFT}
	if s.policy.NoID {
		q.Conversation = ""
	}
	if s.policy.Config.Policy.Sticky.Implicit {
		for _, h := range rec.hashes {
			q.Prefix = append(q.Prefix, uint64(h))
		}
	}
	if s.policy.Peer != nil {
		s.refresh()
		slot := s.policy.Peer(s, rec)
		q.Pin = &routing.Pin{Worker: targetOf(slot, s.fleet).Worker, Rank: targetOf(slot, s.fleet).Rank}
	}
	err := s.place(to, rec, &q)
	if wait, ok := errors.AsType[*routing.HeldError](err); ok {
		to.last++
		to.held[to.last] = &held{rec, q, s.clock()}
		n := routing.Waiter{ID: to.last, Lane: wait.Lane(""), Since: s.clock(), Tokens: s.uncached(rec)}
		if s.policy.Tenants {
			n.Tenant = strconv.Itoa(rec.Tenant)
		}
		switch s.policy.Order {
		case "":
			n.Cost = n.Tokens
		case leastServed:
			n.Cost = to.queue.Attained(rec.Conversation)
		}
		to.queue.Push(n)
	} else if err != nil {
		s.refused++
	}
	return nil
}

// uncached is the tokens of a prompt that no rank holds, as of the last lookup.
func (s *simulation) uncached(rec *record) int64 {
	best := int64(0)
	for i := range s.overlap {
		best = max(best, int64(s.overlap[i].Tokens[0])+int64(s.overlap[i].Speculative))
	}
	return max(int64(rec.Prompt)-best, 0)
}

// serve places waiting requests whose target has capacity, and every 0.25 s also those that another target may take.
func (s *simulation) serve() {
	all := s.now >= s.nextLook
	if all {
		s.nextLook = s.now + 0.25
	}
	for _, to := range s.replicas {
		to.queue.Place(s.clock(), to.router, all, to.offer(s))
	}
}

// offer retries the placement of a held request.
func (to *replica) offer(s *simulation) func(w *routing.Waiter) routing.Outcome {
	return func(w *routing.Waiter) routing.Outcome {
		h := to.held[w.ID]
		h.query.Waited = s.clock() - h.since
		s.lookup(to, h.record)
		err := s.place(to, h.record, &h.query)
		if wait, ok := errors.AsType[*routing.HeldError](err); ok {
			return routing.Outcome{Moves: true, To: wait.Lane("")}
		}
		delete(to.held, w.ID)
		if err != nil {
			s.refused++
			return routing.Outcome{Leaves: true}
		}
		return routing.Placed(&h.booked)
	}
}

// place routes a request as of now.
func (s *simulation) place(to *replica, rec *record, q *routing.Query) error {
	plan, err := to.router.Pick(s.clock(), q, s.overlap, nil)
	if err != nil {
		return err
	}
	s.records = append(s.records, rec)
	rec.slot, rec.plan, rec.booked = plan.Decode, plan.Reservation, plan
	if s.policy.Order == leastServed {
		to.queue.Charge(rec.Conversation, &plan)
	}
	if !s.policy.NoCredit {
		speculate := func(to *replica) { to.index.Speculate(plan.Decode, rec.hashes, time.Unix(0, int64(s.clock()))) }
		speculate(to)
		if s.cond.ShareDelay != nil && s.cond.ShareCredit {
			sharer{s, rec.replica}.send(speculate)
		}
	}
	rec.placed, rec.predicted, rec.perToken = s.now, plan.TTFT.Seconds(), plan.PerToken.Seconds()
	s.live++
	if plan.Prefill != routing.NoSlot {
		rec.disaggregated = true
		s.enqueue(plan.Prefill, &job{record: rec, prefillLeg: true})
		return nil
	}
	s.enqueue(plan.Decode, &job{record: rec, prefillLeg: s.w.PrefillOnly})
	return nil
}

// enqueue hands a job to a rank and wakes its worker.
func (s *simulation) enqueue(slot kvindex.Slot, j *job) {
	w, k := s.at(slot)
	k.waiting = append(k.waiting, j)
	if k.hung {
		s.stuck++
	}
	if math.IsInf(w.until, 1) {
		s.begin(w)
	}
}

// transfer sends the KV cache of a finished prefill leg to the decode target: only the blocks that it lacks.
func (s *simulation) transfer(j *job) {
	_, k := s.at(j.slot)
	held := 0
	for held < len(j.Blocks) && k.blocks[j.Blocks[held]] != nil {
		held++
	}
	took := transferFixed + transferPerToken*float64(j.Prompt-held*s.w.BlockSize)
	heap.Push(&s.handovers, handover{s.now + took, &job{record: j.record, handover: true}})
}

// lookup asks a replica's index, or the infinite cache that an informed router sees.
func (s *simulation) lookup(to *replica, rec *record) {
	s.overlap = s.overlap[:0]
	size := int32(s.w.BlockSize)
	if s.policy.Informed {
		n := leading(s.workers[0].ranks[0].shared, rec.Blocks)
		for slot := range s.ranks() {
			s.overlap = append(s.overlap, routing.Overlap{Slot: kvindex.Slot(slot), Tokens: [kvindex.NumTiers]int32{int32(n) * size}})
		}
		return
	}
	to.index.Match(rec.hashes, &s.matches)
	for i := range s.matches.Holders {
		m := &s.matches.Holders[i]
		s.overlap = append(s.overlap, routing.Overlap{Slot: m.Slot, Speculative: int32(m.Speculative) * size,
			Tokens: [kvindex.NumTiers]int32{int32(m.Total()) * size}})
	}
}

// receiver is the replica that gets the next request.
func (s *simulation) receiver() int {
	n := len(s.replicas)
	switch {
	case s.cond.Skew == 0 || n == 1:
		return len(s.records) % n
	case s.rng.Float64() < s.cond.Skew:
		return 0
	default:
		return 1 + len(s.records)%(n-1)
	}
}

func (f *Fleet) role(rank int) routing.Role {
	switch {
	case f.Prefill == 0:
		return routing.Both
	case rank/f.Ranks < f.Prefill:
		return routing.Prefill
	default:
		return routing.Decode
	}
}

func targetOf(slot kvindex.Slot, fleet Fleet) kvindex.Target {
	return kvindex.Target{Worker: fmt.Sprintf("w%03d", int(slot)/fleet.Ranks), Rank: int32(int(slot) % fleet.Ranks)}
}

func (s *simulation) ranks() int { return len(s.workers) * len(s.workers[0].ranks) }

func (s *simulation) at(slot kvindex.Slot) (*worker, *rank) {
	n := len(s.workers[0].ranks)
	w := s.workers[int(slot)/n]
	return w, w.ranks[int(slot)%n]
}

// begin starts a worker's next step; coupled ranks take the time of the slowest.
func (s *simulation) begin(w *worker) {
	longest := 0.0
	for _, k := range w.ranks {
		longest = max(longest, k.begin())
	}
	w.until = math.Inf(1)
	if longest > 0 {
		w.until = s.now + longest
	}
}

// step ends a worker's step and starts the next.
func (s *simulation) step(w *worker) error {
	for i, k := range w.ranks {
		slot := w.first + kvindex.Slot(i)
		k.end(s.firstToken, s.ended)
		if len(k.events) > 0 {
			if err := s.send(batch{at: s.now + s.cond.EventDelay, slot: slot, events: k.events}); err != nil {
				return err
			}
			k.events = nil
		}
	}
	s.begin(w)
	return nil
}

// send delivers a batch after its delay, or loses it.
func (s *simulation) send(b batch) error {
	lost := s.cond.EventLoss > 0 && s.rng.Float64() < s.cond.EventLoss
	if lost && s.cond.EventReplay <= 0 {
		s.lost++
		return nil
	}
	if lost {
		s.heldUntil[b.slot] = max(s.heldUntil[b.slot], s.now+s.cond.EventReplay)
	}
	b.at = max(b.at, s.heldUntil[b.slot])
	if b.at <= s.now {
		return s.apply(b)
	}
	s.late = append(s.late, b)
	for i := len(s.late) - 1; i > 0 && s.late[i-1].at > b.at; i-- {
		s.late[i-1], s.late[i] = s.late[i], s.late[i-1]
	}
	return nil
}

func (s *simulation) firstToken(j *job) {
	if !j.handover {
		j.matched = j.hit
	}
	if j.prefillLeg && j.disaggregated {
		s.replicas[j.replica].router.PrefillDone(s.clock(), j.plan)
		return
	}
	j.first = s.now
	s.replicas[j.replica].router.FirstToken(s.clock(), j.plan)
}

func (s *simulation) ended(j *job) {
	if j.prefillLeg && j.disaggregated {
		s.transfer(j)
		return
	}
	s.replicas[j.replica].router.Generated(s.clock(), j.plan, int64(j.Output))
	s.over(j)
}

// over ends a request. Its client then sends its next ones.
func (s *simulation) over(j *job) {
	j.ended = s.now
	s.live--
	s.replicas[j.replica].router.Release(s.clock(), j.plan)
	if s.w.PrefillOnly {
		j.ended += s.w.DecodePerToken * float64(j.Output)
	}
	if s.w.Follow != nil {
		for _, r := range s.w.Follow(&j.Request, j.ended) {
			heap.Push(&s.arrivals, r)
		}
	}
}

func (s *simulation) tokensOf(blocks []uint64) []uint32 {
	s.tokens = s.tokens[:0]
	for _, b := range blocks {
		s.tokens = append(s.tokens, uint32(b), uint32(b>>32), 0, 0)
	}
	return s.tokens
}

// apply applies a batch to the index, as events of an engine.
func (s *simulation) apply(b batch) error {
	for i := 0; i < len(b.events); {
		c := b.events[i]
		e := kvindex.Event{Kind: kvindex.Removed, Hashes: []kvindex.EngineHash{kvindex.EngineHash(c.name)}}
		i++
		if c.stored {
			// Consecutive blocks make one event.
			n := len(c.names)
			for i < len(b.events) && b.events[i].stored && len(b.events[i].names) == n+1 && b.events[i].names[n-1] == c.names[n-1] {
				c = b.events[i]
				n++
				i++
			}
			first := n - 1
			for first > 0 && e.Hashes[0] != kvindex.EngineHash(c.names[first]) {
				first--
			}
			e.Kind, e.BlockSize = kvindex.Stored, indexBlock
			e.Tokens = s.tokensOf(c.names[first:])
			e.Hashes = e.Hashes[:0]
			for _, name := range c.names[first:] {
				e.Hashes = append(e.Hashes, kvindex.EngineHash(name))
			}
			if e.HasParent = first > 0; e.HasParent {
				e.Parent = kvindex.EngineHash(c.names[first-1])
			}
		}
		for _, r := range s.replicas {
			if err := r.index.Apply(b.slot, &e); err != nil && s.lost == 0 {
				return fmt.Errorf("apply an event of rank %d: %w", b.slot, err)
			}
		}
	}
	return nil
}

// atRest checks that everything has been released.
func (s *simulation) atRest() error {
	for _, r := range s.replicas {
		if n := r.queue.Len() + len(r.held); n > 0 {
			return fmt.Errorf("%d requests are held for ever", n)
		}
	}
	if s.live != 0 {
		return fmt.Errorf("%d requests never ended", s.live)
	}
	for slot := range s.ranks() {
		for _, r := range s.replicas {
			if l := r.router.Load(kvindex.Slot(slot)); l != (routing.Load{}) {
				return fmt.Errorf("rank %d is left with load %+v", slot, l)
			}
		}
		_, k := s.at(kvindex.Slot(slot))
		if k.used() != 0 || k.busy() || k.resident != 0 {
			return fmt.Errorf("rank %d is left with %d places and %d resident tokens", slot, k.used(), k.resident)
		}
	}
	return nil
}

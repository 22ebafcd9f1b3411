package routing

import (
	"cmp"
	"container/heap"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Lane groups the waiters that compete for the same capacity: if the first of a lane
// cannot be placed, the others of the lane cannot either.
type Lane struct {
	// Class is the model, with anything else that restricts the targets; "" if there is a Slot.
	Class string
	// Slot is the target that the waiters are held for, NoSlot if no target has capacity for them.
	Slot kvindex.Slot
	// Unmet is HeldError.Unmet: others that are held for the Slot may be placed first.
	Unmet bool
	// New is set for new programs that wait for memory (see Config.KVTokens): for a while, those that fit may overtake.
	New bool
	// Above is set for the waiters of a tenant that has its share of the places, see Query.Share. Class then names it too.
	Above bool
}

// Waiter is a request that waits for capacity.
type Waiter struct {
	// ID is chosen by the caller: unique and increasing.
	ID   uint64
	Lane Lane
	// Priority is the band. Higher ones go first; requests below 0 may be shed for others.
	Priority int
	// Tenant shares a band's capacity fairly with the band's other tenants, by Weight; 0 means 1.
	Tenant string
	Weight float64
	// Tokens is the number of prompt tokens to compute, for reports and Router.UseQueue.
	Tokens int64
	// Cost orders the waiters of a tenant: the lowest goes first, after subtracting 2,000 per second of waiting. Equal
	// costs go first in, first out.
	Cost int64
	// Bytes is the memory that the waiter holds.
	Bytes int64
	// Since is when it began to wait, Deadline when it stops, both as durations since start.
	Since, Deadline time.Duration
}

// Bounds limit waiters. Bytes of 0 are unlimited.
type Bounds struct {
	Requests int
	Bytes    int64
}

// Outcome is the result of offering a waiter a place. The zero value leaves it and all others of its lane waiting.
type Outcome struct {
	// Leaves takes the waiter out of the queue.
	Leaves bool
	// Served is the number of tokens that its tenant is charged for.
	Served int64
	// Moves puts the waiter into the lane To, which is blocked until the next call.
	Moves bool
	To    Lane
	// Skips keeps a waiter that stays from blocking its lane in this call. Place sets it.
	Skips bool
}

const (
	// ageing is how many tokens a second of waiting counts in the order of a tenant's waiters.
	ageing = 2000
	// spareTenants is the least number of tenants without waiters that a band remembers.
	spareTenants = 256
	// perRequest is what a placed request costs its tenant and conversation for each of its sequences in addition to its
	// uncached tokens, for the engine's time that its answer takes.
	perRequest = 1000
	// maxServed bounds the conversations whose service is remembered.
	maxServed = 1 << 16
	// maxPassed is how many new programs may be overtaken in a call of Place, and passFor how long each may be, so that
	// a large one gets its turn.
	maxPassed = 16
	passFor   = 10 * time.Second
	// maxOffers bounds the waiters that one freed place is offered to, with Config.Hold. A waiter whose best target has
	// changed uses up an offer but not the place.
	maxOffers = 64
	// paceOver is over how many placed waiters Drain takes the mean, and longestDrain its greatest result.
	paceOver     = 64
	longestDrain = time.Minute
)

// Queue is a bounded wait queue. It orders waiters; the caller holds the streams. Higher priority goes first. Within a
// priority, the tenant that was served the fewest tokens relative to its weight goes first (a virtual token counter: a
// tenant that returns starts at the counter of the others). Within a tenant the lowest Cost goes first, with ageing.
// The zero value refuses all. It is not safe for concurrent use.
type Queue struct {
	Bounds
	// Bands bound single priorities, within the bounds of the queue.
	Bands map[int]Bounds

	waiters       map[uint64]*waiting
	lanes         map[Lane]*lane
	bands         map[int]*band
	bytes, tokens int64
	// held is the Tokens of the waiters that are held for a target, by slot.
	held []int64
	// idle is the number of idle targets when waiters were last looked at.
	idle int
	// served holds the tokens served to each conversation. A map with maxServed entries becomes older, and the map that
	// was older is dropped.
	served, older map[Key]int64
	// placed is the number of waiters that got places while there were waiters, busy how long that was until counted.
	placed        float64
	busy, counted time.Duration
	// open and skipped are scratch memory of Serve.
	open    []*lane
	skipped []*waiting
}

// waiting is a waiter with its positions in the queue.
type waiting struct {
	Waiter

	key    int64
	tenant *tenant
	group  *group
	at     int
	// older and newer are the tenant's waiters that came before and after.
	older, newer *waiting
	// shed is set while Push has chosen the waiter to make room.
	shed bool
}

func (w *waiting) index() *int { return &w.at }

func (w *waiting) before(o *waiting) bool { return w.key < o.key || w.key == o.key && w.ID < o.ID }

// band is the waiters of one priority.
type band struct {
	tenants  map[string]*tenant
	requests int
	bytes    int64
	// clock is the counter of the tenant that was served last, as of its choice.
	clock float64
}

// tenant is a tenant of one band. served is its counter, in tokens divided by its weight.
type tenant struct {
	name           string
	served, weight float64
	requests       int
	bytes          int64
	youngest       *waiting
}

// lane holds the waiters of a Lane: its non-empty bands, highest priority first.
type lane struct {
	bands []*laneBand
}

type laneBand struct {
	priority int
	groups   indexedHeap[*group]
	byTenant map[*tenant]*group
}

// group holds the waiters of a tenant in a lane and band. Groups are ordered by key, which is updated to the tenant's
// counter when the group reaches the front.
type group struct {
	tenant  *tenant
	key     float64
	waiters indexedHeap[*waiting]
	at      int
}

func (g *group) index() *int { return &g.at }

func (g *group) before(o *group) bool {
	return g.key < o.key || g.key == o.key && g.waiters[0].before(o.waiters[0])
}

// heapItem is an element of an indexedHeap.
type heapItem[T any] interface {
	index() *int
	before(other T) bool
}

// indexedHeap is a heap.Interface whose elements know their indices.
type indexedHeap[T heapItem[T]] []T

func (p indexedHeap[T]) Len() int           { return len(p) }
func (p indexedHeap[T]) Less(i, j int) bool { return p[i].before(p[j]) }
func (p indexedHeap[T]) Swap(i, j int) {
	p[i], p[j] = p[j], p[i]
	*p[i].index(), *p[j].index() = i, j
}

func (p *indexedHeap[T]) Push(x any) {
	*x.(T).index() = len(*p)
	*p = append(*p, x.(T))
}

func (p *indexedHeap[T]) Pop() any {
	last := len(*p) - 1
	x := (*p)[last]
	clear((*p)[last:])
	*p = (*p)[:last]
	return x
}

// Len is the number of waiters.
func (q *Queue) Len() int { return len(q.waiters) }

// Tokens is the sum of the waiters' Tokens.
func (q *Queue) Tokens() int64 { return q.tokens }

// Each calls f for every waiter, in no particular order. f must not change the queue.
func (q *Queue) Each(f func(w *Waiter)) {
	for _, w := range q.waiters {
		f(&w.Waiter)
	}
}

// Push adds a waiter. If that exceeds a bound, others make room: first those of the lowest priority below the new one's,
// lowest first; then the youngest of the tenant with the largest share of its band, as long as that exceeds the share
// of the new one's tenant. If that is not enough, the new one is refused and the queue is unchanged.
func (q *Queue) Push(w Waiter) (shed []Waiter, accepted bool) {
	if q.waiters == nil {
		q.waiters, q.lanes, q.bands = map[uint64]*waiting{}, map[Lane]*lane{}, map[int]*band{}
	}
	own, bounded := q.Bands[w.Priority]
	if !q.fits(0, 0, &w) || bounded && !own.fits(0, 0, &w) {
		return nil, false
	}
	var victims []*waiting
	for {
		b := q.bands[w.Priority]
		if b == nil {
			b = &band{}
		}
		full := !q.fits(len(q.waiters)-len(victims), q.bytes, &w)
		if accepted = !full && (!bounded || own.fits(b.requests, b.bytes, &w)); accepted {
			break
		}
		victim := q.victim(&w, full)
		if victim == nil {
			break
		}
		victims, victim.shed = append(victims, victim), true
		q.count(victim, -1)
	}
	for _, v := range victims {
		v.shed = false
		q.count(v, 1)
	}
	if !accepted {
		return nil, false
	}
	for _, v := range victims {
		shed = append(shed, v.Waiter)
		q.remove(v)
	}
	b := q.bands[w.Priority]
	if b == nil {
		b = &band{tenants: map[string]*tenant{}}
		q.bands[w.Priority] = b
	}
	t := b.tenants[w.Tenant]
	if t == nil {
		b.forget()
		t = &tenant{name: w.Tenant}
		b.tenants[w.Tenant] = t
	}
	t.weight = cmp.Or(w.Weight, 1)
	if t.requests == 0 {
		t.served = max(t.served, b.clock)
	}
	n := &waiting{Waiter: w, key: w.Cost + int64(w.Since/(time.Second/ageing)), tenant: t, older: t.youngest}
	if n.older != nil {
		n.older.newer = n
	}
	t.youngest = n
	if len(q.waiters) == 0 {
		q.counted = w.Since
	}
	q.waiters[w.ID] = n
	q.count(n, 1)
	q.enter(n)
	return shed, true
}

func (b Bounds) fits(requests int, bytes int64, w *Waiter) bool {
	return requests < b.Requests && (b.Bytes == 0 || bytes+w.Bytes <= b.Bytes)
}

// victim returns the waiter that must make room for a new one, nil for none. If only the bound of the new one's band is
// exceeded, only waiters of the band can make room.
func (q *Queue) victim(w *Waiter, full bool) *waiting {
	lowest := w.Priority
	for priority, b := range q.bands {
		if full && b.requests > 0 && priority < lowest {
			lowest = priority
		}
	}
	b := q.bands[lowest]
	if b == nil {
		return nil
	}
	// A tenant's share is its share of requests or of bytes, whichever is greater.
	share := func(t *tenant, requests int, bytes int64) float64 {
		return max(float64(t.requests+requests)/float64(max(q.Requests, 1)), float64(t.bytes+bytes)/float64(max(q.Bytes, 1))) / t.weight
	}
	var most *tenant
	least := math.Inf(-1)
	if lowest == w.Priority {
		own := tenant{}
		if t := b.tenants[w.Tenant]; t != nil {
			own = *t
		}
		own.weight = cmp.Or(w.Weight, 1)
		least = share(&own, 1, w.Bytes)
	}
	for _, t := range b.tenants {
		if s := share(t, 0, 0); t.requests > 0 && (s > least || s == least && most != nil && t.name > most.name) {
			most, least = t, s
		}
	}
	if most == nil {
		return nil
	}
	youngest := most.youngest
	for youngest.shed {
		youngest = youngest.older
	}
	return youngest
}

// forget drops the tenants without waiters if there are many. When such a tenant returns, the last request that was
// served to it does not count.
func (b *band) forget() {
	if len(b.tenants) >= 2*b.requests+spareTenants {
		maps.DeleteFunc(b.tenants, func(_ string, t *tenant) bool { return t.requests == 0 })
	}
}

// Remove takes a waiter out of the queue, and reports whether it was there.
func (q *Queue) Remove(id uint64) bool {
	w := q.waiters[id]
	if w != nil {
		q.remove(w)
	}
	return w != nil
}

func (q *Queue) remove(w *waiting) {
	delete(q.waiters, w.ID)
	if w.older != nil {
		w.older.newer = w.newer
	}
	if w.newer != nil {
		w.newer.older = w.older
	} else {
		w.tenant.youngest = w.older
	}
	q.leave(w)
	q.count(w, -1)
	if b := q.bands[w.Priority]; b.requests == 0 {
		delete(q.bands, w.Priority)
	}
}

func (q *Queue) count(w *waiting, sign int) {
	b, bytes := q.bands[w.Priority], int64(sign)*w.Bytes
	q.bytes += bytes
	q.tokens += int64(sign) * w.Tokens
	b.requests, b.bytes = b.requests+sign, b.bytes+bytes
	w.tenant.requests, w.tenant.bytes = w.tenant.requests+sign, w.tenant.bytes+bytes
}

// hold counts the waiter on the target that it is held for.
func (q *Queue) hold(w *waiting, sign int64) {
	if w.Lane.Slot == NoSlot {
		return
	}
	for int(w.Lane.Slot) >= len(q.held) {
		q.held = append(q.held, 0)
	}
	q.held[w.Lane.Slot] += sign * w.Tokens
}

// enter puts a waiter into its lane.
func (q *Queue) enter(w *waiting) {
	q.hold(w, 1)
	l := q.lanes[w.Lane]
	if l == nil {
		l = &lane{}
		q.lanes[w.Lane] = l
	}
	i, found := l.find(w.Priority)
	if !found {
		l.bands = slices.Insert(l.bands, i, &laneBand{priority: w.Priority, byTenant: map[*tenant]*group{}})
	}
	b := l.bands[i]
	g := b.byTenant[w.tenant]
	if g == nil {
		g = &group{tenant: w.tenant, key: w.tenant.served}
		b.byTenant[w.tenant] = g
	}
	w.group = g
	heap.Push(&g.waiters, w)
	if len(g.waiters) == 1 {
		heap.Push(&b.groups, g)
	} else {
		heap.Fix(&b.groups, g.at)
	}
}

// leave takes a waiter out of its lane.
func (q *Queue) leave(w *waiting) {
	q.hold(w, -1)
	l, g := q.lanes[w.Lane], w.group
	heap.Remove(&g.waiters, w.at)
	i, _ := l.find(w.Priority)
	b := l.bands[i]
	if len(g.waiters) > 0 {
		heap.Fix(&b.groups, g.at)
		return
	}
	b.groups.drop(g.at)
	delete(b.byTenant, w.tenant)
	if len(b.groups) == 0 {
		l.bands = slices.Delete(l.bands, i, i+1)
	}
	if len(l.bands) == 0 {
		delete(q.lanes, w.Lane)
	}
}

// drop removes the element at an index without comparing it.
func (p *indexedHeap[T]) drop(at int) {
	last := len(*p) - 1
	p.Swap(at, last)
	p.Pop()
	if at < last {
		heap.Fix(p, at)
	}
}

// find returns the index of a priority's band, or where it would be, and whether it is there.
func (l *lane) find(priority int) (int, bool) {
	return slices.BinarySearchFunc(l.bands, priority, func(b *laneBand, priority int) int { return cmp.Compare(priority, b.priority) })
}

// first returns the waiter that the lane serves next.
func (l *lane) first() *waiting {
	b := l.bands[0]
	for {
		g := b.groups[0]
		if g.key == g.tenant.served {
			return g.waiters[0]
		}
		// Counters only grow, so only a group behind its tenant's counter has to move.
		g.key = g.tenant.served
		heap.Fix(&b.groups, 0)
	}
}

// byFirst orders lanes by their first waiters.
func byFirst(l, o *lane) int {
	a, b := l.first(), o.first()
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.tenant.served, b.tenant.served), cmp.Compare(a.key, b.key), cmp.Compare(a.ID, b.ID))
}

// Attained is the number of tokens that a conversation was served so far.
func (q *Queue) Attained(conversation string) int64 {
	key := new(Config).keyOf(conversation)
	return cmp.Or(q.served[key], q.older[key])
}

// Charge adds a placed request's cost in tokens to what its conversation was served. It does not keep the string.
func (q *Queue) Charge(conversation string, plan *Plan) {
	sum := q.Attained(conversation) + plan.served()
	if q.served == nil || len(q.served) >= maxServed {
		q.served, q.older = map[Key]int64{}, q.served
	}
	q.served[new(Config).keyOf(conversation)] = sum
}

// Placed is the outcome of a waiter that leaves the queue with a plan.
func Placed(plan *Plan) Outcome { return Outcome{Leaves: true, Served: plan.served()} }

// served is what the request costs its tenant and conversation.
func (p *Plan) served() int64 { return p.Miss + perRequest*sequences(p.Sequences) }

// Place offers the router's free capacity to waiters. With all, waiters whose target is saturated try again too,
// because another target may now be better, such as an idle one. While a target is idle, a waiter that stays held does
// not block others, because the idle target's cost differs between them.
func (q *Queue) Place(now time.Duration, r *Router, all bool, offer func(w *Waiter) Outcome) {
	if q.Len() == 0 {
		q.idle = 0
		return
	}
	q.busy, q.counted = q.busy+max(now-q.counted, 0), max(now, q.counted)
	budget, idle, passed := maxOffers, r.Idle(now), 0
	if r.config.Hold == 0 {
		budget = math.MaxInt
	}
	q.Serve(budget, func(l Lane) bool {
		return all || idle > q.idle || l.Slot == NoSlot || !r.Saturated(now, l.Slot)
	}, func(w *Waiter) Outcome {
		out := offer(w)
		out.Skips = out.Moves && out.To.Slot != NoSlot && idle > 0
		if out.Moves && out.To.New && passed < maxPassed && now-w.Since < passFor {
			out.Skips = true
			passed++
		}
		if out.Served > 0 {
			idle = r.Idle(now)
			if q.placed++; q.placed >= paceOver {
				q.placed, q.busy = q.placed/2, q.busy/2
			}
		}
		return out
	})
	q.idle = idle
}

// TenantState is a tenant that has waiters in a priority. Served is its counter, in tokens divided by Weight.
type TenantState struct {
	Tenant   string  `json:"tenant"`
	Priority int     `json:"priority"`
	Weight   float64 `json:"weight"`
	Requests int     `json:"requests"`
	Served   int64   `json:"served"`
}

// Tenants lists at most that many tenants, those with the most waiters first. It keeps no others: thousands may wait.
func (q *Queue) Tenants(most int) (list []TenantState) {
	order := func(a, b TenantState) int {
		return cmp.Or(b.Requests-a.Requests, b.Priority-a.Priority, strings.Compare(a.Tenant, b.Tenant))
	}
	for priority, b := range q.bands {
		for _, t := range b.tenants {
			s := TenantState{t.name, priority, t.weight, t.requests, int64(t.served)}
			if t.requests > 0 && most > 0 && (len(list) < most || order(s, list[most-1]) < 0) {
				at, _ := slices.BinarySearchFunc(list, s, order)
				list = slices.Insert(list[:min(len(list), most-1)], at, s)
			}
		}
	}
	return list
}

// Drain estimates how long the waiters take to get places, up to a minute, by the pace at which the last ones got theirs.
func (q *Queue) Drain(now time.Duration) time.Duration {
	return time.Duration(min(float64(q.Len())*float64(q.busy+max(now-q.counted, 0))/max(q.placed, 1), float64(longestDrain)))
}

// Serve offers places to waiters, in order over all lanes that are ready, until none can be placed or the budget of
// offers is used up. It leaves a lane at the first waiter that stays and is not skipped, or when the lane is no longer
// ready after a placement. offer must not change the queue.
func (q *Queue) Serve(budget int, ready func(l Lane) bool, offer func(w *Waiter) Outcome) {
	open := q.open[:0]
	for name, l := range q.lanes {
		if ready(name) {
			open = append(open, l)
		}
	}
	defer func() {
		for _, w := range q.skipped {
			q.enter(w)
		}
		clear(open[:cap(open)])
		clear(q.skipped)
		q.open, q.skipped = open[:0], q.skipped[:0]
	}()
	for ; len(open) > 0 && budget > 0; budget-- {
		l := slices.MinFunc(open, byFirst)
		w := l.first()
		q.hold(w, -1) // it does not wait behind itself
		v := offer(&w.Waiter)
		q.hold(w, 1)
		var closed *lane
		switch {
		case v.Moves && v.Skips:
			q.leave(w)
			w.Lane = v.To
			q.skipped = append(q.skipped, w)
		case v.Moves && v.To != w.Lane:
			// The tenant is above its share: its other waiters in the lane cannot be placed either, and must not use up the budget.
			for g, all := w.group, v.To.Above && w.Lane.Slot == NoSlot; ; w = g.waiters[0] {
				q.leave(w)
				w.Lane = v.To
				q.enter(w)
				if !all || len(g.waiters) == 0 {
					break
				}
			}
			closed = q.lanes[v.To]
		case v.Leaves:
			b := q.bands[w.Priority]
			if v.Served > 0 {
				b.clock = max(b.clock, w.tenant.served)
				w.tenant.served += float64(v.Served) / w.tenant.weight
			}
			q.remove(w)
		default:
			closed = l
		}
		open = slices.DeleteFunc(open, func(o *lane) bool {
			return o == closed || len(o.bands) == 0 || v.Served > 0 && !ready(o.first().Lane)
		})
	}
}

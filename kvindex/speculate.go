package kvindex

import (
	"math"
	"slices"
	"time"
)

// claim is the credit for one stretch of blocks. It is valid only as long as generation is the
// segment's and its number is not below the slot's claimsFrom.
type claim struct {
	expires             int64 // after Index.origin, in nanoseconds
	segment, generation uint32
	slot                Slot
	start, end          uint16
}

// claimQueue is a FIFO ring; all credit has the same TTL, so it is sorted by expiry.
type claimQueue struct {
	ring         []claim
	head, length int
	blocks       int    // of all claims
	gone         uint64 // claims that have left the queue so far: the number of the first one in it
}

// Credit identifies what one call of Speculate claimed; the zero Credit is empty.
type Credit struct {
	first, end uint64  // numbers of claims
	handed     *change // if another writer claims, the change that will contain them
}

func (q *claimQueue) push(c claim) {
	if q.length == len(q.ring) {
		grown := make([]claim, max(64, 2*len(q.ring)))
		for i := range q.length {
			grown[i] = q.ring[(q.head+i)%len(q.ring)]
		}
		q.ring, q.head = grown, 0
	}
	q.ring[(q.head+q.length)%len(q.ring)] = c
	q.length++
	q.blocks += int(c.end - c.start)
}

func (q *claimQueue) pop() (number uint64, c claim) {
	number, c = q.gone, q.ring[q.head]
	q.head = (q.head + 1) % len(q.ring)
	q.length--
	q.gone++
	q.blocks -= int(c.end - c.start)
	return number, c
}

func (q *claimQueue) reset() { *q = claimQueue{gone: q.gone + uint64(q.length)} }

// next returns the number of the next claim to be pushed.
func (q *claimQueue) next() uint64 { return q.gone + uint64(q.length) }

// take empties a claim, which keeps its place in the queue; it reports false if the claim has left the queue.
func (q *claimQueue) take(number uint64) (claim, bool) {
	if number < q.gone || number >= q.next() {
		return claim{}, false
	}
	at := &q.ring[(q.head+int(number-q.gone))%len(q.ring)]
	c := *at
	at.end = at.start
	q.blocks -= int(c.end - c.start)
	return c, true
}

// Speculate credits a target with a prompt that was just sent to it, until its events confirm
// the blocks one by one, the target is cleared, or Config.SpeculativeTTL has passed since the
// block was first claimed, even if events confirmed and removed it since. Only the part that the
// target neither holds nor is credited with already takes memory, and only that part can be withdrawn.
//
// Speculate does not wait for another writer. Lookups that begin after it has returned see the
// credit. If another change was running, they see it when that change has been made, at the latest.
// While credited prompts of MaxSpeculative blocks wait for their events, further prompts get no credit.
func (x *Index) Speculate(s Slot, hashes []Hash, now time.Time) Credit {
	return x.SpeculatePrompt(s, hashes, len(hashes)*x.cfg.BlockSize+1, now)
}

// SpeculatePrompt is Speculate of a prompt with this number of tokens. See MatchPrompt.
func (x *Index) SpeculatePrompt(s Slot, hashes []Hash, tokens int, now time.Time) Credit {
	if x.tryLock() {
		defer x.unlock()
		return x.speculate(s, hashes, tokens, now)
	}
	n := int64(len(hashes))
	if x.handedBlocks.Add(n) > int64(x.cfg.MaxSpeculative) {
		x.handedBlocks.Add(-n)
		return Credit{}
	}
	own := slices.Clone(hashes)
	c := &change{}
	c.apply = func() {
		defer x.handedBlocks.Add(-n)
		c.credit = x.speculate(s, own, tokens, now)
	}
	x.handOver(c)
	return Credit{handed: c}
}

func (x *Index) speculate(s Slot, hashes []Hash, tokens int, now time.Time) Credit {
	if int(s) >= len(x.slots) || !x.slots[s].inUse || len(hashes) > x.cfg.MaxSpeculative {
		return Credit{}
	}
	if window := x.slots[s].lone; window > 0 {
		if hashes = hashes[:min(len(hashes), x.readable(tokens))]; len(hashes)*x.cfg.BlockSize >= window {
			return Credit{}
		}
	}
	if x.origin.Load() == nil {
		first := now
		x.origin.Store(&first)
	}
	x.expire(x.since(now), x.cfg.MaxSpeculative-len(hashes))
	first := x.claims.next()
	expires := x.since(now) + int64(x.cfg.SpeculativeTTL)
	var last place
	for at := 0; at < len(hashes); {
		if g, n := x.step(hashes[at:]); n > 0 {
			id := x.findStart(uint64(hashes[at]))
			x.claimGaps(s, g, id, n, expires)
			last = placeAt(id, n-1)
			at += n
			continue
		}
		end := at + 1
		for end < len(hashes) && x.findStart(uint64(hashes[end])) == 0 {
			end++
		}
		for fresh := hashes[at:end]; len(fresh) > 0; at = end {
			last, fresh = x.claimFresh(s, last, fresh, expires)
		}
	}
	if x.slots[s].windows != nil {
		x.claimTail(s, hashes[:min(len(hashes), x.readable(tokens))], expires)
	}
	end := x.claims.next()
	x.evict()
	return Credit{first: first, end: end}
}

// Withdraw ends credit before its TTL, because the target did not accept the prompt. Blocks that events have confirmed
// stay. A later prompt with the same prefix loses the shared part of its credit until events confirm it: credit may be
// too low, but never too high. Like Speculate it does not wait for another writer.
func (x *Index) Withdraw(c Credit) {
	switch {
	case c.first == c.end && c.handed == nil:
	case x.tryLock():
		defer x.unlock()
		x.withdraw(c)
	default:
		x.handOver(&change{apply: func() { x.withdraw(c) }})
	}
}

func (x *Index) withdraw(c Credit) {
	if c.handed != nil {
		c = c.handed.credit // claimed before: changes are applied in the order of their calls
	}
	for number := c.first; number < c.end; number++ {
		if taken, ok := x.claims.take(number); ok {
			x.unclaim(number, taken)
		}
	}
	x.evict()
}

// claimGaps claims the blocks among the first n of a segment that the slot lacks.
func (x *Index) claimGaps(s Slot, g segment, id uint32, n int, expires int64) {
	runs := g.runs()
	i := lowerBound(runs, makeRun(s, 0, 0, 0))
	k := 0
	var level [numLevels]uint32
	if i < len(runs) && runSlot(runs[i]) == s {
		k, level = cover(runs[i:], n)
	}
	if have := int(level[numLevels-1]); have < n { // parts after the first gap are rarely held; each is skipped
		gaps(runs[i:i+k], have, n, func(from, to int) { x.claim(s, id, from, to, expires) })
	}
}

// claimFresh makes room after last for blocks that no target holds, and claims the first of them. It returns the place
// of the last claimed block and the remaining blocks.
func (x *Index) claimFresh(s Slot, last place, hashes []Hash, expires int64) (place, []Hash) {
	x.gate.shut()
	id, from, n := x.room(last.segment(), last.offset()+1, len(hashes))
	n = min(n, writeStep)
	g := x.seg(id)
	g.setBlocks(from + n)
	own, names := g.own(), g.names()
	for i := range n {
		own[from+i] = uint64(hashes[i])
		names[from+i] = 0
	}
	if from == 0 {
		x.starts.insert(x.hasher.mixName(own[0]), placeAt(id, 0))
	}
	x.liveBlocks += int64(n)
	x.gate.open()
	x.claim(s, id, from, from+n, expires)
	return placeAt(id, from+n-1), hashes[n:]
}

func (x *Index) claim(s Slot, id uint32, start, end int, expires int64) {
	x.gate.shut()
	g := x.seg(id)
	x.revive(g, start, end)
	x.hold(id, s, speculative, start, end)
	x.gate.open()
	x.pushClaim(claim{expires: expires, segment: id, generation: x.generation(id), slot: s, start: uint16(start), end: uint16(end)})
}

func (x *Index) pushClaim(c claim) {
	if x.claims.length == 0 {
		x.due.Store(c.expires)
	}
	x.claims.push(c)
}

// since is the time since origin, in nanoseconds. It is monotonic if now is, so steps of the wall clock do not affect
// TTLs.
func (x *Index) since(now time.Time) int64 { return int64(now.Sub(*x.origin.Load())) }

// Expire ends credit whose TTL has passed. Speculate does so too; call Expire before Match and
// Stats in case no request came for a while. If no credit has expired it costs two atomic loads;
// if another change is running it leaves the credit to the next call.
func (x *Index) Expire(now time.Time) {
	if x.origin.Load() == nil || x.since(now) < x.due.Load() || !x.tryLock() {
		return
	}
	defer x.unlock()
	x.expire(x.since(now), x.cfg.MaxSpeculative)
	x.evict()
}

// expire ends credit whose TTL has passed, and then the oldest until at most limit blocks of it are left.
func (x *Index) expire(now int64, limit int) {
	q := &x.claims
	for q.length > 0 && (q.ring[q.head].expires <= now || q.blocks > limit) {
		x.unclaim(q.pop())
	}
	due := int64(math.MaxInt64)
	if q.length > 0 {
		due = q.ring[q.head].expires
	}
	x.due.Store(due)
}

// unclaim removes the credit of a claim, except for blocks that events have confirmed.
func (x *Index) unclaim(number uint64, c claim) {
	if c.end == tailMark && number >= x.slots[c.slot].claimsFrom {
		x.unclaimTail(number, c)
	}
	if c.start == c.end || number < x.slots[c.slot].claimsFrom || !x.alive(c.segment) || x.generation(c.segment) != c.generation {
		return
	}
	x.gate.shut()
	defer x.gate.open()
	for x.alive(c.segment) && x.generation(c.segment) == c.generation {
		runs := x.seg(c.segment).runs()
		i := firstTouching(runs, c.slot, speculative, int(c.start))
		if i == len(runs) || !sameHolder(runs[i], makeRun(c.slot, speculative, 0, 0)) || runStart(runs[i]) >= int(c.end) {
			return
		}
		x.unhold(c.segment, c.slot, speculative, max(runStart(runs[i]), int(c.start)), min(runEnd(runs[i]), int(c.end)))
	}
}

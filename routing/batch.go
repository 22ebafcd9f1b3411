package routing

import (
	"sort"
	"time"
)

// BatchItem is one request of a batch.
type BatchItem struct {
	Query       *Query
	Overlaps    []Overlap
	Explanation *Explanation
}

// BatchResult is the answer to a BatchItem.
type BatchResult struct {
	Plan Plan
	Err  error
}

// PickBatch places requests that have waited together, and returns the answers in
// the order of the items. Strict pins come first, then the other pins; the rest is
// placed group by group, longest prompt first, so that turns of one conversation see
// each other's load. The fair-share cap counts all that remain to be placed. A
// request that finds no room gets a *CapacityError and does not stop the others.
func (r *Router) PickBatch(now time.Duration, items []BatchItem) []BatchResult {
	results := make([]BatchResult, len(items))
	order := batchOrder(items)
	for n, i := range order {
		it := &items[i]
		plan, err := r.pick(now, it.Query, it.Overlaps, int64(len(order)-n), it.Explanation)
		results[i] = BatchResult{plan, err}
	}
	return results
}

// batchOrder returns the items' places in the order of placing. Groups come in the
// order of their first item.
func batchOrder(items []BatchItem) []int {
	order := make([]int, len(items))
	firstOf := map[uint64]int{}
	for i := range items {
		order[i] = i
		if q := items[i].Query; q.Pin == nil && q.Group != 0 {
			if _, ok := firstOf[q.Group]; !ok {
				firstOf[q.Group] = i
			}
		}
	}
	class := func(q *Query) int {
		switch {
		case q.Pin.strict():
			return 0
		case q.Pin != nil:
			return 1
		default:
			return 2
		}
	}
	group := func(i int) int {
		if at, ok := firstOf[items[i].Query.Group]; ok {
			return at
		}
		return i
	}
	sort.SliceStable(order, func(a, b int) bool {
		i, j := order[a], order[b]
		p, q := items[i].Query, items[j].Query
		if cp, cq := class(p), class(q); cp != cq || cp < 2 {
			return cp < cq
		}
		if gi, gj := group(i), group(j); gi != gj {
			return gi < gj
		}
		return p.PromptTokens > q.PromptTokens
	})
	return order
}

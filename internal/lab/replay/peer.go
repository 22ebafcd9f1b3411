package replay

import (
	"math"

	"github.com/kvlane/kvlane/kvindex"
)

// scrapeEvery bounds the age in seconds of a peer's view of engine load.
const scrapeEvery = 0.05

// scrape is a peer's view of the load.
type scrape struct {
	next    float64
	waiting []float64
	used    []float64
}

// refresh scrapes all ranks if it is time.
func (s *simulation) refresh() {
	if s.now < s.scrape.next {
		return
	}
	s.scrape.next = (math.Floor(s.now/scrapeEvery) + 1) * scrapeEvery
	s.scrape.waiting, s.scrape.used = s.scrape.waiting[:0], s.scrape.used[:0]
	for slot := range s.ranks() {
		_, k := s.at(kvindex.Slot(slot))
		s.scrape.waiting = append(s.scrape.waiting, float64(len(k.waiting)))
		s.scrape.used = append(s.scrape.used, float64(k.pinned+k.private)/float64(k.places))
	}
}

// llmd is the weighted sum of scores in [0, 1] that llm-d's router documents: 3 prefix + 2
// queue + 2 free KV, with exact prefixes.
func llmd(s *simulation, rec *record) kvindex.Slot {
	least, most := math.Inf(1), 0.0
	for _, n := range s.scrape.waiting {
		least, most = min(least, n), max(most, n)
	}
	scores := make([]float64, s.ranks())
	for slot := range scores {
		queue := 1.0
		if most > least {
			queue = (most - s.scrape.waiting[slot]) / (most - least)
		}
		scores[slot] = 2*queue + 2*(1-s.scrape.used[slot])
	}
	for i := range s.overlap {
		o := &s.overlap[i]
		scores[o.Slot] += 3 * float64(o.Tokens[kvindex.Device]) / float64(max(rec.Prompt, 1))
	}
	best, tied := 0, 0
	for slot := range scores {
		switch {
		case scores[slot] > scores[best]:
			best, tied = slot, 1
		case scores[slot] == scores[best]:
			if tied++; s.rng.IntN(tied) == 0 {
				best = slot
			}
		}
	}
	return kvindex.Slot(best)
}

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
		s.scrape.used = append(s.scrape.used, float64(k.used())/float64(k.places))
	}
}

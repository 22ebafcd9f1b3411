package observe

import (
	"slices"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// IndexPage is GET /debug/index.
type IndexPage struct {
	Index indexStats `json:"index"`
	Feeds []feedRow  `json:"feeds"`
	// Warmed is the number of targets taken from a peer's copy at the start.
	Warmed int64 `json:"warmed_targets"`
}

// indexStats has the refusals by name.
type indexStats struct {
	kvindex.Stats

	Refused map[string]int64 `json:"refused"`
}

// NewIndexPage returns the page of an index and its feeds.
func NewIndexPage(s kvindex.Stats, feeds []feed.Status, warmed int64) IndexPage {
	page := IndexPage{indexStats{s, map[string]int64{}}, feedRows(feeds), warmed}
	for why, n := range s.Refused {
		page.Index.Refused[why.Name()] = n
	}
	return page
}

// feedRow is a target's feed on the debug page. Counters are those of the whole feed: a poller serves several targets.
type feedRow struct {
	Target    string                 `json:"target"`
	State     string                 `json:"state"`
	Cursor    feed.Cursor            `json:"cursor"`
	Events    uint64                 `json:"events"`
	Blocks    uint64                 `json:"blocks"`
	Counts    feed.Counts            `json:"counts"`
	Dropped   map[feed.Reason]uint64 `json:"dropped,omitempty"`
	Connects  uint64                 `json:"connects"`
	Errors    uint64                 `json:"errors"`
	LastError string                 `json:"last_error,omitempty"`
	BlockSize int                    `json:"block_size"`
}

func feedRows(list []feed.Status) []feedRow {
	rows := []feedRow{}
	for _, s := range list {
		for _, t := range s.Targets {
			rows = append(rows, feedRow{t.Target.String(), t.State.String(), t.Cursor, s.Events, s.Blocks, s.Counts, s.Dropped, s.Connects, s.Errors, ClipTo(s.LastError, MaxText), s.BlockSize})
		}
	}
	slices.SortFunc(rows, func(a, b feedRow) int { return strings.Compare(a.Target, b.Target) })
	return rows
}

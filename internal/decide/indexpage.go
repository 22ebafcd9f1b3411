package decide

import (
	"net/http"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/telemetry"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// indexPage is the index and its feeds as GET /debug/index shows them.
type indexPage struct {
	Index indexStats `json:"index"`
	Feeds []feedRow  `json:"feeds"`
	// Warmed is the number of targets that a peer's copy brought at the start.
	Warmed int64 `json:"warmedTargets"`
}

// indexStats names the refusals in words.
type indexStats struct {
	kvindex.Stats

	Refused map[string]int64
}

func (d *Decider) debugIndex(w http.ResponseWriter, _ *http.Request) {
	d.expire(d.now())
	s := d.index.Stats()
	page := indexPage{indexStats{s, map[string]int64{}}, feedRows(d.FeedStatus()), d.feeds.warmed.Load()}
	for why, n := range s.Refused {
		page.Index.Refused[why.Error()] = n
	}
	writeJSON(w, page)
}

// feedRow is a target's feed on the debug page. Counters are the feed's: a poller
// has several targets.
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
	LastError string                 `json:"lastError,omitempty"`
	BlockSize int                    `json:"blockSize"`
}

func feedRows(list []feed.Status) []feedRow {
	rows := []feedRow{}
	for _, s := range list {
		for _, t := range s.Targets {
			rows = append(rows, feedRow{t.Target.String(), t.State.String(), t.Cursor, s.Events, s.Blocks, s.Counts, s.Dropped, s.Connects, s.Errors, s.LastError, s.BlockSize})
		}
	}
	slices.SortFunc(rows, func(a, b feedRow) int { return strings.Compare(a.Target, b.Target) })
	return rows
}

// collectIndex reads the index's sizes and counts for the metrics.
func (d *Decider) collectIndex(emit func(name, help string, value float64, labels ...string)) {
	d.expire(d.now())
	s := d.index.Stats()
	for _, m := range []struct {
		name, help string
		value      int64
	}{
		{"index_bytes", "Memory of the index in use.", s.Bytes},
		{"index_reserved_bytes", "Memory that the index has taken.", s.Reserved},
		{"index_distinct_blocks", "Blocks that some target holds.", s.Blocks},
		{"index_segments", "Stretches of chains that the blocks are stored in.", int64(s.Segments)},
		{"index_speculative_blocks", "Blocks credited for what was sent, without an event yet.", s.Speculative},
		{"index_stored_blocks_total", "Blocks stored by events.", s.Stored},
		{"index_removed_blocks_total", "Blocks removed by events.", s.Removed},
		{"index_unknown_removed_blocks_total", "Blocks removed by events that the target was not known to hold.", s.UnknownRemoved},
		{"index_cleared_total", "Times that a target was cleared.", s.Cleared},
		{"index_evicted_blocks_total", "Blocks dropped for index.max_bytes.", s.Evicted},
		{"index_rebuilt_segments_total", "Segments split because most of their blocks were gone.", s.Rebuilt},
		{"index_warmed_targets", "Targets that a peer's copy brought at the start.", d.feeds.warmed.Load()},
	} {
		emit(m.name, m.help, float64(m.value))
	}
	for why, n := range s.Refused {
		emit("index_refused_events_total", "Events that the index refused, by reason.", float64(n), "reason", why.Error())
	}
	for _, t := range s.Targets {
		labels := []string{"worker", t.Target.Worker, "rank", telemetry.Rank(t.Target.Rank)}
		for tier, n := range t.Held {
			emit("index_blocks", "Blocks that a target holds, by tier.", float64(n), append(labels, "tier", tierNames[tier])...)
		}
		emit("index_aliases", "Holdings of a target beyond the plain one: repeated, of a further group, or by another name.", float64(t.Aliases), labels...)
		emit("index_pages", "Engine blocks of a target that are smaller than the index's.", float64(t.Pages), labels...)
	}
}

var tierNames = [...]string{"device", "host", "disk", "external"}

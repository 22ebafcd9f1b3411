package fleet

import (
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// Status returns the workers with their targets, sorted by name. loads holds the load of each target.
func (f *Fleet) Status(loads []observe.TargetLoad) []observe.WorkerStatus {
	v, byTarget := f.View(), map[kvindex.Target]*observe.TargetLoad{}
	for i := range loads {
		byTarget[loads[i].Target] = &loads[i]
	}
	blocks, feeds := map[kvindex.Target]int64{}, map[kvindex.Target]feed.State{}
	for _, t := range f.index.Stats().Targets {
		blocks[t.Target] = t.Held[kvindex.Device]
	}
	lastError := map[kvindex.Target]string{}
	for _, s := range f.FeedStatus() {
		for _, t := range s.Targets {
			feeds[t.Target], lastError[t.Target] = t.State, observe.ClipTo(s.LastError, observe.MaxText)
		}
	}
	out := []observe.WorkerStatus{}
	for _, row := range f.Workers() {
		w := observe.WorkerStatus{WorkerRow: row, Tokenizer: f.tokenizerState(row.Name), Ranks: []observe.RankStatus{}}
		m := v.members[row.Name]
		if m == nil {
			continue
		}
		for _, slot := range m.Slots {
			e := v.Endpoint(slot)
			if e == nil {
				continue
			}
			r := observe.RankStatus{Rank: observe.Rank(e.Target.Rank), Blocks: blocks[e.Target], PromptTokens: observe.Value(e.Counters.Prompt),
				MatchedTokens: observe.Value(e.Counters.ByEvents) + observe.Value(e.Counters.Speculative)}
			if l := byTarget[e.Target]; l != nil {
				w.RemovalCost += l.Load.KV + 1000*l.Bound + blocks[e.Target]*int64(f.Config.Index.BlockSize)
				r.Active, r.QueuedTokens, r.Suspect = l.Load.Active, l.Load.Queue, l.Suspect
				if l.KVUsage >= 0 {
					r.Usage = &l.KVUsage
				}
			}
			if state, ok := feeds[e.Target]; ok {
				r.Feed = state.String()
				if state != feed.Live {
					r.FeedError = lastError[e.Target]
				}
			}
			w.Ranks = append(w.Ranks, r)
		}
		out = append(out, w)
	}
	return out
}

// tokenizerState is the worst state of a worker's comparisons over all models, "" if there are none.
func (f *Fleet) tokenizerState(worker string) (state string) {
	for _, m := range f.models.Load().list {
		c := m.agreement.all()[worker]
		if c == nil {
			continue
		}
		s := c.checker.State()
		if s == shape.Differs {
			return s.String()
		}
		if state == "" || s == shape.Unchecked {
			state = s.String()
		}
	}
	return state
}

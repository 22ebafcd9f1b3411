package fleet

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// askModelsAgain is how soon a worker is asked again that does not list its models.
const askModelsAgain = 15 * time.Second

// doubts are differences between the configuration of workers and what their engines report,
// by worker and reason (a metric label). A doubt belongs to one generation of the worker.
type doubts struct {
	mu       sync.Mutex
	byWorker map[string]map[string]doubt
	// next has the workers that askModels runs for, with the member that it is to ask next;
	// nil for none.
	next map[string]*Member
}

type doubt struct {
	generation uint64
	text       string
}

// doubt records a difference, or removes it if text is empty. It logs a new one.
func (f *Fleet) doubt(m *Member, reason, text string) {
	f.doubts.mu.Lock()
	defer f.doubts.mu.Unlock()
	all := f.doubts.byWorker[m.Name]
	if text == "" {
		delete(all, reason)
		return
	}
	if all == nil {
		all = map[string]doubt{}
		f.doubts.byWorker[m.Name] = all
	}
	next := doubt{m.Generation, observe.ClipTo(text, observe.MaxText)} // it has names that engines choose
	if all[reason] != next {
		f.Log.Warn().Str("worker", m.Name).Str("address", m.Address).Str("reason", reason).Msg(next.text)
	}
	all[reason] = next
}

// forgetDoubts drops those of workers that have left.
func (f *Fleet) forgetDoubts(v *View) {
	f.doubts.mu.Lock()
	defer f.doubts.mu.Unlock()
	maps.DeleteFunc(f.doubts.byWorker, func(name string, _ map[string]doubt) bool { return v.members[name] == nil })
}

// EngineCache compares what an engine reports about its cache with the configuration.
func (f *Fleet) EngineCache(worker string, c workers.EngineCache) {
	m := f.View().members[worker]
	if m == nil {
		return
	}
	text := ""
	if c.PrefixCachingOff {
		text = "the engine runs without prefix caching: requests find nothing cached there; start it with prefix caching"
	}
	f.doubt(m, "prefix_caching_off", text)
	text = ""
	switch index := f.Config.Index.BlockSize; {
	case c.BlockSize == 0:
	case m.Events.Endpoint != "" && c.BlockSize%index != 0 && index%c.BlockSize != 0:
		text = fmt.Sprintf("the engine's blocks of %[1]d tokens do not fit index.block_size %d: its KV events are refused; write an index.block_size that divides %[1]d", c.BlockSize, index)
	case m.BlockSize > 0 && c.BlockSize != m.BlockSize:
		text = fmt.Sprintf("the engine's blocks have %d tokens, the worker is configured with block_size %d: write block_size: %d, or leave it out", c.BlockSize, m.BlockSize, c.BlockSize)
	}
	f.doubt(m, "other_block_size", text)
}

// checkMember looks for what a worker lacks. It returns without waiting for the engine.
func (f *Fleet) checkMember(m *Member) {
	exact := slices.ContainsFunc(f.models.Load().list, func(s *Model) bool { return s.Tokens != nil && serves(m.Models, s) })
	text := "" // none any more, if the models have changed
	if m.Events.Endpoint == "" && exact {
		text = "no events.endpoint: what the engine caches is predicted from prompts sent there; start it with KV events and name their endpoint"
	}
	f.doubt(m, "no_events", text)
	known := f.models.Load().byName
	unknown := slices.DeleteFunc(slices.Clone(m.Models), func(name string) bool { return known[name] != nil })
	if len(known) > 0 && len(unknown) > 0 {
		f.doubt(m, "unknown_model", "no entry of models is called "+strings.Join(unknown, ", ")+", which the worker lists: such requests are routed by load; write an entry")
	}
}

// checkModels asks a worker that has become ready for its models, until they include those
// that its configuration lists. It returns without waiting for the engine.
func (f *Fleet) checkModels(m *Member) {
	f.doubts.mu.Lock()
	defer f.doubts.mu.Unlock()
	_, runs := f.doubts.next[m.Name]
	f.doubts.next[m.Name] = m
	if !runs {
		f.listing.Go(func() { f.askModels(m.Name) })
	}
}

// nextCheck returns the member to ask, nil if askModels shall end.
func (f *Fleet) nextCheck(name string) *Member {
	f.doubts.mu.Lock()
	defer f.doubts.mu.Unlock()
	m := f.doubts.next[name]
	f.doubts.next[name] = nil
	if m == nil {
		delete(f.doubts.next, name)
	}
	return m
}

// askModels runs at most once for a worker.
func (f *Fleet) askModels(name string) {
	for m := f.nextCheck(name); m != nil; m = f.nextCheck(name) {
		names, err := f.askFor(f.listContext, m)
		f.catalog.mu.Lock()
		f.learnContexts(f.models.Load().list)
		f.catalog.mu.Unlock()
		missing := slices.DeleteFunc(slices.Clone(m.Models), func(name string) bool { return slices.Contains(names, name) })
		if err != nil || len(missing) == 0 {
			f.doubt(m, "other_models", "")
			continue
		}
		served, advice := strings.Join(names[:min(len(names), 8)], ", "), "what it serves"
		if len(names) <= 8 {
			advice = "models: [" + served + "]"
		}
		f.doubt(m, "other_models", fmt.Sprintf("the engine does not serve %[1]s, which the worker lists; it serves %[2]s: requests for %[1]s fail there; write %[3]s",
			strings.Join(missing, ", "), served, advice))
		again, cancel := context.WithTimeout(f.listContext, askModelsAgain)
		<-again.Done()
		cancel()
		if now := f.View().members[name]; f.listContext.Err() == nil && now != nil && now.Generation == m.Generation && now.Ready {
			f.checkModels(now)
		}
	}
}

// Warnings returns why workers are not ready, and why they or models are less useful than they are
// configured to be, sorted by worker; those of models come first.
func (f *Fleet) Warnings() []observe.Warning {
	var out []observe.Warning
	v := f.View()
	add := func(worker, reason, format string, args ...any) {
		out = append(out, observe.Warning{Worker: worker, Reason: reason, Text: observe.ClipTo(fmt.Sprintf(format, args...), observe.MaxText)})
	}
	for _, m := range v.members {
		if !m.Ready {
			add(m.Name, "not_ready", "not ready at %s: %s", m.Address, m.Reason)
		}
	}
	f.doubts.mu.Lock()
	for worker, all := range f.doubts.byWorker {
		for reason, d := range all {
			m := v.members[worker]
			if m == nil || m.Generation != d.generation {
				continue
			}
			// A name that is wrong on the worker is not one to write an entry for.
			if other, ok := all["other_models"]; reason != "unknown_model" || !ok || other.generation != d.generation {
				add(worker, reason, "%s", d.text)
			}
		}
	}
	f.doubts.mu.Unlock()
	for _, s := range f.FeedStatus() {
		m := v.members[s.Worker]
		if m == nil {
			continue
		}
		for _, t := range s.Targets {
			switch {
			case t.State != feed.Stale:
			case m.Events.Endpoint == config.PushEndpoint:
				add(s.Worker, "no_relay", "no relay pushes events of %s", t.Target)
			case s.LastError != "" || s.Connects == 0:
				add(s.Worker, "events_unreachable", "no events of %s from %s: %s", t.Target, m.feed.sink.address(t.Target), cmp.Or(s.LastError, "no connection yet"))
			}
		}
		unfit := feed.Refused + ": " + feed.Reason(kvindex.ErrBlockSize.Error())
		for _, why := range []feed.Reason{feed.WrongBlockSize, unfit, feed.Misaligned, feed.UnknownHash, feed.WrongRank} {
			if n := s.Dropped[why]; n > 0 {
				add(s.Worker, "events_dropped", "%d KV events dropped: %s", n, why)
			}
		}
	}
	for _, s := range f.models.Load().list {
		switch {
		case s.Refused != "" && s.Remote != nil:
			add("", "tokenizer_refused", "check.renderer computes all ids of model %s: %s", s.Config.Name, s.Refused)
		case s.Refused != "":
			add("", "tokenizer_refused", "model %s is routed by load: %s", s.Config.Name, s.Refused)
		case s.Tokens == nil && s.Remote == nil:
			add("", "no_tokenizer", "model %s is routed by load: it has no models[].tokenizer", s.Config.Name)
		}
		for worker := range s.agreement.all() {
			if s.agreement.differs(worker) {
				add(worker, "tokens_differ", "its token ids of model %s differ from those of %s: it is routed by load", s.Config.Name, s.Config.Tokenizer)
			}
		}
	}
	slices.SortFunc(out, func(a, b observe.Warning) int {
		return cmp.Or(strings.Compare(a.Worker, b.Worker), strings.Compare(a.Reason, b.Reason), strings.Compare(a.Text, b.Text))
	})
	return out
}

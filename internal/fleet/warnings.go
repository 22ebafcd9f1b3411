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
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// askModelsAgain is the interval at which a worker that does not list its models is queried again.
const askModelsAgain = 15 * time.Second

// mismatches are differences between the configuration of workers and what their engines report,
// by worker and reason (a metric label). A mismatch belongs to one generation of the worker.
type mismatches struct {
	mu       sync.Mutex
	byWorker map[string]map[string]mismatch
	// next holds the workers that askModels runs for, with the member to query next; nil for none.
	next map[string]*Member
}

type mismatch struct {
	generation uint64
	text       string
}

// mismatch records a difference and logs a new one; with an empty text it removes it.
func (f *Fleet) mismatch(m *Member, reason, text string) {
	f.mismatches.mu.Lock()
	defer f.mismatches.mu.Unlock()
	all := f.mismatches.byWorker[m.Name]
	if text == "" {
		delete(all, reason)
		return
	}
	if all == nil {
		all = map[string]mismatch{}
		f.mismatches.byWorker[m.Name] = all
	}
	next := mismatch{m.Generation, observe.ClipTo(text, observe.MaxText)} // it has names that engines choose
	if all[reason] != next {
		f.Log.Warn().Str("worker", m.Name).Str("address", m.Address).Str("reason", reason).Msg(next.text)
	}
	all[reason] = next
}

// forgetMismatches drops those of workers that have left.
func (f *Fleet) forgetMismatches(v *View) {
	f.mismatches.mu.Lock()
	defer f.mismatches.mu.Unlock()
	maps.DeleteFunc(f.mismatches.byWorker, func(name string, _ map[string]mismatch) bool { return v.members[name] == nil })
}

// EngineCache compares what an engine reports about its cache with the configuration.
func (f *Fleet) EngineCache(worker string, c workers.EngineCache) {
	m := f.View().members[worker]
	if m == nil {
		return
	}
	if m.Engine == "vllm" { // SGLang's page does not say
		f.comparePrefixCache(m, c.PrefixCachingOff)
	}
	text := ""
	if c.NoLoad != "" {
		text = "no load report: " + c.NoLoad + ": what it runs besides Kvlane's requests is not known, nor its block size and ranks"
		if m.Engine == "sglang" {
			text += "; start it with --enable-metrics"
		}
	}
	f.mismatch(m, "no_load_report", text)
	if c.BlockSize > 0 {
		f.compareBlocks(m, c.BlockSize)
	}
	if c.Ranks > 0 && m.Engine == "vllm" { // SGLang's page has those of one node
		f.compareRanks(m, c.FirstRank, c.Ranks)
	}
}

func (f *Fleet) comparePrefixCache(m *Member, off bool) {
	text := ""
	if off {
		text = "the engine runs without prefix caching: requests find nothing cached there; start it with prefix caching"
		if m.Engine == "sglang" {
			text += " (without --disable-radix-cache)"
		}
	}
	f.mismatch(m, "prefix_caching_off", text)
}

func (f *Fleet) compareBlocks(m *Member, size int) {
	text := ""
	switch index := f.Config.Index.BlockSize; {
	case m.Events.Endpoint != "" && size%index != 0 && index%size != 0:
		text = fmt.Sprintf("the engine's blocks of %[1]d tokens do not fit index.block_size %d: its KV events are refused; write an index.block_size that divides %[1]d", size, index)
	case m.BlockSize > 0 && size != m.BlockSize:
		text = fmt.Sprintf("the engine's blocks have %d tokens, the worker is configured with block_size %d: write block_size: %d, or leave it out", size, m.BlockSize, size)
	}
	f.mismatch(m, "other_block_size", text)
}

// compareRanks compares an engine's n ranks, starting with first, with the configured ones.
func (f *Fleet) compareRanks(m *Member, first, n int) {
	text := ""
	switch {
	case m.RankBy == "port": // the other ranks have pages of their own
	case m.Ranks == 0 && (n == 1 || m.RankBy == "none"): // with "none" the engine chooses
	case m.Ranks == 0:
		text = fmt.Sprintf("the engine has %d data-parallel ranks, the worker is configured without: it chooses the rank itself, and only the first one's KV events are read; write ranks: %d", n, n)
	case n > m.Ranks:
		text = fmt.Sprintf("the engine has %d data-parallel ranks, the worker is configured with %d: the others get no requests; write ranks: %d", n, m.Ranks, n)
	case n < m.Ranks:
		text = fmt.Sprintf("the engine has %d data-parallel ranks, the worker is configured with %d: requests for the others fail; write ranks: %d", n, m.Ranks, n)
	case first != m.StartRank:
		text = fmt.Sprintf("the engine's data-parallel ranks begin with %d, those of the worker with %d: KV events and load of other ranks are not used; write start_rank: %d", first, m.StartRank, first)
	}
	f.mismatch(m, "other_ranks", text)
}

// compareEngine compares a worker's engine with the one that its configuration names.
func (f *Fleet) compareEngine(m *Member, list []workers.Listed) {
	kind, text := "", ""
	for i := range list {
		kind = cmp.Or(kind, list[i].Engine())
	}
	if kind != "" && kind != m.Engine {
		text = fmt.Sprintf("the engine is %[1]s, the worker is configured as %s: its prompts, ranks and load are taken for those of the wrong engine; write engine: %[1]s, here and in models", kind, m.Engine)
	}
	f.mismatch(m, "other_engine", text)
	if text != "" || kind != "sglang" {
		return
	}
	if facts, err := f.catalog.asker.Ask(f.listContext, m.Address); err == nil && facts.Ranks > 0 {
		f.comparePrefixCache(m, facts.NoPrefixCache)
		f.compareBlocks(m, facts.BlockSize)
		f.compareRanks(m, m.StartRank, facts.Ranks)
	}
}

// checkMember records mismatches between a worker's configuration and that of the models. It does not query the engine.
func (f *Fleet) checkMember(m *Member) {
	exact := false
	var others []string
	for _, s := range f.models.Load().list {
		if s.Tokens == nil || !serves(m.Models, s) {
			continue
		}
		exact = true
		if s.Engine.String() != m.Engine {
			others = append(others, s.Config.Name)
		}
	}
	text := ""
	if len(others) > 0 {
		text = fmt.Sprintf("models[].engine of %[1]s differs from the worker's, %[2]s: ids are made as for another engine and never compared; write engine: %[2]s there, too", strings.Join(others, ", "), m.Engine)
	}
	f.mismatch(m, "model_of_other_engine", text)
	text = "" // removes an earlier warning, if the models have changed
	if m.Events.Endpoint == "" && exact {
		text = "no events.endpoint: what the engine caches is predicted from prompts sent there; start it with KV events and name their endpoint"
	}
	f.mismatch(m, "no_events", text)
	known := f.models.Load().byName
	unknown := slices.DeleteFunc(slices.Clone(m.Models), func(name string) bool { return known[name] != nil })
	text = ""
	if len(known) > 0 && len(unknown) > 0 {
		text = "no entry of models is called " + strings.Join(unknown, ", ") + ", which the worker lists: such requests are routed by load; write an entry"
	}
	f.mismatch(m, "unknown_model", text)
}

// checkModels queries a worker that has become ready for its models until they include the configured ones. It does not
// wait for the engine.
func (f *Fleet) checkModels(m *Member) {
	f.mismatches.mu.Lock()
	defer f.mismatches.mu.Unlock()
	_, runs := f.mismatches.next[m.Name]
	f.mismatches.next[m.Name] = m
	if !runs {
		f.listing.Go(func() { f.askModels(m.Name) })
	}
}

// nextCheck returns the member to query, nil if askModels must end.
func (f *Fleet) nextCheck(name string) *Member {
	f.mismatches.mu.Lock()
	defer f.mismatches.mu.Unlock()
	m := f.mismatches.next[name]
	f.mismatches.next[name] = nil
	if m == nil {
		delete(f.mismatches.next, name)
	}
	return m
}

// askModels runs at most once for a worker.
func (f *Fleet) askModels(name string) {
	for m := f.nextCheck(name); m != nil; m = f.nextCheck(name) {
		l, err := f.askFor(f.listContext, m)
		if err == nil {
			f.compareEngine(m, l.models)
		}
		names := l.names
		f.catalog.mu.Lock()
		f.learnContexts(f.models.Load().list)
		f.catalog.mu.Unlock()
		missing := slices.DeleteFunc(slices.Clone(m.Models), func(name string) bool { return slices.Contains(names, name) })
		if err != nil || len(missing) == 0 {
			f.mismatch(m, "other_models", "")
			continue
		}
		served, advice := strings.Join(names[:min(len(names), 8)], ", "), "what it serves"
		if len(names) <= 8 {
			advice = "models: [" + served + "]"
		}
		f.mismatch(m, "other_models", fmt.Sprintf("the engine does not serve %[1]s, which the worker lists; it serves %[2]s: requests for %[1]s fail there; write %[3]s",
			strings.Join(missing, ", "), served, advice))
		again, cancel := context.WithTimeout(f.listContext, askModelsAgain)
		<-again.Done()
		cancel()
		if now := f.View().members[name]; f.listContext.Err() == nil && now != nil && now.Generation == m.Generation && now.Ready {
			f.checkModels(now)
		}
	}
}

// Warnings returns why workers are not ready, and why workers or models do not work as configured. Warnings about
// models come first, then those about workers by name.
func (f *Fleet) Warnings() []observe.Warning {
	v, out := f.View(), []observe.Warning(nil)
	add := func(worker, reason, format string, args ...any) {
		out = append(out, observe.Warning{Worker: worker, Reason: reason, Text: observe.ClipTo(fmt.Sprintf(format, args...), observe.MaxText)})
	}
	if len(v.members) == 0 {
		add("", "no_workers", "no worker is known (%s): requests are answered 503", f.Config.Workers.Sources())
	}
	for _, m := range v.members {
		if !m.Ready {
			add(m.Name, "not_ready", "not ready at %s: %s", m.Address, m.Reason)
		}
	}
	f.mismatches.mu.Lock()
	for worker, all := range f.mismatches.byWorker {
		for reason, d := range all {
			m := v.members[worker]
			if m == nil || m.Generation != d.generation {
				continue
			}
			// With other_models the worker's list itself is wrong: an entry for it would not help.
			if other, ok := all["other_models"]; reason != "unknown_model" || !ok || other.generation != d.generation {
				add(worker, reason, "%s", d.text)
			}
		}
	}
	f.mismatches.mu.Unlock()
	f.feedWarnings(v, add)
	for _, s := range f.models.Load().list {
		switch {
		case s.Refused != "" && s.Remote != nil:
			add("", "tokenizer_refused", "check.renderer computes all ids of model %s: %s", s.Config.Name, s.Refused)
		case s.Refused != "":
			add("", "tokenizer_refused", "model %s is routed by load: %s", s.Config.Name, s.Refused)
		case s.Tokens == nil && s.Remote == nil:
			add("", "no_tokenizer", "model %s is routed by load: it has no models[].tokenizer", s.Config.Name)
		}
		for worker, c := range s.agreement.all() {
			if s.agreement.differs(worker) {
				add(worker, "tokens_differ", "its token ids of model %s differ from those of %s: it is routed by load; name the tokenizer that it loads, its revision too", s.Config.Name, s.Config.Tokenizer)
			} else if why := c.failed.Load(); why != nil && c.checker.State() == shape.Unchecked {
				add(worker, "tokens_not_compared", "whether the tokenizer of model %s is its own is not known, as it returns no ids: %s", s.Config.Name, why)
			}
		}
	}
	slices.SortFunc(out, func(a, b observe.Warning) int {
		return cmp.Or(strings.Compare(a.Worker, b.Worker), strings.Compare(a.Reason, b.Reason), strings.Compare(a.Text, b.Text))
	})
	return out
}

// feedWarnings adds a warning for each feed that delivers less than is configured.
func (f *Fleet) feedWarnings(v *View, add func(worker, reason, format string, args ...any)) {
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
		if c := s.Counts; c.Failures > 0 && c.Failures == c.Replays {
			add(s.Worker, "no_replay", "no replay of events has worked, so a lost one clears what is known of a rank: %s; name the replay endpoint of the engine", s.LastError)
		}
		unfit := feed.Refused + "_" + feed.Reason(kvindex.ErrBlockSize.Name())
		for _, why := range []feed.Reason{feed.WrongBlockSize, unfit, feed.Misaligned, feed.UnknownHash, feed.WrongRank} {
			if n := s.Dropped[why]; n > 0 {
				add(s.Worker, "events_dropped", "%d KV events dropped: %s", n, why)
			}
		}
	}
}

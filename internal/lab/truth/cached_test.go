package truth

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// cachedTotals count the requests with reported cached tokens.
type cachedTotals struct {
	files        int
	right, wrong int
	// bounded counts requests that ran concurrently with others on their rank and reported a
	// number that is possible there.
	bounded int
	// predicted and reported are the cached tokens of the judged requests.
	predicted, reported int
	// skipped counts the requests that were not judged, by reason.
	skipped map[string]int
}

func (t *cachedTotals) add(o cachedTotals) {
	t.files += o.files
	t.right += o.right
	t.wrong += o.wrong
	t.bounded += o.bounded
	t.predicted += o.predicted
	t.reported += o.reported
	for k, n := range o.skipped {
		t.skipped[k] += n
	}
}

func (t *cachedTotals) String() string {
	s := fmt.Sprintf("right %d, wrong %d, predicted %d and reported %d cached tokens", t.right, t.wrong, t.predicted, t.reported)
	if t.bounded > 0 {
		s += fmt.Sprintf("; %d beside others within bounds", t.bounded)
	}
	var why []string
	for k, n := range t.skipped {
		why = append(why, fmt.Sprintf("%d %s", n, k))
	}
	slices.Sort(why)
	if len(why) > 0 {
		s += "; not judged: " + strings.Join(why, ", ")
	}
	return s
}

func (t *cachedTotals) notJudged() int {
	n := 0
	for _, k := range t.skipped {
		n += k
	}
	return n
}

// sink applies the feed's events to the index.
type sink struct {
	index *kvindex.Index
	slots map[kvindex.Target]kvindex.Slot
	err   error
}

func (s *sink) slot(t kvindex.Target) kvindex.Slot {
	slot, ok := s.slots[t]
	if !ok {
		var err error
		if slot, err = s.index.Add(t, seedModel, 0); err != nil {
			s.err = err
		}
		s.slots[t] = slot
	}
	return slot
}

// seedModel is the model that all blocks of a recording are seeded with.
const seedModel = "recorded"

func (s *sink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	return s.index.Apply(s.slot(t), ev)
}

func (s *sink) Clear(t kvindex.Target, _ feed.Reason) {
	if err := s.index.Apply(s.slot(t), &kvindex.Event{Kind: kvindex.Cleared}); err != nil {
		s.err = err
	}
}

func (s *sink) State(kvindex.Target, feed.State, feed.Reason) {}

func (s *sink) Warn(kvindex.Target, feed.Reason, string) {}

// checker replays one recording.
type checker struct {
	name    string
	engine  string
	recs    []record
	out     *bytes.Buffer
	sink    *sink
	players map[string]*feed.Player
	events  []*record
	applied int // events that arrived before the current request
	chains  *chains
	prompts *timeline
	sources []string // all sources of events
	block   int
	// adapters are the models that are LoRA adapters.
	adapters map[string]bool
	matches  kvindex.Matches
	res      cachedTotals
}

// check replays a time line's KV events through the feed and the index, and before each
// request predicts the cached tokens that the engine then reported.
//
// It judges requests whose prompt ids are known: from the answer, the request or prompts.
// The rank is the one that the request names, or else the one whose events arrived while it
// ran alone. For a request that ran concurrently with others on its rank there are only
// bounds: at least what the rank held before, at most what its prompt also shares with
// theirs. Not judged, and counted with the reason, are requests with several answers, those
// that used blocks which SGLang announced later, those that get blocks from another engine,
// and those that SGLang's events do not distinguish (extra_key does not appear in them).
func check(name string, recs []record, prompts *timeline, out *bytes.Buffer) (cachedTotals, error) {
	c := &checker{
		name: name, engine: recs[0].Engine, recs: recs, out: out, players: map[string]*feed.Player{},
		prompts: prompts, chains: newChains(), adapters: map[string]bool{}, res: cachedTotals{files: 1, skipped: map[string]int{}},
	}
	c.survey()
	if c.block == 0 {
		c.block = 1 // nothing is ever stored: every request is predicted to miss
	}
	index, err := kvindex.New(kvindex.Config{BlockSize: c.block})
	if err != nil {
		return c.res, err
	}
	c.sink = &sink{index: index, slots: map[kvindex.Target]kvindex.Slot{}}
	var asked []*record
	for i := range recs {
		switch r := &recs[i]; r.Kind {
		case "event":
			c.events = append(c.events, r)
		case "http":
			asked = append(asked, r)
		}
	}
	slices.SortStableFunc(c.events, func(a, b *record) int { return cmp.Compare(a.T, b.T) })
	// Records are ordered by their answers; hits were decided when the requests were sent.
	slices.SortStableFunc(asked, func(a, b *record) int { return cmp.Compare(a.Sent, b.Sent) })
	for _, r := range asked {
		c.catchUp(r.Sent)
		c.exchange(r)
	}
	c.catchUp(math.Inf(1))
	c.note()
	return c.res, c.sink.err
}

// note reports irregularities in the events of the sources.
func (c *checker) note() {
	for _, source := range c.sources {
		p := c.player(source)
		n := p.Counts()
		var notes []string
		for _, k := range []struct {
			n    uint64
			what string
		}{{n.Missing, "batches missing (the rank was cleared there)"}, {n.Duplicates, "batches twice"}, {n.Restarts, "restarts"}} {
			if k.n > 0 {
				notes = append(notes, fmt.Sprintf("%d %s", k.n, k.what))
			}
		}
		for _, why := range slices.Sorted(maps.Keys(p.Dropped())) {
			if why != feed.OtherGroup {
				notes = append(notes, fmt.Sprintf("%d events dropped: %s", p.Dropped()[why], why))
			}
		}
		if len(notes) > 0 {
			fmt.Fprintf(c.out, "%s, events of %s: %s\n", c.name, source, strings.Join(notes, ", "))
		}
	}
}

// survey derives from all of a recording's events what a router knows from the engine's
// configuration: the block size (0 without stored blocks) and which models are adapters.
func (c *checker) survey() {
	d := feed.NewDecoder(feed.Engine(c.engine), 0)
	for i := range c.recs {
		r := &c.recs[i]
		if r.Kind != "event" || len(r.Frames) == 0 {
			continue
		}
		if !slices.Contains(c.sources, r.Source) {
			c.sources = append(c.sources, r.Source)
		}
		b, err := d.Decode(r.Frames[len(r.Frames)-1])
		if err != nil {
			continue
		}
		for k := range b.Events {
			if c.block == 0 && b.Events[k].Window == 0 {
				c.block = b.Events[k].BlockSize
			}
			if a := b.Events[k].Adapter; a != "" {
				c.adapters[a] = true
			}
		}
	}
}

// catchUp applies the events that arrived before time t.
func (c *checker) catchUp(t float64) {
	for ; c.applied < len(c.events) && c.events[c.applied].T < t; c.applied++ {
		r := c.events[c.applied]
		c.player(r.Source).Message(r.Frames)
		c.chains.learn(r)
	}
}

func (c *checker) player(source string) *feed.Player {
	p := c.players[source]
	if p == nil {
		p = feed.NewPlayer(feed.Source{Worker: source, Engine: feed.Engine(c.engine), Rank: kvindex.NoRank, RankFromBatch: true}, c.sink)
		c.players[source] = p
	}
	return p
}

// exchange judges an exchange and records its effects.
func (c *checker) exchange(r *record) {
	req, ans := r.parse()
	if strings.HasPrefix(r.Path, "/reset_prefix_cache") && ans.Success != nil {
		c.reset(r, *ans.Success)
		return
	}
	prompt, cached, ok := ans.cached()
	if !ok || req == nil {
		return
	}
	ids, why := c.promptIDs(r, req, &ans, prompt)
	if why != "" {
		c.res.skipped[why]++
		return
	}
	seed := c.seed(req)
	source, got, why := c.where(r, req, seed, ids)
	if why != "" {
		c.res.skipped[why]++
		return
	}
	if others := c.beside(r, source); len(others) > 0 {
		c.judgeBeside(r, others, seed, ids, got, cached)
		return
	}
	if got < cached && c.announcedLate(r, source, ids[:min(cached, len(ids))], got) {
		c.res.skipped["announced only after they were used"]++
		return
	}
	c.res.predicted += got
	c.res.reported += cached
	if got == cached {
		c.res.right++
		return
	}
	c.res.wrong++
	fmt.Fprintf(c.out, "%s #%d %q: predicted %d, engine reported %d\n", c.name, r.N, r.Label, got, cached)
}

// lateness is the time in seconds after a request in which events may announce blocks that
// it had already used.
const lateness = 2

// announcedLate reports whether an event after a request was sent stores blocks which that
// request reported as cached. They are an earlier request's, because SGLang does not
// announce blocks that it already has.
func (c *checker) announcedLate(r *record, source string, cached []uint32, got int) bool {
	if c.engine != "sglang" {
		return false
	}
	for _, e := range c.events[c.applied:] {
		if e.T > r.T+lateness {
			return false
		}
		if e.Source != source {
			continue
		}
		if path := c.chains.learn(e); len(path) > got && len(path) <= len(cached) && common(path, cached) == len(path) {
			return true
		}
	}
	return false
}

// judgeBeside judges a request that ran concurrently with others on its rank: it had at
// least what the rank held before them, and at most what it shares with them. If the rank
// removed blocks in the meantime, the request is not judged.
func (c *checker) judgeBeside(r *record, others []*record, seed kvindex.Hash, ids []uint32, got, cached int) {
	most := got
	for _, o := range others {
		req, ans := o.parse()
		if req == nil || c.removed(o) || c.removed(r) {
			c.res.skipped["beside others"]++
			return
		}
		prompt, _, _ := ans.cached()
		theirs, why := c.promptIDs(o, req, &ans, prompt)
		if why != "" || len(theirs) == 0 {
			c.res.skipped["beside others"]++
			return
		}
		if c.seed(req) == seed {
			most = max(most, common(ids, theirs)/c.block*c.block)
		}
	}
	if got <= cached && cached <= most {
		c.res.bounded++
		return
	}
	c.res.wrong++
	fmt.Fprintf(c.out, "%s #%d %q: predicted %d to %d beside others, engine reported %d\n", c.name, r.N, r.Label, got, most, cached)
}

// removed reports whether blocks were removed while a request ran.
func (c *checker) removed(r *record) bool {
	d := feed.NewDecoder(feed.Engine(c.engine), c.block)
	for _, e := range c.events {
		if e.T < r.Sent || e.T > r.T || len(e.Frames) == 0 {
			continue
		}
		b, err := d.Decode(e.Frames[len(e.Frames)-1])
		if err != nil || slices.ContainsFunc(b.Events, func(e kvindex.Event) bool { return e.Kind != kvindex.Stored }) {
			return true
		}
	}
	return false
}

// common is the length of the longest common prefix.
func common(a, b []uint32) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// reset applies a reset that vLLM confirmed: the ranks announce it only with their next
// work. A refused reset has still cleared the idle ranks. With several engines it applies
// to the labelled one.
func (c *checker) reset(r *record, all bool) {
	own, labelled := c.labelled(r)
	for source, p := range c.players {
		if labelled && source != own {
			continue
		}
		if all || len(c.beside(r, source)) == 0 {
			for _, t := range p.Targets() {
				c.sink.Clear(t, feed.Reason("reset"))
			}
		}
	}
}

// labelled returns the source at the start of a label, in recordings of several engines
// ("prefill: completions").
func (c *checker) labelled(r *record) (string, bool) {
	name, _, ok := strings.Cut(r.Label, ":")
	return name, ok && slices.Contains(c.sources, name)
}

// source returns the source of the rank that a request was pinned to.
func (c *checker) source(r *record, req *request) (string, bool) {
	if name, ok := c.labelled(r); ok {
		return name, true
	}
	if len(c.sources) == 1 {
		return c.sources[0], true
	}
	rank, ok := r.rank(c.engine, req)
	return "rank" + strconv.Itoa(int(rank)), ok
}

// everywhere stands for all sources.
const everywhere = "*"

// beside returns the requests that ran concurrently with r and may have used a
// source's rank.
func (c *checker) beside(r *record, source string) []*record {
	var others []*record
	for i := range c.recs {
		o := &c.recs[i]
		if o == r || o.Kind != "http" || o.Sent >= r.T || o.T <= r.Sent || !o.works() {
			continue
		}
		req, _ := o.parse()
		if theirs, ok := c.source(o, req); !ok || theirs == source || source == everywhere {
			others = append(others, o)
		}
	}
	return others
}

// where returns the rank that a request went to and the prediction there. A request that
// names no rank went where events came from while it ran alone; without events it is judged
// if all ranks predict the same.
func (c *checker) where(r *record, req *request, seed kvindex.Hash, ids []uint32) (source string, predicted int, why string) {
	if source, ok := c.source(r, req); ok {
		return source, c.predict(source, seed, ids), ""
	}
	if len(c.beside(r, everywhere)) > 0 {
		return "", 0, "without a rank, beside others"
	}
	for _, e := range c.window(r) {
		if source != "" && source != e.Source {
			return "", 0, "without a rank"
		}
		source = e.Source
	}
	if source != "" {
		return source, c.predict(source, seed, ids), ""
	}
	for i, s := range c.sources {
		n := c.predict(s, seed, ids)
		if i > 0 && n != predicted {
			return "", 0, "without a rank"
		}
		source, predicted = s, n
	}
	return source, predicted, ""
}

// promptIDs returns the ids of a prompt's blocks that a cache can serve, or why
// they are not known.
func (c *checker) promptIDs(r *record, req *request, ans *answer, prompt int) (ids []uint32, why string) {
	switch {
	case req.N != nil && *req.N != 1, len(ans.Choices) > 1:
		return nil, "with several answers"
	case req.Transfer != nil && req.Transfer.Prefill:
		return nil, "with blocks from another engine"
	case c.engine == "sglang" && req.ExtraKey != "":
		c.chains.taint(c.window(r), c.block)
		return nil, "with extra_key"
	}
	need := max(prompt-1, 0) / c.block * c.block // the last token is always computed
	for _, from := range []func() []uint32{ans.promptIDs, req.ownIDs, func() []uint32 { return c.prompts.ids(r) }} {
		if ids = from(); len(ids) > 0 {
			break
		}
	}
	if len(ids) < need {
		return nil, "of unknown ids"
	}
	ids = ids[:need]
	if c.engine == "sglang" && req.Salt == "" && c.chains.tainted(ids, c.block) {
		return nil, "equal to one with extra_key"
	}
	return ids, ""
}

// window returns the events that arrived while a request ran.
func (c *checker) window(r *record) []*record {
	var in []*record
	for _, e := range c.events[c.applied:] {
		if e.T >= r.Sent && e.T <= r.T {
			in = append(in, e)
		}
	}
	return in
}

// seed is the seed of a request's block hashes.
func (c *checker) seed(req *request) kvindex.Hash {
	adapter := ""
	if c.adapters[req.Model] {
		adapter = req.Model
	}
	h := c.sink.index.Hasher()
	return h.Seed(seedModel, adapter, req.Salt)
}

// predict returns how many tokens a source's rank holds according to the index.
func (c *checker) predict(source string, seed kvindex.Hash, ids []uint32) int {
	p := c.players[source]
	if p == nil {
		return 0
	}
	h := c.sink.index.Hasher()
	hashes := h.AppendHashes(nil, seed, ids, c.block)
	c.sink.index.Match(hashes, &c.matches) // ids are without the last token
	for _, t := range p.Targets() {
		for i := range c.matches.Holders {
			if m := &c.matches.Holders[i]; m.Slot == c.sink.slot(t) {
				return int(m.Total()) * c.block
			}
		}
	}
	return 0
}

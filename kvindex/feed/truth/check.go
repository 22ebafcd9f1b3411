package truth

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// Result is what a recording showed.
type Result struct {
	// Right and Wrong count the judged requests.
	Right, Wrong int
	// Predicted and Reported are the judged requests' cached tokens.
	Predicted, Reported int
	// Skipped counts the requests with reported cached tokens that were not judged,
	// by reason.
	Skipped map[string]int
}

func (r *Result) add(o Result) {
	r.Right += o.Right
	r.Wrong += o.Wrong
	r.Predicted += o.Predicted
	r.Reported += o.Reported
	for k, n := range o.Skipped {
		r.Skipped[k] += n
	}
}

func (r *Result) String() string {
	s := fmt.Sprintf("right %d, wrong %d, predicted %d and reported %d cached tokens", r.Right, r.Wrong, r.Predicted, r.Reported)
	var why []string
	for k, n := range r.Skipped {
		why = append(why, fmt.Sprintf("%d %s", n, k))
	}
	slices.Sort(why)
	if len(why) > 0 {
		s += "; not judged: " + strings.Join(why, ", ")
	}
	return s
}

// Run checks every recording of a folder, prints a line for each, one for each
// difference, and the totals, and returns the number of differences. Files that
// are no time lines are passed over. No recording at all is an error.
func Run(dir string, out io.Writer) (differences int, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("truth: %w", err)
	}
	total, files := Result{Skipped: map[string]int{}}, 0
	p := printer{w: out}
	for _, e := range entries {
		name := e.Name()
		if !strings.HasSuffix(name, ".jsonl") && !strings.HasSuffix(name, ".jsonl.gz") {
			continue
		}
		recs, err := load(filepath.Join(dir, name))
		if err != nil {
			if isNotARecording(err) {
				continue
			}
			return 0, fmt.Errorf("truth: %w", err)
		}
		res, err := check(name, recs, &p)
		if err != nil {
			return 0, fmt.Errorf("truth: %s: %w", name, err)
		}
		files++
		p.printf("%s: %s\n", name, &res)
		total.add(res)
	}
	if files == 0 {
		return 0, fmt.Errorf("truth: no recordings in %s", dir)
	}
	p.printf("total of %d recordings: %s\n", files, &total)
	return total.Wrong, p.err
}

// printer remembers the first error of many prints.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

// sink gives feeds the index.
type sink struct {
	index *kvindex.Index
	slots map[kvindex.Target]kvindex.Slot
	err   error
}

func (s *sink) slot(t kvindex.Target) kvindex.Slot {
	slot, ok := s.slots[t]
	if !ok {
		var err error
		if slot, err = s.index.Add(t, model, 0); err != nil {
			s.err = err
		}
		s.slots[t] = slot
	}
	return slot
}

// model is the name that all blocks of a recording are seeded with.
const model = "recorded"

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

// checker plays one recording.
type checker struct {
	name    string
	engine  string
	recs    []record
	out     *printer
	sink    *sink
	players map[string]*feed.Player
	pending []*record // events that may have come after the next request was sent
	chains  *chains
	ids     map[string][]uint32 // prompt text -> ids
	block   int
	// adapters are the models that are adapters.
	adapters map[string]bool
	matches  kvindex.Matches
	res      Result
}

// check plays a recording.
func check(name string, recs []record, out *printer) (Result, error) {
	c := &checker{
		name: name, engine: recs[0].Engine, recs: recs, out: out, players: map[string]*feed.Player{},
		chains: newChains(), adapters: map[string]bool{}, ids: map[string][]uint32{}, res: Result{Skipped: map[string]int{}},
	}
	c.survey()
	if c.block == 0 {
		return c.res, nil
	}
	index, err := kvindex.New(kvindex.Config{BlockSize: c.block})
	if err != nil {
		return c.res, err
	}
	c.sink = &sink{index: index, slots: map[kvindex.Target]kvindex.Slot{}}
	for i := range recs {
		switch r := &recs[i]; r.Kind {
		case "event":
			c.pending = append(c.pending, r)
		case "http":
			c.catchUp(r.Sent)
			c.exchange(r)
		}
	}
	return c.res, c.sink.err
}

// survey learns from all of a recording's events what a router knows from the
// engine's configuration: the block size (0 without stored blocks) and which
// models are adapters.
func (c *checker) survey() {
	d := feed.NewDecoder(feed.Engine(c.engine), 0)
	for i := range c.recs {
		r := &c.recs[i]
		if r.Kind != "event" || len(r.Frames) == 0 {
			continue
		}
		b, err := d.Decode(r.Frames[len(r.Frames)-1])
		if err != nil {
			continue
		}
		for k := range b.Events {
			if c.block == 0 {
				c.block = b.Events[k].BlockSize
			}
			if a := b.Events[k].Adapter; a != "" {
				c.adapters[a] = true
			}
		}
	}
}

// worker is the name of a source's worker: the ranks of one engine share it, the
// engines of a prefill and decode pair do not.
func worker(source string) string { return strings.TrimRight(source, "0123456789") }

// catchUp applies the events that came before a moment.
func (c *checker) catchUp(t float64) {
	rest := c.pending[:0]
	for _, r := range c.pending {
		if r.T >= t {
			rest = append(rest, r)
			continue
		}
		c.player(r.Source).Message(r.Frames)
		c.chains.learn(r)
	}
	c.pending = rest
}

func (c *checker) player(source string) *feed.Player {
	p := c.players[source]
	if p == nil {
		p = feed.NewPlayer(feed.Source{Worker: worker(source), Engine: feed.Engine(c.engine), Rank: kvindex.NoRank, RankFromBatch: true}, c.sink)
		c.players[source] = p
	}
	return p
}

// exchange learns from an exchange and judges it.
func (c *checker) exchange(r *record) {
	req, ans := r.parse()
	if strings.Contains(r.Path, "tokenize") && req != nil && len(ans.Tokens) > 0 {
		c.ids[req.promptKey()] = ans.Tokens
		return
	}
	if strings.HasPrefix(r.Path, "/reset_prefix_cache") && ans.Success != nil {
		c.reset(r, *ans.Success)
		return
	}
	prompt, cached, ok := ans.cached()
	if !ok || req == nil {
		return
	}
	ids, rank, why := c.judgeable(r, req, &ans, prompt)
	if why != "" {
		c.res.Skipped[why]++
		return
	}
	got := c.predict(kvindex.Target{Worker: "rank", Rank: rank}, req, ids, prompt)
	c.res.Predicted += got
	c.res.Reported += cached
	if got == cached {
		c.res.Right++
		return
	}
	c.res.Wrong++
	c.out.printf("%s #%d %q: predicted %d, engine reported %d\n", c.name, r.N, r.Label, got, cached)
}

// reset clears what vLLM's answer says was cleared: the ranks announce it only
// with their next work. A refused reset has still cleared the ranks that were
// idle.
func (c *checker) reset(r *record, all bool) {
	for source, p := range c.players {
		if all || !c.busy(r, source) {
			p.Clear(feed.Reason("reset"))
		}
	}
}

// busy reports whether a request ran on a source's rank beside r.
func (c *checker) busy(r *record, source string) bool {
	for i := range c.recs {
		o := &c.recs[i]
		if o == r || o.Kind != "http" || o.Sent >= r.T || o.T <= r.Sent {
			continue
		}
		req, _ := o.parse()
		if rank, ok := o.rank(c.engine, req); ok && fmt.Sprintf("rank%d", rank) == source {
			return true
		}
	}
	return false
}

// alone reports whether nothing else ran while r did.
func (c *checker) alone(r *record) bool {
	for i := range c.recs {
		o := &c.recs[i]
		if o != r && o.Kind == "http" && o.Sent < r.T && o.T > r.Sent {
			return false
		}
	}
	return true
}

// judgeable returns the prompt's ids and rank, or why the request is not judged.
func (c *checker) judgeable(r *record, req *request, ans *answer, prompt int) (ids []uint32, rank int32, why string) {
	rank, ok := r.rank(c.engine, req)
	switch {
	case !ok:
		return nil, 0, "without a rank"
	case !c.alone(r):
		return nil, 0, "beside others"
	case req.N != nil && *req.N != 1, len(ans.Choices) > 1:
		return nil, 0, "with several answers"
	case c.engine == "sglang" && req.ExtraKey != "":
		c.chains.taint(c.window(r), c.block)
		return nil, 0, "with extra_key"
	}
	if ids = ans.promptIDs(); len(ids) == 0 {
		ids = req.ownIDs()
	}
	if len(ids) == 0 && req.promptKey() != "" {
		ids = c.ids[req.promptKey()]
	}
	if len(ids) == 0 && c.engine == "sglang" {
		ids = c.chains.prompt(c.window(r), c.usable(prompt)*c.block)
		if key := req.promptKey(); key != "" && len(ids) > 0 {
			c.ids[key] = ids
		}
	}
	if len(ids) < c.usable(prompt)*c.block {
		return nil, 0, "of unknown ids"
	}
	if c.engine == "sglang" && req.Salt == "" && c.chains.tainted(ids, c.block) {
		return nil, 0, "equal to one with extra_key"
	}
	return ids, rank, ""
}

// window are the events that came while a request ran.
func (c *checker) window(r *record) []*record {
	var in []*record
	for _, e := range c.pending {
		if e.T >= r.Sent && e.T <= r.T {
			in = append(in, e)
		}
	}
	return in
}

// usable is how many blocks of a prompt a cache can serve: the last token is
// always computed.
func (c *checker) usable(prompt int) int { return max(prompt-1, 0) / c.block }

// predict asks the index.
func (c *checker) predict(t kvindex.Target, req *request, ids []uint32, prompt int) int {
	adapter := ""
	if c.adapters[req.Model] {
		adapter = req.Model
	}
	h := c.sink.index.Hasher()
	n := min(c.usable(prompt)*c.block, len(ids))
	hashes := h.AppendHashes(nil, h.Seed(model, adapter, req.Salt), ids[:n], c.block)
	c.sink.index.Match(hashes, &c.matches)
	slot, ok := c.sink.slots[t]
	for i := range c.matches.Holders {
		if m := &c.matches.Holders[i]; ok && m.Slot == slot {
			return int(m.Total()) * c.block
		}
	}
	return 0
}

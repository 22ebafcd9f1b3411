package decide

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// poolsOfQwen are pools whose model makes ids.
func poolsOfQwen(t *testing.T, sections string) (*pools, []byte) {
	s := servedQwen(t)
	p := newPoolsServing(t, prefillFirst["lmcache"].connector, sections, []*fleet.Model{s})
	p.both(answer(prefillFirst["lmcache"].answer))
	return p, []byte(`{"model":"demo","messages":[{"role":"user","content":"` + strings.Repeat(" word", 400) + `"}]}`)
}

// holds lets workers report the blocks of a prompt.
func holds(t *testing.T, p *pools, raw []byte, names ...string) {
	hashes, ids := blocksOf(t, p.Decider, raw)
	stored := kvindex.Event{Kind: kvindex.Stored, Tokens: ids[:len(hashes)*p.cfg.Index.BlockSize], BlockSize: p.cfg.Index.BlockSize}
	for i := range hashes {
		stored.Hashes = append(stored.Hashes, kvindex.EngineHash(i+1))
	}
	for slot, e := range p.fleet.View().Endpoints {
		for _, n := range names {
			if e != nil && e.Target.Worker == n {
				if err := p.fleet.Index().Apply(slot, &stored); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// What a split request matches by events is counted as such.
func TestASplitRequestIsMatchedByEvents(t *testing.T) {
	p, raw := poolsOfQwen(t, "")
	holds(t, p, raw, "p0", "p1")
	got := p.Decide(t.Context(), &extproc.Request{ID: "a", Method: "POST", Path: "/v1/chat/completions", Body: raw})
	tk := got.Ticket.(*ticket)
	if tk.expects.byEvents == 0 || tk.expects.speculative != 0 {
		t.Errorf("got %d by events, %d speculative; all are known from events", tk.expects.byEvents, tk.expects.speculative)
	}
	end(&got, 200)
}

// The next prefill target is chosen by its cache, too.
func TestTheNextPrefillTargetIsChosenByItsCache(t *testing.T) {
	p, raw := poolsOfQwen(t, "")
	holds(t, p, raw, "p0", "p1")
	first := true
	once := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if first {
			first = false
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		answer(prefillFirst["lmcache"].answer)(w, r)
	})
	p.both(once)
	got := p.Decide(t.Context(), &extproc.Request{ID: "a", Method: "POST", Path: "/v1/chat/completions", Body: raw})
	e := p.decisions.Last(1)[0]
	if e.Matched == 0 {
		t.Error("nothing matched on the second prefill target, which holds the prompt")
	}
	end(&got, 200)
}

// The subset of a split request stays its own while it runs its leg.
func TestTheSubsetOfASplitRequest(t *testing.T) {
	p, raw := poolsOfQwen(t, "")
	addr := func(i int) string { return p.list[i].Address }
	calls := 0
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if calls++; calls == 1 {
			// meanwhile another request with another subset, which contains no prefill target
			d := p.Decide(t.Context(), &extproc.Request{ID: "b", Method: "POST", Path: "/v1/chat/completions", Body: raw, HasSubset: true, Subset: []string{addr(0)}})
			end(&d, 200)
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		answer(prefillFirst["lmcache"].answer)(w, r)
	})
	p.both(h)
	got := p.Decide(t.Context(), &extproc.Request{ID: "a", Method: "POST", Path: "/v1/chat/completions", Body: raw, HasSubset: true, Subset: []string{addr(0), addr(1), addr(2)}})
	e := p.decisions.Find("a")
	if e.Prefill == "" {
		t.Errorf("not split after the first leg failed, though the second prefill target is in the subset: %v", e.PrefillNotes)
	}
	end(&got, 200)
}

// A request that is placed without a prefill target after a wait goes where its prompt is cached.
func TestLocalAfterAWait(t *testing.T) {
	p, raw := poolsOfQwen(t, "routing: {wait: {max_requests: 8, timeout: 1m}, disagg: {mode: threshold, threshold: 0, prefill: {limits: {max_active: 1}}}}\n")
	var list []workers.Worker
	for i, n := range []string{"e", "f", "g"} {
		w := p.list[0]
		w.Name, w.Address, w.Generation = n, "10.0.0.1"+strconv.Itoa(i)+":1", uint64(20+i)
		list = append(list, w)
	}
	p.Fleet().SetWorkers(append(slices.Clone(p.list), list...))
	holds(t, p, raw, "f")
	hang := make(chan struct{})
	p.both(func(w http.ResponseWriter, r *http.Request) { <-hang; w.WriteHeader(http.StatusInternalServerError) })
	ask := func(id string) chan extproc.Decision {
		done := make(chan extproc.Decision, 1)
		go func() {
			d := p.Decide(t.Context(), &extproc.Request{ID: id, Method: "POST", Path: "/v1/chat/completions", Body: raw})
			done <- extproc.Await(t.Context(), d)
		}()
		return done
	}
	one, two := ask("one"), ask("two")
	for p.legs[0].Load()+p.legs[1].Load() < 2 {
		time.Sleep(time.Millisecond)
	}
	three := ask("three")
	for {
		p.mu.Lock()
		n := p.waiting.queue.Len()
		p.mu.Unlock()
		if n == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	p.Fleet().SetWorkers(append([]workers.Worker{p.list[0]}, list...))
	p.Update(func(*routing.Router, time.Duration) {})
	select {
	case d := <-three:
		e := p.decisions.Find("three")
		for _, c := range e.Explanation.Candidates { // f may be busier than others, but it is known to hold the prompt
			if c.Target == "f" && c.Miss > 100 {
				t.Errorf("got %d uncached tokens on f, which holds the prompt", c.Miss)
			}
		}
		end(&d, 200)
	case <-time.After(5 * time.Second):
		t.Error("still waits")
	}
	close(hang)
	for _, c := range []chan extproc.Decision{one, two} {
		d := <-c
		end(&d, 200)
	}
}

// A request whose decode target goes away during the leg goes where its prompt is cached.
func TestAnotherDecodeTargetIsChosenByItsCache(t *testing.T) {
	p, raw := poolsOfQwen(t, "")
	var list []workers.Worker
	for i, n := range []string{"e", "f", "g", "h"} {
		w := p.list[0]
		w.Name, w.Address, w.Generation = n, "10.0.0.1"+strconv.Itoa(i)+":1", uint64(20+i)
		list = append(list, w)
	}
	p.Fleet().SetWorkers(append(slices.Clone(p.list), list...))
	holds(t, p, raw, "f", "h")
	gone := false
	p.both(func(w http.ResponseWriter, r *http.Request) {
		if gone {
			answer(prefillFirst["lmcache"].answer)(w, r)
			return
		}
		gone = true
		p.mu.Lock()
		var used string
		p.router.Targets(func(slot kvindex.Slot, info *routing.TargetInfo, load routing.Load) bool {
			if load.Active > 0 && (info.Worker == "f" || info.Worker == "h") {
				used = info.Worker
			}
			return true
		})
		p.mu.Unlock()
		rest := slices.DeleteFunc(slices.Clone(list), func(w workers.Worker) bool { return w.Name == used })
		p.Fleet().SetWorkers(append(slices.Clone(p.list), rest...))
		answer(prefillFirst["lmcache"].answer)(w, r)
	})
	d := p.Decide(t.Context(), &extproc.Request{ID: "a", Method: "POST", Path: "/v1/chat/completions", Body: raw})
	e := p.decisions.Find("a")
	if e.Target != "f" && e.Target != "h" {
		t.Errorf("got %s, want f or h, which hold the prompt", e.Target)
	}
	end(&d, 200)
}

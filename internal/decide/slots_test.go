package decide

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

// A prefill worker leaves between the plan and its leg, and a new worker gets its slot: the
// leg must not be sent to the new worker, whose role is unknown, but to the other prefill
// worker.
func TestANewcomerInThePrefillWorkersSlot(t *testing.T) {
	p := newPoolsOf(t, "nixl")
	var heard atomic.Int64
	newcomer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		heard.Add(1)
		_, _ = io.WriteString(w, nixlAnswer)
	}))
	t.Cleanup(newcomer.Close)
	now := p.now()
	s := newScratch()
	j := &job{d: p.Decider, began: now, clock: now, s: s, api: body.Completions, r: &extproc.Request{ID: "x", Method: "POST", Path: "/v1/completions",
		Body: []byte(`{"prompt":"` + strings.Repeat("word ", 400) + `"}`)}}
	j.entry = observe.NewEntry(j.r, now)
	in, err := j.read(t.Context(), t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := &work{job: j, in: in, tokens: &tokens{count: 1000}, query: routing.Query{ID: "x", PromptTokens: 1000}}
	plan, err := w.place(t.Context())
	if err != nil || plan.plan.Prefill == routing.NoSlot {
		t.Fatal(plan, err)
	}
	gone := plan.prefill.Target.Worker
	var list []workers.Worker
	for _, w := range p.list {
		if w.Name == gone {
			w = workers.Worker{Worker: config.Worker{Name: "newcomer", Address: newcomer.Listener.Addr().String(), Engine: "vllm", Role: "decode", Speed: 1}, Ready: true, Generation: 77}
		}
		list = append(list, w)
	}
	p.Fleet().SetWorkers(list)
	if at := p.fleet.View().Endpoint(plan.plan.Prefill); at == nil || at.Target.Worker != "newcomer" {
		t.Fatalf("the slot is %+v's", at)
	}
	d, err := w.split(t.Context(), plan)
	if err != nil {
		t.Fatal(err)
	}
	other := 0
	if gone == "p0" {
		other = 1
	}
	if n := heard.Load(); n != 0 || d.Endpoint != "10.0.0.9:1" || p.legs[other].Load() != 1 || p.legs[1-other].Load() != 0 {
		t.Errorf("the newcomer had %d legs, p0 %d, p1 %d; %+v", n, p.legs[0].Load(), p.legs[1].Load(), d)
	}
	if want := "p" + strconv.Itoa(other); j.entry.Prefill != want {
		t.Errorf("the decision log says %s, want %s", j.entry.Prefill, want)
	}
	end(&d, http.StatusOK)
	p.Fleet().SetWorkers(p.list)
}

package decide

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

// A prefill worker leaves between the plan and its leg, and a newcomer gets its slot: the
// newcomer, which may be anything, hears nothing of the leg. The other prefill worker
// does.
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
	s := &scratch{}
	j := &job{d: p.Decider, began: now, clock: now, s: s, request: &s.request, r: &extproc.Request{ID: "x", Method: "POST", Path: "/v1/completions",
		Body: []byte(`{"prompt":"` + strings.Repeat("word ", 400) + `"}`)}}
	j.open()
	if reject := j.parse(); reject != nil {
		t.Fatal(reject)
	}
	j.query.ID, j.query.PromptTokens = "x", 1000
	plan, decode, err := j.place(t.Context(), nil)
	if err != nil || plan.Prefill == routing.NoSlot {
		t.Fatal(plan, err)
	}
	gone := j.prefillAt.Target.Worker
	var list []workers.Worker
	for _, w := range p.list {
		if w.Name == gone {
			w = workers.Worker{Worker: config.Worker{Name: "newcomer", Address: newcomer.Listener.Addr().String(), Engine: "vllm", Role: "decode", Speed: 1}, Ready: true, Generation: 77}
		}
		list = append(list, w)
	}
	p.Fleet().SetWorkers(list)
	if at := p.fleet.View().Endpoint(plan.Prefill); at == nil || at.Target.Worker != "newcomer" {
		t.Fatalf("the slot is %+v's", at)
	}
	d := j.split(t.Context(), plan, decode)
	other := 0
	if gone == "p0" {
		other = 1
	}
	if n := heard.Load(); n != 0 || d.Endpoint != "10.0.0.9:1" || p.legs[other].Load() != 1 || p.legs[1-other].Load() != 0 {
		t.Errorf("the newcomer had %d legs, p0 %d, p1 %d; %+v", n, p.legs[0].Load(), p.legs[1].Load(), d)
	}
	if j.entry.Prefill != j.prefillAt.Target.String() || j.prefillAt.Target.Worker == gone {
		t.Errorf("prefilled by %s, the decision log says %s", j.prefillAt.Target, j.entry.Prefill)
	}
	end(&d, http.StatusOK)
	p.Fleet().SetWorkers(p.list)
}

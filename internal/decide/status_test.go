package decide

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/routing"
)

func TestStatusShowsLoadCacheAndTotals(t *testing.T) {
	down := worker("b", 0)
	down.Ready, down.Reason = false, "connect: refused"
	b := newBench(t, "routing: {wait: {max_requests: 8, timeout: 1m}}\n", worker("a", 2), down)
	d, e := b.ask("/v1/completions", completion(100, ""), "x-session-id", "1")
	const bound = 1000 // for its conversation
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	b.Update(func(r *routing.Router, now time.Duration) {
		r.ReportWorker(now, "a", routing.Report{At: now, KVUsage: 0.25})
	})
	s := b.Status()
	if len(s.Workers) != 2 || s.Workers[0].Name != "a" || !s.Workers[0].Ready || s.Workers[1].Ready || s.Workers[1].Reason != "connect: refused" {
		t.Fatalf("got %+v, want a ready and b refused", s.Workers)
	}
	var active, prompt float64
	for _, r := range s.Workers[0].Ranks {
		active += float64(r.Active)
		prompt += r.PromptTokens
		if r.Usage == nil || *r.Usage != 0.25 {
			t.Errorf("rank %s: got KV usage %v, want the engine's 0.25", r.Rank, r.Usage)
		}
	}
	if len(s.Workers[0].Ranks) != 2 || active != 1 || prompt != float64(e.PromptTokens) {
		t.Errorf("got %+v, want one request with %d tokens", s.Workers[0].Ranks, e.PromptTokens)
	}
	if got, other := s.Workers[0].RemovalCost, s.Workers[1].RemovalCost; got != e.PromptTokens+bound || other != 0 {
		t.Errorf("got removal costs of %d and %d tokens, want %d and 0", got, other, e.PromptTokens+bound)
	}
	if r := s.Workers[1].Ranks; len(r) != 1 || r[0].Rank != "" || r[0].Usage != nil || r[0].Active != 0 {
		t.Errorf("got %+v, want one rank without a number and without a report", r)
	}
	if s.Requests != 1 || s.Rejected != 0 || s.Reservations != 1 || s.WaitingMost != 8 || s.PromptTokens != prompt {
		t.Errorf("got %+v, want one running request", s)
	}
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	d.Ticket.ResponseBody([]byte(`{"usage":{"prompt_tokens":100,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":7}}}`), true)
	d.Ticket.End(time.Now())
	if s := b.Status(); s.Reservations != 0 || s.ObservedTokens != 7 {
		t.Errorf("got %+v, want the 7 cached tokens of the request that has ended", s)
	}
}

// The status names the tenants with the most waiting requests, and the log that of each request, but nothing has a tenant's
// name, which may be a key.
func TestStatusShowsTenants(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 40, timeout: 1m, hold_tokens: 20, weights: {team-0: 4}, bands: [{priority: 2, models: [demo]}]}\ntenants: {header: x-team}\n", worker("a", 0))
	if first := b.Status().Tenants; len(first) != 0 {
		t.Errorf("got %+v, want no tenant while none waits", first)
	}
	running, e := b.ask("/v1/completions", text("sea", 100), "x-team", "team-0")
	waits := []*asked{b.sendBody(1, text("sky", 10), "x-team", "team-0"), b.sendBody(2, text("sand", 10), "x-team", "team-0")}
	for i := range 30 {
		waits = append(waits, b.sendBody(3+i, text("sea", 10), "x-team", fmt.Sprint("team-", 1+i)))
	}
	s := b.Status()
	want := routing.TenantState{Tenant: "8b1d97bbe7da1b3e", Priority: 2, Weight: 4, Requests: 2}
	if len(s.Tenants) != statusTenants || s.Tenants[0] != want || s.Tenants[1].Requests != 1 || s.Tenants[1].Weight != 1 {
		t.Errorf("got %+v, want %+v and %d others", s.Tenants, want, statusTenants-1)
	}
	if text := e.Text(); e.Tenant != want.Tenant || e.Priority != 2 || !strings.Contains(text, "priority 2\ntenant "+want.Tenant+"\n") || strings.Contains(text, "team-") {
		t.Errorf("got the priority %d, the tenant %q and\n%s", e.Priority, e.Tenant, text)
	}
	if text, err := json.Marshal(s); err != nil || strings.Contains(string(text), "team-") {
		t.Errorf("got %s, %v, want no name", text, err)
	}
	running.Ticket.End(time.Now())
	for _, a := range waits {
		a.stop()
		if d := <-a.done; d.Ticket != nil {
			d.Ticket.End(time.Now())
		}
	}
	b.idle()
}

func TestStatusShowsTheQueue(t *testing.T) {
	b := flowBench(t, "", "")
	first := <-b.sendBody(0, text("sea", 100)).done
	waits := b.sendBody(1, text("sky", 100))
	if s := b.Status(); s.Waiting != 1 || s.WaitingMost != 8 || len(s.Queue) != 1 || s.Queue[0].Requests != 1 || s.Queue[0].Model != "demo" || len(s.Pools) != 1 {
		t.Errorf("got %d of %d waiting, %+v, %+v, want one request for demo", s.Waiting, s.WaitingMost, s.Queue, s.Pools)
	}
	first.Ticket.End(time.Now())
	(<-waits.done).Ticket.End(time.Now())
	if s := b.Status(); s.Waiting != 0 || s.Queue[0].Requests != 0 {
		t.Errorf("got %+v, want an empty queue", s.Queue)
	}
}

// A reload of fairness while requests wait shows no name either.
func TestStatusShowsNoTenantAfterAReload(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 40, timeout: 1m, hold_tokens: 20}\ntenants: {header: x-team}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", text("sea", 100), "x-team", "team-0")
	waits := b.sendBody(1, text("sky", 10), "x-team", "team-0")
	for _, fairness := range []string{config.FairModel, config.FairNone, config.FairTenant} {
		next := *b.live.Load()
		next.Flow.Fairness = fairness
		b.live.Store(&next)
		if got := b.Status().Tenants; len(got) != 1 || got[0].Tenant != "8b1d97bbe7da1b3e" {
			t.Errorf("%s: got %+v, want the hash", fairness, got)
		}
	}
	waits.stop()
	<-waits.done
	running.Ticket.End(time.Now())
	b.idle()
}

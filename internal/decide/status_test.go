package decide

import (
	"testing"
	"time"

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

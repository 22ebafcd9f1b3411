package decide

import (
	"io"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/fleet"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
)

// credited is the metric's value as a scrape reads it.
func (d *Decider) credited() (n float64) {
	d.collect(func(name, _ string, value float64, _ ...string) {
		if name == "index_speculative_blocks" {
			n = value
		}
	})
	return n
}

// A request that its engine refused or failed on leaves no credit: what was computed nevertheless the events tell.
func TestARefusedRequestLeavesNoCredit(t *testing.T) {
	for status, keeps := range map[int]bool{200: true, 500: false, 503: false, 400: false, 404: false, 413: false, 422: false, 429: false} {
		b := newBench(t, "", worker("a", 0))
		d, _ := b.ask("/v1/completions", completion(800, ""))
		if b.credited() == 0 {
			t.Fatal("a prompt that was sent has no credit")
		}
		d.Ticket.ResponseHeaders(status, d.Endpoint)
		d.Ticket.End(time.Now())
		left := b.credited()
		_, again := b.ask("/v1/completions", completion(800, ""))
		if (left > 0) != keeps || (again.Matched > 0) != keeps {
			t.Errorf("after a %d %v blocks are credited, and the same prompt counts on %d tokens", status, left, again.Matched)
		}
	}
}

// Refusing a request withdraws only its own credit.
func TestARefusalTakesBackItsOwnCredit(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	b.ask("/v1/completions", completion(400, ""))
	before := b.credited()
	d, _ := b.ask("/v1/completions", completion(800, ""))
	d.Ticket.ResponseHeaders(400, d.Endpoint)
	if left := b.credited(); left != before || left == 0 {
		t.Errorf("%v blocks are credited, before the refused request %v", left, before)
	}
}

// A request that Envoy sent to another worker leaves no credit where it was not served.
func TestCreditDoesNotStayWhereARequestWasNotServed(t *testing.T) {
	b := newBench(t, "", worker("a", 0), worker("b", 0))
	d, e := b.ask("/v1/completions", completion(800, ""))
	other := map[string]string{"a": "b", "b": "a"}[e.Target]
	d.Ticket.ResponseHeaders(200, worker(other, 0).Address)
	if left := b.credited(); left != 0 {
		t.Errorf("%v blocks are credited", left)
	}
}

// Expired credit counts neither in a scrape nor for the first request after an idle period.
func TestCreditRunsOutWithoutRequests(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	late := time.Duration(0)
	b.now = func() time.Time { return time.Now().Add(late) }
	b.ask("/v1/completions", completion(800, ""))
	late = time.Hour
	if _, e := b.ask("/v1/completions", completion(800, "")); e.Matched != 0 {
		t.Errorf("the first request after an hour counts on %d tokens", e.Matched)
	}
	late = 2 * time.Hour
	if n := b.credited(); n != 0 {
		t.Errorf("%v blocks of credit after an hour without requests", n)
	}
}

// A prefill worker that refuses its leg has computed nothing either.
func TestARefusedPrefillLegLeavesNoCredit(t *testing.T) {
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	for status, keeps := range map[int]bool{http.StatusOK: true, http.StatusBadRequest: false} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			s := &fleet.Model{Config: config.Model{Name: "demo"}, Tokens: m}
			s.Config.Check.Disabled = true
			p := newPoolsServing(t, "nixl", "", []*fleet.Model{s})
			p.both(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(status)
				_, _ = io.WriteString(w, nixlAnswer)
			})
			d := p.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions", Body: []byte(completion(800, ""))})
			if d.Ticket != nil {
				d.Ticket.ResponseHeaders(400, d.Endpoint) // of the decode worker
				d.Ticket.End(time.Now())
			}
			if n := p.credited(); (n > 0) != keeps {
				t.Errorf("after a prefill leg's %d %v blocks are credited", status, n)
			}
		})
	}
}

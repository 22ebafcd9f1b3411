package decide

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/extproc"
)

// scrape reads the metrics as a scraper does.
func (b *bench) scrape() string {
	b.t.Helper()
	rec := httptest.NewRecorder()
	promhttp.HandlerFor(b.metrics.Registry, promhttp.HandlerOpts{}).ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return rec.Body.String()
}

// Every rank has its own series, hits are counted where they occurred, and sums cover all
// ranks.
func TestRanksAreMeasuredSeparately(t *testing.T) {
	b := newBench(t, "routing: {trust_overrides: true}\n", worker("a", 4))
	for rank, n := range []int{0, 1, 2, 5} {
		for range n {
			d, _ := b.ask("/v1/completions", completion(300, ""), pinHeader, fmt.Sprint("a/", rank))
			d.Ticket.ResponseHeaders(200, d.Endpoint)
		}
	}
	text := b.scrape()
	for _, want := range []string{
		`kvlane_active_requests{rank="0",worker="a"} 0`, `kvlane_active_requests{rank="1",worker="a"} 1`,
		`kvlane_active_requests{rank="2",worker="a"} 2`, `kvlane_active_requests{rank="3",worker="a"} 5`,
		`kvlane_active_requests_mean 2`, `kvlane_active_requests_variance 3.5`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("missing: %s", want)
		}
	}
	matched := func(rank int) (n float64) {
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "kvlane_matched_tokens_total{") && strings.Contains(line, fmt.Sprintf("rank=%q", fmt.Sprint(rank))) {
				if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &n); err != nil {
					t.Fatal(err)
				}
			}
		}
		return n
	}
	// The first request of a rank matches nothing there, the second all that the first
	// sent.
	if matched(1) != 0 || matched(2) == 0 || matched(3) != 4*matched(2) {
		t.Errorf("matched tokens: %v on rank 1, %v on rank 2, %v on rank 3", matched(1), matched(2), matched(3))
	}
}

// Without any event, prompts that were sent before still give hits.
func TestHitsWithoutEvents(t *testing.T) {
	b := newBench(t, "", worker("a", 2), worker("b", 2))
	first, e1 := b.ask("/v1/completions", completion(600, ""))
	first.Ticket.ResponseHeaders(200, first.Endpoint)
	first.Ticket.End(time.Now())
	if _, e2 := b.ask("/v1/completions", completion(600, "")); e2.Target != e1.Target || e2.Matched == 0 {
		t.Errorf("first on %s, then on %s with %d tokens matched", e1.Target, e2.Target, e2.Matched)
	}
}

// What a decision expects counts only once the engine has taken the prompt.
func TestARefusedPromptExpectsNoHits(t *testing.T) {
	for status, counts := range map[int]bool{200: true, 400: false, 404: false, 422: false, 429: false, 503: false} {
		b := newBench(t, "", worker("a", 0))
		b.ask("/v1/completions", completion(300, "")) // no answer yet
		d, _ := b.ask("/v1/completions", completion(300, ""))
		d.Ticket.ResponseHeaders(status, d.Endpoint)
		prompt, matched := testutil.ToFloat64(b.metrics.PromptTokens.WithLabelValues("a", "")),
			testutil.ToFloat64(b.metrics.MatchedTokens.WithLabelValues("a", "", "speculative"))
		if (prompt > 0) != counts || (matched > 0) != counts || matched > prompt {
			t.Errorf("%d: got %v of %v tokens matched, want any: %v", status, matched, prompt, counts)
		}
	}
}

// A request that is the first turn of a conversation is marked: its id was not known before.
func TestFirstTurnsAreTold(t *testing.T) {
	b := newBench(t, "explain: {header: true}\nrouting: {conversation_headers: [x-session]}\n", worker("a", 0))
	for i, c := range []struct {
		id    string
		first bool
	}{{"one", true}, {"one", false}, {"two", true}, {"", false}} {
		d, e := b.ask("/v1/completions", completion(50, ""), "x-session", c.id)
		told := slices.Contains(d.Ticket.ResponseHeaders(200, d.Endpoint), extproc.Header{Name: "x-kvlane-first-turn", Value: "true"})
		if e.FirstTurn != c.first || told != c.first {
			t.Errorf("request %d: got %v in the log and %v in the header, want %v", i, e.FirstTurn, told, c.first)
		}
	}
	if got := testutil.ToFloat64(b.metrics.FirstTurns.WithLabelValues("completions")); got != 2 {
		t.Errorf("got %v first turns, want 2", got)
	}
}

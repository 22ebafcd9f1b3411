package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// completionBody is a request for that many generated tokens.
func completionBody(seed string, tokens int) []byte {
	return fmt.Appendf(nil, `{"model":"demo","max_tokens":%d,"ignore_eos":true,"prompt":%q}`, tokens, prose(seed, 40))
}

// hold starts requests that run for a while and waits until all of them are booked.
func (b *bed) hold(n, tokens int) chan *reply {
	b.t.Helper()
	done := make(chan *reply, n)
	before := b.metric("kvlane_active_requests")
	for i := range n {
		go func() {
			r, err := b.send("/v1/completions", completionBody(fmt.Sprint("held", i), tokens))
			if err != nil {
				r = &reply{}
			}
			done <- r
		}()
	}
	b.until("the requests run", func() bool { return b.metric("kvlane_active_requests") == before+float64(n) })
	return done
}

const tight = "routing: {trust_overrides: true, policy: {limits: {max_active: 1}}%s}\n"

// When all targets are at their limits and nothing may wait, the answer says when to retry.
func TestFullWorkersAnswer429(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(20 * time.Millisecond), config: fmt.Sprintf(tight, "")})
	held := b.hold(1, 100)
	r := b.post("/v1/completions", completionBody("x", 1))
	if r.status != http.StatusTooManyRequests || r.header.Get("Retry-After") == "" || r.answer.Error.Type != "rate_limit_error" {
		t.Errorf("status %d, retry after %q: %s", r.status, r.header.Get("Retry-After"), r.body)
	}
	if r := <-held; r.status != http.StatusOK {
		t.Errorf("the request that was there: status %d", r.status)
	}
	b.until("the place is free", func() bool { return b.metric("kvlane_active_requests") == 0 })
	if r := b.post("/v1/completions", completionBody("x", 1)); r.status != http.StatusOK {
		t.Errorf("with room again: status %d", r.status)
	}
}

// Waiting requests are placed when others end; clients that disconnect leave the queue; in
// a full queue other requests replace batch jobs.
func TestWaitingForRoom(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(20 * time.Millisecond), config: fmt.Sprintf(tight, ", wait: {max_requests: 2, timeout: 20s}")})
	held := b.hold(1, 100)
	waiting := func(n float64) {
		t.Helper()
		b.until(fmt.Sprint(n, " wait"), func() bool { return b.metric("kvlane_waiting_requests") == n })
	}
	// A client that disconnects.
	ctx, stop := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+b.ingress+"/v1/completions", bytes.NewReader(b.remember(completionBody("gone", 1))))
	if err != nil {
		t.Fatal(err)
	}
	gone := make(chan error, 1)
	go func() {
		resp, err := b.client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		gone <- err
	}()
	waiting(1)
	stop()
	if err := <-gone; err == nil {
		t.Error("the client that left got an answer")
	}
	waiting(0)
	// A batch job that is shed for the second of two other requests.
	send := func(seed string, headers ...string) chan *reply {
		done := make(chan *reply, 1)
		go func() {
			r, err := b.send("/v1/completions", completionBody(seed, 2), headers...)
			if err != nil {
				r = &reply{}
			}
			done <- r
		}()
		return done
	}
	batch := send("batch", "x-kvlane-priority", "-1")
	waiting(1)
	one := send("one")
	waiting(2)
	two := send("two", "x-kvlane-priority", "1")
	if r := <-batch; r.status != http.StatusTooManyRequests {
		t.Errorf("the batch job: status %d", r.status)
	}
	for _, done := range []chan *reply{held, one, two} {
		if r := <-done; r.status != http.StatusOK {
			t.Errorf("status %d: %s", r.status, r.body)
		}
	}
	var entry struct {
		Waited time.Duration `json:"waited_ns"`
	}
	last := b.post("/v1/completions", completionBody("after", 1))
	b.getJSON("/debug/decisions/"+last.header.Get("X-Request-Id"), &entry)
	if last.status != http.StatusOK || entry.Waited != 0 {
		t.Errorf("with room: status %d, waited %s", last.status, entry.Waited)
	}
}

// Waiting ends at its deadline with the same answer as without waiting, even if the
// deadline is beyond Envoy's timeout for a silent Kvlane.
func TestWaitingEnds(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(20 * time.Millisecond), config: fmt.Sprintf(tight, ", wait: {max_requests: 2, timeout: 4s}")})
	held := b.hold(1, 400)
	if r := b.post("/v1/completions", completionBody("x", 1)); r.status != http.StatusTooManyRequests || r.header.Get("Retry-After") == "" {
		t.Errorf("status %d: %s", r.status, r.body)
	}
	<-held
}

// Override headers work only where the configuration trusts them.
func TestOverridesAreObeyedOnlyWhereTrusted(t *testing.T) {
	for _, trusted := range []bool{true, false} {
		t.Run(fmt.Sprint("trusted ", trusted), func(t *testing.T) {
			b := newBed(t, shape{config: fmt.Sprintf("routing: {trust_overrides: %v, objectives: {batch: -1}, policy: {limits: {max_active: 2, shed_at: 0.5}}}\n", trusted),
				engine: slow(5 * time.Millisecond)})
			counts := map[string]int{}
			for i := range 6 {
				body := completionBody(fmt.Sprint("o", i), 1)
				pinned := b.post("/v1/completions", body, "x-kvlane-pin", "e1/1")
				if pinned.status != http.StatusOK {
					t.Fatalf("status %d: %s", pinned.status, pinned.body)
				}
				if pinned.target == "e1/1" {
					counts["pinned"]++
				}
				if worker, rec, ok := b.seen(pinned.header.Get("X-Request-Id")); !ok || fmt.Sprintf("%s/%d", worker, rec.Rank) != pinned.target {
					t.Errorf("decided for %s, served by %s/%d", pinned.target, worker, rec.Rank)
				}
				if r := b.post("/v1/completions", completionBody(fmt.Sprint("w", i), 1), "x-kvlane-pin", "e0"); strings.HasPrefix(r.target, "e0/") {
					counts["worker"]++
				}
				if r := b.post("/v1/completions", completionBody(fmt.Sprint("x", i), 1), "x-kvlane-exclude", "e1, e0/0"); r.target == "e0/1" {
					counts["excluded"]++
				}
				b.until("all is quiet", func() bool { return b.metric("kvlane_active_requests") == 0 })
			}
			for _, what := range []string{"pinned", "worker", "excluded"} {
				if (counts[what] == 6) != trusted {
					t.Errorf("%s: %d of 6", what, counts[what])
				}
			}
			// With one request on every rank, half of the limit, batch jobs are refused.
			held := b.hold(4, 200)
			for name, value := range map[string]string{"x-kvlane-priority": "-1", "x-gateway-inference-objective": "batch"} {
				r := b.post("/v1/completions", completionBody(name, 1), name, value)
				if (r.status == http.StatusTooManyRequests) != trusted {
					t.Errorf("%s: status %d", name, r.status)
				}
			}
			if r := b.post("/v1/completions", completionBody("normal", 1)); r.status != http.StatusOK {
				t.Errorf("a request like others: status %d", r.status)
			}
			for range 4 {
				<-held
			}
		})
	}
}

func (b *bed) getJSON(path string, to any) {
	b.t.Helper()
	resp, err := http.Get("http://" + b.admin + path)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		b.t.Fatalf("%s: %d %s %v", path, resp.StatusCode, text, err)
	}
	if err := json.Unmarshal(text, to); err != nil {
		b.t.Fatal(err)
	}
}

// explain runs `kvlane explain`.
func (b *bed) explain(args ...string) (string, error) {
	out, err := exec.Command(kvlaneBinary, append([]string{"explain", "--admin", b.admin}, args...)...).CombinedOutput()
	return string(out), err
}

// A decision can be read while the service runs, exported, and run again elsewhere with the
// same outcome.
func TestADecisionIsExplainedExportedAndMadeAgain(t *testing.T) {
	b := newBed(t, shape{})
	b.chat(message{"system", system}, message{"user", "Where are the maps?"})
	resp, err := http.Post("http://"+b.admin+"/debug/record?n=1", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	r := b.chat(message{"system", system}, message{"user", "Where are the maps?"}, message{"assistant", "Upstairs."}, message{"user", "And novels?"})
	id := r.header.Get("X-Request-Id")
	var entry struct {
		Target      string `json:"target"`
		Matched     int    `json:"matched_tokens"`
		Explanation struct {
			Verdicts   []struct{ Stage, Text string } `json:"verdicts"`
			Candidates []struct {
				Target string   `json:"target"`
				Cost   *float64 `json:"cost"`
			} `json:"candidates"`
		} `json:"explanation"`
	}
	b.getJSON("/debug/decisions/"+id, &entry)
	if entry.Target != r.target || entry.Matched != r.matched || len(entry.Explanation.Candidates) != 4 || len(entry.Explanation.Verdicts) == 0 {
		t.Errorf("%+v, the answer came from %s with %d tokens matched", entry, r.target, r.matched)
	}
	text, err := b.explain(id)
	if err != nil || !strings.Contains(text, "=> "+r.target) || !strings.Contains(text, "e0/0") || !strings.Contains(text, "e1/1") {
		t.Errorf("%v\n%s", err, text)
	}
	exported, err := b.explain("--export", id)
	if err != nil {
		t.Fatalf("%v\n%s", err, exported)
	}
	b.write("decision.json", exported)
	b.stopKvlane(syscall.SIGTERM)
	again, err := b.explain("--rerun", b.file("decision.json"))
	if err != nil || !strings.Contains(again, "the same decision as recorded") || !strings.Contains(again, "=> "+r.target) {
		t.Errorf("%v\n%s", err, again)
	}
	// Another state leads to another decision: the comparison can fail.
	b.write("changed.json", strings.Replace(exported, `"matched": `+fmt.Sprint(r.matched), `"matched": 1`, 1))
	if out, err := b.explain("--rerun", b.file("changed.json")); err == nil {
		t.Errorf("a changed plan was made again:\n%s", out)
	}
	if out, err := b.explain(id); err == nil {
		t.Errorf("explained without a service:\n%s", out)
	}
}

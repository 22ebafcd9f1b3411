package e2e

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// flowing is a queue in front of one engine with a few places. The header of the tenant is trusted,
// as behind a gateway that sets it.
const (
	flowing = "flow: {max_requests: %d, timeout: 60s, fairness: %s}\ntenants: {header: x-team, trust_ingress: true}\n" +
		"routing: {policy: {limits: {max_active: 8}}}\n"
	queueMax = 40
)

// flood sends requests of a tenant, each in a goroutine of its own, and counts those that ended.
func (b *bed) flood(n int, tenant string, ended *atomic.Int64) (statuses func() map[int]int) {
	var mu sync.Mutex
	var all sync.WaitGroup
	counts := map[int]int{}
	for i := range n {
		all.Go(func() {
			status := 0
			r, err := b.send("/v1/completions", completionBody(fmt.Sprint("flood", tenant, i), 10+i%21), "x-team", tenant)
			if err == nil {
				status = r.status
			}
			if status == http.StatusTooManyRequests && r.header.Get("Retry-After") == "" {
				status = -1
			}
			mu.Lock()
			counts[status]++
			mu.Unlock()
			ended.Add(1)
		})
	}
	return func() map[int]int { all.Wait(); return counts }
}

// One tenant floods. The other one's requests, sent one after the other, wait for the next of eight places only, not for
// the flood: nine of ten take at most 1.3 times as long as alone.
func TestATenantThatFloodsDelaysNoOther(t *testing.T) {
	const waiting, calm, tries = 200, 10, 3
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(10 * time.Millisecond), config: fmt.Sprintf(flowing, waiting, "tenant")})
	p90 := func(name string) time.Duration {
		var took []time.Duration
		for i := range calm {
			began := time.Now()
			if r := b.post("/v1/completions", completionBody(fmt.Sprint(name, i), 25), "x-team", "calm"); r.status != http.StatusOK {
				t.Fatalf("got status %d %s, want 200", r.status, r.body)
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		return took[calm*9/10-1]
	}
	ratio := 0.0
	for try := range tries { // other programs may delay the machine
		alone := p90(fmt.Sprint("alone", try))
		var ended atomic.Int64
		statuses := b.flood(waiting, fmt.Sprint("flood", try), &ended)
		b.until("the flood waits", func() bool { return b.metric("kvlane_waiting_requests") >= waiting*9/10 })
		before := ended.Load()
		beside := p90(fmt.Sprint("beside", try))
		got := ended.Load() - before
		ratio = float64(beside) / float64(alone)
		t.Logf("nine of ten requests took at most %s alone and %s (%.2f times) beside a flood, of which %d requests ended meanwhile", alone, beside, ratio, got)
		if got >= waiting {
			t.Errorf("got all %d requests of the flood ended before the %d of the other tenant, as in the order of arrival", got, calm)
		}
		if counts := statuses(); counts[200] != waiting {
			t.Errorf("got statuses %v for the flood, want 200", counts)
		}
		if ratio <= 1.3 {
			return
		}
	}
	t.Errorf("got %.2f times as long as alone for the other tenant's requests, want at most 1.3 times in one of %d tries", ratio, tries)
}

// A flood of connections is queued up to the bound and refused beyond it: the queue and the memory
// stay bounded, and all requests are answered. FLOOD is the number of connections.
func TestAFloodOfConnectionsIsBounded(t *testing.T) {
	n, _ := strconv.Atoi(os.Getenv("FLOOD"))
	if n == 0 {
		n = 500
	}
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(5 * time.Millisecond), config: fmt.Sprintf(flowing, queueMax, "none")})
	if r := b.post("/v1/completions", completionBody("first", 1)); r.status != http.StatusOK {
		t.Fatalf("got status %d %s, want 200", r.status, r.body)
	}
	transport, ok := b.client.Transport.(*http.Transport)
	if !ok {
		t.Fatal("the client has no transport of its own")
	}
	transport.MaxIdleConnsPerHost = n
	memory := b.metric("process_resident_memory_bytes")
	var ended atomic.Int64
	statuses := b.flood(n, "flood", &ended)
	most, peak := 0.0, 0.0
	for ended.Load() < int64(n) {
		most, peak = max(most, b.metric("kvlane_waiting_requests")), max(peak, b.metric("process_resident_memory_bytes"))
		time.Sleep(20 * time.Millisecond)
	}
	counts := statuses()
	t.Logf("%d connections: statuses %v, at most %v waited, %.0f MB before, %.0f MB at most", n, counts, most, memory/1e6, peak/1e6)
	if most > queueMax || counts[200]+counts[429] != n || counts[429] == 0 {
		t.Errorf("got %v waiting and statuses %v, want at most %d, and 200 or 429 for all", most, counts, queueMax)
	}
	if peak > 4*memory {
		t.Errorf("got %.0f MB, want at most four times the %.0f MB before", peak/1e6, memory/1e6)
	}
}

// Kvlane is replaced while requests wait: each is served, or answered 429 with Retry-After. The engine gets no more than
// it has places for.
func TestNoWaitingRequestIsLostWithKvlane(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(10 * time.Millisecond), config: fmt.Sprintf(flowing, queueMax, "tenant")})
	var ended atomic.Int64
	statuses := b.flood(30, "flood", &ended)
	b.until("requests wait", func() bool { return b.metric("kvlane_waiting_requests") == 22 })
	most, stop := 0, make(chan bool)
	go func() {
		for over := false; !over; {
			s := b.engines[0].Stats().Ranks[0]
			most = max(most, s.Running+s.Waiting)
			select {
			case <-stop:
				over = true
			case <-time.After(time.Millisecond):
			}
		}
		close(stop)
	}()
	b.stopKvlane(syscall.SIGTERM)
	b.startKvlane()
	counts := statuses()
	stop <- true
	<-stop
	t.Logf("statuses %v, at most %d in the engine", counts, most)
	if most > 8 {
		t.Errorf("got %d requests in the engine, want at most 8", most)
	}
	if counts[200]+counts[429] != 30 || counts[200] == 0 {
		t.Errorf("got statuses %v, want 30 times 200, or 429 with Retry-After", counts)
	}
	if r := b.post("/v1/completions", completionBody("after", 1)); r.status != http.StatusOK {
		t.Errorf("the new one: got status %d %s, want 200", r.status, r.body)
	}
}

// A full queue of one tenant makes room for another one. A client cannot be that other tenant by a header of its own: Envoy
// removes it, except behind a gateway (trust_ingress). A filter that has authenticated the client may set it.
func TestAClientDoesNotNameItsTenant(t *testing.T) {
	const waiting = 3
	for _, c := range []struct {
		name, trust string
		filter      bool
		headers     []string
		status      int
	}{
		{"not trusted", "", false, []string{"x-team", "calm"}, http.StatusTooManyRequests},
		{"trusted", ", trust_ingress: true", false, []string{"x-team", "calm"}, http.StatusOK},
		{"trusted, but twice", ", trust_ingress: true", false, []string{"x-team", "flood", "x-team", "calm"}, http.StatusOK},
		{"beside a filter", "", true, []string{"x-team", "calm", "x-user", "flood"}, http.StatusTooManyRequests},
		{"by a filter", "", true, []string{"x-team", "flood", "x-user", "calm"}, http.StatusOK},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, shape{
				engines: 1, ranks: 1, engine: slow(20 * time.Millisecond),
				config: fmt.Sprintf("flow: {max_requests: %d, timeout: 60s, fairness: tenant}\ntenants: {header: x-team%s}\n"+
					"routing: {policy: {limits: {max_active: 1}}}\n", waiting, c.trust),
				bootstrap: func(text string) string {
					if c.filter {
						text = beforeKvlane(t, text, strings.ReplaceAll(authFilter, "x-tenant", "x-team"))
					}
					return text
				},
			})
			running := b.hold(1, 150)
			answers := make(chan int, waiting)
			for i := range waiting {
				go func() {
					r, err := b.send("/v1/completions", completionBody(fmt.Sprint("flood", i), 1), "x-team", "flood", "x-user", "flood")
					if err != nil {
						r = &reply{}
					}
					answers <- r.status
				}()
			}
			b.until("the flood waits", func() bool { return b.metric("kvlane_waiting_requests") == waiting })
			r := b.post("/v1/completions", completionBody("calm", 1), c.headers...)
			statuses := map[int]int{}
			for range waiting {
				statuses[<-answers]++
			}
			shed := 0
			if c.status == http.StatusOK {
				shed = 1
			}
			if r.status != c.status || statuses[http.StatusOK] != waiting-shed || statuses[http.StatusTooManyRequests] != shed {
				t.Errorf("got %d and %v for the %d that waited, want %d and %d answered 429", r.status, statuses, waiting, c.status, shed)
			}
			if r := <-running; r.status != http.StatusOK {
				t.Errorf("got %d %s for the running request, want 200", r.status, r.body)
			}
		})
	}
}

// Requests that arrive before a pool has any worker wait for it, and are placed as its workers come: one alone is not given
// all of them. Without zero_workers they are answered 503.
func TestRequestsWaitForAPoolThatIsEmpty(t *testing.T) {
	const requests = 12
	for _, zero := range []string{"", ", zero_workers: 90s"} {
		b := newBed(t, shape{
			engines: 1, ranks: 1, engine: slow(20 * time.Millisecond), noCheck: true, // a list from a file has goroutines of its own
			config: fmt.Sprintf("flow: {max_requests: 40, timeout: 90s%s}\nrouting: {policy: {limits: {max_active: 2}}}\n", zero),
		})
		b.stopKvlane(syscall.SIGTERM)
		lines := []string{fmt.Sprintf("- {name: e0, address: %q, models: [demo]}\n", b.engines[0].Addr()), strings.Replace(b.startEngine(1), "  - {", "- {", 1)}
		workers := func(n int) { b.write("workers.yaml", strings.Join(lines[:n], "")+"[]\n"[min(3*n, 3):]) }
		workers(0)
		text := b.read("kvlane.yaml")
		b.write("kvlane.yaml", text[:strings.Index(text, "  static:")]+"  file: "+b.file("workers.yaml")+"\n"+text[strings.Index(text, "flow: {"):])
		b.startKvlane()
		if zero == "" {
			if r := b.post("/v1/completions", completionBody("alone", 1)); r.status != http.StatusServiceUnavailable {
				t.Errorf("got %d without zero_workers, want 503", r.status)
			}
			continue
		}
		var ended atomic.Int64
		statuses := b.flood(requests, "early", &ended)
		b.until("all wait", func() bool { return b.metric("kvlane_waiting_requests") == requests })
		workers(1)
		b.until("the first worker serves", func() bool { return ended.Load() >= 2 })
		if waiting := b.metric("kvlane_waiting_requests"); waiting == 0 {
			t.Error("got no request that waits for a second worker, want those beyond the first one's places")
		}
		workers(2)
		if counts := statuses(); counts[http.StatusOK] != requests {
			t.Errorf("got statuses %v, want %d times 200", counts, requests)
		}
		for i, e := range b.engines {
			if n := len(e.Stats().Requests); n == 0 || n == requests {
				t.Errorf("got %d of %d requests on worker %d, want a part", n, requests, i)
			}
		}
	}
}

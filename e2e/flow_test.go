package e2e

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
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

// One tenant floods. The other one's requests, sent one after the other, wait for the next of
// eight places only, not for the flood.
func TestATenantThatFloodsDelaysNoOther(t *testing.T) {
	const waiting = 200
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(10 * time.Millisecond), config: fmt.Sprintf(flowing, waiting, "tenant")})
	serve := func(name string) time.Duration {
		began := time.Now()
		for i := range 6 {
			if r := b.post("/v1/completions", completionBody(fmt.Sprint(name, i), 20), "x-team", "calm"); r.status != http.StatusOK {
				t.Fatalf("got status %d %s, want 200", r.status, r.body)
			}
		}
		return time.Since(began)
	}
	alone := serve("alone")
	var ended atomic.Int64
	statuses := b.flood(waiting, "flood", &ended)
	b.until("the flood waits", func() bool { return b.metric("kvlane_waiting_requests") >= waiting*9/10 })
	before := ended.Load()
	beside := serve("beside")
	got := ended.Load() - before
	t.Logf("six requests took %s alone and %s beside a flood, of which %d requests ended meanwhile", alone, beside, got)
	if got > waiting/2 {
		t.Errorf("got %d requests of the flood ended before the six of the other tenant, want at most %d: in the order of arrival it is all %d", got, waiting/2, waiting)
	}
	if counts := statuses(); counts[200] != waiting {
		t.Errorf("got statuses %v for the flood, want 200", counts)
	}
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

// Kvlane is replaced while requests wait: each is served, or answered 429 with Retry-After.
func TestNoWaitingRequestIsLostWithKvlane(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(10 * time.Millisecond), config: fmt.Sprintf(flowing, queueMax, "tenant")})
	var ended atomic.Int64
	statuses := b.flood(30, "flood", &ended)
	b.until("requests wait", func() bool { return b.metric("kvlane_waiting_requests") >= 20 })
	b.stopKvlane(syscall.SIGTERM)
	b.startKvlane()
	counts := statuses()
	t.Logf("statuses %v", counts)
	if counts[200]+counts[429] != 30 || counts[200] == 0 {
		t.Errorf("got statuses %v, want 30 times 200, or 429 with Retry-After", counts)
	}
	if r := b.post("/v1/completions", completionBody("after", 1)); r.status != http.StatusOK {
		t.Errorf("the new one: got status %d %s, want 200", r.status, r.body)
	}
}

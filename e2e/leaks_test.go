package e2e

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

var (
	goroutineBlock = regexp.MustCompile(`^(?:goroutine profile: .*\n)?(\d+) @`)
	goroutineFrame = regexp.MustCompile(`(?m)^#\t0x[0-9a-f]+\t(\S+?)\+0x`)
)

// profile asks Kvlane for a profile, again for some seconds: its port may have all the connections that it takes of this host.
func (b *bed) profile(name string) *http.Response {
	b.t.Helper()
	for tries := 1; ; tries++ {
		resp, err := http.Get("http://" + b.admin + "/debug/pprof/" + name)
		if err == nil {
			return resp
		}
		if tries == 20 {
			b.t.Fatal(err)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// goroutines counts Kvlane's goroutines by their start function.
func (b *bed) goroutines() map[string]int {
	b.t.Helper()
	resp := b.profile("goroutine?debug=1")
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	kinds := map[string]int{}
	for block := range strings.SplitSeq(string(text), "\n\n") {
		head := goroutineBlock.FindStringSubmatch(block)
		frames := goroutineFrame.FindAllStringSubmatch(block, -1)
		if head == nil || len(frames) == 0 {
			continue
		}
		n, err := strconv.Atoi(head[1])
		if err != nil {
			b.t.Fatal(err)
		}
		at := len(frames) - 1
		for at > 0 && strings.HasPrefix(frames[at][1], "sync.") { // WaitGroup.Go
			at--
		}
		kinds[frames[at][1]] += n
	}
	if len(kinds) < 5 {
		b.t.Fatalf("not understood: %.500s", text)
	}
	return kinds
}

// perConnection are the goroutines of connections that are kept open on purpose, with the
// number that may be added to the initial ones: Envoy's to Kvlane (one for each of its
// threads, and one for health checks) with its subscription to the workers and its access
// logs (which have their own goroutines if 32 streams were active when they started),
// Kvlane's to workers (health checks, and lists of models when a request names an unknown
// one), and that of this scrape.
var perConnection = map[string]int{
	"google.golang.org/grpc.(*Server).serveStreams.func2.1":                 5,
	"google.golang.org/grpc.(*Server).handleRawConn.func1":                  4,
	"google.golang.org/grpc/internal/transport.(*http2Server).keepalive":    4,
	"google.golang.org/grpc/internal/transport.NewServerTransport.func3":    4,
	"github.com/kvlane/kvlane/envoy.(*XDS).StreamAggregatedResources.func1": 1,
	"main.runServe.func1":                   1, // the watch of the configuration, which may begin after the first count
	"net/http.(*persistConn).readLoop":      4,
	"net/http.(*persistConn).writeLoop":     4,
	"net/http.(*conn).serve":                2,
	"net/http.(*connReader).backgroundRead": 2,
}

// toWorkers are the connections to engines over which Kvlane compares tokens. The first count may come before these and those of health
// checks, one to each engine, are open; without them quiet would wait for a minute, until those that idle are closed.
const toWorkers = 2

// quiet checks for leaks: nothing is reserved or loaded, no stream is open, no kind has
// more goroutines than at the start, and the engines got only bodies that clients sent.
// Each condition may take a bounded time.
func (b *bed) quiet() {
	b.t.Helper()
	b.onlySent()
	if b.kvlane == nil {
		return
	}
	b.client.CloseIdleConnections()
	http.DefaultClient.CloseIdleConnections()
	leaks := map[string]string{}
	for _, m := range []string{"kvlane_reservations", "kvlane_active_requests", "kvlane_queued_tokens", "kvlane_resident_tokens",
		"kvlane_waiting_requests", "kvlane_extproc_streams", "kvlane_double_releases_total"} {
		leaks[m] = "not asked for"
	}
	for kind := range b.goroutines() {
		leaks[kind] = "not compared"
	}
	for deadline := time.Now().Add(2 * time.Minute); len(leaks) > 0 && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		now := b.goroutines()
		for name := range leaks {
			delete(leaks, name)
			if strings.HasPrefix(name, "kvlane_") {
				if v := b.metric(name); v != 0 {
					leaks[name] = fmt.Sprint(v)
				}
				continue
			}
			first := b.idle[name]
			if strings.HasPrefix(name, "net/http.(*persistConn).") {
				first = max(first, toWorkers+len(b.engines))
			}
			if n, most := now[name], first+perConnection[name]+b.pools*min(1, perConnection[name]); n > most {
				leaks[name] = fmt.Sprintf("%d goroutines, %d at first", n, b.idle[name])
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(leaks)) {
		b.t.Errorf("leaked: %s: %s", name, leaks[name])
	}
}

// remember records a body, so that quiet recognises it at the engine.
func (b *bed) remember(body []byte) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent[sha(body)] = true
	return body
}

// onlySent checks that the engines got only bodies that clients sent, byte for byte, or that
// ended early.
func (b *bed) onlySent() {
	b.t.Helper()
	if b.shape.otherwise {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, e := range b.engines {
		for _, r := range e.Stats().Requests {
			if aborted := strings.HasPrefix(r.Error, "body: "); !b.sent[r.BodySHA256] && !aborted {
				b.t.Errorf("engine e%d saw a body of %d bytes for %s that no client sent (request %s, status %d, %s)", i, r.BodyBytes, r.Path, r.RequestID, r.Status, r.Error)
			}
		}
	}
}

// sound checks after a fault that the whole request path works: it waits until requests are
// served, sends small and large bodies, compares them byte for byte at their engines, and
// checks for leaks.
func (b *bed) sound() {
	b.t.Helper()
	odd := []byte("{ \"b\":1e5,\n\t\"messages\" : [ {\"content\":\"h\\u00e9 \\ud83d\\ude42 </b>\" , \"role\":\"user\"} ],\"a\":1.0,\"model\":\"demo\",\"max_tokens\":1 } \n")
	b.until("requests are served after the fault", func() bool {
		r, err := b.send("/v1/chat/completions", odd)
		return err == nil && r.status == http.StatusOK && r.target != ""
	})
	for _, body := range [][]byte{odd, chatBody(message{"user", prose("after a fault", 20_000)})} {
		r := b.post("/v1/chat/completions", body)
		if r.status != http.StatusOK {
			b.t.Errorf("after the fault: status %d: %.300s", r.status, r.body)
			continue
		}
		b.intact(r, body)
	}
	b.quiet()
}

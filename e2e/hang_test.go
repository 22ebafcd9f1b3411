package e2e

import (
	"fmt"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// A Kvlane that is stopped, not gone: its socket accepts connections but nothing answers.
// Envoy waits for it up to envoy.stall_timeout, and not at all once its health checks have
// failed. With a long message timeout every client would wait until the stop ends.
func TestAKvlaneThatHangs(t *testing.T) {
	const (
		stall   = 2 * time.Second // the default
		stop    = 5 * stall
		bound   = 4 * stall // on a busy machine an unimpeded request takes 2 s
		clients = 8
	)
	for name, c := range map[string]struct {
		shape shape
		fails bool // Envoy cannot continue without a Kvlane that holds the body
	}{
		"standalone":  {},
		"sidecar":     {shape: shape{envoy: ", first_token: true, connection_age: 20s, alternates: true"}},
		"full duplex": {shape: shape{envoy: ", request_body: FULL_DUPLEX_STREAMED, response_body: FULL_DUPLEX_STREAMED"}, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			c.shape.stall = stall.String()
			c.shape.noCheck = true // Kvlane does not learn how requests end that it did not get
			b := newBed(t, c.shape)
			b.chat(message{"user", "before"})
			var (
				mu      sync.Mutex
				longest time.Duration
				bad     = map[string]int{}
				good    int
				done    = make(chan struct{})
				wg      sync.WaitGroup
			)
			for i := range clients {
				wg.Go(func() {
					for n := 0; ; n++ {
						select {
						case <-done:
							return
						default:
						}
						began := time.Now()
						r, err := b.send("/v1/chat/completions", chatBody(message{"user", fmt.Sprint("client ", i, " request ", n)}))
						mu.Lock()
						longest = max(longest, time.Since(began))
						switch {
						case err != nil:
							bad[err.Error()]++
						case r.status != http.StatusOK:
							bad[fmt.Sprint(r.status)]++
						default:
							good++
						}
						mu.Unlock()
						time.Sleep(5 * time.Millisecond)
					}
				})
			}
			count := func() int {
				mu.Lock()
				defer mu.Unlock()
				return good + len(bad)
			}
			b.until("the clients are served", func() bool { return count() > 10*clients })
			if err := b.kvlane.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			time.Sleep(stop / 2)
			half := count()
			time.Sleep(stop / 2)
			during := count() - half
			if err := b.kvlane.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			b.until("Kvlane is asked again", func() bool {
				r, err := b.send("/v1/chat/completions", chatBody(message{"user", "after"}))
				return err == nil && r.status == http.StatusOK && r.target != ""
			})
			close(done)
			wg.Wait()
			t.Logf("longest request %v, %d answered, %d of them in the second half of the stop, failures %v", longest, good, during, bad)
			if longest > bound {
				t.Errorf("got a request of %v, want none above %v", longest, bound)
			}
			if len(bad) > 0 != c.fails {
				t.Errorf("got failures %v, want some: %v", bad, c.fails)
			}
			if !c.fails && during < 4*clients {
				t.Errorf("got %d answers while Kvlane was known to hang, want at least %d", during, 4*clients)
			}
		})
	}
}

// A request for which Kvlane requested more time is not bound by the stall timeout: the
// HTTP/2 keepalive ends its wait.
func TestAKvlaneThatHangsDuringALeg(t *testing.T) {
	const leg = time.Minute
	b := newPools(t, pair{connector: "nixl", worker: noSettings, shape: shape{stall: "2s", noCheck: true}}, "")
	b.fault(enginesim.Faults{AnswerDelayMS: int(leg.Milliseconds())}, 0, 1)
	answered := make(chan *reply, 1)
	began := time.Now()
	go func() { answered <- b.long(false) }()
	b.until("more time is asked for", func() bool { return b.envoyStat("ext_proc.override_message_timeout_received") > 0 })
	if err := b.kvlane.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r := <-answered
	if waited := time.Since(began); r.status != http.StatusOK || waited > leg/2 {
		t.Errorf("got status %d after %v, want 200 well before the leg of %v ends", r.status, waited, leg)
	}
	if err := b.kvlane.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

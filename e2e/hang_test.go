package e2e

import (
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

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

package e2e

import (
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// A request for which Kvlane requested more time is not bound by the stall timeout: the
// HTTP/2 keepalive ends its wait, after the stall timeout.
func TestAKvlaneThatHangsDuringALeg(t *testing.T) {
	const leg = time.Minute
	b := newPools(t, pair{connector: "nixl", worker: noSettings, shape: shape{stall: stallTimeout.String(), noCheck: true}}, "")
	b.fault(enginesim.Faults{AnswerDelayMS: int(leg.Milliseconds())}, 0, 1)
	answered := make(chan *reply, 1)
	go func() { answered <- b.long(false) }()
	b.until("more time is asked for", func() bool { return b.envoyStat("ext_proc.override_message_timeout_received") > 0 })
	began := time.Now()
	if err := b.kvlane.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r := <-answered
	waited, most := time.Since(began), stallTimeout+stallSlack
	if raceEnabled {
		most = stallTimeout + slack
	}
	if t.Logf("answered after %v", waited); r.status != http.StatusOK || waited > most {
		t.Errorf("got status %d after %v, want 200 after at most %v", r.status, waited, most)
	}
	if err := b.kvlane.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

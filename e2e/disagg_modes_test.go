package e2e

import (
	"bufio"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// Every protocol with full-duplex bodies, which Kvlane sends on itself, as with gateways.
func TestEveryConnectorInFullDuplex(t *testing.T) {
	for _, p := range pairs() {
		t.Run(p.connector, func(t *testing.T) {
			t.Parallel()
			p.shape.envoy = ", request_body: FULL_DUPLEX_STREAMED, response_body: FULL_DUPLEX_STREAMED"
			b := newPools(t, p, "")
			alone := whole(t, p.engine)
			for _, stream := range []bool{false, true} {
				path := p.paths[0]
				body := bodyFor(path, fmt.Sprint("duplex", stream), 150, stream)
				r := b.post(path, body)
				if want := askDirectly(t, alone, path, body); r.status != http.StatusOK || want == "" || textOf(r.body) != want {
					t.Fatalf("stream=%v: status %d, text %q, one engine says %q", stream, r.status, textOf(r.body), want)
				}
				b.splitWell(r, &p)
			}
			b.until("the legs are counted", func() bool { return b.legs("ok") == 2 })
			if n := b.metric("kvlane_extproc_failures_total"); n != 0 {
				t.Errorf("%v failures of the protocol", n)
			}
		})
	}
}

// replaced returns an edit of a bootstrap by pairs of old and new strings; all old ones
// must be in it.
func replaced(t *testing.T, pairs ...string) func(text string) string {
	return func(text string) string {
		for i := 0; i < len(pairs); i += 2 {
			if !strings.Contains(text, pairs[i]) {
				t.Fatalf("the bootstrap has no %q", pairs[i])
			}
			text = strings.ReplaceAll(text, pairs[i], pairs[i+1])
		}
		return text
	}
}

// A prefill leg that takes longer than Envoy waits for a silent Kvlane. Kvlane requests
// more time, in each mode in which it waits for a body; FULL_DUPLEX_STREAMED has no timer.
// If the gateway allows no more time, Envoy routes the request without Kvlane.
func TestALegThatIsLongerThanTheMessageTimeout(t *testing.T) {
	const (
		timeout = 2 * time.Second // envoy.stall_timeout; Kvlane requests more time after a quarter of it
		leg     = 2 * timeout
		body    = "request_body_mode: BUFFERED"
	)
	for name, c := range map[string]struct {
		changes  []string
		envoy    string
		extended bool // Kvlane was allowed more time
		cut      bool // Envoy did not wait
	}{
		"BUFFERED":             {extended: true},
		"BUFFERED_PARTIAL":     {changes: []string{body, "request_body_mode: BUFFERED_PARTIAL"}, extended: true},
		"STREAMED":             {changes: []string{body, "request_body_mode: STREAMED", "failure_mode_allow: true   ", "send_body_without_waiting_for_header_response: true\n              failure_mode_allow: true   "}, extended: true},
		"FULL_DUPLEX_STREAMED": {envoy: ", request_body: FULL_DUPLEX_STREAMED"},
		"no more time allowed": {changes: []string{" max_message_timeout: 300s", " max_message_timeout: 0s"}, cut: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newPools(t, pair{connector: "nixl", worker: noSettings, shape: shape{stall: timeout.String(), envoy: c.envoy, bootstrap: replaced(t, c.changes...),
				engine: func(_ int, o *enginesim.Options) { o.KVLease = 3 * time.Second }}}, "")
			const asked, timedOut = "ext_proc.override_message_timeout_received", "ext_proc.message_timeouts"
			var r *reply
			for range 5 {
				late := b.envoyStat(timedOut)
				b.fault(enginesim.Faults{AnswerDelayMS: int(leg.Milliseconds())})
				r = b.long(false)
				b.fault(enginesim.Faults{})
				if r.status != http.StatusOK {
					t.Fatalf("status %d: %s", r.status, r.body)
				}
				if b.envoyStat(timedOut) == late || c.cut {
					break
				}
				// A machine so busy that Kvlane did not request more time soon enough.
			}
			s := b.legsOf(r.header.Get("X-Request-Id"))
			late := b.envoyStat(timedOut) > 0
			switch {
			case c.cut && (!late || s.decode != nil && s.decode.RemoteTokens != 0):
				t.Errorf("Envoy waited: %+v", s.decode)
			case !c.cut:
				b.splitWell(r, &pair{})
			}
			if n := b.envoyStat(asked); n > 0 != c.extended {
				t.Errorf("Envoy was asked for more time %d times, and gave it", n)
			}
			b.over()
		})
	}
}

// envoyStat sums Envoy's counters whose names have this suffix.
func (b *bed) envoyStat(end string) (sum int) {
	b.t.Helper()
	resp, err := http.Get("http://" + b.envoyAdmin + "/stats?usedonly")
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		if n, err := strconv.Atoi(value); err == nil && strings.HasSuffix(name, end) {
			sum += n
		}
	}
	return sum
}

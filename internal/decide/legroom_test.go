package decide

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
)

// Answers of prefill legs share a quarter of limits.bodies_in_flight.bytes. A leg whose answer has
// no room fails, not the request, and its worker is not blamed; afterwards there is room again.
func TestAnswersOfLegsAreBounded(t *testing.T) {
	p := newPoolsWith(t, "nixl", "limits: {bodies_in_flight: {bytes: 16KiB}}\n")
	padded := `{"pad":"` + strings.Repeat("x", 4<<10) + `",` + nixlAnswer[1:]
	begun, finish := make(chan bool), make(chan bool)
	p.both(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, padded[:len(padded)-1])
		w.(http.Flusher).Flush()
		begun <- true
		<-finish
		_, _ = io.WriteString(w, padded[len(padded)-1:])
	})
	split := func(id string, want bool) {
		t.Helper()
		d := p.ask(t.Context(), id)
		if d.Reject != nil || d.Endpoint != "10.0.0.9:1" || (d.Body != nil) != want {
			t.Errorf("%s: got %+v, want it split: %v", id, d, want)
		}
		end(&d, 200)
	}
	first := make(chan bool)
	go func() {
		defer close(first)
		split("alone", true)
	}()
	<-begun
	p.both(answer(nixlAnswer))
	for p.Decider.legs.Answers.Held() < 8<<10 { // the first leg reads
		select {
		case <-t.Context().Done():
			t.Fatal("the first leg was not read")
		case <-time.After(time.Millisecond):
		}
	}
	split("no room", false)
	if e := p.decisions.Find("no room"); e.Degraded != degradedPrefill || !strings.Contains(strings.Join(e.PrefillNotes, " "), "no room") {
		t.Errorf("degraded %q, notes %q", e.Degraded, e.PrefillNotes)
	}
	if failures, _ := p.health(); failures != 0 {
		t.Errorf("got %d failures, want the workers not blamed", failures)
	}
	c := *p.cfg
	c.Limits.Bodies.Bytes = config.Bytes(1 << 20)
	if err := p.Reload(&c); err != nil {
		t.Fatal(err)
	}
	split("more room", true)
	close(finish)
	<-first
	if held := p.Decider.legs.Answers.Held(); held != 0 {
		t.Errorf("%d bytes are held at the end", held)
	}
}

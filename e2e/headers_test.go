package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Near Envoy's limit of 100 headers a request is sent to the picked worker, with its rank,
// or refused: it is never answered 500, and the engine never chooses another rank than the
// booked one.
func TestManyHeaders(t *testing.T) {
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		t.Run(mode, func(t *testing.T) {
			b := newBed(t, shape{engines: 1, ranks: 2, envoy: ", request_body: " + mode})
			served, refused := 0, 0
			for n := 80; n <= 100; n++ {
				h := http.Header{}
				for i := range n {
					h.Set(fmt.Sprint("X-H", i), "v")
				}
				b.remember(completionBody(fmt.Sprint(mode, n), 1))
				req, err := http.NewRequest(http.MethodPost, "http://"+b.ingress+"/v1/completions", strings.NewReader(string(completionBody(fmt.Sprint(mode, n), 1))))
				if err != nil {
					t.Fatal(err)
				}
				req.Header = h
				r, err := b.do(req)
				if err != nil { // Envoy refuses it itself and closes the connection
					if n < 95 {
						t.Errorf("%d headers: %v", n, err)
					}
					continue
				}
				_, rec, ok := b.seen(r.header.Get("X-Request-Id"))
				switch r.status {
				case http.StatusOK:
					served++
					if got := fmt.Sprintf("e0/%d", rec.Rank); !ok || got != r.target || !rec.Pinned {
						t.Errorf("%d headers: served on %s, pinned %v, want %s", n, got, rec.Pinned, r.target)
					}
				case http.StatusRequestHeaderFieldsTooLarge:
					refused++
					if !strings.Contains(string(r.body), "headers") && n < 95 {
						t.Errorf("%d headers: refused with %q, want a message about headers", n, r.body)
					}
				default:
					t.Errorf("%d headers: status %d: %s", n, r.status, r.body)
				}
			}
			if served < 8 || refused == 0 {
				t.Errorf("%d served, %d refused, want some of each", served, refused)
			}
			t.Logf("%d served, %d refused", served, refused)
			b.until("nothing to be booked", func() bool { return b.metric("kvlane_active_requests") == 0 })
		})
	}
}

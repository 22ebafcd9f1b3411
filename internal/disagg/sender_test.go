package disagg

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOutcomesOfALeg(t *testing.T) {
	gone := httptest.NewServer(nil)
	gone.Close()
	for name, c := range map[string]struct {
		serve   http.HandlerFunc // nil: nothing listens
		timeout time.Duration
		want    Outcome
		status  int
	}{
		"answers":      {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") }, time.Minute, OK, 0},
		"refuses":      {nil, time.Minute, Unreachable, 0},
		"client error": {status(400), time.Minute, Refused, 400},
		"busy":         {status(429), time.Minute, Refused, 429},
		"slow client":  {status(408), time.Minute, Failed, 408},
		"server error": {status(500), time.Minute, Failed, 500},
		"unavailable":  {status(503), time.Minute, Unreachable, 503},
		"gateway":      {status(504), time.Minute, Unreachable, 504},
		"redirect":     {status(307), time.Minute, Failed, 307},
		"dies": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "{")
			panic(http.ErrAbortHandler)
		}, time.Minute, Died, 0},
		"long head": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Long", strings.Repeat("x", 2*maxHead))
			_, _ = io.WriteString(w, "{}")
		}, time.Minute, Unreachable, 0},
		"dies before a byte": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, time.Minute, Died, 0},
		"says nothing":       {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, 30 * time.Millisecond, TimedOut, 0},
		"is cancelled":       {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, 0, Cancelled, 0},
	} {
		t.Run(name, func(t *testing.T) {
			address := gone.Listener.Addr().String()
			if c.serve != nil {
				srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.Copy(io.Discard, r.Body)
					c.serve(w, r)
				}))
				defer srv.Close()
				address = srv.Listener.Addr().String()
			}
			s := NewSender("", "")
			defer s.Close()
			ctx, cancel := context.WithCancel(t.Context())
			if c.timeout > 0 {
				ctx, cancel = context.WithTimeout(t.Context(), c.timeout)
			} else {
				time.AfterFunc(20*time.Millisecond, cancel)
			}
			defer cancel()
			_, err := s.Send(ctx, &sending{address, "/x", http.Header{}, []byte("{}")}, &charge{room: new(Room)}, nil)
			if c.want == OK {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			f, ok := errors.AsType[*FailureError](err)
			if !ok || f.Outcome != c.want || f.Status != c.status {
				t.Errorf("got %v, want %s with status %d", err, c.want, c.status)
			}
		})
	}
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(code)
	}
}

// A listener gets the pick in a header, and all legs share its connections.
func TestALegThroughAListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, `{"pick":"`+r.Header.Get("X-Pick")+`","host":"`+r.Host+`","path":"`+r.URL.RequestURI()+`","agent":"`+r.UserAgent()+`"}`)
	}))
	_ = srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	defer srv.Close()
	s := NewSender("unix:"+path, "x-pick")
	defer s.Close()
	x := &Exchange{ID: "id"}
	got, err := s.Send(t.Context(), &sending{"10.0.0.1:80", "/v1/x?y=1", x.LegHeader(&Leg{}, func(func(string, string)) {}), []byte("{}")}, &charge{room: new(Room)}, nil)
	if want := `{"pick":"10.0.0.1:80","host":"10.0.0.1:80","path":"/v1/x?y=1","agent":""}`; err != nil || string(got) != want {
		t.Errorf("%s %v", got, err)
	}
	page, err := s.Get(t.Context(), "10.0.0.1:80", "/info", true)
	if err != nil || !strings.Contains(string(page), `"pick":"10.0.0.1:80"`) {
		t.Errorf("%s %v", page, err)
	}
	if _, err := s.Get(t.Context(), "127.0.0.1:1", "/info", false); err == nil {
		t.Error("got a page of a separate port through the listener")
	}
}

// Headers that steer, frame or are hop-by-hop are left out; the rank and the id are set by
// Kvlane.
func TestHeadersOfALeg(t *testing.T) {
	x := &Exchange{ID: "id-1", Prefill: Side{Rank: 3, Ranks: 4, ByHeader: true}}
	client := [][2]string{{":path", "/x"}, {"host", "h"}, {"content-length", "9"}, {"authorization", "Bearer t"}, {"x-data-parallel-rank", "7"},
		{"x-gateway-destination-endpoint", "1.1.1.1:1"}, {"x-kvlane-endpoint", "1.1.1.1:1"}, {"x-prefiller-host-port", "h"}, {"x-envoy-y", "1"},
		{"x-request-id", "other"}, {"accept-encoding", "gzip"}, {"traceparent", "00-1"}, {"x-multi", "a"}, {"x-multi", "b"}, {"connection", "close"}}
	h := x.LegHeader(&Leg{}, func(yield func(name, value string)) {
		for _, c := range client {
			yield(c[0], c[1])
		}
	})
	want := http.Header{"Authorization": {"Bearer t"}, "Traceparent": {"00-1"}, "X-Multi": {"a", "b"}, "Content-Type": {"application/json"},
		"X-Request-Id": {"id-1"}, "X-Data-Parallel-Rank": {"3"}, "User-Agent": {}}
	if len(h) != len(want) {
		t.Errorf("headers %v", h)
	}
	for name, values := range want {
		if strings.Join(h[name], ",") != strings.Join(values, ",") {
			t.Errorf("%s: got %v, want %v", name, h[name], values)
		}
	}
	x.Prefill.Rank = NoRank
	h = x.LegHeader(&Leg{Headers: []Header{{"x-request-id", "theirs"}}}, func(func(string, string)) {})
	if h.Get("X-Request-Id") != "theirs" || h.Get("X-Data-Parallel-Rank") != "" {
		t.Errorf("headers %v", h)
	}
}

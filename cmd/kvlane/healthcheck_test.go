package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

func TestHealthcheck(t *testing.T) {
	var asked atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/readyz":
			fmt.Fprint(w, "ok\nwarning: of a worker\n")
		case "/empty":
		case "/soon":
			if asked.Add(1) < 3 {
				http.Error(w, "not yet", http.StatusServiceUnavailable)
			}
		case "/hangs":
			<-r.Context().Done()
		default:
			http.Error(w, "workers are being\x1b checked\nsecond line", http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		srv.Close()
	})
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	for _, c := range []struct {
		args     []string
		code     int
		out, err string
	}{
		{[]string{"--url", srv.URL + "/readyz"}, 0, "ok\n", ""},
		{[]string{"--url", srv.URL + "/empty"}, 0, "200 OK\n", ""},
		{[]string{"--url", srv.URL + "/other"}, 1, "", "answers 503: workers are being"},
		{[]string{"--url", srv.URL + "/hangs", "--timeout", "20ms"}, 1, "", "deadline exceeded"},
		{[]string{"--url", gone.URL}, 1, "", "connection refused"},
		{[]string{"--url", "http://127.0.0.1:x/"}, 2, "", "invalid port"},
		{[]string{"--url", srv.URL + "/soon", "--wait", "1m"}, 0, "200 OK\n", ""},
		{[]string{"--url", srv.URL + "/other", "--wait", "1ms"}, 1, "", "answers 503"},
		{[]string{"--url", "http://127.0.0.1:x/", "--wait", "1m"}, 2, "", "invalid port"},
		{[]string{"now"}, 2, "", "unexpected argument"},
	} {
		code, out, errs := kvlane("", append([]string{"healthcheck"}, c.args...)...)
		if code != c.code || out != c.out || (errs == "") != (c.err == "") || !strings.Contains(errs, c.err) {
			t.Errorf("%q: got code %d, %q, %q, want code %d, %q, %q", c.args, code, out, errs, c.code, c.out, c.err)
		}
		if strings.Count(errs, "\n") > 1 || strings.Contains(errs, "\x1b") {
			t.Errorf("%q: got %q, want one printable line", c.args, errs)
		}
	}
}

package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
)

func TestWhoMayUseTheAdminPort(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ok := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	for name, c := range map[string]struct {
		file, from, header string
		want               int
	}{
		"the same machine":          {"", "127.0.0.1:1", "", 200},
		"the same machine, IPv6":    {"", "[::1]:1", "", 200},
		"Istio's sidecar":           {"", "127.0.0.6:1", "", 403},
		"another machine":           {"", "10.0.0.1:1", "", 403},
		"no address":                {"", "", "", 403},
		"the token":                 {file, "10.0.0.1:1", "Bearer secret", 200},
		"another token":             {file, "10.0.0.1:1", "Bearer secre", 401},
		"no token":                  {file, "127.0.0.1:1", "", 401},
		"another scheme":            {file, "127.0.0.1:1", "Basic secret", 401},
		"no file":                   {file + "x", "127.0.0.1:1", "Bearer ", 401},
		"an empty file is no token": {empty, "127.0.0.1:1", "Bearer ", 401},
	} {
		r := httptest.NewRequest(http.MethodGet, "/debug/pprof/", nil)
		r.RemoteAddr = c.from
		if c.header != "" {
			r.Header.Set("Authorization", c.header)
		}
		w := httptest.NewRecorder()
		guarded(c.file, ok).ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("%s: got status %d, want %d", name, w.Code, c.want)
		}
	}
}

// A proxy on the same machine passes on requests of others; with the token they are served.
func TestForwardedRequestsNeedTheToken(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	ok := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	for header, want := range map[string]int{"forwarded": 403, "x-forwarded-for": 403, "X-Forwarded-Proto": 403, "X-Forward": 200, "Accept": 200} {
		for file, want := range map[string]int{"": want, file: 200} {
			r := httptest.NewRequest(http.MethodPost, "/debug/record", nil)
			r.RemoteAddr = "127.0.0.1:1"
			r.Header.Set(header, "x")
			r.Header.Set("Authorization", "Bearer secret")
			w := httptest.NewRecorder()
			guarded(file, ok).ServeHTTP(w, r)
			if w.Code != want {
				t.Errorf("header %s, token file %q: got status %d, want %d", header, file, w.Code, want)
			}
		}
	}
}

// One profile is made at a time, and none takes longer than its bound.
func TestProfilesAreBounded(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(profiles())
	defer s.Close()
	get := func(path string) int {
		t.Helper()
		resp, err := s.Client().Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	for path, want := range map[string]int{"/debug/pprof/": 200, "/debug/pprof/goroutine": 200, "/debug/pprof/trace?seconds=61": 400, "/debug/pprof/heap?seconds=1e9": 400} {
		if got := get(path); got != want {
			t.Errorf("%s: got status %d, want %d", path, got, want)
		}
	}
	first := make(chan int)
	go func() {
		got := http.StatusTooManyRequests // while the other one is made
		for got == http.StatusTooManyRequests {
			got = get("/debug/pprof/trace?seconds=3")
		}
		first <- got
	}()
	second := 0
	for second != http.StatusTooManyRequests {
		select {
		case got := <-first:
			t.Fatalf("the first ended with %d before another was refused", got)
		default:
			second = get("/debug/pprof/goroutine")
		}
	}
	if got := <-first; got != http.StatusOK {
		t.Errorf("the first: got status %d, want 200", got)
	}
}

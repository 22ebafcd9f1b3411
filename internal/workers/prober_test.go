package workers

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// listener serves h and counts its connections.
func listener(t *testing.T, h http.HandlerFunc) (address string, s *httptest.Server, connections *atomic.Int32) {
	t.Helper()
	connections = new(atomic.Int32)
	s = httptest.NewUnstartedServer(h)
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String(), s, connections
}

func newProber(t *testing.T) *prober {
	t.Helper()
	p := &prober{timeout: 10 * time.Second}
	t.Cleanup(p.close)
	return p
}

func TestAProberKeepsItsConnection(t *testing.T) {
	long := "vllm:num_requests_running 3\n" + strings.Repeat("# filler\n", 1<<14)
	address, server, connections := listener(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
			w.WriteHeader(http.StatusNoContent)
		case "/metrics":
			_, _ = w.Write([]byte(long)) // no Content-Length: chunked
		}
	})
	p := newProber(t)
	for i := range 10 {
		if err := p.health(t.Context(), address); err != nil {
			t.Fatal(err)
		}
		loads, err := p.loads(t.Context(), address, "vllm")
		if err != nil || len(loads) != 1 || loads[0].Running != 3 {
			t.Fatalf("%v %v", loads, err)
		}
		if i == 4 {
			server.CloseClientConnections()
		}
	}
	if n := connections.Load(); n != 2 {
		t.Errorf("%d connections: want one, and one after the server closed it", n)
	}
}

func TestAProberAsksWhereTheWorkerIs(t *testing.T) {
	first, _, _ := listener(t, func(http.ResponseWriter, *http.Request) {})
	second, _, connections := listener(t, func(http.ResponseWriter, *http.Request) {})
	p := newProber(t)
	for _, address := range []string{first, second} {
		if err := p.health(t.Context(), address); err != nil {
			t.Fatal(err)
		}
	}
	if connections.Load() != 1 {
		t.Error("the worker moved and was not asked at its new address")
	}
}

func TestWhatAProberIsTold(t *testing.T) {
	address, _, _ := listener(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			_, _ = w.Write([]byte(strings.Repeat("x", 1<<10)))
			return
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte(strings.Repeat("dead", 1<<16))) // more than is read to keep the connection
	})
	p := newProber(t)
	for range 2 {
		if err := p.health(t.Context(), address); err == nil || !strings.Contains(err.Error(), "status 503") {
			t.Errorf("%v", err)
		}
	}
	if loads, err := p.loads(t.Context(), address, "vllm"); err != nil || len(loads) != 0 {
		t.Errorf("%v %v", loads, err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := p.health(t.Context(), l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("nobody listens: %v", err)
	}
}

// A worker cannot fill the memory by the head of an answer; a long body has its own bound.
func TestTheHeadOfAnAnswerIsBounded(t *testing.T) {
	var size atomic.Int64
	address, _, connections := listener(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X", strings.Repeat("x", int(size.Load())))
		if r.URL.Path == "/metrics" {
			_, _ = w.Write([]byte(strings.Repeat("# filler\n", maxHead/4) + "vllm:num_requests_running 3\n"))
		}
	})
	p, c := newProber(t), newClient(10*time.Second)
	defer c.CloseIdleConnections()
	for range 3 {
		size.Store(maxHead / 2)
		if loads, err := p.loads(t.Context(), address, "vllm"); err != nil || len(loads) != 1 {
			t.Errorf("a head of %d bytes: got %v, %v, want one load", size.Load(), loads, err)
		}
	}
	if n := connections.Load(); n != 1 {
		t.Errorf("got %d connections, want 1", n)
	}
	size.Store(2 * maxHead)
	if err := p.health(t.Context(), address); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a head of %d bytes: got %v, want %v", size.Load(), err, io.ErrUnexpectedEOF)
	}
	if resp, err := c.Get("http://" + address); err == nil {
		_ = resp.Body.Close()
		t.Errorf("a head of %d bytes: got an answer, want an error", size.Load())
	}
}

// A silent worker is given up after the timeout, or immediately if the context ends.
func TestAProberDoesNotWaitForever(t *testing.T) {
	release := make(chan struct{})
	var asked atomic.Int32
	address, _, _ := listener(t, func(_ http.ResponseWriter, r *http.Request) {
		if asked.Add(1); r.URL.Path == "/metrics" {
			<-release
		}
	})
	defer close(release)
	p := newProber(t)
	if err := p.health(t.Context(), address); err != nil {
		t.Fatal(err)
	}
	p.timeout = 20 * time.Millisecond
	if _, err := p.loads(t.Context(), address, "vllm"); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if asked.Load() > 2 {
		t.Error("a question that was not answered in time is not asked again")
	}
	p.timeout = time.Hour
	ctx, stop := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, stop)
	if _, err := p.loads(ctx, address, "vllm"); err == nil {
		t.Error("the context ended and the worker did not answer")
	}
}

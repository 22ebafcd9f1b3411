package envoy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
)

// replica answers every request itself, with its number and its count of streams that
// observe the answer of the same request.
type replica struct {
	extprocv3.UnimplementedExternalProcessorServer
	number  int
	address string
	server  *grpc.Server

	hold    atomic.Bool   // requests get no answer
	holding chan struct{} // gets an element for each of them

	mu       sync.Mutex
	decided  map[string]bool // ids of requests
	observed map[string]bool
}

func startReplica(t *testing.T, number int) *replica {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{number: number, address: l.Addr().String(), server: grpc.NewServer(), holding: make(chan struct{}, 16), decided: map[string]bool{}, observed: map[string]bool{}}
	x := NewXDS()
	ctx, cancel := context.WithCancel(t.Context())
	x.Register(ctx, r.server)
	if err := x.Set(Endpoints{Serve: []string{"127.0.0.1:1"}}); err != nil {
		t.Fatal(err)
	}
	probe := health.NewServer()
	probe.SetServingStatus("readiness", grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(r.server, probe)
	extprocv3.RegisterExternalProcessorServer(r.server, r)
	done := make(chan error, 1)
	go func() { done <- r.server.Serve(l) }()
	t.Cleanup(func() {
		cancel()
		r.server.Stop()
		if err := <-done; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
	return r
}

func (r *replica) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	var id string
	if md, ok := metadata.FromIncomingContext(stream.Context()); ok && len(md.Get("x-kvlane-request")) == 1 {
		id = md.Get("x-kvlane-request")[0]
	}
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if r.hold.Load() {
		r.holding <- struct{}{}
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.GetRequestHeaders() == nil {
		r.observed[id] = true
		return nil
	}
	r.decided[id] = true
	return stream.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
		Status: &typev3.HttpStatus{Code: typev3.StatusCode_OK},
		Headers: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{
			{Header: &corev3.HeaderValue{Key: "x-replica", RawValue: []byte(strconv.Itoa(r.number))}},
		}},
		Body: []byte("answer"),
	}}})
}

// A conversation stays with one replica, whichever header has its id; requests without one
// are spread. Both streams of a request reach the same replica.
func TestConversationsStayWithTheirReplica(t *testing.T) {
	bin := os.Getenv("ENVOY")
	if bin == "" {
		t.Skip("ENVOY is not set: `make test` sets it")
	}
	o := defaults()
	o.Envoy.Ingress, o.Envoy.Admin = freeAddress(t), freeAddress(t)
	o.Envoy.FirstToken = true
	o.Routing.Headers = []string{"x-session-id", "x-correlation-id"}
	var replicas []*replica
	for i := range 3 {
		replicas = append(replicas, startReplica(t, i))
		o.Envoy.Replicas = append(o.Envoy.Replicas, replicas[i].address)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	p, err := Start(ctx, bin, t.TempDir(), o, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Stop()
	client := &http.Client{Timeout: 20 * time.Second}
	defer client.CloseIdleConnections()
	send := func(headers ...string) (number, id string) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+o.Envoy.Ingress+"/v1/models", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		return resp.Header.Get("X-Replica"), resp.Header.Get("X-Request-Id")
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) { // until all of them are healthy
		seen := map[string]bool{}
		for range 50 {
			number, _ := send()
			seen[number] = true
		}
		if len(seen) == 3 && !seen[""] {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("requests without a conversation: got replicas %v, want all three", seen)
		}
	}

	const conversations = 24
	home := map[string]string{}
	reached := map[string]bool{}
	turn := func(header string, others ...string) {
		t.Helper()
		for i := range conversations {
			c := fmt.Sprintf("%s-%d", header, i)
			got, _ := send(append([]string{header, c}, others...)...)
			if home[c] == "" {
				home[c] = got
			}
			if got != home[c] {
				t.Errorf("conversation %s: got replica %q, want %q as before", c, got, home[c])
			}
			reached[got] = true
		}
	}
	for n := range 3 {
		turn("x-session-id", "x-correlation-id", strconv.Itoa(n)) // the first header of the list counts
		turn("x-correlation-id")
	}
	if len(reached) != 3 {
		t.Errorf("%d conversations: got replicas %v, want all three", 2*conversations, reached)
	}

	_, observed := send("x-session-id", "one")
	send()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		decided, missing, apart := 0, 0, 0
		for _, r := range replicas {
			r.mu.Lock()
			for id := range r.decided {
				decided++
				if !r.observed[id] {
					missing++
				}
			}
			for id := range r.observed {
				if !r.decided[id] {
					apart++
				}
			}
			r.mu.Unlock()
		}
		if apart > 0 {
			t.Fatalf("%d of %d answers were observed by another replica than the one that decided", apart, decided)
		}
		if missing == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d answers were not observed (the last one is %s)", missing, decided, observed)
		}
	}

	// A replica dies: from the first request on another one decides, always the same for a
	// conversation. Those of the others stay.
	replicas[1].server.Stop()
	stayed, all := 0, 0
	for c, at := range home {
		got, _ := send(headerOf(c), c)
		switch {
		case got == "" || got == "1":
			t.Errorf("conversation %s of the dead replica: got replica %q, want another", c, got)
		case at == "1":
			home[c] = got
		default:
			all++
			if got == at {
				stayed++
			}
			home[c] = got
		}
	}
	if stayed*100 < all*65 {
		t.Errorf("with one of three replicas gone %d of %d conversations of the others stayed, want most", stayed, all)
	}
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(get(t, "http://"+o.Envoy.Admin+"/clusters"), replicas[1].address+"::health_flags::/failed_active_hc"); time.Sleep(20 * time.Millisecond) {
		for c := range home {
			if got, _ := send(headerOf(c), c); got == "" {
				t.Errorf("conversation %s: no replica decided", c)
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("Envoy does not notice that a replica is gone")
		}
	}
	clear(home) // Envoy hashes over two replicas now
	for range 2 {
		turn("x-session-id")
		turn("x-correlation-id")
	}

	// A replica dies that has a request: another one decides.
	var conversation string
	for c, at := range home {
		if at == "2" {
			conversation = c
		}
	}
	replicas[2].hold.Store(true)
	answer := make(chan string, 1)
	go func() {
		got, _ := send(headerOf(conversation), conversation, "x-large", strings.Repeat("x", 8000))
		answer <- got
	}()
	select {
	case <-replicas[2].holding:
	case <-time.After(20 * time.Second):
		t.Fatal("the request did not reach replica 2")
	}
	replicas[2].server.Stop()
	if got := <-answer; got != "0" {
		t.Errorf("a request whose replica died: got replica %q, want 0", got)
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// headerOf returns the header of a conversation's id, which begins with it.
func headerOf(conversation string) string {
	return conversation[:strings.LastIndexByte(conversation, '-')]
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

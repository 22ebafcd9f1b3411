package decide

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvlane/kvlane/extproc"
)

// streamsVariable has the address of the server when the test binary runs as TestMemoryOfStreams' client.
const streamsVariable, streams, streamWords = "KVLANE_TEST_STREAMS", 1000, 500

// TestStreamsClient opens streams that wait, in a process of its own: the second half after a byte of
// input. It ends with its input.
func TestStreamsClient(t *testing.T) {
	address := os.Getenv(streamsVariable)
	if address == "" {
		t.Skip("runs as a process of TestMemoryOfStreams")
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for i := range streams {
		if i == streams/2 {
			if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		s, err := epv3.NewExternalProcessorClient(conn).Process(ctx)
		if err != nil {
			t.Fatal(err)
		}
		headers := &corev3.HeaderMap{}
		for _, h := range [][2]string{{":method", "POST"}, {":path", "/v1/completions"}, {":authority", "llm"}, {"content-type", "application/json"},
			{"user-agent", "client"}, {"x-request-id", fmt.Sprint("stream-", i)}, {"authorization", "Bearer key"}} {
			headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: h[0], RawValue: []byte(h[1])})
		}
		for _, m := range []*epv3.ProcessingRequest{
			{Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: headers}},
				ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED}},
			{Request: &epv3.ProcessingRequest_RequestBody{RequestBody: &epv3.HttpBody{Body: []byte(text("sea", streamWords)), EndOfStream: true}}},
		} {
			if err := s.Send(m); err != nil {
				t.Fatal(err)
			}
			if m.GetRequestHeaders() != nil {
				if _, err := s.Recv(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// TestMemoryOfStreams is TestMemoryOfWaiting over gRPC: with the stream, its goroutine and the request as Envoy sends
// it. A server that keeps nothing shows how much of that gRPC takes.
func TestMemoryOfStreams(t *testing.T) {
	opts := extproc.Options{MaxStreams: streams, ExtendTimeout: time.Minute, ExtendAfter: 5 * time.Second}
	idle := new(idleServer)
	nothing := memoryOfStreams(t, opts, func(g *grpc.Server) { epv3.RegisterExternalProcessorServer(g, idle) }, func() int { return int(idle.open.Load()) })
	t.Logf("%d bytes a stream of a server that keeps nothing", nothing)

	b := newBench(t, fmt.Sprintf("flow: {max_requests: %d, timeout: 4m, hold_tokens: 20}\n", streams), worker("a", 0))
	running, _ := b.ask("/v1/completions", text("sea", streamWords))
	waiting := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.waiting.queue.Len()
	}
	body := int64(len(text("sea", streamWords)))
	each := memoryOfStreams(t, opts, extproc.NewServer(opts, b.Decider).Register, waiting) - body
	const limit = 26 << 10 // 17 KB, and 25 under the race detector
	if t.Logf("%d bytes a request of %d words in addition to its body of %d", each, streamWords, body); each > limit {
		t.Errorf("got %d bytes for a waiting stream in addition to its body, want at most %d", each, limit)
	}
	running.Ticket.End(time.Now())
	b.idle()
}

// idleServer answers a stream's first message, and keeps the stream open after the second.
type idleServer struct {
	epv3.UnimplementedExternalProcessorServer

	open atomic.Int64
}

func (s *idleServer) Process(stream epv3.ExternalProcessor_ProcessServer) error {
	if err := exchange(stream); err != nil {
		return err
	}
	s.open.Add(1)
	defer s.open.Add(-1)
	<-stream.Context().Done()
	return nil
}

func exchange(stream epv3.ExternalProcessor_ProcessServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	if err := stream.Send(new(epv3.ProcessingResponse)); err != nil {
		return err
	}
	_, err := stream.Recv()
	return err
}

// memoryOfStreams returns the bytes that each stream of TestStreamsClient takes; waiting counts those that wait.
func memoryOfStreams(t *testing.T, opts extproc.Options, register func(*grpc.Server), waiting func() int) int64 {
	t.Helper()
	until := func(n int) {
		t.Helper()
		for range 2000 { // the client has to start, too
			if waiting() == n {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatalf("got %d streams that wait, want %d", waiting(), n)
	}
	g := grpc.NewServer(extproc.GRPCOptions(opts)...)
	register(g)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	client := exec.CommandContext(t.Context(), self, "-test.run=^TestStreamsClient$")
	client.Env, client.Stderr = append(os.Environ(), streamsVariable+"="+listener.Addr().String()), os.Stderr
	end, err := client.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	until(streams / 2)
	before := memory() // what the first streams need once is in it
	if _, err := end.Write([]byte{'\n'}); err != nil {
		t.Fatal(err)
	}
	until(streams)
	each := (memory() - before) / (streams / 2)
	_ = end.Close()
	if err := client.Wait(); err != nil {
		t.Errorf("the client: %v", err)
	}
	until(0)
	g.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	return each
}

package feed_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// brokenWriter fails like a closed pipe.
type brokenWriter struct{}

var errPipe = errors.New("broken pipe")

func (brokenWriter) Write([]byte) (int, error) { return 0, errPipe }

// syncBuffer may be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestTail(t *testing.T) {
	pub, replay := freePort(t), freePort(t)
	e := startEngine(t, pub, replay, 1)
	defer e.close()
	e.publish(true)
	ctx, stop := context.WithCancel(t.Context())
	var out, notes syncBuffer
	done := make(chan error, 1)
	go func() { done <- feed.Tail(ctx, vllmSource(pub, replay), &out, &notes) }()
	eventually(t, "an event", func() bool { return strings.Contains(out.String(), `"what":"stored","target":"w/0"`) })
	eventually(t, "a note", func() bool {
		return strings.Contains(notes.String(), "waiting for events of tcp://") && strings.Contains(notes.String(), "\nconnected\n")
	})
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	// Without a publisher Tail reports that it cannot connect.
	ctx, stop = context.WithCancel(t.Context())
	nobody := freePort(t)
	go func() { done <- feed.Tail(ctx, vllmSource(nobody, ""), &out, &notes) }()
	eventually(t, "an error", func() bool { return strings.Contains(out.String(), `"what":"error","target":"w","detail":`) })
	eventually(t, "a note", func() bool {
		return strings.Contains(notes.String(), "\nno connection to "+nobody+", trying again until it is there: zmtp: dial")
	})
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := feed.Tail(t.Context(), vllmSource(pub, replay), brokenWriter{}, nil); !errors.Is(err, errPipe) {
		t.Fatalf("error %v", err)
	}
	if err := feed.Tail(t.Context(), feed.Source{Rank: kvindex.NoRank}, &out, nil); err == nil {
		t.Fatal("got no error for an empty source")
	}
}

// An impossible endpoint is reported immediately; Tail would retry forever.
func TestImpossibleEndpoints(t *testing.T) {
	zmq := func(endpoint string) feed.Source {
		return feed.Source{Worker: "w", Engine: feed.VLLM, Rank: kvindex.NoRank, Endpoint: endpoint}
	}
	poll := func(url string) feed.Source {
		return feed.Source{Worker: "w", Engine: feed.TRTLLM, Rank: kvindex.NoRank, PollURL: url}
	}
	replayed := zmq("tcp://127.0.0.1:1")
	replayed.Replay = "tcp://127.0.0.1:0"
	for want, src := range map[string]feed.Source{
		`"tcp://127.0.0.1:99999": port "99999" is not a number up to 65535`: zmq("tcp://127.0.0.1:99999"),
		`"tcp://127.0.0.1:abc": port "abc" is not`:                          zmq("tcp://127.0.0.1:abc"),
		`missing port in address`:                                           zmq("tcp://127.0.0.1"),
		`endpoint "tcp://a:0": no engine can listen at port 0`:              zmq("tcp://a:0"),
		`endpoint "tcp://127.0.0.1:0": no engine can listen at port 0`:      replayed,
		`"http://127.0.0.1:99999/x": port 99999 is not`:                     poll("http://127.0.0.1:99999/x"),
		`"http://127.0.0.1:0/x": port 0 is not`:                             poll("http://127.0.0.1:0/x"),
		`"http://": want http://host:port/path`:                             poll("http://"),
		`"httpx": want http://host:port/path`:                               poll("httpx"),
		`invalid port ":abc" after host`:                                    poll("http://127.0.0.1:abc"),
	} {
		if err := feed.Tail(t.Context(), src, &bytes.Buffer{}, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", src, err, want)
		}
	}
}

package extproc

import (
	"context"
	"maps"
	"sync/atomic"
	"testing"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
)

// A decision that was postponed, twice, is answered as one that was made immediately, in every mode and with trailers.
func TestAPostponedDecisionIsTheSame(t *testing.T) {
	decided := Decision{Endpoint: "10.0.0.1:8000", Set: []Header{{Name: "x-to", Value: "a"}}, Body: []byte("new")}
	for _, mode := range append(benchModes, filterv3.ProcessingMode_BUFFERED_PARTIAL) {
		for _, trailers := range []bool{false, mode != filterv3.ProcessingMode_STREAMED} { // held, Envoy sends them after the answer
			c := call{request: mode, eager: true, headers: benchHeaders, trailers: trailers, respChunks: [][]byte{[]byte("r")}, chunks: [][]byte{[]byte("o"), []byte("ld")}}
			if mode == filterv3.ProcessingMode_BUFFERED || mode == filterv3.ProcessingMode_BUFFERED_PARTIAL {
				c.chunks = c.chunks[:1]
			}
			var got [2]*planeResult
			for i := range got {
				h := handlerFunc(func(_ context.Context, r *Request) Decision {
					d := decided
					d.Ticket = nopTicket{}
					if r.Partial {
						d.Body = nil
					}
					for range 2 * i {
						ready, later := make(chan struct{}), d
						d = Decision{Reject: &Reject{Status: 500}, Wait: &Wait{Ready: ready, Resume: func() Decision { return later }}}
						close(ready)
					}
					return d
				})
				b := newBed(t, Options{}, h)
				var err error
				if got[i], err = b.play(t.Context(), &c); err != nil {
					t.Fatalf("%v, trailers %v, postponed %v: %v", mode, trailers, i > 0, err)
				}
				waitFor(t, func() bool { n, bytes := b.srv.InFlight(); return n == 0 && bytes == 0 })
			}
			if a, b := got[0], got[1]; a.pick != "10.0.0.1:8000" || a.pick != b.pick || a.immediate != nil || b.immediate != nil || string(a.body) != string(b.body) ||
				!maps.Equal(a.set, b.set) || a.answers != b.answers || a.trailersOK != b.trailersOK {
				t.Errorf("%v, trailers %v: got %+v when postponed, want %+v", mode, trailers, b, a)
			}
		}
	}
}

// A client that leaves ends the wait, and a panic after a wait is that of a decision.
func TestAPostponedDecisionEnds(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan bool, 1)
	h := handlerFunc(func(ctx context.Context, r *Request) Decision {
		ready := make(chan struct{})
		if r.Path != "/gone" {
			close(ready)
			return Decision{Wait: &Wait{Ready: ready, Resume: func() Decision { panic("late") }}}
		}
		defer leave()
		return Decision{Wait: &Wait{Ready: ready, Resume: func() Decision { ended <- ctx.Err() != nil; return Decision{} }}}
	})
	b := newBed(t, Options{PanicReject: &Reject{Status: 500}}, h)
	gone := &call{request: filterv3.ProcessingMode_BUFFERED, headers: []Header{{":path", "/gone"}}, chunks: [][]byte{[]byte("x")}}
	if _, err := b.play(ctx, gone); err == nil {
		t.Error("got an answer, want none: the client left")
	}
	if !<-ended {
		t.Error("the decision was resumed before the client left")
	}
	waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 0 && b.failed(FailureCancelled) == 1 })
	got, err := b.play(t.Context(), &call{request: filterv3.ProcessingMode_BUFFERED, headers: benchHeaders, chunks: [][]byte{[]byte("x")}})
	if err != nil || got.immediate == nil || b.failed(FailurePanic) != 1 {
		t.Errorf("got %+v, %v and %d panics, want the answer of one", got, err, b.failed(FailurePanic))
	}
}

// While a decision waits, a drain closes no stream whose request is decided: its place is taken until it ends.
func TestADrainKeepsThePlacesOfThoseThatWait(t *testing.T) {
	h, place := &recorder{}, make(chan struct{})
	waits := handlerFunc(func(ctx context.Context, r *Request) Decision {
		if r.Path != "/late" {
			return h.Decide(ctx, r)
		}
		return Decision{Wait: &Wait{Ready: place, Resume: func() Decision { return Decision{Reject: &Reject{Status: 429}} }}}
	})
	b := newBed(t, Options{DrainQuiet: time.Millisecond}, waits)
	first, second := openDecided(t, b, filterv3.ProcessingMode_NONE, "a"), openDecided(t, b, filterv3.ProcessingMode_NONE, "b")
	late := make(chan *planeResult)
	go func() {
		r, _ := b.play(context.Background(), &call{request: filterv3.ProcessingMode_BUFFERED, headers: []Header{{":path", "/late"}}, chunks: [][]byte{[]byte("x")}})
		late <- r
	}()
	waitFor(t, func() bool { b.srv.mu.Lock(); defer b.srv.mu.Unlock(); return b.srv.waits == 1 })
	ctx, timeout := context.WithCancel(t.Context())
	drained := make(chan bool)
	go func() {
		b.srv.Drain(ctx)
		drained <- true
		b.srv.Drain(context.Background())
		drained <- true
	}()
	// Requests that end by themselves free their places.
	if err := first.CloseSend(); err != nil {
		t.Fatal(err)
	}
	h.ticket(0).mustEnd(t)
	timeout()
	<-drained
	select {
	case <-h.ticket(1).ended:
		t.Error("the drain ended a request although another one waits")
	default:
	}
	close(place)
	if r := <-late; r == nil || r.immediate == nil {
		t.Errorf("got %+v for the one that waited, want its answer", r)
	}
	if r, err := second.Recv(); err == nil || err.Error() != "EOF" {
		t.Errorf("got %v, %v, want the end of the stream once none waits", r, err)
	}
	h.ticket(1).mustEnd(t)
	<-drained
}

// Bodies whose decisions wait stay counted: another one is refused where they fill the bounds, and none gives way to it.
func TestBodiesOfPostponedDecisionsCount(t *testing.T) {
	const size = 100_000
	for _, o := range []Options{{MaxBodies: 3}, {MaxBodyBytes: 4*size - 1}} {
		waiting, free, ended := make(chan bool, 3), make(chan struct{}), make(chan *planeResult, 3)
		var asked atomic.Int32
		h := handlerFunc(func(context.Context, *Request) Decision {
			ready := make(chan struct{})
			close(ready)
			if asked.Add(1) > 3 {
				return Decision{}
			}
			return Decision{Wait: &Wait{Ready: ready, Resume: func() Decision { // a first wait is over: what it releases is released
				waiting <- true
				return Decision{Wait: &Wait{Ready: free, Resume: func() Decision { return Decision{} }}}
			}}}
		})
		b := newBed(t, o, h)
		play := func() (*planeResult, error) {
			return b.play(t.Context(), &call{request: filterv3.ProcessingMode_BUFFERED, headers: benchHeaders, chunks: [][]byte{make([]byte, size)}})
		}
		for range 3 {
			go func() { r, _ := play(); ended <- r }()
			<-waiting
		}
		if n, held := b.srv.InFlight(); n != 3 || held < 3*size {
			t.Errorf("got %d bodies of %d bytes while three of %d wait, want all", n, held, size)
		}
		if r, err := play(); err != nil || r.immediate == nil {
			t.Errorf("at most %d bodies or %d bytes: got %v and no refusal for a fourth body, want one", o.MaxBodies, o.MaxBodyBytes, err)
		}
		close(free)
		for range 3 {
			if r := <-ended; r == nil || r.immediate != nil {
				t.Error("a body that waited got no decision")
			}
		}
		waitFor(t, func() bool { n, held := b.srv.InFlight(); return n == 0 && held == 0 })
	}
}

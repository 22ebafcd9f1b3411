package disagg

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// The answers of all legs share a bound. Above it a leg fails, unless its answer is the only one;
// room that is given back is used again. What is not kept needs no room.
func TestAnswersShareTheirRoom(t *testing.T) {
	const size = 1 << 20
	code := http.StatusOK
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, strings.Repeat("x", size))
	}))
	defer srv.Close()
	s := NewSender("", "")
	defer s.Close()
	var room Room
	send := func(a *charge, seen io.Writer) ([]byte, error) {
		t.Helper()
		return s.Send(t.Context(), &sending{srv.Listener.Addr().String(), "/", http.Header{}, nil}, a, seen)
	}
	fits := func(a *charge) {
		t.Helper()
		if raw, err := send(a, nil); err != nil || len(raw) != size {
			t.Errorf("got %d bytes, %v", len(raw), err)
		}
	}
	outcome := func(err error) (f FailureError) {
		if got, ok := errors.AsType[*FailureError](err); ok {
			f = *got
		}
		return f
	}
	first, second, third := &charge{room: &room}, &charge{room: &room}, &charge{room: &room}
	room.SetMost(2 * perByte * size)
	fits(first)
	fits(second)
	if _, err := send(third, nil); outcome(err).Outcome != NoRoom || outcome(err).Unsent {
		t.Errorf("third answer: got %v, want %s", err, NoRoom)
	}
	third.free()
	if got, want := room.Held(), int64(2*perByte*size); got != want {
		t.Errorf("held %d, want %d", got, want)
	}
	if n, err := send(third, io.Discard); err != nil || n != nil || room.Held() != 2*perByte*size {
		t.Errorf("an answer that is not kept: %d bytes, %v, held %d", len(n), err, room.Held())
	}
	code = http.StatusBadRequest
	if _, err := send(third, io.Discard); outcome(err).Outcome != Refused || outcome(err).Status != 400 || outcome(err).Body != nil {
		t.Errorf("a refusal without room: got %v, want %s with status 400 and no body", err, Refused)
	}
	third.free()
	code = http.StatusOK
	first.free()
	fits(third)
	second.free()
	third.free()
	room.SetMost(1)
	fits(first)
	if _, err := send(second, nil); outcome(err).Outcome != NoRoom {
		t.Errorf("a second answer: got %v, want %s", err, NoRoom)
	}
	first.free()
	second.free()
	if room.Held() != 0 {
		t.Errorf("held %d at the end", room.Held())
	}
}

// Of the answer of a concurrent leg nothing is held, so it never fails for want of room.
func TestAConcurrentLegNeedsNoRoom(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"text":"`+strings.Repeat("x", 1<<20)+`","usage":{"prompt_tokens":9}}`)
	}))
	defer srv.Close()
	for connector, want := range map[string]Outcome{"sglang": OK, "nixl": NoRoom} {
		r, err := NewRunner(connector, Options{}, RunnerOptions{Timeout: time.Minute, HeadStart: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		r.Answers.SetMost(1000)
		r.Answers.held.Add(1000) // other answers
		req, err := body.Parse(body.Completions, []byte(`{"prompt":"a"}`))
		if err != nil {
			t.Fatal(err)
		}
		x := &Exchange{Request: req, Path: "/v1/completions", Decode: Side{Worker: "d", Address: "127.0.0.1:1", Rank: NoRank}}
		x.Begin(Side{Worker: "p", Address: srv.Listener.Addr().String(), Rank: NoRank}, NewUnique())
		usage := &Usage{}
		_, f := r.Run(t.Context(), &Call{Exchange: x, Headers: func(func(string, string)) {}, Body: req.Body, Within: time.Minute,
			Sent: func() {}, Ended: func(u *Usage) { usage = u }, Late: func(*FailureError) {}})
		switch {
		case want == OK && (f != nil || usage == nil || usage.Prompt != 9):
			t.Errorf("%s: got %v, usage %+v; want usage of 9 tokens", connector, f, usage)
		case want != OK && (f == nil || f.Outcome != want):
			t.Errorf("%s: got %v, want %s", connector, f, want)
		}
		x.End()
		r.Close()
		if got := r.Answers.Held(); got != 1000 {
			t.Errorf("%s: %d bytes are held, want those of the others", connector, got)
		}
	}
}

// The bodies of legs share a bound while engines have not answered, whether decode waits for the answers or not: the requests'
// own bodies are held as well. A leg beyond it is not sent, and a single one always is.
func TestBodiesOfLegsAreBounded(t *testing.T) {
	for _, connector := range []string{"sglang", "nixl"} {
		arrived, answer := make(chan struct{}, 3), make(chan struct{})
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			arrived <- struct{}{}
			<-answer
			_, _ = io.WriteString(w, `{"kv_transfer_params":{"remote_engine_id":"e"}}`)
		}))
		r, err := NewRunner(connector, Options{}, RunnerOptions{Timeout: time.Minute, HeadStart: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		run := func() (sent bool, f *FailureError) {
			req, err := body.Parse(body.Completions, []byte(`{"prompt":"`+strings.Repeat("a", 900)+`"}`))
			if err != nil {
				t.Error(err)
			}
			x := &Exchange{Request: req, Path: "/v1/completions", Decode: Side{Worker: "d", Address: "127.0.0.1:1", Rank: NoRank}}
			defer x.End()
			x.Begin(Side{Worker: "p", Address: srv.Listener.Addr().String(), Rank: NoRank}, NewUnique())
			_, f = r.Run(t.Context(), &Call{Exchange: x, Headers: func(yield func(string, string)) { yield("x-long", strings.Repeat("h", 900)) },
				Body: req.Body, Within: time.Minute, Sent: func() { sent = true }, Ended: func(*Usage) {}, Late: func(*FailureError) {}})
			return sent, f
		}
		r.Bodies.SetMost(100)
		var first sync.WaitGroup
		first.Go(func() {
			if sent, f := run(); !sent || f != nil {
				t.Errorf("%s, the only leg: sent %v, %v", connector, sent, f)
			}
		})
		<-arrived
		if held := r.Bodies.Held(); held < 1800 {
			t.Errorf("%s: %d bytes held, want those of a leg", connector, held)
		}
		if r.Bodies.Held() > 0 { // else it would wait for an answer
			if sent, f := run(); sent || f == nil || f.Outcome != NoRoom || !f.Unsent {
				t.Errorf("%s, a second leg: sent %v, %v; want %s", connector, sent, f, NoRoom)
			}
		}
		close(answer)
		first.Wait()
		r.wg.Wait()
		if held := r.Bodies.Held(); held != 0 || len(arrived) > 0 {
			t.Errorf("%s: %d bytes held at the end, %d further legs arrived", connector, held, len(arrived))
		}
		if sent, f := run(); !sent || f != nil {
			t.Errorf("%s, a leg after the others: sent %v, %v", connector, sent, f)
		}
		r.Close()
		srv.Close()
	}
}

package feed_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/go-zeromq/zmq4"
	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// The publisher of go-zeromq, the peer in the tests, leaves a goroutine behind when it is
// closed.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubMWriter).run"))
}

// recorder is a sink that records calls as text.
type recorder struct {
	mu    sync.Mutex
	lines []string
	state map[kvindex.Target]feed.State
	warns []string
	fail  error
}

func newRecorder() *recorder { return &recorder{state: map[kvindex.Target]feed.State{}} }

func (r *recorder) Apply(t kvindex.Target, ev *kvindex.Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		return r.fail
	}
	r.lines = append(r.lines, fmt.Sprint(t, " ", []string{"?", "+", "-", "x"}[ev.Kind], ev.Hashes))
	return nil
}

func (r *recorder) Clear(t kvindex.Target, why feed.Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprint(t, " clear ", why))
}

func (r *recorder) State(t kvindex.Target, s feed.State, _ feed.Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state[t] = s
}

func (r *recorder) Warn(t kvindex.Target, why feed.Reason, detail string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.warns = append(r.warns, fmt.Sprint(t, " ", why, ": ", detail))
}

func (r *recorder) seen() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.lines)
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited too long for %s", what)
		}
	}
}

// storedBatch returns a vLLM batch that stores one block, named by its number. It is an array,
// because the other library writes maps in any order.
func storedBatch(t testing.TB, seq uint64, incarnation float64) []byte {
	return pack(t, []any{incarnation + float64(seq), []any{[]any{"BlockStored", []uint64{seq}, nil, []int{1, 2}, 2}}, 0})
}

// fakeEngine publishes and replays through go-zeromq.
type fakeEngine struct {
	t       *testing.T
	stop    context.CancelFunc
	pub     zmq.Socket
	router  zmq.Socket
	done    chan struct{}
	mu      sync.Mutex
	history [][]byte
	first   uint64 // number of history[0]
	next    uint64
	asked   []uint64
	mute    bool
	four    bool // replies contain a topic frame
	stamp   float64
}

func startEngine(t *testing.T, pubAddr, replayAddr string, stamp float64) *fakeEngine {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	e := &fakeEngine{t: t, stop: stop, pub: zmq.NewPub(ctx), router: zmq.NewRouter(ctx), done: make(chan struct{}), stamp: stamp, four: true}
	eventually(t, "binding", func() bool { return e.pub.Listen(pubAddr) == nil })
	eventually(t, "binding", func() bool { return e.router.Listen(replayAddr) == nil })
	go e.serve()
	return e
}

func (e *fakeEngine) serve() {
	defer close(e.done)
	for {
		msg, err := e.router.Recv()
		if err != nil {
			return
		}
		if len(msg.Frames) != 3 || len(msg.Frames[2]) != 8 {
			continue
		}
		start := binary.BigEndian.Uint64(msg.Frames[2])
		e.mu.Lock()
		e.asked = append(e.asked, start)
		for i, p := range e.history {
			if n := e.first + uint64(i); n >= start && !e.mute {
				e.reply(msg.Frames[0], n, p)
			}
		}
		if !e.mute {
			e.reply(msg.Frames[0], ^uint64(0), nil)
		}
		e.mu.Unlock()
	}
}

func (e *fakeEngine) reply(id []byte, seq uint64, payload []byte) {
	frames := [][]byte{id, nil}
	if e.four {
		frames = append(frames, []byte("kv"))
	}
	_ = e.router.SendMulti(zmq.NewMsgFrom(append(frames, binary.BigEndian.AppendUint64(nil, seq), payload)...))
}

// publish makes a batch; a lost one is only recorded in the engine's history.
func (e *fakeEngine) publish(lost bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := storedBatch(e.t, e.next, e.stamp)
	e.history = append(e.history, p)
	if !lost {
		if err := e.pub.SendMulti(zmq.NewMsgFrom([]byte("kv"), binary.BigEndian.AppendUint64(nil, e.next), p)); err != nil {
			e.t.Error(err)
		}
	}
	e.next++
}

func (e *fakeEngine) close() {
	e.stop()
	_ = e.pub.Close()
	_ = e.router.Close()
	<-e.done
}

// freePort returns an address that is not used otherwise: an engine that restarts must return at
// the same address.
func freePort(t *testing.T) string {
	t.Helper()
	port, err := enginesim.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("tcp://127.0.0.1:%d", port)
}

func vllmSource(pub, replay string) feed.Source {
	return feed.Source{
		Worker: "w", Engine: feed.VLLM, Rank: kvindex.NoRank, RankFromBatch: true, Endpoint: pub, Replay: replay,
		ReconnectMin: 5 * time.Millisecond, ReconnectMax: 20 * time.Millisecond, ReplayIdle: 200 * time.Millisecond,
	}
}

// The whole life of a feed with sockets of an independent implementation: history, live, a gap
// that is filled, a restart.
func TestFeedLife(t *testing.T) {
	for _, four := range []bool{false, true} {
		t.Run(fmt.Sprintf("replies with a topic %v", four), func(t *testing.T) {
			pub, replay := freePort(t), freePort(t)
			e := startEngine(t, pub, replay, 1)
			e.four = four
			e.publish(true)
			e.publish(true)
			sink := newRecorder()
			f, err := feed.Start(t.Context(), vllmSource(pub, replay), sink)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			target := kvindex.Target{Worker: "w", Rank: 0}
			eventually(t, "history", func() bool { return len(sink.seen()) == 2 })
			eventually(t, "live", func() bool { return f.Status().Targets[0].State == feed.Live })
			// The subscription may not have arrived yet: what it misses is a gap, detected with
			// the next batch.
			for i := range 5 {
				e.publish(i == 2 || i == 3)
			}
			eventually(t, "the subscription", func() bool { e.publish(false); return len(sink.seen()) >= 7 })
			eventually(t, "everything", func() bool { return uint64(len(sink.seen())) == e.next })
			for i, line := range sink.seen() {
				if want := fmt.Sprintf("w/0 +[%d]", i); line != want {
					t.Fatalf("line %d: got %q, want %q", i, line, want)
				}
			}
			if s := f.Status(); s.Counts.Gaps == 0 || s.Counts.Lost != 0 || s.Counts.Clears != 0 || s.Blocks != e.next || s.BlockSize != 2 {
				t.Fatalf("%+v", s)
			}

			before := len(sink.seen())
			e.close()
			eventually(t, "stale", func() bool { return f.Status().Targets[0].State == feed.Stale })
			e = startEngine(t, pub, replay, 1000)
			defer e.close()
			e.publish(true)
			eventually(t, "the new engine's batch", func() bool { return len(sink.seen()) >= before+2 })
			if got := sink.seen()[before:]; got[0] != "w/0 clear engine_restarted" || got[1] != "w/0 +[0]" {
				t.Fatalf("after the restart: %q", got)
			}
			eventually(t, "live again", func() bool { sink.mu.Lock(); defer sink.mu.Unlock(); return sink.state[target] == feed.Live })
		})
	}
}

// A publisher that takes connections and does not answer is reported long before the configured time limit.
func TestTheFirstHandshakeIsShort(t *testing.T) {
	hung, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	src := vllmSource("tcp://"+hung.Addr().String(), "")
	src.Conn.HandshakeTimeout = time.Hour
	r := newRecorder()
	f, err := feed.Start(t.Context(), src, r)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, "a warning", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.warns) > 0 && strings.Contains(r.warns[0], "i/o timeout")
	})
}

// A replay socket that never answers is given up, and live batches are applied. Until one comes the feed is not live: the
// engine may hold anything.
func TestFeedWithMuteReplay(t *testing.T) {
	pub, replay := freePort(t), freePort(t)
	e := startEngine(t, pub, replay, 1)
	defer e.close()
	e.mute = true
	src := vllmSource(pub, replay)
	src.ReplayIdle = 20 * time.Millisecond
	sink := newRecorder()
	f, err := feed.Start(t.Context(), src, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, "the end of all tries", func() bool { return f.Status().Counts.Failures == 3 })
	if s := f.Status(); s.Targets[0].State != feed.Gap {
		t.Fatalf("%+v", s)
	}
	eventually(t, "a batch", func() bool { e.publish(false); return len(sink.seen()) > 0 })
	if s := f.Status(); s.Counts.Failures < 3 || !strings.Contains(s.LastError, "replay") {
		t.Fatalf("%+v", s)
	}
}

// A batch that is larger than connections take is asked for three times, and three times more when a later one shows that it
// is missing. Then it is lost, and what follows is applied.
func TestABatchThatIsTooLargeIsNotAskedForWithoutEnd(t *testing.T) {
	for large, replays := range map[bool]uint64{true: 6, false: 0} {
		pub, replay := freePort(t), freePort(t)
		e := startEngine(t, pub, replay, 1)
		defer e.close()
		e.publish(true)
		e.publish(true)
		if large {
			e.history[1] = make([]byte, 2<<10)
		}
		sink, src := newRecorder(), vllmSource(pub, replay)
		src.Conn.MaxMessage = 1 << 10
		f, err := feed.Start(t.Context(), src, sink)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		want := map[bool]feed.State{true: feed.Gap, false: feed.Live}[large]
		eventually(t, want.String(), func() bool { return f.Status().Targets[0].State == want })
		eventually(t, "later batches", func() bool { e.publish(false); return len(sink.seen()) > 5 })
		switch s := f.Status(); {
		case s.Counts.Failures != replays, s.Counts.Clears > replays, large != (s.Counts.Lost > 0):
			t.Errorf("a large batch %v: got %+v, want %d failed replays", large, s.Counts, replays)
		}
	}
}

// While a replay runs, live batches wait in the socket once the machine is full.
func TestBackPressure(t *testing.T) {
	pub, replay := freePort(t), freePort(t)
	e := startEngine(t, pub, replay, 1)
	defer e.close()
	e.mute = true
	src := vllmSource(pub, replay)
	src.ReplayIdle = 300 * time.Millisecond
	src.Machine.MaxPending, src.Machine.Attempts = 300, 1
	sink := newRecorder()
	f, err := feed.Start(t.Context(), src, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, "connection", func() bool { return f.Status().Connects == 1 })
	for range 50 {
		e.publish(false)
	}
	eventually(t, "everything that came", func() bool {
		seen := sink.seen()
		if len(seen) == 0 {
			e.publish(false) // the subscription may have come after what was published
			return false
		}
		return len(seen) > 3 && seen[len(seen)-1] == fmt.Sprintf("w/0 +[%d]", e.next-1)
	})
	if s := f.Status(); s.Counts.Overflows != 0 {
		t.Fatalf("%+v", s.Counts)
	}
}

// An engine that connects to the feed.
func TestBoundFeed(t *testing.T) {
	addr := freePort(t)
	src := vllmSource(addr, "")
	src.Bind = true
	sink := newRecorder()
	f, err := feed.Start(t.Context(), src, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for round := range 2 {
		ctx, stop := context.WithCancel(t.Context())
		pub := zmq.NewPub(ctx)
		if err := pub.Dial(addr); err != nil {
			t.Fatal(err)
		}
		had := len(sink.seen())
		n := uint64(0)
		eventually(t, "a batch", func() bool {
			_ = pub.SendMulti(zmq.NewMsgFrom([]byte("kv"), binary.BigEndian.AppendUint64(nil, n), storedBatch(t, n, float64(round))))
			n++
			return len(sink.seen()) > had+1
		})
		stop()
		_ = pub.Close()
	}
	if !slices.Contains(sink.seen(), "w/0 clear lost_batches") {
		t.Fatalf("got no clear after the second connection: %q", sink.seen())
	}
}

func TestRanksAndBlockSizes(t *testing.T) {
	stored := func(size int, rank any) []byte {
		return pack(t, []any{1.0, []any{m{"type": "BlockStored", "block_hashes": []int{1}, "parent_block_hash": nil, "token_ids": seq(0, size), "block_size": size}}, rank})
	}
	windows := func(size int) []byte { // a group of windows has blocks of its own
		return pack(t, []any{1.0, []any{m{"type": "BlockStored", "block_hashes": []int{1}, "parent_block_hash": nil, "token_ids": seq(0, size), "block_size": size,
			"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}}, nil})
	}
	tests := map[string]struct {
		src     feed.Source
		payload []byte
		lines   string
		warn    feed.Reason
	}{
		"rank of the batch":              {feed.Source{Rank: kvindex.NoRank, RankFromBatch: true}, stored(4, 3), "w/3 +[1]", ""},
		"no rank in the batch":           {feed.Source{Rank: kvindex.NoRank, RankFromBatch: true}, stored(4, nil), "w +[1]", ""},
		"a worker without ranks":         {feed.Source{Rank: kvindex.NoRank}, stored(4, 0), "w +[1]", ""},
		"configured rank, another named": {feed.Source{Rank: 1}, stored(4, 0), "w/1 +[1]", feed.WrongRank},
		"block size adopted":             {feed.Source{Rank: kvindex.NoRank}, stored(64, nil), "w +[1]", ""},
		"block size 64, configured 32":   {feed.Source{Rank: kvindex.NoRank, BlockSize: 32}, stored(64, nil), "w +[1]", feed.BlockSizeChanged},
		"windows of 48, configured 32":   {feed.Source{Rank: kvindex.NoRank, BlockSize: 32}, windows(48), "w +[1]", ""},
		"block size 48, configured 32":   {feed.Source{Rank: kvindex.NoRank, BlockSize: 32}, stored(48, nil), "", feed.WrongBlockSize},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			tt.src.Worker, tt.src.Engine = "w", feed.VLLM
			sink := newRecorder()
			p := feed.NewPlayer(tt.src, sink)
			if !p.Message([][]byte{nil, make([]byte, 8), tt.payload}) {
				t.Fatal("not a batch")
			}
			if got := strings.Join(sink.seen(), "\n"); got != tt.lines {
				t.Errorf("got %q, want %q", got, tt.lines)
			}
			if (tt.warn == "") != (len(sink.warns) == 0) || tt.warn != "" && !strings.Contains(sink.warns[0], string(tt.warn)) {
				t.Errorf("got warnings %q, want %q", sink.warns, tt.warn)
			}
		})
	}
}

// An event that the index refuses and an invalid payload are counted, and the next one is
// applied.
func TestRefusedAndMalformed(t *testing.T) {
	sink := newRecorder()
	p := feed.NewPlayer(feed.Source{Worker: "w", Engine: feed.VLLM, Rank: 0}, sink)
	num := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	sink.fail = fmt.Errorf("unknown parent")
	p.Message([][]byte{nil, num(0), storedBatch(t, 0, 1)})
	sink.fail = nil
	p.Message([][]byte{nil, num(1), []byte("garbage")})
	if p.Message([][]byte{nil, {1}, nil}) {
		t.Error("got no error for a sequence number of one byte")
	}
	p.Message([][]byte{nil, num(2), storedBatch(t, 2, 1)})
	if got := sink.seen(); len(got) != 1 || got[0] != "w/0 +[2]" {
		t.Errorf("got %q", got)
	}
	if d := p.Dropped(); d[feed.Refused] != 1 || d[feed.Malformed] != 2 {
		t.Errorf("dropped %v", d)
	}
}

// Removals that follow each other in a batch reach the sink as one event; other tiers, and what
// is stored in between, separate them. All are counted.
func TestRemovalsOfABatchAreJoined(t *testing.T) {
	sink := newRecorder()
	p := feed.NewPlayer(feed.Source{Worker: "w", Engine: feed.VLLM, Rank: 0}, sink)
	removed := func(medium string, hashes ...uint64) any { return []any{"BlockRemoved", hashes, medium} }
	payload := pack(t, []any{1.0, []any{
		removed("GPU", 1), removed("GPU", 2, 3), removed("GPU", 4), removed("CPU", 5),
		[]any{"BlockStored", []uint64{6}, nil, []uint32{1, 2}, 2, nil, "GPU"},
		removed("GPU", 6), removed("GPU", 7),
	}})
	message := func(seq uint64) { p.Message([][]byte{nil, binary.BigEndian.AppendUint64(nil, seq), payload}) }
	message(0)
	want := []string{"w/0 -[1 2 3 4]", "w/0 -[5]", "w/0 +[6]", "w/0 -[6 7]"}
	if got := sink.seen(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	sink.fail = errors.New("refused")
	message(1)
	if n := p.Dropped()[feed.Refused]; n != 7 {
		t.Errorf("got %d events refused, want 7", n)
	}
}

// A batch that ends inside an event, or an HTTP event that is not JSON, counts as malformed
// once.
func TestACutOffBatchCountsOnce(t *testing.T) {
	for _, payload := range [][]byte{storedBatch(t, 0, 1)[:20], []byte("{")} {
		p := feed.NewPlayer(feed.Source{Worker: "w", Engine: feed.TRTLLM, Rank: 0}, newRecorder())
		p.Message([][]byte{nil, binary.BigEndian.AppendUint64(nil, 0), payload})
		if d := p.Dropped(); d[feed.Malformed] != 1 {
			t.Errorf("%q: dropped %v", payload, d)
		}
	}
}

// trtServer answers polls with the events put into it, as TensorRT-LLM does: a poll drains it.
type trtServer struct {
	*httptest.Server
	mu     sync.Mutex
	buffer []string
	polls  int
	broken bool
	hold   chan struct{} // if set, polls wait for it
}

func newTRTServer(t *testing.T) *trtServer {
	s := &trtServer{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.polls++
		hold, broken := s.hold, s.broken
		body := "[" + strings.Join(s.buffer, ",") + "]"
		if !broken {
			s.buffer = nil
		}
		s.mu.Unlock()
		if hold != nil {
			<-hold
		}
		if r.Method != http.MethodPost || r.URL.Path != "/kv_cache_events" || broken {
			http.Error(w, "broken", http.StatusInternalServerError)
			return
		}
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *trtServer) put(events ...string) {
	s.mu.Lock()
	s.buffer = append(s.buffer, events...)
	s.mu.Unlock()
}

func trtStored(id int, rank string, hash uint64) string {
	return fmt.Sprintf(`{"event_id":%d,%s"data":{"type":"stored","parent_hash":null,"blocks":[{"block_hash":%d,"tokens":[{"token_id":1},{"token_id":2}]}]}}`, id, rank, hash)
}

func TestPolledFeed(t *testing.T) {
	s := newTRTServer(t)
	rank := func(r int) string { return fmt.Sprintf(`"attention_dp_rank":%d,`, r) }
	s.put(`{"event_id":0,"attention_dp_rank":0,"window_size":4096,"data":{"type":"created"}}`, `{"event_id":0,"attention_dp_rank":1,"data":{"type":"created"}}`,
		trtStored(1, rank(0), 18177682803760873588), trtStored(1, rank(1), 7))
	sink := newRecorder()
	f, err := feed.Start(t.Context(), feed.Source{
		Worker: "t", Engine: feed.TRTLLM, Rank: kvindex.NoRank, RankFromBatch: true, PollURL: s.URL + "/kv_cache_events",
		PollInterval: 5 * time.Millisecond, ReconnectMin: 5 * time.Millisecond, ReconnectMax: 10 * time.Millisecond,
	}, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, "two events", func() bool { return len(sink.seen()) == 2 })
	// Equal numbers on two ranks are not a gap; a missing number on rank 1 is a gap of that rank
	// alone.
	s.put(trtStored(2, rank(0), 3), trtStored(3, rank(1), 4))
	eventually(t, "the gap", func() bool { return len(sink.seen()) == 5 })
	// The server fails, recovers, and has restarted.
	s.mu.Lock()
	s.broken = true
	s.mu.Unlock()
	eventually(t, "stale", func() bool { return f.Status().Targets[0].State == feed.Stale && f.Status().Errors > 0 })
	s.mu.Lock()
	s.broken = false
	s.mu.Unlock()
	s.put(trtStored(0, rank(0), 5))
	eventually(t, "the restart", func() bool { return len(sink.seen()) == 8 })
	s.put(trtStored(0, rank(1), 6)) // the engine's other rank has no blocks left before its first event, and keeps what it stores
	eventually(t, "the other rank", func() bool { return len(sink.seen()) == 9 })
	want := []string{"t/0 +[18177682803760873588]", "t/1 +[7]", "t/0 +[3]", "t/1 clear lost_batches", "t/1 +[4]", "t/0 clear engine_restarted", "t/0 +[5]",
		"t/1 clear engine_restarted", "t/1 +[6]"}
	if got := sink.seen(); !slices.Equal(got, want) {
		t.Fatalf("got %q\nwant %q", got, want)
	}
	if c := f.Status().Counts; c.Gaps != 1 || c.Restarts != 1 {
		t.Fatalf("%+v", c)
	}
}

// A worker's events come from its own address.
func TestAPollIsNotSentElsewhere(t *testing.T) {
	s := newTRTServer(t)
	s.put(trtStored(0, "", 5))
	from := httptest.NewServer(http.RedirectHandler(s.URL+"/kv_cache_events", http.StatusTemporaryRedirect))
	defer from.Close()
	sink := newRecorder()
	f, err := feed.Start(t.Context(), feed.Source{Worker: "t", Engine: feed.TRTLLM, Rank: kvindex.NoRank, PollURL: from.URL, PollInterval: time.Millisecond}, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, "a refusal", func() bool { return f.Status().Errors > 0 })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.polls != 0 || len(sink.seen()) != 0 {
		t.Errorf("got %d polls at another address, events %q, want none", s.polls, sink.seen())
	}
}

// Events of an answer that does not end are applied as they come; the poll is given up, and the feed's state is shown meanwhile.
func TestAPollEndsInTime(t *testing.T) {
	polls := make(chan struct{}, 100)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("[" + trtStored(0, "", 5) + ","))
		_ = http.NewResponseController(w).Flush()
		polls <- struct{}{}
		<-r.Context().Done()
	}))
	defer s.Close()
	sink := newRecorder()
	f, err := feed.Start(t.Context(), feed.Source{Worker: "t", Engine: feed.TRTLLM, Rank: kvindex.NoRank, PollURL: s.URL, PollTimeout: 300 * time.Millisecond, PollInterval: time.Millisecond}, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	<-polls
	eventually(t, "the event of a poll that waits", func() bool { return f.Status().Errors == 0 && slices.Equal(sink.seen(), []string{"t +[5]"}) })
	eventually(t, "the end of the poll", func() bool { return f.Status().Errors > 0 })
	eventually(t, "another poll", func() bool { return len(polls) > 0 })
}

// Any number of requests that finish during a poll cause one more poll.
func TestPollsAreCoalesced(t *testing.T) {
	s := newTRTServer(t)
	s.hold = make(chan struct{})
	f, err := feed.Start(t.Context(), feed.Source{Worker: "t", Engine: feed.TRTLLM, Rank: kvindex.NoRank, PollURL: s.URL + "/kv_cache_events", PollInterval: time.Hour}, newRecorder())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	polls := func() int { s.mu.Lock(); defer s.mu.Unlock(); return s.polls }
	eventually(t, "the first poll", func() bool { return polls() == 1 })
	for range 10 {
		f.Finished(kvindex.Target{Worker: "t", Rank: kvindex.NoRank}, true)
	}
	close(s.hold)
	eventually(t, "the second poll", func() bool { return polls() == 2 && f.Status().Connects == 2 })
	time.Sleep(20 * time.Millisecond)
	if n := polls(); n != 2 {
		t.Fatalf("got %d polls, want 2", n)
	}
}

// A silent feed becomes suspect and warns.
func TestSilentFeed(t *testing.T) {
	s := newTRTServer(t)
	sink := newRecorder()
	src := feed.Source{Worker: "t", Engine: feed.TRTLLM, Rank: kvindex.NoRank, PollURL: s.URL + "/kv_cache_events", PollInterval: time.Millisecond}
	src.Machine.SilentAfter = 3
	f, err := feed.Start(t.Context(), src, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	target := kvindex.Target{Worker: "t", Rank: kvindex.NoRank}
	eventually(t, "suspicion", func() bool {
		f.Finished(target, true)
		st := f.Status()
		return st.Counts.Silences == 1 && st.Targets[0].State == feed.Stale
	})
	s.put(trtStored(0, "", 1))
	eventually(t, "live", func() bool { return f.Status().Targets[0].State == feed.Live })
}

func TestUnknownHashAlgorithmRefusesTheServer(t *testing.T) {
	s := newTRTServer(t)
	s.put(`{"event_id":0,"hash_algo":"v9","data":{"type":"removed","block_hashes":[1]}}`)
	sink := newRecorder()
	f, err := feed.Start(t.Context(), feed.Source{Worker: "t", Engine: feed.TRTLLM, Rank: kvindex.NoRank, PollURL: s.URL + "/kv_cache_events", PollInterval: time.Millisecond}, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, "refusal", func() bool { return f.Status().Dropped[feed.UnknownHash] == 1 })
	sink.mu.Lock()
	defer sink.mu.Unlock()
	if len(sink.warns) != 1 || !strings.Contains(sink.warns[0], "v9") || len(sink.lines) != 1 || sink.lines[0] != "t clear unknown_hash_algo" {
		t.Fatalf("%q %q", sink.warns, sink.lines)
	}
}

func TestSourceChecks(t *testing.T) {
	for name, src := range map[string]feed.Source{
		"no worker":       {Engine: feed.VLLM, Endpoint: "tcp://x:1"},
		"no engine":       {Worker: "w", Endpoint: "tcp://x:1"},
		"no place":        {Worker: "w", Engine: feed.VLLM},
		"two places":      {Worker: "w", Engine: feed.TRTLLM, Endpoint: "tcp://x:1", PollURL: "http://x"},
		"vllm polled":     {Worker: "w", Engine: feed.VLLM, PollURL: "http://x"},
		"bad endpoint":    {Worker: "w", Engine: feed.VLLM, Endpoint: "x:1"},
		"bad replay":      {Worker: "w", Engine: feed.VLLM, Endpoint: "tcp://x:1", Replay: "y"},
		"rank below none": {Worker: "w", Engine: feed.VLLM, Endpoint: "tcp://x:1", Rank: -2},
	} {
		if _, err := feed.Start(t.Context(), src, newRecorder()); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

// A quiet feed uses one goroutine.
func TestManyFeeds(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var conns []net.Conn
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = nc.Write(publisherHello())
			conns = append(conns, nc)
		}
	}()
	const n = 300 // file descriptors are scarce in tests, and both ends are in this process
	var feeds []*feed.Feed
	before := runtime.NumGoroutine()
	for i := range n {
		src := vllmSource("tcp://"+l.Addr().String(), "")
		src.Worker = fmt.Sprintf("w%d", i)
		f, err := feed.Start(t.Context(), src, newRecorder())
		if err != nil {
			t.Fatal(err)
		}
		feeds = append(feeds, f)
	}
	for _, f := range feeds {
		eventually(t, "connection", func() bool { return f.Status().Connects == 1 })
	}
	if more := runtime.NumGoroutine() - before; more > n {
		t.Errorf("%d feeds: got %d goroutines", n, more)
	}
	for _, f := range feeds {
		f.Close()
	}
	_ = l.Close()
	<-accepted
	for _, nc := range conns {
		_ = nc.Close()
	}
}

// publisherHello returns what a ZMTP 3.0 publisher sends first.
func publisherHello() []byte {
	b := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0}, "NULL"...)
	b = append(b, make([]byte, 64-len(b))...)
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
	return append(append(b, 4, byte(len(ready))), ready...)
}

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/kvindex/feed/zmtp"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// eventsOnly turns speculation off: only events make blocks count as cached.
const eventsOnly = "routing: {speculate: 0}\n"

// dialects are the event formats of the engines, with one engine of one rank.
func dialects() map[string]shape {
	one := func(s shape) shape {
		s.engines, s.ranks, s.config = 1, 1, eventsOnly
		return s
	}
	sglang := func(change func(*enginesim.Options)) shape {
		return one(shape{replay: true, worker: ", engine: sglang", model: ", engine: sglang", engine: func(_ int, o *enginesim.Options) {
			o.Engine = enginesim.SGLang
			change(o)
		}})
	}
	vllm := func(change func(*enginesim.Options)) shape {
		return one(shape{replay: true, engine: func(_ int, o *enginesim.Options) { change(o) }})
	}
	trtllm := shape{worker: ", engine: trtllm, block_size: 16", model: ", engine: trtllm", engine: func(_ int, o *enginesim.Options) { o.Engine = enginesim.TRTLLM }}
	zmq := one(trtllm)
	zmq.replay = true
	poll := one(trtllm)
	poll.events = func(e *enginesim.Engine) string { return e.URL() + "/kv_cache_events" }
	return map[string]shape{
		"vllm map":            vllm(func(*enginesim.Options) {}),
		"vllm array":          vllm(func(o *enginesim.Options) { o.ArrayEvents, o.OldReplay = true, true }),
		"vllm bytes":          vllm(func(o *enginesim.Options) { o.RawHashes = true }),
		"sglang map":          sglang(func(*enginesim.Options) {}),
		"sglang array":        sglang(func(o *enginesim.Options) { o.ArrayEvents, o.OldReplay = true, true }),
		"tensorrt-llm by zmq": zmq,
		"tensorrt-llm polled": poll,
	}
}

// exact plays conversations until the index predicts for a second turn what the engine
// reports; it must never predict more than the engine has.
func (b *bed) exact(seed string) {
	b.t.Helper()
	messages := []message{{"system", prose(seed, 150)}, {"user", "Where?"}}
	first := b.chat(messages...)
	messages = append(messages, message{"assistant", first.text()}, message{"user", "When?"})
	b.until("the engine's events have arrived: "+seed, func() bool {
		r := b.chat(messages...)
		cached := r.answer.Usage.Details.Cached
		if r.matched > cached {
			b.t.Fatalf("%s: %d tokens matched, the engine says %d", seed, r.matched, cached)
		}
		return cached > 0 && r.matched == cached
	})
}

func (b *bed) faults(f enginesim.Faults) {
	b.t.Helper()
	for _, e := range b.engines {
		if err := e.SetFaults(f); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *bed) live() {
	b.t.Helper()
	b.until("the feeds are live", func() bool {
		return b.metric("kvlane_feed_state", `state="live"`) == float64(len(b.engines)*b.shape.ranks)
	})
}

// Every engine's events in every encoding, under faults: blocks that are gone are never
// credited, and the index converges to the engine's state.
func TestFeedsOfEveryEngine(t *testing.T) {
	for name, s := range dialects() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, s)
			polled := s.events != nil
			drop := 1
			if strings.Contains(s.worker, "trtllm") && !polled {
				drop = 2 // the simulated engine's other publisher, which is polled, loses one too
			}
			for i := range 3 {
				b.exact(fmt.Sprint("conversation ", i))
			}

			// Batches lost on the wire.
			b.faults(enginesim.Faults{DropBatches: drop})
			b.chat(message{"user", prose("lost", 200)})
			b.faults(enginesim.Faults{})
			b.chat(message{"user", prose("after", 200)})
			b.until("the gap is seen", func() bool { return b.metric("kvlane_feed_gaps_total") > 0 })
			b.live()
			b.exact("lost")
			if polled {
				if b.metric("kvlane_feed_clears_total") == 0 {
					t.Error("lost events of a polled engine cleared nothing")
				}
			} else if b.metric("kvlane_feed_recovered_batches_total") == 0 || b.metric("kvlane_feed_lost_batches_total") != 0 {
				t.Errorf("%v recovered, %v lost", b.metric("kvlane_feed_recovered_batches_total"), b.metric("kvlane_feed_lost_batches_total"))
			}

			// Batches that the engine no longer has.
			clears := b.metric("kvlane_feed_clears_total")
			b.faults(enginesim.Faults{DropBatches: drop, ForgetDropped: true})
			b.chat(message{"user", prose("gone", 200)})
			b.faults(enginesim.Faults{})
			b.chat(message{"user", prose("after that", 200)})
			b.until("the rank is cleared", func() bool { return b.metric("kvlane_feed_clears_total") > clears })
			b.live()
			b.exact("after the loss")

			// A restarted engine holds nothing.
			restarts := b.metric("kvlane_feed_restarts_total")
			b.engines[0].Restart()
			b.exact("after the restart")
			if b.metric("kvlane_feed_restarts_total") == restarts && b.metric("kvlane_feed_clears_total") < clears+2 {
				t.Error("the restart was not noticed")
			}
			b.exact("conversation 0")

			// Delayed events.
			b.faults(enginesim.Faults{EventDelayMS: 150})
			b.exact("late")
		})
	}
}

// Blocks that several concurrent requests store and that are evicted for lack of space:
// each copy counts.
func TestDuplicatesAndEviction(t *testing.T) {
	for _, name := range []string{"vllm map", "sglang map", "tensorrt-llm by zmq", "tensorrt-llm polled"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := dialects()[name]
			engine := s.engine
			s.engine = func(i int, o *enginesim.Options) {
				engine(i, o)
				o.Blocks = 90
				o.Time = enginesim.TimeModel{A: time.Millisecond, Scale: 1, Budget: 8192, MaxSeqs: 256}
			}
			b := newBed(t, s)
			for round := range 6 {
				var wg sync.WaitGroup
				for i := range 6 {
					wg.Go(func() {
						// Pairs of equal prompts, sent concurrently.
						body := chatBody(message{"user", prose(fmt.Sprint("twin ", round, i/2), 120)})
						if r, err := b.send("/v1/chat/completions", body); err != nil || r.status != http.StatusOK {
							t.Errorf("%v %+v", err, r)
						}
					})
				}
				wg.Wait()
			}
			evicted := 0
			for _, r := range b.engines[0].Stats().Ranks {
				evicted += r.Evictions
			}
			if evicted == 0 {
				t.Fatal("nothing was evicted")
			}
			b.settled()
			for i := range 3 {
				body := []message{{"user", prose(fmt.Sprint("twin ", 5, i), 120)}}
				if r := b.chat(body...); r.matched != r.answer.Usage.Details.Cached {
					t.Errorf("%d tokens matched, the engine says %d", r.matched, r.answer.Usage.Details.Cached)
				}
				b.settled()
			}
		})
	}
}

// feedRow is a feed on the debug page.
type feedRow struct {
	Target string `json:"target"`
	State  string `json:"state"`
	Events int    `json:"events"`
	Cursor struct{ Next int }
}

type indexPage struct {
	Index struct {
		Blocks       int `json:"blocks"`
		HolderBlocks int `json:"holder_blocks"`
		Targets      []struct {
			Target struct {
				Worker string
				Rank   int
			}
			Held [4]int
		}
		Refused map[string]int
	} `json:"index"`
	Feeds []feedRow `json:"feeds"`
}

func indexOf(t testing.TB, admin string) (page indexPage) {
	t.Helper()
	resp, err := http.Get("http://" + admin + "/debug/index")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&page); err != nil {
		t.Fatal(err)
	}
	return page
}

// settled waits until the index has heard all events and holds as many blocks as the engine has cached. The number alone
// says little: a full cache has always as many. The batches of an engine that is polled have other numbers than the
// simulation's, so its feed must have been quiet for 300 ms.
func (b *bed) settled() {
	b.t.Helper()
	events, quiet := -1, time.Now()
	b.until("the index holds what the engine has", func() bool {
		cached, sequences := 0, 0
		for _, e := range b.engines {
			for _, r := range e.Stats().Ranks {
				cached += r.BlocksCached
				sequences += r.Sequence
			}
		}
		page := indexOf(b.t, b.admin)
		held, heard, next := 0, 0, 0
		for _, t := range page.Index.Targets {
			held += t.Held[0]
		}
		for _, f := range page.Feeds {
			heard += f.Events
			next += f.Cursor.Next
		}
		if heard != events {
			events, quiet = heard, time.Now()
		}
		if b.shape.events == nil {
			return held == cached && next == sequences
		}
		return held == cached && time.Since(quiet) > 300*time.Millisecond
	})
}

// An engine whose block size does not fit, or whose blocks are not full, is not indexed,
// with a message in the log; its requests are served all the same.
func TestWrongBlockSizesAreLoud(t *testing.T) {
	for name, tt := range map[string]struct {
		worker string
		size   int
		faults enginesim.Faults
		reason string
	}{
		"another one than configured": {", block_size: 16", 24, enginesim.Faults{}, `reason="wrong_block_size"`},
		"does not fit the index":      {"", 24, enginesim.Faults{}, `reason="refused_block_size_does_not_fit"`},
		"is not what it says":         {"", 16, enginesim.Faults{WrongBlockSize: 32}, `reason="misaligned"`},
	} {
		for _, kind := range []enginesim.EngineKind{enginesim.VLLM, enginesim.SGLang} {
			t.Run(name+" "+string(kind), func(t *testing.T) {
				t.Parallel()
				b := newBed(t, shape{engines: 1, ranks: 1, config: eventsOnly, worker: ", engine: " + string(kind) + tt.worker, model: ", engine: " + string(kind), engine: func(_ int, o *enginesim.Options) {
					o.Engine, o.BlockSize, o.Faults = kind, tt.size, tt.faults
				}})
				messages := []message{{"user", prose("x", 150)}}
				b.chat(messages...)
				b.until("events are refused", func() bool { return b.metric("kvlane_feed_dropped_events_total", tt.reason) > 0 })
				if r := b.chat(messages...); r.matched != 0 {
					t.Errorf("%d tokens matched", r.matched)
				}
				b.until("the log says so", func() bool { return strings.Contains(b.read("kvlane.log"), "feed warning") })
			})
		}
	}
}

// While events are late blocks without an event are not credited; with speculation a prompt
// that was sent counts immediately.
func TestLateEvents(t *testing.T) {
	for _, config := range []string{eventsOnly, ""} {
		b := newBed(t, shape{engines: 1, ranks: 1, config: config, engine: func(_ int, o *enginesim.Options) { o.Faults.EventDelayMS = 20_000 }})
		messages := []message{{"user", prose("late", 150)}}
		b.chat(messages...)
		r := b.chat(messages...)
		if r.answer.Usage.Details.Cached == 0 {
			t.Fatal("the engine cached nothing")
		}
		if credited := r.matched == r.answer.Usage.Details.Cached; credited != (config == "") || !credited && r.matched != 0 {
			t.Errorf("with %q: %d tokens matched, the engine has %d", config, r.matched, r.answer.Usage.Details.Cached)
		}
	}
}

// Events of a removed worker are ignored; when it returns they are read again.
func TestEventsOfARemovedWorker(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 2, replay: true, config: eventsOnly})
	b.stopKvlane(syscall.SIGTERM)
	text := b.read("kvlane.yaml")
	head, tail, _ := strings.Cut(text, "  static:\n")
	list, rest, _ := strings.Cut(tail, "}\n")
	entry := strings.Replace(list, "  - {", "- {", 1) + "}\n"
	b.write("workers.yaml", entry)
	b.write("kvlane.yaml", head+"  file: "+b.file("workers.yaml")+"\n"+rest)
	b.startKvlane()
	b.exact("before")
	b.write("workers.yaml", "[]\n")
	b.until("it is gone", func() bool {
		page := indexOf(t, b.admin)
		return len(page.Index.Targets) == 0 && len(page.Feeds) == 0 && page.Index.Blocks == 0
	})
	body := bytes.NewReader(b.remember(chatBody(message{"user", prose("meanwhile", 150)})))
	resp, err := http.Post(b.engines[0].URL()+"/v1/chat/completions", "application/json", body)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if n := indexOf(t, b.admin).Index.HolderBlocks; n != 0 {
		t.Errorf("%d blocks of a removed worker", n)
	}
	b.write("workers.yaml", entry)
	b.live()
	b.until("it serves", func() bool {
		r, err := b.send("/v1/chat/completions", chatBody(message{"user", "x"}))
		return err == nil && r.status == http.StatusOK
	})
	b.settled()
	b.exact("after")
}

// relay forwards a rank's ZMQ batches over gRPC, like a program next to an engine that
// Kvlane cannot reach.
func (b *bed) relay(ctx context.Context, client kvlanev1.KVEventsClient, e *enginesim.Engine, rank int32) error {
	stream, err := client.Push(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Hello{Hello: &kvlanev1.Hello{Worker: "e0", Engine: "vllm", Rank: &rank}}}); err != nil {
		return err
	}
	sub, err := zmtp.Dial(ctx, e.EventsEndpoint(int(rank)), zmtp.Options{})
	if err != nil {
		return err
	}
	defer sub.Close()
	stop := context.AfterFunc(ctx, func() { _ = sub.Close() })
	defer stop()
	if err := sub.Subscribe(""); err != nil {
		return err
	}
	for {
		m, err := sub.Recv(time.Time{})
		if err != nil {
			return err
		}
		seq := uint64(0)
		for _, c := range m.Frames[len(m.Frames)-2] {
			seq = seq<<8 | uint64(c)
		}
		err = stream.Send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: seq, Content: &kvlanev1.Batch_Raw{Raw: m.Frames[len(m.Frames)-1]}}}})
		if err != nil {
			return err
		}
	}
}

// Events that relays push arrive on the port of ext_proc.
func TestPushedEvents(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 2, config: eventsOnly, events: func(*enginesim.Engine) string { return "push:" }})
	if n := b.metric("kvlane_feed_state", `state="stale"`); n != 2 {
		t.Errorf("%v targets are stale before a relay has come", n)
	}
	conn, err := grpc.NewClient("unix:"+b.file("k.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var relays sync.WaitGroup
	for rank := range int32(2) {
		relays.Go(func() { _ = b.relay(ctx, kvlanev1.NewKVEventsClient(conn), b.engines[0], rank) })
	}
	b.live()
	for rank := range 2 {
		b.until("the relay listens", func() bool { return b.engines[0].Subscribers(rank) == 1 })
	}
	for i := range 4 {
		b.exact(fmt.Sprint("pushed ", i))
	}
	cancel()
	relays.Wait()
	b.until("without its relays the worker is stale", func() bool { return b.metric("kvlane_feed_state", `state="stale"`) == 2 })
	stranger, err := kvlanev1.NewKVEventsClient(conn).Push(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stranger.Send(&kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Hello{Hello: &kvlanev1.Hello{Worker: "nobody", Engine: "vllm"}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stranger.Recv(); err == nil || !strings.Contains(err.Error(), "no worker") {
		t.Errorf("a stranger pushed: %v", err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
}

// replica runs another `kvlane serve` on the bed's configuration.
func (b *bed) replica(name, listen string, peer string) (admin string) {
	b.t.Helper()
	admin = freeAddress(b.t)
	b.write(name+".yaml", b.read("kvlane.yaml")+fmt.Sprintf("index: {key: shared, peers: {addresses: [%q], timeout: 5s}}\n", peer))
	log, err := os.Create(b.file(name + ".log"))
	if err != nil {
		b.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(kvlaneBinary, "serve", "--config", b.file(name+".yaml"), "--listen", listen, "--admin", admin)
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if b.t.Failed() {
			b.t.Logf("%s.log:\n%s", name, b.read(name+".log"))
		}
	})
	b.until(name+" is ready", func() bool {
		resp, err := http.Get("http://" + admin + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return admin
}

// A starting replica copies the index from a running one, over gRPC, before it is ready,
// and continues with the engines' events; without a peer it starts empty.
func TestAReplicaWarmsFromAPeer(t *testing.T) {
	// The engines keep so few batches that a replica cannot learn the whole index from
	// them.
	b := newBed(t, shape{engines: 2, ranks: 2, replay: true, engine: func(_ int, o *enginesim.Options) { o.ReplaySteps = 8 }})
	first, second := freeAddress(t), freeAddress(t)
	a := b.replica("first", first, second)
	for i := range 24 {
		b.chat(message{"user", prose(fmt.Sprint("early ", i), 200)})
	}
	held := func(admin string) map[string]int {
		out := map[string]int{}
		for _, t := range indexOf(b.t, admin).Index.Targets {
			out[fmt.Sprint(t.Target)] = t.Held[0]
		}
		return out
	}
	same := func(x, y map[string]int) bool { return fmt.Sprint(x) == fmt.Sprint(y) }
	b.settled()
	b.until("the first replica has all", func() bool { return same(held(a), held(b.admin)) })
	warm := b.replica("second", second, first)
	b.until("the second has what the first has", func() bool { return same(held(warm), held(a)) })
	cold := b.replica("third", freeAddress(t), freeAddress(t))
	if same(held(cold), held(a)) {
		t.Error("the engines' replays would have been enough: the test shows nothing")
	}
	for name, want := range map[string]string{"second.log": "index taken from a peer", "third.log": "the index starts empty"} {
		if !strings.Contains(b.read(name), want) {
			t.Errorf("%s does not say %q", name, want)
		}
	}
	for i := range 8 {
		b.chat(message{"user", prose(fmt.Sprint("later ", i), 200)})
	}
	b.settled()
	b.until("all replicas follow", func() bool { return same(held(a), held(b.admin)) && same(held(warm), held(a)) })
}

// The usage in answers reveals what the engine had cached, streamed or not.
func TestObservedCachedTokens(t *testing.T) {
	for name, s := range dialects() {
		if name != "vllm map" && name != "sglang map" && name != "tensorrt-llm by zmq" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s.envoy = ", response_body: STREAMED"
			b := newBed(t, s)
			body := func(stream string) []byte {
				return []byte(`{"model":"demo","max_tokens":4,` + stream + `"messages":[{"role":"user","content":"` + prose("observed", 150) + `"}]}`)
			}
			b.post("/v1/chat/completions", body(""))
			b.settled()
			var cached, predicted float64
			for _, stream := range []string{"", `"stream":true,"stream_options":{"include_usage":true},`} {
				before := b.metric("kvlane_observed_cached_tokens_total", `worker="e0"`)
				r := b.post("/v1/chat/completions", body(stream))
				if r.matched == 0 {
					t.Fatalf("nothing matched: %s", r.body)
				}
				predicted += float64(r.matched)
				b.until("the answer's usage is counted", func() bool { return b.metric("kvlane_observed_cached_tokens_total", `worker="e0"`) > before })
				cached = b.metric("kvlane_observed_cached_tokens_total", `worker="e0"`)
			}
			if got := b.metric("kvlane_predicted_cached_tokens_total", `worker="e0"`); got != predicted || cached != predicted {
				t.Errorf("predicted %v (sent %v), observed %v", got, predicted, cached)
			}
			b.faults(enginesim.Faults{CachedTokensLie: -16})
			b.post("/v1/chat/completions", body(""))
			b.until("a difference shows", func() bool {
				return b.metric("kvlane_predicted_cached_tokens_total")-b.metric("kvlane_observed_cached_tokens_total") == 16
			})
		})
	}
}

// When many requests run concurrently, all events may arrive before the first of them ends:
// the feed must not count as silent.
func TestABurstIsNoSilence(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1})
	const burst = 40 // more than make a feed silent
	b.faults(enginesim.Faults{HoldAfterTokens: 1})
	before := b.metric("kvlane_feed_batches_total")
	var all sync.WaitGroup
	for i := range burst {
		all.Go(func() {
			body := fmt.Appendf(nil, `{"model":"demo","prompt":%q,"max_tokens":2,"stream":true}`, prose(fmt.Sprint("burst ", i), 60))
			if r, err := b.send("/v1/completions", body); err != nil || r.status != http.StatusOK {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	b.until("every answer is held", func() bool {
		return len(b.engines[0].Stats().Requests) == burst && b.metric("kvlane_extproc_streams") >= burst
	})
	quiet := 0
	b.until("the last events came", func() bool {
		now := b.metric("kvlane_feed_batches_total")
		if quiet++; now != before || now == 0 {
			before, quiet = now, 0
		}
		return quiet == 50
	})
	b.faults(enginesim.Faults{})
	all.Wait()
	if n := b.metric("kvlane_feed_silences_total"); n != 0 {
		t.Errorf("%v silences", n)
	}
}

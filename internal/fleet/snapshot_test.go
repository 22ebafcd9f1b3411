package fleet

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"google.golang.org/grpc"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/peers"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

var simTokenizer = sync.OnceValues(func() (*enginesim.Tokenizer, error) {
	return enginesim.LoadTokenizer(os.DirFS("../tokens/models/qwen3"))
})

// rig is an engine of two ranks and the replicas that follow it.
type rig struct {
	t      *testing.T
	engine *enginesim.Engine
	worker workers.Worker
	sent   [][]uint32
	client http.Client
}

func newRig(t *testing.T, change func(*enginesim.Options)) *rig {
	t.Helper()
	tok, err := simTokenizer()
	if err != nil {
		t.Fatal(err)
	}
	port, err := enginesim.FreePorts(4)
	if err != nil {
		t.Fatal(err)
	}
	o := enginesim.Options{
		Model: "demo", Ranks: 2, Tokenizer: tok, BlockSize: 16, Blocks: 120,
		EventsEndpoint: fmt.Sprintf("tcp://127.0.0.1:%d", port), ReplayEndpoint: fmt.Sprintf("tcp://127.0.0.1:%d", port+2),
	}
	if change != nil {
		change(&o)
	}
	e, err := enginesim.Start(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, engine: e, worker: workers.Worker{Ready: true, Generation: 1, Worker: config.Worker{
		Name: "w", Address: e.Addr(), Engine: "vllm", Role: "both", Ranks: 2, RankBy: "header", Speed: 1, Models: []string{"demo"},
		Events: config.Events{Endpoint: o.EventsEndpoint, Replay: o.ReplayEndpoint},
	}}}
	t.Cleanup(e.Close)
	t.Cleanup(r.client.CloseIdleConnections)
	return r
}

// idsOf makes token ids; some share the first few blocks with others.
func idsOf(n int) []uint32 {
	ids := make([]uint32, 40+n%5*32)
	for i := range ids {
		ids[i] = uint32(1000 + i)
		if i >= 32 {
			ids[i] = uint32(1000 + (n*131+i*7)%20000)
		}
	}
	return ids
}

// send plays request n on a rank of the engine, which evicts because it has few blocks.
func (r *rig) send(n int) {
	r.t.Helper()
	ids := idsOf(n)
	r.sent = append(r.sent, ids)
	text := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(ids)), ","), "[]")
	req, err := http.NewRequest(http.MethodPost, r.engine.URL()+"/v1/completions", strings.NewReader(`{"model":"demo","max_tokens":20,"prompt":[`+text+`]}`))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(n%2))
	resp, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		r.t.Fatalf("status %d, %v", resp.StatusCode, err)
	}
}

// view is a replica's overlap for every prompt, and the sizes of its index.
func (r *rig) view(d *Fleet) map[string]any {
	out := map[string]any{}
	for _, t := range d.index.Stats().Targets {
		out["held "+t.Target.String()] = fmt.Sprint(t.Held, t.Aliases, t.Pages, t.BlockSize, t.Model)
	}
	var m kvindex.Matches
	for n, ids := range r.sent {
		d.index.Match(d.index.Hasher().AppendHashes(nil, d.index.Hasher().Seed("demo", "", ""), ids, 16), &m)
		var lines []string
		for _, h := range m.Holders {
			if p := d.View().Endpoint(h.Slot); p != nil {
				lines = append(lines, fmt.Sprint(p.Target, h.Blocks))
			}
		}
		slices.Sort(lines)
		out[fmt.Sprint("prompt ", n)] = lines
	}
	return out
}

// cursors are the positions of a replica's feeds.
func cursors(d *Fleet) map[string]feed.Cursor {
	out := map[string]feed.Cursor{}
	for _, s := range d.FeedStatus() {
		for _, t := range s.Targets {
			if t.State != feed.Live {
				return nil
			}
			out[t.Target.String()] = t.Cursor
		}
	}
	return out
}

// settle waits until the replicas have applied all that the engine published. A feed that
// has just subscribed may miss batches published before the engine noticed; the next batch
// reveals the gap, so one more is published until all are equal.
func (r *rig) settle(list ...*Fleet) {
	r.t.Helper()
	same := func() bool {
		want := cursors(list[0])
		for i, rank := range r.engine.Stats().Ranks {
			if want["w/"+strconv.Itoa(i)].Next != uint64(rank.Sequence) {
				return false
			}
		}
		for _, d := range list[1:] {
			if !reflect.DeepEqual(cursors(d), want) {
				return false
			}
		}
		return true
	}
	for round := 0; ; round++ {
		if round == 20 {
			for i, d := range list {
				r.t.Logf("replica %d: %+v", i, d.FeedStatus())
			}
			r.t.Fatal("the replicas' feeds are not at one place")
		}
		for rank := range 2 {
			r.send(1_000_000 + 2*len(r.sent) + rank)
		}
		for range 100 {
			if same() {
				return
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
}

func (r *rig) equal(what string, a, b *Fleet) {
	r.t.Helper()
	va, vb := r.view(a), r.view(b)
	for k := range va {
		if !reflect.DeepEqual(va[k], vb[k]) {
			r.t.Errorf("%s: %s is %v and %v", what, k, va[k], vb[k])
		}
	}
	if len(va) != len(vb) {
		r.t.Errorf("%s: %d and %d lines", what, len(va), len(vb))
	}
}

const sameKey = "index: {key: shared}\n"

// serveIndex serves a replica's index over gRPC and returns how to fetch it.
func serveIndex(t *testing.T, d *Fleet) *peers.Want {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := peers.NewServer(peers.Content{Secret: d.CopySecret(), BlockSize: 16, Dump: d.DumpIndex}, zerolog.Nop())
	s.SetReady()
	g := grpc.NewServer()
	kvlanev1.RegisterSnapshotsServer(g, s)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	t.Cleanup(func() { g.Stop(); <-done })
	return &peers.Want{
		Peers:  config.Peers{Addresses: []string{l.Addr().String()}, Timeout: config.Duration(20 * time.Second)},
		Secret: d.CopySecret(), BlockSize: 16, MaxBytes: 1 << 30, Log: zerolog.Nop(),
	}
}

// bare is a replica without workers.
func bare(t *testing.T) *Fleet {
	t.Helper()
	return newFleet(t, sameKey)
}

// A replica warmed by a peer knows what the peer knows before it has seen an event, stays
// exact with the events that follow, and starts empty if the engine was restarted in
// between.
func TestAReplicaIsWarmedByAPeer(t *testing.T) {
	r := newRig(t, nil)
	a := newFleet(t, sameKey, r.worker)
	for n := range 60 {
		r.send(n)
	}
	r.settle(a)
	want := serveIndex(t, a)

	b := bare(t)
	if err := peers.Fetch(t.Context(), want, b.LoadIndex); err != nil {
		t.Fatal(err)
	}
	// The engine does not replay: B's knowledge can only come from A.
	if err := r.engine.SetFaults(enginesim.Faults{NoReplay: true}); err != nil {
		t.Fatal(err)
	}
	b.SetWorkers([]workers.Worker{r.worker})
	r.equal("at once", a, b)
	if err := r.engine.SetFaults(enginesim.Faults{}); err != nil {
		t.Fatal(err)
	}
	for n := range 60 {
		r.send(1000 + n)
	}
	r.settle(a, b)
	r.equal("after further events", a, b)
	for _, s := range b.FeedStatus() {
		if s.Counts.Clears != 0 || s.Counts.Lost != 0 {
			t.Errorf("a feed did not go on from the copy: %+v", s.Counts)
		}
	}

	c := bare(t)
	if err := peers.Fetch(t.Context(), want, c.LoadIndex); err != nil {
		t.Fatal(err)
	}
	r.engine.Restart()
	for n := range 20 {
		r.send(2000 + n)
	}
	c.SetWorkers([]workers.Worker{r.worker})
	r.settle(a, b, c)
	r.equal("after a restart during the transfer", a, c)
	r.equal("the replica that was there before", a, b)
	for _, s := range c.FeedStatus() {
		if s.Counts.Restarts != 1 {
			t.Errorf("the restart was not noticed: %+v", s.Counts)
		}
	}
}

// Copies that are made while events arrive are each exact.
func TestCopiesUnderLoad(t *testing.T) {
	r := newRig(t, nil)
	a := newFleet(t, sameKey, r.worker)
	stop := make(chan struct{})
	var load sync.WaitGroup
	load.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
				r.send(n)
			}
		}
	})
	replicas := []*Fleet{a}
	for range 6 {
		time.Sleep(20 * time.Millisecond)
		var copied bytes.Buffer
		if err := a.DumpIndex(&copied); err != nil {
			t.Fatal(err)
		}
		b := bare(t)
		if err := b.LoadIndex(&copied); err != nil {
			t.Fatal(err)
		}
		b.SetWorkers([]workers.Worker{r.worker})
		replicas = append(replicas, b)
	}
	close(stop)
	load.Wait()
	r.settle(replicas...)
	for i, b := range replicas[1:] {
		r.equal(fmt.Sprint("copy ", i), a, b)
		for _, s := range b.FeedStatus() {
			if s.Counts.Lost != 0 || s.Counts.Restarts != 0 {
				t.Errorf("copy %d: %+v", i, s.Counts)
			}
		}
	}
}

// Parts of a copy that cannot be joined to the events that follow are not loaded.
func TestWhatACopyIsNotGoodFor(t *testing.T) {
	r := newRig(t, nil)
	a := newFleet(t, sameKey, r.worker)
	for n := range 10 {
		r.send(n)
	}
	r.settle(a)
	var copied bytes.Buffer
	if err := a.DumpIndex(&copied); err != nil {
		t.Fatal(err)
	}
	held := func(d *Fleet) (n int64) { return d.index.Stats().HolderBlocks }
	if held(a) == 0 {
		t.Fatal("nothing to copy")
	}
	for name, change := range map[string]func(*workers.Worker){
		"no events":         func(w *workers.Worker) { w.Events = config.Events{} },
		"no replay":         func(w *workers.Worker) { w.Events.Replay = ""; w.Events.Endpoint = "tcp://127.0.0.1:1" },
		"another engine":    func(w *workers.Worker) { w.Engine = "trtllm"; w.Events.Endpoint = "tcp://127.0.0.1:1" },
		"another model":     func(w *workers.Worker) { w.Models = []string{"other"}; w.Events.Endpoint = "tcp://127.0.0.1:1" },
		"other block sizes": func(w *workers.Worker) { w.BlockSize = 32; w.Events.Endpoint = "tcp://127.0.0.1:1" },
		"another worker":    func(w *workers.Worker) { w.Name = "x"; w.Events.Endpoint = "tcp://127.0.0.1:1" },
	} {
		b := bare(t)
		if err := b.LoadIndex(bytes.NewReader(copied.Bytes())); err != nil {
			t.Fatal(err)
		}
		w := r.worker
		change(&w)
		b.SetWorkers([]workers.Worker{w})
		b.ForgetUnclaimed()
		if n := held(b); n != 0 || len(b.index.Stats().Targets) != 2 {
			t.Errorf("%s: %d blocks are held, targets %+v", name, n, b.index.Stats().Targets)
		}
	}
	// From a copy with a cursor for one target only that one is loaded.
	b := bare(t)
	var partial bytes.Buffer
	if err := a.index.Dump(&partial, func(s kvindex.Slot) []byte {
		if s == 0 {
			return appendCursor(nil, feed.Cursor{Next: 3, Sum: 1})
		}
		return []byte("not a cursor")
	}); err != nil {
		t.Fatal(err)
	}
	if err := b.LoadIndex(&partial); err != nil {
		t.Fatal(err)
	}
	if st := b.index.Stats(); len(st.Targets) != 1 || held(b) == 0 {
		t.Errorf("targets %+v", st.Targets)
	}
	other := newFleet(t, "index: {key: other}\n")
	if err := other.LoadIndex(bytes.NewReader(copied.Bytes())); err == nil || len(other.index.Stats().Targets) != 0 {
		t.Errorf("a copy with another key was taken: %v", err)
	}
	if bytes.Equal(other.CopySecret(), a.CopySecret()) {
		t.Error("two keys have one proof")
	}
}

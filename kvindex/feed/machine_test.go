package feed_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"golang.org/x/sync/semaphore"
	"pgregory.net/rapid"

	"github.com/kvlane/kvlane/kvindex/feed"
)

// payloadOf returns the batch of a number as one incarnation of an engine made it.
func payloadOf(engine string, seq uint64) []byte { return fmt.Appendf(nil, "%s%d", engine, seq) }

func showActions(actions []feed.Action) string {
	var s strings.Builder
	for _, a := range actions {
		switch a.Kind {
		case feed.Apply:
			fmt.Fprintf(&s, "apply %d (%s)\n", a.Seq, a.Payload)
		case feed.Clear:
			fmt.Fprintf(&s, "clear: %s\n", a.Reason)
		case feed.Enter:
			fmt.Fprintf(&s, "%s: %s\n", a.State, a.Reason)
		case feed.Replay:
			fmt.Fprintf(&s, "replay from %d", a.Seq)
			if a.Attempt > 0 {
				fmt.Fprintf(&s, ", attempt %d", a.Attempt)
			}
			s.WriteByte('\n')
		case feed.Warn:
			fmt.Fprintf(&s, "warn: %s\n", a.Reason)
		}
	}
	if s.Len() == 0 {
		return "nothing\n"
	}
	return s.String()
}

// Stories of a feed: the input, and under ---- the machine's actions.
//
//	new [replay] [polled] [max-pending=N] [silent-after=N] [resume=N]
//	up | down | finished | counts
//	live N... [engine=b]      batches over the subscription
//	replayed N... [engine=b]  batches of the running replay
//	late N...                 batches of the replay before the running one
//	end | fail                the replay's end mark, or its failure
func TestMachineStories(t *testing.T) {
	datadriven.Walk(t, "testdata/machine", func(t *testing.T, path string) {
		var m *feed.Machine
		var epoch uint64
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			do := func(actions []feed.Action) {
				for _, a := range actions {
					if a.Kind == feed.Replay {
						epoch = a.Epoch
					}
				}
				if s := showActions(actions); s != "nothing\n" {
					out.WriteString(s)
				}
			}
			engine := "a"
			d.MaybeScanArgs(t, "engine", &engine)
			each := func(f func(seq uint64) []feed.Action) {
				for _, a := range d.CmdArgs {
					if len(a.Vals) > 0 {
						continue
					}
					var n uint64
					if _, err := fmt.Sscan(a.Key, &n); err != nil {
						d.Fatalf(t, "%s: %v", a.Key, err)
					}
					do(f(n))
				}
			}
			switch d.Cmd {
			case "new":
				cfg := feed.MachineConfig{Replay: d.HasArg("replay"), Polled: d.HasArg("polled")}
				d.MaybeScanArgs(t, "max-pending", &cfg.MaxPending)
				d.MaybeScanArgs(t, "silent-after", &cfg.SilentAfter)
				var resume uint64
				if d.MaybeScanArgs(t, "resume", &resume); resume > 0 {
					former := feed.NewMachine(feed.MachineConfig{})
					former.Up()
					former.Live(resume-1, payloadOf("a", resume-1))
					c := former.Cursor()
					cfg.Resume = &c
				}
				m = feed.NewMachine(cfg)
				return m.State().String() + "\n"
			case "up":
				do(m.Up())
			case "down":
				do(m.Down())
			case "finished":
				do(m.Finished())
			case "live":
				each(func(n uint64) []feed.Action { return m.Live(n, payloadOf(engine, n)) })
			case "replayed":
				each(func(n uint64) []feed.Action { return m.Replayed(epoch, n, payloadOf(engine, n)) })
			case "late":
				each(func(n uint64) []feed.Action { return m.Replayed(epoch-1, n, payloadOf(engine, n)) })
			case "end":
				do(m.ReplayEnd(epoch, true))
			case "fail":
				do(m.ReplayEnd(epoch, false))
			case "counts":
				return strings.ReplaceAll(strings.Trim(fmt.Sprintf("%+v", m.Counts()), "{}"), " ", "\n") + "\n"
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			if out.Len() == 0 {
				return "nothing\n"
			}
			return out.String()
		})
	})
}

// engineModel is an engine that publishes and keeps a bounded history, and a network that may
// lose what it publishes.
type engineModel struct {
	name    string // of its incarnation
	next    uint64
	memory  int
	history []uint64
}

func (e *engineModel) publish() uint64 {
	n := e.next
	e.next++
	if e.history = append(e.history, n); len(e.history) > e.memory {
		e.history = e.history[1:]
	}
	return n
}

// Whatever is lost, duplicated, late or restarted: between two clears, the applied batches are
// consecutive and of one engine; and once the network is stable and replays work, everything
// that the engine remembers and has published since the last clear has been applied.
func TestMachineKeepsItsLaw(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		replay := rapid.Bool().Draw(t, "replay")
		room := rapid.SampledFrom([]int64{0, 150, 1 << 20}).Draw(t, "room")
		own, shared := semaphore.NewWeighted(1<<20), semaphore.NewWeighted(room)
		m := feed.NewMachine(feed.MachineConfig{Replay: replay, MaxPending: rapid.SampledFrom([]int{100, 1 << 20}).Draw(t, "max pending"), SilentAfter: 3,
			Pending: []*semaphore.Weighted{own, shared}})
		var others int64 // bytes of shared that other feeds have
		incarnation := 0
		engine := &engineModel{name: "e0.", memory: rapid.IntRange(1, 12).Draw(t, "memory")}
		type job struct {
			epoch   uint64
			engine  *engineModel
			batches []uint64
			fail    bool
		}
		var running *job
		var want feed.Action // the last Replay
		var applied []string // since the last clear
		connected := false
		var queue []uint64 // published and not yet delivered
		do := func(actions []feed.Action) {
			for _, a := range actions {
				switch a.Kind {
				case feed.Clear:
					applied = nil
				case feed.Replay:
					want, running = a, nil
				case feed.Apply:
					p := string(a.Payload)
					if n := len(applied); n > 0 {
						var e1, e2 string
						var s1, s2 uint64
						e1, s1 = cut(applied[n-1])
						e2, s2 = cut(p)
						if e1 != e2 || s2 != s1+1 {
							t.Fatalf("got %s applied after %s", p, applied[n-1])
						}
					}
					applied = append(applied, p)
				}
			}
		}
		deliver := func(n uint64) { do(m.Live(n, payloadOf(engine.name, n))) }
		step := func(op string, fail bool) {
			switch op {
			case "publish":
				n := engine.publish()
				if connected {
					queue = append(queue, n)
				}
			case "deliver":
				if len(queue) > 0 && (!m.Full() || fail) {
					n := queue[0]
					queue = queue[1:]
					deliver(n)
				}
			case "lose":
				if len(queue) > 0 {
					queue = queue[1:]
				}
			case "double":
				if len(queue) > 0 {
					deliver(queue[0])
				}
			case "up":
				if !connected {
					connected = true
					do(m.Up())
				}
			case "down":
				if connected {
					connected, queue, running = false, nil, nil
					do(m.Down())
				}
			case "restart":
				incarnation++
				engine = &engineModel{name: fmt.Sprintf("e%d.", incarnation), memory: engine.memory}
				if connected {
					connected, queue, running = false, nil, nil
					do(m.Down())
				}
			case "finish":
				do(m.Finished())
			case "others":
				if shared.TryAcquire(70) {
					others += 70
				} else {
					shared.Release(others)
					others = 0
				}
			case "replay":
				if want.Kind != feed.Replay || !connected {
					return
				}
				if running == nil {
					running = &job{epoch: want.Epoch, engine: engine, fail: fail}
					for _, n := range engine.history {
						if n >= want.Seq {
							running.batches = append(running.batches, n)
						}
					}
					return
				}
				j := running
				if len(j.batches) > 0 && !j.fail {
					n := j.batches[0]
					j.batches = j.batches[1:]
					do(m.Replayed(j.epoch, n, payloadOf(j.engine.name, n)))
					return
				}
				running, want = nil, feed.Action{}
				do(m.ReplayEnd(j.epoch, !j.fail))
			}
		}
		ops := []string{"publish", "publish", "deliver", "deliver", "deliver", "lose", "double", "up", "down", "restart", "replay", "replay", "replay", "finish", "others"}
		for range rapid.IntRange(0, 120).Draw(t, "steps") {
			step(rapid.SampledFrom(ops).Draw(t, "op"), rapid.IntRange(0, 5).Draw(t, "replay fails") == 0)
		}
		// Stabilise: connected, replays work, two more batches arrive.
		step("up", false)
		running = nil
		for range 2 {
			for range 200 {
				step("deliver", false)
				step("replay", false)
			}
			step("publish", false)
		}
		for range 200 {
			step("deliver", false)
			step("replay", false)
		}
		if m.State() != feed.Live {
			t.Fatalf("got state %s at the end, want live", m.State())
		}
		last := string(payloadOf(engine.name, engine.next-1))
		if n := m.Counts(); n.Applied < uint64(len(applied)) {
			t.Fatalf("%+v, but %d applied", n, len(applied))
		}
		if len(applied) == 0 || applied[len(applied)-1] != last {
			t.Fatalf("got %v applied, want %s last", applied, last)
		}
		if e, _ := cut(applied[0]); e != engine.name {
			t.Fatalf("got batches of %s, want those of %s", e, engine.name)
		}
		if c := m.Cursor(); c.Next != engine.next {
			t.Fatalf("got cursor %d, engine at %d", c.Next, engine.next)
		}
		if m.Down(); !own.TryAcquire(1<<20) || !shared.TryAcquire(room-others) {
			t.Fatal("got room that stays taken after the connection")
		}
	})
}

// Ranks that all miss a batch, whose replays run two at a time, and which share room for one batch each or none, while their
// engines go on publishing: all catch up, and nothing is lost.
func TestRanksWithoutRoomCatchUp(t *testing.T) {
	const ranks, every, lasts = 64, 8, 3      // the steps between two batches, and those of a replay
	for _, batches := range []int{0, ranks} { // that there is room for
		shared := semaphore.NewWeighted(int64(batches * 80))
		type rank struct {
			*feed.Machine
			next    uint64 // of its engine
			applied uint64
			want    feed.Action // the replay that it asked for last
			until   int         // when its replay ends, if it runs
			has     uint64      // and the batch at which its engine ends it
		}
		var all []*rank
		var queue []*rank
		overflows, live := uint64(0), 0
		for range ranks {
			all = append(all, &rank{Machine: feed.NewMachine(feed.MachineConfig{Replay: true, Pending: []*semaphore.Weighted{shared}})})
		}
		do := func(r *rank, actions []feed.Action) {
			for _, a := range actions {
				switch a.Kind {
				case feed.Apply:
					if a.Seq != r.applied || string(a.Payload) != string(payloadOf("a", a.Seq)) {
						t.Fatalf("got %d applied (%s), want %d", a.Seq, a.Payload, r.applied)
					}
					r.applied++
				case feed.Clear:
					t.Fatal("got a clear")
				case feed.Replay:
					r.want = a
					queue = append(queue, r)
				}
			}
		}
		for _, r := range all {
			do(r, r.Up())
			r.next++ // lost
		}
		running := map[*rank]bool{}
		step := 0
		for ; live < ranks && step < 20_000; step++ {
			for len(running) < 2 && len(queue) > 0 {
				r := queue[0]
				queue, running[r] = queue[1:], true
				r.until, r.has = step+lasts, r.next
			}
			live = 0
			for i, r := range all {
				if (step+i)%every == 0 {
					r.next++
					do(r, r.Live(r.next-1, payloadOf("a", r.next-1)))
				}
				if running[r] && r.until == step {
					delete(running, r)
					for n := r.want.Seq; n < r.has; n++ {
						do(r, r.Replayed(r.want.Epoch, n, payloadOf("a", n)))
					}
					do(r, r.ReplayEnd(r.want.Epoch, true))
				}
				if r.State() == feed.Live {
					live++
				}
			}
		}
		for _, r := range all {
			overflows += r.Counts().Overflows
			if c := r.Counts(); r.State() != feed.Live || r.applied != r.next || c.Lost > 0 || c.Clears > 0 {
				t.Fatalf("room for %d batches, step %d: got %s, %d of %d batches, %+v", batches, step, r.State(), r.applied, r.next, c)
			}
		}
		if overflows < ranks || !shared.TryAcquire(int64(batches*80)) {
			t.Errorf("room for %d batches: got %d overflows, or room that stays taken", batches, overflows)
		}
		t.Logf("room for %d batches: live after %d steps, %d overflows", batches, step, overflows)
	}
}

func cut(p string) (engine string, seq uint64) {
	i := strings.IndexByte(p, '.')
	_, _ = fmt.Sscan(p[i+1:], &seq)
	return p[:i+1], seq
}

// A waiting payload must be a copy, because the reader's buffer may change.
func TestWaitingPayloadsAreCopies(t *testing.T) {
	m := feed.NewMachine(feed.MachineConfig{Replay: true})
	a := m.Up()
	epoch := a[len(a)-1].Epoch
	buf := []byte("first")
	m.Live(0, buf)
	copy(buf, "XXXXX")
	for _, a := range m.ReplayEnd(epoch, true) {
		if a.Kind == feed.Apply && !bytes.Equal(a.Payload, []byte("first")) {
			t.Fatalf("got %q applied", a.Payload)
		}
	}
	if c := m.Counts(); c.Applied != 1 {
		t.Fatalf("%+v", c)
	}
}

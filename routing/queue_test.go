package routing

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/kvlane/kvlane/kvindex"
	"pgregory.net/rapid"
)

// naiveQueue is the queue's rules over a plain list.
type naiveQueue struct {
	bounds  Bounds
	bands   map[int]Bounds
	list    []*Waiter
	served  map[string]float64 // by band and tenant
	clock   map[int]float64
	weights map[string]float64
}

func (n *naiveQueue) name(w *Waiter) string { return fmt.Sprint(w.Priority, "/", w.Tenant) }

// sum counts the waiters that f accepts, and their bytes.
func (n *naiveQueue) sum(f func(w *Waiter) bool) (requests int, bytes int64) {
	for _, w := range n.list {
		if f(w) {
			requests++
			bytes += w.Bytes
		}
	}
	return requests, bytes
}

func (n *naiveQueue) drop(id uint64) {
	n.list = slices.DeleteFunc(n.list, func(w *Waiter) bool { return w.ID == id })
	for p := range n.clock {
		if left, _ := n.sum(func(w *Waiter) bool { return w.Priority == p }); left == 0 {
			delete(n.clock, p)
			for name := range n.served {
				if strings.HasPrefix(name, fmt.Sprint(p, "/")) {
					delete(n.served, name)
				}
			}
		}
	}
}

// push returns whom it sheds for w.
func (n *naiveQueue) push(w Waiter) (shed []uint64, ok bool) {
	inBand := func(o *Waiter) bool { return o.Priority == w.Priority }
	own, bounded := n.bands[w.Priority]
	fits := func(b Bounds, requests int, bytes int64) bool {
		return requests < b.Requests && (b.Bytes == 0 || bytes+w.Bytes <= b.Bytes)
	}
	if !fits(n.bounds, 0, 0) || bounded && !fits(own, 0, 0) {
		return nil, false
	}
	list, served, clock := slices.Clone(n.list), maps.Clone(n.served), maps.Clone(n.clock)
	for {
		requests, bytes := n.sum(func(*Waiter) bool { return true })
		bandRequests, bandBytes := n.sum(inBand)
		full := !fits(n.bounds, requests, bytes)
		if !full && (!bounded || fits(own, bandRequests, bandBytes)) {
			break
		}
		priority := w.Priority
		for _, o := range n.list {
			if full && o.Priority < priority {
				priority = o.Priority
			}
		}
		share := func(tenant string, requests int, bytes int64) float64 {
			r, b := n.sum(func(o *Waiter) bool { return o.Priority == priority && o.Tenant == tenant })
			return max(float64(r+requests)/float64(max(n.bounds.Requests, 1)), float64(b+bytes)/float64(max(n.bounds.Bytes, 1))) / cmp.Or(n.weights[tenant], 1)
		}
		most, least := "", math.Inf(-1)
		if priority == w.Priority {
			least = share(w.Tenant, 1, w.Bytes)
		}
		tenants := map[string]bool{}
		for _, o := range n.list {
			if o.Priority == priority {
				tenants[o.Tenant] = true
			}
		}
		for tenant := range tenants {
			if s := share(tenant, 0, 0); s > least || s == least && most != "" && tenant > most {
				most, least = tenant, s
			}
		}
		if most == "" {
			n.list, n.served, n.clock = list, served, clock
			return nil, false
		}
		victim := uint64(0)
		for _, o := range n.list {
			if o.Priority == priority && o.Tenant == most {
				victim = max(victim, o.ID)
			}
		}
		shed = append(shed, victim)
		n.drop(victim)
	}
	if n.clock[w.Priority] == 0 {
		n.clock[w.Priority] = 0 // the band exists
	}
	if r, _ := n.sum(func(o *Waiter) bool { return n.name(o) == n.name(&w) }); r == 0 {
		n.served[n.name(&w)] = max(n.served[n.name(&w)], n.clock[w.Priority])
	}
	n.list = append(n.list, &w)
	return shed, true
}

// next is the waiter that is offered a place, nil if all lanes are blocked.
func (n *naiveQueue) next(blocked map[Lane]bool, skipped map[uint64]bool) *Waiter {
	var best *Waiter
	for _, w := range n.list {
		key := func(w *Waiter) int64 { return w.Cost + int64(w.Since/(500*time.Microsecond)) }
		if !blocked[w.Lane] && !skipped[w.ID] && (best == nil || cmp.Or(cmp.Compare(best.Priority, w.Priority), cmp.Compare(n.served[n.name(w)], n.served[n.name(best)]),
			cmp.Compare(key(w), key(best)), cmp.Compare(w.ID, best.ID)) < 0) {
			best = w
		}
	}
	return best
}

// TestQueue compares the queue with its rules: order, bounds, and that nothing is left.
func TestQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := &naiveQueue{served: map[string]float64{}, clock: map[int]float64{}, weights: map[string]float64{"a": 2},
			bounds: Bounds{rapid.IntRange(0, 8).Draw(t, "max"), int64(rapid.SampledFrom([]int{0, 50}).Draw(t, "bytes"))}, bands: map[int]Bounds{}}
		if rapid.Bool().Draw(t, "bounded") {
			n.bands[-1] = Bounds{Requests: rapid.IntRange(0, 4).Draw(t, "bandMax")}
		}
		q := Queue{Bounds: n.bounds, Bands: n.bands}
		drawLane := func() Lane {
			if slot := rapid.IntRange(0, 3).Draw(t, "lane"); slot > 0 {
				return Lane{Slot: kvindex.Slot(slot)}
			}
			return Lane{Class: "m", Slot: NoSlot}
		}
		for i := range rapid.IntRange(1, 60).Draw(t, "ops") {
			switch rapid.IntRange(0, 5).Draw(t, "op") {
			default:
				w := Waiter{ID: uint64(i + 1), Lane: drawLane(), Priority: rapid.IntRange(-2, 1).Draw(t, "priority"), Since: time.Duration(i) * time.Millisecond,
					Tenant: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant"), Cost: int64(rapid.IntRange(0, 20).Draw(t, "cost")),
					Bytes: int64(rapid.IntRange(0, 20).Draw(t, "size")), Tokens: int64(rapid.IntRange(0, 50).Draw(t, "tokens"))}
				w.Weight = n.weights[w.Tenant]
				wantShed, wantOK := n.push(w)
				shed, ok := q.Push(w)
				var got []uint64
				for _, s := range shed {
					got = append(got, s.ID)
				}
				if ok != wantOK || !slices.Equal(got, wantShed) {
					t.Fatalf("push of %d: got accepted %v, shed %v, want %v, %v", w.ID, ok, got, wantOK, wantShed)
				}
			case 0:
				id := uint64(rapid.IntRange(1, 60).Draw(t, "id"))
				want := slices.ContainsFunc(n.list, func(w *Waiter) bool { return w.ID == id })
				n.drop(id)
				if got := q.Remove(id); got != want {
					t.Fatalf("removal of %d: got %v, want %v", id, got, want)
				}
			case 1, 2:
				skipped := map[uint64]bool{}
				blocked, budget := map[Lane]bool{}, rapid.IntRange(0, 6).Draw(t, "budget")
				for _, w := range n.list {
					blocked[w.Lane] = w.Lane.Slot == 3
				}
				offers := 0
				q.Serve(budget, func(l Lane) bool { return l.Slot != 3 }, func(w *Waiter) (out Outcome) {
					want := n.next(blocked, skipped)
					if offers++; want == nil || want.ID != w.ID || offers > budget {
						t.Fatalf("offer %d of %d: got %+v, want %+v", offers, budget, w, want)
					}
					switch rapid.IntRange(0, 4).Draw(t, "outcome") {
					case 0:
						blocked[w.Lane] = true
					case 1:
						if out.Moves, out.To = true, drawLane(); out.To == want.Lane {
							blocked[want.Lane] = true
						}
						want.Lane = out.To
						blocked[out.To] = true
					case 2:
						out.Moves, out.Skips, out.To = true, true, drawLane()
						want.Lane, skipped[want.ID] = out.To, true
					default:
						out.Leaves, out.Served = true, int64(rapid.IntRange(0, 30).Draw(t, "served"))
						if out.Served > 0 {
							n.clock[want.Priority] = max(n.clock[want.Priority], n.served[n.name(want)])
							n.served[n.name(want)] += float64(out.Served) / cmp.Or(n.weights[want.Tenant], 1)
						}
						n.drop(want.ID)
					}
					return out
				})
				if left := n.next(blocked, skipped); left != nil && offers < budget {
					t.Fatalf("got %d of %d offers, want one to %+v", offers, budget, left)
				}
			}
			requests, bytes := n.sum(func(*Waiter) bool { return true })
			if q.Len() != requests || q.bytes != bytes {
				t.Fatalf("got %d waiters of %d bytes, want %d of %d", q.Len(), q.bytes, requests, bytes)
			}
			var tokens int64
			held := make([]int64, 4)
			for _, w := range n.list {
				if tokens += w.Tokens; w.Lane.Slot != NoSlot {
					held[w.Lane.Slot] += w.Tokens
				}
			}
			if got := append(slices.Clone(q.held), held[len(q.held):]...); q.Tokens() != tokens || !slices.Equal(got[1:], held[1:]) {
				t.Fatalf("got %d tokens, %v held for targets, want %d, %v", q.Tokens(), got, tokens, held)
			}
		}
		for _, w := range slices.Clone(n.list) {
			q.Remove(w.ID)
		}
		if q.Len()+len(q.lanes)+len(q.bands) != 0 || q.bytes != 0 || q.Tokens() != 0 {
			t.Fatalf("got %d waiters, %d lanes, %d bands, %d bytes, %d tokens at the end, want none", q.Len(), len(q.lanes), len(q.bands), q.bytes, q.Tokens())
		}
	})
}

// A band with tenants that come and go forgets them.
func TestQueueForgetsTenants(t *testing.T) {
	q := Queue{Bounds: Bounds{Requests: 10}}
	q.Push(Waiter{ID: 1, Tenant: "stays", Lane: Lane{Slot: 1}})
	for i := range 20_000 {
		q.Push(Waiter{ID: uint64(i + 2), Tenant: fmt.Sprint(i)})
		q.Serve(1, func(l Lane) bool { return l.Slot == 0 }, func(*Waiter) Outcome { return Outcome{Leaves: true, Served: 100} })
	}
	if got := len(q.bands[0].tenants); q.Len() != 1 || got > 2*spareTenants {
		t.Errorf("got %d waiters and %d tenants, want 1 and at most %d", q.Len(), got, 2*spareTenants)
	}
}

// Those with the most waiters are listed, of however many, and no others are kept on the way.
func TestTenantsThatWaitMost(t *testing.T) {
	const tenants, most = 500, 20
	q := Queue{Bounds: Bounds{Requests: 100_000}}
	waits := map[string]int{}
	for i := range 10 * tenants {
		name := fmt.Sprintf("t%03d", i*i%tenants)
		waits[name]++
		q.Push(Waiter{ID: uint64(i + 1), Tenant: name, Priority: i % 2})
	}
	all := q.Tenants(math.MaxInt)
	for i, s := range all {
		if waits[s.Tenant] -= s.Requests; i > 0 {
			if last := all[i-1]; last.Requests < s.Requests || last.Requests == s.Requests && (last.Priority < s.Priority || last.Priority == s.Priority && last.Tenant >= s.Tenant) {
				t.Errorf("got %+v before %+v", last, s)
			}
		}
	}
	for name, n := range waits {
		if n != 0 {
			t.Errorf("%s: %d waiters are not listed", name, n)
		}
	}
	for _, n := range []int{0, 1, most, len(all), len(all) + 1} {
		if got, want := q.Tenants(n), all[:min(n, len(all))]; !slices.Equal(got, want) || cap(got) > 2*n+8 {
			t.Errorf("of at most %d: got %+v (room for %d), want %+v", n, got, cap(got), want)
		}
	}
}

// A request that is refused in the end sheds no other.
func TestARefusedWaiterShedsNone(t *testing.T) {
	q := Queue{Bounds: Bounds{Requests: 4, Bytes: 100}}
	q.Push(Waiter{ID: 1, Priority: -1, Bytes: 10})
	q.Push(Waiter{ID: 2, Priority: 1, Bytes: 80})
	if shed, ok := q.Push(Waiter{ID: 3, Bytes: 50}); ok || len(shed) > 0 || q.Len() != 2 || q.bytes != 90 {
		t.Errorf("a request that does not fit: got %v, shed %v, %d left with %d bytes, want it refused and both left", ok, shed, q.Len(), q.bytes)
	}
	if shed, ok := q.Push(Waiter{ID: 4, Bytes: 20}); !ok || len(shed) != 1 || shed[0].ID != 1 || q.bytes != 100 {
		t.Errorf("one that fits: got %v, shed %v, want it accepted for 1", ok, shed)
	}
}

// What it costs to shed a waiter does not grow with the queue.
func TestTheCostOfShedding(t *testing.T) {
	cost := func(n int) time.Duration {
		q, best := fill(n, 1, 1), time.Duration(math.MaxInt64)
		id := uint64(n)
		for range 5 {
			began := time.Now()
			for range 100 {
				shed, ok := q.Push(Waiter{ID: id + 1, Tenant: "other"})
				if !ok || len(shed) != 1 {
					t.Fatalf("got accepted %v, shed %v, want one shed", ok, shed)
				}
				q.Remove(id + 1)
				q.Push(Waiter{ID: id + 2, Tenant: "tenant-0"})
				id += 2
			}
			best = min(best, time.Since(began))
		}
		return best
	}
	if few, many := cost(200), cost(20_000); many > 30*few {
		t.Errorf("got %s for 20,000 waiters and %s for 200, want at most 30 times as much", many, few)
	} else {
		t.Logf("%s and %s", few, many)
	}
}

// queueStory runs one of the files that describe the queue.
//
//	queue requests=N [bytes=N]      a queue; lines of input: band PRIORITY requests=N
//	push ID [tenant=] [weight=] [priority=] [cost=] [bytes=] [lane=]   waits, or what happens instead
//	serve n=N [tokens=N] [blocked=lane]   places at most N waiters, each served as many tokens, and lists them
//	leave ID
//	tick DURATION
func TestQueueStories(t *testing.T) {
	var q *Queue
	var names []string
	var now time.Duration
	id := func(name string) uint64 {
		for i, known := range slices.Backward(names) {
			if known == name {
				return uint64(i + 1)
			}
		}
		return 0
	}
	datadriven.RunTest(t, "testdata/queue/flow.txt", func(t *testing.T, d *datadriven.TestData) string {
		scan := func(key string, to any) {
			if d.HasArg(key) {
				d.ScanArgs(t, key, to)
			}
		}
		switch d.Cmd {
		case "queue":
			q, names, now = &Queue{Bands: map[int]Bounds{}}, nil, 0
			scan("requests", &q.Requests)
			scan("bytes", &q.Bytes)
			for line := range strings.Lines(d.Input) {
				var priority, requests int
				if _, err := fmt.Sscanf(line, "band %d requests=%d", &priority, &requests); err != nil {
					t.Fatal(err)
				}
				q.Bands[priority] = Bounds{Requests: requests}
			}
			return ""
		case "push":
			names = append(names, d.CmdArgs[0].Key)
			w := Waiter{ID: uint64(len(names)), Since: now, Lane: Lane{Slot: NoSlot}}
			scan("tenant", &w.Tenant)
			scan("priority", &w.Priority)
			scan("cost", &w.Cost)
			scan("bytes", &w.Bytes)
			scan("lane", &w.Lane.Class)
			weight := 0
			scan("weight", &weight)
			w.Weight = float64(weight)
			shed, ok := q.Push(w)
			out := "waits\n"
			if !ok {
				out = "refused\n"
			}
			for _, s := range shed {
				out += "sheds " + names[s.ID-1] + "\n"
			}
			return out
		case "serve":
			n, tokens, blocked := 0, int64(0), ""
			scan("n", &n)
			scan("tokens", &tokens)
			scan("blocked", &blocked)
			var out []string
			q.Serve(n, func(l Lane) bool { return blocked == "" || l.Class != blocked }, func(w *Waiter) Outcome {
				out = append(out, names[w.ID-1])
				return Outcome{Leaves: true, Served: tokens}
			})
			return strings.Join(out, " ") + "\n"
		case "leave":
			return fmt.Sprintln(q.Remove(id(d.CmdArgs[0].Key)))
		case "tick":
			by, err := time.ParseDuration(d.CmdArgs[0].Key)
			if err != nil {
				t.Fatal(err)
			}
			now += by
			return now.String() + "\n"
		}
		t.Fatalf("unknown command %s", d.Cmd)
		return ""
	})
}

// fill gives a queue n waiters of some tenants, held for some targets.
func fill(n, tenants, lanes int) *Queue {
	q := &Queue{Bounds: Bounds{Requests: n}}
	for i := range n {
		q.Push(Waiter{ID: uint64(i + 1), Tenant: fmt.Sprint("tenant-", i%tenants), Lane: Lane{Slot: kvindex.Slot(i % lanes)}, Cost: int64(i * 7919 % 100_000),
			Since: time.Duration(i) * time.Millisecond})
	}
	return q
}

// 10,000 waiters of 10,000 tenants, the worst case, stay within the memory that the queue may
// take: 50 MB, of which most is for what the caller keeps.
func TestQueueMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	q := fill(10_000, 10_000, 64)
	runtime.GC()
	runtime.ReadMemStats(&after)
	got := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	if t.Logf("%d bytes", got); q.Len() != 10_000 || got > 15<<20 {
		t.Errorf("got %d bytes for %d waiters, want at most %d", got, q.Len(), 15<<20)
	}
}

// BenchmarkQueue places one of 10,000 waiters and lets another one enter.
func BenchmarkQueue(b *testing.B) {
	for _, tenants := range []int{1, 100, 10_000} {
		b.Run(fmt.Sprint(tenants, "tenants"), func(b *testing.B) {
			q := fill(10_000, tenants, 64)
			next, free := uint64(10_001), kvindex.Slot(0)
			b.ReportAllocs()
			for b.Loop() {
				var was Waiter
				q.Serve(1, func(l Lane) bool { return l.Slot == free }, func(w *Waiter) Outcome {
					was = *w
					return Outcome{Leaves: true, Served: 5000}
				})
				was.ID = next
				q.Push(was)
				next, free = next+1, (free+1)%64
			}
		})
	}
}

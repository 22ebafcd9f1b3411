package replicas

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/routing"
)

// delays collects the delays from a change to its effect at another replica.
type delays struct {
	mu   sync.Mutex
	list []float64
}

func (d *delays) Observe(seconds float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, seconds)
}

func processTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// load books, answers and ends requests at every replica at a rate per second, for a while.
func load(members []*member, rate int, d time.Duration) (requests int) {
	var wg sync.WaitGroup
	n := int(d.Seconds() * float64(rate))
	for _, m := range members {
		wg.Go(func() {
			start := time.Now()
			plans := make([]routing.Plan, 0, n)
			for i := range n {
				time.Sleep(time.Until(start.Add(time.Duration(i) * time.Second / time.Duration(rate))))
				plans = append(plans, m.pick(fmt.Sprint("c", i%500)))
				m.update(func(r *routing.Router, now time.Duration) {
					if i >= 20 {
						r.FirstToken(now, plans[i-20].Reservation)
					}
					if i >= 100 {
						r.Release(now, plans[i-100].Reservation)
					}
				})
			}
			m.update(func(r *routing.Router, now time.Duration) {
				for _, p := range plans[max(0, n-100):] {
					r.Release(now, p.Reservation)
				}
			})
		})
	}
	wg.Wait()
	return n * len(members)
}

// BenchmarkSharing measures what sharing costs a replica at rates of the fleet: processor time for each request of its own (with what it
// hears of the others, as they have as many) and for each request of the fleet, bytes, messages, the delay until a change has
// its effect elsewhere, and the cost of an idle fleet.
func BenchmarkSharing(b *testing.B) {
	const seconds = 4 * time.Second
	for _, count := range []int{2, 4} {
		for _, all := range []int{125, 500, 1000, 2000, 4000, 10000} {
			b.Run(fmt.Sprintf("replicas=%d/rate=%d", count, all), func(b *testing.B) {
				rate := all / count
				base := make([]*member, count)
				for i := range base {
					base[i] = &member{t: b, router: newRouter(b, 4), start: time.Now()}
				}
				before := processTime(b)
				load(base, rate, seconds)
				baseline := processTime(b) - before

				var d delays
				addresses := freePorts(b, count)
				members := make([]*member, count)
				for i := range members {
					f := defaultFleet(config.FleetEmbedded)
					f.Embedded.Listen, f.Embedded.Routes = addresses[i], addresses
					f.Embedded.SecretFile = secretFile(b, "secret")
					members[i] = startMember(b, &f, &d)
				}
				for _, m := range members {
					eventually(b, "fleet", func() bool { return len(m.State().Peers) == count-1 && m.Waiting() == "" })
				}
				before = processTime(b)
				time.Sleep(seconds)
				idle := processTime(b) - before
				var sent, messages uint64
				for _, m := range members {
					sent -= m.State().SentBytes
					messages -= m.State().Stats.Sent
				}
				d.list = nil
				before = processTime(b)
				n := load(members, rate, seconds)
				spent := processTime(b) - before - baseline
				for _, m := range members {
					sent += m.State().SentBytes
					messages += m.State().Stats.Sent
				}
				d.mu.Lock()
				slices.Sort(d.list)
				b.ReportMetric(d.list[len(d.list)/2]*1e3, "p50-ms")
				b.ReportMetric(d.list[len(d.list)*99/100]*1e3, "p99-ms")
				d.mu.Unlock()
				each := float64(spent.Microseconds()) / float64(count)
				b.ReportMetric(each/float64(n/count), "µs/own-request")
				b.ReportMetric(each/float64(n), "µs/request-of-all")
				b.ReportMetric(each/1e6/seconds.Seconds(), "cores/replica")
				b.ReportMetric(float64(spent.Microseconds())/float64(messages), "µs/message")
				b.ReportMetric(float64(messages)/float64(count)/seconds.Seconds(), "messages/s")
				b.ReportMetric(float64(baseline.Microseconds())/float64(n), "base-µs/request")
				b.ReportMetric(float64(sent)/float64(n), "bytes/request")
				b.ReportMetric(idle.Seconds()/seconds.Seconds()/float64(count), "idle-cores")
				for _, m := range members {
					m.Close()
				}
			})
		}
	}
}

// BenchmarkRejoin measures how long a replica that starts takes to have the state of another
// one, with 100,000 conversations and 2,000 requests.
func BenchmarkRejoin(b *testing.B) {
	addresses := freePorts(b, 2)
	start := func(i int) *member {
		f := defaultFleet(config.FleetEmbedded)
		f.Embedded.Listen, f.Embedded.Routes = addresses[i], addresses
		return startMemberWith(b, &f, nil, newRouterOf(b, 4, 100_000))
	}
	a := start(0)
	for i := range 100_000 {
		plan := a.pick(fmt.Sprint("conversation", i))
		if i >= 2000 {
			a.update(func(r *routing.Router, now time.Duration) { r.Release(now, plan.Reservation) })
		}
	}
	for b.Loop() {
		began := time.Now()
		n := start(1)
		eventually(b, "state", func() bool { s := n.State(); return s.Conversations == 100_000 && n.live() == 2000 && s.Synced })
		b.ReportMetric(time.Since(began).Seconds(), "s/rejoin")
		n.Close()
	}
	a.Close()
}

// BenchmarkPlainMessage measures the least that a message every 8 ms can cost: two goroutines with a timer and a TCP connection each,
// in place of NATS, protobuf and encryption. A change every 8 ms begins the timer, as in BenchmarkSharing at 125 requests a second.
func BenchmarkPlainMessage(b *testing.B) {
	const seconds, every = 4 * time.Second, 8 * time.Millisecond
	run := func(change func(side int)) time.Duration {
		before := processTime(b)
		var wg sync.WaitGroup
		for side := range 2 {
			wg.Go(func() {
				for start, n := time.Now(), 0; n < int(seconds/every); n++ {
					time.Sleep(time.Until(start.Add(time.Duration(n) * every)))
					change(side)
				}
			})
		}
		wg.Wait()
		return processTime(b) - before
	}
	baseline := run(func(int) {})

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	dialed := must(net.Dial("tcp", l.Addr().String()))
	var timers [2]*time.Timer
	var received atomic.Int64
	for side, conn := range []net.Conn{dialed, must(l.Accept())} {
		defer conn.Close()
		timers[side] = time.NewTimer(time.Hour)
		go func() {
			for data := make([]byte, 700); ; {
				<-timers[side].C
				if _, err := conn.Write(data); err != nil {
					return
				}
			}
		}()
		go func() {
			for data := make([]byte, 4096); ; received.Add(1) {
				if _, err := conn.Read(data); err != nil {
					return
				}
			}
		}()
	}
	spent := run(func(side int) { timers[side].Reset(Gather) }) - baseline
	b.ReportMetric(float64(spent.Microseconds())/float64(received.Load()), "µs/message")
	for _, t := range timers {
		t.Reset(0) // its goroutine ends with the connection
	}
}

package replicas

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/routing"
)

// member is a replica of a test: a router under a lock, and its node.
type member struct {
	t      testing.TB
	mu     sync.Mutex
	router *routing.Router
	start  time.Time
	*Node
}

func (m *member) update(change func(r *routing.Router, now time.Duration)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(m.router, time.Since(m.start))
}

func startMember(t testing.TB, fleet *config.Fleet, delay interface{ Observe(float64) }) *member {
	t.Helper()
	m := &member{t: t, router: newRouter(t, 4), start: time.Now()}
	n, err := Start(t.Context(), Options{Config: fleet, Update: m.update, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel), Delay: delay})
	if err != nil {
		t.Fatal(err)
	}
	m.Node = n
	return m
}

func (m *member) pick(conversation string) routing.Plan {
	m.t.Helper()
	var plan routing.Plan
	var err error
	m.update(func(r *routing.Router, now time.Duration) {
		plan, err = r.Pick(now, &routing.Query{ID: conversation, Conversation: conversation, PromptTokens: 100}, nil, nil)
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return plan
}

func (m *member) live() (n int) {
	m.update(func(r *routing.Router, _ time.Duration) { n = r.Live() })
	return n
}

// eventually waits for a condition; the bound is generous because machines are busy.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("got no %s within 30 s", what)
		}
	}
}

func defaultFleet(mode string) config.Fleet {
	f := config.Default().Fleet
	f.Mode = mode
	return f
}

// freePorts returns addresses on loopback that are free now.
func freePorts(t testing.TB, n int) []string {
	t.Helper()
	var list []string
	for range n {
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		list = append(list, l.Addr().String())
	}
	return list
}

func cluster(t testing.TB, addresses []string, change func(*config.Fleet)) []*member {
	t.Helper()
	members := make([]*member, len(addresses))
	for i := range addresses {
		f := defaultFleet(config.FleetEmbedded)
		f.Replica, f.Embedded.Listen, f.Embedded.Routes = fmt.Sprint("r", i), addresses[i], addresses
		change(&f)
		members[i] = startMember(t, &f, nil)
	}
	return members
}

func TestEmbeddedClusterOfThree(t *testing.T) {
	defer goleak.VerifyNone(t)
	m := cluster(t, freePorts(t, 3), func(*config.Fleet) {})
	for _, n := range m {
		eventually(t, "replica that is ready with two others", func() bool { return n.Waiting() == "" && len(n.State().Peers) == 2 })
	}
	first := m[0].pick("c")
	eventually(t, "booking at all", func() bool { return m[1].live() == 1 && m[2].live() == 1 })
	if got := m[1].pick("c"); got.Decode != first.Decode {
		t.Errorf("the conversation at another replica: got target %d, want %d", got.Decode, first.Decode)
	}
	eventually(t, "two bookings", func() bool { return m[0].live() == 2 && m[2].live() == 2 })
	m[0].Close()
	eventually(t, "end of the bookings of the replica that left", func() bool { return m[1].live() == 1 && m[2].live() == 1 })
	if got := m[2].pick("c"); got.Decode != first.Decode {
		t.Errorf("the conversation after its replica left: got target %d, want %d", got.Decode, first.Decode)
	}
	m[1].Close()
	m[2].Close()
}

package routing

import (
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/kvlane/kvlane/kvindex"
)

func fleet(tb testing.TB, name string, targets int) *Router {
	tb.Helper()
	r := newRouter(tb, preset(tb, name), 0)
	for i := range targets {
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: fmt.Sprintf("worker-%03d", i/8), Rank: int32(i % 8)}, Ready: true,
			Models: []string{"model"}})
	}
	return r
}

// allOverlap is what an index answers when every target holds a part of a prompt of
// 6,250 blocks of 16 tokens.
func allOverlap(targets int) []Overlap {
	overlaps := make([]Overlap, targets)
	for i := range overlaps {
		overlaps[i] = held(kvindex.Slot(i), int32(i*6250/targets*16))
	}
	return overlaps
}

func BenchmarkPick(b *testing.B) {
	for _, name := range []string{DefaultPreset, "kv-aware-trt", "conversation-rank", "two-phase", "round-robin"} {
		for _, targets := range []int{8, 1000} {
			b.Run(fmt.Sprintf("%s/%d", name, targets), func(b *testing.B) {
				r := fleet(b, name, targets)
				overlaps := allOverlap(targets)
				ids := make([]string, 1024)
				for i := range ids {
					ids[i] = fmt.Sprintf("conversation-%d", i)
				}
				q := &Query{ID: "request", Model: "model", PromptTokens: 100_000}
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					q.Conversation = ids[i%len(ids)]
					i++
					now := time.Duration(i) * time.Millisecond
					plan, err := r.Pick(now, q, overlaps, nil)
					if err != nil {
						b.Fatal(err)
					}
					r.FirstToken(now+100*time.Microsecond, plan.Reservation)
					r.Generated(now+900*time.Microsecond, plan.Reservation, 10)
					r.Release(now+900*time.Microsecond, plan.Reservation)
				}
			})
		}
	}
}

// BenchmarkShadow is what one policy of routing.shadow adds to a request that is compared, with Pick's cost next to it.
func BenchmarkShadow(b *testing.B) {
	for _, targets := range []int{100, 1000} {
		r := fleet(b, DefaultPreset, targets)
		overlaps, q := allOverlap(targets), &Query{ID: "request", Model: "model", PromptTokens: 100_000}
		for _, name := range []string{DefaultPreset, "least-loaded", "session-hash"} {
			b.Run(fmt.Sprintf("%s/%d", name, targets), func(b *testing.B) {
				policy := preset(b, name)
				b.ReportAllocs()
				for b.Loop() {
					if _, _, _, ok := r.Shadow(0, q, overlaps, &policy); !ok {
						b.Fatal("got no target, want one")
					}
				}
			})
		}
	}
}

// TestPickDoesNotAllocate holds the hot path of every preset at zero allocations,
// with conversations coming and going at the bound of their table.
func TestPickDoesNotAllocate(t *testing.T) {
	for _, name := range Presets() {
		cfg := DefaultConfig()
		cfg.Policy, cfg.MaxConversations = preset(t, name), 64
		r, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: "w", Rank: int32(i)}, Ready: true})
		}
		overlaps := allOverlap(16)
		ids := make([]string, 256)
		for i := range ids {
			ids[i] = fmt.Sprint("c", i)
		}
		i := 0
		q := &Query{ID: "r", PromptTokens: 5000}
		run := func() {
			q.Conversation = ids[i%len(ids)]
			i++
			now := time.Duration(i) * time.Second
			q.TTFT = time.Duration(i%2) * time.Second
			plan, err := r.Pick(now, q, overlaps, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.FirstToken(now+100*time.Millisecond, plan.Reservation)
			r.Generated(now+200*time.Millisecond, plan.Reservation, 10)
			r.Release(now+200*time.Millisecond, plan.Reservation)
		}
		for range 512 {
			run()
		}
		if n := testing.AllocsPerRun(200, run); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// TestConversationMemory bounds what the table of 100,000 conversations may take, as
// counted from its parts.
func TestConversationMemory(t *testing.T) {
	c := newConversations(100_000, 1<<20)
	for i := range 150_000 {
		c.put(new(Config).keyOf(fmt.Sprint("conversation-", i)), kvindex.Slot(i%8))
	}
	if got := c.size(); got != 100_000 {
		t.Errorf("got %d conversations, want 100000", got)
	}
	bytes := uintptr(cap(c.entries))*unsafe.Sizeof(entry{}) + uintptr(cap(c.byKey.places))*unsafe.Sizeof(place{}) +
		uintptr(cap(c.free)+cap(c.bySlot))*unsafe.Sizeof(uint32(0))
	if bytes > 10<<20 {
		t.Errorf("got %d bytes, want at most %d", bytes, 10<<20)
	}
	t.Logf("%d bytes, %d a conversation", bytes, bytes/100_000)
}

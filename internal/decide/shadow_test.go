package decide

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/observe"
)

func TestShadowPoliciesDecideWithoutActing(t *testing.T) {
	b := newBench(t, "routing: {preset: least-loaded, shadow: [kv-aware, least-loaded]}\n", worker("a", 0), worker("b", 0))
	body := completion(400, "")
	targets := map[string]bool{}
	for n := range 2 {
		d, e := b.ask("/v1/completions", body)
		targets[e.Target] = true
		if len(e.Shadows) != 2 || e.Shadows[1].Target != e.Target || e.Shadows[0].Policy != "kv-aware" {
			t.Fatalf("request %d: got shadows %+v beside %s, want two, of which the live preset's chose the same", n, e.Shadows, e.Target)
		}
		if n == 1 && (e.Shadows[0].Target == e.Target || e.Shadows[0].Miss >= e.Shadows[1].Miss) {
			t.Errorf("got shadows %+v beside %s, want kv-aware at the target that holds the prompt", e.Shadows, e.Target)
		}
		kv, live := e.Shadows[0], e.Shadows[1]
		regret := live.Miss + live.Queue - kv.Miss - kv.Queue
		if kv.Regret != regret || live.Regret != 0 || (n == 1) != (regret != 0) {
			t.Errorf("request %d: got shadows %+v, want the regret %d, and 0 for the same choice", n, e.Shadows, regret)
		}
		if text := e.Text(); !strings.Contains(text, "shadow kv-aware: "+kv.Target) || !strings.Contains(text, fmt.Sprintf(", estimated regret %d tokens\n", regret)) {
			t.Errorf("got %s, want the shadow's target and the regret in it", text)
		}
		if b.router.Live() != n+1 {
			t.Errorf("got %d reservations, want %d: shadows book nothing", b.router.Live(), n+1)
		}
		t.Cleanup(func() { d.Ticket.End(time.Now()) })
	}
	if len(targets) != 2 {
		t.Errorf("got targets %v, want the live policy to spread", targets)
	}
	for labels, want := range map[[2]string]float64{{"kv-aware", "differs"}: 1, {"kv-aware", "same"}: 1, {"least-loaded", "same"}: 2, {"least-loaded", "differs"}: 0} {
		if got := observe.Value(b.metrics.Shadows.WithLabelValues(labels[0], labels[1])); got != want {
			t.Errorf("%v: got %v, want %v", labels, got, want)
		}
	}
	live, kv := observe.Value(b.metrics.ShadowMiss.WithLabelValues("live")), observe.Value(b.metrics.ShadowMiss.WithLabelValues("kv-aware"))
	if live <= kv {
		t.Errorf("got %v uncached tokens live and %v with kv-aware, want fewer", live, kv)
	}
}

// Without routing.shadow nothing is decided again.
func TestNoShadowByDefault(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	d, e := b.ask("/v1/completions", completion(40, ""))
	defer d.Ticket.End(time.Now())
	if len(e.Shadows) != 0 || len(observe.Sums(b.metrics.Shadows, "policy")) != 0 {
		t.Errorf("got shadows %+v, want none", e.Shadows)
	}
}

// Prompts that begin alike have the same first names in a trace, and only those.
func TestNamesOfBlocksForTraces(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	names := func(body string) []uint64 {
		d, e := b.ask("/v1/completions", body)
		d.Ticket.End(time.Now())
		if want := int(e.PromptTokens / observe.TraceBlock); len(e.HashIDs) != want {
			t.Errorf("%d tokens: got %d names, want %d", e.PromptTokens, len(e.HashIDs), want)
		}
		return e.HashIDs
	}
	long, longer, other := names(completion(1100, "")), names(completion(1700, "")), names(completion(1100, `,"cache_salt":"salt"`))
	if names(completion(40, "")) != nil || len(longer) <= len(long) || !slices.Equal(long, longer[:len(long)]) || long[0] == long[1] {
		t.Errorf("got %v and %v, want the shorter to begin the longer", long, longer)
	}
	if slices.Equal(long, other) {
		t.Errorf("got the same names %v under another salt", other)
	}
}

// With many targets only one in ExplainEvery decisions is compared: shadow policies cost a request of a large fleet little on
// average, and each sums over all targets.
func TestShadowsOfLargeFleetsAreSampled(t *testing.T) {
	for count, want := range map[int]float64{observe.ExplainTargets: 4 * observe.ExplainEvery, observe.ExplainTargets + 1: 4} {
		d := newDecider(t, count)
		decide := repeatedBy(t, d, count, true, "least-loaded")
		compared := func() float64 { return observe.Sums(d.metrics.Shadows, "policy")["least-loaded"] }
		before := compared()
		for range 4 * observe.ExplainEvery {
			decide()
		}
		if got := compared() - before; got != want {
			t.Errorf("%d targets: got %v decisions compared, want %v", count, got, want)
		}
	}
}

package decide

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/fleet"
)

// weights is a configuration whose cost of an idle target is the given weight times its miss.
func weights(t *testing.T, miss int, more string) (yaml string, c *config.Config) {
	t.Helper()
	yaml = fmt.Sprintf("routing: {policy: {first_turn: {placement: \"off\"}, cost: {miss: %d, queue: 0, active: 0}}}\nlimits: {decision_timeout: 0}\n", miss) + more
	c, err := config.Parse("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	return yaml, c
}

// underLoad sends requests concurrently, of which none may be lost, until calm is called.
func (b *bench) underLoad(t *testing.T) (calm func()) {
	t.Helper()
	stop := make(chan struct{})
	var load sync.WaitGroup
	for n := range 3 {
		load.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				r := &extproc.Request{ID: fmt.Sprintf("load-%d-%d", n, i), Method: "POST", Path: "/v1/completions", Body: []byte(completion(20+i%50, "")), Received: time.Now()}
				d := b.Decide(context.Background(), r)
				if d.Reject != nil || d.Endpoint == "" {
					t.Errorf("got %+v, want a target", d)
					return
				}
				d.Ticket.End(time.Now())
			}
		})
	}
	return func() {
		t.Helper()
		close(stop)
		load.Wait()
		if b.loads() != 0 {
			t.Errorf("got load %d after the end, want none", b.loads())
		}
	}
}

// Under load no request is lost while the configuration changes, and the decision after a
// change is explained by the new weight.
func TestReloadUnderLoad(t *testing.T) {
	yaml, first := weights(t, 1, "")
	_, second := weights(t, 3, "")
	b := newBench(t, yaml, worker("a", 2), worker("b", 2))
	calm := b.underLoad(t)
	for i := range 20 {
		next, weight := second, 3.0
		if i%2 == 1 {
			next, weight = first, 1
		}
		if err := b.Reload(next); err != nil {
			t.Fatal(err)
		}
		d, e := b.ask("/v1/completions", completion(100, ""))
		if e.Explanation == nil || len(e.Explanation.Candidates) == 0 || e.Explanation.Candidates[0].Cost == nil {
			t.Fatalf("got %+v, want an explanation with costs", e)
		}
		if c := e.Explanation.Candidates[0]; *c.Cost != weight*float64(c.Miss) {
			t.Errorf("got cost %v of %d missing tokens, want the weight %v", *c.Cost, c.Miss, weight)
		}
		d.Ticket.End(time.Now())
	}
	calm()
}

func TestReloadTakesExplain(t *testing.T) {
	yaml, _ := weights(t, 1, "")
	b := newBench(t, yaml, worker("a", 1))
	headers := func() int {
		d, _ := b.ask("/v1/completions", completion(20, ""))
		defer d.Ticket.End(time.Now())
		return len(d.Ticket.ResponseHeaders(200, d.Endpoint))
	}
	if n := headers(); n != 0 {
		t.Fatalf("got %d response headers, want none without explain.header", n)
	}
	_, c := weights(t, 1, "explain: {keep: 2, header: true}\n")
	if err := b.Reload(c); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if n := headers(); n != 2 {
			t.Errorf("got %d response headers, want 2", n)
		}
	}
	if n := len(b.decisions.Last(10)); n != 2 {
		t.Errorf("got %d decisions kept, want 2", n)
	}
	bad := *c
	bad.Routing.PrefillRate = -1
	if err := b.Reload(&bad); err == nil || b.live.Load() != c || b.router.Config().PrefillRate != c.Routing.PrefillRate {
		t.Errorf("got %v, want an error and the settings of before", err)
	}
}

// Models are replaced under load: no request is lost, ids come from the new ones, and the comparisons of the old ones end.
func TestModelsAreReplacedUnderLoad(t *testing.T) {
	yaml, _ := weights(t, 1, "")
	b := newBench(t, yaml, worker("a", 2), worker("b", 2))
	first := b.fleet.Model("demo")
	second := &fleet.Model{Config: first.Config, Engine: first.Engine, Tokens: first.Tokens}
	third := &fleet.Model{Config: first.Config, Engine: first.Engine} // routed by load
	calm := b.underLoad(t)
	for i := range 30 {
		next := []*fleet.Model{first, second, third}[i%3]
		b.fleet.SetModels([]*fleet.Model{next})
		if got := b.fleet.Model("demo"); got != next {
			t.Fatalf("got model %p, want %p", got, next)
		}
		d, e := b.ask("/v1/completions", completion(100, ""))
		if exact := next.Tokens != nil; (e.Degraded == "") != exact {
			t.Errorf("got a decision degraded by %q, want it by ids: %v", e.Degraded, exact)
		}
		d.Ticket.End(time.Now())
	}
	calm()
}

// Models are added and removed under load: no request is lost, no load is left, and a worker whose blocks belong to another
// model now is followed anew.
func TestModelsComeAndGoUnderLoad(t *testing.T) {
	yaml, _ := weights(t, 1, "")
	aliased := worker("b", 2)
	aliased.Models = []string{"alias", "new"}
	b := newBench(t, yaml, worker("a", 2), aliased)
	demo := b.fleet.Model("demo")
	added := &fleet.Model{Config: config.Model{Name: "new", CacheBytes: 1 << 20, Check: config.Check{Disabled: true}}, Engine: demo.Engine, Tokens: demo.Tokens}
	blocks := func(target string) string { // the model of its blocks
		for _, s := range b.fleet.IndexPage().Index.Targets {
			if s.Target.String() == target {
				return s.Model
			}
		}
		return ""
	}
	calm := b.underLoad(t)
	for range 10 {
		for _, c := range []struct {
			models      []*fleet.Model
			demo, added bool
			b           string // the model of worker b's blocks
		}{
			{[]*fleet.Model{added, demo}, true, true, "demo"},
			{[]*fleet.Model{added}, false, true, "new"},
			{nil, false, false, "alias"},
			{[]*fleet.Model{demo}, true, false, "demo"},
		} {
			b.SetModels(c.models)
			for name, exact := range map[string]bool{"demo": c.demo, "new": c.added} {
				d, e := b.ask("/v1/completions", strings.Replace(completion(100, ""), "demo", name, 1))
				if d.Reject != nil || (e.Degraded == "") != exact {
					t.Errorf("%s: got %+v degraded by %q, want it by ids: %v", name, d.Reject, e.Degraded, exact)
					continue
				}
				d.Ticket.End(time.Now())
			}
			if got := blocks("b/0"); got != c.b || blocks("a/0") != "demo" {
				t.Errorf("got blocks of model %q at b and %q at a, want %q and demo", got, blocks("a/0"), c.b)
			}
		}
	}
	calm()
}

// The blocks of workers that list no models are those of the only model, and of none in particular if there are several. Such
// workers serve while that changes, and what runs there still counts.
func TestWorkersOfAnyModelServeWhileModelsChange(t *testing.T) {
	yaml, _ := weights(t, 1, "")
	silent := worker("a", 2)
	silent.Models = nil
	b := newBench(t, yaml, silent)
	demo := b.fleet.Model("demo")
	added := &fleet.Model{Config: config.Model{Name: "new", Check: config.Check{Disabled: true}}, Engine: demo.Engine, Tokens: demo.Tokens}
	b.SetModels([]*fleet.Model{demo})
	running, _ := b.ask("/v1/completions", completion(100, ""))
	before := b.loads()
	b.SetModels([]*fleet.Model{demo, added})
	if got := b.loads(); got != before || got == 0 {
		t.Errorf("got load %d after the change, want %d as before", got, before)
	}
	running.Ticket.End(time.Now())
	calm := b.underLoad(t)
	for i := range 200 {
		b.SetModels([]*fleet.Model{demo, added}[:1+i%2])
	}
	calm()
}

package replay

import "testing"

// TestFleetChanges loses or adds a worker during a run, with coupled ranks and without, under
// rules of the router and of a model: every request ends once, and none goes to a worker that
// is not there.
func TestFleetChanges(t *testing.T) {
	const at = 20.0
	w := OneShot{Tenants: 5, System: 2000, Own: 3000, Output: 300, PerSecond: 12}.Workload("open")
	want := len(w.Generate(3))
	for _, coupled := range []bool{false, true} {
		for _, name := range []string{"kv-aware", "lmetric", "dualmap", "llm-d", "power-of-two", "oracle"} {
			for _, change := range []fleetChange{{Lost: at}, {Added: at}} {
				policy, err := PolicyByName(name)
				if err != nil {
					t.Fatal(err)
				}
				fleet := Fleet{Workers: 3, Ranks: 2, Coupled: coupled, Engine: Dense70B(200_000), Change: change}
				s, err := newSimulation(&w, fleet, &policy, Conditions{}, 3)
				if err != nil {
					t.Fatal(err)
				}
				if err := s.run(); err != nil {
					t.Errorf("%s, %+v, coupled %v: %v", name, change, coupled, err)
				}
				last := 0
				for _, r := range s.records {
					if r.slot >= 4 {
						last++
						if (r.ended > at) != (change.Added > 0) {
							t.Errorf("%s, %+v, coupled %v: a request ended on the worker at %.1f s", name, change, coupled, r.ended)
						}
					}
				}
				if len(s.records) != want || last == 0 || s.refused != 0 {
					t.Errorf("%s, %+v, coupled %v: got %d requests, %d of them on the worker, %d refused, want %d, some and none", name, change, coupled, len(s.records), last, s.refused, want)
				}
			}
		}
	}
}

// TestSlowWorkers compares the engines of the two speeds.
func TestSlowWorkers(t *testing.T) {
	f := Fleet{Workers: 4, Ranks: 2, Slow: 1, Engine: Dense70B(1000)}
	if fast, slow := f.engine(5), f.engine(6); fast.PerToken != f.Engine.PerToken || slow.PerToken != 2*f.Engine.PerToken || slow.Base != 2*f.Engine.Base || slow.Budget != f.Engine.Budget {
		t.Errorf("got %+v and %+v, want the second to take twice as long", *fast, *slow)
	}
}

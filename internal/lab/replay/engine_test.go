package replay

import (
	"slices"
	"testing"
)

// Two requests whose prompts fit and whose answers do not: the younger one is preempted, waits
// until there is room again, is computed again with what it had generated, and gives one first token.
func TestEnginesPreemptTheYoungest(t *testing.T) {
	for _, c := range []struct {
		name              string
		capacity, preempt int
	}{
		{"room for one answer", 48, 1},
		{"room for both", 128, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := Dense70B(c.capacity)
			r := newRank(&e, 4, nil)
			old := &job{record: &record{Request: Request{Prompt: 16, Output: 24, Blocks: []uint64{1, 2, 3, 4}}}}
			young := &job{record: &record{Request: Request{Prompt: 16, Output: 20, Blocks: []uint64{11, 12, 13, 14}}}}
			r.waiting = []*job{old, young}
			var first, done []*job
			computed := 0
			for steps := 0; r.busy(); steps++ {
				if steps > 100 {
					t.Fatalf("got %d waiting, %d decoding after %d steps, want an idle rank", len(r.waiting), len(r.decode), steps)
				}
				if r.begin() == 0 {
					t.Fatal("got a step without work, want one with")
				}
				for _, n := range r.chunk {
					computed += n
				}
				if used := r.used(); used > r.places || len(r.blocks)+used-r.pinned > r.places {
					t.Fatalf("got %d places used and %d blocks, want at most %d", used, len(r.blocks), r.places)
				}
				r.end(func(j *job) { first = append(first, j) }, func(j *job) { done = append(done, j) })
			}
			if r.preempted != c.preempt || (young.generated > 0) != (c.preempt > 0) || old.generated != 0 {
				t.Errorf("got %d preemptions, %d and %d tokens to compute again, want %d, of the younger request", r.preempted, old.generated, young.generated, c.preempt)
			}
			if want := []*job{old, young}; !slices.Equal(first, want) {
				t.Errorf("got %d first tokens, want one each, the older request's first", len(first))
			}
			if len(done) != 2 || (c.preempt > 0) != (done[0] == old) {
				t.Errorf("got %d ends, the older request's first %v, want 2 and %v", len(done), done[0] == old, c.preempt > 0)
			}
			if (computed > 32) != (c.preempt > 0) || computed > 32+16+young.generated {
				t.Errorf("got %d tokens of prefill, want 32, and what was preempted (16 and %d) at most", computed, young.generated)
			}
			if r.used() != 0 || r.resident != 0 || r.grown != 0 {
				t.Errorf("got %d places, %d resident and %d generated tokens at the end, want none", r.used(), r.resident, r.grown)
			}
		})
	}
}

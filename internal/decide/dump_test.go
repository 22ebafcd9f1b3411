package decide

import "testing"

const sameKey = "index: {key: shared}\n"

// Decisions do not wait while a copy of the index is written.
func TestDecisionsGoOnWhileACopyIsMade(t *testing.T) {
	b := newBench(t, sameKey, worker("a", 2))
	b.ask("/v1/completions", completion(100, ""))
	asked := false
	err := b.Fleet().DumpIndex(writerFunc(func(p []byte) (int, error) {
		if !asked {
			asked = true
			if d, _ := b.ask("/v1/completions", completion(200, "")); d.Reject != nil {
				t.Errorf("%+v", d.Reject)
			}
		}
		return len(p), nil
	}))
	if err != nil || !asked {
		t.Fatal(err, asked)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

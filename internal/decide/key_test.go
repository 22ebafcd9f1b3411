package decide

import (
	"testing"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/fleet"
)

// Replicas with one key break ties alike; without a key each process has its own.
func TestTheRoutingSeedFollowsTheKey(t *testing.T) {
	seed := func(text string) uint64 {
		c, err := config.Parse("test.yaml", []byte("index: {key: \""+text+"\"}\n"))
		if err != nil {
			t.Fatal(err)
		}
		key, err := fleet.NewKey(&c.Index)
		if err != nil {
			t.Fatal(err)
		}
		return hashSeed(key)
	}
	if a, b := seed("k"), seed("k"); a != b || a == seed("l") {
		t.Errorf("got seeds %x and %x for one key and %x for another", a, b, seed("l"))
	}
	if a, b := seed(""), seed(""); a == b || a == 0 {
		t.Errorf("got seeds %x and %x without a key, want random ones", a, b)
	}
	b := newBench(t, "index: {key: test}\n", worker("a", 0))
	if got := b.router.Config().HashSeed; got != seed("test") {
		t.Errorf("got seed %x in the router, want %x", got, seed("test"))
	}
}

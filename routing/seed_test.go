package routing

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// picks are the targets of requests with ties between eight ranks, each with no other
// request running.
func picks(t *testing.T, by Seed, seed uint64, ids int) []kvindex.Slot {
	t.Helper()
	c := DefaultConfig()
	c.Policy, c.HashSeed = neutral(), seed
	c.Policy.Pick.Seed = by
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	for i := range int32(8) {
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: "w", Rank: i}, Ready: true})
	}
	var out []kvindex.Slot
	for i := range ids {
		d, err := r.PickRecorded(0, &Query{ID: fmt.Sprint("request-", i), Conversation: fmt.Sprint("conversation-", i), PromptTokens: 100}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if again, _, err := d.Rerun(); err != nil || again.Decode != d.Plan.Decode {
			t.Fatalf("got %v, %v when made again, want %v", again.Decode, err, d.Plan.Decode)
		}
		r.Release(0, d.Plan.Reservation)
		out = append(out, d.Plan.Decode)
	}
	return out
}

// The id of a request or conversation tells nobody without the seed where a tie goes; with it, it is the same
// each time, in a recorded decision too.
func TestTiesDependOnTheSeed(t *testing.T) {
	const ids = 64
	for _, by := range []Seed{SeedRequest, SeedConversation} {
		one, same, other := picks(t, by, 1, ids), picks(t, by, 1, ids), picks(t, by, 2, ids)
		if !reflect.DeepEqual(one, same) {
			t.Errorf("%s: got other targets with the same seed", by)
		}
		equal := 0
		for i := range one {
			if one[i] == other[i] {
				equal++
			}
		}
		if equal > ids/2 {
			t.Errorf("%s: got %d of %d ties equal with another seed, want about an eighth", by, equal, ids)
		}
	}
}

// probes is how many places a search for a key looks at.
func (c *conversations) probes(k Key) int {
	n := 1
	for at := c.byKey.first(uint32(k.Hi)); c.byKey.places[at].entry != none; at = c.byKey.next(at) {
		if c.entries[c.byKey.places[at].entry].key == k {
			return n
		}
		n++
	}
	return n
}

// Ids that meet in the table of conversations under one seed are spread under another: searches look at few places.
func TestChosenConversationIDsDoNotMeet(t *testing.T) {
	const places, chosen = 1 << 10, 200
	var ids []string
	for i := 0; len(ids) < chosen; i++ {
		if id := fmt.Sprint("c", i); uint32((&Config{HashSeed: 1}).keyOf(id).Hi)%places == 7 {
			ids = append(ids, id)
		}
	}
	probes := func(seed uint64) (most int) {
		c := DefaultConfig()
		c.HashSeed = seed
		r, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		var keys []Key
		for _, id := range ids {
			keys = append(keys, r.config.keyOf(id))
			r.conversations[0].put(keys[len(keys)-1], NoSlot)
		}
		if got := r.conversations[0].size(); got != chosen || len(r.conversations[0].byKey.places) > places {
			t.Fatalf("got %d conversations in %d places, want %d in at most %d", got, len(r.conversations[0].byKey.places), chosen, places)
		}
		for _, k := range keys {
			if r.conversations[0].find(k) == none {
				t.Fatalf("got no conversation for %v", k)
			}
			most = max(most, r.conversations[0].probes(k))
		}
		return most
	}
	if got := probes(1); got < chosen {
		t.Errorf("with the seed that the ids are chosen for: got %d places for the longest search, want %d", got, chosen)
	}
	for seed := range uint64(8) {
		if got := probes(seed + 2); got > chosen/4 {
			t.Errorf("seed %d: got %d places for the longest search among %d chosen ids, want at most %d", seed+2, got, chosen, chosen/4)
		}
	}
	one, other := &Config{HashSeed: 1}, &Config{HashSeed: 2}
	if k := one.keyOf("a"); k == other.keyOf("a") || k != one.keyOf("a") || k == (Key{}) || one.keyOf("") != (Key{}) {
		t.Errorf("got key %v, want one that depends on id and seed", k)
	}
}

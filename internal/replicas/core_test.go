package replicas

import (
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/rs/zerolog"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

func newRouter(t testing.TB, targets int) *routing.Router {
	t.Helper()
	return newRouterOf(t, targets, 1000)
}

func newRouterOf(t testing.TB, targets, conversations int) *routing.Router {
	t.Helper()
	config := routing.DefaultConfig()
	config.MaxConversations, config.Policy.Sticky.Mode = conversations, routing.StickyTarget
	config.Node = rand.Uint64() // only keys of conversations without an id depend on it
	r, err := routing.New(config)
	if err != nil {
		t.Fatal(err)
	}
	for n := range targets {
		r.SetTarget(kvindex.Slot(n), routing.TargetInfo{Target: target(n), Ready: true})
	}
	return r
}

func target(n int) kvindex.Target {
	return kvindex.Target{Worker: "w" + string(rune('a'+n/2)), Rank: int32(n % 2)}
}

// deliver passes all messages between cores until there are none.
func deliver(t testing.TB, now time.Duration, cores ...*Core) {
	t.Helper()
	for sent := true; sent; {
		sent = false
		for _, from := range cores {
			for _, o := range from.Take() {
				sent = true
				for _, m := range o.all() {
					for _, to := range cores {
						if to != from && (o.To == "" || o.To == to.id) && (o.Reply == "" || o.Reply == to.id) {
							to.Receive(now, recode(t, m), from.id)
						}
					}
				}
			}
		}
	}
}

func TestTwoReplicasShare(t *testing.T) {
	ra, rb := newRouter(t, 4), newRouter(t, 4)
	a, b := New("a", ra, 0, func() {}), New("b", rb, 0, func() {})
	ra.Share(a)
	rb.Share(b)
	plan, err := ra.Pick(0, &routing.Query{ID: "1", Conversation: "c", PromptTokens: 1000}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	deliver(t, time.Millisecond, a, b)
	if got := rb.Load(plan.Decode); got.Active != 1 || got.Queue != 1000 {
		t.Errorf("b's load of the target: got %+v, want one request with 1000 tokens queued", got)
	}
	other, err := rb.Pick(2*time.Millisecond, &routing.Query{ID: "2", Conversation: "c", PromptTokens: 1000}, nil, nil)
	if err != nil || other.Decode != plan.Decode || other.Via != routing.ViaSticky {
		t.Errorf("the same conversation at b: got %v via %s, %v, want %v", other.Decode, other.Via, err, plan.Decode)
	}
	deliver(t, 2*time.Millisecond, a, b)
	if got := ra.Load(plan.Decode); got.Active != 2 {
		t.Errorf("a's load of the target: got %+v, want two requests", got)
	}
	ra.FirstToken(3*time.Millisecond, plan.Reservation)
	deliver(t, 3*time.Millisecond, a, b)
	if got := rb.Load(plan.Decode); got.Queue != 1000 || got.Active != 2 {
		t.Errorf("after a first token: got %+v, want one request with 1000 tokens queued", got)
	}
	ra.Release(4*time.Millisecond, plan.Reservation)
	rb.Release(4*time.Millisecond, other.Reservation)
	deliver(t, 5*time.Millisecond, a, b)
	for _, r := range []*routing.Router{ra, rb} {
		if r.Live() != 0 || r.Load(plan.Decode) != (routing.Load{}) {
			t.Errorf("after the end: got %d bookings, load %+v, want none", r.Live(), r.Load(plan.Decode))
		}
	}
}

// Conversations that begin at three replicas within the delay of sharing, of which none knows of the others', go to different
// targets after the first. A replica that is alone, or that knows of the others', places them in turn.
func TestConversationsThatBeginTogetherSpread(t *testing.T) {
	var cores []*Core
	for _, id := range []string{"b", "c", "a"} {
		r := newRouter(t, 12)
		c := New(id, r, 0, func() {})
		r.Share(c)
		cores = append(cores, c)
	}
	deliver(t, 0, cores...)
	now, number := time.Second, 0
	tick := func() {
		for _, c := range cores {
			c.Tick(now)
		}
		deliver(t, now, cores...)
	}
	begin := func(c *Core) int {
		number++
		id := fmt.Sprint("new ", number)
		return int(must(c.router.Pick(now, &routing.Query{ID: id, Conversation: id, PromptTokens: 100}, nil, nil)).Decode)
	}
	tick()
	var got [3][]int
	for range 4 {
		for i, c := range cores {
			got[i] = append(got[i], begin(c))
		}
	}
	if want := [3][]int{{0, 5, 6, 7}, {0, 9, 10, 11}, {0, 1, 2, 3}}; !reflect.DeepEqual(got, want) {
		t.Errorf("at the same time: got the targets %v, want %v", got, want)
	}
	deliver(t, now, cores...)

	var inTurn []int
	for i := range 7 {
		deliver(t, now, cores...)
		now += 2 * unseen
		inTurn = append(inTurn, begin(cores[i%3]))
	}
	if want := []int{8, 4, 5, 6, 7, 8, 9}; !slices.Equal(inTurn, want) { // 4 and 8 had none, 0 has three
		t.Errorf("one after another: got the targets %v, want %v", inTurn, want)
	}

	for _, c := range cores[1:] {
		c.Bye()
	}
	deliver(t, now, cores...)
	cores = cores[:1]
	now += 2 * unseen
	tick()
	if got, want := []int{begin(cores[0]), begin(cores[0]), begin(cores[0])}, []int{10, 11, 1}; !slices.Equal(got, want) {
		t.Errorf("together at one that is alone: got the targets %v, want %v", got, want)
	}
}

// learning is what replicas learn of each other's turns.
type learning struct {
	returning [numLegs]float64
	cursor    [numLegs]int32
}

// learned returns what a replica's router has learned of requests without a model.
func learned(t testing.TB, c *Core) learning {
	t.Helper()
	d, err := c.router.PickRecorded(0, &routing.Query{Pin: &routing.Pin{Worker: "none", Strict: true}}, nil, nil)
	if err == nil {
		t.Fatal("got a target, want none: the decision must change nothing")
	}
	return learning{d.State.Pools[0].Returning, d.State.Pools[0].Cursor}
}

// A state carries bookings and conversations whose turns have counted, or had no chance to: they do not count then. But a
// replica that joins knows which conversations have begun.
func TestTurnsOfAStateDoNotCount(t *testing.T) {
	a, b := pair(t)
	turn := func(c *Core, conversation string, prompt int64) {
		if _, err := c.router.Pick(0, &routing.Query{Conversation: conversation, PromptTokens: prompt}, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		turn(a, "long", 1000)
		turn(a, "short", 100)
	}
	deliver(t, 0, a, b)
	turn(b, "of b", 1000) // moves the cursor on
	deliver(t, 0, a, b)
	before := learned(t, b)
	if got := learned(t, a); before.returning[0] == 0 || before.cursor[0] < 2 || got != before {
		t.Fatalf("got %+v at a and %+v at b, want the same, some that return and a cursor behind two", got, before)
	}
	check := func(what string) {
		t.Helper()
		if got := learned(t, b); b.router.Live() != 7 || got != before {
			t.Errorf("%s: got %d bookings and %+v, want 7 and %+v as before", what, b.router.Live(), got, before)
		}
	}
	refused, copies := b.stats.Errors, maps.Clone(b.peers["a"].ledger)
	for id := range copies {
		b.release(0, b.peers["a"], id, true) // an error of b's
		delete(copies, id)
		break
	}
	a.Tick(heartbeatEvery)
	deliver(t, heartbeatEvery, a, b)
	check("a state after an error")
	if b.stats.Errors != refused+1 {
		t.Errorf("got %d errors, want one", b.stats.Errors-refused)
	}
	for id, kept := range copies {
		if b.peers["a"].ledger[id] != kept {
			t.Errorf("booking %d was made anew by the state, want it untouched", id)
		}
	}
	now := heartbeatEvery
	for ; b.stats.Dropped == 0; now += 100 * time.Millisecond {
		b.Tick(now)
	}
	if b.Take(); b.router.Live() != 1 {
		t.Fatalf("got %d bookings after a silence, want b's own", b.router.Live())
	}
	a.Tick(now)
	deliver(t, now, a, b)
	check("a state after a silence")

	late := New("late", newRouter(t, 4), now, func() {})
	late.router.Share(late)
	deliver(t, now, a, b, late)
	if got := learned(t, late); late.router.Live() != 7 || got != (learning{}) {
		t.Errorf("a replica that joins: got %d bookings and %+v, want 7 and nothing learned", late.router.Live(), got)
	}
	for _, c := range []struct {
		conversation string
		returns      bool
	}{{"short", false}, {"long", true}} {
		turn(late, c.conversation, 1000)
		if got := learned(t, late).returning[0]; (got != 0) != c.returns {
			t.Errorf("a turn of conversation %q where it joined: got the share %v, want one that returns: %v", c.conversation, got, c.returns)
		}
	}
	a.Take()
	turn(a, "of an earlier version", 1000)
	for _, o := range a.Take() {
		for _, v := range o.Message.GetConversations() {
			v.Turns = 0
		}
		o.Message.Seq = late.peers["a"].seq + 1
		late.Receive(now, recode(t, o.Message), "")
	}
	share := learned(t, late).returning[0]
	if turn(late, "of an earlier version", 1000); learned(t, late).returning[0] <= share {
		t.Errorf("a conversation of an earlier version: got the share %v after %v, want it to return", learned(t, late).returning[0], share)
	}
}

// pair returns two replicas that know each other.
func pair(t testing.TB) (a, b *Core) {
	t.Helper()
	ra, rb := newRouter(t, 4), newRouter(t, 4)
	a, b = New("a", ra, 0, func() {}), New("b", rb, 0, func() {})
	ra.Share(a)
	rb.Share(b)
	deliver(t, 0, a, b)
	return a, b
}

func bound(t testing.TB, c *Core, conversation string, slot kvindex.Slot) {
	t.Helper()
	q := &routing.Query{ID: "x", Conversation: conversation, PromptTokens: 100}
	if slot != routing.NoSlot {
		info, _ := c.router.Target(slot)
		q.Pin = &routing.Pin{Worker: info.Worker, Rank: info.Rank}
	}
	plan, err := c.router.Pick(0, q, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.router.Release(0, plan.Reservation)
}

func home(c *Core) kvindex.Target {
	for key := range c.legs[0].byKey {
		got, _ := c.router.Bound(0, key)
		return got
	}
	return kvindex.Target{}
}

func TestEarlierOfTwoConcurrentBindingsWins(t *testing.T) {
	for _, aFirst := range []bool{true, false} {
		a, b := pair(t)
		want := target(2)
		if aFirst {
			b.clock += 10
			want = target(1)
		} else {
			a.clock += 10
		}
		bound(t, a, "c", 1)
		bound(t, b, "c", 2)
		deliver(t, time.Millisecond, a, b)
		if home(a) != want || home(b) != want {
			t.Errorf("a first: %v: got %v at a and %v at b, want %v at both", aFirst, home(a), home(b), want)
		}
		if a.stats.Conflicts+b.stats.Conflicts == 0 {
			t.Error("got no conflict counted, want some")
		}
	}
}

func TestEqualTimesAreDecidedByTheReplica(t *testing.T) {
	a, b := pair(t)
	a.clock = max(a.clock, b.clock)
	b.clock = a.clock
	bound(t, a, "c", 1)
	bound(t, b, "c", 2)
	deliver(t, time.Millisecond, a, b)
	if home(a) != target(1) || home(b) != target(1) {
		t.Errorf("got %v at a and %v at b, want a's binding %v at both", home(a), home(b), target(1))
	}
}

func TestReplicaThatForgotABindingIsTold(t *testing.T) {
	a, b := pair(t)
	bound(t, a, "c", 1)
	a.Take() // lost, and so is what would show the gap
	a.seq--
	b.clock += 10
	bound(t, b, "c", 2)
	deliver(t, time.Millisecond, a, b)
	if home(a) != target(1) || home(b) != target(1) {
		t.Errorf("got %v at a and %v at b, want the earlier binding %v at both", home(a), home(b), target(1))
	}
}

// A conversation without an id is known at another replica by the last block of its prompt: a
// turn that goes on follows it, one that only begins alike does not.
func TestConversationsWithoutAnIDAreShared(t *testing.T) {
	a, b := pair(t)
	for _, c := range []*Core{a, b} {
		config := c.router.Config()
		config.Policy.Sticky.Implicit, config.Policy.Sticky.MatchThreshold = true, 0.75
		if err := c.router.SetConfig(config); err != nil {
			t.Fatal(err)
		}
	}
	turn := func(c *Core, pin int, prefix ...uint64) (kvindex.Slot, routing.Via) {
		q := &routing.Query{ID: "x", Prefix: prefix, PromptTokens: 100}
		if pin >= 0 {
			q.Pin = &routing.Pin{Worker: target(pin).Worker, Rank: target(pin).Rank}
		}
		plan, err := c.router.Pick(0, q, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		c.router.Release(0, plan.Reservation)
		deliver(t, 0, a, b)
		return plan.Decode, plan.Via
	}
	turn(a, 2, 1, 2, 3)
	if got, via := turn(b, -1, 1, 2, 3, 4); got != 2 || via != routing.ViaImplicit {
		t.Errorf("the next turn at the other replica: got target %d by %q, want 2 by %q", got, via, routing.ViaImplicit)
	}
	if got, via := turn(a, -1, 1, 2, 3, 4, 5); got != 2 || via != routing.ViaImplicit {
		t.Errorf("the third turn at the first replica: got target %d by %q, want 2 by %q", got, via, routing.ViaImplicit)
	}
	if _, via := turn(b, -1, 1, 2, 9, 10); via == routing.ViaImplicit {
		t.Errorf("another prompt that begins alike: got %q, want a new conversation", via)
	}
	late := New("late", newRouter(t, 4), 0, func() {})
	late.router.Share(late)
	if err := late.router.SetConfig(a.router.Config()); err != nil {
		t.Fatal(err)
	}
	deliver(t, 0, a, b, late)
	if got, via := turn(late, -1, 1, 2, 3, 4, 5, 6); got != 2 || via != routing.ViaImplicit {
		t.Errorf("a turn at a replica that joined: got target %d by %q, want 2 by %q", got, via, routing.ViaImplicit)
	}
}

// A replica that misses two heartbeats keeps its bookings; one that is dead has none before it
// would have sent a sixth, 3 s after its last message.
func TestBookingsOfADeadReplicaAreGoneWithinSixHeartbeats(t *testing.T) {
	a, b := pair(t)
	if _, err := a.router.Pick(0, &routing.Query{ID: "1", PromptTokens: 100}, nil, nil); err != nil {
		t.Fatal(err)
	}
	deliver(t, 0, a, b)
	lost := 0
	for now := time.Duration(0); b.router.Live() > 0; now += 100 * time.Millisecond {
		a.Tick(now)
		for _, o := range a.Take() {
			if o.Message.GetSum() != nil {
				lost++
			}
		}
		b.Tick(now)
		b.Take()
		if lost <= 2 && b.router.Live() != 1 {
			t.Fatalf("after %d lost heartbeats: got no booking, want it kept", lost)
		}
		if lost > 5 {
			t.Fatalf("after %d lost heartbeats: got %d bookings, want none", lost, b.router.Live())
		}
	}
	if got := b.State(0).gone; len(got) != 1 || got[0].Silent <= 0 || got[0].Silent > 3 {
		t.Errorf("got %+v, want the dead replica and a silence of at most 3 s", got)
	}
}

func TestBindingMovesWithItsTarget(t *testing.T) {
	a, b := pair(t)
	bound(t, a, "c", 1)
	deliver(t, time.Millisecond, a, b)
	b.router.RemoveTarget(1)
	bound(t, b, "c", 2) // a still knows the old one, which is earlier
	deliver(t, 2*time.Millisecond, a, b)
	if home(a) != target(2) || home(b) != target(2) {
		t.Errorf("got %v at a and %v at b, want %v at both", home(a), home(b), target(2))
	}
}

func TestSilentErrorIsFoundAndMended(t *testing.T) {
	a, b := pair(t)
	plan, err := a.router.Pick(0, &routing.Query{ID: "1", PromptTokens: 100}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	deliver(t, time.Millisecond, a, b)
	b.release(0, b.peers["a"], plan.Reservation, true) // an error of b's
	if b.router.Live() != 0 {
		t.Fatal("got a booking, want none")
	}
	a.Tick(heartbeatEvery)
	deliver(t, heartbeatEvery, a, b)
	if b.router.Live() != 1 || b.stats.Errors != 1 {
		t.Errorf("got %d bookings and %d errors, want 1 and 1", b.router.Live(), b.stats.Errors)
	}
	a.Tick(2 * heartbeatEvery)
	deliver(t, 2*heartbeatEvery, a, b)
	if b.stats.Errors != 1 {
		t.Errorf("after the mend: got %d errors, want 1", b.stats.Errors)
	}
}

// Somebody without the secret can record messages and send them again, to the replica that they
// were sent to or, if they were sent to all, to any. It changes nothing.
func TestRecordedMessagesHaveNoEffectAgain(t *testing.T) {
	a, b := pair(t)
	var tape []*message
	var answers []*message
	now := time.Duration(0)
	play := func(to *Core, list []*message) {
		for _, m := range list {
			to.Receive(now, m, m.GetReplica())
		}
	}
	record := func(from, to *Core) {
		for _, o := range from.Take() {
			if o.Build == nil {
				tape = append(tape, recode(t, o.Message))
				play(to, tape[len(tape)-1:])
				continue
			}
			for _, m := range o.all() {
				answers = append(answers, recode(t, m))
				play(to, answers[len(answers)-1:])
			}
		}
	}
	pick := func(c *Core, conversation string) routing.Plan {
		return must(c.router.Pick(now, &routing.Query{ID: "1", Conversation: conversation, PromptTokens: 1000}, nil, nil))
	}
	kept, ended := pick(a, "kept"), pick(a, "ended")
	record(a, b)
	a.Hello()
	b.ask(now, b.peers["a"])
	record(b, a) // the request
	record(a, b) // the answer
	a.router.Release(now, ended.Reservation)
	a.heartbeat()
	record(a, b)
	record(b, a)
	check := func(what string, bookings, replicas int) {
		t.Helper()
		got := b.State(now)
		if b.router.Live() != bookings || len(got.Peers) != replicas || len(got.Peers) > 0 && got.Peers[0].Bookings != uint64(bookings) {
			t.Errorf("%s: got %d bookings and replicas %+v, want %d and %d", what, b.router.Live(), got.Peers, bookings, replicas)
		}
		if out := b.Take(); replicas > 0 && len(out) > 0 {
			t.Errorf("%s: got %d messages in answer, want none", what, len(out))
		}
	}
	check("before", 1, 1)
	if len(tape) < 5 || len(answers) == 0 {
		t.Fatalf("got %d messages and %d parts recorded, want some", len(tape), len(answers))
	}
	play(b, tape)
	play(b, answers)
	check("changes, heartbeats, hello and state again", 1, 1)
	play(a, tape)
	if out := a.Take(); len(out) > 0 || a.router.Live() != 1 {
		t.Errorf("a state request again: got %d messages in answer and %d bookings, want 0 and 1", len(out), a.router.Live())
	}
	b.ask(now, b.peers["a"])
	b.Take()
	play(b, answers)
	if b.peers["a"].request == 0 || b.router.Live() != 1 {
		t.Errorf("the answer to an earlier request: got request %d and %d bookings, want it outstanding and 1", b.peers["a"].request, b.router.Live())
	}
	record(a, b)

	late := New("late", newRouter(t, 4), now, func() {}) // parts go to their asker's subject, which the seal binds
	play(late, tape)
	if got := late.State(now); late.router.Live() != 0 || len(got.Peers) != 0 || got.Conversations != 0 {
		t.Errorf("a replica that knows neither: got %d bookings, %d conversations, replicas %+v, want none", late.router.Live(), got.Conversations, got.Peers)
	}

	for ; now < 3*silence; now += 100 * time.Millisecond { // a is dead
		play(b, tape)
		play(b, answers)
		b.Tick(now)
	}
	check("a replica that is dead", 0, 0)
	a.router.Release(now, kept.Reservation)
	a.Bye()
	bye := a.Take()
	play(b, []*message{bye[len(bye)-1].Message})
	again := New("again", newRouter(t, 4), now, func() {}) // the next start of a has another id
	again.router.Share(again)
	pick(again, "kept")
	deliver(t, now, again, b)
	play(b, append(tape, bye[len(bye)-1].Message))
	check("goodbye again, after the next start", 1, 1)
}

func TestUnknownTargetsAreCopiedWhenTheyAppear(t *testing.T) {
	a, b := pair(t)
	b.router.RemoveTarget(1)
	q := &routing.Query{ID: "x", Conversation: "c", PromptTokens: 100, Pin: &routing.Pin{Worker: target(1).Worker, Rank: target(1).Rank}}
	if _, err := a.router.Pick(0, q, nil, nil); err != nil {
		t.Fatal(err)
	}
	deliver(t, time.Millisecond, a, b)
	if b.router.Live() != 0 || b.stats.Unknown != 2 {
		t.Errorf("got %d bookings and %d unknown targets, want 0 and 2 (booking and conversation)", b.router.Live(), b.stats.Unknown)
	}
	b.router.SetTarget(1, routing.TargetInfo{Target: target(1), Ready: true})
	b.Tick(100 * time.Millisecond)
	if b.router.Live() != 1 || home(b) != target(1) {
		t.Errorf("with the target: got %d bookings, conversation at %v, want 1 at %v", b.router.Live(), home(b), target(1))
	}
}

func TestLedgersAreBounded(t *testing.T) {
	a, b := pair(t)
	for i := range maxPeers + 10 {
		b.Receive(0, &message{Version: 1, Replica: fmt.Sprint("x", i)}, "")
	}
	if got := len(b.peers); got != maxPeers {
		t.Errorf("got %d replicas, want at most %d", got, maxPeers)
	}
	if late := b.stats.Refused; late != 11 { // one of the 256 is a
		t.Errorf("got %d refused, want 11", late)
	}
	for now := time.Duration(0); now <= 2*silence; now += longestTick { // those that were made up are gone, which makes room
		b.Tick(now)
	}
	b.Receive(2*silence, &message{Version: 1, Replica: "real"}, "")
	if p := b.peers["real"]; p == nil || len(b.peers) != maxPeers {
		t.Errorf("after the others are silent: got %v of %d replicas, want the new one of %d", p, len(b.peers), maxPeers)
	}
	for range maxBatch + 1 {
		bound(t, a, "c", routing.NoSlot)
	}
	if a.batch.entries > maxBatch || a.stats.Overflows == 0 {
		t.Errorf("got %d changes gathered and %d overflows, want at most %d and some", a.batch.entries, a.stats.Overflows, maxBatch)
	}
}

// A process that has the secret and makes up replicas has as much memory as a few.
func TestReplicasThatAreMadeUpShareABound(t *testing.T) {
	_, b := pair(t)
	now, clock := time.Duration(0), b.clock
	send := func(id string, m *message) {
		m.Version, m.Replica, m.Clock = 1, id, clock
		b.Receive(now, m, "")
		for b.Continue(0) {
		}
	}
	const each = 4096
	for i := range uint64(maxCopies/each + 2) {
		id := fmt.Sprint("x", i%200)
		from, p := i/200*each, b.peers[id]
		if p == nil {
			send(id, &message{})
			p = b.peers[id]
		}
		m := &message{Seq: p.seq, Targets: []*kvlanev1.ReplicaTarget{{Worker: "gone"}}}
		for n := range uint64(each) {
			m.Booked = append(m.Booked, &kvlanev1.ReplicaBooking{Id: from + n + 1, Decode: 1})
		}
		if p.request != 0 { // as its state
			m.StatePart = &kvlanev1.ReplicaStatePart{Id: p.request, Parts: 1}
		} else {
			m.Seq++
		}
		send(id, m)
	}
	copies := 0
	for _, p := range b.peers {
		copies += len(p.ledger) + len(p.incoming)
	}
	if copies != maxCopies || b.stats.Refused == 0 {
		t.Errorf("got %d copies and %d refused, want %d and some", copies, b.stats.Refused, maxCopies)
	}
	for _, p := range b.peersInOrder() { // what has ended makes room
		b.drop(now, p)
	}
	refused := b.stats.Refused
	send("new", &message{})
	send("new", &message{StatePart: &kvlanev1.ReplicaStatePart{Id: b.peers["new"].request, Parts: 1}, Targets: []*kvlanev1.ReplicaTarget{{Worker: "gone"}},
		Booked: []*kvlanev1.ReplicaBooking{{Id: 1, Decode: 1}}})
	if n := len(b.peers["new"].ledger); n != 1 || b.stats.Refused != refused {
		t.Errorf("got %d copies of a new replica, %d refused, want its one, %d", n, b.stats.Refused, refused)
	}
}

// Replicas that fall silent together, whatever they have booked, hold the router's lock for a short time at each tick.
func TestReplicasThatFallSilentTogether(t *testing.T) {
	crowd := func(n int) (*Core, time.Duration) {
		_, b := pair(t)
		clock := b.clock
		for i := range n {
			send := func(m *message) {
				m.Version, m.Replica, m.Clock = 1, fmt.Sprint("x", i), clock
				b.Receive(0, m, "")
				for b.Continue(0) {
				}
			}
			send(&message{})
			m := &message{StatePart: &kvlanev1.ReplicaStatePart{Id: b.peers[fmt.Sprint("x", i)].request, Parts: 1},
				Targets: []*kvlanev1.ReplicaTarget{{Worker: target(0).Worker, Rank: uint32(target(0).Rank + 1)}}}
			for id := range uint64(4096) {
				m.Booked = append(m.Booked, &kvlanev1.ReplicaBooking{Id: id + 1, Decode: 1})
			}
			send(m)
		}
		fastest := time.Hour // of four drops
		for i := range 4 {
			p := b.peers[fmt.Sprint("x", i)]
			start := time.Now()
			b.drop(0, p)
			fastest = min(fastest, time.Since(start))
		}
		return b, fastest
	}
	_, few := crowd(4)
	b, many := crowd(68)
	if many > 3*few+time.Millisecond {
		t.Errorf("the bookings of one of 68 replicas were dropped in %v, of one of 4 in %v", many, few)
	}
	now, ticks := time.Duration(0), 0
	for now < 2*silence {
		now += 100 * time.Millisecond
		was := b.router.Live()
		b.Tick(now)
		if was > b.router.Live() {
			ticks++
		}
		if got := was - b.router.Live(); got > maxDrops+4096 {
			t.Errorf("one tick dropped %d bookings, want at most %d and the rest of a replica's", got, maxDrops)
		}
	}
	if ticks != 64*4096/maxDrops || b.router.Live() != 0 {
		t.Errorf("after %d ticks %d bookings are left, want %d ticks, none", ticks, b.router.Live(), 64*4096/maxDrops)
	}
}

// Hellos that arrive together are answered by one heartbeat, which goes to all.
func TestAFloodOfHellosHasOneAnswer(t *testing.T) {
	_, b := pair(t)
	b.Take()
	for range 2 {
		for i := range 1000 {
			b.Receive(0, &message{Version: 1, Replica: "a", Clock: b.clock, Hello: true, Number: b.peers["a"].number + uint64(i) + 1}, "")
		}
		if out := b.Take(); len(out) != 1 || out[0].Message.GetSum() == nil {
			t.Errorf("got %d messages for 1,000 hellos, want one heartbeat", len(out))
		}
	}
}

// Each stored binding, or each message of a holder of the secret, may be somewhat later than the one before: all together
// they do not exhaust the clock. What the replica sends afterwards is accepted, by one that has just started too.
func TestTimesDoNotAddUp(t *testing.T) {
	const wall = 20000 * 24 * time.Hour
	for name, take := range map[string]func(a *Core, m *message){
		"stored":   func(a *Core, m *message) { a.restore(0, []*message{m}) },
		"received": func(a *Core, m *message) { a.Receive(0, m, "") },
	} {
		a, _ := pair(t)
		a.wall = wall
		until := a.latest(0)
		const step = 1 << 48
		for i := range uint64(1 << 14) {
			clock := a.clock + step
			take(a, &message{Version: 1, Replica: "s", Clock: clock, Number: i + 1, Targets: []*kvlanev1.ReplicaTarget{{Worker: "wa", Rank: 1}},
				Conversations: []*kvlanev1.ReplicaConversation{{Hi: 1, Lo: i + 1, Target: 1, Time: clock, Origin: "s"}}})
		}
		if a.clock <= until-step || a.clock > until || a.stats.Malformed == 0 {
			t.Errorf("%s: got the time %d and %d malformed, want at most %d and nearly that, and some", name, a.clock, a.stats.Malformed, until)
		}
		a.clock = until
		for range 1000 {
			bound(t, a, "c", routing.NoSlot)
		}
		rl := newRouter(t, 4)
		late := New("late", rl, 0, func() {})
		rl.Share(late)
		late.wall = wall
		a.heartbeat()
		deliver(t, time.Millisecond, a, late)
		if _, ok := late.legs[0].byKey[lastKey(a)]; !ok || late.stats.Malformed != 0 {
			t.Errorf("%s: a replica that starts knows a's conversation: %v, %d malformed; want true and 0", name, ok, late.stats.Malformed)
		}
	}
}

func TestStatePartWithoutARequest(t *testing.T) {
	_, b := pair(t)
	p := b.peers["a"]
	part := func(id uint64, part uint32) *message {
		return recode(t, &message{
			Version: 1, Replica: "a", Clock: b.clock, Targets: []*kvlanev1.ReplicaTarget{{Worker: "wa", Rank: 1}}, Booked: []*kvlanev1.ReplicaBooking{{Id: 5, Decode: 1}},
			StatePart: &kvlanev1.ReplicaStatePart{Id: id, Part: part, Parts: part + 1},
		})
	}
	for _, id := range []uint64{0, b.requests, b.requests + 1} {
		before := b.stats.Duplicates
		b.Receive(0, part(id, p.next), "")
		if b.router.Live() != 0 || b.stats.Duplicates != before+1 {
			t.Errorf("part of request %d, which is not outstanding: got %d bookings, %d duplicates, want 0, %d", id, b.router.Live(), b.stats.Duplicates, before+1)
		}
	}
	b.ask(0, p)
	b.Receive(0, part(p.request, 0), "")
	if b.router.Live() != 1 {
		t.Errorf("part of the outstanding request: got %d bookings, want 1", b.router.Live())
	}
}

func TestConversationsAreNotLaterThanTheirMessage(t *testing.T) {
	for late, ok := range map[uint64]bool{0: true, 1: false, 1<<62 - 101: false} {
		m := &message{
			Version: 1, Replica: "a", Seq: 1, Clock: 100, Targets: []*kvlanev1.ReplicaTarget{{Worker: "wa", Rank: 1}},
			Conversations: []*kvlanev1.ReplicaConversation{{Hi: 1, Lo: 1, Target: 1, Time: 100 + late, Origin: "a"}},
		}
		if _, err := Parse(must(proto.Marshal(m))); (err == nil) != ok {
			t.Errorf("a conversation %d later than its message: got %v, want accepted %v", late, err, ok)
		}
	}
}

func TestReadinessWaitsAgainWhenOthersCanBeReached(t *testing.T) {
	c := New("a", newRouter(t, 4), 0, func() {})
	if c.Ready(settled-1) || !c.Ready(settled) {
		t.Errorf("after the start: got ready %v and %v, want false before and true after %v", c.Ready(settled-1), c.Ready(settled), settled)
	}
	at := 3 * settled
	c.Reachable(at)
	if c.Ready(at + settled - 1) {
		t.Error("just after others can be reached: got ready, want not ready")
	}
	if !c.Ready(at + settled) {
		t.Error("some time after others can be reached: got not ready, want ready")
	}
}

func TestAnswersCopyWhatIsAskedFor(t *testing.T) {
	a, _ := pair(t)
	for i := range 100 {
		bound(t, a, fmt.Sprint(i), routing.NoSlot)
	}
	bound(t, a, "3", routing.NoSlot) // the most recently used one
	table := a.legs[0]
	all := table.usedBetween(0, a.clock, unlocked)
	if len(all) != 100 {
		t.Fatalf("got %d conversations, want 100", len(all))
	}
	since := all[89].time
	if got, want := table.usedBetween(since, a.clock, unlocked), all[90:]; !slices.Equal(got, want) {
		t.Errorf("since %d: got %d conversations, want the last %d", since, len(got), len(want))
	}
	if got := table.usedBetween(all[99].time, a.clock, unlocked); len(got) != 0 {
		t.Errorf("since the last use: got %d conversations, want 0", len(got))
	}
	if got, want := table.usedBetween(0, since, unlocked), all[:90]; !slices.Equal(got, want) {
		t.Errorf("until %d: got %d conversations, want the first %d", since, len(got), len(want))
	}
}

// Between two parts of a copy the table changes. What the copy lacks is in the changes that are sent meanwhile.
func TestAStateThatChangesWhileItIsCopied(t *testing.T) {
	const many = 3*scanAtATime + 10
	var cores []*Core
	for _, id := range []string{"a", "late"} {
		c := New(id, newRouterOf(t, 4, many+100), 0, func() {})
		c.router.Share(c)
		cores = append(cores, c)
	}
	a, late := cores[0], cores[1]
	for i := range many {
		bound(t, a, fmt.Sprint(i), 1)
		a.flush()
	}
	a.heartbeat()
	a.out = a.out[len(a.out)-1:] // late has heard nothing before
	send := func(from, to *Core) {
		for _, o := range from.Take() {
			for _, m := range o.all() {
				to.Receive(0, recode(t, m), from.id)
			}
		}
	}
	late.Take()
	send(a, late)
	send(late, a) // the request
	steps := 0
	for _, o := range a.Take() {
		if o.Build == nil {
			late.Receive(0, recode(t, o.Message), a.id)
			continue
		}
		for m := range o.Build(func(do func()) {
			do()
			steps++
			bound(t, a, fmt.Sprint("new", steps), 1)
			for i := range 4 { // moved before and after its copy
				bound(t, a, fmt.Sprint(i*scanAtATime+steps), 2)
			}
		}) {
			late.Receive(0, recode(t, m), a.id)
		}
	}
	send(a, late)
	for key := range a.legs[0].byKey {
		want, _ := a.router.Bound(0, key)
		if got, _ := late.router.Bound(0, key); got != want {
			t.Fatalf("conversation %x: got %v, want %v", key, got, want)
		}
	}
	p := late.peers["a"]
	if got, want := len(late.legs[0].byKey), len(a.legs[0].byKey); got != want || p.request != 0 || p.seq != a.seq || late.requests != 1 || steps < many/partSize {
		t.Errorf("got %d conversations, change %d after %d requests and %d steps, want %d, %d, 1, some", got, p.seq, late.requests, steps, want, a.seq)
	}
}

func TestOneAnswerToEachAsker(t *testing.T) {
	a, _ := pair(t)
	for id := range uint64(10) {
		for _, asker := range []string{"b", "c"} {
			a.Receive(0, &message{Version: 1, Replica: asker, StateRequest: &kvlanev1.ReplicaStateRequest{Id: id + 2}}, asker)
		}
	}
	got := map[string][]uint64{}
	for _, o := range a.Take() {
		if o.Build != nil {
			for m := range o.Build(unlocked) {
				got[o.Reply] = append(got[o.Reply], m.GetStatePart().GetId())
			}
		}
	}
	if !slices.Equal(got["b"], []uint64{11}) || !slices.Equal(got["c"], []uint64{11}) {
		t.Errorf("got answers to the requests %v, want only the last one of each asker, 11", got)
	}
}

// split is a replica that disaggregates everything: targets 0 and 1 prefill, 2 and 3 decode.
func split(t testing.TB, id string) *Core {
	t.Helper()
	config := routing.DefaultConfig()
	config.Disagg.Mode, config.Disagg.Threshold = routing.ModeThreshold, 0
	r, err := routing.New(config)
	if err != nil {
		t.Fatal(err)
	}
	for n := range 4 {
		role := routing.Prefill
		if n > 1 {
			role = routing.Decode
		}
		r.SetTarget(kvindex.Slot(n), routing.TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", n), Rank: kvindex.NoRank}, Ready: true, Role: role})
	}
	c := New(id, r, 0, func() {})
	r.Share(c)
	return c
}

func TestMovedPrefillsAreShared(t *testing.T) {
	for _, gathered := range []bool{false, true} { // each step in a message of its own, or all in one
		a, b := split(t, "a"), split(t, "b")
		deliver(t, 0, a, b)
		check := func(step string) {
			t.Helper()
			for slot := range kvindex.Slot(4) {
				if got, want := b.router.Load(slot), a.router.Load(slot); got != want {
					t.Errorf("gathered %v, %s: got load %+v of target %d at b, want a's %+v", gathered, step, got, slot, want)
				}
			}
		}
		send := func(step string) {
			t.Helper()
			if !gathered {
				deliver(t, 0, a, b)
				check(step)
			}
		}
		q := &routing.Query{ID: "1", PromptTokens: 1000}
		plan, err := a.router.Pick(0, q, nil, nil)
		if err != nil || plan.Prefill == routing.NoSlot {
			t.Fatalf("got %+v, %v, want a prefill target", plan, err)
		}
		send("booked")
		q.Exclude = append(q.Exclude, plan.Prefill)
		moved, err := a.router.MovePrefill(0, plan.Reservation, q, nil, nil)
		if err != nil || moved.Prefill == plan.Prefill {
			t.Fatalf("got %+v, %v, want another prefill target than %d", moved, err, plan.Prefill)
		}
		send("prefill moved")
		a.router.PrefillDone(0, plan.Reservation)
		send("prefill done")
		if !a.router.ComputeLocally(0, plan.Reservation, 700) {
			t.Fatal("got no local prefill, want one")
		}
		deliver(t, 0, a, b)
		check("computed by the decode target")
		a.Tick(heartbeatEvery)
		deliver(t, heartbeatEvery, a, b)
		if b.stats.Errors != 0 {
			t.Errorf("gathered %v: got %d ledgers that differ, want 0", gathered, b.stats.Errors)
		}
		a.router.FirstToken(0, plan.Reservation)
		deliver(t, heartbeatEvery, a, b)
		check("first token")
		a.router.Release(0, plan.Reservation)
		deliver(t, heartbeatEvery, a, b)
		check("released")
	}
}

func TestFailingTargetIsFoundInAFleet(t *testing.T) {
	a, b := pair(t)
	answer := func(c *Core, fails bool) {
		t.Helper()
		q := &routing.Query{ID: "x", PromptTokens: 100, Pin: &routing.Pin{Worker: target(1).Worker, Rank: target(1).Rank}}
		plan, err := c.router.Pick(0, q, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if fails {
			c.router.Failed(plan.Reservation)
		}
		c.router.FirstToken(0, plan.Reservation)
		c.router.Release(0, plan.Reservation)
		deliver(t, 0, a, b)
	}
	suspect := func() string {
		t.Helper()
		if _, err := b.router.Pick(time.Second, &routing.Query{ID: "y", PromptTokens: 1}, nil, nil); err != nil {
			t.Fatal(err)
		}
		return b.router.Suspect(1)
	}
	for range 5 {
		answer(a, true)
		answer(b, true)
	}
	if got := suspect(); got != "failures" {
		t.Errorf("five failures at b and five at a in between: got suspect for %q at b, want failures", got)
	}
	answer(b, false)
	if got := suspect(); got != "" {
		t.Errorf("after a good answer at b: got suspect for %q, want not suspect", got)
	}
}

// record is a stream of this version's messages: later versions must understand it. unnumbered is one of the versions
// that did not number messages.
const record, unnumbered = "testdata/version1-numbered.hex", "testdata/version1.hex"

func TestRecordedStream(t *testing.T) {
	if os.Getenv("KVLANE_RECORD") != "" {
		writeRecord(t)
	}
	for _, name := range []string{record, unnumbered} {
		t.Run(filepath.Base(name), func(t *testing.T) { readRecord(t, name) })
	}
}

func readRecord(t *testing.T, name string) {
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	r := newRouter(t, 4)
	c := New("reader", r, 0, func() {})
	r.Share(c)
	for line := range strings.Lines(string(text)) {
		data, err := hex.DecodeString(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		// A field that this version does not know is ignored.
		data = append(data, 0xfa, 0x7f, 3, 'n', 'e', 'w')
		m, err := Parse(data)
		if err != nil {
			t.Fatalf("got %v for a recorded message", err)
		}
		if m.GetStatePart() != nil && c.peers[m.GetReplica()] != nil {
			m.StatePart.Id = c.peers[m.GetReplica()].request
		}
		c.Receive(time.Millisecond, m, "")
	}
	if got := r.Load(1); got.Active != 1 || got.Queue != 100 || r.Live() != 2 {
		t.Errorf("got load %+v, %d bookings, want one request with 100 tokens queued, and two bookings", got, r.Live())
	}
	if got := r.Load(2); got.Active != 1 || got.Queue != 0 || home(c) != target(1) || c.stats.Errors != 0 {
		t.Errorf("got load %+v, conversation at %v, %d errors, want a request that decodes, %v, 0", got, home(c), c.stats.Errors, target(1))
	}
}

// writeRecord records a start, a state, changes and a heartbeat.
func writeRecord(t *testing.T) {
	var text strings.Builder
	add := func(m *message) {
		data, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&text, "%x\n", data)
	}
	r := newRouter(t, 4)
	c := New("recorded", r, 0, func() {})
	r.Share(c)
	pick := func(slot kvindex.Slot, conversation string) routing.ReservationID {
		plan, err := r.Pick(0, &routing.Query{ID: "1", Conversation: conversation, PromptTokens: 100, Pin: &routing.Pin{Worker: target(int(slot)).Worker, Rank: target(int(slot)).Rank}}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return plan.Reservation
	}
	for _, o := range c.Take() {
		add(o.Message)
	}
	gone := pick(0, "")
	c.answer(&peer{}, &kvlanev1.ReplicaStateRequest{}, "reply")
	pick(1, "c")
	r.FirstToken(0, pick(2, ""))
	r.Release(0, gone)
	c.heartbeat()
	for _, o := range c.Take() {
		for _, m := range o.all() {
			add(m)
		}
	}
	if err := os.MkdirAll("testdata", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// FuzzParse feeds arbitrary messages to a Core.
func FuzzParse(f *testing.F) {
	for line := range strings.Lines(string(must(os.ReadFile(record)))) {
		f.Add(must(hex.DecodeString(strings.TrimSpace(line))))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Parse(data)
		if err != nil {
			return
		}
		r := newRouter(t, 4)
		c := New("reader", r, 0, func() {})
		r.Share(c)
		for range 2 {
			c.Receive(0, m, "reply")
			if p := c.peers[m.GetReplica()]; p != nil && m.GetStatePart() != nil {
				m.StatePart.Id, m.StatePart.Part, m.StatePart.Parts = p.request, 0, 1
			}
		}
		if p := c.peers[m.GetReplica()]; p != nil && m.GetStatePart() != nil {
			for _, id := range []uint64{0, c.requests, c.requests + 1} { // no request is outstanding
				m.StatePart.Id, m.StatePart.Part, m.StatePart.Parts = id, p.next, p.next+1
				c.Receive(0, m, "")
			}
		}
		for at := range 50 {
			c.Tick(time.Duration(at) * 100 * time.Millisecond)
			c.Take()
		}
		if r.Live() != 0 {
			t.Errorf("got %d bookings of a replica that is silent, want 0", r.Live())
		}
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// What a store, or another replica, has at the end of its range must not make this replica's own
// messages ones that the others refuse.
func TestExtremeBindingsLeaveMessagesThatOthersAccept(t *testing.T) {
	send := func(what string, a, b *Core) {
		t.Helper()
		bound(t, a, "c", routing.NoSlot)
		a.heartbeat()
		deliver(t, time.Millisecond, a, b) // parses all messages
		if _, ok := b.legs[0].byKey[lastKey(a)]; !ok || b.peers["a"].seq != a.seq {
			t.Errorf("%s: got change %d of a and the conversation known %v at b, want %d and true", what, b.peers["a"].seq, ok, a.seq)
		}
	}
	stored := func(clock uint64) *message {
		return &message{
			Version: 1, Replica: "x", Clock: clock, Targets: []*kvlanev1.ReplicaTarget{{Worker: target(1).Worker, Rank: 2}},
			Conversations: []*kvlanev1.ReplicaConversation{{Hi: 1, Lo: 1, Target: 1, Time: clock, Origin: "x"}},
		}
	}
	a, b := pair(t)
	a.restore(0, []*message{stored(1000)})
	if len(a.legs[0].byKey) != 1 || a.stats.Malformed != 0 {
		t.Errorf("a stored binding: got %d conversations, %d malformed, want 1 and 0", len(a.legs[0].byKey), a.stats.Malformed)
	}
	a.restore(0, []*message{stored(1<<62 - 1)})
	if a.stats.Malformed != 1 || a.clock > 2000 {
		t.Errorf("a stored binding at the end of the clock: got %d malformed and the clock %d, want 1 and the clock as it was", a.stats.Malformed, a.clock)
	}
	send("clock", a, b)

	a, b = pair(t)
	bound(t, a, "c", 1)
	deliver(t, time.Millisecond, a, b)
	for _, c := range []*Core{a, b} {
		c.legs[0].find(lastKey(c)).generation = maxGeneration
	}
	a.router.RemoveTarget(1)
	send("generation", a, b)
}

// lastKey is the conversation that was used last.
func lastKey(c *Core) routing.Key { return c.legs[0].slab[c.legs[0].slab[0].older].key }

func TestHeldMessagesAreBounded(t *testing.T) {
	_, b := pair(t)
	p := b.peers["a"]
	b.ask(0, p)
	first := b.stats
	m := &message{Version: 1, Replica: "a", Seq: p.seq, Released: make([]uint64, maxHeldSize/32)}
	for i := range m.GetReleased() {
		m.Released[i] = 1 << 60 // 9 bytes
	}
	size := proto.Size(m)
	for n := 1; n <= 4; n++ {
		m.Seq, m.Number = m.GetSeq()+1, p.number+1
		b.Receive(0, proto.CloneOf(m), "")
		if got := len(p.held) * size; got > maxHeldSize {
			t.Errorf("after %d messages: got %d bytes held, want at most %d", n, got, maxHeldSize)
		}
		if n == 1 && (len(p.held) != 1 || b.requests != p.request) {
			t.Errorf("after one message of %d bytes: got %d held, want 1", size, len(p.held))
		}
	}
	if b.stats.Gaps != first.Gaps || p.request == 0 {
		t.Errorf("got %d gaps and request %d, want %d and one that is outstanding", b.stats.Gaps, p.request, first.Gaps)
	}
	p.held, p.heldSize = nil, 0
	for i := range maxAllHeld / maxHeldSize {
		if !b.hold(p, m) {
			t.Errorf("got a message not held beside %d replicas, want it held", i)
		}
		p.held, p.heldSize = nil, 0
		b.peers[fmt.Sprint("x", i)] = &peer{heldSize: maxHeldSize}
	}
	if b.hold(p, m) {
		t.Error("got a message held beyond the bound of all replicas")
	}
	clear(b.peers)
	p.held, p.heldSize = nil, 0
	short := &message{Version: 1, Replica: "a", Progress: slices.Repeat([]*kvlanev1.ReplicaProgress{{}}, 1<<17)} // two bytes each
	for b.hold(p, proto.CloneOf(short)) {
		if len(p.held)*len(short.GetProgress())*int(unsafe.Sizeof(kvlanev1.ReplicaProgress{})) > maxHeldSize {
			t.Fatalf("got %d messages of %d bytes held, which take more than %d decoded", len(p.held), proto.Size(short), maxHeldSize)
		}
	}
}

// A field of a later version goes through a replica that does not know it: to one that joins,
// when the conversation is used, and to the store.
func TestFieldsOfLaterVersionsArePassedOn(t *testing.T) {
	a, b := pair(t)
	unknown := []byte{0xfa, 0x7f, 3, 'n', 'e', 'w'}
	bound(t, a, "c", 1)
	bound(t, a, "huge", 1)
	for _, o := range a.Take() {
		for _, v := range o.Message.GetConversations() {
			added := unknown
			if (routing.Key{Hi: v.GetHi(), Lo: v.GetLo()}) == lastKey(a) {
				added = append([]byte{0xfa, 0x7f, 0xac, 2}, make([]byte, 300)...)
			}
			v.ProtoReflect().SetUnknown(added)
		}
		b.Receive(0, recode(t, o.Message), "")
	}
	b.saving.after, b.saving.all = time.Hour, true
	bound(t, b, "c", routing.NoSlot)
	late := New("late", newRouter(t, 4), 0, func() {})
	late.router.Share(late)
	deliver(t, 0, b, late)
	for name, c := range map[string]*Core{"the replica between": b, "one that joined": late} {
		kept := 0
		for i := range c.legs[0].slab {
			if x := &c.legs[0].slab[i]; x.later == string(unknown) {
				kept++
			} else if x.later != "" {
				t.Errorf("%s: got %d bytes of unknown fields, want at most %d", name, len(x.later), maxLater)
			}
		}
		if kept != 1 || len(c.legs[0].byKey) != 2 {
			t.Errorf("%s: got %d of %d conversations with the unknown field, want 1 of 2", name, kept, len(c.legs[0].byKey))
		}
	}
	w := writer{m: &message{}}
	w.conversation(0, &b.takeUnsaved()[0][0])
	if got := w.m.GetConversations()[0].ProtoReflect().GetUnknown(); string(got) != string(unknown) {
		t.Errorf("to be stored: got unknown fields %x, want %x", got, unknown)
	}
}

// A sealed message belongs to its subject: a state that answers one replica is not one for another.
func TestSealedMessagesBelongToTheirSubject(t *testing.T) {
	s := must(newSeal("secret"))
	sealed := s.close("fleet.v1.parts.a", []byte("state"))
	if got, err := s.open("fleet.v1.parts.a", sealed); err != nil || string(got) != "state" {
		t.Errorf("at its subject: got %q, %v, want it opened", got, err)
	}
	if got, err := s.open("fleet.v1.parts.b", sealed); err == nil {
		t.Errorf("at another replica's subject: got %q, want an error", got)
	}
}

// The subjects are handled concurrently: a request of a replica may come after its goodbye. It does not bring it back.
// Strangers' connections cannot fill the log.
func TestWarningsOfNATSAreBounded(t *testing.T) {
	var out strings.Builder
	var last atomic.Value
	l := newNATSLog(zerolog.New(&out), &last)
	for i := range 1000 {
		l.Errorf("authentication error %d", i)
	}
	if n := strings.Count(out.String(), "authentication error: give all replicas the same secret in fleet.embedded.secret_file 4"); n != 1 || strings.Count(out.String(), "\n") != 5 {
		t.Errorf("got %s of 1,000 warnings, want 5 with advice", &out)
	}
	if got := fmt.Sprint(last.Load()); !strings.HasSuffix(got, "secret_file 999") {
		t.Errorf("got the last error %q, want the 999th", got)
	}
	l.Fatalf("the port is taken")
	l.Noticef("a route")
	if got := out.String(); !strings.Contains(got, "taken") || !strings.Contains(got, "a route") {
		t.Errorf("got %q without what is no warning", got)
	}
}

func TestNothingComesAfterAGoodbye(t *testing.T) {
	a, b := pair(t)
	a.Bye()
	for _, o := range a.Take() {
		if o.Message != nil {
			b.Receive(0, recode(t, o.Message), "")
		}
	}
	m := &message{Version: 1, Replica: "a", StateRequest: &kvlanev1.ReplicaStateRequest{Id: 1 << 20}}
	b.Receive(0, recode(t, m), "parts.a")
	m.StateRequest, m.Number = nil, 1<<20
	b.Receive(0, recode(t, m), "")
	if p := b.peers["a"]; !p.gone || len(b.Take()) != 0 {
		t.Errorf("got a replica that is back %v, want it gone and nothing sent to it", !p.gone)
	}
}

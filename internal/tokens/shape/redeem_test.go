package shape

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// offering returns a checker of an engine whose ids differ for prompts with "hostile", and what offers it the completions of a
// format and running numbers, each of which is compared.
func offering(t *testing.T) (*Checker, func(format string, times int)) {
	t.Helper()
	f, s := startEngine(t)
	hostile := func(raw []byte) bool { return bytes.Contains(raw, []byte("hostile")) }
	f.wrongFor.Store(&hostile)
	c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL}, CheckerOptions{ModelName: "m", Every: 1})
	c.Check(t.Context())
	n := 0
	return c, func(format string, times int) {
		t.Helper()
		for range times {
			n++
			compared(t, c, fmt.Sprintf(format, n))
		}
	}
}

// compared offers a completion of a prompt, and reports whether it was compared.
func compared(t *testing.T, c *Checker, prompt string) bool {
	t.Helper()
	req, err := body.Parse(body.Completions, fmt.Appendf(nil, `{"prompt":"%s"}`, prompt))
	if err != nil {
		t.Fatal(err)
	}
	c.Offer(req)
	select {
	case raw := <-c.samples:
		c.sample(t.Context(), raw)
		return true
	default:
		return false
	}
}

// One prompt with other fields is one prompt; others are others.
func TestOnePromptWithOtherFieldsCondemnsNoEngine(t *testing.T) {
	c, offer := offering(t)
	offer(`hostile 1","user":"%d`, 4*maxRecent)
	if c.State() != Agrees {
		t.Errorf("one prompt with other fields: got %v", c.State())
	}
	offer("hostile %d", maxRecent)
	if c.State() != Differs {
		t.Errorf("other prompts: got %v", c.State())
	}
}

// An engine with few requests between two checks is redeemed, too.
func TestFewPromptsRedeemAnEngine(t *testing.T) {
	c, offer := offering(t)
	offer("hostile %d", maxRecent)
	if c.State() != Differs {
		t.Fatalf("got %v, want %v", c.State(), Differs)
	}
	c.Check(t.Context())
	offer("fine %d", 5)
	if c.State() != Differs {
		t.Fatalf("after five: got %v, want %v", c.State(), Differs)
	}
	for range 10 {
		c.Check(t.Context())
		offer("fine %d", 5)
	}
	if c.State() != Agrees {
		t.Errorf("after 55 prompts that agree: got %v", c.State())
	}
}

// An API whose ids were wanted while the engine was not known is asked for, also where a prompt in service shows that it agrees.
func TestWantedIDsAreProbedAfterAPromptAgreed(t *testing.T) {
	f, s := startEngine(t)
	c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL}, CheckerOptions{ModelName: "m", Every: 1})
	f.down.Store(true)
	c.Check(t.Context())
	c.TakesIDs(body.Completions)
	f.down.Store(false)
	if !compared(t, c, "fine") || c.State() != Agrees {
		t.Fatalf("got %v", c.State())
	}
	if c.unanswered&(1<<body.Completions) == 0 || c.repeats == 0 { // what Run asks at the next retry
		t.Error("the engine agrees, ids are wanted, and nothing asks whether it takes them")
	}
}

// Batches, which are not compared, leave the next prompts in the window. A flood of them ends it.
func TestBatchesDoNotUseUpTheWindow(t *testing.T) {
	batch, err := body.Parse(body.Completions, []byte(`{"prompt":["a","b"]}`))
	if err != nil {
		t.Fatal(err)
	}
	for batches, want := range map[int]State{maxRecent: Differs, wholeBurst: Agrees} {
		c, offer := offering(t)
		c.options.Every = 1000
		c.count.Store(999)
		offer("hostile %d", 1)
		for range batches {
			if c.Offer(batch); len(c.samples) > 0 {
				c.sample(t.Context(), <-c.samples)
			}
		}
		offer("hostile %d", maxRecent/2-1)
		if c.State() != want {
			t.Errorf("after %d batches: got %v, want %v", batches, c.State(), want)
		}
	}
}

// An engine that has not answered may have been replaced: it is handed no ids until it is asked again.
func TestAnEngineThatDidNotAnswerIsHandedNoIDs(t *testing.T) {
	f, s := startEngine(t)
	c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL}, CheckerOptions{ModelName: "m", Every: 1})
	c.Check(t.Context())
	c.TakesIDs(body.Completions)
	c.taken.Store(1 << body.Completions)
	for _, down := range []bool{false, true, false} {
		f.down.Store(down)
		compared(t, c, "fine")
		if got, want := c.TakesIDs(body.Completions), c.unanswered == 0 && !down; got != want {
			t.Errorf("down %t, %v: ids are handed: %t, want %t", down, c.State(), got, want)
		}
	}
	if c.State() != Agrees || c.unanswered == 0 {
		t.Errorf("got %v, APIs to be asked %b, want that it agrees and is asked at the next retry", c.State(), c.unanswered)
	}
}

// What is compared in service waits for the gate, too.
func TestSamplesWaitForTheGate(t *testing.T) {
	f, s := startEngine(t)
	gate, checked := make(chan struct{}, 1), make(chan struct{}, 100)
	c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL}, CheckerOptions{ModelName: "m", Every: 1, Gate: gate,
		OnCheck: func(body.API, *Difference, error) { checked <- struct{}{} }})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	for range builtIn("m") {
		<-checked
	}
	gate <- struct{}{} // another checker asks its engine
	asked := f.asked.Load()
	req, err := body.Parse(body.Completions, []byte(`{"prompt":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	for len(c.samples) < cap(c.samples) {
		c.Offer(req)
	}
	time.Sleep(20 * time.Millisecond) // Run has taken one
	if n := f.asked.Load() - asked; n != 0 {
		t.Errorf("got %d questions while the gate is shut, want none", n)
	}
	<-gate
	<-checked
	stop()
	<-done
}

// Each connection to a port of events.bind asks for a check, and a hostile client makes thousands of them in a second.
func TestRechecksArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var checks atomic.Int32
		c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: "none://no.engine"}, CheckerOptions{ModelName: "m", Retry: 24 * time.Hour,
			OnCheck: func(body.API, *Difference, error) { checks.Add(1) }})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); c.Run(ctx) }()
		synctest.Wait()
		expect := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			if got := checks.Load(); int(got) != want {
				t.Errorf("%s: got %d checks, want %d", when, got, want)
			}
		}
		expect("at the start", 1)
		c.Recheck()
		time.Sleep(time.Millisecond)
		expect("an engine connects", 2)
		for range 1000 {
			c.Recheck()
			time.Sleep(time.Millisecond)
		}
		expect("a thousand connections in a second", 1+maxSoon)
		time.Sleep(10 * pause)
		expect("the last connection", 2+maxSoon)
		for range 600 {
			c.Recheck()
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if got, most := int(checks.Load()), 2+2*maxSoon+int(600*time.Second/pause); got > most || got < most-maxSoon {
			t.Errorf("ten minutes of connections: got %d checks, want about %d", got, most)
		}
		stop()
		<-done
	})
}

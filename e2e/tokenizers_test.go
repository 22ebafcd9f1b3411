package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// Every worker is compared: one that returns with another tokenizer is routed by load, the
// other still by its cache, and both by their caches again once the tokenizer is restored.
func TestAWorkerThatComesBackWithAnotherTokenizer(t *testing.T) {
	var options [2]enginesim.Options
	b := newBed(t, shape{ranks: 1, check: "every: 1, retry: 500ms", engine: func(i int, o *enginesim.Options) { options[i] = *o }})
	state := func(worker, state string) func() bool {
		return func() bool {
			return b.metric("kvlane_tokenizer_state", fmt.Sprintf("worker=%q", worker), fmt.Sprintf("state=%q", state)) == 1
		}
	}
	// serve runs conversations of two turns until each of the workers had three first
	// turns, and returns the tokens matched in second turns by worker.
	serve := func(seed string) map[string]int {
		t.Helper()
		matched, turns := map[string]int{}, map[string]int{}
		for n := 0; n < 60 && (turns["e0"] < 3 || turns["e1"] < 3); n++ {
			if n%3 == 2 {
				b.chat(message{"user", prose(fmt.Sprint(seed, n), 20)}) // new conversations alternate: not all on one worker
			}
			messages := []message{{"system", fmt.Sprint(seed, n, system)}, {"user", "Where are the maps?"}}
			first := b.chat(messages...)
			second := b.chat(append(messages, message{"assistant", first.text()}, message{"user", "And the letters?"})...)
			turns[strings.TrimSuffix(first.target, "/0")]++
			matched[strings.TrimSuffix(second.target, "/0")] += second.matched
		}
		if turns["e0"] < 3 || turns["e1"] < 3 {
			t.Fatalf("first turns by worker: %v", turns)
		}
		return matched
	}
	other, err := enginesim.LoadTokenizer(os.DirFS("../internal/tokens/models/mistral_nemo"))
	if err != nil {
		t.Fatal(err)
	}
	restart := func(tok *enginesim.Tokenizer) {
		t.Helper()
		b.engines[0].Close()
		o := options[0]
		o.Tokenizer = tok
		e, err := enginesim.Start(context.Background(), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		b.engines[0] = e
		b.until("the worker is ready", func() bool { return b.metric("kvlane_worker_ready", `worker="e0"`) == 1 })
	}
	for _, w := range []string{"e0", "e1"} {
		b.until(w+" was compared", state(w, "agrees"))
	}
	if m := serve("a"); m["e0"] == 0 || m["e1"] == 0 {
		t.Errorf("before: matched %v", m)
	}
	for _, w := range []string{"e0", "e1"} {
		b.until("requests are compared with "+w, func() bool {
			return b.metric("kvlane_token_checks_total", fmt.Sprintf("worker=%q", w), `outcome="equal"`) >= 10
		})
	}

	restart(other)
	b.until("e0 differs", state("e0", "differs"))
	if m := serve("b"); m["e0"] != 0 || m["e1"] == 0 {
		t.Errorf("with another tokenizer on e0: matched %v", m)
	}
	if !state("e1", "agrees")() {
		t.Error("e1 no longer agrees")
	}
	if n := b.metric("kvlane_degraded_total", `reason="tokenizer_differs"`); n == 0 {
		t.Error("nothing was counted as degraded")
	}
	told := false
	for line := range strings.Lines(b.read("kvlane.log")) {
		told = told || strings.Contains(line, `"worker":"e0"`) && strings.Contains(line, "the engine's")
	}
	if !told {
		t.Error("the log does not tell the first token that differs")
	}

	restart(tokenizer)
	b.until("e0 agrees again", state("e0", "agrees"))
	if m := serve("c"); m["e0"] == 0 || m["e1"] == 0 {
		t.Errorf("afterwards: matched %v", m)
	}
}

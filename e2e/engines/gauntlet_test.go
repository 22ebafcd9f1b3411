package engines

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/replay"
)

// The workload: conversations whose prompts grow by each turn and begin with one of a few prompts that they share. Lengths are
// whole blocks, so that the simulation has them exactly.
const (
	sharedPart, sharedPrompts              = 12, 5 // blocks, prompts
	firstTurn, nextTurn, turnsOf, answerOf = 32 * 32, 12 * 32, 6, 4
	conversations                          = 64
	gauntletEngines, gauntletBlocks        = 4, 640
	gauntletBudget                         = 2048
	gauntletBase, gauntletToken            = 50e-3, 250e-6 // seconds of a step and of a token: slow, so that two processors suffice
	gauntletPair, gauntletDecode           = 20e-9, 1e-3
	// gauntletLoad is the time that engines compute if all prefixes hit, as a part of all time.
	gauntletLoad = 0.5
)

// gauntletRules are compared; the first one is what ratios refer to.
var gauntletRules = []string{"kv-aware", "min-wait", "session", "load-balancing", "round-robin"}

// TestGauntlet plays one workload against four stock vLLMs behind Kvlane and Envoy and in the simulation, whose engine is fitted to
// single requests of other prompts, and prints both. The engines' steps take the time of a formula (timed_worker.py), so that four
// of them on two processors do not wait for each other. It takes minutes, and is run by hand (make gauntlet-vllm).
func TestGauntlet(t *testing.T) {
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONPATH", here)
	t.Setenv("STEP", fmt.Sprintf("[%g, %g, %g, %g]", gauntletBase, gauntletToken, gauntletPair, gauntletDecode))
	k := *vllm
	k.context, k.blocks = 4096, gauntletBlocks
	k.further = []string{"--max-num-batched-tokens", fmt.Sprint(gauntletBudget), "--worker-cls", "timed_worker.TimedWorker"}
	var engines []*engine
	for range gauntletEngines {
		engines = append(engines, launch(t, &k))
	}
	workers := ""
	for i, e := range engines {
		e.serves()
		workers += strings.Replace(e.yaml(), "name: vllm", fmt.Sprint("name: vllm", i), 1)
	}
	var measured [][]streamed
	var model replay.Engine
	var requests []replay.Request
	overhead := 0.0
	for _, rule := range gauntletRules {
		t.Run(rule, func(t *testing.T) {
			for _, e := range engines {
				e.t = t
				e.clear()
			}
			b := newFront(t, engines[0], workers, ", first_token: true", "routing: {preset: "+rule+"}\n")
			if requests == nil {
				model, overhead = b.fit()
				requests = gauntletRequests(&model)
				for _, e := range engines {
					e.clear()
				}
			}
			b.settle()
			time.Sleep(time.Second) // Envoy knows the workers
			measured = append(measured, b.play(requests))
			t.Logf("%+v", summary(requests, measured[len(measured)-1]))
		})
	}
	for _, e := range engines {
		e.t = t
	}
	t.Logf("fit: step %.2f ms + %.1f us a token + %.2f ns a pair, %.2f ms a decoding request; %.1f ms outside of steps; %d requests in %.0f s",
		1e3*model.Base, 1e6*model.PerToken, 1e9*model.PerPair, 1e3*model.PerDecode, 1e3*overhead, len(requests), requests[len(requests)-1].At)
	if len(measured) != len(gauntletRules) {
		return
	}
	report, err := replay.Run(replay.Options{
		Workload: replay.Workload{Name: "vllm", BlockSize: k.block, Generate: func(uint64) []replay.Request { return slices.Clone(requests) }},
		Fleet:    replay.Fleet{Workers: len(engines), Ranks: 1, Engine: model}, Policies: gauntletRules, Seeds: []uint64{1},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%-16s %36s %36s", "", "vLLM: p50, p90, s; tokens computed", "simulated, and its ratio to vLLM's")
	for i, rule := range gauntletRules {
		r, s := summary(requests, measured[i]), report.Rows[i].Mean
		s.TTFT50, s.TTFT90 = s.TTFT50+overhead, s.TTFT90+overhead
		t.Logf("%-16s %10.3f %10.3f %10.1f %% %10.3f %.2f %10.3f %.2f %10.1f %% %.2f", rule, r.TTFT50, r.TTFT90, 100*(1-r.Hit),
			s.TTFT50, s.TTFT50/r.TTFT50, s.TTFT90, s.TTFT90/r.TTFT90, 100*(1-s.Hit), (1-s.Hit)/(1-r.Hit))
	}
}

// gauntletRequests are conversations that begin at random; the engines' time at full hits is gauntletLoad of all.
func gauntletRequests(e *replay.Engine) (out []replay.Request) {
	step := func(cached, n float64) float64 { return e.Base + e.PerToken*n + e.PerPair*n*(cached+n/2) }
	const shared = float64(sharedPart * 32)
	cost := step(shared, firstTurn-shared)
	for turn := 1; turn < turnsOf; turn++ {
		cost += step(firstTurn+nextTurn*float64(turn-1), nextTurn)
	}
	cost += turnsOf * (answerOf - 1) * (e.Base + e.PerDecode)
	span := conversations * cost / (gauntletLoad * gauntletEngines)
	rng := rand.New(rand.NewPCG(101, 0))
	for c := range conversations {
		at := rng.Float64() * span
		blocks, prompt := []uint64{}, uint64(rng.IntN(sharedPrompts))
		for i := range uint64(sharedPart) {
			blocks = append(blocks, 1<<60+prompt<<20+i)
		}
		for turn := range turnsOf {
			size := firstTurn + nextTurn*turn
			for len(blocks) < size/vllm.block {
				blocks = append(blocks, rng.Uint64())
			}
			out = append(out, replay.Request{At: at, Conversation: fmt.Sprint("c", c), Prompt: size, Output: answerOf, Blocks: slices.Clone(blocks)})
			at += span / conversations * (3 + 6*rng.Float64())
		}
	}
	slices.SortStableFunc(out, func(a, b replay.Request) int { return cmp.Compare(a.At, b.At) })
	return out
}

// blockIDs are the tokens of a block's name.
func blockIDs(ids []int, name uint64) []int {
	rng := rand.New(rand.NewPCG(name, 0))
	for range vllm.block {
		ids = append(ids, 1000+rng.IntN(90000))
	}
	return ids
}

// fit measures single requests, three of each length, and fits the simulated engine to the fastest of each. overhead is how much
// longer the first token takes than the engine's step.
func (b *bed) fit() (e replay.Engine, overhead float64) {
	sizes := []int{32, 512, 1024, 2048}
	first := make([]float64, len(sizes))
	step := math.Inf(1)
	for i, size := range sizes {
		first[i] = math.Inf(1)
		for n := range 3 {
			r := replay.Request{Prompt: size, Output: 33}
			for k := range size / b.block {
				r.Blocks = append(r.Blocks, uint64(1+i)<<40+uint64(n)<<20+uint64(k))
			}
			got := b.stream(&r)
			first[i] = min(first[i], got.first)
			step = min(step, (got.last-got.first)/float64(r.Output-1))
		}
	}
	// Many at a time, for what a further decoding request adds to a step: every worker has four.
	const many, each = 4 * gauntletEngines, 4
	var wait sync.WaitGroup
	var last [many]float64
	for n := range last {
		wait.Go(func() {
			r := replay.Request{Prompt: b.block, Output: 129, Blocks: []uint64{uint64(1)<<50 + uint64(n)}}
			got := b.stream(&r)
			last[n] = (got.last - got.first) / float64(r.Output-1)
		})
	}
	wait.Wait()
	slices.Sort(last[:])
	e = replay.Engine{Name: "vllm", Budget: gauntletBudget, Seqs: 8, Capacity: gauntletBlocks * b.block}
	e.PerDecode = max(0, (last[many/2]-step)/(each-1))
	e.Base = step - e.PerDecode
	// first = c + PerToken*n + PerPair*n*n/2, by the three long ones, which fit into one step.
	slope := func(i, j int) float64 { return (first[j] - first[i]) / float64(sizes[j]-sizes[i]) }
	e.PerPair = max(0, 2*(slope(2, 3)-slope(1, 2))/float64(sizes[3]-sizes[1]))
	e.PerToken = max(0, slope(1, 3)-e.PerPair*float64(sizes[1]+sizes[3])/2)
	return e, max(0, first[0]-e.Base-e.PerToken*float64(sizes[0]))
}

// streamed is a request's times to the first and last token, in seconds, and its tokens that the engine had cached.
type streamed struct {
	first, last float64
	cached      int
}

// stream sends a request through Envoy.
func (b *bed) stream(r *replay.Request) (s streamed) {
	ids := make([]int, 0, r.Prompt)
	for _, name := range r.Blocks {
		ids = blockIDs(ids, name)
	}
	body, err := json.Marshal(map[string]any{"model": modelName, "prompt": ids, "max_tokens": r.Output, "min_tokens": r.Output, "ignore_eos": true,
		"temperature": 0, "stream": true, "stream_options": map[string]any{"include_usage": true}})
	if err != nil {
		b.t.Error(err)
		return s
	}
	req, err := http.NewRequest(http.MethodPost, "http://"+b.ingress+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		b.t.Error(err)
		return s
	}
	req.Header.Set("Content-Type", "application/json")
	if r.Conversation != "" {
		req.Header.Set("X-Session-Id", r.Conversation)
	}
	began := time.Now()
	resp, err := b.client.Do(req)
	if err != nil {
		b.t.Error(err)
		return s
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: {")
		if !ok {
			continue
		}
		var chunk struct {
			Choices []json.RawMessage `json:"choices"`
			Usage   tokenCounts       `json:"usage"`
		}
		if err := json.Unmarshal([]byte("{"+data), &chunk); err != nil {
			b.t.Error(err)
		}
		if s.cached += chunk.Usage.Details.Cached; len(chunk.Choices) == 0 {
			continue
		}
		if s.last = time.Since(began).Seconds(); s.first == 0 {
			s.first = s.last
		}
	}
	if resp.StatusCode != http.StatusOK || s.first == 0 || lines.Err() != nil {
		b.t.Errorf("got status %d and the first token after %v s (%v), want an answer", resp.StatusCode, s.first, lines.Err())
	}
	return s
}

// play sends the requests at their times.
func (b *bed) play(requests []replay.Request) []streamed {
	got := make([]streamed, len(requests))
	began := time.Now()
	var wait sync.WaitGroup
	for i := range requests {
		time.Sleep(time.Until(began.Add(time.Duration(requests[i].At * float64(time.Second)))))
		wait.Go(func() { got[i] = b.stream(&requests[i]) })
	}
	wait.Wait()
	return got
}

// summary leaves out the first twentieth, as the simulation does.
func summary(requests []replay.Request, got []streamed) (r replay.Result) {
	cached, prompt := 0, 0
	var first []float64
	for i := len(requests) / 20; i < len(requests); i++ {
		cached, prompt, first = cached+got[i].cached, prompt+requests[i].Prompt, append(first, got[i].first)
	}
	slices.Sort(first)
	r.TTFT50, r.TTFT90, r.Hit = first[len(first)/2], first[len(first)*9/10], float64(cached)/float64(prompt)
	return r
}

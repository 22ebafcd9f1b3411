package engines

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/replay"
)

// The workload: conversations whose prompts grow by each turn. Lengths are whole blocks, so that the simulation has them exactly.
const (
	firstTurn, nextTurn, turnsOf, answerOf = 32 * 32, 12 * 32, 6, 16
	conversations                          = 40
	gauntletBlocks                         = 640 // of a worker: half of what all conversations have
	gauntletBudget                         = 2048
	// gauntletLoad is the time that engines compute if all prefixes hit, as a part of all time.
	gauntletLoad = 0.35
)

// gauntletRules are compared; the first one is what ratios refer to.
var gauntletRules = []string{"kv-aware", "session", "load-balancing", "round-robin"}

// TestGauntlet plays one workload against stock vLLMs behind Kvlane and Envoy and in the simulation, whose engine is fitted to
// single requests of other prompts, and prints both. It measures time, and is run by hand on an idle machine (make gauntlet-vllm).
func TestGauntlet(t *testing.T) {
	k := *vllm
	k.context, k.blocks, k.further = 4096, gauntletBlocks, []string{"--max-num-batched-tokens", fmt.Sprint(gauntletBudget)}
	engines := []*engine{launch(t, &k), launch(t, &k)}
	workers := ""
	for i, e := range engines {
		e.serves()
		workers += strings.Replace(e.yaml(), "name: vllm", fmt.Sprint("name: vllm", i), 1)
	}
	var real []replay.Result
	var model replay.Engine
	var requests []replay.Request
	overhead, load := 0.0, gauntletLoad
	for _, rule := range gauntletRules {
		t.Run(rule, func(t *testing.T) {
			for _, e := range engines {
				e.t = t
				e.clear()
			}
			b := newFront(t, engines[0], workers, "", "routing: {preset: "+rule+"}\n")
			if requests == nil {
				model, overhead = b.fit()
				requests = gauntletRequests(&model, load*float64(len(engines)))
				for _, e := range engines {
					e.clear()
				}
				b.settle()
			}
			real = append(real, b.play(requests))
			t.Logf("%+v", real[len(real)-1])
		})
	}
	for _, e := range engines {
		e.t = t
	}
	last := requests[len(requests)-1].At
	t.Logf("fit: step %.2f ms + %.1f us a token + %.2f ns a pair, %.2f ms a decoding request; %.1f ms outside of steps; %d requests in %.0f s",
		1e3*model.Base, 1e6*model.PerToken, 1e9*model.PerPair, 1e3*model.PerDecode, 1e3*overhead, len(requests), last)
	report, err := replay.Run(replay.Options{
		Workload: replay.Workload{Name: "vllm", BlockSize: k.block, Generate: func(uint64) []replay.Request { return slices.Clone(requests) }},
		Fleet:    replay.Fleet{Workers: len(engines), Ranks: 1, Engine: model}, Policies: gauntletRules, Seeds: []uint64{1},
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(real) != len(gauntletRules) {
		return
	}
	t.Logf("%-16s %28s %28s %8s", "", "vLLM: p50 s, p90 s, hits", "simulated", "p90 sim")
	t.Logf("%-16s %28s %28s %8s", "rule", "p50 and p90 to the first", "the same", "/ vLLM")
	for i, rule := range gauntletRules {
		s := report.Rows[i].Mean
		s.TTFT50, s.TTFT90 = s.TTFT50+overhead, s.TTFT90+overhead
		row := func(r, first *replay.Result) string {
			return fmt.Sprintf("%.3f %.3f %3.0f%% %4.2f %4.2f", r.TTFT50, r.TTFT90, 100*r.Hit, r.TTFT50/first.TTFT50, r.TTFT90/first.TTFT90)
		}
		first := report.Rows[0].Mean
		first.TTFT50, first.TTFT90 = first.TTFT50+overhead, first.TTFT90+overhead
		t.Logf("%-16s %28s %28s %8.2f", rule, row(&real[i], &real[0]), row(&s, &first), s.TTFT90/real[i].TTFT90)
	}
}

// gauntletRequests are conversations that begin at random; the engines' time at full hits is load of all.
func gauntletRequests(e *replay.Engine, load float64) (out []replay.Request) {
	step := func(cached, n float64) float64 { return e.Base + e.PerToken*n + e.PerPair*n*(cached+n/2) }
	cost := step(0, firstTurn)
	for turn := 1; turn < turnsOf; turn++ {
		cost += step(firstTurn+nextTurn*float64(turn-1), nextTurn)
	}
	cost += turnsOf * (answerOf - 1) * (e.Base + e.PerDecode)
	span := conversations * cost / load
	rng := rand.New(rand.NewPCG(101, 0))
	for c := range conversations {
		at := rng.Float64() * span
		blocks := []uint64{}
		for turn := range turnsOf {
			size := firstTurn + nextTurn*turn
			for len(blocks) < size/vllm.block {
				blocks = append(blocks, rng.Uint64())
			}
			out = append(out, replay.Request{At: at, Conversation: fmt.Sprint("c", c), Prompt: size, Output: answerOf, Blocks: slices.Clone(blocks)})
			at += span / conversations * (2 + 4*rng.Float64())
		}
	}
	slices.SortStableFunc(out, func(a, b replay.Request) int { return int(math.Copysign(1, a.At-b.At)) })
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
	// Eight at a time, for what a further decoding request adds to a step.
	const many = 8
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
	// They share the two workers, four each.
	e = replay.Engine{Name: "vllm", Budget: gauntletBudget, Seqs: 8, Capacity: gauntletBlocks * b.block}
	e.PerDecode = max(0, (last[many/2]-step)/(many/2-1))
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

// play sends the requests at their times. As in the simulation, the first twentieth is not measured.
func (b *bed) play(requests []replay.Request) (r replay.Result) {
	got := make([]streamed, len(requests))
	began := time.Now()
	var wait sync.WaitGroup
	for i := range requests {
		time.Sleep(time.Until(began.Add(time.Duration(requests[i].At * float64(time.Second)))))
		wait.Go(func() { got[i] = b.stream(&requests[i]) })
	}
	wait.Wait()
	cached, prompt := 0, 0
	var first []float64
	for i := len(requests) / 20; i < len(requests); i++ {
		cached, prompt, first = cached+got[i].cached, prompt+requests[i].Prompt, append(first, got[i].first)
	}
	slices.Sort(first)
	r.TTFT50, r.TTFT90, r.Hit = first[len(first)/2], first[len(first)*9/10], float64(cached)/float64(prompt)
	return r
}

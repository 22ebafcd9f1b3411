package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"sort"
)

// ReadOTel reads spans of generative-AI requests as JSON lines: start_time_unix_nano
// and the attributes gen_ai.conversation.id, gen_ai.usage.input_tokens and
// gen_ai.usage.output_tokens, in an object "attributes" or beside it. Spans carry no
// content: a turn's prompt is taken to begin with the prompt of the turn before it,
// as far as it is long enough, and to share nothing with other conversations.
func ReadOTel(in io.Reader, load, jitter float64) (Workload, error) {
	type attributes struct {
		Conversation string `json:"gen_ai.conversation.id"`
		Input        int    `json:"gen_ai.usage.input_tokens"`
		Output       int    `json:"gen_ai.usage.output_tokens"`
	}
	type span struct {
		Start      int64      `json:"start_time_unix_nano"`
		Attributes attributes `json:"attributes"`
		attributes
	}
	var spans []span
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var s span
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			return Workload{}, fmt.Errorf("span %d: %w", len(spans)+1, err)
		}
		if s.Attributes.Input == 0 {
			s.Attributes = s.attributes
		}
		if s.Attributes.Input < 1 || s.Attributes.Output < 0 || max(s.Attributes.Input, s.Attributes.Output) > maxTokens {
			return Workload{}, fmt.Errorf("span %d: %d input and %d output tokens", len(spans)+1, s.Attributes.Input, s.Attributes.Output)
		}
		spans = append(spans, s)
	}
	if err := lines.Err(); err != nil {
		return Workload{}, fmt.Errorf("read spans: %w", err)
	}
	sort.SliceStable(spans, func(i, j int) bool { return spans[i].Start < spans[j].Start })
	trace := make([]Request, len(spans))
	before := map[string][]uint64{}
	for i := range spans {
		a := &spans[i].Attributes
		full := a.Input / skewBlock
		blocks := before[a.Conversation]
		if a.Conversation == "" {
			blocks = nil
		}
		kept := min(full, len(blocks))
		blocks = chain(append([]uint64(nil), blocks[:kept]...), uint64(i)+1, full-kept)
		before[a.Conversation] = blocks
		trace[i] = Request{At: float64(spans[i].Start-spans[0].Start) / 1e9, Conversation: a.Conversation, Prompt: a.Input, Output: max(a.Output, 1), Blocks: blocks}
	}
	return Workload{Name: fmt.Sprintf("spans x%g", load), BlockSize: skewBlock, Generate: spread(trace, load, max(jitter, 0))}, nil
}

// spread makes the arrivals of a trace: each up to jitter seconds later, then faster
// by load.
func spread(trace []Request, load, jitter float64) func(seed uint64) []Request {
	return func(seed uint64) []Request {
		rng := rand.New(rand.NewPCG(seed, 0x6D6F6F6E))
		out := make([]Request, len(trace))
		for i := range trace {
			out[i] = trace[i]
			out[i].At = (trace[i].At + jitter*rng.Float64()) / load
		}
		sort.SliceStable(out, func(i, j int) bool { return out[i].At < out[j].At })
		return out
	}
}

package replay

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// mooncakeBlock is the block size of the published traces.
const mooncakeBlock = 512

// maxTokens bounds the tokens of a line of a trace.
const maxTokens = 1 << 24

// traceQuantum is the resolution of the traces' timestamps in seconds; arrivals are spread over it.
const traceQuantum = 3

// latest bounds timestamps in milliseconds: far beyond any trace, even one that counts from 1970.
const latest = 1e13

// ReadMooncake reads a trace in Mooncake's format: one JSON object per line with timestamp (ms), input_length,
// output_length and hash_ids (none: nothing is shared), in any order of time. Load divides the timestamps; jitter
// (seconds, traceQuantum if negative) spreads them.
//
// The trace has no conversation ids. A request continues the request that last used its deepest known block if it
// covers at least two blocks and all full blocks of that request except at most one.
func ReadMooncake(in io.Reader, load, jitter float64) (Workload, error) {
	if jitter < 0 {
		jitter = traceQuantum
	}
	var trace []Request
	err := eachLine(in, "trace", func(text []byte) error {
		r, err := mooncakeRequest(text)
		trace = append(trace, r)
		return err
	})
	if err = cmp.Or(err, inOrder(trace)); err != nil {
		return Workload{}, err
	}
	conversations(trace)
	return Workload{Name: fmt.Sprintf("mooncake x%g", load), BlockSize: mooncakeBlock, Generate: spread(trace, load, jitter)}, nil
}

// inOrder sorts the requests of a trace by time. An empty trace is an error.
func inOrder(trace []Request) error {
	slices.SortStableFunc(trace, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	if len(trace) == 0 {
		return errors.New("the trace is empty")
	}
	return nil
}

// mooncakeRequest reads a line.
func mooncakeRequest(text []byte) (Request, error) {
	var line struct {
		Timestamp    *float64 `json:"timestamp"`
		InputLength  *count   `json:"input_length"`
		OutputLength *count   `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(text, &line); err != nil {
		return Request{}, err
	}
	switch {
	case line.Timestamp == nil:
		return Request{}, errors.New("no timestamp")
	case line.InputLength == nil:
		return Request{}, errors.New("no input_length")
	case line.OutputLength == nil:
		return Request{}, errors.New("no output_length")
	}
	at, prompt, output := *line.Timestamp, int(*line.InputLength), int(*line.OutputLength)
	whole := (prompt + mooncakeBlock - 1) / mooncakeBlock
	switch {
	case at < 0 || at > latest:
		return Request{}, fmt.Errorf("timestamp %g: want 0 to %g ms", at, float64(latest))
	case prompt < 1 || prompt > maxTokens:
		return Request{}, fmt.Errorf("input_length %d: want 1 to %d", prompt, maxTokens)
	case output < 0 || output > maxTokens:
		return Request{}, fmt.Errorf("output_length %d: want 0 to %d", output, maxTokens)
	case len(line.HashIDs) > whole:
		return Request{}, fmt.Errorf("%d hash_ids for %d tokens, which have %d blocks of %d", len(line.HashIDs), prompt, whole, mooncakeBlock)
	}
	full := min(prompt/mooncakeBlock, len(line.HashIDs))
	return Request{At: at / 1000, Prompt: prompt, Output: max(output, 1), Blocks: line.HashIDs[:full]}, nil
}

// conversations assigns the requests of a sorted trace to conversations.
func conversations(trace []Request) {
	last := map[uint64]int{}
	known := 0
	for n := range trace {
		r := &trace[n]
		for i, name := range slices.Backward(r.Blocks) {
			before, used := last[name]
			if !used {
				continue
			}
			if p := &trace[before]; i+1 >= 2 && i+1 >= len(p.Blocks)-1 {
				r.Conversation = p.Conversation
				if n := len(p.Blocks); i+1 >= n {
					p.Answer = r.Blocks[n:max(n, min((p.Prompt+p.Output)/mooncakeBlock, len(r.Blocks)))]
				}
			}
			break
		}
		if r.Conversation == "" {
			r.Conversation = fmt.Sprintf("c%d", known)
			known++
		}
		for _, b := range r.Blocks {
			last[b] = n
		}
	}
}

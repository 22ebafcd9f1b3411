package replay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// mooncakeBlock is the block size of the published traces.
const mooncakeBlock = 512

// maxTokens bounds what a line of a trace can ask for.
const maxTokens = 1 << 24

// traceQuantum is the resolution of the traces' timestamps in seconds; arrivals are
// spread over it.
const traceQuantum = 3

// latest is the last timestamp that is believed, in milliseconds: far beyond any trace, even one that counts from 1970.
const latest = 1e13

// ReadMooncake reads a trace in Mooncake's format: one JSON object a line with
// timestamp (ms), input_length, output_length and hash_ids. Load divides the
// timestamps; jitter (seconds, traceQuantum if negative) spreads them.
//
// The trace has no conversation ids. A request continues the request that last used
// its deepest known block if it covers all of that one's full blocks but one, and at
// least two.
func ReadMooncake(in io.Reader, load, jitter float64) (Workload, error) {
	if jitter < 0 {
		jitter = traceQuantum
	}
	var trace []Request
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<24)
	last := map[uint64]int{}
	conversations := 0
	for lines.Scan() {
		var line struct {
			Timestamp    float64  `json:"timestamp"`
			InputLength  int      `json:"input_length"`
			OutputLength int      `json:"output_length"`
			HashIDs      []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return Workload{}, fmt.Errorf("trace line %d: %w", len(trace)+1, err)
		}
		full := min(line.InputLength/mooncakeBlock, len(line.HashIDs))
		if line.InputLength < 1 || line.OutputLength < 0 || max(line.InputLength, line.OutputLength) > maxTokens {
			return Workload{}, fmt.Errorf("trace line %d: lengths %d and %d", len(trace)+1, line.InputLength, line.OutputLength)
		}
		if line.Timestamp < 0 || line.Timestamp > latest {
			return Workload{}, fmt.Errorf("trace line %d: timestamp %g ms", len(trace)+1, line.Timestamp)
		}
		r := Request{At: line.Timestamp / 1000, Prompt: line.InputLength, Output: max(line.OutputLength, 1), Blocks: line.HashIDs[:full]}
		for i := full - 1; i >= 0; i-- {
			before, known := last[r.Blocks[i]]
			if !known {
				continue
			}
			if p := &trace[before]; i+1 >= 2 && i+1 >= len(p.Blocks)-1 {
				r.Conversation = p.Conversation
			}
			break
		}
		if r.Conversation == "" {
			r.Conversation = fmt.Sprintf("c%d", conversations)
			conversations++
		}
		for _, b := range r.Blocks {
			last[b] = len(trace)
		}
		trace = append(trace, r)
	}
	if err := lines.Err(); err != nil {
		return Workload{}, fmt.Errorf("read trace: %w", err)
	}
	if len(trace) == 0 {
		return Workload{}, errors.New("the trace is empty")
	}
	return Workload{Name: fmt.Sprintf("mooncake x%g", load), BlockSize: mooncakeBlock, Generate: spread(trace, load, jitter)}, nil
}

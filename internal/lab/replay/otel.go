package replay

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"sort"
	"strconv"
)

// genAI are the attributes of a request's span that are used, by their names in
// OpenTelemetry's conventions; older names follow.
type genAI struct {
	Conversation, Session              string
	Input, OldInput, Output, OldOutput int64
}

// names maps attribute names to the fields for their values.
func (a *genAI) names() map[string]any {
	return map[string]any{
		"gen_ai.conversation.id": &a.Conversation, "session.id": &a.Session,
		"gen_ai.usage.input_tokens": &a.Input, "gen_ai.usage.prompt_tokens": &a.OldInput,
		"gen_ai.usage.output_tokens": &a.Output, "gen_ai.usage.completion_tokens": &a.OldOutput,
	}
}

// read accepts attributes as an object of names, or as OTLP's list of {key, value}.
func (a *genAI) read(text json.RawMessage) error {
	values := map[string]json.RawMessage{}
	if bytes.HasPrefix(text, []byte("[")) {
		var list []struct {
			Key   string `json:"key"`
			Value struct {
				String json.RawMessage `json:"stringValue"`
				Int    json.RawMessage `json:"intValue"`
				Double json.RawMessage `json:"doubleValue"`
			} `json:"value"`
		}
		if err := json.Unmarshal(text, &list); err != nil {
			return fmt.Errorf("attributes: %w", err)
		}
		for _, kv := range list {
			for _, v := range []json.RawMessage{kv.Value.String, kv.Value.Double, kv.Value.Int} {
				if v != nil {
					values[kv.Key] = v
				}
			}
		}
	} else if len(text) > 0 {
		if err := json.Unmarshal(text, &values); err != nil {
			return fmt.Errorf("attributes: %w", err)
		}
	}
	for name, to := range a.names() {
		v := values[name]
		if v == nil {
			continue
		}
		var err error
		if number, ok := to.(*int64); ok {
			*number, err = whole(v)
		} else {
			err = json.Unmarshal(v, to)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// whole parses a whole number, 0 from null. OTLP writes 64-bit integers as strings, some writers all numbers as floats.
func whole(text json.RawMessage) (int64, error) {
	if text = bytes.Trim(text, `"`); string(text) == "null" {
		return 0, nil
	}
	if n, err := strconv.ParseInt(string(text), 10, 64); err == nil {
		return n, nil
	}
	v, err := strconv.ParseFloat(string(text), 64)
	if err != nil || math.Trunc(v) != v || math.Abs(v) >= 1<<63 {
		return 0, fmt.Errorf("%.40s: want a whole number", text)
	}
	return int64(v), nil
}

// span is one request.
type span struct {
	start int64
	genAI
}

// readSpan reads a span whose attributes are in an object or list "attributes" or in the span object itself.
func readSpan(text json.RawMessage) (s span, err error) {
	var fields struct {
		Start      json.RawMessage `json:"start_time_unix_nano"`
		OTLP       json.RawMessage `json:"startTimeUnixNano"`
		Attributes json.RawMessage `json:"attributes"`
	}
	if err := json.Unmarshal(text, &fields); err != nil {
		return s, err
	}
	if fields.Start == nil {
		fields.Start = fields.OTLP
	}
	if fields.Start != nil {
		var err error
		if s.start, err = whole(fields.Start); err != nil {
			return s, fmt.Errorf("start: %w", err)
		}
	}
	for _, attributes := range []json.RawMessage{text, fields.Attributes} {
		if err := s.read(attributes); err != nil {
			return s, err
		}
	}
	s.Conversation = cmp.Or(s.Conversation, s.Session)
	s.Input, s.Output = cmp.Or(s.Input, s.OldInput), cmp.Or(s.Output, s.OldOutput)
	return s, nil
}

// readSpans reads a line: a span, or an OTLP export. Spans without tokens are of other kinds and skipped.
func readSpans(line []byte) ([]span, error) {
	var export struct {
		Resources []struct {
			Scopes []struct {
				Spans []json.RawMessage `json:"spans"`
			} `json:"scopeSpans"`
		} `json:"resourceSpans"`
	}
	if err := json.Unmarshal(line, &export); err != nil {
		return nil, err
	}
	if export.Resources == nil {
		s, err := readSpan(line)
		if err != nil || s.Input == 0 {
			return nil, err
		}
		return []span{s}, nil
	}
	var spans []span
	for _, r := range export.Resources {
		for _, scope := range r.Scopes {
			for _, text := range scope.Spans {
				s, err := readSpan(text)
				if err != nil {
					return nil, err
				}
				if s.Input > 0 {
					spans = append(spans, s)
				}
			}
		}
	}
	return spans, nil
}

// ReadOTel reads spans of generative-AI requests, one JSON object per line: a span with start_time_unix_nano and the
// attributes gen_ai.conversation.id (or session.id), gen_ai.usage.input_tokens and gen_ai.usage.output_tokens, or the
// output of OTLP's file exporter. Spans have no content: a turn's prompt is assumed to begin with the prompt of the
// turn before it, as far as it is long enough, and to share nothing with other conversations.
func ReadOTel(in io.Reader, load, jitter float64) (Workload, error) {
	var spans []span
	err := eachLine(in, "spans", func(line []byte) error {
		more, err := readSpans(line)
		if err != nil {
			return err
		}
		for _, s := range more {
			if s.Input < 1 || s.Output < 0 || max(s.Input, s.Output) > maxTokens {
				return fmt.Errorf("%d input and %d output tokens: want 1 to %d and 0 to %d", s.Input, s.Output, maxTokens, maxTokens)
			}
			if s.start <= 0 {
				return errors.New("no start_time_unix_nano")
			}
		}
		spans = append(spans, more...)
		return nil
	})
	if err != nil {
		return Workload{}, err
	}
	if len(spans) == 0 {
		return Workload{}, errors.New("no span has gen_ai.usage.input_tokens")
	}
	sort.SliceStable(spans, func(i, j int) bool { return spans[i].start < spans[j].start })
	trace := make([]Request, len(spans))
	before := map[string][]uint64{}
	for i := range spans {
		a := &spans[i]
		full := int(a.Input) / skewBlock
		blocks := before[a.Conversation]
		if a.Conversation == "" {
			blocks = nil
		}
		kept := min(full, len(blocks))
		blocks = chain(append([]uint64(nil), blocks[:kept]...), uint64(i)+1, full-kept)
		before[a.Conversation] = blocks
		trace[i] = Request{At: float64(a.start-spans[0].start) / 1e9, Conversation: a.Conversation, Prompt: int(a.Input), Output: max(int(a.Output), 1), Blocks: blocks}
	}
	return Workload{Name: fmt.Sprintf("spans x%g", load), BlockSize: skewBlock, Generate: spread(trace, load, max(jitter, 0))}, nil
}

// spread jitters each arrival by up to jitter seconds and divides arrival times by load.
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

package truth

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/kvindex/feed"
)

// errNotARecording means that a file is not a recorded time line.
var errNotARecording = errors.New("not a recording of events and requests")

// record is one line of a time line.
type record struct {
	Kind    string            `json:"kind"`
	Engine  string            `json:"engine"` // of meta
	Flags   any               `json:"flags"`  // of meta
	T       float64           `json:"t"`      // seconds
	Source  string            `json:"source"`
	Frames  [][]byte          `json:"frames"` // base64 in JSON
	N       int               `json:"n"`
	Label   string            `json:"label"`
	Method  string            `json:"method"`
	Path    string            `json:"path"`
	Headers map[string]string `json:"headers"`
	Body    *string           `json:"body"`
	Status  int               `json:"status"`
	Resp    json.RawMessage   `json:"resp"`
	SSE     []sseLine         `json:"sse"`
	Sent    float64           `json:"t_sent"` // seconds
}

// sseLine is [time, line].
type sseLine string

// UnmarshalJSON keeps the line.
func (l *sseLine) UnmarshalJSON(b []byte) error {
	var pair [2]json.RawMessage
	if err := json.Unmarshal(b, &pair); err != nil {
		return err
	}
	return json.Unmarshal(pair[1], (*string)(l))
}

// eachLine calls f for each line of a file that is not blank; errors name the line.
func eachLine(path string, f func(line []byte) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	var in io.Reader = file
	if strings.HasSuffix(path, ".gz") {
		if in, err = gzip.NewReader(file); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	lines := bufio.NewReaderSize(in, 1<<20)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			if err := f(line); err != nil {
				return fmt.Errorf("%s:%d: %w", path, n, err)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s:%d: %w", path, n, err)
		}
	}
}

// load reads a time line and checks its format. A malformed line is an error: skipping it
// could hide a difference.
func load(path string) ([]record, error) {
	var recs []record
	var form form
	err := eachLine(path, func(line []byte) error {
		var head struct{ Kind string }
		if err := json.Unmarshal(line, &head); err != nil {
			return err
		}
		if len(recs) == 0 && head.Kind == "" {
			return errNotARecording
		}
		var r record
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		recs = append(recs, r)
		return form.check(&r, line)
	})
	if err == nil && len(recs) == 0 {
		err = fmt.Errorf("%s: an empty file", path)
	}
	return recs, err
}

// form checks a time line's records in order.
type form struct {
	decoder *feed.Decoder // nil before the meta record
}

func (f *form) check(r *record, line []byte) error {
	if f.decoder == nil {
		return f.begin(r)
	}
	switch r.Kind {
	case "event":
		return f.event(r)
	case "http":
		return checkTimes(r, line)
	case "replay", "note":
		return nil
	case "meta":
		return errors.New("a second meta record")
	}
	return fmt.Errorf("record of kind %q, want meta, http, event, replay or note", r.Kind)
}

func (f *form) begin(r *record) error {
	if r.Kind != "meta" {
		return fmt.Errorf("the first record is of kind %q, want meta", r.Kind)
	}
	known := []feed.Engine{feed.VLLM, feed.SGLang, feed.TRTLLM}
	if !slices.Contains(known, feed.Engine(r.Engine)) {
		return fmt.Errorf("meta names the engine %q, want one of %v", r.Engine, known)
	}
	f.decoder = feed.NewDecoder(feed.Engine(r.Engine), 0)
	return nil
}

// event checks that a message is a batch of events that can be decoded.
func (f *form) event(r *record) error {
	if r.Source == "" {
		return errors.New("event without source")
	}
	seq, payload, ok := feed.SplitFrames(r.Frames)
	if !ok {
		return fmt.Errorf("event of %s: %d frames, want topic, number in 8 bytes, payload", r.Source, len(r.Frames))
	}
	b, err := f.decoder.Decode(payload)
	if err != nil {
		return fmt.Errorf("event of %s, batch %d: %w", r.Source, seq, err)
	}
	for _, d := range b.Dropped {
		if d.Reason == feed.Malformed || d.Reason == feed.Misaligned {
			return fmt.Errorf("event of %s, batch %d: %s", r.Source, seq, d.Reason)
		}
	}
	return nil
}

// checkTimes checks that a request has the times that order it relative to the events.
func checkTimes(r *record, line []byte) error {
	var times struct {
		Sent *float64 `json:"t_sent"`
		T    *float64 `json:"t"`
	}
	if err := json.Unmarshal(line, &times); err != nil {
		return err
	}
	switch {
	case times.Sent == nil:
		return errors.New("http record without t_sent")
	case times.T == nil:
		return errors.New("http record without t")
	case r.T < r.Sent:
		return fmt.Errorf("http record that ended at %g, before it was sent at %g", r.T, r.Sent)
	}
	return nil
}

// request has the fields of a recorded request that are used.
type request struct {
	Model    string          `json:"model"`
	Prompt   json.RawMessage `json:"prompt"`
	InputIDs []uint32        `json:"input_ids"`
	TokenIDs []uint32        `json:"token_ids"`
	Salt     string          `json:"cache_salt"`
	ExtraKey string          `json:"extra_key"`
	N        *int            `json:"n"`
	DPRank   *int32          `json:"data_parallel_rank"`
	Routed   *int32          `json:"routed_dp_rank"`
	Transfer *struct {
		Prefill bool `json:"do_remote_prefill"`
	} `json:"kv_transfer_params"`
}

// usage has an answer's token counts, in the fields of completions, responses and messages.
type usage struct {
	Prompt  int `json:"prompt_tokens"`
	Details *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
	Input        int `json:"input_tokens"`
	InputDetails *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"input_tokens_details"`
	// Messages count tokens read from the cache and others separately.
	Read    *int `json:"cache_read_input_tokens"`
	Created int  `json:"cache_creation_input_tokens"`
}

// cached returns the prompt's tokens and the cached ones of them.
func (u *usage) cached() (prompt, cached int, ok bool) {
	switch {
	case u == nil:
	case u.Details != nil && u.Details.Cached != nil:
		return u.Prompt, *u.Details.Cached, true
	case u.InputDetails != nil && u.InputDetails.Cached != nil:
		return u.Input, *u.InputDetails.Cached, true
	case u.Read != nil:
		return u.Input + u.Created + *u.Read, *u.Read, true
	}
	return 0, 0, false
}

// answer is the engine's answer, or the combined chunks of its stream.
type answer struct {
	Usage     *usage   `json:"usage"`
	PromptIDs []uint32 `json:"prompt_token_ids"`
	Choices   []struct {
		Index     int      `json:"index"`
		PromptIDs []uint32 `json:"prompt_token_ids"`
	} `json:"choices"`
	Meta *struct {
		Prompt int  `json:"prompt_tokens"`
		Cached *int `json:"cached_tokens"`
	} `json:"meta_info"`
	Tokens  []uint32 `json:"tokens"` // of /tokenize
	Success *bool    `json:"success"`
}

// parse parses the exchange. The request is nil if its body is not a JSON object.
func (r *record) parse() (*request, answer) {
	var req *request
	if r.Body != nil {
		var q request
		if json.Unmarshal([]byte(*r.Body), &q) == nil {
			req = &q
		}
	}
	var a answer
	if len(r.SSE) == 0 {
		// Other shapes (lists, errors) have nothing to judge.
		_ = json.Unmarshal(r.Resp, &a)
		return req, a
	}
	for _, l := range r.SSE {
		data, ok := strings.CutPrefix(string(l), "data: ")
		var c answer
		if !ok || json.Unmarshal([]byte(data), &c) != nil {
			continue
		}
		if c.Usage != nil {
			a.Usage = c.Usage
		}
		if c.Meta != nil {
			a.Meta = c.Meta
		}
		if len(c.PromptIDs) > 0 {
			a.PromptIDs = c.PromptIDs
		}
		// A chunk has one choice; a second index is a second answer.
		if len(c.Choices) > 0 && (len(a.Choices) == 0 || c.Choices[0].Index > 0 && len(a.Choices) == 1) {
			a.Choices = append(a.Choices, c.Choices...)
		}
	}
	return req, a
}

// cached returns the prompt's tokens and how many of them the engine reported as
// cached.
func (a *answer) cached() (prompt, cached int, ok bool) {
	if a.Meta != nil && a.Meta.Cached != nil {
		return a.Meta.Prompt, *a.Meta.Cached, true
	}
	return a.Usage.cached()
}

// promptTokens is the engine's count of the prompt's tokens.
func (a *answer) promptTokens() (int, bool) {
	if a.Meta != nil {
		return a.Meta.Prompt, true
	}
	if a.Usage == nil {
		return 0, false
	}
	n := max(a.Usage.Prompt, a.Usage.Input+a.Usage.Created)
	if a.Usage.Read != nil {
		n += *a.Usage.Read
	}
	return n, n > 0
}

// promptIDs are the ids of the (first) prompt, nil if the answer does not have them.
func (a *answer) promptIDs() []uint32 {
	switch {
	case len(a.PromptIDs) > 0:
		return a.PromptIDs
	case len(a.Tokens) > 0:
		return a.Tokens
	case len(a.Choices) > 0:
		return a.Choices[0].PromptIDs
	}
	return nil
}

// header finds a header, ignoring case.
func (r *record) header(name string) (string, bool) {
	for k, v := range r.Headers {
		if strings.EqualFold(k, name) {
			return v, true
		}
	}
	return "", false
}

// rank returns the rank that the request was pinned to, by the engine's rules: vLLM
// reads the header (as Python's int does) except on responses; SGLang reads header
// and body except on generate, where it reads only the body. SGLang honours its
// override headers only with a setting that a recording does not show, so a request
// with one has no known rank.
func (r *record) rank(engine string, req *request) (int32, bool) {
	for k := range r.Headers {
		if len(k) >= 11 && strings.EqualFold(k[:11], "X-Override-") {
			return 0, false
		}
	}
	v, has := r.header("X-Data-Parallel-Rank")
	generate := strings.HasPrefix(r.Path, "/generate")
	if has && (engine == "vllm" && !strings.HasPrefix(r.Path, "/v1/responses") || engine == "sglang" && !generate) {
		n, err := strconv.ParseInt(strings.TrimSpace(v), 10, 32)
		return int32(n), err == nil && n >= 0
	}
	if engine == "sglang" && req != nil {
		for _, p := range []*int32{req.Routed, req.DPRank} {
			if p != nil && *p >= 0 {
				return *p, true
			}
		}
	}
	return 0, false
}

// works reports whether an exchange may have changed what a rank holds; the others
// only read the engine's state or use its tokenizer.
func (r *record) works() bool {
	return r.Method != http.MethodGet && !strings.Contains(r.Path, "tokenize") && !strings.HasSuffix(r.Path, "/render") &&
		!strings.HasSuffix(r.Path, "/count_tokens") && (r.Status == 0 || r.Status < 400)
}

// ownIDs are the ids that the request itself carries.
func (q *request) ownIDs() []uint32 {
	for _, given := range [][]uint32{q.InputIDs, q.TokenIDs} {
		if len(given) > 0 {
			return given
		}
	}
	var ids []uint32
	if len(q.Prompt) > 0 && json.Unmarshal(q.Prompt, &ids) == nil {
		return ids
	}
	return nil
}

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
	"strconv"
	"strings"
)

// ErrNotARecording says that a file is not a recorded time line.
var ErrNotARecording = errors.New("not a recording of events and requests")

// record is one line.
type record struct {
	Kind    string            `json:"kind"`
	Engine  string            `json:"engine"` // of meta
	T       float64           `json:"t"`
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
	Sent    float64           `json:"t_sent"`
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

// load reads a recording and checks that it is one: a line that is not what the
// format says is an error, for what would be passed over would look as if nothing differed.
func load(path string) ([]record, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var in io.Reader = f
	if strings.HasSuffix(path, ".gz") {
		if in, err = gzip.NewReader(f); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	var recs []record
	var form form
	lines := bufio.NewReaderSize(in, 1<<20)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			var head struct{ Kind string }
			if jerr := json.Unmarshal(line, &head); jerr != nil {
				return nil, fmt.Errorf("%s:%d: %w", path, n, jerr)
			}
			if len(recs) == 0 && head.Kind == "" {
				return nil, fmt.Errorf("%s: %w", path, ErrNotARecording)
			}
			var r record
			if jerr := json.Unmarshal(line, &r); jerr != nil {
				return nil, fmt.Errorf("%s:%d: %w", path, n, jerr)
			}
			if ferr := form.check(&r, line); ferr != nil {
				return nil, fmt.Errorf("%s:%d: %w", path, n, ferr)
			}
			recs = append(recs, r)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, n, err)
		}
	}
	if len(recs) == 0 {
		return nil, fmt.Errorf("%s: an empty file", path)
	}
	return recs, nil
}

// request is what a recorded request asked for, as far as it matters here.
type request struct {
	Model    string          `json:"model"`
	Prompt   json.RawMessage `json:"prompt"`
	Text     json.RawMessage `json:"text"`
	InputIDs []uint32        `json:"input_ids"`
	TokenIDs []uint32        `json:"token_ids"`
	Messages json.RawMessage `json:"messages"`
	Salt     string          `json:"cache_salt"`
	ExtraKey string          `json:"extra_key"`
	N        *int            `json:"n"`
	DPRank   *int32          `json:"data_parallel_rank"`
	Routed   *int32          `json:"routed_dp_rank"`
	Transfer *struct {
		Prefill bool `json:"do_remote_prefill"`
	} `json:"kv_transfer_params"`
	whole string
}

// usage is an answer's token counts, in the words of completions, responses and
// messages.
type usage struct {
	Prompt  int `json:"prompt_tokens"`
	Details *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
	Input        int `json:"input_tokens"`
	InputDetails *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"input_tokens_details"`
	// Messages count what was read from the cache and what was not apart.
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

// answer is what came back, in whole or as a stream's chunks.
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

// parse reads the exchange. The request is nil if its body is no JSON object.
func (r *record) parse() (*request, answer) {
	var req *request
	if r.Body != nil {
		var q request
		if json.Unmarshal([]byte(*r.Body), &q) == nil {
			q.whole = *r.Body
			req = &q
		}
	}
	var a answer
	if len(r.SSE) == 0 {
		// Other shapes (lists, errors) have nothing that is judged.
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
		// A chunk carries one choice; a second index is a second answer.
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

func (a *answer) promptIDs() []uint32 {
	if len(a.PromptIDs) > 0 {
		return a.PromptIDs
	}
	if len(a.Choices) == 1 {
		return a.Choices[0].PromptIDs
	}
	return nil
}

// header finds a header whatever its case.
func (r *record) header(name string) (string, bool) {
	for k, v := range r.Headers {
		if strings.EqualFold(k, name) {
			return v, true
		}
	}
	return "", false
}

// rank says which rank the request was pinned to, by the rules of the engine
// that are known: vLLM reads the header (as Python's int does) except on
// responses; SGLang reads header and body except on generate, where it reads
// the body alone. SGLang's override headers are honoured only with a setting that
// a recording does not show, so a request with one names no rank.
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

// works reports whether an exchange may have changed what a rank holds: the rest
// only looks at the engine or at its tokenizer.
func (r *record) works() bool {
	return r.Method != http.MethodGet && !strings.Contains(r.Path, "tokenize") && !strings.HasSuffix(r.Path, "/render") &&
		!strings.HasSuffix(r.Path, "/count_tokens") && (r.Status == 0 || r.Status < 400)
}

// promptKey names the prompt of a request for looking up ids that another record
// told; "" if it cannot be told apart by its text.
func (q *request) promptKey() string {
	for _, raw := range []json.RawMessage{q.Prompt, q.Text} {
		var s string
		if len(raw) > 0 && json.Unmarshal(raw, &s) == nil {
			return s
		}
	}
	if len(q.Messages) > 0 {
		return q.whole
	}
	return ""
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

package truth

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"strconv"

	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/prompt"
)

// timelineTokenizer is the tokenizer of every engine in the time lines.
const timelineTokenizer = "qwen3"

var (
	timelineName  = regexp.MustCompile(`^(vllm|sglang)_\d+_.+\.jsonl\.gz$`)
	contextFlag   = regexp.MustCompile(`--(?:max-model-len|context-length) (\d+)`)
	toolFlag      = regexp.MustCompile(`--tool-call-parser`)
	timelinePaths = []string{"vllm_*.jsonl.gz", "sglang_*.jsonl.gz"}
)

type event struct {
	Kind   string          `json:"kind"`
	Flags  any             `json:"flags"`
	N      any             `json:"n"`
	Label  string          `json:"label"`
	Method string          `json:"method"`
	Path   string          `json:"path"`
	Body   any             `json:"body"`
	Status int             `json:"status"`
	Resp   json.RawMessage `json:"resp"`
	SSE    [][]any         `json:"sse"`
}

// timelines compares every prompt in the engines' time lines: its ids where the answer has them, else its length by the
// answer's usage. What the engine refused for reasons outside of the prompt is not judged.
func timelines(w io.Writer, opts Options) (Totals, error) {
	var totals Totals
	for _, pattern := range timelinePaths {
		paths, err := filepath.Glob(filepath.Join(opts.Recordings, pattern))
		if err != nil {
			return totals, err
		}
		for _, path := range paths {
			one, err := timeline(w, path, opts)
			if err != nil {
				return totals, fmt.Errorf("%s: %w", filepath.Base(path), err)
			}
			if one.Requests > 0 {
				_, _ = fmt.Fprintf(w, "%s: %v\n", filepath.Base(path), &one)
			}
			totals.add(one)
		}
	}
	return totals, nil
}

func timeline(w io.Writer, path string, opts Options) (Totals, error) {
	totals := Totals{Files: 1}
	name := timelineName.FindStringSubmatch(filepath.Base(path))
	if name == nil {
		return totals, nil
	}
	engine, err := model.ParseEngine(name[1])
	if err != nil {
		return totals, err
	}
	events, err := readLines[event](path)
	if err != nil {
		return totals, err
	}
	m, err := timelineModel(engine, events, opts)
	if err != nil {
		return totals, err
	}
	for i := range events {
		e := &events[i]
		body, isText := e.Body.(string)
		api, _ := prompt.Detect(e.Method, e.Path)
		if e.Kind != "http" || !isText || api == prompt.Unknown {
			continue
		}
		totals.Requests++
		why, judged := judge(m, engine, api, []byte(body), e)
		switch {
		case why != "":
			totals.Differ++
			_, _ = fmt.Fprintf(w, "  %v (%s) %s: %s\n", e.N, e.Label, e.Path, why)
		case judged && e.Status == 200:
			totals.SameIDs++
		case judged:
			totals.Refused++
		default:
			totals.NotJudged++
		}
	}
	return totals, nil
}

// timelineModel is the model as its engine was set up: the flags that the recording tells, and a tool parser too if a
// request with tools was answered.
func timelineModel(engine model.Engine, events []event, opts Options) (*model.Model, error) {
	var options model.Options
	for i := range events {
		e := &events[i]
		if e.Kind == "meta" {
			flags := fmt.Sprint(e.Flags)
			if m := contextFlag.FindStringSubmatch(flags); m != nil {
				options.MaxModelLen, _ = strconv.Atoi(m[1])
			}
			options.ToolParser = options.ToolParser || toolFlag.MatchString(flags)
		}
		if body, ok := e.Body.(string); ok && engine == model.VLLM && e.Status == 200 && len(prompt.Member([]byte(body), "tools")) > 2 {
			options.ToolParser = true
		}
	}
	return opts.load(timelineTokenizer, options)
}

// Prompts returns what makes the ids of the requests in a time line, nil where they cannot be known.
func Prompts(path string, opts Options) (func(method, path string, body []byte) []uint32, error) {
	name := timelineName.FindStringSubmatch(filepath.Base(path))
	if name == nil {
		return func(string, string, []byte) []uint32 { return nil }, nil
	}
	engine, err := model.ParseEngine(name[1])
	if err != nil {
		return nil, err
	}
	events, err := readLines[event](path)
	if err != nil {
		return nil, err
	}
	m, err := timelineModel(engine, events, opts.withDefaults())
	if err != nil {
		return nil, err
	}
	return func(method, path string, body []byte) []uint32 {
		api, _ := prompt.Detect(method, path)
		if api == prompt.Unknown {
			return nil
		}
		req, err := prompt.Parse(api, body)
		if err != nil {
			return nil
		}
		res, err := m.Prompt(req, engine)
		if err != nil || res.Partial != "" || res.Prompts != 1 {
			return nil
		}
		return res.IDs
	}, nil
}

// judge says how we differ, "" if we do not or cannot tell.
func judge(m *model.Model, engine model.Engine, api prompt.API, body []byte, e *event) (why string, judged bool) {
	req, err := prompt.Parse(api, body)
	if err != nil {
		if e.Status == 200 {
			return fmt.Sprintf("%v, the engine answered 200", err), true
		}
		return "", true
	}
	res, err := m.Prompt(req, engine)
	refusal, refused := errors.AsType[*model.Refusal](err)
	switch {
	case refused && e.Status == 200:
		return fmt.Sprintf("refused (%s), the engine answered 200", refusal.Reason), true
	case e.Status != 200:
		return "", refused
	case err != nil:
		return err.Error(), true
	case res.Partial != "":
		return "", false
	}
	if raw := answeredIDs(e.Resp); raw != nil {
		theirs, err := prompt.AppendIDs(nil, raw)
		if err != nil {
			return err.Error(), true
		}
		if d := model.Compare(m.Tokenizer(), res.IDs, theirs); d != nil {
			return d.String(), true
		}
		return "", true
	}
	usage := prompt.NewUsageScanner(e.SSE != nil)
	_, _ = usage.Write(e.Resp)
	for _, line := range e.SSE {
		if text, ok := line[len(line)-1].(string); ok {
			_, _ = usage.Write([]byte(text + "\n"))
		}
	}
	if u, ok := usage.Usage(); ok && u.Prompt >= 0 && res.Prompts == 1 {
		if u.Prompt != int64(len(res.IDs)) {
			return fmt.Sprintf("%d ids, the engine counted %d prompt tokens", len(res.IDs), u.Prompt), true
		}
		return "", true
	}
	return "", false
}

// answeredIDs are the prompt's ids in an answer, nil if it has none.
func answeredIDs(answer []byte) []byte {
	if len(answer) == 0 {
		return nil
	}
	for _, name := range [...]string{"prompt_token_ids", "tokens"} {
		if raw := prompt.Member(answer, name); len(raw) > 0 && raw[0] == '[' {
			return raw
		}
	}
	choices := prompt.Member(answer, "choices")
	req, err := prompt.Parse(prompt.Embeddings, append(append([]byte(`{"input":`), choices...), '}'))
	if err != nil || len(req.Elements) == 0 {
		return nil
	}
	if raw := prompt.Member(req.Elements[0].Of(req.Body), "prompt_token_ids"); len(raw) > 0 && raw[0] == '[' {
		return raw
	}
	return nil
}

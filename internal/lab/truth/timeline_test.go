package truth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// timelineTokenizer is the tokenizer of every engine in the time lines.
const timelineTokenizer = "qwen3"

var (
	timelineName = regexp.MustCompile(`^(vllm|sglang)_\d+_.+\.jsonl\.gz$`)
	contextFlag  = regexp.MustCompile(`--(?:max-model-len|context-length) (\d+)`)
)

// timeline computes the ids of a time line's requests as its engine did.
type timeline struct {
	model  *shape.Model
	engine shape.Engine
	cache  *conv.Cache
}

// timeline returns nil for a time line whose tokenizer is not known. The model is
// configured by the engine's flags; requests with tools that were answered imply a
// tool parser.
func (c *comparison) timeline(name string, recs []record) (*timeline, error) {
	parts := timelineName.FindStringSubmatch(name)
	if parts == nil {
		return nil, nil
	}
	engine, err := shape.ParseEngine(parts[1])
	if err != nil {
		return nil, err
	}
	var options shape.Options
	for i := range recs {
		r := &recs[i]
		if r.Kind == "meta" {
			flags := fmt.Sprint(r.Flags)
			if m := contextFlag.FindStringSubmatch(flags); m != nil {
				options.MaxModelLen, _ = strconv.Atoi(m[1])
			}
			options.ToolParser = options.ToolParser || strings.Contains(flags, "--tool-call-parser")
		}
		if r.Body != nil && engine == shape.VLLM && r.Status == 200 && len(body.Member([]byte(*r.Body), "tools")) > 2 {
			options.ToolParser = true
		}
	}
	m, err := c.model(timelineTokenizer, options)
	if err != nil {
		return nil, err
	}
	return &timeline{m, engine, c.cache}, nil
}

// ids returns the ids of a request's prompt, nil where they cannot be known.
func (t *timeline) ids(r *record) []uint32 {
	api, _ := body.Detect(r.Method, r.Path)
	if t == nil || r.Body == nil || api == body.Unknown {
		return nil
	}
	req, err := body.Parse(api, []byte(*r.Body))
	if err != nil {
		return nil
	}
	res, err := t.model.PromptInto(context.Background(), nil, t.cache.Turn(req), t.engine)
	if err != nil || res.Partial != "" || res.Prompts != 1 {
		return nil
	}
	return res.IDs
}

// compare compares every prompt: its ids where the answer has them, else its length
// with the answer's usage. Refusals for reasons outside of the prompt are not judged.
func (t *timeline) compare(w io.Writer, recs []record) idTotals {
	totals := idTotals{files: 1}
	for i := range recs {
		r := &recs[i]
		api, _ := body.Detect(r.Method, r.Path)
		if r.Kind != "http" || r.Body == nil || api == body.Unknown {
			continue
		}
		totals.requests++
		why, judged := t.judge(api, r)
		switch {
		case why != "":
			totals.differ++
			_, _ = fmt.Fprintf(w, "  %d (%s) %s: %s\n", r.N, r.Label, r.Path, why)
		case judged && r.Status == 200:
			totals.sameIDs++
		case judged:
			totals.refused++
		default:
			totals.notJudged++
		}
	}
	return totals
}

// judge describes how we differ, "" if we do not or if the answer does not show it.
func (t *timeline) judge(api body.API, r *record) (why string, judged bool) {
	req, err := body.Parse(api, []byte(*r.Body))
	if err != nil {
		if r.Status == 200 {
			return fmt.Sprintf("%v, the engine answered 200", err), true
		}
		return "", true
	}
	res, err := t.model.PromptInto(context.Background(), nil, t.cache.Turn(req), t.engine)
	refusal, refused := errors.AsType[*shape.Refusal](err)
	switch {
	case refused && r.Status == 200:
		return fmt.Sprintf("refused (%s), the engine answered 200", refusal.Reason), true
	case r.Status != 200:
		return "", refused
	case err != nil:
		return err.Error(), true
	case res.Partial != "":
		return "", false
	}
	_, ans := r.parse()
	if theirs := ans.promptIDs(); theirs != nil {
		return difference(t.model, res.IDs, theirs), true
	}
	if n, ok := ans.promptTokens(); ok && res.Prompts == 1 {
		if n != len(res.IDs) {
			return fmt.Sprintf("%d ids, the engine counted %d prompt tokens", len(res.IDs), n), true
		}
		return "", true
	}
	return "", false
}

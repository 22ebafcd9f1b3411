package truth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// idTotals count the compared answers.
type idTotals struct {
	files, requests  int
	sameIDs, refused int // equal ids; refusals with the same status
	differ           int
	// notJudged counts requests whose answer shows no ids, or whose template is
	// missing.
	notJudged int
}

func (t *idTotals) add(o idTotals) {
	t.files += o.files
	t.requests += o.requests
	t.sameIDs += o.sameIDs
	t.refused += o.refused
	t.differ += o.differ
	t.notJudged += o.notJudged
}

func (t *idTotals) String() string {
	s := fmt.Sprintf("%d requests, %d answers with the same ids, %d refused as the engine does, %d differ", t.requests, t.sameIDs, t.refused, t.differ)
	if t.notJudged > 0 {
		s += fmt.Sprintf(", %d not judged", t.notJudged)
	}
	return s
}

// errNoTemplate means that the folder of templates lacks a recording's template.
var errNoTemplate = errors.New("no template")

var chatName = regexp.MustCompile(`^chat_(vllm|sglang|trtllm)(_tools)?_(.+)_[a-z]+\.jsonl\.gz$`)

// lentTemplates are the templates that were used in recordings of tokenizers without their
// own.
var lentTemplates = map[string]string{
	"gptoss":     "openai-gpt-oss-120b.jinja",
	"mistral_7b": "mistralai-Mistral-Nemo-Instruct-2407.jinja",
}

// chatAnswer is the engine's answer on one endpoint.
type chatAnswer struct {
	Status int      `json:"status"`
	IDs    []uint32 `json:"ids"`
	Error  string   `json:"error"`
	Other  struct {
		Sampling struct {
			MaxTokens int `json:"max_tokens"`
		} `json:"sampling_params"`
	} `json:"other"`
}

type chatRecord struct {
	Template *string         `json:"template"`
	Case     int             `json:"case"`
	Label    string          `json:"label"`
	Body     json.RawMessage `json:"body"`
	Render   *chatAnswer     `json:"render"`
	Tokenize *chatAnswer     `json:"tokenize"`
	Complete *chatAnswer     `json:"complete"`
}

// chats compares a chat_… recording.
func (c *comparison) chats(name, path string) (idTotals, error) {
	totals := idTotals{files: 1}
	parts := chatName.FindStringSubmatch(name)
	if parts == nil {
		return totals, errors.New("the name must be chat_ENGINE[_tools]_TOKENIZER_PART.jsonl.gz")
	}
	engine, err := shape.ParseEngine(parts[1])
	if err != nil {
		return totals, err
	}
	var records []chatRecord
	if err := eachLine(path, func(line []byte) error {
		var r chatRecord
		err := json.Unmarshal(line, &r)
		records = append(records, r)
		return err
	}); err != nil {
		return totals, err
	}
	template := ""
	if lent := lentTemplates[parts[3]]; lent != "" {
		if template, err = c.template(lent); errors.Is(err, errNoTemplate) {
			totals.requests, totals.notJudged = len(records), len(records)
			return totals, nil
		} else if err != nil {
			return totals, err
		}
	}
	m, err := c.model(parts[3], shape.Options{ChatTemplate: template, ToolParser: parts[2] != "", MaxModelLen: contextOf(records), TrustTemplates: true})
	if err != nil {
		return totals, err
	}
	for i := range records {
		totals.requests++
		r := &records[i]
		for _, asked := range []struct {
			how  string
			api  body.API
			want *chatAnswer
		}{{"render", body.Chat, r.Render}, {"tokenize", body.Tokenize, r.Tokenize}, {"complete", body.Chat, r.Complete}} {
			if asked.want == nil {
				continue
			}
			why, err := c.chat(m, engine, r, asked.api, asked.want)
			switch {
			case errors.Is(err, errNoTemplate):
				totals.notJudged++
			case err != nil:
				return totals, err
			case why != "":
				totals.differ++
				template := "of the model"
				if r.Template != nil {
					template = *r.Template
				}
				fmt.Fprintf(&c.ids, "  case %d (%s), template %s, %s: %s\n", r.Case, r.Label, template, asked.how, why)
			case asked.want.Status == 200:
				totals.sameIDs++
			default:
				totals.refused++
			}
		}
	}
	return totals, nil
}

// chat describes how we differ from the engine, "" if we do not.
func (c *comparison) chat(m *shape.Model, engine shape.Engine, r *chatRecord, api body.API, want *chatAnswer) (string, error) {
	edits := []body.Edit{body.Set([]byte(`"tiny"`), "model")}
	if r.Template != nil {
		source, err := c.template(*r.Template)
		if err != nil {
			return "", err
		}
		quoted, err := json.Marshal(source)
		if err != nil {
			return "", err
		}
		edits = append(edits, body.Set(quoted, "chat_template"))
	}
	raw, err := body.Apply(nil, r.Body, edits...)
	if err != nil {
		return "", err
	}
	req, err := body.Parse(api, raw)
	if err != nil {
		return "", err
	}
	res, err := m.PromptInto(context.Background(), nil, c.cache.Turn(req), engine)
	if refusal, ok := errors.AsType[*shape.Refusal](err); ok {
		if refusal.Status == want.Status {
			return "", nil
		}
		return fmt.Sprintf("refused with %d (%s), the engine answered %d %s", refusal.Status, refusal.Reason, want.Status, want.Error), nil
	}
	if err != nil {
		return err.Error(), nil //nolint:nilerr // a request that cannot be read is a difference, and the next one is compared
	}
	switch {
	case want.Status != 200:
		return fmt.Sprintf("not refused; the engine answered %d %s", want.Status, want.Error), nil
	case res.Partial != "":
		return "only a part: " + res.Partial, nil
	}
	return difference(m, res.IDs, want.IDs), nil
}

// difference describes the first difference between our ids and the engine's, "" if
// they are equal.
func difference(m *shape.Model, ours, theirs []uint32) string {
	if d := shape.Compare(m.Tokenizer(), ours, theirs); d != nil {
		return d.String()
	}
	return ""
}

func (c *comparison) template(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(c.templates, filepath.Base(name)))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", errNoTemplate, err)
	}
	return string(b), err
}

// contextOf is the engine's context length: the prompt plus the tokens that a request was
// allowed to generate.
func contextOf(records []chatRecord) int {
	for i := range records {
		if a := records[i].Render; a != nil && a.Status == 200 && a.Other.Sampling.MaxTokens > 0 {
			return len(a.IDs) + a.Other.Sampling.MaxTokens
		}
	}
	return 0
}

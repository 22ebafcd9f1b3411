// Package truth compares what package model makes of requests with what real engines made of the same ones.
//
// A recording (chat_ENGINE[_tools]_TOKENIZER_*.jsonl.gz) holds one request a line with the ids, or the refusal, that the
// engine itself answered with, on up to three of its endpoints. The engines' time lines (vllm_*, sglang_*) hold requests too.
package truth

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/prompt"
)

// Options say where the files are.
type Options struct {
	Recordings string // folder with chat_*.jsonl.gz
	Models     string // folder with one folder per tokenizer
	Templates  string // folder with the chat templates that the recordings name
	// Now is the day of the recordings, for templates that print the date.
	Now time.Time

	kept map[modelKey]*model.Model
}

// modelKey is what models of recordings differ in.
type modelKey struct {
	tokenizer, template string
	tools               bool
	context             int
}

// Keep returns options under which each model is loaded once.
func (o Options) Keep() Options {
	o.kept = map[modelKey]*model.Model{}
	return o
}

// load loads the model of a recording, unless it is kept.
func (o Options) load(tokenizer string, options model.Options) (*model.Model, error) {
	key := modelKey{tokenizer, options.ChatTemplate, options.ToolParser, options.MaxModelLen}
	if m := o.kept[key]; m != nil {
		return m, nil
	}
	options.Now = func() time.Time { return o.Now }
	m, err := model.Load(os.DirFS(filepath.Join(o.Models, tokenizer)), options)
	if err == nil && o.kept != nil {
		o.kept[key] = m
	}
	return m, err
}

func (o Options) withDefaults() Options {
	if o.Now.IsZero() {
		o.Now = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	}
	return o
}

// Totals count the answers of the engines that were compared.
type Totals struct {
	Files, Requests  int
	SameIDs, Refused int // equal ids; refusals that were recognised, with the same status
	Differ           int
	// NotJudged counts requests of which the engine's answer does not tell ids, or whose template is not there.
	NotJudged int
}

func (t *Totals) add(o Totals) {
	t.Files += o.Files
	t.Requests += o.Requests
	t.SameIDs += o.SameIDs
	t.Refused += o.Refused
	t.Differ += o.Differ
	t.NotJudged += o.NotJudged
}

func (t *Totals) String() string {
	s := fmt.Sprintf("%d requests, %d answers with the same ids, %d refused as the engine does, %d differ", t.Requests, t.SameIDs, t.Refused, t.Differ)
	if t.NotJudged > 0 {
		s += fmt.Sprintf(", %d not judged", t.NotJudged)
	}
	return s
}

// errNoTemplate says that the template of a recording is not in the folder of templates.
var errNoTemplate = errors.New("no template")

var fileName = regexp.MustCompile(`^chat_(vllm|sglang|trtllm)(_tools)?_(.+)_[a-z]+\.jsonl\.gz$`)

// Tokenizers without a template of their own were served with these.
var lentTemplates = map[string]string{
	"gptoss":     "openai-gpt-oss-120b.jinja",
	"mistral_7b": "mistralai-Mistral-Nemo-Instruct-2407.jinja",
}

// ErrNone says that a folder holds no recording.
var ErrNone = errors.New("no recordings of requests")

// Run compares every recording and writes a line for each, a line for each difference, and a last one with the totals.
// The error is about files that cannot be read; differences are counted.
func Run(w io.Writer, opts Options) (Totals, error) {
	var totals Totals
	paths, err := filepath.Glob(filepath.Join(opts.Recordings, "chat_*.jsonl.gz"))
	if err != nil {
		return totals, err
	}
	opts = opts.withDefaults()
	slices.Sort(paths)
	for _, path := range paths {
		one, err := runFile(w, path, opts)
		if err != nil {
			return totals, fmt.Errorf("%s: %w", filepath.Base(path), err)
		}
		_, _ = fmt.Fprintf(w, "%s: %v\n", filepath.Base(path), &one)
		totals.add(one)
	}
	lines, err := timelines(w, opts)
	if err != nil {
		return totals, err
	}
	totals.add(lines)
	if totals.Files == 0 {
		return totals, fmt.Errorf("%w in %s", ErrNone, opts.Recordings)
	}
	_, err = fmt.Fprintf(w, "total: %d recordings, %v\n", totals.Files, &totals)
	return totals, err
}

type answer struct {
	Status int      `json:"status"`
	IDs    []uint32 `json:"ids"`
	Error  string   `json:"error"`
	Other  struct {
		Sampling struct {
			MaxTokens int `json:"max_tokens"`
		} `json:"sampling_params"`
	} `json:"other"`
}

type record struct {
	Template *string         `json:"template"`
	Case     int             `json:"case"`
	Label    string          `json:"label"`
	Body     json.RawMessage `json:"body"`
	Render   *answer         `json:"render"`
	Tokenize *answer         `json:"tokenize"`
	Complete *answer         `json:"complete"`
}

func runFile(w io.Writer, path string, opts Options) (Totals, error) {
	totals := Totals{Files: 1}
	name := fileName.FindStringSubmatch(filepath.Base(path))
	if name == nil {
		return totals, errors.New("the name must be chat_ENGINE[_tools]_TOKENIZER_PART.jsonl.gz")
	}
	engine, err := model.ParseEngine(name[1])
	if err != nil {
		return totals, err
	}
	records, err := readLines[record](path)
	if err != nil {
		return totals, err
	}
	template := ""
	if lent := lentTemplates[name[3]]; lent != "" {
		if template, err = readTemplate(opts, lent); errors.Is(err, errNoTemplate) {
			totals.Requests, totals.NotJudged = len(records), len(records)
			return totals, nil
		} else if err != nil {
			return totals, err
		}
	}
	m, err := opts.load(name[3], model.Options{ChatTemplate: template, ToolParser: name[2] != "", MaxModelLen: contextOf(records), TrustTemplates: true})
	if err != nil {
		return totals, err
	}
	for i := range records {
		totals.Requests++
		r := &records[i]
		for _, asked := range []struct {
			how  string
			api  prompt.API
			want *answer
		}{{"render", prompt.Chat, r.Render}, {"tokenize", prompt.Tokenize, r.Tokenize}, {"complete", prompt.Chat, r.Complete}} {
			if asked.want == nil {
				continue
			}
			why, err := compare(m, engine, opts, r, asked.api, asked.want)
			if err != nil && !errors.Is(err, errNoTemplate) {
				return totals, err
			}
			switch {
			case err != nil:
				totals.NotJudged++
			case why != "":
				totals.Differ++
				_, _ = fmt.Fprintf(w, "  case %d (%s), template %s, %s: %s\n", r.Case, r.Label, templateName(r), asked.how, why)
			case asked.want.Status == 200:
				totals.SameIDs++
			default:
				totals.Refused++
			}
		}
	}
	return totals, nil
}

// compare says how we differ from the engine, "" if we do not.
func compare(m *model.Model, engine model.Engine, opts Options, r *record, api prompt.API, want *answer) (string, error) {
	edits := []prompt.Edit{prompt.Set([]byte(`"tiny"`), "model")}
	if r.Template != nil {
		source, err := readTemplate(opts, *r.Template)
		if err != nil {
			return "", err
		}
		quoted, err := json.Marshal(source)
		if err != nil {
			return "", err
		}
		edits = append(edits, prompt.Set(quoted, "chat_template"))
	}
	body, err := prompt.Apply(nil, r.Body, edits...)
	if err != nil {
		return "", err
	}
	req, err := prompt.Parse(api, body)
	if err != nil {
		return "", err
	}
	res, err := m.Prompt(req, engine)
	if refusal, ok := errors.AsType[*model.Refusal](err); ok {
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
	if d := model.Compare(m.Tokenizer(), res.IDs, want.IDs); d != nil {
		return d.String(), nil
	}
	return "", nil
}

func templateName(r *record) string {
	if r.Template == nil {
		return "of the model"
	}
	return *r.Template
}

func readTemplate(opts Options, name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(opts.Templates, filepath.Base(name)))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", errNoTemplate, err)
	}
	return string(b), err
}

// contextOf is the engine's context: what it let a request generate plus the prompt.
func contextOf(records []record) int {
	for i := range records {
		if a := records[i].Render; a != nil && a.Status == 200 && a.Other.Sampling.MaxTokens > 0 {
			return len(a.IDs) + a.Other.Sampling.MaxTokens
		}
	}
	return 0
}

func readLines[T any](path string) ([]T, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	var records []T
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var r T
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("line %d: %w", len(records)+1, err)
		}
		records = append(records, r)
	}
	return records, lines.Err()
}

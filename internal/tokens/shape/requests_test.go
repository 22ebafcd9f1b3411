package shape

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// maxRefusals is the number of recorded bodies that the engines refuse and Kvlane does not: those
// with fields whose types or values differ from what the engines declare.
const maxRefusals = 420

// TestGeneratedRequests runs generated bodies (e2e/engines/bodies.py; "tools" are custom tools, namespaces and tools that an
// engine runs itself, and their calls) that were recorded with the
// answers of stock vLLM 0.32.0 and SGLang 0.5.23: the ids, their number, or the refusal. Where
// the engine answered, Kvlane computes the same ids. The engines ran with the Qwen3 tokenizer, a
// context of 1,024 tokens, a tool-call parser (vLLM) and --trust-request-chat-template.
func TestGeneratedRequests(t *testing.T) {
	files, err := filepath.Glob("testdata/requests_*.jsonl.gz")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d recordings, %v", len(files), err)
	}
	paths := map[string]body.API{"chat": body.Chat, "completions": body.Completions, "tokenize": body.Tokenize, "messages": body.Messages,
		"count_tokens": body.CountTokens, "responses": body.Responses,
		"responses_tools": body.Responses}
	answered, refused, taken := 0, 0, 0
	for _, file := range files {
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "requests_"), ".jsonl.gz")
		t.Run(name, func(t *testing.T) {
			engineName, api, _ := strings.Cut(name, "_")
			engine, err := ParseEngine(engineName)
			if err != nil {
				t.Fatal(err)
			}
			m := load(t, "qwen3", Options{ToolParser: true, TrustTemplates: true, MaxModelLen: 1024})
			eachRecorded(t, file, func(r recordedRequest) {
				switch why := r.differs(m, engine, paths[api]); {
				case why == onlyEngineRefuses:
					taken++
				case why != "":
					t.Errorf("%s\n%s", why, r.Body)
				case r.Status == 200:
					answered++
				default:
					refused++
				}
			})
		})
	}
	t.Logf("%d equal answers, %d equal refusals, %d refused by the engine alone", answered, refused, taken)
	if answered < 600 || taken > maxRefusals {
		t.Errorf("got %d equal answers and %d bodies that only the engine refuses, want at least 600 and at most %d", answered, taken, maxRefusals)
	}
}

const onlyEngineRefuses = "only the engine refuses"

// recordedRequest is a body and the engine's answer.
type recordedRequest struct {
	Body   string   `json:"body"`
	Status int      `json:"status"`
	IDs    []uint32 `json:"ids"`
	Count  int      `json:"count"`
}

func (r *recordedRequest) differs(m *Model, engine Engine, api body.API) string {
	req, err := body.Parse(api, []byte(r.Body))
	if err != nil {
		if r.Status == 200 {
			return "not read: " + err.Error()
		}
		return ""
	}
	res, err := m.Prompt(req, engine)
	_, refused := errors.AsType[*Refusal](err)
	switch {
	case err != nil && !refused:
		return err.Error()
	case refused && r.Status == 200:
		return "only we refuse: " + err.Error()
	case refused:
		return ""
	case r.Status != 200:
		return onlyEngineRefuses
	case r.IDs != nil && !slices.Equal(r.IDs, res.IDs):
		return "other ids"
	case r.IDs == nil && r.Count != len(res.IDs):
		return "another number of tokens"
	default:
		return ""
	}
}

func eachRecorded(t *testing.T, file string, each func(recordedRequest)) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<20)
	n := 0
	for ; lines.Scan(); n++ {
		var r recordedRequest
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		each(r)
	}
	if err := lines.Err(); err != nil || n < 50 {
		t.Fatalf("%d requests, %v", n, err)
	}
}

// TestEveryAPIOfEveryEngine: requests of APIs that an engine lacks are handled on a best-effort
// basis.
func TestEveryAPIOfEveryEngine(t *testing.T) {
	m := load(t, "qwen3", Options{MaxModelLen: 100})
	for api := body.Chat; api <= body.Tokenize; api++ {
		for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
			for _, raw := range []string{`{}`, `{"temperature":"x","prompt":"a","input":"a","text":"a","messages":[{"role":"user","content":"a"}],"token_ids":[1],"max_tokens":1}`,
				`{"temperature":1,"prompt":"a","input":"a","text":"a","messages":[{"role":"user","content":"a"}],"token_ids":[1],"max_tokens":1,"model":"m"}`} {
				req, err := body.Parse(api, []byte(raw))
				if err != nil {
					t.Fatal(err)
				}
				if _, err := m.Prompt(req, engine); err == nil && raw == `{}` {
					t.Errorf("%v %v: nothing is a request", engine, api)
				}
			}
		}
	}
}

// To pydantic a list of ids and texts is one prompt or invalid, so the request is routed without ids.
func TestMixedListsOfPromptsHaveNoIDs(t *testing.T) {
	m := load(t, "qwen3", Options{})
	for raw, known := range map[string]bool{`{"prompt":[1,"2"]}`: false, `{"prompt":["1",2]}`: false, `{"prompt":[[1],"2",3]}`: false,
		`{"prompt":[1,2]}`: true, `{"prompt":["1","2"]}`: true, `{"prompt":[1,true,2.0]}`: true} {
		req, err := body.Parse(body.Completions, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.Prompt(req, VLLM)
		if err != nil || (res.Partial == "") != known || (len(res.IDs) > 0) != known {
			t.Errorf("%s: got ids %v, partial %q, error %v, want ids: %v", raw, res.IDs, res.Partial, err, known)
		}
	}
}

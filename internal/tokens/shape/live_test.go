package shape

import (
	"bufio"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// liveCase is a line of livecheck/templates.py.
type liveCase struct {
	Tokenizer string          `json:"tokenizer"`
	Template  *string         `json:"template"`
	Args      json.RawMessage `json:"args"`
	Prompt    *string         `json:"prompt"`
	IDs       []uint32        `json:"ids"`
	Error     string          `json:"error"`
}

// TestTemplatesLive compares with transformers.apply_chat_template on conversations that livecheck/templates.py has
// generated: the same prompt and ids, an error where it raised one.
func TestTemplatesLive(t *testing.T) {
	path := os.Getenv("KVLANE_TEMPLATE_CASES")
	if path == "" {
		t.Skip("KVLANE_TEMPLATE_CASES names no file of tokenizer/livecheck/templates.py")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	models, templates := map[string]*Model{}, map[string]*template{}
	equal, refused, differ := 0, 0, 0
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var c liveCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		m := models[c.Tokenizer]
		if m == nil {
			tok, err := bpe.Load(os.DirFS(c.Tokenizer))
			if err != nil {
				t.Fatalf("%s: %v", c.Tokenizer, err)
			}
			if m, err = New(tok, Options{}); err != nil {
				t.Fatalf("%s: %v", c.Tokenizer, err)
			}
			models[c.Tokenizer] = m
		}
		own := templates[c.name()]
		if own == nil {
			own = m.liveTemplate(t, &c)
			templates[c.name()] = own
		}
		got, err := m.applyTemplate(own, c.Args)
		if err != nil && c.Error != "" {
			refused++
			continue
		}
		var ids []uint32
		if err == nil && c.Error == "" {
			ids, err = m.tok.Encode(nil, got, false)
		}
		if err == nil && c.Error == "" && got == *c.Prompt && slices.Equal(ids, c.IDs) {
			equal++
			continue
		}
		const most = 20
		if differ++; differ <= most {
			t.Errorf("%s: %s\n got %q %v\nwant %q %s", c.name(), c.Args, got, err, deref(c.Prompt), c.Error)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d templates: %d prompts with equal text and ids, %d errors on both sides, %d differ", len(templates), equal, refused, differ)
	if equal == 0 {
		t.Error("nothing compared")
	}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func (c *liveCase) name() string {
	if c.Template != nil {
		return *c.Template
	}
	return c.Tokenizer
}

func (m *Model) liveTemplate(t *testing.T, c *liveCase) *template {
	t.Helper()
	if c.Template == nil {
		own, err := m.ownTemplate(false)
		if err != nil {
			t.Fatal(err)
		}
		return own
	}
	source, err := os.ReadFile(*c.Template)
	if err != nil {
		t.Fatal(err)
	}
	own, err := compile(string(source))
	if err != nil {
		t.Fatalf("%s: %v", *c.Template, err)
	}
	return own
}

// applyTemplate is transformers' method: what engines do after they have shaped a request.
func (m *Model) applyTemplate(tpl *template, args json.RawMessage) (string, error) {
	v, err := jinja.ParseJSON(args)
	if err != nil {
		return "", err
	}
	given, _ := v.AsDict()
	vars := m.config.specialTokens()
	for _, absent := range [...]string{"messages", "tools", "documents"} {
		vars.Set(absent, jinja.None())
	}
	continued, final := false, ""
	var messages []jinja.Value
	given.Range(func(k, v jinja.Value) bool {
		switch name, _ := k.AsString(); name {
		case "conversation":
			messages, _ = v.AsList()
		case "continue_final_message":
			continued = true
		default:
			vars.Set(name, v)
		}
		return true
	})
	if continued {
		if final, err = markContinued(messages); err != nil {
			return "", err
		}
	}
	vars.Set("messages", jinja.List(messages))
	out, err := tpl.compiled.Render(nil, vars, jinja.Env{Now: time.Date(2026, 11, 20, 20, 0, 0, 0, time.UTC)})
	if err != nil || !continued {
		return string(out), err
	}
	n, err := cutContinued(string(out), final)
	return strings.Clone(string(out[:n])), err
}

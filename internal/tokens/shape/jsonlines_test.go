package shape

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"
)

func checkFailed(t *testing.T, err error, failed, lines int) {
	t.Helper()
	count, ok := errors.AsType[*LinesError](err)
	if !ok || count.Failed != failed || count.Lines != lines {
		t.Errorf("%v, want %d of %d lines to fail", err, failed, lines)
	}
}

// TestEachLineHasOne: each input line has one output line, and the error is nil if all succeed.
func TestEachLineHasOne(t *testing.T) {
	tok := load(t, "mistral_7b", Options{}).Tokenizer()
	for in, want := range map[string]int{"": 0, "\n": 1, "\n\n \n": 3, " ": 1, `{"text":"a"}`: 1, "{\"text\":\"a\"}\n": 1, "{\"text\":\"a\"}\n\n": 2, "\n{\"text\":\"a\"}": 2} {
		var out bytes.Buffer
		err := TokenizeLines(strings.NewReader(in), &out, tok, false)
		if got := strings.Count(out.String(), "\n"); got != want {
			t.Errorf("%q: %d lines, want %d: %s", in, got, want, &out)
		}
		if failed := strings.Contains(out.String(), "error"); failed != (err != nil) {
			t.Errorf("%q: got error %v and output %s, want an error exactly if a line failed", in, err, &out)
		}
	}
}

func TestTokenizeLines(t *testing.T) {
	m := load(t, "mistral_7b", Options{})
	var out bytes.Buffer
	in := "{\"text\": \"Hello\"}\n\n{\"text\": \"\\ud800\"}\nno json\n{\"text\":\"Hello\"}"
	checkFailed(t, TokenizeLines(strings.NewReader(in), &out, m.Tokenizer(), true), 3, 5)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{`{"ids":[1,22557]}`, `{"error":"the line is empty"}`, `{"error":"text: lone surrogate in a string"}`, `{"error":"invalid JSON at byte 0`, `{"ids":[1,22557]}`}
	if len(lines) != len(want) {
		t.Fatalf("%d lines: %s", len(lines), &out)
	}
	for i := range want {
		if !strings.HasPrefix(lines[i], want[i]) {
			t.Errorf("line %d: %s, want %s", i, lines[i], want[i])
		}
	}
}

func TestRenderLines(t *testing.T) {
	m := load(t, "qwen3", Options{})
	in := `{"messages":[{"role":"user","content":"a<b"}]}` + "\n" + `{"messages":5}` + "\n" + `{"messages":[{"role":"user","content":"Hi"}]}` + "\n"
	for _, c := range []struct {
		opts  RenderOptions
		first string
	}{
		{RenderOptions{}, `{"prompt":"<|im_start|>user\na<b<|im_end|>\n<|im_start|>assistant\n"}`},
		{RenderOptions{IDs: true, Engine: SGLang}, `{"prompt":"<|im_start|>user\na<b<|im_end|>\n<|im_start|>assistant\n","ids":[151644,872,198,64,33177,151645,198,151644,77091,198]}`},
	} {
		var out bytes.Buffer
		checkFailed(t, RenderLines(strings.NewReader(in), &out, m, c.opts), 1, 3)
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 3 || lines[0] != c.first || !strings.HasPrefix(lines[1], `{"error":"messages:`) {
			t.Errorf("got %s, want three lines, %s first and an error second", &out, c.first)
		}
	}
	if err := RenderLines(strings.NewReader(in), &bytes.Buffer{}, m, RenderOptions{Path: "/v1/files"}); err == nil {
		t.Error("got no error for a path without a prompt, want one")
	}
}

func TestRenderContextLines(t *testing.T) {
	var out bytes.Buffer
	in := "{\"a\":{\"b\":1.0}}\n{}\n[]\n"
	now := time.Date(2026, 11, 20, 20, 0, 0, 0, time.UTC)
	checkFailed(t, RenderContextLines(strings.NewReader(in), &out, "{{ a.b }} {{ strftime_now('%Y-%m-%d') }}", now), 2, 3)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || lines[0] != `{"prompt":"1.0 2026-11-20"}` || !strings.HasPrefix(lines[1], `{"error":"UndefinedError`) || !strings.HasPrefix(lines[2], `{"error":`) {
		t.Errorf("got %s, want a prompt and two errors", &out)
	}
}

func TestRenderContextLinesOfABrokenTemplate(t *testing.T) {
	var out bytes.Buffer
	checkFailed(t, RenderContextLines(strings.NewReader("{}\n{}\n"), &out, "{% for %}", time.Time{}), 2, 2)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], `{"error":"`) || lines[0] != lines[1] {
		t.Errorf("got %s, want two equal errors", &out)
	}
}

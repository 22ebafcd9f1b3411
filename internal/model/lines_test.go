package model

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestTokenizeLines(t *testing.T) {
	m := load(t, "mistral_7b", Options{})
	var out bytes.Buffer
	in := "{\"text\": \"Hello\"}\n\n{\"text\": \"\\ud800\"}\nno json\n{\"text\":\"Hello\"}"
	if err := TokenizeLines(strings.NewReader(in), &out, m.Tokenizer(), true); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{`{"ids":[1,22557]}`, `{"error":"text: lone surrogate in a string"}`, `{"error":"invalid JSON at byte 0`, `{"ids":[1,22557]}`}
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
		if err := RenderLines(strings.NewReader(in), &out, m, c.opts); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 3 || lines[0] != c.first || !strings.HasPrefix(lines[1], `{"error":"messages:`) {
			t.Errorf("%s", &out)
		}
	}
	if err := RenderLines(strings.NewReader(in), &bytes.Buffer{}, m, RenderOptions{Path: "/v1/files"}); err == nil {
		t.Error("a path without a prompt was accepted")
	}
}

func TestRenderContextLines(t *testing.T) {
	var out bytes.Buffer
	in := "{\"a\":{\"b\":1.0}}\n{}\n[]\n"
	now := time.Date(2026, 11, 20, 20, 0, 0, 0, time.UTC)
	if err := RenderContextLines(strings.NewReader(in), &out, "{{ a.b }} {{ strftime_now('%Y-%m-%d') }}", now); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || lines[0] != `{"prompt":"1.0 2026-11-20"}` || !strings.HasPrefix(lines[1], `{"error":"UndefinedError`) || !strings.HasPrefix(lines[2], `{"error":`) {
		t.Errorf("%s", &out)
	}
}

func TestRenderContextLinesOfABrokenTemplate(t *testing.T) {
	var out bytes.Buffer
	if err := RenderContextLines(strings.NewReader("{}\n{}\n"), &out, "{% for %}", time.Time{}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], `{"error":"`) || lines[0] != lines[1] {
		t.Errorf("%s", &out)
	}
}

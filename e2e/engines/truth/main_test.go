package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var (
	recordings = filepath.Join("..", "recordings")
	models     = filepath.Join("..", "..", "..", "internal", "models")
)

// The project's own recordings of real engines: everything is as the engines said.
func TestOwnRecordings(t *testing.T) {
	var out strings.Builder
	differ, err := run(&out, recordings, models, "")
	t.Log("\n" + out.String())
	if err != nil || differ {
		t.Errorf("something differs (%v)", err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "totals: ") || strings.Contains(last, " (0 right") || strings.Contains(last, "(0 answers") {
		t.Errorf("the last line is %q", last)
	}
}

func TestAFolderWithoutRecordings(t *testing.T) {
	if _, err := run(&strings.Builder{}, t.TempDir(), models, ""); err == nil {
		t.Error("an empty folder passed")
	}
}

// A recording in which the engine says something else is reported.
func TestADifferenceIsReported(t *testing.T) {
	dir := t.TempDir()
	line := `{"kind":"meta","engine":"vllm","flags":"--max-model-len 1024"}
{"kind":"http","n":1,"label":"wrong","method":"POST","path":"/v1/completions","headers":{},"body":"{\"prompt\":\"Hello, world\"}","status":200,"t_sent":1,"t":2,"resp":{"choices":[{"prompt_token_ids":[9707,11,1880]}]}}
`
	if err := os.WriteFile(filepath.Join(dir, "vllm_00_own.jsonl.gz"), packed(t, line), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	differ, err := run(&out, dir, models, "")
	if err != nil || !differ || !strings.Contains(out.String(), "token 2 differs") {
		t.Errorf("differ %v, %v\n%s", differ, err, out.String())
	}
}

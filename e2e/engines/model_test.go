package engines

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestModelsAreMadeAnew: a finished model's folder stays as long as what it is made of does.
func TestModelsAreMadeAnew(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("no python3")
	}
	dir := t.TempDir()
	tokenizer, model := filepath.Join(dir, "tokenizer"), filepath.Join(dir, "model")
	if err := os.Mkdir(tokenizer, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what, tokenizer, kind string
		do                    func()
		made                  bool
	}{
		{"the first time", "{}", "qwen3", nil, true},
		{"the same again", "{}", "qwen3", nil, false},
		{"another kind", "{}", "llama", nil, true},
		{"another tokenizer", "{} ", "llama", nil, true},
		{"the same tokenizer again", "{} ", "llama", nil, false},
		{"it was not finished", "{} ", "llama", func() { _ = os.Remove(filepath.Join(model, "recipe")) }, true},
		{"it was made by another program", "{} ", "llama", func() { _ = os.WriteFile(filepath.Join(model, "recipe"), []byte("old"), 0o600) }, true},
	} {
		if err := os.WriteFile(filepath.Join(tokenizer, "tokenizer.json"), []byte(c.tokenizer), 0o600); err != nil {
			t.Fatal(err)
		}
		if c.do != nil {
			c.do()
		}
		left := filepath.Join(model, "left over")
		// Its own program is imported, and only what writes the files is replaced.
		out, err := exec.Command("python3", "-c", `import pathlib, sys, tiny_model
tiny_model.write = lambda tokenizer, target, *more: print("made", *(f.name for f in target.iterdir()))
tiny_model.make(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])`, tokenizer, model, c.kind).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", c.what, err, out)
		}
		if got := strings.TrimSpace(string(out)); got != map[bool]string{true: "made", false: ""}[c.made] {
			t.Errorf("%s: got %q, want made in an empty folder %v", c.what, got, c.made)
		}
		if err := os.WriteFile(left, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

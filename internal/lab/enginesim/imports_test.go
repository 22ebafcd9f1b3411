package enginesim

import (
	"go/parser"
	gotoken "go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Hashes, events and the protocols of prefill and decode are an independent implementation: only prompts and their ids
// may come from Kvlane.
func TestImportsOnlyPromptsOfKvlane(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var imports []string
	for _, f := range files {
		parsed, err := parser.ParseFile(gotoken.NewFileSet(), f, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range parsed.Imports {
			if path, ok := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), "github.com/kvlane/kvlane/"); ok {
				imports = append(imports, path)
			}
		}
	}
	slices.Sort(imports)
	if got, want := slices.Compact(imports), []string{"internal/tokens/body", "internal/tokens/bpe", "internal/tokens/shape"}; !slices.Equal(got, want) {
		t.Errorf("got imports of %q, want %q", got, want)
	}
}

package enginesim

import (
	"go/parser"
	gotoken "go/token"
	"os"
	"strings"
	"testing"
)

// The engine must not be able to share a mistake with the router.
func TestImportsNothingOfKvlane(t *testing.T) {
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".go") {
			continue
		}
		parsed, err := parser.ParseFile(gotoken.NewFileSet(), f.Name(), nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range parsed.Imports {
			seen++
			if strings.Contains(i.Path.Value, "kvlane") {
				t.Errorf("%s imports %s", f.Name(), i.Path.Value)
			}
		}
	}
	if seen == 0 {
		t.Error("no imports found")
	}
}

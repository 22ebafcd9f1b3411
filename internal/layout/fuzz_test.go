package layout

import (
	"go/ast"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// leastSeeds is the number of inputs that a fuzz target begins with.
const leastSeeds = 3

// seedsOf is the number of f.Add that a fuzz target calls, also by functions that it declares for it; one in a loop counts as many
// as the test wants.
func seedsOf(fuzz *ast.FuncDecl) (seeds int) {
	adders := map[string]bool{}
	var count func(n ast.Node, each int)
	count = func(n ast.Node, each int) {
		ast.Inspect(n, func(inner ast.Node) bool {
			switch inner := inner.(type) {
			case *ast.RangeStmt:
				count(inner.Body, leastSeeds)
				return false
			case *ast.ForStmt:
				count(inner.Body, leastSeeds)
				return false
			case *ast.AssignStmt:
				name, named := inner.Lhs[0].(*ast.Ident)
				if literal, ok := inner.Rhs[0].(*ast.FuncLit); ok && named {
					before := seeds
					count(literal.Body, 1)
					adders[name.Name] = seeds > before
					seeds = before
					return false
				}
			case *ast.CallExpr:
				switch called := inner.Fun.(type) {
				case *ast.Ident:
					if adders[called.Name] {
						seeds += each
					}
				case *ast.SelectorExpr:
					if x, ok := called.X.(*ast.Ident); ok && x.Name == "f" && called.Sel.Name == "Add" {
						seeds += each
					}
				}
			}
			return true
		})
	}
	count(fuzz.Body, 1)
	return seeds
}

// Each fuzz target has seeds, or a corpus in the repository: without them it spends its time on inputs that nothing reads.
func TestFuzzTargetsHaveSeeds(t *testing.T) {
	targets := 0
	for _, f := range goFiles(t) {
		for _, d := range f.syntax.Decls {
			fuzz, ok := d.(*ast.FuncDecl)
			if !ok || !f.test || !strings.HasPrefix(fuzz.Name.Name, "Fuzz") {
				continue
			}
			targets++
			corpus, _ := os.ReadDir(filepath.Join(root, f.pkg, "testdata", "fuzz", fuzz.Name.Name))
			if n := seedsOf(fuzz) + len(corpus); n < leastSeeds {
				t.Errorf("%s: %s has %d seeds, want %d at least: f.Add, or files in testdata/fuzz", f.pkg, fuzz.Name.Name, n, leastSeeds)
			}
		}
	}
	if targets < 60 {
		t.Errorf("got %d fuzz targets, want all", targets)
	}
}

package routing

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// rows are the numbered behaviours of the reference routers that concern choosing.
var rows = strings.Fields(`
	0.1 0.2 0.4 0.5 0.6 0.7 0.8 0.9 0.10 0.11 0.12 0.13 0.14 0.15
	1.1 1.2 1.3 1.4 1.5 1.6 1.7 1.8 1.9 1.10 1.11 1.12 1.13 1.14 1.15 1.16 1.17 1.18 1.22 1.23 1.24 1.25
	2.1 2.2 2.3 2.4 2.5 2.6 2.7 2.8 2.9 2.10 2.11 2.12 2.13 2.14 2.15 2.16 2.17 2.19 2.20 2.21
	3.1 3.2 3.3 3.4 3.5 3.6 3.7 3.8 3.10 3.11 3.12 3.13 3.14 3.15 3.16 3.17 3.18 3.19 3.20 3.21 3.22
	4.1 4.2 4.3 4.4 4.5 4.6 4.7 4.8 4.9 4.10 4.11 4.13 4.14
	X1 X2 X3 X4 X6 X7 X8 X9 X10 X11 X12 X14 X15 X16 X17 X18 X19`)

var (
	rowFile = regexp.MustCompile("`([a-z0-9_/]+\\.(?:txt|go))`")
	rowTest = regexp.MustCompile(`\bTest[A-Za-z0-9]+`)
)

// TestEveryRowHasATest reads the list in docs/routing.md: every row is there, and what is
// named beside it exists. In this package's own files the row must be a subtest.
func TestEveryRowHasATest(t *testing.T) {
	text, err := os.ReadFile("../docs/routing.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, ok := strings.Cut(string(text), "## Rows of the reference")
	if !ok {
		t.Fatal("docs/routing.md has no list of rows")
	}
	var listed []string
	for line := range strings.Lines(list) {
		cells := strings.Split(line, "|")
		if strings.HasPrefix(line, "## ") {
			break
		}
		if len(cells) != 5 || strings.Contains(cells[1], "row") || strings.Contains(cells[1], "---") {
			continue
		}
		var source strings.Builder
		files := rowFile.FindAllStringSubmatch(cells[3], -1)
		for _, f := range files {
			text, err := os.ReadFile(filepath.Join("..", f[1]))
			if err != nil {
				t.Errorf("rows %s: %v", cells[1], err)
			}
			source.Write(text)
		}
		for _, name := range rowTest.FindAllString(cells[3], -1) {
			if !strings.Contains(source.String(), "func "+name+"(") {
				t.Errorf("rows %s: no %s in the files named", cells[1], name)
			}
		}
		for row := range strings.FieldsSeq(cells[1]) {
			listed = append(listed, row)
			named := strings.Contains(cells[3], "Test") || strings.Contains(cells[3], "subtest") || len(files) == 0 ||
				!strings.HasPrefix(files[0][1], "routing/")
			if !named && !strings.Contains(source.String(), "\nsubtest "+row+"\n") && !strings.Contains(source.String(), `t.Run("`+row+`"`) {
				t.Errorf("row %s is no subtest of the files named", row)
			}
		}
	}
	for _, row := range rows {
		if !slices.Contains(listed, row) {
			t.Errorf("row %s is not listed", row)
		}
	}
}

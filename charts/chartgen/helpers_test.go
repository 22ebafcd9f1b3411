package chartgen

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// TestHelpersAreDefined: Helm finds an include of a missing helper only when it renders the template that has it. The test of the
// chart does that, but needs Helm. Every helper that is defined is included somewhere, too.
func TestHelpersAreDefined(t *testing.T) {
	files, err := filepath.Glob("../kvlane/templates/*")
	if err != nil || len(files) == 0 {
		t.Fatal("no templates:", err)
	}
	use := regexp.MustCompile(`(define|include|template) "(kvlane\.\w+)"`)
	defined, included := map[string]bool{}, map[string]string{}
	for _, name := range files {
		if info, err := os.Stat(name); err != nil || info.IsDir() {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range use.FindAllSubmatch(text, -1) {
			if string(m[1]) == "define" {
				defined[string(m[2])] = true
			} else {
				included[string(m[2])] = name
			}
		}
	}
	for helper, name := range included {
		if !defined[helper] {
			t.Errorf("%s includes %s, which no template defines", name, helper)
		}
	}
	for helper := range defined {
		if included[helper] == "" {
			t.Errorf("%s is included nowhere", helper)
		}
	}
}

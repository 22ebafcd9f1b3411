package layout

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	fences   = regexp.MustCompile("(?ms)^```.*?^```")
	links    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	headings = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	unslug   = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	named    = regexp.MustCompile(`(?:name|id)="([^"]+)"`)
)

// anchorsOf returns the anchors that GitHub gives the headings of a document.
func anchorsOf(text []byte) map[string]bool {
	all := map[string]bool{}
	for _, m := range headings.FindAllSubmatch(text, -1) {
		heading := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(string(m[1]), "$1")
		all[strings.ReplaceAll(unslug.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), ""), " ", "-")] = true
	}
	for _, m := range named.FindAllSubmatch(text, -1) {
		all[string(m[1])] = true
	}
	return all
}

// broken returns the links of a document to files and anchors that are not there.
func broken(t *testing.T, file string) (targets []string, seen int) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text = fences.ReplaceAll(text, nil)
	for _, m := range links.FindAllSubmatch(text, -1) {
		path, anchor, _ := strings.Cut(string(m[1]), "#")
		if strings.Contains(path, ":") {
			continue // of another server
		}
		seen++
		to := text
		if path != "" {
			place := filepath.Join(filepath.Dir(file), path)
			if _, err := os.Stat(place); err != nil {
				targets = append(targets, string(m[1]))
				continue
			}
			if strings.HasSuffix(path, ".md") {
				if to, err = os.ReadFile(place); err != nil {
					t.Fatal(err)
				}
				to = fences.ReplaceAll(to, nil)
			}
		}
		if anchor != "" && (path == "" || strings.HasSuffix(path, ".md")) && !anchorsOf(to)[anchor] {
			targets = append(targets, string(m[1]))
		}
	}
	return targets, seen
}

func TestLinksOfDocuments(t *testing.T) {
	all := 0
	repository(t, func(path string) {
		if strings.HasSuffix(path, ".md") && !strings.Contains(path, "chartgen") { // which holds a template for another folder
			targets, seen := broken(t, path)
			all += seen
			for _, target := range targets {
				t.Errorf("%s: the link to %s leads nowhere", path, target)
			}
		}
	})
	if all < 100 {
		t.Errorf("got %d links, want those of all documents", all)
	}
	wrong := filepath.Join(t.TempDir(), "a.md")
	if err := os.WriteFile(wrong, []byte("# One, `two`\n[a](#one-two) [b](#three) [c](a.md#one-two) [d](a.md#four) [e](b.md) [f](https://b.md)\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, _ := broken(t, wrong); strings.Join(got, " ") != "#three a.md#four b.md" {
		t.Errorf("got the broken links %q, want three", got)
	}
}

func TestReadmeIsShort(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if n := bytes.Count(text, []byte("\n")); err != nil || n == 0 || n >= 120 {
		t.Errorf("README.md: got %d lines, %v, want less than 120", n, err)
	}
}

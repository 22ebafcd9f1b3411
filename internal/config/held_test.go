package config

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The table of what clients can make Kvlane hold in memory has a bound for each kind, and
// the keys that it names exist.
func TestEverythingThatIsHeldHasABound(t *testing.T) {
	page, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(page), "| held | from, until | bound |\n|---|---|---|\n")
	if !ok {
		t.Fatal("docs/operating.md has no table of what is held")
	}
	text, _, _ = strings.Cut(text, "\n\n")
	rows := strings.Split(text, "\n")
	for _, kind := range []string{"bodies", "wait for capacity", "tickets", "access log", "conversations", "decisions for", "come again", "streams", "the index"} {
		if !strings.Contains(text, kind) {
			t.Errorf("no row about %q", kind)
		}
	}
	keys := string(Schema())
	key := regexp.MustCompile("`([a-z_.\\[\\]]+)`")
	for _, row := range rows {
		cells := strings.Split(strings.Trim(row, "|"), "|")
		if len(cells) != 3 || strings.TrimSpace(cells[2]) == "" {
			t.Errorf("got %q, want a bound", row)
			continue
		}
		for _, m := range key.FindAllStringSubmatch(cells[2], -1) {
			for name := range strings.SplitSeq(strings.ReplaceAll(m[1], "[]", ""), ".") {
				if !strings.Contains(keys, `"`+name+`": {`) {
					t.Errorf("%s: no key %s", m[1], name)
				}
			}
		}
	}
}

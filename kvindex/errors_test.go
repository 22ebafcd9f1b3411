package kvindex

import (
	"regexp"
	"testing"
)

// Names of refusals are labels of metrics and keys of pages: in snake case, each of its own.
func TestNamesOfRefusals(t *testing.T) {
	seen := map[string]bool{}
	for e := range refusalTexts {
		name := RefusalError(e).Name()
		if seen[name] || !regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`).MatchString(name) {
			t.Errorf("%d: got %q, want a name of its own in snake case", e, name)
		}
		seen[name] = true
	}
	if got := ErrBlockSize.Name(); got != "block_size_does_not_fit" {
		t.Errorf("got %q, want block_size_does_not_fit", got)
	}
}

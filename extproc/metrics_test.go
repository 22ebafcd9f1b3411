package extproc

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// A failure missing from the list would have no counter.
func TestFailuresListsAll(t *testing.T) {
	source, err := os.ReadFile("metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`Failure = "([a-z_]+)"`).FindAllSubmatch(source, -1)
	if len(declared) != len(Failures()) {
		t.Errorf("got %d declared failures and %d listed, want all listed", len(declared), len(Failures()))
	}
	for _, d := range declared {
		if !slices.Contains(Failures(), Failure(d[1])) {
			t.Errorf("got no %s in the list", d[1])
		}
	}
}

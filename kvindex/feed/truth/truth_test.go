package truth_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/kvindex/feed/truth"
)

// Recordings of real engines, where the machine has them.
func TestSharedRecordings(t *testing.T) {
	shared := os.Getenv("KVLANE_SHARED")
	if shared == "" {
		t.Skip("KVLANE_SHARED does not name a folder with data/engine-truth")
	}
	var out strings.Builder
	res, err := truth.Run(truth.Options{Recordings: filepath.Join(shared, "data", "engine-truth")}, &out)
	if err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	if res.Wrong != 0 || res.Right == 0 {
		t.Errorf("%v", &res)
	}
}

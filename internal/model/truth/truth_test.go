package truth_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvlane/kvlane/internal/model/truth"
)

// Recordings of real engines, if KVLANE_SHARED names the folder that holds them.
func TestRecordingsOfRealEngines(t *testing.T) {
	shared := os.Getenv("KVLANE_SHARED")
	if shared == "" {
		t.Skip("KVLANE_SHARED is not set: the recordings of real engines are not on this machine")
	}
	var report bytes.Buffer
	totals, err := truth.Run(&report, truth.Options{
		Recordings: filepath.Join(shared, "data", "engine-truth"), Models: filepath.Join("..", "..", "models"),
		Templates: filepath.Join(shared, "data", "templates"),
	})
	t.Logf("\n%s", &report)
	if err != nil {
		t.Fatal(err)
	}
	if totals.Differ > 0 || totals.SameIDs == 0 {
		t.Errorf("%v", &totals)
	}
}

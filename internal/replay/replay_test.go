package replay

import (
	"bytes"
	"compress/gzip"
	"os"
	"strings"
	"testing"
)

// traceVariable names the environment variable with the path of Mooncake's
// conversation trace, gzipped JSON lines.
const traceVariable = "KVLANE_MOONCAKE_TRACE"

func openTrace(t testing.TB, load float64) Workload {
	t.Helper()
	path := os.Getenv(traceVariable)
	if path == "" {
		t.Skipf("%s is not set: the trace is not part of the project", traceVariable)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	w, err := ReadMooncake(z, load, -1)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestMooncakeConversations(t *testing.T) {
	w := openTrace(t, 1)
	requests := w.Generate(1)
	turns := map[string]int{}
	for i := range requests {
		turns[requests[i].Conversation]++
	}
	long := 0
	for _, n := range turns {
		if n > 1 {
			long++
		}
	}
	if len(requests) != 12031 || len(turns) != 8026 || long != 2059 {
		t.Errorf("%d requests, %d conversations, %d with several turns", len(requests), len(turns), long)
	}
}

func TestMooncakeTable(t *testing.T) {
	w := openTrace(t, 2.5)
	report, err := Run(Options{Workload: w, Fleet: w.Fleet, Policies: []string{"kv-aware", "session", "trt-plain", "min-wait", "oracle"}, Seeds: []uint64{1}})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := report.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + b.String())
}

func TestSkewTable(t *testing.T) {
	w := ConversationSkew()
	report, err := Run(Options{Workload: w, Fleet: w.Fleet, Policies: []string{"kv-aware", "trt-plain", "conversation-rank"}, Seeds: []uint64{1, 2}})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := report.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + b.String())
}

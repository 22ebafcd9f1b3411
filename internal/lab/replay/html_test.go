package replay

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write what is compared")

func htmlReport(workload, policy string) *Report {
	return &Report{
		Workload: workload, Ranks: 16, Seeds: []uint64{1, 2},
		Rows: []Row{
			{Policy: "kv-aware", Mean: Result{Hit: 0.75, Ceiling: 0.8, TTFT50: 0.25, TTFT90: 0.5, TTFT99: 1.5, ITL50: 0.0125, Throughput: 1234.5, CV: 0.1, MaxMin: 1.25, Moves: 3}, Deviation: Result{TTFT90: 0.015}},
			{Policy: policy, Mean: Result{Hit: 0.5, Ceiling: 0.8, TTFT50: 0.5, TTFT90: 2, TTFT99: 4, ITL50: 0.025, Throughput: 1230, CV: 0.3, MaxMin: 2}},
		},
	}
}

// Names come from files and flags: the page must show them as text.
func TestHTMLEscapesNames(t *testing.T) {
	const file = "testdata/report.html"
	var page bytes.Buffer
	if err := htmlReport(`</title><script>alert("w")</script> & 'x' %d {{.}}`, `"><img src=x onerror=alert('p')>`).WriteHTML(&page); err != nil {
		t.Fatal(err)
	}
	for _, tag := range []string{"<script", "<img"} {
		if strings.Contains(page.String(), tag) {
			t.Errorf("a name became a tag: %s", tag)
		}
	}
	if *update {
		if err := os.WriteFile(file, page.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(page.Bytes(), want) {
		t.Errorf("not as in %s (-update writes it):\n%s", file, page.String())
	}
}

package observe

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/extproc"
)

func TestModelNamesAreBounded(t *testing.T) {
	m := New("v1")
	for i := range 3 * maxModels {
		a := m.Answer(NewEntry(&extproc.Request{}, time.Now()), fmt.Sprint("model", i))
		a.Usage(10, 4, 2)
		a.End(time.Now())
	}
	if n := testutil.CollectAndCount(m.answers.input); n != maxModels+1 {
		t.Errorf("got %d names of models, want %d and %q", n, maxModels, otherModel)
	}
	if got := testutil.ToFloat64(m.answers.input.WithLabelValues(otherModel)); got != 2*maxModels*10 {
		t.Errorf("got %v tokens of other models, want %d", got, 2*maxModels*10)
	}
	a := m.Answer(NewEntry(&extproc.Request{}, time.Now()), "")
	a.Usage(10, -1, -1)
	if got := testutil.ToFloat64(m.answers.cached.WithLabelValues(otherModel)); got != 2*maxModels*4 {
		t.Errorf("got %v cached tokens after an answer without any, want %d", got, 2*maxModels*4)
	}
}

func TestTimePerOutputTokenIsOfStreamsOnly(t *testing.T) {
	m := New("v1")
	for _, streamed := range []bool{true, false} {
		began := time.Now()
		a := m.Answer(NewEntry(&extproc.Request{}, began), "demo")
		a.Streamed = streamed
		a.FirstToken(began.Add(time.Second))
		a.Usage(10, 0, 11)
		a.End(began.Add(3 * time.Second))
	}
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "kvlane_time_per_output_token_seconds" {
			if h := f.GetMetric()[0].GetHistogram(); len(f.GetMetric()) != 1 || h.GetSampleCount() != 1 || h.GetSampleSum() != 0.2 {
				t.Errorf("got %v, want one observation of 0.2 s", f)
			}
			return
		}
	}
	t.Error("got no series, want one")
}

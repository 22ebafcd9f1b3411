package observe

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/kvlane/kvlane/routing"
)

func TestDecisionsKeepTheLast(t *testing.T) {
	l := NewDecisions(3)
	for i := range 5 {
		l.Add(&Entry{ID: fmt.Sprint(i)})
	}
	got := ""
	for _, e := range l.Last(10) {
		got += e.ID
	}
	if got != "432" || l.Find("1") != nil || l.Find("3") == nil {
		t.Errorf("kept %s", got)
	}
	// The explanation of an entry that left the ring is reused: the entry no longer shows
	// it.
	used := &routing.Explanation{Request: "0"}
	old := &Entry{ID: "old", Explanation: used}
	l.Add(old)
	for i := range 3 {
		l.Add(&Entry{ID: fmt.Sprint(i)})
	}
	if old.Explanation != nil {
		t.Error("an entry that left the ring keeps its explanation")
	}
	if NewDecisions(0).Explains(1) {
		t.Error("a log that keeps nothing explains")
	}
	explained := 0
	for range 640 {
		if l.Explains(ExplainTargets + 1) {
			explained++
		}
	}
	if explained != 10 {
		t.Errorf("%d of 640 explained in a large fleet", explained)
	}
}

func TestDecisionsAreResized(t *testing.T) {
	l := NewDecisions(3)
	for i := range 5 {
		l.Add(&Entry{ID: strconv.Itoa(i)})
	}
	ids := func() (out string) {
		for _, e := range l.Last(10) {
			out += e.ID
		}
		return out
	}
	for _, c := range []struct {
		keep       int
		want, next string
	}{{5, "432", "5432"}, {2, "54", "55"}, {0, "", ""}, {1, "", "5"}} {
		l.Resize(c.keep)
		if got := ids(); got != c.want {
			t.Errorf("resized to %d: got %q, want %q", c.keep, got, c.want)
		}
		l.Add(&Entry{ID: "5"})
		if got := ids(); got != c.next {
			t.Errorf("resized to %d and one added: got %q, want %q", c.keep, got, c.next)
		}
	}
}

package observe

import (
	"strings"
	"testing"
)

// The model that an answer names comes from an engine: the log and the pages keep its beginning.
func TestTheServedModelIsClipped(t *testing.T) {
	e := new(Entry)
	for _, name := range []string{"short", strings.Repeat("long", 1<<18)} {
		e.SetServed(name)
		if got := e.After.Served; got != Clip(name) || len(got) > 1<<10 || !strings.HasPrefix(got, name[:5]) {
			t.Errorf("got %d bytes kept of a name of %d, want its beginning", len(got), len(name))
		}
	}
}

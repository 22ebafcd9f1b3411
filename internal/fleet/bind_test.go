package fleet

import (
	"testing"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// The index learns an engine that connects to Kvlane (instead of accepting connections)
// like any other.
func TestAnEngineThatConnects(t *testing.T) {
	r := newRig(t, func(o *enginesim.Options) { o.EventsConnect = true })
	r.worker.Events.Bind = true
	d := newFleet(t, "", r.worker)
	for n := range 20 {
		r.send(n)
	}
	r.settle(d)
	held := int64(0)
	for _, target := range d.index.Stats().Targets {
		held += target.Held[0]
	}
	if held == 0 {
		t.Error("nothing was learned")
	}
}

package fleet

import (
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/steering"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
)

// Endpoint is the address of a slot's target, and how requests select its rank. It must not be changed.
type Endpoint struct {
	Target  kvindex.Target
	Member  *Member
	Address string
	// Rank is the value of the rank header, "" if the rank is not delivered by header; SetRank is the header, nil then.
	Rank    string
	SetRank []extproc.Header
	// Name is the name of the target.
	Name     string
	Counters *Counters

	used bool
}

// Member is a worker with its slots. It must not be changed.
type Member struct {
	workers.Worker

	Slots    []kvindex.Slot
	feed     *feedHandle
	counters []*Counters        // by slot
	answered prometheus.Counter // responses with a 2xx status
	// blockSize is the engine's block size in tokens, from the configuration or its events; 0 while unknown. It is
	// shared by all states of the same worker.
	blockSize *atomic.Int32
	model     string // under which the index keeps its blocks
}

// Replaces reports whether e's worker can also serve a leg for decode target o: it is another worker, ready, and
// decodes the same models at the same local rank.
func (e *Endpoint) Replaces(o *Endpoint) bool {
	m := e.Member
	return m.Name != o.Member.Name && e.Rank == o.Rank && m.Role != "prefill" && m.Ready && !m.Draining && slices.Equal(m.Models, o.Member.Models)
}

// View is the fleet at one moment. It is immutable, so readers hold no lock; a change makes a new View.
type View struct {
	endpoints []Endpoint // by slot
	members   map[string]*Member
	// byAddress holds the slots that an address serves.
	byAddress map[string][]kvindex.Slot
	// names are the models that workers declare; see declare.
	names       map[string]bool
	open, split bool
	// sglang are the models that workers with SGLang serve, whatever the models' engine is; "" if one serves any.
	sglang map[string]bool
}

// View returns the fleet as of now.
func (f *Fleet) View() *View { return f.view.Load() }

// Endpoint returns the endpoint of a slot, nil if the slot is not in use.
func (v *View) Endpoint(slot kvindex.Slot) *Endpoint {
	if int(slot) >= len(v.endpoints) || !v.endpoints[slot].used {
		return nil
	}
	return &v.endpoints[slot]
}

// Endpoints yields the endpoints of all slots in use.
func (v *View) Endpoints(yield func(kvindex.Slot, *Endpoint) bool) {
	for slot := range v.endpoints {
		if e := &v.endpoints[slot]; e.used && !yield(kvindex.Slot(slot), e) {
			return
		}
	}
}

// NumSlots is the number of slots, unused ones included.
func (v *View) NumSlots() int { return len(v.endpoints) }

// Member returns a worker by its name, nil if there is none.
func (v *View) Member(name string) *Member { return v.members[name] }

// AtAddress returns the slots that an address serves.
func (v *View) AtAddress(address string) []kvindex.Slot { return v.byAddress[address] }

// Still reports whether a slot belongs to the same worker as when e was looked up.
func (f *Fleet) Still(slot kvindex.Slot, e *Endpoint) bool {
	now := f.View().Endpoint(slot)
	return e != nil && now != nil && now.Target == e.Target && now.Member.Generation == e.Member.Generation
}

// endpoints returns the endpoints of a worker, one per rank. Its address has been checked with the configuration.
func endpoints(w *config.Worker) []Endpoint {
	if w.Ranks == 0 || w.RankBy == "none" {
		return []Endpoint{{Target: kvindex.Target{Worker: w.Name, Rank: kvindex.NoRank}, Address: w.Address, used: true}}
	}
	first, _ := netip.ParseAddrPort(w.Address)
	out := make([]Endpoint, w.Ranks)
	for r := range out {
		out[r] = Endpoint{Target: kvindex.Target{Worker: w.Name, Rank: int32(w.StartRank + r)}, Address: w.Address, used: true}
		if w.RankBy == "port" {
			out[r].Address = netip.AddrPortFrom(first.Addr(), first.Port()+uint16(r)).String()
		} else {
			out[r].Rank = strconv.Itoa(r)
			out[r].SetRank = []extproc.Header{{Name: steering.Rank, Value: out[r].Rank}}
		}
	}
	return out
}

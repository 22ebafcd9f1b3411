package decide

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	"github.com/kvlane/kvlane/routing"
)

// rankHeader is how vLLM and SGLang take a rank; the value is the local rank.
const rankHeader = "x-data-parallel-rank"

// place is what the road needs to know of a slot.
type place struct {
	target  kvindex.Target
	worker  *member
	address string
	// rank is the value of the rank header, "" if the rank is not delivered so; setRank
	// is the header, nil then.
	rank    string
	setRank []extproc.Header
	used    bool

	name  string // of the target
	tally *tally
}

// removeRank keeps a client's rank header from the worker. Like place.setRank it is
// shared by decisions: its capacity is full, so appending copies it.
var removeRank = []string{rankHeader}

// member is a worker with its slots.
type member struct {
	workers.Worker

	slots    []kvindex.Slot
	feed     *feedHandle
	tallies  []*tally           // by place
	answered prometheus.Counter // responses with a status of success
	// blockSize is the engine's block in tokens, as configured or as its events say; 0
	// while unknown. Shared by all states of the same worker.
	blockSize *atomic.Int32
}

// fleet is all of them as of now. It is replaced, never changed: readers hold no
// lock.
type fleet struct {
	places  []place // by slot
	members map[string]*member
	// byAddress finds the worker of an endpoint that served.
	byAddress map[string][]kvindex.Slot
	// names are the models that workers declare, see declare.
	names       map[string]bool
	open, split bool
}

// targets lists the targets of a worker with their addresses and rank headers.
func targets(w *config.Worker) ([]place, error) {
	host, portText, err := net.SplitHostPort(w.Address)
	if err != nil {
		return nil, fmt.Errorf("worker %s: %w", w.Name, err)
	}
	if w.Ranks == 0 || w.RankBy == "none" {
		return []place{{target: kvindex.Target{Worker: w.Name, Rank: kvindex.NoRank}, address: w.Address, used: true}}, nil
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return nil, fmt.Errorf("worker %s: port: %w", w.Name, err)
	}
	out := make([]place, w.Ranks)
	for r := range out {
		out[r] = place{target: kvindex.Target{Worker: w.Name, Rank: int32(w.StartRank + r)}, address: w.Address, used: true}
		if w.RankBy == "port" {
			out[r].address = net.JoinHostPort(host, strconv.Itoa(port+r))
		} else {
			out[r].rank = strconv.Itoa(r)
			out[r].setRank = []extproc.Header{{Name: rankHeader, Value: out[r].rank}}
		}
	}
	return out, nil
}

var roles = map[string]routing.Role{"both": routing.Both, "prefill": routing.Prefill, "decode": routing.Decode}

// SetWorkers takes in who exists. Calls must not overlap. A worker that is gone or
// has another generation is forgotten whole: its blocks, its load, its feed.
func (d *Decider) SetWorkers(list []workers.Worker) {
	old := d.fleet.Load()
	next := &fleet{members: make(map[string]*member, len(list)), byAddress: map[string][]kvindex.Slot{}}
	for name, m := range old.members {
		if i := slices.IndexFunc(list, func(w workers.Worker) bool { return w.Name == name }); i < 0 || list[i].Generation != m.Generation {
			d.drop(m)
		}
	}
	var serve, prefill []string
	for i := range list {
		w := list[i]
		m := old.members[w.Name]
		if m == nil || m.Generation != w.Generation {
			added, err := d.add(w)
			if err != nil {
				d.log.Error().Err(err).Str("worker", w.Name).Msg("worker left out")
				continue
			}
			m = added
		} else {
			m = &member{Worker: w, slots: m.slots, feed: m.feed, tallies: m.tallies, answered: m.answered, blockSize: m.blockSize}
		}
		next.members[w.Name] = m
		places, _ := targets(&w.Worker)
		for j, slot := range m.slots {
			for int(slot) >= len(next.places) {
				next.places = append(next.places, place{})
			}
			p := places[j]
			p.worker, p.tally, p.name = m, m.tallies[j], p.target.String()
			next.places[slot] = p
			next.byAddress[p.address] = append(next.byAddress[p.address], slot)
			switch {
			case !w.Ready || w.Draining:
			case roles[w.Role] == routing.Prefill:
				prefill = append(prefill, p.address)
			default:
				serve = append(serve, p.address)
			}
		}
	}
	next.declare(d.base)
	d.fleet.Store(next) // first: who is placed on a newcomer looks up where it is
	for name := range old.members {
		d.forgetGone(name)
	}
	d.catalog.mu.Lock()
	d.tellRouter(next)
	d.catalog.mu.Unlock()
	d.compareAll(next)
	if d.onEndpoints != nil {
		d.onEndpoints(serve, prefill)
	}
}

// engineBlock is the block size of a slot's engine in tokens, 0 while unknown.
func (f *fleet) engineBlock(slot kvindex.Slot) int {
	if p := f.place(slot); p != nil {
		return int(p.worker.blockSize.Load())
	}
	return 0
}

// sawBlocks notes the block size of an engine, 0 if it is not known.
func (d *Decider) sawBlocks(size int32) {
	if size != 0 && int(size) != d.cfg.Index.BlockSize {
		d.otherBlocks.Store(true)
	}
}

// engineBlocks tells the block sizes of engines by slot; nil if all are the index's,
// so that nobody has to look at each of many.
func (d *Decider) engineBlocks() func(kvindex.Slot) int {
	if !d.otherBlocks.Load() {
		return nil
	}
	return d.fleet.Load().engineBlock
}

// add gives a newcomer its slots and starts its feed.
func (d *Decider) add(w workers.Worker) (*member, error) {
	places, err := targets(&w.Worker)
	if err != nil {
		return nil, err
	}
	m := &member{Worker: w, answered: d.metrics.Responses.WithLabelValues(w.Name, "2xx"), blockSize: new(atomic.Int32)}
	m.blockSize.Store(int32(w.BlockSize))
	d.sawBlocks(int32(w.BlockSize))
	resume := make([]*feed.Cursor, len(places))
	for i, p := range places {
		slot, cursor, err := d.addSlot(p.target, &w.Worker)
		if err != nil {
			d.drop(m)
			return nil, err
		}
		m.slots = append(m.slots, slot)
		m.tallies = append(m.tallies, newTally(d.metrics, p.target))
		resume[i] = cursor
	}
	m.feed = d.startFeed(m, places, resume)
	return m, nil
}

// drop forgets a worker.
func (d *Decider) drop(m *member) {
	m.feed.stop()
	d.book(d.now(), func(r *routing.Router, _ time.Duration) {
		for _, slot := range m.slots {
			r.RemoveTarget(slot)
		}
	})
	for _, slot := range m.slots {
		d.dropSlot(slot)
	}
}

// forgetGone deletes a worker's metrics if it has left, so that fleets whose workers
// come and go under new names do not gather series. Requests that end after their
// worker left make some again: whoever counts for them calls it too.
func (d *Decider) forgetGone(worker string) {
	if d.fleet.Load().members[worker] == nil {
		d.metrics.ForgetWorker(worker)
	}
}

// Load takes in what an engine reports of its ranks.
func (d *Decider) Load(worker string, at time.Time, loads []workers.RankLoad) {
	f := d.fleet.Load()
	m := f.members[worker]
	if m == nil {
		return
	}
	d.book(at, func(r *routing.Router, now time.Duration) {
		for _, l := range loads {
			report := routing.Report{At: now, Running: int64(l.Running), Waiting: int64(l.Waiting), KVUsage: l.KVUsage}
			if l.Rank == kvindex.NoRank || len(loads) == 1 && len(m.slots) > 1 {
				r.ReportWorker(now, worker, report)
				continue
			}
			for _, slot := range m.slots {
				if rank := f.places[slot].target.Rank; rank == l.Rank || rank == kvindex.NoRank && len(loads) == 1 {
					r.Report(now, slot, report)
				}
			}
		}
	})
}

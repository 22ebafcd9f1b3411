package feed

import "github.com/kvlane/kvlane/kvindex"

// Player passes recorded messages through the same machine and decoder as a running feed,
// without sockets: for recordings, tools and tests. It is not safe for concurrent use.
type Player struct {
	a applier
}

// NewPlayer returns a connected Player. It uses only the engine, worker, rank and block size fields of the source.
func NewPlayer(src Source, sink Sink) *Player {
	src.Machine.Replay = false
	m := NewMachine(src.Machine)
	p := &Player{applier{src: &src, dec: NewDecoder(src.Engine, src.BlockSize), sink: sink, machine: m, counters: newCounters(), mu: newGuard(sink)}}
	p.a.mu.Lock() // it is never shared
	p.a.do(m.Up())
	return p
}

// Message plays one recorded message, given its frames as a SUB socket received them. It reports
// whether they have the form of a batch.
func (p *Player) Message(frames [][]byte) bool {
	seq, payload, ok := SplitFrames(frames)
	if !ok {
		p.a.counters.dropped[Malformed]++
		return false
	}
	p.a.do(p.a.machine.Live(seq, payload))
	return true
}

// Counts returns the counters of the sequence.
func (p *Player) Counts() Counts { return p.a.machine.Counts() }

// Dropped returns the number of events that were not applied, by reason.
func (p *Player) Dropped() map[Reason]uint64 { return p.a.counters.dropped }

// Targets returns the targets that batches have arrived for.
func (p *Player) Targets() []kvindex.Target { return p.a.targets }

package feed

import "github.com/kvlane/kvlane/kvindex"

// Player puts recorded messages through the same machine and decoder as a
// running feed, without sockets: for recordings, tools and tests. It is not safe
// for concurrent use.
type Player struct {
	a applier
}

// NewPlayer returns a connected Player. Of the source, what says how batches are
// understood counts: engine, worker, rank and block size.
func NewPlayer(src Source, sink Sink) *Player {
	src.Machine.Replay = false
	m := NewMachine(src.Machine)
	p := &Player{applier{src: &src, dec: NewDecoder(src.Engine, src.BlockSize), sink: sink, machine: m, tally: newTally()}}
	p.a.do(m.Up())
	return p
}

// Message plays one recorded message: its frames as a SUB socket got them. It
// reports whether they have the form of a batch.
func (p *Player) Message(frames [][]byte) bool {
	seq, payload, ok := SplitFrames(frames)
	if !ok {
		p.a.tally.dropped[Malformed]++
		return false
	}
	p.a.do(p.a.machine.Live(seq, payload))
	return true
}

// Clear forgets what the targets hold, as a reset that the engine has confirmed
// but not yet announced.
func (p *Player) Clear(why Reason) {
	for _, t := range p.a.targets {
		p.a.sink.Clear(t, why)
	}
}

// Counts are what the sequence has seen, Dropped the dropped events by reason.
func (p *Player) Counts() Counts { return p.a.machine.Counts() }

// Dropped are the events that were not applied, by reason.
func (p *Player) Dropped() map[Reason]uint64 { return p.a.tally.dropped }

// Targets are those that batches have come for.
func (p *Player) Targets() []kvindex.Target { return p.a.targets }

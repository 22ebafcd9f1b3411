package feed

import (
	"bytes"
	"hash/crc32"
)

// State says how far a feed can be believed.
type State uint8

// States of a feed.
const (
	// Stale: no connection, or requests finish without events. What was learned stays,
	// but nothing tells whether it is still true.
	Stale State = iota
	// Syncing: connected, the engine's history is being fetched.
	Syncing
	// Live: every batch of the sequence since the target was last cleared has been applied.
	Live
	// Gap: batches are missing.
	Gap
)

var stateNames = [...]string{Stale: "stale", Syncing: "syncing", Live: "live", Gap: "gap"}

// String returns the state's name as metrics and debug pages show it.
func (s State) String() string { return stateNames[s] }

// ActionKind is what a Machine asks for.
type ActionKind uint8

// Actions. They are to be done in the order in which they were returned.
const (
	// Apply the batch in Payload, whose number is Seq.
	Apply ActionKind = iota + 1
	// Clear everything that the feed's targets hold.
	Clear
	// Enter State.
	Enter
	// Replay the engine's batches from Seq on, and report them with Replayed and
	// ReplayEnd under Epoch. A replay of an earlier epoch is to be given up. Attempt
	// counts the tries without progress, from 0; the caller waits longer before each.
	Replay
	// Warn that requests finish while the feed is silent.
	Warn
)

// Action is one thing that a Machine asks for.
type Action struct {
	Kind    ActionKind
	Seq     uint64
	Payload []byte // valid until the next input
	Sum     uint64 // of Payload, as a Cursor has it
	Reason  Reason
	State   State
	Epoch   uint64
	Attempt int
}

// MachineConfig bounds a Machine. The zero value of a field means its default.
type MachineConfig struct {
	// Replay says that the engine can be asked for past batches.
	Replay bool
	// Polled says that the engine keeps its batches until they are fetched, so that a
	// broken connection alone loses nothing.
	Polled bool
	// MaxPending bounds the bytes of live batches that wait for a replay; default 8 MiB.
	// A machine that is Full should be given no live batch; one that comes all the same
	// is dropped, counted, and fetched by another replay.
	MaxPending int
	// Attempts is how often a replay is tried without progress before the missing
	// batches count as lost; default 3.
	Attempts int
	// SilentAfter is how many finished requests without an event make a feed suspect;
	// default 16.
	SilentAfter int
	// Resume is where the index stands already, if it was loaded from a snapshot.
	// The machine goes on from there if a replay shows that the engine is the same,
	// and clears otherwise.
	Resume *Cursor
}

// Machine is the state of one publisher's sequence: it puts live and replayed
// batches in order, finds gaps, restarts and duplicates, and says what to do.
// It does no I/O and knows no time: inputs are its methods, outputs the actions
// that they return. It is not safe for concurrent use.
//
// The law that it keeps: between two Clears, the applied batches are consecutive
// numbers of one incarnation of the engine. (The first batch after a Clear may
// have any number: history that is lost is lost.)
type Machine struct {
	cfg   MachineConfig
	state State
	out   []Action

	// next is the number of the batch to apply next. Meaningful if started.
	next    uint64
	started bool
	// live is the highest number seen live on this connection, if hasLive.
	live    uint64
	hasLive bool
	// recent holds digests of the last applied batches, by number: they tell a batch
	// that is sent twice from one of a new incarnation with the same number.
	recent [32]digest

	// epoch numbers the replays; replaying says that the newest one runs.
	epoch     uint64
	replaying bool
	attempt   int
	progress  bool
	// verifying says that the replay starts with the last applied batch, to see
	// whether the engine is still the same.
	verifying bool
	// pending holds live batches, in order of arrival, while a replay runs.
	pending      []batch
	pendingBytes int
	overflowed   bool

	silent int
	warned bool

	counts Counts
}

// Counts are what a Machine has seen since it was made.
type Counts struct {
	Applied    uint64 // batches applied
	Duplicates uint64 // batches dropped because they had been applied
	Gaps       uint64 // times that batches were missing
	Missing    uint64 // batches that were missing when a gap was found
	Lost       uint64 // batches that could not be had
	Recovered  uint64 // batches applied from replays
	Restarts   uint64 // engine restarts
	Clears     uint64 // times that the targets were cleared
	Overflows  uint64 // live batches dropped because too many waited
	Replays    uint64 // replays asked for
	Failures   uint64 // replays that failed
	Silences   uint64 // times that the feed became suspect
}

type batch struct {
	seq     uint64
	payload []byte
}

type digest struct {
	seq uint64
	sum uint64
	set bool
}

// NewMachine returns a Machine that is not connected.
func NewMachine(cfg MachineConfig) *Machine {
	for _, f := range []struct {
		p *int
		v int
	}{{&cfg.MaxPending, 8 << 20}, {&cfg.Attempts, 3}, {&cfg.SilentAfter, 16}} {
		if *f.p <= 0 {
			*f.p = f.v
		}
	}
	m := &Machine{cfg: cfg}
	if c := cfg.Resume; c != nil && c.Next > 0 {
		m.started, m.next = true, c.Next
		m.note(c.Next-1, c.Sum)
	}
	return m
}

// Cursor says how far the batches of a publisher have been applied, and proves
// to a later Machine (in another process, with a copy of the index) that the
// engine is still the same.
type Cursor struct {
	// Next is the number of the batch to apply next; 0 if none has been applied.
	Next uint64
	// Sum is a digest of the batch before it.
	Sum uint64
}

// Cursor is where the Machine stands.
func (m *Machine) Cursor() Cursor {
	if !m.started {
		return Cursor{}
	}
	return Cursor{Next: m.next, Sum: m.recent[(m.next-1)%uint64(len(m.recent))].sum}
}

// State is the current state.
func (m *Machine) State() State { return m.state }

// Counts are the counters so far.
func (m *Machine) Counts() Counts { return m.counts }

// Next is the number of the batch that would be applied next, and whether any
// has been applied since the last Clear.
func (m *Machine) Next() (uint64, bool) { return m.next, m.started }

// Full reports whether live batches should wait where they are.
func (m *Machine) Full() bool { return m.pendingBytes >= m.cfg.MaxPending }

// Up says that the connection is there and subscribed: live batches from now on
// will arrive, earlier ones may be missing.
func (m *Machine) Up() []Action {
	m.begin()
	m.hasLive = false
	m.dropPending()
	switch {
	case m.cfg.Replay:
		m.enter(Syncing, Connected)
		m.attempt, m.verifying = 0, m.started
		m.ask()
	case m.started && m.cfg.Polled:
		// Whether something is missing shows with the next batch.
		m.enter(Gap, Connected)
	case m.started:
		// Nobody can say what was missed, or that this is the same engine.
		m.lose(0)
		m.enter(Live, Connected)
	default:
		m.enter(Live, Connected)
	}
	return m.out
}

// Down says that the connection broke.
func (m *Machine) Down() []Action {
	m.begin()
	m.stopReplay()
	m.dropPending()
	m.hasLive = false
	m.enter(Stale, Disconnected)
	return m.out
}

// Live is a batch as it came over the subscription. The payload is copied if it
// has to wait.
func (m *Machine) Live(seq uint64, payload []byte) []Action {
	m.begin()
	m.heard()
	if m.hasLive && seq <= m.live {
		if m.isRecent(seq, payload) || m.isPending(seq, payload) {
			m.counts.Duplicates++
			return m.out
		}
		// One connection only counts upwards: this is a new engine.
		m.restart()
		m.dropPending()
		if m.cfg.Replay && seq > 0 {
			m.enter(Syncing, Restarted)
			m.attempt = 0
			m.ask()
		}
	}
	m.hasLive, m.live = true, seq
	if m.replaying || !m.take(seq, payload, m.cfg.Replay) {
		m.hold(seq, payload)
	}
	return m.out
}

// Replayed is a batch of the replay of the given epoch.
func (m *Machine) Replayed(epoch, seq uint64, payload []byte) []Action {
	m.begin()
	if !m.replaying || epoch != m.epoch {
		return m.out
	}
	if m.verifying && !m.verify(seq, payload) {
		return m.out
	}
	switch {
	case m.started && seq < m.next:
		m.counts.Duplicates++
		return m.out
	case m.started && seq > m.next:
		m.lose(seq - m.next)
	}
	m.heard()
	m.progress = true
	m.counts.Recovered++
	m.apply(seq, payload)
	return m.out
}

// verify handles a replay's batches while it is not known whether the engine is
// the one that the applied batches came from. It reports whether the batch is
// still to be applied.
func (m *Machine) verify(seq uint64, payload []byte) bool {
	last := m.next - 1
	switch {
	case seq < last:
		m.counts.Duplicates++
		return false
	case seq == last && m.isRecent(seq, payload):
		m.verifying, m.progress = false, true
		m.counts.Duplicates++
		return false
	case seq == last:
		// The number exists, but it is another batch: a new engine that has already
		// counted this far.
		m.restart()
		m.attempt = 0
		m.ask()
		return false
	}
	// The engine's memory no longer reaches back to what was applied last, so nothing
	// joins the two.
	m.verifying = false
	m.counts.Gaps++
	m.lose(seq - m.next)
	return true
}

// ReplayEnd says that the replay of the given epoch came to its end mark (ok), or
// broke off.
func (m *Machine) ReplayEnd(epoch uint64, ok bool) []Action {
	m.begin()
	if !m.replaying || epoch != m.epoch {
		return m.out
	}
	m.replaying = false
	if ok && m.verifying {
		// Not even the last applied batch exists any more.
		m.restart()
		m.attempt = 0
		m.ask()
		return m.out
	}
	if !ok {
		m.counts.Failures++
		m.attempt++
		if m.progress {
			m.attempt = 0
		}
		if m.attempt < m.cfg.Attempts {
			m.ask()
			return m.out
		}
		if m.verifying {
			// Nobody can say whether the engine is the same, so what follows may not be
			// joined to what is held.
			m.lose(0)
		}
	}
	m.verifying = false
	m.settle(ok)
	return m.out
}

// Finished says that a request has finished on one of the feed's targets which
// should have stored at least one new block there, without an event since it was
// decided.
func (m *Machine) Finished() []Action {
	m.begin()
	if m.warned || m.replaying || m.state == Stale {
		return m.out
	}
	if m.silent++; m.silent < m.cfg.SilentAfter {
		return m.out
	}
	m.warned = true
	m.counts.Silences++
	m.out = append(m.out, Action{Kind: Warn, Reason: Silent})
	if !m.cfg.Replay {
		m.enter(Stale, Silent)
		return m.out
	}
	// The last batches may have been lost with nothing behind them to show it.
	m.enter(Syncing, Probing)
	m.attempt, m.verifying = 0, m.started
	m.ask()
	return m.out
}

// heard notes that the feed is alive.
func (m *Machine) heard() {
	m.silent = 0
	if m.warned {
		m.warned = false
		if m.state == Stale {
			m.enter(Live, CaughtUp)
		}
	}
}

// take handles a live batch when no replay runs. It returns false if the batch
// has to wait for one, which it has then asked for; ask says whether it may.
func (m *Machine) take(seq uint64, payload []byte, ask bool) bool {
	switch {
	case !m.started:
		// The history was fetched and had nothing, yet this is not the first batch.
		if ask && seq > 0 {
			m.gap(seq)
			return false
		}
	case seq < m.next:
		// After a replay on this connection the numbers are those of this engine, and
		// what was replayed arrives live as well. Without one, it is another engine.
		if m.cfg.Replay || m.isRecent(seq, payload) {
			m.counts.Duplicates++
			return true
		}
		m.restart()
	case seq > m.next:
		if ask {
			m.gap(seq)
			return false
		}
		if !m.cfg.Replay {
			m.counts.Gaps++
			m.counts.Missing += seq - m.next
		}
		m.enter(Gap, Lost)
		m.lose(seq - m.next)
	}
	m.apply(seq, payload)
	m.enter(Live, CaughtUp)
	return true
}

// gap counts the batches that are missing before seq and asks for them.
func (m *Machine) gap(seq uint64) {
	m.counts.Gaps++
	m.counts.Missing += seq - m.next
	m.enter(Gap, Missing)
	m.attempt, m.verifying = 0, false
	m.ask()
}

// hold keeps a live batch until the replay has ended.
func (m *Machine) hold(seq uint64, payload []byte) {
	if m.Full() {
		m.counts.Overflows++
		m.overflowed = true
		return
	}
	m.pending = append(m.pending, batch{seq, bytes.Clone(payload)})
	m.pendingBytes += len(payload) + perPending
}

// perPending is what a waiting batch costs beside its payload.
const perPending = 64

func (m *Machine) dropPending() { m.pending, m.pendingBytes, m.overflowed = nil, 0, false }

// settle applies what waited, once a replay has ended (ok) or was given up. A
// batch behind a further gap waits for another replay if the last one helped;
// if it did not, the missing batches are lost.
func (m *Machine) settle(ok bool) {
	m.attempt = 0
	ask := ok && m.progress
	for len(m.pending) > 0 {
		b := m.pending[0]
		if !m.take(b.seq, b.payload, ask) {
			return
		}
		m.pending[0] = batch{}
		m.pending = m.pending[1:]
		m.pendingBytes -= len(b.payload) + perPending
		ask = ok
	}
	over := m.overflowed
	m.dropPending()
	switch {
	case over && ok:
		m.enter(Gap, Missing)
		m.ask()
	case m.warned:
		m.enter(Stale, Silent)
	default:
		m.enter(Live, CaughtUp)
	}
}

// ask asks for a replay from where the applied batches end, or from the last
// applied one if the engine has to be verified.
func (m *Machine) ask() {
	from := uint64(0)
	if m.started {
		from = m.next
	}
	if m.verifying {
		from--
	}
	m.epoch++
	m.replaying, m.progress = true, false
	m.counts.Replays++
	m.out = append(m.out, Action{Kind: Replay, Seq: from, Epoch: m.epoch, Attempt: m.attempt})
}

func (m *Machine) stopReplay() {
	m.epoch++
	m.replaying, m.verifying = false, false
}

// restart forgets what the engine's former incarnation had said.
func (m *Machine) restart() {
	m.stopReplay()
	m.counts.Restarts++
	m.forget(Restarted)
}

// lose gives n batches up and with them everything that is held, because what
// they removed is not known.
func (m *Machine) lose(n uint64) {
	m.counts.Lost += n
	m.forget(Lost)
}

func (m *Machine) forget(why Reason) {
	m.started, m.next = false, 0
	m.recent = [len(m.recent)]digest{}
	m.counts.Clears++
	m.out = append(m.out, Action{Kind: Clear, Reason: why})
}

func (m *Machine) apply(seq uint64, payload []byte) {
	sum := payloadSum(payload)
	m.note(seq, sum)
	m.started, m.next = true, seq+1
	m.counts.Applied++
	m.out = append(m.out, Action{Kind: Apply, Seq: seq, Payload: payload, Sum: sum})
}

// isRecent reports whether the batch is one of the last that were applied.
func (m *Machine) isRecent(seq uint64, payload []byte) bool {
	d := m.recent[seq%uint64(len(m.recent))]
	return d.set && d.seq == seq && d.sum == payloadSum(payload)
}

func (m *Machine) note(seq, sum uint64) {
	m.recent[seq%uint64(len(m.recent))] = digest{seq: seq, sum: sum, set: true}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// payloadSum tells batches of equal number apart: batches carry the engine's
// clock, so two incarnations do not publish equal ones. It is the same in every
// process. CRC-32C because processors compute it at memory speed.
func payloadSum(b []byte) uint64 {
	return uint64(len(b))<<32 | uint64(crc32.Checksum(b, castagnoli))
}

// isPending reports whether the batch waits already.
func (m *Machine) isPending(seq uint64, payload []byte) bool {
	for _, b := range m.pending {
		if b.seq == seq && bytes.Equal(b.payload, payload) {
			return true
		}
	}
	return false
}

func (m *Machine) enter(s State, why Reason) {
	if s == m.state {
		return
	}
	m.state = s
	m.out = append(m.out, Action{Kind: Enter, State: s, Reason: why})
}

func (m *Machine) begin() { m.out = m.out[:0] }

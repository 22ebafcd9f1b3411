package feed

import (
	"bytes"
	"cmp"
	"hash/crc32"
	"slices"

	"golang.org/x/sync/semaphore"
)

// State is how far a feed's events can be trusted.
type State uint8

// States of a feed.
const (
	// Stale: no connection, or requests finish without events. What was learned stays, but may be outdated.
	Stale State = iota
	// Syncing: connected, the engine's history is being fetched.
	Syncing
	// Live: every batch of the sequence since the target was last cleared has been applied.
	Live
	// Gap: batches are missing, or may be, as all replays failed and no batch has come since.
	Gap
)

var stateNames = [...]string{Stale: "stale", Syncing: "syncing", Live: "live", Gap: "gap"}

// String returns the state's name as metrics and debug pages show it.
func (s State) String() string { return stateNames[s] }

// ActionKind is the kind of an Action.
type ActionKind uint8

// Actions. They must be performed in the order in which they were returned.
const (
	// Apply the batch in Payload, whose sequence number is Seq.
	Apply ActionKind = iota + 1
	// Clear everything that the feed's targets hold.
	Clear
	// Enter State.
	Enter
	// Replay the engine's batches, starting at Seq, and report them with Replayed and ReplayEnd under Epoch. Abort a
	// replay of an earlier epoch. Attempt counts the failures since the last progress, the first included; wait longer after each.
	Replay
	// Warn that requests finish while the feed is silent.
	Warn
)

// Action is one thing that a Machine asks its caller to do.
type Action struct {
	Kind    ActionKind
	Seq     uint64
	Payload []byte // valid until the next input
	Sum     uint64 // of Payload, as in Cursor
	Reason  Reason
	State   State
	Epoch   uint64
	Attempt int
}

// MachineConfig bounds a Machine. The zero value of a field means its default.
type MachineConfig struct {
	// Replay reports that past batches can be requested from the engine.
	Replay bool
	// Polled reports that the engine keeps its batches until they are fetched: a broken connection alone loses none.
	Polled bool
	// MaxPending limits the bytes of live batches that wait for a replay; default 8 MiB. A caller should not pass live
	// batches to a machine that is Full. One passed nevertheless, or of more than LargeBatch bytes, is dropped, counted, and
	// fetched by another replay.
	MaxPending int
	// Pending limit the bytes of live batches that wait, such as those of a worker and those of the process: a batch that
	// would exceed one of them is dropped in the same way. Only TryAcquire and Release are called.
	Pending []*semaphore.Weighted
	// Attempts is how many replays without progress are made before the missing batches count as lost; default 3.
	Attempts int
	// SilentAfter is how many finished requests without an event make a feed suspect; default 16.
	SilentAfter int
	// Resume is the position up to which the index has applied batches, if it was loaded from a snapshot. The machine
	// continues there if a replay shows that the engine is the same, and clears otherwise.
	Resume *Cursor
}

// Machine is the state machine of one publisher's sequence: it orders live and replayed batches, detects gaps, restarts
// and duplicates, and returns what to do. It does no I/O and uses no clock: inputs are its methods, outputs the actions
// that they return. It is not safe for concurrent use.
//
// Its invariant: between two Clears, the applied batches have consecutive numbers and belong to one incarnation of the
// engine. (The first batch after a Clear may have any number, because lost history cannot be recovered.) There is one
// exception: an engine has restarted, its old connection still delivers, and the replay after a Clear came from the new
// engine. Batches of the old one may then be applied after it until that connection ends. The last applied batch is the old
// engine's, so that the next replay finds the restart and clears.
type Machine struct {
	cfg   MachineConfig
	state State
	out   []Action

	// next is the number of the batch to apply next. Valid if started.
	next    uint64
	started bool
	// live is the highest number received live on this connection, if hasLive.
	live    uint64
	hasLive bool
	// recent contains digests of the last applied batches, by number: they distinguish a
	// duplicate from a batch of a new incarnation with the same number.
	recent [32]digest

	// epoch numbers the replays; replaying reports that the newest one is running.
	epoch     uint64
	replaying bool
	attempt   int
	progress  bool
	// verifying reports that the replay starts with the last applied batch, to check that the engine is still the same.
	verifying bool
	// pending holds live batches, in order of arrival, while a replay runs.
	pending      []batch
	pendingBytes int
	overflowed   bool

	silent int
	warned bool

	counts Counts
}

// Counts are a Machine's counters since it was created.
type Counts struct {
	Applied    uint64 `json:"applied"`    // batches applied
	Duplicates uint64 `json:"duplicates"` // batches dropped because they had been applied
	Gaps       uint64 `json:"gaps"`       // gaps found
	Missing    uint64 `json:"missing"`    // batches that were missing when a gap was found
	Lost       uint64 `json:"lost"`       // batches that could not be recovered
	Recovered  uint64 `json:"recovered"`  // batches applied from replays
	Restarts   uint64 `json:"restarts"`   // engine restarts
	Clears     uint64 `json:"clears"`     // clears of the targets
	Overflows  uint64 `json:"overflows"`  // live batches dropped because a limit was reached
	Replays    uint64 `json:"replays"`    // replays requested
	Failures   uint64 `json:"failures"`   // replays that failed
	Silences   uint64 `json:"silences"`   // times the feed became suspect
}

type batch struct {
	seq     uint64
	payload []byte
}

type digest struct {
	seq, sum uint64
	set      bool
}

// NewMachine returns a Machine that is not connected.
func NewMachine(cfg MachineConfig) *Machine {
	cfg.MaxPending, cfg.Attempts, cfg.SilentAfter = cmp.Or(max(cfg.MaxPending, 0), 8<<20), cmp.Or(max(cfg.Attempts, 0), 3), cmp.Or(max(cfg.SilentAfter, 0), 16)
	m := &Machine{cfg: cfg}
	if c := cfg.Resume; c != nil && c.Next > 0 {
		m.started, m.next = true, c.Next
		m.note(c.Next-1, c.Sum)
	}
	return m
}

// Cursor is the position up to which the batches of a publisher have been applied. It lets a later Machine (in another
// process, with a copy of the index) verify that the engine is still the same.
type Cursor struct {
	// Next is the number of the batch to apply next; 0 if none has been applied.
	Next uint64 `json:"next"`
	// Sum is a digest of the batch before it.
	Sum uint64 `json:"sum"`
}

// Cursor returns the Machine's position.
func (m *Machine) Cursor() Cursor {
	if !m.started {
		return Cursor{}
	}
	return Cursor{Next: m.next, Sum: m.recent[(m.next-1)%uint64(len(m.recent))].sum}
}

// State returns the current state.
func (m *Machine) State() State { return m.state }

// Counts returns the counters so far.
func (m *Machine) Counts() Counts { return m.counts }

// Next returns the number of the batch to be applied next, and whether any was applied since the last Clear.
func (m *Machine) Next() (uint64, bool) { return m.next, m.started }

// Full reports whether the caller should stop reading live batches.
func (m *Machine) Full() bool { return m.pendingBytes >= m.cfg.MaxPending }

// Up reports that the connection is up and subscribed: live batches arrive from now on, earlier ones may be missing.
func (m *Machine) Up() []Action {
	m.begin()
	m.hasLive = false
	m.dropPending()
	switch {
	case m.cfg.Replay:
		m.enter(Syncing, Connected)
		m.ask(0)
	case m.started && m.cfg.Polled:
		// The next batch shows whether something is missing.
		m.enter(Gap, Connected)
	case m.started:
		// Neither what was missed nor the identity of the engine is known.
		m.lose(0)
		m.enter(Live, Connected)
	default:
		m.enter(Live, Connected)
	}
	return m.out
}

// Down reports that the connection broke.
func (m *Machine) Down() []Action {
	m.begin()
	m.stopReplay()
	m.dropPending()
	m.hasLive = false
	m.enter(Stale, Disconnected)
	return m.out
}

// Restarted reports that another sequence of the engine shows its restart.
func (m *Machine) Restarted() []Action {
	m.begin()
	m.hasLive = false // the next batch has any number
	m.forget(Restarted)
	return m.out
}

// Live passes a batch received over the subscription. The payload is copied if it has to wait.
func (m *Machine) Live(seq uint64, payload []byte) []Action {
	m.begin()
	m.heard()
	if m.hasLive && seq <= m.live {
		if m.isRecent(seq, payload) || m.isPending(seq, payload) {
			m.counts.Duplicates++
			return m.out
		}
		// Numbers of one connection only increase: this is a new engine.
		m.restart()
		m.dropPending()
		if m.cfg.Replay && seq > 0 {
			m.enter(Syncing, Restarted)
			m.ask(0)
		}
	}
	m.hasLive, m.live = true, seq
	if m.replaying || !m.take(seq, payload, m.cfg.Replay) {
		m.hold(seq, payload)
	}
	return m.out
}

// Replayed passes a batch of the replay of the given epoch.
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

// verify handles a replay's batches until it is known whether the engine is the one that the
// applied batches came from. It reports whether the batch still has to be applied.
func (m *Machine) verify(seq uint64, payload []byte) bool {
	last := m.next - 1
	switch {
	case seq < last:
		m.counts.Duplicates++
		return false
	case seq == last && m.isRecent(seq, payload):
		m.verifying = false // no progress: the replay could be repeated for ever
		m.counts.Duplicates++
		return false
	case seq == last:
		// The number exists, but it is another batch: a new engine that has already reached this number.
		m.restart()
		m.ask(0)
		return false
	}
	// The engine's buffer no longer contains the last applied batch, so the replay cannot be
	// connected to what was applied.
	m.verifying = false
	if m.state != Gap { // in a gap it has been counted already
		m.counts.Gaps++
	}
	m.lose(seq - m.next)
	return true
}

// ReplayEnd reports that the replay of the given epoch reached its end mark (ok), or was aborted.
func (m *Machine) ReplayEnd(epoch uint64, ok bool) []Action {
	m.begin()
	if !m.replaying || epoch != m.epoch {
		return m.out
	}
	m.replaying = false
	if ok && m.verifying {
		// The engine does not have the last applied batch: it has restarted.
		m.restart()
		m.ask(0)
		return m.out
	}
	if !ok {
		m.counts.Failures++
		m.attempt++
		if m.progress {
			m.attempt = 1 // the caller waits after each failure
		}
		if m.attempt < m.cfg.Attempts {
			m.ask(m.attempt)
			return m.out
		}
		if m.verifying {
			// Whether the engine is the same is not known, so what follows must not be connected to what is held.
			m.lose(0)
		}
	}
	m.verifying = false
	m.settle(ok)
	return m.out
}

// Finished reports a finished request that should have stored at least one new block on a target of the
// feed, although no event has arrived since it was decided.
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
	// The last batches may have been lost; without a later batch no gap shows.
	m.enter(Syncing, Probing)
	m.ask(0)
	return m.out
}

// heard records that the feed is alive.
func (m *Machine) heard() {
	m.silent = 0
	if m.warned {
		m.warned = false
		if m.state == Stale {
			m.enter(Live, CaughtUp)
		}
	}
}

// take handles a live batch while no replay runs. With ask it requests a replay if batches before this
// one are missing, and returns false: the batch has to wait.
func (m *Machine) take(seq uint64, payload []byte, ask bool) bool {
	switch {
	case !m.started:
		// The replay of the history was empty, yet this is not the first batch.
		if ask && seq > 0 {
			m.gap(seq)
			return false
		}
	case seq < m.next:
		// After a replay on this connection the numbers are those of this engine, and replayed
		// batches arrive live as well. Without a replay, it is another engine.
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

// gap counts the batches missing before seq and requests them.
func (m *Machine) gap(seq uint64) {
	m.counts.Gaps++
	m.counts.Missing += seq - m.next
	m.enter(Gap, Missing)
	m.ask(0)
}

// hold keeps a copy of a live batch until the replay has ended.
func (m *Machine) hold(seq uint64, payload []byte) {
	if m.Full() || len(payload) > LargeBatch || !m.reserve(len(payload)+perPending) {
		m.counts.Overflows++
		m.overflowed = true
		return
	}
	m.pending = append(m.pending, batch{seq, bytes.Clone(payload)})
}

// perPending is the memory of a waiting batch in addition to its payload, in bytes.
const perPending = 64

// reserve takes n bytes of each limit, or of none.
func (m *Machine) reserve(n int) bool {
	for i, limit := range m.cfg.Pending {
		if !limit.TryAcquire(int64(n)) {
			release(m.cfg.Pending[:i], n)
			return false
		}
	}
	m.pendingBytes += n
	return true
}

func release(limits []*semaphore.Weighted, n int) {
	for _, limit := range limits {
		limit.Release(int64(n))
	}
}

func (m *Machine) dropPending() {
	release(m.cfg.Pending, m.pendingBytes)
	m.pending, m.pendingBytes, m.overflowed = nil, 0, false
}

// settle applies the waiting batches after a replay has ended (ok) or was abandoned. A batch after a further gap waits
// for another replay if the last one made progress, or was for no gap; otherwise the missing batches are lost.
func (m *Machine) settle(ok bool) {
	ask := ok && (m.progress || m.started && m.state == Syncing)
	for len(m.pending) > 0 {
		b := m.pending[0]
		if !m.take(b.seq, b.payload, ask) {
			return
		}
		m.pending[0] = batch{}
		m.pending = m.pending[1:]
		m.pendingBytes -= len(b.payload) + perPending
		release(m.cfg.Pending, len(b.payload)+perPending)
		ask = ok
	}
	// Most of those that were dropped came before the replay began, so that it had them too.
	over := m.overflowed && m.next <= m.live
	m.dropPending()
	switch {
	case over && ok:
		m.enter(Gap, Missing)
		m.ask(0)
	case m.warned:
		m.enter(Stale, Silent)
	case !ok && (!m.hasLive || m.next <= m.live): // the next batch shows what is missing
		m.enter(Gap, Lost)
	default:
		m.enter(Live, CaughtUp)
	}
}

// ask requests a replay. It starts with the last applied batch, to verify the engine: it may
// have restarted although the subscription has not noticed yet.
func (m *Machine) ask(attempt int) {
	from := uint64(0)
	if m.verifying = m.started; m.started {
		from = m.next - 1
	}
	m.epoch++
	m.replaying, m.progress, m.attempt = true, false, attempt
	m.counts.Replays++
	m.out = append(m.out, Action{Kind: Replay, Seq: from, Epoch: m.epoch, Attempt: m.attempt})
}

func (m *Machine) stopReplay() {
	m.epoch++
	m.replaying, m.verifying = false, false
}

// restart discards everything learned from the engine's former incarnation.
func (m *Machine) restart() {
	m.stopReplay()
	m.counts.Restarts++
	m.forget(Restarted)
}

// lose counts n batches as lost and discards everything that is held, because the blocks that
// the batches removed are not known.
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

// payloadSum distinguishes batches of equal number: batches contain the engine's clock, so two incarnations do not
// publish equal ones. It is the same in every process. CRC-32C, because processors compute it at memory speed.
func payloadSum(b []byte) uint64 { return uint64(len(b))<<32 | uint64(crc32.Checksum(b, castagnoli)) }

// isPending reports whether the batch is already waiting.
func (m *Machine) isPending(seq uint64, payload []byte) bool {
	return slices.ContainsFunc(m.pending, func(b batch) bool { return b.seq == seq && bytes.Equal(b.payload, payload) })
}

func (m *Machine) enter(s State, why Reason) {
	if s == m.state {
		return
	}
	m.state = s
	m.out = append(m.out, Action{Kind: Enter, State: s, Reason: why})
}

func (m *Machine) begin() { m.out = m.out[:0] }

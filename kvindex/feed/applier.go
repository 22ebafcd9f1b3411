package feed

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvlane/kvlane/kvindex"
)

// applier applies a Machine's actions to a Sink. Its owner serialises the calls.
type applier struct {
	src     *Source
	dec     batchDecoder
	sink    Sink
	machine *Machine
	// replay starts a replay; nil if the source has none.
	replay func(Action)
	// targets are the targets that events have arrived for, oldest first.
	targets  []kvindex.Target
	counters *counters
	removed  []kvindex.EngineHash // scratch space of part
	// shown is the machine's state after the last input whose actions have all run: batches that it counts are applied.
	shown struct {
		state  State
		cursor Cursor
		counts Counts
	}
	// mu is the owner's mutex. Status can lock it while events are applied, and between the parts of a large batch.
	mu *guard
}

// batchDecoder is a Decoder, or its replacement for other transports.
type batchDecoder interface {
	Decode(payload []byte) (*Batch, error)
	Forget()
	trim()
	HashRefused() (algo string, refused bool)
}

// counters holds the counters of a source, which its appliers share.
type counters struct {
	events, blocks   uint64
	dropped          map[Reason]uint64
	connects, errors uint64
	lastError        string
	blockSize        int
	warned           map[Reason]bool
}

func newCounters() *counters {
	return &counters{dropped: map[Reason]uint64{}, warned: map[Reason]bool{}}
}

// status returns a copy of the counters.
func (t *counters) status(worker string) Status {
	return Status{
		Worker: worker, Events: t.events, Blocks: t.blocks, Dropped: maps.Clone(t.dropped),
		Connects: t.connects, Errors: t.errors, LastError: t.lastError, BlockSize: t.blockSize,
	}
}

// note keeps the beginning of an error, which may quote what an engine sent.
func (t *counters) note(err error) { t.lastError = fmt.Sprintf("%.512s", err) }

// base returns the target of batches that carry no rank.
func (a *applier) base() kvindex.Target {
	return kvindex.Target{Worker: a.src.Worker, Rank: a.src.Rank}
}

// do performs actions in order.
func (a *applier) do(actions []Action) {
	for i := range actions {
		switch act := &actions[i]; act.Kind {
		case Apply:
			a.apply(act.Payload, Cursor{Next: act.Seq + 1, Sum: act.Sum})
		case Clear:
			if act.Reason == Restarted {
				a.dec.Forget()
			}
			for _, t := range a.targets {
				a.unlocked(func() { a.sink.Clear(t, act.Reason) })
			}
		case Enter:
			a.enter(act.State, act.Reason)
		case Replay:
			a.replay(*act)
		case Warn:
			for _, t := range a.reported() {
				a.sink.Warn(t, act.Reason, fmt.Sprintf("%d requests finished without an event", a.machine.cfg.SilentAfter))
			}
		}
	}
	clear(actions) // the machine would keep the payload until its next input
	a.show()
}

func (a *applier) show() {
	a.shown.state, a.shown.cursor, a.shown.counts = a.machine.State(), a.machine.Cursor(), a.machine.Counts()
}

// reported returns the targets whose state and warnings the sink gets: those that batches have named so far, else base.
func (a *applier) reported() []kvindex.Target {
	if len(a.targets) == 0 {
		return []kvindex.Target{a.base()}
	}
	return a.targets
}

func (a *applier) enter(s State, why Reason) {
	for _, t := range a.reported() {
		a.sink.State(t, s, why)
	}
}

// warnOnce sends a warning unless one with this reason was sent before. It reports whether it sent one.
func (a *applier) warnOnce(t kvindex.Target, why Reason, detail string) bool {
	if a.counters.warned[why] {
		return false
	}
	a.counters.warned[why] = true
	a.sink.Warn(t, why, detail)
	return true
}

// refuse clears the targets of a worker whose block hashes cannot be interpreted.
func (a *applier) refuse(t kvindex.Target, algo string) {
	if a.warnOnce(t, UnknownHash, fmt.Sprintf("block hash algorithm %q is not known; the worker's events are not used", algo)) {
		for _, t := range a.targets {
			a.unlocked(func() { a.sink.Clear(t, UnknownHash) })
		}
		a.enter(Stale, UnknownHash)
	}
}

// refused returns the reason for an error of the sink, including the index's own if it has one.
func refused(err error) Reason {
	if r, ok := errors.AsType[kvindex.RefusalError](err); ok {
		return Refused + "_" + Reason(r.Name())
	}
	return Refused
}

// apply decodes a payload and passes its events to the sink. c is the sequence's position after
// it, the zero Cursor if it has none.
func (a *applier) apply(payload []byte, c Cursor) {
	b, err := a.dec.Decode(payload)
	t, malformed := a.target(b.Rank), b.malformed()
	for b.Rest != nil {
		a.part(t, b, Cursor{}) // a feed cannot resume within a batch
		a.mu.Unlock()
		a.mu.Lock()
		b, err = b.Rest()
		malformed = malformed || b.malformed()
	}
	if err != nil {
		// A malformed event that ends its batch is already counted.
		if !malformed {
			a.counters.dropped[Malformed]++
		}
		a.counters.note(err)
		a.warnOnce(t, Malformed, err.Error())
	}
	a.part(t, b, c)
	a.dec.trim()
}

func (b *Batch) malformed() bool {
	return slices.ContainsFunc(b.Dropped, func(d Drop) bool { return d.Reason == Malformed })
}

func (a *applier) part(t kvindex.Target, b *Batch, c Cursor) {
	for _, d := range b.Dropped {
		a.counters.dropped[d.Reason] += uint64(d.Count)
	}
	if slices.ContainsFunc(b.Dropped, func(d Drop) bool { return d.Reason == Misaligned }) {
		a.warnOnce(t, Misaligned, "stored blocks whose tokens do not fill them: the block size in the engine's events is not the one that it works with")
	}
	if algo, refused := a.dec.HashRefused(); refused {
		a.refuse(t, algo)
	}
	a.see(t)
	for i := range b.Events {
		if ev := &b.Events[i]; ev.Kind == kvindex.Stored && ev.BlockSize != 0 && ev.Window == 0 && !a.checkBlockSize(t, ev.BlockSize) {
			a.counters.dropped[WrongBlockSize]++
			ev.Kind = 0
		}
	}
	if batcher, ok := a.sink.(Batcher); ok {
		a.unlocked(func() { batcher.BeginBatch(t) })
		defer batcher.EndBatch(t, c)
	}
	for i := 0; i < len(b.Events); i++ {
		ev, n := &b.Events[i], uint64(1)
		if ev.Kind == 0 {
			continue // dropped above
		}
		if more := sameRemovals(b.Events[i:]); more > 1 {
			if a.removed = a.removed[:0]; cap(a.removed) > maxKept {
				a.removed = nil
			}
			for _, e := range b.Events[i : i+more] {
				a.removed = append(a.removed, e.Hashes...)
			}
			i, n = i+more-1, uint64(more)
			ev.Hashes = a.removed
		}
		blocks := len(ev.Hashes)
		if err := a.pass(t, ev); err != nil {
			a.counters.dropped[refused(err)] += n
			a.counters.note(err)
			if errors.Is(err, kvindex.ErrBlockSize) {
				a.warnOnce(t, WrongBlockSize, fmt.Sprintf("engine's blocks of %d tokens: %v; its events are refused", ev.BlockSize, err))
			}
			continue
		}
		a.counters.events += n
		a.counters.blocks += uint64(blocks)
	}
}

// pass passes an event to the sink, a long one in pieces, so that others can change the index in between. It returns
// the first error.
func (a *applier) pass(t kvindex.Target, ev *kvindex.Event) (err error) {
	tokens := len(ev.Tokens) > 0
	for len(ev.Hashes) > maxPart && ev.Window == 0 && len(ev.Media) == 0 && (!tokens || len(ev.Tokens) == len(ev.Hashes)*ev.BlockSize) {
		piece := *ev
		piece.Hashes, ev.Hashes = ev.Hashes[:maxPart], ev.Hashes[maxPart:]
		if len(ev.Extra) > maxPart {
			piece.Extra, ev.Extra = ev.Extra[:maxPart], ev.Extra[maxPart:]
		}
		if tokens {
			piece.Tokens, ev.Tokens = ev.Tokens[:maxPart*ev.BlockSize], ev.Tokens[maxPart*ev.BlockSize:]
			ev.Parent, ev.HasParent = piece.Hashes[maxPart-1], true
		}
		a.unlocked(func() { err = cmp.Or(err, a.sink.Apply(t, &piece)) })
		if err != nil && tokens {
			return err // the others are its children
		}
	}
	a.unlocked(func() { err = cmp.Or(err, a.sink.Apply(t, ev)) })
	return err
}

// unlocked calls what may take long without the lock that readers of the state wait for. The turn keeps further input away.
func (a *applier) unlocked(call func()) {
	a.mu.Unlock()
	defer a.mu.Lock()
	call()
}

// sameRemovals returns how many of the first events remove blocks of one tier and group. Engines publish one event per
// block; removing the blocks together is equivalent, because nothing is stored in between, and takes the sink a
// fraction of the time.
func sameRemovals(events []kvindex.Event) int {
	n := 0
	for n < len(events) && events[n].Kind == kvindex.Removed && events[n].Tier == events[0].Tier && events[n].Group == events[0].Group {
		n++
	}
	return n
}

// target returns the target of a batch that carries this rank.
func (a *applier) target(rank int32) kvindex.Target {
	t := a.base()
	if rank == kvindex.NoRank {
		return t
	}
	if a.src.RankFromBatch {
		switch {
		case rank >= maxRanks:
			a.wrongRank(rank)
		case rank >= 0:
			t.Rank = rank
		}
		return t
	}
	if t.Rank != kvindex.NoRank && t.Rank != rank {
		a.wrongRank(rank)
	}
	return t
}

// maxRanks bounds the ranks that batches may name where the source does not: each has a target,
// and a polled one a machine and a decoder too.
const maxRanks = 1024

// wrongRank counts a batch from a rank that the feed does not follow.
func (a *applier) wrongRank(rank int32) {
	a.counters.dropped[WrongRank]++
	a.warnOnce(a.base(), WrongRank, fmt.Sprintf("batches name rank %d, the feed is configured for rank %d", rank, a.src.Rank))
}

// see registers a target. The sink gets the feed's state for the target before its first event.
func (a *applier) see(t kvindex.Target) {
	if slices.Contains(a.targets, t) {
		return
	}
	known := len(a.targets) == 0 && t == a.base() // the states sent for the base were t's
	a.targets = append(a.targets, t)
	if !known {
		a.sink.State(t, a.machine.State(), Connected)
	}
}

// checkBlockSize compares an event's block size with the configured and the previous one. A different size that is a
// divisor or a multiple is accepted with one warning; any other size is rejected with a warning.
func (a *applier) checkBlockSize(t kvindex.Target, size int) bool {
	if last := a.counters.blockSize; last != 0 && last != size {
		a.warnOnce(t, BlockSizeChanged, fmt.Sprintf("block size changed from %d to %d", last, size))
	}
	a.counters.blockSize = size
	want := a.src.BlockSize
	if want == 0 || want == size {
		return true
	}
	if size%want != 0 && want%size != 0 {
		a.warnOnce(t, WrongBlockSize, fmt.Sprintf("engine's blocks of %d tokens cannot be matched with blocks of %d; its events are refused", size, want))
		return false
	}
	a.warnOnce(t, BlockSizeChanged, fmt.Sprintf("engine's blocks have %d tokens, configured are %d", size, want))
	return true
}

package feed

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed/zmtp"
)

// Feed is a running source. It uses one goroutine, and a second one while a replay runs. It is safe for concurrent use.
type Feed struct {
	src    Source
	cancel context.CancelFunc
	done   chan struct{}
	poke   chan struct{} // requests another poll of a polled source

	mu       *guard
	room     sync.Cond // signals that the machine is no longer full, or the feed ends
	machine  *Machine  // of a ZMQ source
	main     *applier
	byRank   map[int32]*applier // of a polled source
	counters *counters
	warned   time.Time // about a failed connection
	closed   bool
	replays  sync.WaitGroup
	// stopReplay closes the running replay's connection.
	stopReplay context.CancelFunc
	// newest is the replay that was requested last, nil if none runs.
	newest *replay
}

// Start starts following a source. The feed ends when ctx does or with Close; the sink keeps what its targets hold.
func Start(ctx context.Context, src Source, sink Sink) (*Feed, error) {
	if err := src.check(); err != nil {
		return nil, err
	}
	src.setDefaults()
	ctx, cancel := context.WithCancel(ctx)
	f := &Feed{src: src, cancel: cancel, done: make(chan struct{}), poke: make(chan struct{}, 1), counters: newCounters(), byRank: map[int32]*applier{}, stopReplay: func() {}, mu: newGuard(sink)}
	f.room.L = f.mu
	src.Machine.Replay = src.Replay != ""
	src.Machine.Polled = src.PollURL != ""
	f.src.Machine = src.Machine
	f.machine = NewMachine(src.Machine)
	f.main = &applier{src: &f.src, dec: NewDecoder(src.Engine, src.BlockSize), sink: sink, machine: f.machine, counters: f.counters, mu: f.mu}
	f.main.show()
	f.main.replay = func(a Action) { f.startReplay(ctx, a) }
	if src.Machine.Resume != nil {
		f.main.targets = []kvindex.Target{f.main.base()}
	}
	run := f.follow
	switch {
	case src.PollURL != "":
		run = f.poll
	case src.Bind:
		l, err := zmtp.Listen(src.Endpoint, src.Conn)
		if err != nil {
			cancel()
			return nil, fmt.Errorf("feed: %w", err)
		}
		run = func(ctx context.Context) { f.serve(ctx, l) }
	}
	go func() {
		defer close(f.done)
		stop := context.AfterFunc(ctx, f.wakeAll)
		defer stop()
		run(ctx)
		f.wakeAll() // no replay starts after this
		f.replays.Wait()
	}()
	return f, nil
}

// Close ends the feed and waits until all of its goroutines have ended.
func (f *Feed) Close() {
	f.cancel()
	<-f.done
}

// wakeAll wakes a reader that waits for room, so that it sees that the feed ends.
func (f *Feed) wakeAll() {
	f.mu.Lock()
	f.closed = true
	f.room.Broadcast()
	f.mu.Unlock()
}

// Finished reports that a request finished on a target of the feed's worker that should have stored at least one new
// block there; silent reports that no event of that target came since the request was decided. After
// Source.Machine.SilentAfter such calls without an event the feed becomes stale, or requests a replay if its source has
// one. A polled source is polled immediately.
func (f *Feed) Finished(t kvindex.Target, silent bool) {
	if f.src.PollURL != "" {
		select {
		case f.poke <- struct{}{}:
		default:
			// A poll is already pending; it will return this request's blocks too.
		}
	}
	if !silent {
		return
	}
	f.mu.silent(func() {
		a := f.main
		if f.src.PollURL != "" {
			a = f.rank(t.Rank)
		}
		a.do(a.machine.Finished())
	})
}

// Status returns a copy of the feed's counters and states. It does not wait for a batch that is being applied.
func (f *Feed) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.counters.status(f.src.Worker)
	for _, a := range f.appliers() {
		s.Counts.add(a.shown.counts)
		for _, t := range a.reported() {
			s.Targets = append(s.Targets, TargetStatus{t, a.shown.state, a.shown.cursor})
		}
	}
	slices.SortFunc(s.Targets, func(a, b TargetStatus) int { return int(a.Target.Rank) - int(b.Target.Rank) })
	return s
}

func (f *Feed) appliers() []*applier {
	if f.src.PollURL == "" || len(f.byRank) == 0 {
		return []*applier{f.main}
	}
	return slices.Collect(maps.Values(f.byRank))
}

func (c *Counts) add(o Counts) {
	c.Applied += o.Applied
	c.Duplicates += o.Duplicates
	c.Gaps += o.Gaps
	c.Missing += o.Missing
	c.Lost += o.Lost
	c.Recovered += o.Recovered
	c.Restarts += o.Restarts
	c.Clears += o.Clears
	c.Overflows += o.Overflows
	c.Replays += o.Replays
	c.Failures += o.Failures
	c.Silences += o.Silences
}

// firstHandshake bounds the first connection's dialing and handshake, so that an address that
// drops packets is reported early.
const firstHandshake = 1500 * time.Millisecond

// follow connects and reads, and reconnects after errors.
func (f *Feed) follow(ctx context.Context) {
	wait, opt := f.src.ReconnectMin, f.src.Conn
	opt.HandshakeTimeout = min(cmp.Or(max(opt.HandshakeTimeout, 0), firstHandshake), firstHandshake)
	for ctx.Err() == nil {
		c, err := zmtp.Dial(ctx, f.src.Endpoint, opt)
		opt = f.src.Conn
		if began := time.Now(); err == nil {
			if err = f.read(ctx, c); time.Since(began) > f.src.ReconnectMax { // one that fails early may do so again
				wait = f.src.ReconnectMin
			}
		}
		f.failed(ctx, err)
		sleep(ctx, jitter(wait))
		wait = min(2*wait, f.src.ReconnectMax)
	}
}

// serve reads from the publisher that connected last: an engine that connects again has lost its
// former connection, even if we have not noticed yet.
func (f *Feed) serve(ctx context.Context, l *zmtp.Listener) {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	end, readers := context.CancelFunc(func() {}), sync.WaitGroup{}
	for {
		nc, err := l.Accept()
		if err != nil {
			end()
			readers.Wait()
			if ctx.Err() == nil {
				f.failed(ctx, err)
				sleep(ctx, f.src.ReconnectMin)
				continue
			}
			return
		}
		opt := l.Options()
		end()
		readers.Wait()
		var one context.Context
		one, end = context.WithCancel(ctx)
		readers.Go(func() {
			unhook := context.AfterFunc(one, func() { _ = nc.Close() })
			defer unhook()
			c, err := zmtp.NewConn(nc, opt)
			if err == nil {
				err = f.read(one, c)
			}
			f.failed(ctx, err)
		})
	}
}

func (f *Feed) failed(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counters.errors++
	f.counters.note(err)
	if now := time.Now(); now.Sub(f.warned) >= warnEvery {
		f.warned = now
		f.main.sink.Warn(f.main.base(), Unreachable, err.Error())
	}
}

// warnEvery is the shortest interval of warnings about failed connections.
const warnEvery = time.Minute

// read subscribes and passes batches to the machine until the connection breaks.
func (f *Feed) read(ctx context.Context, c *zmtp.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	defer c.Close()
	if err := c.Subscribe(f.src.Topic); err != nil {
		return err
	}
	f.tell(func() []Action {
		f.counters.connects++
		return f.machine.Up()
	})
	defer f.tell(func() []Action {
		f.stopReplay()
		return f.machine.Down()
	})
	in := f.inbox(ctx, c)
	defer func() { in.release() }()
	for {
		f.mu.Lock()
		for f.machine.Full() && !f.closed {
			// Back pressure: batches wait in the socket, and then in the engine.
			f.room.Wait()
		}
		f.mu.Unlock()
		m, err := in.recv(time.Time{})
		if err != nil {
			return err
		}
		seq, payload, ok := SplitFrames(m.Frames)
		f.tell(func() []Action {
			switch {
			case !ok:
				f.counters.dropped[Malformed]++
				return nil
			case ctx.Err() != nil: // others of this worker had their turns until the feed was closed
				return nil
			}
			return f.machine.Live(seq, payload)
		})
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// tell performs the actions that the machine returns for an input.
func (f *Feed) tell(input func() []Action) {
	f.mu.enter()
	defer f.mu.leave()
	f.main.do(input())
}

// SplitFrames splits a batch's frames, starting from the end: publishers send [topic, seq, payload], replays ["", seq,
// payload] or ["", topic, seq, payload]. ok is false if the frames do not form a batch.
func SplitFrames(frames [][]byte) (seq uint64, payload []byte, ok bool) {
	n := len(frames)
	if n < 2 || len(frames[n-2]) != 8 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], true
}

// endOfReplay is the sequence number of a replay's last message.
const endOfReplay = ^uint64(0)

type replay struct {
	Action
	ctx context.Context
}

// startReplay runs a replay concurrently with the subscription, after the previous one has ended: one goroutine
// replays, however often an engine restarts. The caller holds the lock.
func (f *Feed) startReplay(ctx context.Context, a Action) {
	f.stopReplay()
	if f.closed {
		return
	}
	r, idle := &replay{Action: a}, f.newest == nil
	r.ctx, f.stopReplay = context.WithCancel(ctx)
	if f.newest = r; idle {
		f.replays.Go(func() {
			for f.replayNewest() {
			}
		})
	}
}

// replayNewest runs the newest replay and reports whether another one was requested meanwhile.
func (f *Feed) replayNewest() bool {
	f.mu.Lock()
	r := f.newest
	f.mu.Unlock()
	if r.Attempt > 0 {
		sleep(r.ctx, jitter(min(f.src.ReconnectMin<<r.Attempt, f.src.ReconnectMax)))
	}
	err := f.runReplay(r.ctx, r.Action)
	f.failed(r.ctx, err)
	f.mu.enter()
	defer f.mu.leave()
	f.main.do(f.machine.ReplayEnd(r.Epoch, err == nil))
	f.room.Broadcast()
	if f.newest == r {
		f.newest = nil
		f.stopReplay()
	}
	return f.newest != nil
}

func (f *Feed) runReplay(ctx context.Context, a Action) error {
	done, err := acquire(ctx, f.src.Replays)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeout(ctx, f.src.ReplayTotal)
	defer cancel()
	opt := f.src.Conn
	opt.Type = zmtp.Dealer
	c, err := zmtp.Dial(ctx, f.src.Replay, opt)
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	in := f.inbox(ctx, c)
	defer func() { in.release() }()
	if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, a.Seq)); err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	for {
		m, err := in.recv(time.Now().Add(f.src.ReplayIdle))
		if err != nil {
			return fmt.Errorf("replay: %w", err)
		}
		seq, payload, ok := SplitFrames(m.Frames)
		if !ok {
			return errors.New("replay: reply without a batch number")
		}
		if seq == endOfReplay && len(payload) == 0 {
			return nil
		}
		f.tell(func() []Action { return f.machine.Replayed(a.Epoch, seq, payload) })
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// acquire takes a place in each limit, in order.
func acquire(ctx context.Context, limits []*semaphore.Weighted) (done func(), err error) {
	for i, limit := range limits {
		if err := limit.Acquire(ctx, 1); err != nil {
			release(limits[:i], 1)
			return func() {}, err
		}
	}
	return sync.OnceFunc(func() { release(limits, 1) }), nil
}

// inbox is a connection on which a large batch occupies places in Source.Large from before its receipt until the next
// message is requested.
type inbox struct {
	*zmtp.Conn
	release func()
	late    *time.Timer
}

func (f *Feed) inbox(ctx context.Context, c *zmtp.Conn) *inbox {
	in := &inbox{Conn: c, release: func() {}, late: time.NewTimer(0)}
	c.AdmitAbove = LargeBatch
	c.Admit = func() (err error) {
		if in.release, err = acquire(ctx, f.src.Large); err == nil {
			in.late = time.AfterFunc(largeWithin, func() { _ = c.Close() })
		}
		return err
	}
	return in
}

func (in *inbox) recv(deadline time.Time) (zmtp.Message, error) {
	in.release()
	m, err := in.Recv(deadline)
	in.late.Stop()
	return m, err
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// jitter spreads waits over [d/2, d], so that many feeds do not reconnect simultaneously.
func jitter(d time.Duration) time.Duration { return d/2 + time.Duration(rand.Int64N(int64(d/2)+1)) }

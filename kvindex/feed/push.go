package feed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// PushServer is the gRPC service to which relays push events. A publisher (a worker's rank) that reconnects continues
// at its position, if its batches prove to come from the same engine; only the newest stream of a publisher is active.
type PushServer struct {
	kvlanev1.UnimplementedKVEventsServer
	// Large is as in Source, except that a batch acquires its places after it was received. Set it before serving.
	Large  []*semaphore.Weighted
	accept func(*kvlanev1.Hello) (Sink, error)

	mu         sync.Mutex
	publishers map[kvindex.Target]*publisher
	resume     map[kvindex.Target]Cursor
}

// NewPushServer returns a service that passes events to the sink that accept returns for a
// publisher whose worker is known; the relay receives its error otherwise. A publisher keeps its
// first sink until Forget. accept must be fast and must not call the server.
func NewPushServer(accept func(*kvlanev1.Hello) (Sink, error)) *PushServer {
	return &PushServer{accept: accept, publishers: map[kvindex.Target]*publisher{}, resume: map[kvindex.Target]Cursor{}}
}

// Resume sets the sink's position for a target that is going to be pushed, if the sink was
// loaded from a snapshot (see MachineConfig.Resume).
func (s *PushServer) Resume(t kvindex.Target, c Cursor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resume[t] = c
}

// Forget removes a worker's publishers and ends their streams. After it returns the sink receives nothing more from
// them. To keep the worker from reconnecting, make accept refuse it first.
func (s *PushServer) Forget(worker string) {
	s.mu.Lock()
	var forgotten []*publisher
	for t, p := range s.publishers {
		if t.Worker == worker {
			forgotten = append(forgotten, p)
			delete(s.publishers, t)
		}
	}
	maps.DeleteFunc(s.resume, func(t kvindex.Target, _ Cursor) bool { return t.Worker == worker })
	s.mu.Unlock()
	for _, p := range forgotten { // without the lock, because its batch may take long
		p.mu.enter()
		p.gone = true
		p.a.machine.dropPending()
		if p.stop != nil {
			p.stop()
			p.stop = nil
		}
		p.timeout.Stop()
		p.mu.leave()
	}
}

// Finished reports that a request finished on a target that should have stored a new block there
// (see Feed.Finished). It returns whether the target is pushed.
func (s *PushServer) Finished(t kvindex.Target, silent bool) bool {
	s.mu.Lock()
	p := s.publishers[t]
	s.mu.Unlock()
	if p == nil {
		return false
	}
	if silent {
		p.mu.silent(func() {
			if !p.gone {
				p.a.do(p.a.machine.Finished())
			}
		})
	}
	return true
}

// Statuses returns the status of each publisher. It does not wait for batches that are being applied.
func (s *PushServer) Statuses() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Status
	for t, p := range s.publishers {
		p.mu.Lock()
		st := p.a.counters.status(t.Worker)
		st.Counts = p.a.shown.counts
		st.Targets = []TargetStatus{{t, p.a.shown.state, p.a.shown.cursor}}
		p.mu.Unlock()
		all = append(all, st)
	}
	return all
}

// Pushes reports whether a relay has connected for t since the last Forget of its worker.
func (s *PushServer) Pushes(t kvindex.Target) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.publishers[t] != nil
}

// publisher is one sequence and its active stream.
type publisher struct {
	mu *guard
	a  applier
	// stop ends the active stream, nil if there is none. streams is that stream's number.
	stop    context.CancelFunc
	streams uint64
	// gone reports that the worker was forgotten: the sink must not be called any more.
	gone    bool
	out     chan *kvlanev1.PushResponse
	timeout *time.Timer // of the replay that was asked for last
}

const (
	// maxWorker bounds the names in a hello: errors quote them.
	maxWorker = 1 << 10
	// pushAnswers is the number of answers that may be queued for a relay.
	pushAnswers = 64
	// ackEvery is the number of batches per acknowledgement.
	ackEvery = 32
	// pushReplayTimeout limits a relay's replay.
	pushReplayTimeout = 2 * time.Minute
)

// Push serves one stream.
func (s *PushServer) Push(stream kvlanev1.KVEvents_PushServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	if hello == nil {
		return status.Error(codes.InvalidArgument, "the first message must say hello")
	}
	src, err := helloSource(hello)
	if err != nil {
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	p, err := s.publisher(src, hello)
	if err != nil {
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	ctx, stop := context.WithCancel(stream.Context())
	defer stop()
	mine, out, ok := p.begin(&src, stop)
	if !ok {
		return status.Error(codes.Aborted, "the worker was removed")
	}
	defer p.end(mine)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for {
			select {
			case r := <-out:
				if stream.Send(r) != nil {
					stop()
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	received := make(chan error, 1)
	var handling sync.Mutex
	go func() { received <- p.receive(ctx, stream, mine, &handling) }()
	select {
	case err = <-received:
	case <-ctx.Done():
		err = status.Error(codes.Aborted, "another stream of this publisher took over, its worker was removed, or answers were not read")
	}
	stop()
	<-sent
	handling.Lock() // the stream's end is that of its memory, too
	defer handling.Unlock()
	return err
}

// helloSource validates a hello and returns its source.
func helloSource(h *kvlanev1.Hello) (Source, error) {
	src := Source{Worker: h.GetWorker(), Engine: Engine(h.GetEngine()), Rank: kvindex.NoRank, BlockSize: int(h.GetBlockSize())}
	if h.Rank != nil {
		src.Rank = h.GetRank()
	}
	src.Machine.Replay = h.GetCanReplay()
	switch {
	case src.Worker == "" || len(src.Worker) > maxWorker || len(src.Engine) > maxWorker:
		return src, fmt.Errorf("hello without a worker, or with a name of more than %d bytes", maxWorker)
	case src.Engine != VLLM && src.Engine != SGLang && src.Engine != TRTLLM:
		return src, fmt.Errorf("engine %q: want vllm, sglang or trtllm", src.Engine)
	case src.Rank < kvindex.NoRank || h.Rank != nil && src.Rank < 0:
		return src, fmt.Errorf("rank %d", src.Rank)
	}
	return src, nil
}

// publisher returns the publisher of a source, creating it if it is accepted.
func (s *PushServer) publisher(src Source, hello *kvlanev1.Hello) (*publisher, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	src.Large = s.Large
	sink, err := s.accept(hello)
	if err != nil {
		return nil, err
	}
	t := kvindex.Target{Worker: src.Worker, Rank: src.Rank}
	p := s.publishers[t]
	if p == nil {
		if c, ok := s.resume[t]; ok {
			src.Machine.Resume = &c
			delete(s.resume, t)
		}
		if l, ok := sink.(Limiter); ok {
			src.Machine.Pending = l.Pending()
		}
		p = &publisher{mu: newGuard(sink), timeout: time.NewTimer(0)}
		p.a = applier{mu: p.mu, src: &src, dec: &pushDecoder{NewDecoder(src.Engine, src.BlockSize)}, sink: sink, machine: NewMachine(src.Machine), counters: newCounters(), targets: []kvindex.Target{t}}
		p.a.show()
		p.a.replay = p.askReplay
		s.publishers[t] = p
	}
	return p, nil
}

// begin makes a stream the active one and ends the previous one. ok is false if the worker was forgotten meanwhile.
func (p *publisher) begin(src *Source, stop context.CancelFunc) (stream uint64, out chan *kvlanev1.PushResponse, ok bool) {
	p.mu.enter()
	defer p.mu.leave()
	if p.gone {
		return 0, nil, false
	}
	if p.stop != nil {
		p.stop()
		p.a.do(p.a.machine.Down())
	}
	p.streams++
	p.stop, p.out = stop, make(chan *kvlanev1.PushResponse, pushAnswers)
	p.a.src.BlockSize = src.BlockSize
	p.a.machine.cfg.Replay = src.Machine.Replay
	p.a.counters.connects++
	p.a.do(p.a.machine.Up())
	return p.streams, p.out, true
}

// end makes the publisher stale if the stream is still the active one.
func (p *publisher) end(stream uint64) {
	p.mu.enter()
	defer p.mu.leave()
	if p.streams == stream && p.stop != nil {
		p.stop = nil
		p.timeout.Stop()
		p.a.do(p.a.machine.Down())
	}
}

// receive passes a stream's batches to the machine, which is when it holds handling.
func (p *publisher) receive(ctx context.Context, stream kvlanev1.KVEvents_PushServer, mine uint64, handling *sync.Mutex) error {
	for n := 1; ; n++ {
		msg, err := stream.Recv()
		release := func() {}
		handling.Lock()
		if err == nil && proto.Size(msg) > LargeBatch {
			release, err = acquire(ctx, p.a.src.Large)
		}
		if err == nil {
			err = p.message(msg, mine, n%ackEvery == 0)
			release()
		}
		if handling.Unlock(); errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (p *publisher) message(msg *kvlanev1.PushRequest, mine uint64, ack bool) error {
	p.mu.enter()
	defer p.mu.leave()
	if p.streams != mine || p.stop == nil {
		return status.Error(codes.Aborted, "another stream of this publisher took over, or its worker was removed")
	}
	before := p.a.machine.State()
	switch m := msg.GetMessage().(type) {
	case *kvlanev1.PushRequest_Batch:
		payload, err := pushPayload(m.Batch)
		if m.Batch.Content = nil; err != nil { // it is not needed while the payload is decoded
			return err
		}
		if id := m.Batch.GetReplayId(); id != 0 {
			p.a.do(p.a.machine.Replayed(id, m.Batch.GetSeq(), payload))
		} else {
			p.a.do(p.a.machine.Live(m.Batch.GetSeq(), payload))
		}
	case *kvlanev1.PushRequest_ReplayEnd:
		p.a.do(p.a.machine.ReplayEnd(m.ReplayEnd.GetReplayId(), true))
	default:
		return status.Error(codes.InvalidArgument, "want a batch or the end of a replay")
	}
	if state := p.a.machine.State(); ack || state != before {
		next, _ := p.a.machine.Next()
		p.answer(&kvlanev1.PushResponse{Message: &kvlanev1.PushResponse_Ack{Ack: &kvlanev1.Ack{Next: next, State: state.String()}}})
	}
	return nil
}

// answer queues an answer, and ends the stream of a relay that does not read them. The caller holds the lock.
func (p *publisher) answer(r *kvlanev1.PushResponse) {
	select {
	case p.out <- r:
	default:
		p.stop()
	}
}

// askReplay requests batches from the relay. The caller holds the lock.
func (p *publisher) askReplay(a Action) {
	p.answer(&kvlanev1.PushResponse{Message: &kvlanev1.PushResponse_Replay{Replay: &kvlanev1.Replay{ReplayId: a.Epoch, From: a.Seq}}})
	p.timeout.Stop()
	p.timeout = time.AfterFunc(pushReplayTimeout, func() {
		p.mu.enter()
		defer p.mu.leave()
		if p.stop != nil {
			p.a.do(p.a.machine.ReplayEnd(a.Epoch, false))
		}
	})
}

// The first byte of a pushed payload inside the machine is the form of the rest.
const (
	pushedRaw    = 'r'
	pushedEvents = 'e'
)

// pushPayload encodes a batch's content as bytes, whose digest distinguishes it from another batch of the same number.
func pushPayload(b *kvlanev1.Batch) ([]byte, error) {
	switch c := b.GetContent().(type) {
	case *kvlanev1.Batch_Raw:
		return append([]byte{pushedRaw}, c.Raw...), nil
	case *kvlanev1.Batch_Events:
		payload, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend([]byte{pushedEvents}, c.Events)
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		return payload, nil
	}
	return nil, status.Error(codes.InvalidArgument, "a batch without content")
}

// pushDecoder decodes pushed payloads: the engine's own, or events in the relay protocol's form.
type pushDecoder struct{ *Decoder }

// Decode decodes a payload that pushPayload made.
func (d *pushDecoder) Decode(payload []byte) (*Batch, error) {
	if payload[0] == pushedRaw {
		return d.Decoder.Decode(payload[1:])
	}
	d.reset()
	var in kvlanev1.Events
	if err := proto.Unmarshal(payload[1:], &in); err != nil {
		return &d.batch, fmt.Errorf("%w: %w", ErrBatch, err)
	}
	for _, e := range in.GetEvents() {
		ev, why := pushedEvent(e)
		if why != "" {
			d.drop(why)
			continue
		}
		d.batch.Events = append(d.batch.Events, ev)
	}
	return &d.batch, nil
}

// pushedEvent converts a pushed event to a kvindex.Event, or returns why not.
func pushedEvent(e *kvlanev1.Event) (ev kvindex.Event, why Reason) {
	var tier kvlanev1.Tier
	var hashes []uint64
	switch c := e.GetChange().(type) {
	case *kvlanev1.Event_Cleared:
		ev.Kind = kvindex.Cleared
		return ev, ""
	case *kvlanev1.Event_Removed:
		ev.Kind, ev.Group = kvindex.Removed, c.Removed.GetGroup()
		tier, hashes = c.Removed.GetTier(), c.Removed.GetHashes()
	case *kvlanev1.Event_Stored:
		s := c.Stored
		ev = kvindex.Event{
			Kind: kvindex.Stored, Group: s.GetGroup(), Parent: kvindex.EngineHash(s.GetParent()), HasParent: s.Parent != nil,
			Tokens: s.GetTokens(), BlockSize: int(s.GetBlockSize()), Adapter: s.GetAdapter(), Salt: s.GetSalt(), Extra: s.GetExtra(),
		}
		tier, hashes = s.GetTier(), s.GetHashes()
		check := blockEvent{parent: ev.Parent, hasParent: ev.HasParent, tokens: ev.Tokens, blockSize: int64(ev.BlockSize)}
		for _, h := range hashes {
			check.hashes = append(check.hashes, kvindex.EngineHash(h))
		}
		if why := checkStored(&check); why != "" {
			return ev, why
		}
		if ev.BlockSize = int(check.blockSize); len(ev.Extra) != 0 && len(ev.Extra) != len(hashes) {
			return ev, Misaligned
		}
	default:
		return ev, UnknownTag
	}
	if tier < 0 || int(tier) >= kvindex.NumTiers {
		return ev, UnknownMedium
	}
	ev.Tier = kvindex.Tier(tier)
	for _, h := range hashes {
		ev.Hashes = append(ev.Hashes, kvindex.EngineHash(h))
	}
	return ev, ""
}

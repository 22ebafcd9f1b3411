package enginesim

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// publisher is the event stream of one rank: a PUB socket with a sequence, and a ROUTER that replays the last batches.
type publisher struct {
	topic    string
	steps    int  // batches kept for replay
	oldReply bool // replay replies without a topic frame
	enc      encoding
	rank     int // global, as batches carry it
	faults   *faultBox

	mu     sync.Mutex
	seq    uint64
	buffer []published
	subs   map[*subscriber]bool
	conns  map[net.Conn]bool
	pub    net.Listener
	replay net.Listener
	late   []lateBatch
	closed bool

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

type published struct {
	seq     uint64
	payload []byte
}

type lateBatch struct {
	at     time.Time
	events []kvEvent
}

// subscriber queues messages for one connection, so that a slow one loses messages and does not delay others.
type subscriber struct {
	topics []string
	queue  chan published
}

// subscriberQueue is the high-water mark of a subscriber; more unread batches are lost, as on a PUB socket.
const subscriberQueue = 100_000

// openPublisher binds (or, for a concrete address that another side has bound, connects) the sockets of a rank.
func openPublisher(ctx context.Context, o *Options, rank int, enc encoding, faults *faultBox) (*publisher, error) {
	ctx, cancel := context.WithCancel(ctx)
	p := &publisher{
		topic: o.EventsTopic, steps: o.ReplaySteps, oldReply: o.OldReplay, enc: enc, rank: rank, faults: faults,
		subs: map[*subscriber]bool{}, conns: map[net.Conn]bool{}, ctx: ctx, cancel: cancel,
	}
	var err error
	switch {
	case o.EventsEndpoint == "":
		return p, nil
	case o.EventsConnect:
		var network, address string
		if network, address, err = zmtpAddress(o.EventsEndpoint, rank); err == nil {
			p.wg.Go(func() { p.dial(network, address) })
		}
	default:
		p.pub, err = p.listen(o.EventsEndpoint, p.serveSub)
	}
	if err == nil && o.ReplayEndpoint != "" {
		p.replay, err = p.listen(o.ReplayEndpoint, p.serveReplay)
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("event sockets of rank %d: %w", rank, err)
	}
	return p, nil
}

func (p *publisher) listen(endpoint string, serve func(net.Conn)) (net.Listener, error) {
	network, address, err := zmtpAddress(endpoint, p.rank)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen(network, address)
	if err == nil {
		p.wg.Go(func() { p.accept(l, serve) })
	}
	return l, err
}

func (p *publisher) accept(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.with(c, serve) })
	}
}

// with serves a connection, which close and disconnect can cut.
func (p *publisher) with(c net.Conn, serve func(net.Conn)) {
	defer c.Close()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	p.conns[c] = true
	p.mu.Unlock()
	serve(c)
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

func (p *publisher) dial(network, address string) {
	for p.ctx.Err() == nil {
		if c, err := (&net.Dialer{}).DialContext(p.ctx, network, address); err == nil {
			p.with(c, p.serveSub)
		}
		wait(p.ctx, 20*time.Millisecond, nil)
	}
}

func (p *publisher) serveSub(c net.Conn) {
	z, err := zmtpHandshake(c, "PUB")
	if err != nil {
		return
	}
	s := &subscriber{queue: make(chan published, subscriberQueue)}
	p.mu.Lock()
	p.subs[s] = true
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() {
		for m := range s.queue {
			if z.send(0, []byte(p.topic), binary.BigEndian.AppendUint64(nil, m.seq), m.payload) != nil {
				_ = c.Close()
			}
		}
	})
	for {
		frames, err := z.message()
		if err != nil {
			break
		}
		if len(frames) == 1 && len(frames[0]) > 0 {
			p.subscribe(s, frames[0][0] == 1, string(frames[0][1:]))
		}
	}
	p.mu.Lock()
	delete(p.subs, s)
	close(s.queue)
	p.mu.Unlock()
	writer.Wait()
}

func (p *publisher) subscribe(s *subscriber, add bool, topic string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if add {
		s.topics = append(s.topics, topic)
		return
	}
	s.topics = slices.DeleteFunc(s.topics, func(t string) bool { return t == topic })
}

// subscribers is the number of connections that subscribed to this stream.
func (p *publisher) subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.subs {
		if s.wants(p.topic) {
			n++
		}
	}
	return n
}

func (s *subscriber) wants(topic string) bool {
	return slices.ContainsFunc(s.topics, func(t string) bool { return strings.HasPrefix(topic, t) })
}

// publish sends one batch, unless a fault prevents it.
func (p *publisher) publish(events []kvEvent) {
	if len(events) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if delay := p.faults.get().EventDelayMS; delay > 0 || len(p.late) > 0 {
		p.late = append(p.late, lateBatch{time.Now().Add(time.Duration(delay) * time.Millisecond), events})
		if len(p.late) == 1 {
			p.wg.Go(p.sendLate)
		}
		return
	}
	p.send(events)
}

// sendLate sends delayed batches in order and returns when there are none left.
func (p *publisher) sendLate() {
	for {
		p.mu.Lock()
		if len(p.late) == 0 || p.closed {
			p.mu.Unlock()
			return
		}
		early := time.Until(p.late[0].at)
		if early <= 0 {
			p.send(p.late[0].events)
			p.late = p.late[1:]
		}
		p.mu.Unlock()
		if early > 0 {
			wait(p.ctx, early, nil)
		}
	}
}

// send requires the lock.
func (p *publisher) send(events []kvEvent) {
	f := p.faults.takeBatch()
	if f.StopEvents {
		return
	}
	enc := p.enc
	if f.WrongBlockSize > 0 {
		enc.blockSize = f.WrongBlockSize
	}
	payload, err := enc.batch(float64(time.Now().UnixMicro())/1e6+float64(f.ClockAheadMS)/1e3, events, p.rank)
	if err != nil {
		return
	}
	m := published{p.seq, payload}
	p.seq++
	lost := f.DropBatches > 0
	if !lost || !f.ForgetDropped {
		if p.buffer = append(p.buffer, m); len(p.buffer) > p.steps {
			p.buffer = p.buffer[len(p.buffer)-p.steps:]
		}
	}
	if lost {
		return
	}
	if f.GarbageBatches {
		m.payload = make([]byte, len(payload))
		_, _ = rand.Read(m.payload)
	}
	for s := range p.subs {
		if !s.wants(p.topic) {
			continue
		}
		for range 1 + f.RepeatBatches {
			select {
			case s.queue <- m:
			default: // over the high-water mark: lost
			}
		}
	}
}

// endOfReplay is the number of the message that ends a replay.
const endOfReplay = math.MaxUint64

// serveReplay answers [empty, start] with every kept batch from start on and a terminator.
// A request with another number of frames is ignored.
func (p *publisher) serveReplay(c net.Conn) {
	z, err := zmtpHandshake(c, "ROUTER")
	if err != nil {
		return
	}
	for {
		frames, err := z.message()
		if err != nil {
			return
		}
		if len(frames) != 2 || p.faults.get().NoReplay {
			continue
		}
		var start uint64 // frames[1] is a big-endian number of any length
		for _, v := range frames[1] {
			start = start<<8 | uint64(v)
		}
		p.mu.Lock()
		batches := slices.Clone(p.buffer)
		p.mu.Unlock()
		batches = slices.DeleteFunc(batches, func(m published) bool { return m.seq < start })
		for _, m := range append(batches, published{seq: endOfReplay}) {
			frames := [][]byte{nil, []byte(p.topic), binary.BigEndian.AppendUint64(nil, m.seq), m.payload}
			if m.seq == endOfReplay {
				frames[1] = nil
			}
			if p.oldReply {
				frames = slices.Delete(frames, 1, 2)
			}
			if z.send(0, frames...) != nil {
				return
			}
		}
	}
}

// restart resets the sequence to 0, empties the buffer and cuts all connections.
func (p *publisher) restart() {
	p.mu.Lock()
	p.seq, p.buffer, p.late = 0, nil, nil
	p.mu.Unlock()
	p.disconnect()
}

func (p *publisher) disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *publisher) close() {
	p.cancel()
	p.mu.Lock()
	p.closed = true
	for _, l := range [2]net.Listener{p.pub, p.replay} {
		if l != nil {
			_ = l.Close()
		}
	}
	p.mu.Unlock()
	p.disconnect()
	p.wg.Wait()
}

// endpoint formats a bound listener as an engine's introspection does.
func endpoint(l net.Listener) string {
	switch {
	case l == nil:
		return ""
	case l.Addr().Network() == "unix":
		return "ipc://" + l.Addr().String()
	}
	return "tcp://" + l.Addr().String()
}

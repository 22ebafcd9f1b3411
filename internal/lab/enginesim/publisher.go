package enginesim

import (
	"context"
	"encoding/binary"
	"fmt"
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
	subs   map[*zmtpConn]*subscriber
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

// subscriber queues messages for one connection, so that a slow one loses messages and holds up nobody.
type subscriber struct {
	topics [][]byte
	queue  chan published
}

// subscriberQueue is the high-water mark of a subscriber; more unread batches are lost, as on a PUB socket.
const subscriberQueue = 100_000

// openPublisher binds (or, for a concrete address that another side has bound, connects) the sockets of a rank.
func openPublisher(ctx context.Context, o *Options, rank int, enc encoding, faults *faultBox) (*publisher, error) {
	ctx, cancel := context.WithCancel(ctx)
	p := &publisher{
		topic: o.EventsTopic, steps: o.ReplaySteps, oldReply: o.OldReplay, enc: enc, rank: rank, faults: faults,
		subs: map[*zmtpConn]*subscriber{}, conns: map[net.Conn]bool{}, ctx: ctx, cancel: cancel,
	}
	if o.EventsEndpoint == "" {
		return p, nil
	}
	network, address, err := zmtpAddress(o.EventsEndpoint, rank)
	if err != nil {
		cancel()
		return nil, err
	}
	if o.EventsConnect {
		p.wg.Go(func() { p.dial(network, address) })
	} else if p.pub, err = net.Listen(network, address); err != nil {
		cancel()
		return nil, fmt.Errorf("event socket of rank %d: %w", rank, err)
	} else {
		p.wg.Go(func() { p.accept(p.pub, p.serveSub) })
	}
	if o.ReplayEndpoint == "" {
		return p, nil
	}
	replayNetwork, replayAddress, err := zmtpAddress(o.ReplayEndpoint, rank)
	if err == nil {
		p.replay, err = net.Listen(replayNetwork, replayAddress)
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("replay socket of rank %d: %w", rank, err)
	}
	p.wg.Go(func() { p.accept(p.replay, p.serveReplay) })
	return p, nil
}

func (p *publisher) accept(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		if p.enter(c) {
			p.wg.Go(func() {
				defer p.leave(c)
				serve(c)
			})
		}
	}
}

func (p *publisher) enter(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = c.Close()
		return false
	}
	p.conns[c] = true
	return true
}

func (p *publisher) leave(c net.Conn) {
	_ = c.Close()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

func (p *publisher) dial(network, address string) {
	for p.ctx.Err() == nil {
		c, err := (&net.Dialer{}).DialContext(p.ctx, network, address)
		if err == nil && p.enter(c) {
			p.serveSub(c)
			p.leave(c)
		}
		select {
		case <-p.ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (p *publisher) serveSub(c net.Conn) {
	z, err := zmtpHandshake(c, "PUB")
	if err != nil {
		return
	}
	s := &subscriber{queue: make(chan published, subscriberQueue)}
	p.mu.Lock()
	p.subs[z] = s
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
			p.subscribe(s, frames[0][0] == 1, frames[0][1:])
		}
	}
	p.mu.Lock()
	delete(p.subs, z)
	close(s.queue)
	p.mu.Unlock()
	writer.Wait()
}

func (p *publisher) subscribe(s *subscriber, add bool, topic []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if add {
		s.topics = append(s.topics, topic)
		return
	}
	s.topics = slices.DeleteFunc(s.topics, func(t []byte) bool { return string(t) == string(topic) })
}

// subscribers is the number of connections that want this stream.
func (p *publisher) subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, s := range p.subs {
		if s.wants(p.topic) {
			n++
		}
	}
	return n
}

func (s *subscriber) wants(topic string) bool {
	return slices.ContainsFunc(s.topics, func(t []byte) bool { return strings.HasPrefix(topic, string(t)) })
}

// publish sends one batch, unless a fault keeps it.
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

// sendLate sends delayed batches in their order and ends when there are none.
func (p *publisher) sendLate() {
	for {
		p.mu.Lock()
		if len(p.late) == 0 || p.closed {
			p.mu.Unlock()
			return
		}
		wait := time.Until(p.late[0].at)
		if wait <= 0 {
			p.send(p.late[0].events)
			p.late = p.late[1:]
		}
		p.mu.Unlock()
		if wait > 0 {
			select {
			case <-p.ctx.Done():
				return
			case <-time.After(wait):
			}
		}
	}
}

// send runs under the lock.
func (p *publisher) send(events []kvEvent) {
	f := p.faults.takeBatch()
	if f.StopEvents {
		return
	}
	enc := p.enc
	if f.WrongBlockSize > 0 {
		enc.blockSize = f.WrongBlockSize
	}
	payload, err := enc.batch(float64(time.Now().UnixMicro())/1e6, events, p.rank)
	if err != nil {
		return
	}
	m := published{p.seq, payload}
	p.seq++
	lost := f.DropBatches > 0
	if !lost || !f.ForgetDropped {
		p.buffer = append(p.buffer, m)
		if len(p.buffer) > p.steps {
			p.buffer = p.buffer[len(p.buffer)-p.steps:]
		}
	}
	if lost {
		return
	}
	for _, s := range p.subs {
		if !s.wants(p.topic) {
			continue
		}
		select {
		case s.queue <- m:
		default: // over the high-water mark: lost
		}
	}
}

// serveReplay answers [empty, start] with every kept batch from start on and a terminator. A request with another
// number of frames is dropped in silence.
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
		start := bigEndian(frames[1])
		p.mu.Lock()
		batches := slices.Clone(p.buffer)
		p.mu.Unlock()
		for _, m := range batches {
			if m.seq < start {
				continue
			}
			if p.reply(z, p.topic, binary.BigEndian.AppendUint64(nil, m.seq), m.payload) != nil {
				return
			}
		}
		if p.reply(z, "", []byte{0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF}, nil) != nil {
			return
		}
	}
}

func (p *publisher) reply(z *zmtpConn, topic string, seq, payload []byte) error {
	if p.oldReply {
		return z.send(0, nil, seq, payload)
	}
	return z.send(0, nil, []byte(topic), seq, payload)
}

// bigEndian reads a number of any length; one that needs more than 64 bits is as large as can be.
func bigEndian(b []byte) uint64 {
	var n uint64
	for _, v := range b {
		if n>>56 != 0 {
			return 1<<64 - 1
		}
		n = n<<8 | uint64(v)
	}
	return n
}

// restart begins the sequence anew, with an empty buffer, and cuts all connections.
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

// endpoint names a bound listener as an engine's introspection does.
func endpoint(l net.Listener) string {
	switch {
	case l == nil:
		return ""
	case l.Addr().Network() == "unix":
		return "ipc://" + l.Addr().String()
	}
	return "tcp://" + l.Addr().String()
}

package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Options of a connection. The zero value of a field means its default.
type Options struct {
	// Type is our socket type; default Sub.
	Type SocketType
	// MaxMessage bounds the bytes of one message, heads included; default 64 MiB.
	// A larger one ends the connection with ErrTooLarge.
	MaxMessage int
	// MaxFrames bounds the frames of one message; default 16.
	MaxFrames int
	// MinBuffer and MaxBuffer bound the read buffer between messages; defaults
	// 4 KiB and 256 KiB. One message larger than MaxBuffer still fits, up to MaxMessage.
	MinBuffer, MaxBuffer int
	// HandshakeTimeout bounds dialing, and greeting with READY; default 5 s each.
	HandshakeTimeout time.Duration
	// Heartbeat is how long a silent peer is waited for before it gets a PING; it is
	// given up after a second such time. Peers older than ZMTP 3.1 know no PING and
	// are waited for without end (TCP's keep-alive finds dead ones). Default 15 s.
	Heartbeat time.Duration
}

func (o Options) withDefaults() Options {
	if o.Type == "" {
		o.Type = Sub
	}
	for _, f := range []struct {
		p *int
		v int
	}{{&o.MaxMessage, 64 << 20}, {&o.MaxFrames, 16}, {&o.MinBuffer, 4 << 10}, {&o.MaxBuffer, 256 << 10}} {
		if *f.p <= 0 {
			*f.p = f.v
		}
	}
	if o.HandshakeTimeout <= 0 {
		o.HandshakeTimeout = 5 * time.Second
	}
	if o.Heartbeat <= 0 {
		o.Heartbeat = 15 * time.Second
	}
	return o
}

// Message is one multipart message. Its frames refer to the connection's buffer
// and are valid until the next Recv.
type Message struct {
	Frames [][]byte
}

// Conn is one connection after its handshake. One goroutine may receive while
// others send; Close may be called by any.
type Conn struct {
	nc    net.Conn
	opt   Options
	minor byte // the peer's ZMTP 3 minor version

	buf []byte
	// Invariant: 0 <= r <= p <= w <= len(buf). buf[r:w] is received and not yet
	// handed out, buf[r:p] of it is parsed into spans.
	r, p, w int
	spans   []span
	frames  [][]byte // of the message that was handed out last

	sendMu sync.Mutex
	out    []byte
}

// span is a frame's place, relative to Conn.r (the buffer may move).
type span struct{ from, to int }

// network splits an endpoint as engines write it ("tcp://host:port", "ipc://path").
func network(endpoint string) (netw, addr string, err error) {
	scheme, rest, ok := strings.Cut(endpoint, "://")
	switch {
	case ok && scheme == "tcp" && rest != "":
		rest = strings.Replace(rest, "*:", ":", 1)
		if _, port, err := net.SplitHostPort(rest); err != nil {
			return "", "", fmt.Errorf("zmtp: endpoint %q: %w", endpoint, err)
		} else if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return "", "", fmt.Errorf("zmtp: endpoint %q: port %q is not a number up to 65535", endpoint, port)
		}
		return "tcp", rest, nil
	case ok && scheme == "ipc" && rest != "":
		return "unix", rest, nil
	}
	return "", "", fmt.Errorf("zmtp: endpoint %q: want tcp://host:port or ipc://path", endpoint)
}

// CheckEndpoint reports whether Dial and Listen can understand the endpoint.
func CheckEndpoint(endpoint string) error {
	_, _, err := network(endpoint)
	return err
}

// Dial connects to an endpoint and shakes hands. ctx bounds the dialing only.
func Dial(ctx context.Context, endpoint string, opt Options) (*Conn, error) {
	netw, addr, err := network(endpoint)
	if err != nil {
		return nil, err
	}
	opt = opt.withDefaults()
	d := net.Dialer{Timeout: opt.HandshakeTimeout}
	nc, err := d.DialContext(ctx, netw, addr)
	if err != nil {
		return nil, fmt.Errorf("zmtp: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	defer stop()
	return NewConn(nc, opt)
}

// NewConn shakes hands on a connection that exists. On an error it is closed.
func NewConn(nc net.Conn, opt Options) (*Conn, error) {
	c := &Conn{nc: nc, opt: opt.withDefaults()}
	if err := c.handshake(); err != nil {
		_ = nc.Close()
		return nil, err
	}
	c.buf = make([]byte, c.opt.MinBuffer)
	return c, nil
}

// Close ends the connection and any Recv that waits on it.
func (c *Conn) Close() error { return c.nc.Close() }

// RemoteAddr names the peer.
func (c *Conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }

// Subscribe asks for the messages whose first frame begins with topic: by
// command to a peer of version 3.1, by message to an older one.
func (c *Conn) Subscribe(topic string) error {
	if c.minor >= 1 {
		return c.write(func(b []byte) []byte { return appendCommand(b, "SUBSCRIBE", []byte(topic)) })
	}
	return c.write(func(b []byte) []byte { return appendFrame(b, 0, append([]byte{1}, topic...)) })
}

// Send sends one message.
func (c *Conn) Send(frames ...[]byte) error {
	if len(frames) == 0 {
		return errors.New("zmtp: a message needs a frame")
	}
	return c.write(func(b []byte) []byte {
		for i, f := range frames {
			var flags byte
			if i < len(frames)-1 {
				flags = flagMore
			}
			b = appendFrame(b, flags, f)
		}
		return b
	})
}

func (c *Conn) write(build func([]byte) []byte) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	c.out = build(c.out[:0])
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.opt.Heartbeat)); err != nil {
		return fmt.Errorf("zmtp: %w", err)
	}
	if _, err := c.nc.Write(c.out); err != nil {
		return fmt.Errorf("zmtp: %w", err)
	}
	return nil
}

// Recv waits for the next message. Commands are answered on the way. Any error
// is final for the connection, except a time-out when deadline is set: then Recv
// may be called again and nothing is lost.
func (c *Conn) Recv(deadline time.Time) (Message, error) {
	c.consume()
	for {
		done, err := c.parse()
		if err != nil {
			return Message{}, err
		}
		if done {
			return c.message(), nil
		}
		if err := c.fill(deadline); err != nil {
			return Message{}, err
		}
	}
}

// Buffered reports whether a further whole message lies in the buffer, so that
// the next Recv will not wait.
func (c *Conn) Buffered() bool {
	at := c.p
	for {
		h, ok, err := parseHeader(c.buf[at:c.w], c.opt.MaxMessage)
		if err != nil || !ok || c.w-at < h.head+h.size {
			return err != nil
		}
		at += h.head + h.size
		if h.flags&(flagMore|flagCommand) == 0 {
			return true
		}
	}
}

// consume drops the message that was handed out last.
func (c *Conn) consume() {
	if len(c.frames) > 0 {
		c.r = c.p
		c.spans, c.frames = c.spans[:0], c.frames[:0]
	}
	if c.r == c.w {
		c.r, c.p, c.w = 0, 0, 0
		if len(c.buf) > c.opt.MaxBuffer {
			c.buf = make([]byte, c.opt.MaxBuffer)
		}
	}
}

// parse walks over the frames that have arrived whole and reports whether they
// make a message.
func (c *Conn) parse() (bool, error) {
	for {
		h, ok, err := parseHeader(c.buf[c.p:c.w], c.opt.MaxMessage)
		if err != nil {
			return false, err
		}
		if !ok {
			return false, nil
		}
		if total := c.p - c.r + h.head + h.size; total > c.opt.MaxMessage {
			return false, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, total, c.opt.MaxMessage)
		}
		if c.w-c.p < h.head+h.size {
			return false, nil
		}
		from := c.p + h.head
		c.p = from + h.size
		if h.flags&flagCommand != 0 {
			if err := c.command(c.buf[from:c.p]); err != nil {
				return false, err
			}
			if len(c.spans) == 0 {
				c.r = c.p
			}
			continue
		}
		if len(c.spans) == c.opt.MaxFrames {
			return false, fmt.Errorf("%w: more than %d frames", ErrTooLarge, c.opt.MaxFrames)
		}
		c.spans = append(c.spans, span{from - c.r, c.p - c.r})
		if h.flags&flagMore == 0 {
			return true, nil
		}
	}
}

// message makes the frames of the parsed spans.
func (c *Conn) message() Message {
	for _, s := range c.spans {
		c.frames = append(c.frames, c.buf[c.r+s.from:c.r+s.to:c.r+s.to])
	}
	return Message{Frames: c.frames}
}

// command answers PING; PONG and what is unknown need nothing (the bytes alone
// showed that the peer lives).
func (c *Conn) command(body []byte) error {
	name, data, err := parseCommand(body)
	if err != nil {
		return err
	}
	switch name {
	case "PING":
		// PING carries a 2-byte time to live and up to 16 bytes that come back in PONG.
		if len(data) < 2 || len(data) > 2+16 {
			return fmt.Errorf("%w: PING of %d bytes", ErrProtocol, len(data))
		}
		return c.write(func(b []byte) []byte { return appendCommand(b, "PONG", data[2:]) })
	case "ERROR":
		return fmt.Errorf("%w: peer sent ERROR", ErrProtocol)
	}
	return nil
}

// fill makes room and reads once.
func (c *Conn) fill(deadline time.Time) error {
	c.room()
	for pinged := false; ; {
		until := time.Now().Add(c.opt.Heartbeat)
		last := !deadline.IsZero() && deadline.Before(until)
		if last {
			until = deadline
		}
		if err := c.nc.SetReadDeadline(until); err != nil {
			return fmt.Errorf("zmtp: %w", err)
		}
		n, err := c.nc.Read(c.buf[c.w:])
		if n > 0 {
			c.w += n
			return nil
		}
		if err == nil {
			continue
		}
		if last || pinged || !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("zmtp: %w", err)
		}
		if pinged, err = c.beat(); err != nil {
			return err
		}
	}
}

// beat is done after a heartbeat of silence: an empty buffer becomes small again
// and a peer that knows PING gets one.
func (c *Conn) beat() (pinged bool, err error) {
	if c.w == 0 && len(c.buf) > c.opt.MinBuffer {
		c.buf = make([]byte, c.opt.MinBuffer)
	}
	if c.minor == 0 {
		return false, nil
	}
	// The time to live (tenths of a second) is ours to demand; 0 demands nothing.
	return true, c.write(func(b []byte) []byte { return appendCommand(b, "PING", []byte{0, 0}) })
}

// room makes space behind what has been received: it moves a started message to
// the front, and doubles a buffer that is full or mostly one message. What a
// frame's head promises is not believed before the bytes are there.
func (c *Conn) room() {
	if c.w < len(c.buf) && (c.r == 0 || len(c.buf)-c.w >= len(c.buf)/4) {
		return
	}
	live, to := c.w-c.r, c.buf
	if live > len(c.buf)/2 || c.w == len(c.buf) && len(c.buf) < c.opt.MaxBuffer {
		to = make([]byte, 2*len(c.buf))
	}
	copy(to, c.buf[c.r:c.w])
	c.buf, c.p, c.w, c.r = to, c.p-c.r, live, 0
}

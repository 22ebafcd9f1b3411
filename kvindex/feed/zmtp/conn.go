package zmtp

import (
	"cmp"
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
	// Type is the local socket type; default Sub.
	Type SocketType
	// MaxMessage limits the bytes of one message, frame heads included; default 64 MiB. A larger
	// one ends the connection with ErrTooLarge.
	MaxMessage int
	// MaxFrames limits the frames of one message; default 16.
	MaxFrames int
	// MinBuffer and MaxBuffer limit the read buffer between messages; defaults 4 KiB and 256
	// KiB. A single message larger than MaxBuffer still fits, up to MaxMessage.
	MinBuffer, MaxBuffer int
	// HandshakeTimeout limits dialing, and the exchange of greeting and READY; default 5 s each.
	HandshakeTimeout time.Duration
	// Heartbeat is the time of silence after which the peer gets a PING; after a second such
	// time the connection is closed. Peers older than ZMTP 3.1 do not support PING and may be
	// silent indefinitely (TCP keep-alive detects dead ones). Default 15 s.
	Heartbeat time.Duration
	// Gather is the shortest time between reads while messages come fast, so that one wake-up serves all messages that
	// arrive in that time. A message is not delayed if it comes at least 2 * Gather after the one before, if part of it
	// has arrived, or after a read of gatherBelow bytes or more. Default 2 ms, negative for none.
	Gather time.Duration
}

func (o Options) withDefaults() Options {
	o.Type = cmp.Or(o.Type, Sub)
	o.MaxMessage, o.MaxFrames = cmp.Or(max(o.MaxMessage, 0), 64<<20), cmp.Or(max(o.MaxFrames, 0), 16)
	o.MinBuffer, o.MaxBuffer = cmp.Or(max(o.MinBuffer, 0), 4<<10), cmp.Or(max(o.MaxBuffer, 0), 256<<10)
	o.HandshakeTimeout, o.Heartbeat = cmp.Or(max(o.HandshakeTimeout, 0), 5*time.Second), cmp.Or(max(o.Heartbeat, 0), 15*time.Second)
	o.Gather = cmp.Or(o.Gather, 2*time.Millisecond)
	return o
}

// Message is one multipart message. Its frames refer to the connection's buffer and are valid until the next Recv.
type Message struct {
	Frames [][]byte
}

// Conn is one connection after its handshake. One goroutine may receive while others send; Close
// may be called from any goroutine.
type Conn struct {
	nc    net.Conn
	opt   Options
	minor byte // the peer's ZMTP 3 minor version

	// Admit, if set before the first Recv, is called before a message of more than AdmitAbove bytes is received. Its error
	// is Recv's.
	Admit      func() error
	AdmitAbove int

	buf []byte
	// Invariant: 0 <= r <= p <= w <= len(buf). buf[r:w] is received and not yet returned,
	// buf[r:p] of it is parsed into spans.
	r, p, w int
	spans   []span
	frames  [][]byte // of the message returned last
	size    int      // of the message that Admit has admitted, 0 if none

	filled time.Time // when data was read last
	fast   bool      // it came soon after the data before, and left nothing in the socket
	until  time.Time // the read deadline

	sendMu sync.Mutex
	out    []byte
}

// span is a frame's position, relative to Conn.r (the buffer may move).
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

// CheckEndpoint returns an error if Dial and Listen do not support the endpoint.
func CheckEndpoint(endpoint string) error {
	_, _, err := network(endpoint)
	return err
}

// Dial connects to an endpoint and performs the handshake. ctx limits the dialing only.
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

// NewConn performs the handshake on an existing connection. On an error it closes nc.
func NewConn(nc net.Conn, opt Options) (*Conn, error) {
	c := &Conn{nc: nc, opt: opt.withDefaults()}
	if err := c.handshake(); err != nil {
		_ = nc.Close()
		return nil, err
	}
	c.buf = make([]byte, c.opt.MinBuffer)
	return c, nil
}

// Close closes the connection and ends a Recv that waits on it.
func (c *Conn) Close() error { return c.nc.Close() }

// Subscribe requests the messages whose first frame begins with topic: by command to a peer of
// version 3.1, by message to an older one.
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

// Recv waits for the next message and answers commands meanwhile. Any error is final for the connection, except a
// timeout if deadline is set: Recv may be called again then without loss of data.
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

// consume drops the message that was returned last.
func (c *Conn) consume() {
	if len(c.frames) > 0 {
		c.r = c.p
		clear(c.frames) // they would keep a buffer that is replaced
		c.spans, c.frames, c.size = c.spans[:0], c.frames[:0], 0
	}
	if c.r == c.w {
		c.r, c.p, c.w = 0, 0, 0
		if len(c.buf) > c.opt.MaxBuffer {
			c.buf = make([]byte, c.opt.MaxBuffer)
		}
	}
}

// parse parses the frames that have arrived completely and reports whether they form a message.
func (c *Conn) parse() (bool, error) {
	for {
		h, ok, err := parseHeader(c.buf[c.p:c.w], c.opt.MaxMessage)
		if err != nil {
			return false, err
		}
		if !ok {
			return false, nil
		}
		total := c.p - c.r + h.head + h.size
		if total > c.opt.MaxMessage {
			return false, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, total, c.opt.MaxMessage)
		}
		if c.Admit != nil && c.size == 0 && total > c.AdmitAbove {
			if err := c.Admit(); err != nil {
				return false, err
			}
			c.size = total
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

// message returns the frames of the parsed spans.
func (c *Conn) message() Message {
	for _, s := range c.spans {
		c.frames = append(c.frames, c.buf[c.r+s.from:c.r+s.to:c.r+s.to])
	}
	return Message{Frames: c.frames}
}

// command answers PING. PONG and unknown commands need no answer; their bytes alone show that the peer is alive.
func (c *Conn) command(body []byte) error {
	name, data, err := parseCommand(body)
	if err != nil {
		return err
	}
	switch name {
	case "PING":
		// PING carries a 2-byte TTL and up to 16 bytes that PONG must return.
		if len(data) < 2 || len(data) > 2+16 {
			return fmt.Errorf("%w: PING of %d bytes", ErrProtocol, len(data))
		}
		return c.write(func(b []byte) []byte { return appendCommand(b, "PONG", data[2:]) })
	case "ERROR":
		return fmt.Errorf("%w: peer sent ERROR", ErrProtocol)
	}
	return nil
}

// gatherBelow is the smallest read, in bytes, after which the next one is not delayed: its
// messages come faster than they can be gathered.
const gatherBelow = 64 << 10

// fill makes room in the buffer and reads once.
func (c *Conn) fill(deadline time.Time) error {
	c.room()
	now := time.Now()
	if wait := c.opt.Gather - now.Sub(c.filled); c.fast && c.w == 0 && wait > 0 {
		time.Sleep(wait)
		now = time.Now()
	}
	for pinged := false; ; now = time.Now() {
		until := now.Add(c.opt.Heartbeat)
		last := !deadline.IsZero() && deadline.Before(until)
		if last {
			until = deadline
		}
		// Setting a deadline costs as much as a small message, so one that is up to a quarter of a heartbeat early is kept.
		if last || until.Sub(c.until) > c.opt.Heartbeat/4 {
			if err := c.nc.SetReadDeadline(until); err != nil {
				return fmt.Errorf("zmtp: %w", err)
			}
			c.until = until
		}
		n, err := c.nc.Read(c.buf[c.w:])
		if n > 0 {
			c.w += n
			was := c.filled
			c.filled = time.Now()
			c.fast = c.filled.Sub(was) < 2*c.opt.Gather && c.w < len(c.buf) && n < gatherBelow
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

// beat runs after a heartbeat of silence: it shrinks an empty buffer and sends a PING to a peer that supports it.
func (c *Conn) beat() (pinged bool, err error) {
	if c.w == 0 && len(c.buf) > c.opt.MinBuffer {
		c.buf = make([]byte, c.opt.MinBuffer)
	}
	if c.minor == 0 {
		return false, nil
	}
	// The TTL (tenths of a second) is what we require of the peer; 0 requires nothing.
	return true, c.write(func(b []byte) []byte { return appendCommand(b, "PING", []byte{0, 0}) })
}

// room makes space after the received bytes: it moves a partial message to the front, and doubles a buffer that is full
// or mostly one message. It does not trust the length in a frame's head before the bytes have arrived, unless it is
// admitted.
func (c *Conn) room() {
	if c.w < len(c.buf) && (c.r == 0 || len(c.buf)-c.w >= len(c.buf)/4) && c.size <= len(c.buf) {
		return
	}
	live, to := c.w-c.r, c.buf
	if c.size > len(c.buf) {
		to = make([]byte, c.size)
	} else if live > len(c.buf)/2 || c.w == len(c.buf) && len(c.buf) < c.opt.MaxBuffer {
		to = make([]byte, 2*len(c.buf))
	}
	copy(to, c.buf[c.r:c.w])
	c.buf, c.p, c.w, c.r = to, c.p-c.r, live, 0
}

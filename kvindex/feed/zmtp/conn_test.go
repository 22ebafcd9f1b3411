package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	zmq "github.com/go-zeromq/zmq4"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

// The publisher of go-zeromq, the peer in the tests, leaves a goroutine behind when it is
// closed.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubMWriter).run"))
}

// peerConn plays the peer by hand: it performs the handshake as typ with the given minor version
// and then passes the raw connection to play.
func peerConn(t testing.TB, minor byte, typ string, opt Options, play func(net.Conn)) *Conn {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		g := greeting
		g[11] = minor
		_, _ = nc.Write(g[:])
		_, _ = nc.Write(appendCommand(nil, "READY", appendProperty(nil, "Socket-Type", typ)))
		_, _ = io.ReadFull(nc, make([]byte, greetingSize))
		play(nc)
	}()
	c, err := Dial(t.Context(), "tcp://"+l.Addr().String(), opt)
	t.Cleanup(func() {
		if c != nil {
			_ = c.Close()
		}
		_ = l.Close()
		<-done
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// readFrame reads one frame from the peer's side.
func readFrame(r io.Reader) (header, []byte, error) {
	var head []byte
	for {
		b := make([]byte, 1)
		if _, err := io.ReadFull(r, b); err != nil {
			return header{}, nil, err
		}
		head = append(head, b[0])
		h, ok, err := parseHeader(head, 1<<30)
		if err != nil {
			return header{}, nil, err
		}
		if ok {
			body := make([]byte, h.size)
			_, err := io.ReadFull(r, body)
			return h, body, err
		}
	}
}

func encode(msg [][]byte) []byte {
	var b []byte
	for i, f := range msg {
		var flags byte
		if i < len(msg)-1 {
			flags = flagMore
		}
		b = appendFrame(b, flags, f)
	}
	return b
}

// Any messages, with commands anywhere between their frames and split into any pieces, arrive
// unchanged, whatever the buffer's size.
func TestMessagesSurviveAnyFraming(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		frame := rapid.OneOf(rapid.SliceOfN(rapid.Byte(), 0, 40), rapid.Map(rapid.IntRange(250, 3000), func(n int) []byte { return bytes.Repeat([]byte{byte(n)}, n) }))
		msgs := rapid.SliceOfN(rapid.SliceOfN(frame, 1, 5), 1, 8).Draw(rt, "messages")
		var wire []byte
		for _, m := range msgs {
			for i, f := range m {
				if rapid.Bool().Draw(rt, "command") {
					wire = appendCommand(wire, "PING", []byte{0, 1, 'x'})
				}
				var flags byte
				if i < len(m)-1 {
					flags = flagMore
				}
				wire = appendFrame(wire, flags, f)
			}
		}
		pieces := rapid.SliceOfN(rapid.IntRange(1, 700), 1, 6).Draw(rt, "pieces")
		ours, theirs := net.Pipe()
		go func() {
			for i := 0; len(wire) > 0; i++ {
				n := min(len(wire), pieces[i%len(pieces)])
				if _, err := theirs.Write(wire[:n]); err != nil {
					return
				}
				wire = wire[n:]
			}
		}()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		c := &Conn{nc: ours, opt: Options{MinBuffer: 16, MaxBuffer: 64, Gather: -1}.withDefaults(), buf: make([]byte, 16)}
		for i, want := range msgs {
			m, err := c.Recv(time.Time{})
			if err != nil {
				rt.Fatalf("message %d: %v", i, err)
			}
			if len(m.Frames) != len(want) {
				rt.Fatalf("message %d: got %d frames, want %d", i, len(m.Frames), len(want))
			}
			for j := range want {
				if !bytes.Equal(m.Frames[j], want[j]) {
					rt.Fatalf("message %d frame %d differs", i, j)
				}
			}
		}
		_ = theirs.Close()
		if m, err := c.Recv(time.Time{}); err == nil {
			rt.Fatalf("a message after the end: %q", m.Frames)
		}
		_ = c.Close()
	})
}

func TestSubscribeByVersion(t *testing.T) {
	for minor, command := range map[byte]bool{0: false, 1: true} {
		got := make(chan string, 1)
		c := peerConn(t, minor, "PUB", Options{}, func(nc net.Conn) {
			_, _, _ = readFrame(nc) // READY
			h, body, err := readFrame(nc)
			got <- fmt.Sprintf("%v %q %v", h.flags&flagCommand != 0, body, err)
		})
		if err := c.Subscribe("kv"); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("%v %q <nil>", false, "\x01kv")
		if command {
			want = fmt.Sprintf("%v %q <nil>", true, "\x09SUBSCRIBEkv")
		}
		if s := <-got; s != want {
			t.Errorf("minor version %d: got %s, want %s", minor, s, want)
		}
	}
}

func TestPingIsAnsweredWithItsContext(t *testing.T) {
	got := make(chan []byte, 1)
	c := peerConn(t, 1, "XPUB", Options{}, func(nc net.Conn) {
		_, _, _ = readFrame(nc)
		_, _ = nc.Write(appendCommand(nil, "PING", []byte("\x00\x0aabc")))
		_, body, _ := readFrame(nc)
		got <- body
		_, _ = nc.Write(encode([][]byte{[]byte("after")}))
	})
	m, err := c.Recv(time.Time{})
	if err != nil || string(m.Frames[0]) != "after" {
		t.Fatalf("%v, %v", m, err)
	}
	if b := <-got; string(b) != "\x04PONGabc" {
		t.Fatalf("answer %q", b)
	}
}

// A silent peer gets a PING, and its connection is closed if it does not react.
func TestSilentPeerIsPingedThenGivenUp(t *testing.T) {
	pings := make(chan string, 4)
	c := peerConn(t, 1, "PUB", Options{Heartbeat: 30 * time.Millisecond}, func(nc net.Conn) {
		for {
			h, body, err := readFrame(nc)
			if err != nil {
				return
			}
			if name, _, _ := parseCommand(body); h.flags&flagCommand != 0 && name != "READY" {
				pings <- name
			}
		}
	})
	if _, err := c.Recv(time.Time{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("error %v", err)
	}
	if name := <-pings; name != "PING" {
		t.Fatalf("got %s", name)
	}
}

// A timeout of the caller loses nothing: the partial message is kept until the rest arrives.
func TestTimeoutKeepsTheHalfMessage(t *testing.T) {
	more := make(chan struct{})
	wire := encode([][]byte{[]byte("head"), bytes.Repeat([]byte("x"), 500)})
	c := peerConn(t, 0, "PUB", Options{MinBuffer: 16}, func(nc net.Conn) {
		_, _ = nc.Write(wire[:100])
		<-more
		_, _ = nc.Write(wire[100:])
	})
	if _, err := c.Recv(time.Now().Add(20 * time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("error %v", err)
	}
	close(more)
	m, err := c.Recv(time.Time{})
	if err != nil || len(m.Frames) != 2 || len(m.Frames[1]) != 500 {
		t.Fatalf("%v, %v", m, err)
	}
}

func TestBoundsAndRefusals(t *testing.T) {
	huge := binary.BigEndian.AppendUint64([]byte{flagLong}, 1<<40)
	tests := map[string]struct {
		wire []byte
		want error
	}{
		"a frame that promises a terabyte": {huge, ErrTooLarge},
		"a message of many frames":         {encode(make([][]byte, 20)), ErrTooLarge},
		"many frames, one message":         {encode([][]byte{make([]byte, 600), make([]byte, 600)}), ErrTooLarge},
		"unknown flags":                    {[]byte{0x08, 0}, ErrProtocol},
		"a command with more":              {[]byte{flagCommand | flagMore, 0}, ErrProtocol},
		"a command without a name":         {[]byte{flagCommand, 0}, ErrProtocol},
		"a PING with too much context":     {appendCommand(nil, "PING", make([]byte, 30)), ErrProtocol},
		"an ERROR":                         {appendCommand(nil, "ERROR", []byte("\x02no")), ErrProtocol},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := peerConn(t, 0, "PUB", Options{MaxMessage: 1000}, func(nc net.Conn) { _, _ = nc.Write(tt.wire) })
			if _, err := c.Recv(time.Time{}); !errors.Is(err, tt.want) {
				t.Fatalf("got error %v, want %v", err, tt.want)
			}
		})
	}
}

func TestHandshakeRefusals(t *testing.T) {
	old, curve := greeting, greeting
	old[10] = 2
	copy(curve[12:], "CURVE")
	tests := map[string]struct {
		wire []byte
		want string
	}{
		"http":         {[]byte(strings.Repeat("HTTP/1.1 400 Bad Request\r\n\r\n", 3)), "not a ZMTP greeting"},
		"version 2":    {old[:], "need 3.0"},
		"mechanism":    {curve[:], `mechanism "CURVE"`},
		"wrong socket": {append(bytes.Clone(greeting[:]), appendCommand(nil, "READY", appendProperty(nil, "socket-type", "ROUTER"))...), `peer is a "ROUTER"`},
		"refused":      {append(bytes.Clone(greeting[:]), appendCommand(nil, "ERROR", []byte("\x04busy"))...), "busy"},
		"a message":    {append(bytes.Clone(greeting[:]), 0, 1, 'x'), "before READY"},
		"bad metadata": {append(bytes.Clone(greeting[:]), appendCommand(nil, "READY", []byte{3, 'a'})...), "cut off"},
		"cut off":      {greeting[:20], "EOF"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			ours, theirs := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			go func() { _, _ = theirs.Write(tt.wire); _ = theirs.Close() }()
			if _, err := NewConn(ours, Options{}); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestEndpoints(t *testing.T) {
	for in, want := range map[string]string{
		"tcp://127.0.0.1:5557": "tcp 127.0.0.1:5557 <nil>", "tcp://*:5557": "tcp :5557 <nil>", "tcp://[::1]:1": "tcp [::1]:1 <nil>",
		"ipc:///tmp/x": "unix /tmp/x <nil>",
	} {
		n, a, err := network(in)
		if got := fmt.Sprint(n, " ", a, " ", err); got != want {
			t.Errorf("%s: got %s, want %s", in, got, want)
		}
	}
	for _, in := range []string{"", "5557", "udp://x:1", "tcp://", "inproc://x", "tcp://x", "tcp://x:", "tcp://x:65536", "tcp://x:-1", "tcp://x:5557/y", "tcp://x:http", "tcp://::1:5557"} {
		if CheckEndpoint(in) == nil {
			t.Errorf("%q: got no error", in)
		}
	}
}

// A grown buffer shrinks after a heartbeat of silence.
func TestBufferShrinksWhenQuiet(t *testing.T) {
	quiet := make(chan struct{})
	c := peerConn(t, 0, "PUB", Options{Heartbeat: 20 * time.Millisecond}, func(nc net.Conn) {
		_, _ = nc.Write(encode([][]byte{make([]byte, 1<<20)}))
		<-quiet
	})
	if m, err := c.Recv(time.Time{}); err != nil || len(m.Frames[0]) != 1<<20 {
		t.Fatal(err)
	}
	if len(c.buf) < 1<<20 {
		t.Fatalf("buffer of %d bytes holds a megabyte", len(c.buf))
	}
	if _, err := c.Recv(time.Now().Add(300 * time.Millisecond)); err == nil {
		t.Fatal("got a message, want none")
	}
	close(quiet)
	if len(c.buf) != c.opt.MinBuffer {
		t.Fatalf("buffer has %d bytes after silence", len(c.buf))
	}
}

// A large message is not kept while the next one is waited for.
func TestALargeMessageIsNotKept(t *testing.T) {
	done, large := make(chan struct{}), encode([][]byte{{}, make([]byte, 8), make([]byte, 32<<20)})
	c := peerConn(t, 0, "PUB", Options{}, func(nc net.Conn) {
		_, _ = nc.Write(large)
		<-done
	})
	defer close(done)
	live := func() int64 {
		var now runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&now)
		return int64(now.HeapAlloc)
	}
	before := live()
	if m, err := c.Recv(time.Time{}); err != nil || len(m.Frames) != 3 || live()-before < 32<<20 {
		t.Fatalf("got %d frames, %v, want 3 with 32 MiB", len(m.Frames), err)
	}
	if _, err := c.Recv(time.Now().Add(10 * time.Millisecond)); err == nil {
		t.Fatal("got a message, want none")
	}
	if kept := live() - before; kept > 1<<20 {
		t.Errorf("got %d bytes kept, want at most a buffer of 256 KiB", kept)
	}
	runtime.KeepAlive(c)
	runtime.KeepAlive(large)
}

// go-zeromq is the peer, over tcp and ipc, with both directions of connecting.
func TestInteropPub(t *testing.T) {
	for _, endpoint := range []string{"tcp://127.0.0.1:0", "ipc://" + filepath.Join(t.TempDir(), "pub")} {
		t.Run(endpoint[:3], func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			pub := zmq.NewPub(ctx)
			defer pub.Close()
			if err := pub.Listen(endpoint); err != nil {
				t.Fatal(err)
			}
			if pub.Addr() != nil && endpoint[:3] == "tcp" {
				endpoint = "tcp://" + pub.Addr().String()
			}
			c, err := Dial(ctx, endpoint, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := c.Subscribe("kv"); err != nil {
				t.Fatal(err)
			}
			checkStream(t, ctx, pub, c)
		})
	}
}

func TestInteropPubDials(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	l, err := Listen("tcp://127.0.0.1:0", Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	pub := zmq.NewPub(ctx)
	defer pub.Close()
	dialed := make(chan error, 1)
	go func() { dialed <- pub.Dial("tcp://" + l.Addr().String()) }()
	nc, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewConn(nc, l.Options())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := <-dialed; err != nil {
		t.Fatal(err)
	}
	if err := c.Subscribe(""); err != nil {
		t.Fatal(err)
	}
	checkStream(t, ctx, pub, c)
}

// checkStream publishes until the subscription has taken effect and then checks that no message
// is lost or changed.
func checkStream(t *testing.T, ctx context.Context, pub zmq.Socket, c *Conn) {
	t.Helper()
	const n = 300
	sent := make(chan error, 1)
	started := make(chan struct{})
	go func() {
		for i := uint64(0); ; i++ {
			select {
			case <-started:
				for k := range uint64(n) {
					body := bytes.Repeat([]byte{byte(k)}, int(k*7))
					if err := pub.SendMulti(zmq.NewMsgFrom([]byte("kv"), binary.BigEndian.AppendUint64(nil, k), body)); err != nil {
						sent <- err
						return
					}
				}
				sent <- nil
				return
			case <-ctx.Done():
				sent <- ctx.Err()
				return
			default:
				_ = pub.SendMulti(zmq.NewMsgFrom([]byte("kv"), []byte("warm")))
				time.Sleep(time.Millisecond)
			}
		}
	}()
	if _, err := c.Recv(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	close(started)
	for k := uint64(0); k < n; {
		m, err := c.Recv(time.Now().Add(5 * time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Frames) == 2 {
			continue
		}
		if len(m.Frames) != 3 || binary.BigEndian.Uint64(m.Frames[1]) != k || !bytes.Equal(m.Frames[2], bytes.Repeat([]byte{byte(k)}, int(k*7))) {
			t.Fatalf("message %d arrived as %d frames % x", k, len(m.Frames), m.Frames[1])
		}
		k++
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}

func TestInteropRouter(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	router := zmq.NewRouter(ctx)
	defer router.Close()
	if err := router.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	c, err := Dial(ctx, "tcp://"+router.Addr().String(), Options{Type: Dealer})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Send(nil, []byte("start")); err != nil {
		t.Fatal(err)
	}
	m, err := router.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Frames) != 3 || len(m.Frames[1]) != 0 || string(m.Frames[2]) != "start" {
		t.Fatalf("router got %q", m.Frames)
	}
	for i := range 3 {
		if err := router.SendMulti(zmq.NewMsgFrom(m.Frames[0], nil, []byte("topic"), []byte{byte(i)}, bytes.Repeat([]byte("p"), 300*i))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 {
		got, err := c.Recv(time.Now().Add(5 * time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Frames) != 4 || len(got.Frames[0]) != 0 || got.Frames[2][0] != byte(i) || len(got.Frames[3]) != 300*i {
			t.Fatalf("reply %d: %q", i, got.Frames)
		}
	}
}

// messagesOf reads whole messages of a byte stream as the protocol's text says, without a connection.
func messagesOf(wire []byte, opt Options) (out [][][]byte) {
	var frames [][]byte
	for total := 0; len(wire) >= 2; {
		flags, head, size := wire[0], 2, uint64(wire[1])
		if flags > 6 || flags&flagLong != 0 && len(wire) < 9 || flags&flagCommand != 0 && flags&flagMore != 0 {
			break
		}
		if flags&flagLong != 0 {
			head, size = 9, binary.BigEndian.Uint64(wire[1:])
		}
		if total += head; size > uint64(opt.MaxMessage) || total+int(size) > opt.MaxMessage || len(wire)-head < int(size) {
			break
		}
		total += int(size)
		frame := wire[head : head+int(size)]
		wire = wire[head+int(size):]
		if flags&flagCommand != 0 {
			name, data, err := parseCommand(frame)
			if err != nil || name == "ERROR" || name == "PING" && (len(data) < 2 || len(data) > 18) {
				break
			}
			if len(frames) == 0 {
				total = 0
			}
			continue
		}
		if len(frames) == opt.MaxFrames {
			break
		}
		if frames = append(frames, frame); flags&flagMore == 0 {
			out = append(out, frames)
			frames, total = nil, 0
		}
	}
	return out
}

// recorded is a connection that received what in holds, and whose peer takes everything.
type recorded struct{ in *bytes.Reader }

func (r recorded) Read(b []byte) (int, error)     { return r.in.Read(b) }
func (recorded) Write(b []byte) (int, error)      { return len(b), nil }
func (recorded) Close() error                     { return nil }
func (recorded) LocalAddr() net.Addr              { return nil }
func (recorded) RemoteAddr() net.Addr             { return nil }
func (recorded) SetDeadline(time.Time) error      { return nil }
func (recorded) SetReadDeadline(time.Time) error  { return nil }
func (recorded) SetWriteDeadline(time.Time) error { return nil }

func FuzzConn(f *testing.F) {
	f.Add(encode([][]byte{[]byte("kv"), make([]byte, 8), make([]byte, 300)}))
	f.Add(appendCommand(nil, "PING", []byte{0, 1, 2}))
	f.Add(append(appendFrame(nil, flagMore, []byte("a")), appendCommand(nil, "PONG", nil)...))
	f.Add(append(append(appendFrame(nil, flagMore, []byte("a")), appendCommand(nil, "PING", []byte{0, 1, 2})...), encode([][]byte{[]byte("b"), {}})...))
	f.Add(bytes.Repeat(appendFrame(nil, flagMore, []byte("a")), 20))
	f.Add([]byte{flagLong, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, wire []byte) {
		c := &Conn{nc: recorded{bytes.NewReader(wire)}, opt: Options{MinBuffer: 8, MaxBuffer: 32, MaxMessage: 1 << 12}.withDefaults(), buf: make([]byte, 8)}
		want := messagesOf(wire, c.opt)
		for i := 0; ; i++ {
			m, err := c.Recv(time.Time{})
			if err != nil {
				if i != len(want) {
					t.Fatalf("%x: got %d messages and %v, want %d messages", wire, i, err, len(want))
				}
				break
			}
			if i >= len(want) || !slices.EqualFunc(m.Frames, want[i], bytes.Equal) {
				t.Fatalf("%x: message %d: got %x, want those of %x", wire, i, m.Frames, want)
			}
			if len(c.buf) > 4*c.opt.MaxMessage {
				t.Fatalf("got a buffer of %d bytes for messages of at most %d", len(c.buf), c.opt.MaxMessage)
			}
		}
	})
}

func FuzzHandshake(f *testing.F) {
	f.Add(append(bytes.Clone(greeting[:]), appendCommand(nil, "READY", appendProperty(nil, "Socket-Type", "PUB"))...))
	f.Add(append(bytes.Clone(greeting[:]), appendCommand(nil, "ERROR", []byte("\x04busy"))...))
	f.Add(append(bytes.Clone(greeting[:]), appendCommand(nil, "READY", appendProperty(nil, "Socket-Type", "REQ"))[:9]...)) // cut, and of a kind that sends nothing
	f.Fuzz(func(t *testing.T, wire []byte) {
		ours, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		go func() { _, _ = theirs.Write(wire); _ = theirs.Close() }()
		c, err := NewConn(ours, Options{})
		if err == nil {
			if len(wire) < greetingSize+2 {
				t.Fatal("got no error for an incomplete handshake")
			}
			_ = c.Close()
		}
	})
}

// timedConn sends messages of one empty frame at the given times. A read returns all that were sent
// since the last one; if there are none it waits for one.
type timedConn struct {
	net.Conn
	at     []time.Time
	reads  int
	oldest time.Duration // the longest time that a sent message was not read
}

func (s *timedConn) SetReadDeadline(time.Time) error { return nil }

func (s *timedConn) Read(b []byte) (n int, err error) {
	s.reads++
	if len(s.at) == 0 {
		return 0, io.EOF
	}
	s.oldest = max(s.oldest, time.Since(s.at[0]))
	time.Sleep(time.Until(s.at[0]))
	for now := time.Now(); len(s.at) > 0 && !s.at[0].After(now) && n+2 <= len(b); n += 2 {
		s.at = s.at[1:]
		copy(b[n:], appendFrame(nil, 0, nil))
	}
	return n, nil
}

// One read serves several messages that come fast, which wait for at most 2 ms; rare ones do not wait.
func TestReadsAreGathered(t *testing.T) {
	const messages = 100
	receive := func(gather time.Duration, interval func(i int) time.Duration) (s *timedConn) {
		synctest.Test(t, func(t *testing.T) {
			s = &timedConn{}
			at := time.Now().Add(time.Second)
			for i := range messages {
				s.at = append(s.at, at)
				at = at.Add(interval(i))
			}
			c := &Conn{nc: s, opt: Options{Gather: gather}.withDefaults(), buf: make([]byte, 4096)}
			for range messages {
				if _, err := c.Recv(time.Time{}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(50 * time.Microsecond) // handling it
			}
		})
		return s
	}
	every := func(d time.Duration) func(int) time.Duration { return func(int) time.Duration { return d } }
	for _, c := range []struct {
		name     string
		gather   time.Duration
		interval func(i int) time.Duration
		reads    int
		oldest   time.Duration
	}{
		{"fast, by default", 0, every(500 * time.Microsecond), messages / 4, 2 * time.Millisecond},
		{"fast, gathered for 5 ms", 5 * time.Millisecond, every(500 * time.Microsecond), messages / 10, 5 * time.Millisecond},
		{"fast, without gathering", -1, every(500 * time.Microsecond), messages, 0},
		{"rare", 0, every(4 * time.Millisecond), messages, 0},
		{"a rare one after two fast ones", 0, func(i int) time.Duration { return time.Duration(i%2*20+1) * time.Millisecond }, messages, 0},
	} {
		s := receive(c.gather, c.interval)
		if s.reads > c.reads+2 || s.oldest > c.oldest {
			t.Errorf("%s: got %d reads, the longest wait %v, want at most %d and %v", c.name, s.reads, s.oldest, c.reads+2, c.oldest)
		}
	}
}

func TestNegativeOptionsMeanTheDefaults(t *testing.T) {
	got := Options{MaxMessage: -1, MaxFrames: -1, MinBuffer: -1, MaxBuffer: -1, HandshakeTimeout: -1, Heartbeat: -1, Gather: -1}.withDefaults()
	want := Options{}.withDefaults()
	want.Gather = -1 // none
	if got.MaxMessage != want.MaxMessage || got.MaxFrames != want.MaxFrames || got.MinBuffer != want.MinBuffer || got.MaxBuffer != want.MaxBuffer ||
		got.HandshakeTimeout != want.HandshakeTimeout || got.Heartbeat != want.Heartbeat || got.Gather != want.Gather {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

package enginesim

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"
)

// This file speaks ZMTP 3.1 with the NULL mechanism, as libzmq does, for the two sockets that an engine has: a PUB and a
// replay ROUTER. A wire of our own lets a fault cut connections and lets tests wait for a subscription.

const (
	zmtpMore    = 1
	zmtpLong    = 2
	zmtpCommand = 4
	zmtpMaxSize = 1 << 20 // of a frame that a client may send
)

// zmtpConn is a connection after its handshake. Reads are for one goroutine, writes are serialised.
type zmtpConn struct {
	net.Conn
	in *bufio.Reader

	mu  sync.Mutex
	out *bufio.Writer
}

// zmtpHandshake greets as a server of the socket type.
func zmtpHandshake(c net.Conn, socket string) (*zmtpConn, error) {
	z := &zmtpConn{Conn: c, in: bufio.NewReader(c), out: bufio.NewWriterSize(c, 64<<10)}
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10], greeting[11] = 0xFF, 0x7F, 3, 1
	copy(greeting[12:], "NULL")
	if _, err := c.Write(greeting); err != nil {
		return nil, err
	}
	peer := make([]byte, 64)
	if _, err := io.ReadFull(z.in, peer); err != nil {
		return nil, err
	}
	if peer[0] != 0xFF || peer[9]&1 != 1 || peer[10] < 3 || !bytes.HasPrefix(peer[12:], []byte("NULL\x00")) {
		return nil, errors.New("zmtp: peer does not speak ZMTP 3 with NULL")
	}
	ready := append([]byte{5}, "READY"...)
	ready = append(append(ready, 11), "Socket-Type"...)
	ready = binary.BigEndian.AppendUint32(ready, uint32(len(socket)))
	ready = append(ready, socket...)
	if err := z.send(zmtpCommand, ready); err != nil {
		return nil, err
	}
	flags, body, err := z.frame()
	if err != nil {
		return nil, err
	}
	if flags&zmtpCommand == 0 || !bytes.HasPrefix(body, []byte("\x05READY")) {
		return nil, errors.New("zmtp: no READY")
	}
	return z, c.SetDeadline(time.Time{})
}

func (z *zmtpConn) frame() (flags byte, body []byte, err error) {
	flags, err = z.in.ReadByte()
	if err != nil {
		return 0, nil, err
	}
	var size uint64
	if flags&zmtpLong != 0 {
		var b [8]byte
		if _, err := io.ReadFull(z.in, b[:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(b[:])
	} else {
		b, err := z.in.ReadByte()
		if err != nil {
			return 0, nil, err
		}
		size = uint64(b)
	}
	if size > zmtpMaxSize {
		return 0, nil, fmt.Errorf("zmtp: frame of %d bytes", size)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(z.in, body)
	return flags, body, err
}

// message reads a whole message; commands are answered or skipped, subscriptions come as their old message form.
func (z *zmtpConn) message() ([][]byte, error) {
	var frames [][]byte
	for {
		flags, body, err := z.frame()
		if err != nil {
			return nil, err
		}
		if flags&zmtpCommand != 0 {
			switch {
			case bytes.HasPrefix(body, []byte("\x09SUBSCRIBE")):
				return [][]byte{append([]byte{1}, body[10:]...)}, nil
			case bytes.HasPrefix(body, []byte("\x06CANCEL")):
				return [][]byte{append([]byte{0}, body[7:]...)}, nil
			case bytes.HasPrefix(body, []byte("\x04PING")) && len(body) >= 7:
				if err := z.send(zmtpCommand, append([]byte("\x04PONG"), body[7:]...)); err != nil {
					return nil, err
				}
			}
			continue
		}
		if frames = append(frames, body); len(frames) > 16 {
			return nil, errors.New("zmtp: too many frames")
		}
		if flags&zmtpMore == 0 {
			return frames, nil
		}
	}
}

// send writes frames as one message.
func (z *zmtpConn) send(flags byte, frames ...[]byte) error {
	z.mu.Lock()
	defer z.mu.Unlock()
	for i, f := range frames {
		head := flags
		if i < len(frames)-1 {
			head |= zmtpMore
		}
		if len(f) > 255 {
			_ = z.out.WriteByte(head | zmtpLong)
			_ = binary.Write(z.out, binary.BigEndian, uint64(len(f)))
		} else {
			_, _ = z.out.Write([]byte{head, byte(len(f))})
		}
		_, _ = z.out.Write(f)
	}
	return z.out.Flush()
}

// zmtpAddress turns tcp://host:port and ipc://path into a network and an address; offset is added to a port that is
// not 0.
func zmtpAddress(endpoint string, offset int) (network, address string, err error) {
	if path, ok := strings.CutPrefix(endpoint, "ipc://"); ok {
		if offset > 0 {
			path = fmt.Sprintf("%s_dp%d", path, offset)
		}
		return "unix", path, nil
	}
	hostPort, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", "", fmt.Errorf("endpoint %q: only tcp:// and ipc:// are known", endpoint)
	}
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	if host == "*" {
		host = ""
	}
	n, err := net.LookupPort("tcp", port)
	if err != nil {
		return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	if n != 0 {
		n += offset
	}
	return "tcp", net.JoinHostPort(host, fmt.Sprint(n)), nil
}

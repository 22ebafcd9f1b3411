package enginesim

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// This file implements ZMTP 3.1 with the NULL mechanism, as libzmq does, for an engine's two sockets: a PUB and a
// replay ROUTER. Libraries expose neither their connections, which faults cut, nor the subscriptions that tests wait
// for.

const (
	zmtpMore    = 1
	zmtpLong    = 2
	zmtpCommand = 4
	zmtpMaxSize = 1 << 20 // of a frame that a client may send
)

// zmtpConn is a connection after its handshake. One goroutine may read while others send.
type zmtpConn struct {
	net.Conn
	in *bufio.Reader
	mu sync.Mutex // serialises sends
}

// zmtpHandshake greets as a server of the socket type.
func zmtpHandshake(c net.Conn, socket string) (*zmtpConn, error) {
	z := &zmtpConn{Conn: c, in: bufio.NewReader(c)}
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	var greeting, peer [64]byte
	copy(greeting[:], "\xFF\x00\x00\x00\x00\x00\x00\x00\x00\x7F\x03\x01NULL")
	if _, err := c.Write(greeting[:]); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(z.in, peer[:]); err != nil {
		return nil, err
	}
	if peer[0] != 0xFF || peer[9]&1 != 1 || peer[10] < 3 || !bytes.HasPrefix(peer[12:], []byte("NULL\x00")) {
		return nil, errors.New("zmtp: peer does not speak ZMTP 3 with NULL")
	}
	ready := binary.BigEndian.AppendUint32([]byte("\x05READY\x0BSocket-Type"), uint32(len(socket)))
	if err := z.send(zmtpCommand, append(ready, socket...)); err != nil {
		return nil, err
	}
	flags, body, err := z.frame()
	if err == nil && (flags&zmtpCommand == 0 || !bytes.HasPrefix(body, []byte("\x05READY"))) {
		err = errors.New("zmtp: no READY")
	}
	if err != nil {
		return nil, err
	}
	return z, c.SetDeadline(time.Time{})
}

func (z *zmtpConn) frame() (flags byte, body []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(z.in, head[:2]); err != nil {
		return 0, nil, err
	}
	size := uint64(head[1])
	if head[0]&zmtpLong != 0 {
		if _, err := io.ReadFull(z.in, head[2:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if size > zmtpMaxSize {
		return 0, nil, fmt.Errorf("zmtp: frame of %d bytes", size)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(z.in, body)
	return head[0], body, err
}

// message reads a whole message. Other commands are answered or skipped; a subscription is
// returned in its older form, as a message.
func (z *zmtpConn) message() ([][]byte, error) {
	var frames [][]byte
	for len(frames) <= 16 {
		flags, body, err := z.frame()
		if err != nil {
			return nil, err
		}
		if flags&zmtpCommand == 0 {
			if frames = append(frames, body); flags&zmtpMore == 0 {
				return frames, nil
			}
			continue
		}
		if topic, ok := bytes.CutPrefix(body, []byte("\x09SUBSCRIBE")); ok {
			return [][]byte{append([]byte{1}, topic...)}, nil
		}
		if topic, ok := bytes.CutPrefix(body, []byte("\x06CANCEL")); ok {
			return [][]byte{append([]byte{0}, topic...)}, nil
		}
		if context, ok := bytes.CutPrefix(body, []byte("\x04PING")); ok && len(context) >= 2 {
			if err := z.send(zmtpCommand, append([]byte("\x04PONG"), context[2:]...)); err != nil {
				return nil, err
			}
		}
	}
	return nil, errors.New("zmtp: too many frames")
}

// send writes frames as one message.
func (z *zmtpConn) send(flags byte, frames ...[]byte) error {
	var b []byte
	for i, f := range frames {
		head := flags
		if i < len(frames)-1 {
			head |= zmtpMore
		}
		if len(f) > 255 {
			b = binary.BigEndian.AppendUint64(append(b, head|zmtpLong), uint64(len(f)))
		} else {
			b = append(b, head, byte(len(f)))
		}
		b = append(b, f...)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	_, err := z.Write(b)
	return err
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
	n, bad := strconv.ParseUint(port, 10, 16)
	if err = errors.Join(err, bad); err != nil {
		return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	if n != 0 {
		n += uint64(offset)
	}
	return "tcp", net.JoinHostPort(strings.TrimPrefix(host, "*"), strconv.FormatUint(n, 10)), nil
}

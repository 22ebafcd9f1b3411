package zmtp

import (
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"time"
)

// SocketType is the type of the local socket.
type SocketType string

// Socket types of this package.
const (
	Sub    SocketType = "SUB"
	Dealer SocketType = "DEALER"
)

// peers maps socket types to the type of the peer (RFC 23).
var peers = map[SocketType]string{
	Sub:    " PUB XPUB ",
	Dealer: " ROUTER DEALER REP ",
}

const (
	greetingSize = 64
	// maxHandshakeCommand limits READY and ERROR, which carry a few short properties, in bytes.
	maxHandshakeCommand = 8 << 10
)

// greeting is the local greeting: signature, version 3.1, mechanism NULL, client.
var greeting = func() (g [greetingSize]byte) {
	g[0], g[9] = 0xff, 0x7f
	g[10], g[11] = 3, 1
	copy(g[12:32], "NULL")
	return g
}()

// handshake exchanges greetings and READY commands and learns the peer's minor version. Both
// sides send concurrently, so no order is assumed.
func (c *Conn) handshake() error {
	if err := c.nc.SetDeadline(time.Now().Add(c.opt.HandshakeTimeout)); err != nil {
		return err
	}
	if _, err := c.nc.Write(greeting[:]); err != nil {
		return fmt.Errorf("zmtp: send greeting: %w", err)
	}
	var theirs [greetingSize]byte
	if _, err := io.ReadFull(c.nc, theirs[:]); err != nil {
		return fmt.Errorf("zmtp: read greeting: %w", err)
	}
	if theirs[0] != 0xff || theirs[9]&1 != 1 {
		return fmt.Errorf("%w: not a ZMTP greeting", ErrProtocol)
	}
	if theirs[10] < 3 {
		return fmt.Errorf("%w: peer speaks ZMTP %d.%d, need 3.0 or later", ErrProtocol, theirs[10], theirs[11])
	}
	if m := strings.TrimRight(string(theirs[12:32]), "\x00"); m != "NULL" {
		return fmt.Errorf("%w: peer wants mechanism %q, only NULL is spoken", ErrProtocol, m)
	}
	c.minor = theirs[11]
	if theirs[10] > 3 {
		c.minor = 1
	}
	ready := appendProperty(nil, "Socket-Type", string(c.opt.Type))
	if c.opt.Type == Dealer {
		ready = appendProperty(ready, "Identity", "")
	}
	if _, err := c.nc.Write(appendCommand(nil, "READY", ready)); err != nil {
		return fmt.Errorf("zmtp: send READY: %w", err)
	}
	if err := c.readReady(); err != nil {
		return err
	}
	return c.nc.SetDeadline(time.Time{})
}

// readReady reads exactly the peer's first command, so that it consumes nothing of what follows.
func (c *Conn) readReady() error {
	var head [9]byte
	n := 1
	if _, err := io.ReadFull(c.nc, head[:1]); err != nil {
		return fmt.Errorf("zmtp: read READY: %w", err)
	}
	for {
		h, ok, err := parseHeader(head[:n], maxHandshakeCommand)
		if err != nil {
			return err
		}
		if ok {
			if h.flags&flagCommand == 0 {
				return fmt.Errorf("%w: a message before READY", ErrProtocol)
			}
			body := make([]byte, h.size)
			if _, err := io.ReadFull(c.nc, body); err != nil {
				return fmt.Errorf("zmtp: read READY: %w", err)
			}
			return c.checkReady(body)
		}
		if _, err := io.ReadFull(c.nc, head[n:n+1]); err != nil {
			return fmt.Errorf("zmtp: read READY: %w", err)
		}
		n++
	}
}

func (c *Conn) checkReady(body []byte) error {
	name, data, err := parseCommand(body)
	if err != nil {
		return err
	}
	switch name {
	case "READY":
	case "ERROR":
		why := ""
		if len(data) > 0 && len(data) > int(data[0]) {
			why = string(data[1 : 1+int(data[0])])
		}
		return fmt.Errorf("%w: peer refused: %q", ErrProtocol, why)
	default:
		return fmt.Errorf("%w: command %q instead of READY", ErrProtocol, name)
	}
	typ, err := property(data, "socket-type")
	if err != nil {
		return err
	}
	if typ == "" || !strings.Contains(peers[c.opt.Type], " "+typ+" ") {
		return fmt.Errorf("%w: peer is a %q, which does not go with %s (a replay port is a ROUTER, a port of events a PUB)", ErrProtocol, typ, c.opt.Type)
	}
	return nil
}

// appendProperty appends a metadata property: name with a length byte, value with a 4-byte length.
func appendProperty(b []byte, name, value string) []byte {
	b = append(b, byte(len(name)))
	b = append(b, name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// property returns the value of the named property (names are compared ignoring case) and
// validates the form of all properties.
func property(b []byte, want string) (string, error) {
	found := ""
	for len(b) > 0 {
		n := 1 + int(b[0])
		if len(b) < n+4 {
			return "", fmt.Errorf("%w: metadata property is cut off", ErrProtocol)
		}
		name, size := string(b[1:n]), binary.BigEndian.Uint32(b[n:])
		b = b[n+4:]
		if uint64(size) > uint64(len(b)) {
			return "", fmt.Errorf("%w: metadata property %q is cut off", ErrProtocol, name)
		}
		if strings.EqualFold(name, want) {
			found = string(b[:size])
		}
		b = b[size:]
	}
	return found, nil
}

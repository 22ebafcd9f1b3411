package zmtp

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Bits of a frame's first byte.
const (
	flagMore    = 0x01
	flagLong    = 0x02
	flagCommand = 0x04
	flagsKnown  = flagMore | flagLong | flagCommand
)

var (
	// ErrProtocol means that the peer violated the protocol; the connection is unusable.
	ErrProtocol = errors.New("zmtp: protocol error")
	// ErrTooLarge means that a frame or a message exceeds the configured limits.
	ErrTooLarge = errors.New("zmtp: message too large")
)

// header is a decoded frame head.
type header struct {
	flags byte
	head  int // length of the head itself: 2 or 9
	size  int // length of the body
}

// parseHeader reads a frame's head from b. ok is false if b is too short. Bodies longer than
// limit are rejected here, before anything is read or allocated.
func parseHeader(b []byte, limit int) (h header, ok bool, err error) {
	if len(b) == 0 {
		return header{}, false, nil
	}
	h.flags = b[0]
	if h.flags&^flagsKnown != 0 || h.flags&(flagCommand|flagMore) == flagCommand|flagMore {
		return header{}, false, fmt.Errorf("%w: frame flags %#x", ErrProtocol, h.flags)
	}
	if h.flags&flagLong == 0 {
		h.head = 2
		if len(b) < h.head {
			return header{}, false, nil
		}
		h.size = int(b[1])
	} else {
		h.head = 9
		if len(b) < h.head {
			return header{}, false, nil
		}
		n := binary.BigEndian.Uint64(b[1:9])
		if n > uint64(limit) {
			return header{}, false, fmt.Errorf("%w: frame of %d bytes, at most %d", ErrTooLarge, n, limit)
		}
		h.size = int(n)
	}
	if h.size > limit {
		return header{}, false, fmt.Errorf("%w: frame of %d bytes, at most %d", ErrTooLarge, h.size, limit)
	}
	return h, true, nil
}

// appendFrame appends a frame to b.
func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) < 256 {
		b = append(b, flags, byte(len(body)))
	} else {
		b = append(b, flags|flagLong)
		b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	}
	return append(b, body...)
}

// appendCommand appends a command frame: a name with its length, and data.
func appendCommand(b []byte, name string, data []byte) []byte {
	body := make([]byte, 0, 1+len(name)+len(data))
	body = append(body, byte(len(name)))
	body = append(body, name...)
	return appendFrame(b, flagCommand, append(body, data...))
}

// parseCommand splits a command's body into name and data.
func parseCommand(b []byte) (name string, data []byte, err error) {
	if len(b) < 1 || len(b) < 1+int(b[0]) {
		return "", nil, fmt.Errorf("%w: command of %d bytes", ErrProtocol, len(b))
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], nil
}

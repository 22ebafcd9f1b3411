package extproc

import (
	"errors"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

var errMalformed = errors.New("malformed protobuf")

// maxGroupDepth bounds the nesting of unknown groups.
const maxGroupDepth = 16

// cursor reads the bytes of a message that spans several buffers, without joining them.
type cursor struct {
	bufs mem.BufferSlice
	next int    // index of the buffer after cur
	cur  []byte // unread rest of bufs[next-1]
	pos  int    // bytes read
}

// fill makes cur non-empty and reports whether it could.
func (c *cursor) fill() bool {
	for len(c.cur) == 0 {
		if c.next == len(c.bufs) {
			return false
		}
		c.cur = c.bufs[c.next].ReadOnlyData()
		c.next++
	}
	return true
}

func (c *cursor) varint() (uint64, error) {
	var v uint64
	for shift := 0; shift < 70; shift += 7 {
		if !c.fill() {
			return 0, errMalformed
		}
		b := c.cur[0]
		c.cur = c.cur[1:]
		c.pos++
		if shift == 63 && b > 1 {
			return 0, errMalformed
		}
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return v, nil
		}
	}
	return 0, errMalformed
}

func (c *cursor) tag() (protowire.Number, protowire.Type, error) {
	v, err := c.varint()
	if err != nil {
		return 0, 0, err
	}
	num, typ := protowire.DecodeTag(v)
	if num < protowire.MinValidNumber {
		return 0, 0, errMalformed
	}
	return num, typ, nil
}

// length reads a length prefix and checks that this many bytes fit before end.
func (c *cursor) length(end int) (uint64, error) {
	v, err := c.varint()
	if err == nil && (c.pos > end || v > uint64(end-c.pos)) {
		err = errMalformed
	}
	return v, err
}

func (c *cursor) skip(n int) error {
	for n > 0 {
		if !c.fill() {
			return errMalformed
		}
		k := min(n, len(c.cur))
		c.cur = c.cur[k:]
		c.pos += k
		n -= k
	}
	return nil
}

// refs returns the next n bytes as references; the caller frees them.
func (c *cursor) refs(n int, dst mem.BufferSlice) (mem.BufferSlice, error) {
	for n > 0 {
		if !c.fill() {
			return dst, errMalformed
		}
		k, buf := min(n, len(c.cur)), c.bufs[c.next-1]
		off := buf.Len() - len(c.cur)
		dst = append(dst, buf.Slice(off, off+k))
		c.cur = c.cur[k:]
		c.pos += k
		n -= k
	}
	return dst, nil
}

// bytes returns the next n bytes in one piece, valid as long as the buffers. It copies them only
// if they span several buffers.
func (c *cursor) bytes(n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	if !c.fill() {
		return nil, errMalformed
	}
	if n <= len(c.cur) {
		b := c.cur[:n:n]
		c.cur = c.cur[n:]
		c.pos += n
		return b, nil
	}
	b := make([]byte, 0, n)
	for len(b) < n {
		if !c.fill() {
			return nil, errMalformed
		}
		k := min(n-len(b), len(c.cur))
		b = append(b, c.cur[:k]...)
		c.cur = c.cur[k:]
		c.pos += k
	}
	return b, nil
}

// eachField calls read for each field before end with a value v (VarintType), or with v bytes
// that read must consume (BytesType). It skips other fields.
func (c *cursor) eachField(end int, read func(num protowire.Number, typ protowire.Type, v uint64) error) error {
	for c.pos < end {
		num, typ, err := c.tag()
		if err != nil {
			return err
		}
		var v uint64
		switch typ {
		case protowire.VarintType:
			v, err = c.varint()
		case protowire.BytesType:
			v, err = c.length(end)
		default:
			if err := c.skipValue(num, typ, end, 0); err != nil {
				return err
			}
			continue
		}
		if err == nil {
			err = read(num, typ, v)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// skipValue skips the value of a field that is not used.
func (c *cursor) skipValue(num protowire.Number, typ protowire.Type, end, depth int) error {
	switch typ {
	case protowire.VarintType:
		_, err := c.varint()
		return err
	case protowire.Fixed32Type:
		return c.skip(4)
	case protowire.Fixed64Type:
		return c.skip(8)
	case protowire.BytesType:
		n, err := c.length(end)
		if err != nil {
			return err
		}
		return c.skip(int(n))
	case protowire.StartGroupType:
		if depth == maxGroupDepth {
			return errMalformed
		}
		for {
			inner, t, err := c.tag()
			if err != nil {
				return err
			}
			if t == protowire.EndGroupType {
				if inner != num {
					return errMalformed
				}
				return nil
			}
			if err := c.skipValue(inner, t, end, depth+1); err != nil {
				return err
			}
		}
	}
	return errMalformed
}

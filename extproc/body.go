package extproc

import "google.golang.org/grpc/mem"

// maxPiece is the size of a body piece that all known data planes accept, in bytes.
const maxPiece = 62000

// cutter cuts a body into pieces, by reference.
type cutter struct {
	refs mem.BufferSlice
	i, o int // next byte is at o of refs[i]
}

// next returns references to the next n bytes; the caller frees them.
func (c *cutter) next(n int) mem.BufferSlice {
	var out mem.BufferSlice
	for n > 0 {
		b := c.refs[c.i]
		l := b.Len()
		k := min(l-c.o, n)
		if k > 0 {
			out = append(out, b.Slice(c.o, c.o+k))
			c.o += k
			n -= k
		}
		if c.o == l {
			c.i, c.o = c.i+1, 0
		}
	}
	return out
}

func (c *cutter) skip(n int) {
	for n > 0 {
		l := c.refs[c.i].Len()
		k := min(l-c.o, n)
		c.o += k
		n -= k
		if c.o == l {
			c.i, c.o = c.i+1, 0
		}
	}
}

// spliceEdits returns body with the edits applied, by reference. It reports false
// for edits that are out of order or out of range.
func spliceEdits(body mem.BufferSlice, size int, edits []Edit) (mem.BufferSlice, int, bool) {
	at, total := 0, size
	for _, e := range edits {
		if e.Offset < at || e.Length < 0 || e.Length > size-e.Offset {
			return nil, 0, false
		}
		at = e.Offset + e.Length
		total += len(e.Insert) - e.Length
	}
	c := cutter{refs: body}
	var out mem.BufferSlice
	at = 0
	for _, e := range edits {
		out = append(out, c.next(e.Offset-at)...)
		c.skip(e.Length)
		if len(e.Insert) > 0 {
			out = append(out, mem.SliceBuffer(e.Insert))
		}
		at = e.Offset + e.Length
	}
	return append(out, c.next(size-at)...), total, true
}

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

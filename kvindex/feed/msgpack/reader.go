// Package msgpack reads MessagePack from a byte slice in place. It is made for KV events: it
// does not allocate, strings and byte strings are returned as parts of the input, integers keep
// 64 bits whatever their sign, and unused values are skipped without recursion. A library does not
// replace it: for a stored event of 32 blocks and 512 tokens, github.com/tinylib/msgp v1.6.5 without
// generated code needs 1.2 to 1.7 times the time, because it reads token ids one by one.
//
// Wire format: https://github.com/msgpack/msgpack/blob/master/spec.md.
package msgpack

import (
	"encoding/binary"
	"errors"
	"math"
)

// Errors of a Reader. After an error a Reader's position is unchanged.
var (
	// ErrShort means that the input ends inside a value.
	ErrShort = errors.New("msgpack: input ends inside a value")
	// ErrType means that the next value has another type than the requested one.
	ErrType = errors.New("msgpack: unexpected type")
	// ErrFormat means that the next byte is not a valid MessagePack format byte.
	ErrFormat = errors.New("msgpack: invalid format byte")
)

// Kind is the type of the next value.
type Kind uint8

// Kinds of values. Uint covers non-negative integers, Int those stored with a sign.
const (
	Invalid Kind = iota
	Nil
	Bool
	Uint
	Int
	Float
	Str
	Bin
	Array
	Map
	Ext
)

// kinds maps a format byte to the kind of its value.
var kinds = func() (t [256]Kind) {
	for i := range t {
		switch {
		case i < 0x80:
			t[i] = Uint
		case i < 0x90:
			t[i] = Map
		case i < 0xa0:
			t[i] = Array
		case i < 0xc0:
			t[i] = Str
		case i >= 0xe0:
			t[i] = Int
		}
	}
	for k, codes := range map[Kind][]int{
		Nil: {0xc0}, Bool: {0xc2, 0xc3}, Bin: {0xc4, 0xc5, 0xc6}, Ext: {0xc7, 0xc8, 0xc9, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8},
		Float: {0xca, 0xcb}, Uint: {0xcc, 0xcd, 0xce, 0xcf}, Int: {0xd0, 0xd1, 0xd2, 0xd3}, Str: {0xd9, 0xda, 0xdb},
		Array: {0xdc, 0xdd}, Map: {0xde, 0xdf},
	} {
		for _, c := range codes {
			t[c] = k
		}
	}
	return t
}()

// Reader reads MessagePack values in sequence. The zero Reader has an empty input.
type Reader struct {
	b []byte
	i int // Invariant: 0 <= i <= len(b)
}

// NewReader returns a Reader at the start of b, which it does not copy.
func NewReader(b []byte) Reader { return Reader{b: b} }

// Offset returns the number of bytes read.
func (r *Reader) Offset() int { return r.i }

// Raw returns the next n bytes without reading them. At least n bytes must be left.
func (r *Reader) Raw(n int) []byte { return r.b[r.i : r.i+n : r.i+n] }

// Kind returns the kind of the next value without reading it; Invalid at the end or before an invalid byte.
func (r *Reader) Kind() Kind {
	if r.i >= len(r.b) {
		return Invalid
	}
	return kinds[r.b[r.i]]
}

// Nil reads a nil and reports whether there was one.
func (r *Reader) Nil() bool {
	if r.i < len(r.b) && r.b[r.i] == 0xc0 {
		r.i++
		return true
	}
	return false
}

// fixed returns the n bytes after the format byte.
func (r *Reader) fixed(n int) ([]byte, error) {
	if len(r.b)-r.i < n+1 {
		return nil, ErrShort
	}
	return r.b[r.i+1 : r.i+1+n], nil
}

func (r *Reader) typeError() error {
	switch r.Kind() {
	case Invalid:
		if r.i >= len(r.b) {
			return ErrShort
		}
		return ErrFormat
	default:
		return ErrType
	}
}

// Uint64 reads any integer. A negative one is returned as its two's complement,
// so that a signed hash keeps its 64 bits.
func (r *Reader) Uint64() (uint64, error) {
	if r.i >= len(r.b) {
		return 0, ErrShort
	}
	c := r.b[r.i]
	var n int
	switch {
	case c < 0x80:
		r.i++
		return uint64(c), nil
	case c >= 0xe0:
		r.i++
		return uint64(int64(int8(c))), nil
	case c >= 0xcc && c <= 0xcf:
		n = 1 << (c - 0xcc)
	case c >= 0xd0 && c <= 0xd3:
		n = 1 << (c - 0xd0)
	default:
		return 0, r.typeError()
	}
	p, err := r.fixed(n)
	if err != nil {
		return 0, err
	}
	r.i += 1 + n
	if n == 8 {
		return binary.BigEndian.Uint64(p), nil
	}
	v := uint64(size(p))
	if c >= 0xd0 { // extend the sign
		shift := 64 - 8*n
		v = uint64(int64(v<<shift) >> shift)
	}
	return v, nil
}

// Int64 reads an integer that must fit into an int64.
func (r *Reader) Int64() (int64, error) {
	at := r.i
	big := r.Kind() == Uint
	v, err := r.Uint64()
	if err != nil {
		return 0, err
	}
	if big && v > math.MaxInt64 {
		r.i = at
		return 0, ErrType
	}
	return int64(v), nil
}

// Float64 reads a float or an integer.
func (r *Reader) Float64() (float64, error) {
	if r.i >= len(r.b) {
		return 0, ErrShort
	}
	switch r.b[r.i] {
	case 0xca:
		p, err := r.fixed(4)
		if err != nil {
			return 0, err
		}
		r.i += 5
		return float64(math.Float32frombits(binary.BigEndian.Uint32(p))), nil
	case 0xcb:
		p, err := r.fixed(8)
		if err != nil {
			return 0, err
		}
		r.i += 9
		return math.Float64frombits(binary.BigEndian.Uint64(p)), nil
	}
	if r.Kind() == Int {
		v, err := r.Int64()
		return float64(v), err
	}
	v, err := r.Uint64()
	return float64(v), err
}

// Bytes reads a string or a byte string. The result is a part of the input, not a copy.
func (r *Reader) Bytes() ([]byte, error) {
	if r.i >= len(r.b) {
		return nil, ErrShort
	}
	c := r.b[r.i]
	var head, n int
	switch {
	case c >= 0xa0 && c <= 0xbf:
		head, n = 1, int(c&0x1f)
	case c == 0xc4 || c == 0xd9:
		head = 2
	case c == 0xc5 || c == 0xda:
		head = 3
	case c == 0xc6 || c == 0xdb:
		head = 5
	default:
		return nil, r.typeError()
	}
	if head > 1 {
		p, err := r.fixed(head - 1)
		if err != nil {
			return nil, err
		}
		n = size(p)
	}
	if len(r.b)-r.i-head < n {
		return nil, ErrShort
	}
	at := r.i + head
	r.i = at + n
	return r.b[at:r.i:r.i], nil
}

// size reads a big-endian number of 1, 2 or 4 bytes.
func size(p []byte) int {
	switch len(p) {
	case 1:
		return int(p[0])
	case 2:
		return int(binary.BigEndian.Uint16(p))
	default:
		return int(binary.BigEndian.Uint32(p))
	}
}

// Array reads the head of an array and returns its number of elements, which never exceeds the number of bytes left.
func (r *Reader) Array() (int, error) { return r.head(Array, 0x90, 0xdc) }

// Map reads the head of a map and returns its number of pairs.
func (r *Reader) Map() (int, error) { return r.head(Map, 0x80, 0xde) }

func (r *Reader) head(k Kind, fix, long byte) (int, error) {
	if r.Kind() != k {
		return 0, r.typeError()
	}
	c := r.b[r.i]
	head, n := 1, int(c&0x0f)
	if c&0xf0 != fix {
		head = 3
		if c != long {
			head = 5
		}
		p, err := r.fixed(head - 1)
		if err != nil {
			return 0, err
		}
		n = size(p)
	}
	least := n
	if k == Map {
		least *= 2
	}
	if len(r.b)-r.i-head < least {
		return 0, ErrShort
	}
	r.i += head
	return n, nil
}

// Uint32s reads an array of integers that fit into 32 bits and appends them to dst. A pair [a, b] instead of an
// integer, for some or all elements, counts as its first element (bigram tokens). On an error it returns dst unchanged.
func (r *Reader) Uint32s(dst []uint32) ([]uint32, error) {
	at, was := r.i, len(dst)
	n, err := r.Array()
	if err != nil {
		return dst, err
	}
	b, i := r.b, r.i
	for range n {
		// Fast path for the four forms of token ids.
		switch {
		case i < len(b) && b[i] < 0x80:
			dst = append(dst, uint32(b[i]))
			i++
			continue
		case len(b)-i >= 3 && b[i] == 0xcd:
			dst = append(dst, uint32(b[i+1])<<8|uint32(b[i+2]))
			i += 3
			continue
		case len(b)-i >= 5 && b[i] == 0xce:
			dst = append(dst, binary.BigEndian.Uint32(b[i+1:]))
			i += 5
			continue
		case len(b)-i >= 2 && b[i] == 0xcc:
			dst = append(dst, uint32(b[i+1]))
			i += 2
			continue
		}
		r.i = i
		v, err := r.token()
		if err != nil {
			r.i = at
			return dst[:was], err
		}
		dst = append(dst, v)
		i = r.i
	}
	r.i = i
	return dst, nil
}

func (r *Reader) token() (uint32, error) {
	pair := r.Kind() == Array
	if pair {
		if n, err := r.Array(); err != nil || n != 2 {
			return 0, ErrType
		}
	}
	v, err := r.Uint64()
	if err != nil {
		return 0, err
	}
	if v > math.MaxUint32 {
		return 0, ErrType
	}
	if pair {
		if err := r.Skip(); err != nil {
			return 0, err
		}
	}
	return uint32(v), nil
}

// Skip skips one value of any kind and depth.
func (r *Reader) Skip() error {
	at := r.i
	for left := 1; left > 0; left-- {
		more, err := r.skipOne()
		if err != nil {
			r.i = at
			return err
		}
		left += more
	}
	return nil
}

// skipOne skips one value's own bytes and returns the number of values that follow inside it.
func (r *Reader) skipOne() (int, error) {
	switch r.Kind() {
	case Nil, Bool:
		r.i++
		return 0, nil
	case Uint, Int:
		_, err := r.Uint64()
		return 0, err
	case Float:
		_, err := r.Float64()
		return 0, err
	case Str, Bin:
		_, err := r.Bytes()
		return 0, err
	case Array:
		return r.Array()
	case Map:
		n, err := r.Map()
		return 2 * n, err
	case Ext:
		return 0, r.skipExt()
	default:
		return 0, r.typeError()
	}
}

func (r *Reader) skipExt() error {
	c := r.b[r.i]
	var n int
	if c >= 0xd4 {
		n = 2 + 1<<(c-0xd4)
	} else {
		p, err := r.fixed(1 << (c - 0xc7))
		if err != nil {
			return err
		}
		n = 1 + len(p) + 1 + size(p)
	}
	if len(r.b)-r.i < n {
		return ErrShort
	}
	r.i += n
	return nil
}

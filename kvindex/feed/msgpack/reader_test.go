package msgpack_test

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"testing"

	vmihailenco "github.com/vmihailenco/msgpack/v5"
	"pgregory.net/rapid"

	"github.com/kvlane/kvlane/kvindex/feed/msgpack"
)

// anyValue draws nested values of every kind that events carry.
func anyValue(depth int) *rapid.Generator[any] {
	leaf := rapid.OneOf(
		rapid.Just[any](nil),
		rapid.Map(rapid.Bool(), func(v bool) any { return v }),
		rapid.Map(rapid.Int64(), func(v int64) any { return v }),
		rapid.Map(rapid.Uint64(), func(v uint64) any { return v }),
		rapid.Map(rapid.Float64(), func(v float64) any { return v }),
		rapid.Map(rapid.String(), func(v string) any { return v }),
		rapid.Map(rapid.SliceOf(rapid.Byte()), func(v []byte) any { return v }),
	)
	if depth == 0 {
		return leaf
	}
	return rapid.OneOf(leaf,
		rapid.Map(rapid.SliceOfN(anyValue(depth-1), 0, 20), func(v []any) any { return v }),
		rapid.Map(rapid.MapOfN(rapid.String(), anyValue(depth-1), 0, 20), func(v map[string]any) any { return v }),
	)
}

// A value that another library writes is skipped exactly, and every shorter input fails without
// moving the reader.
func TestSkipEndsWhereTheValueEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b, err := vmihailenco.Marshal(anyValue(3).Draw(t, "value"))
		if err != nil {
			t.Fatal(err)
		}
		r := msgpack.NewReader(append(bytes.Clone(b), 0xc1))
		if err := r.Skip(); err != nil || r.Offset() != len(b) {
			t.Fatalf("skipped %d of %d bytes: %v", r.Offset(), len(b), err)
		}
		cut := rapid.IntRange(0, len(b)-1).Draw(t, "cut")
		short := msgpack.NewReader(b[:cut])
		if err := short.Skip(); err == nil || short.Offset() != 0 {
			t.Fatalf("skipped a value cut to %d of %d bytes (offset %d)", cut, len(b), short.Offset())
		}
	})
}

func TestIntegersKeepTheirBits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u, s := rapid.Uint64().Draw(t, "unsigned"), rapid.Int64().Draw(t, "signed")
		b, err := vmihailenco.Marshal([]any{u, s, int8(-1), int16(-300), int32(-70000), uint8(200), uint16(60000), uint32(math.MaxUint32)})
		if err != nil {
			t.Fatal(err)
		}
		r := msgpack.NewReader(b)
		if n, err := r.Array(); err != nil || n != 8 {
			t.Fatalf("array head: %d, %v", n, err)
		}
		for i, want := range []uint64{u, uint64(s), math.MaxUint64, ^uint64(299), ^uint64(69999), 200, 60000, math.MaxUint32} {
			if got, err := r.Uint64(); err != nil || got != want {
				t.Fatalf("element %d: %d, %v; want %d", i, got, err, want)
			}
		}
	})
}

func TestUint32s(t *testing.T) {
	tests := map[string]struct {
		in   any
		want []uint32
		ok   bool
	}{
		"every width":     {[]any{1, 200, 60000, uint32(151643), uint64(7)}, []uint32{1, 200, 60000, 151643, 7}, true},
		"bigrams":         {[]any{[]int{5, 6}, []int{6, 70000}}, []uint32{5, 6}, true},
		"empty":           {[]any{}, nil, true},
		"negative":        {[]any{1, -1}, nil, false},
		"beyond 32 bits":  {[]any{uint64(1) << 32}, nil, false},
		"text":            {[]any{1, "2"}, nil, false},
		"a triple":        {[]any{[]int{1, 2, 3}}, nil, false},
		"not an array":    {"abc", nil, false},
		"nil in the list": {[]any{nil}, nil, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			b, err := vmihailenco.Marshal(tt.in)
			if err != nil {
				t.Fatal(err)
			}
			r := msgpack.NewReader(b)
			got, err := r.Uint32s([]uint32{9})
			if (err == nil) != tt.ok {
				t.Fatalf("got error %v, want success %v", err, tt.ok)
			}
			want := append([]uint32{9}, tt.want...)
			if len(got) != len(want) {
				t.Fatalf("got %v, want %v", got, want)
			}
			for i := range want {
				if got[i] != want[i] {
					t.Fatalf("got %v, want %v", got, want)
				}
			}
			if tt.ok && r.Offset() != len(b) {
				t.Fatalf("read up to %d, want %d", r.Offset(), len(b))
			}
			if !tt.ok && r.Offset() != 0 {
				t.Fatalf("moved to %d after an error", r.Offset())
			}
		})
	}
}

// A length that the input cannot hold is rejected before anything is allocated for it.
func TestLyingLengths(t *testing.T) {
	for _, b := range [][]byte{
		{0xdd, 0xff, 0xff, 0xff, 0xff}, {0xdf, 0xff, 0xff, 0xff, 0xff}, {0xdb, 0xff, 0xff, 0xff, 0xff}, {0xc6, 0xff, 0xff, 0xff, 0xff},
		{0xdf, 0, 0, 0, 2, 1, 1, 1}, {0xc9, 0xff, 0xff, 0xff, 0xff, 1}, {0xc7, 4, 1, 0}, {0xd8, 0},
	} {
		r := msgpack.NewReader(b)
		if err := r.Skip(); err == nil {
			t.Errorf("% x: got no error", b)
		}
	}
}

func FuzzReader(f *testing.F) {
	for _, v := range []any{nil, []any{1.5, []any{map[string]any{"type": "BlockStored", "block_hashes": []uint64{1 << 63}}}, 0}, []int{1, 200, 70000}} {
		b, err := vmihailenco.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{0xd8, 1, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := msgpack.NewReader(b)
		skip := r
		err := skip.Skip()
		if err == nil && (skip.Offset() == 0 || skip.Offset() > len(b)) {
			t.Fatalf("offset %d of %d", skip.Offset(), len(b))
		}
		// Every typed read either fails without moving or ends where Skip ends.
		for name, read := range map[string]func(*msgpack.Reader) error{
			"uint64":  func(r *msgpack.Reader) error { _, err := r.Uint64(); return err },
			"int64":   func(r *msgpack.Reader) error { _, err := r.Int64(); return err },
			"float64": func(r *msgpack.Reader) error { _, err := r.Float64(); return err },
			"bytes":   func(r *msgpack.Reader) error { _, err := r.Bytes(); return err },
			"uint32s": func(r *msgpack.Reader) error { _, err := r.Uint32s(nil); return err },
		} {
			typed := r
			switch terr := read(&typed); {
			case terr != nil && typed.Offset() != 0:
				t.Fatalf("%s: moved to %d after %v", name, typed.Offset(), terr)
			case terr == nil && (err != nil || typed.Offset() != skip.Offset()):
				t.Fatalf("%s ended at %d, Skip at %d (%v)", name, typed.Offset(), skip.Offset(), err)
			}
		}
	})
}

// tree reads a value with the typed methods, one after the other. ok is false for kinds that have none (extensions).
func tree(r *msgpack.Reader) (v any, ok bool, err error) {
	many := func(n int) (list []any, ok bool, err error) {
		for ok = true; n > 0 && err == nil; n-- {
			var one any
			var known bool
			one, known, err = tree(r)
			list, ok = append(list, one), ok && known
		}
		return list, ok, err
	}
	switch r.Kind() {
	case msgpack.Nil:
		r.Nil()
		return nil, true, nil
	case msgpack.Bool:
		b := r.Raw(1)[0] == 0xc3
		return b, true, r.Skip()
	case msgpack.Uint, msgpack.Int:
		n, err := r.Uint64()
		return n, true, err
	case msgpack.Float:
		n, err := r.Float64()
		return math.Float64bits(n), true, err
	case msgpack.Str, msgpack.Bin:
		b, err := r.Bytes()
		return string(b), true, err
	case msgpack.Array:
		n, err := r.Array()
		if err != nil {
			return nil, false, err
		}
		return many(n)
	case msgpack.Map:
		n, err := r.Map()
		if err != nil {
			return nil, false, err
		}
		return many(2 * n)
	default:
		return nil, false, r.Skip()
	}
}

// reference reads the same tree with another library.
func reference(d *vmihailenco.Decoder) (any, error) {
	c, err := d.PeekCode()
	if err != nil {
		return nil, err
	}
	many := func(n int) (list []any, err error) {
		for ; n > 0 && err == nil; n-- {
			var one any
			one, err = reference(d)
			list = append(list, one)
		}
		return list, err
	}
	switch {
	case c == 0xc0:
		return nil, d.DecodeNil()
	case c == 0xc2 || c == 0xc3:
		return d.DecodeBool()
	case c <= 0x7f || c >= 0xcc && c <= 0xcf:
		return d.DecodeUint64()
	case c >= 0xe0 || c >= 0xd0 && c <= 0xd3:
		n, err := d.DecodeInt64()
		return uint64(n), err
	case c == 0xca || c == 0xcb:
		n, err := d.DecodeFloat64()
		return math.Float64bits(n), err
	case c >= 0xa0 && c <= 0xbf || c >= 0xd9 && c <= 0xdb:
		return d.DecodeString()
	case c >= 0xc4 && c <= 0xc6:
		b, err := d.DecodeBytes()
		return string(b), err
	case c >= 0x90 && c <= 0x9f || c == 0xdc || c == 0xdd:
		n, err := d.DecodeArrayLen()
		if err != nil {
			return nil, err
		}
		return many(n)
	case c >= 0x80 && c <= 0x8f || c == 0xde || c == 0xdf:
		n, err := d.DecodeMapLen()
		if err != nil {
			return nil, err
		}
		return many(2 * n)
	}
	return nil, d.Skip()
}

// The reader and another library read the same values.
func FuzzAgainstReference(f *testing.F) {
	for _, v := range []any{
		nil, true, -1, int64(math.MinInt64), uint64(math.MaxUint64), float32(1.5), math.Pi, "text", []byte{0, 1}, []int{1, 200, 70000, -70000},
		map[string]any{"a": []any{nil, map[string]any{"b": 1}}}, []any{1.5, []any{[]any{"BlockStored", []uint64{1 << 63}, nil}}, 0},
	} {
		b, err := vmihailenco.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := msgpack.NewReader(b)
		got, known, err := tree(&r)
		if !known && err == nil || errors.Is(err, msgpack.ErrShort) {
			return // the other library allocates what a length says before it finds that the bytes are missing
		}
		want, wantErr := reference(vmihailenco.NewDecoder(bytes.NewReader(b)))
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("% x: got error %v, want %v", b, err, wantErr)
		}
		if err == nil && !reflect.DeepEqual(got, want) {
			t.Fatalf("% x: got %#v, want %#v", b, got, want)
		}
		skip := msgpack.NewReader(b)
		if skipErr := skip.Skip(); (skipErr == nil) != (err == nil) || err == nil && skip.Offset() != r.Offset() {
			t.Fatalf("% x: skipped %d bytes (%v), read %d (%v)", b, skip.Offset(), skipErr, r.Offset(), err)
		}
	})
}

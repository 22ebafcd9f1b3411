package extproc

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/mem"
	"pgregory.net/rapid"
)

func TestPoolClasses(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 80<<20).Draw(t, "n")
		index, size, ok := class(n)
		switch {
		case ok != (n <= 1<<maxPooledBits):
			t.Fatalf("%d bytes: pooled %v", n, ok)
		case !ok:
		case size < n:
			t.Fatalf("%d bytes in %d", n, size)
		case n > 1<<minPooledBits && size-n > size/5:
			t.Fatalf("%d bytes in %d: more than a fifth is empty", n, size)
		}
		if again, same, _ := class(size); ok && (again != index || same != size) {
			t.Fatalf("a buffer of %d bytes comes from class %d and goes to %d", size, index, again)
		}
	})
}

// A joined body reads completely, whatever the buffer held before.
func TestJoin(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		pieces := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 3000), 1, 5).Draw(t, "pieces")
		var body mem.BufferSlice
		for _, p := range pieces {
			b := buffers.Get(len(p))
			copy(*b, p)
			body = append(body, mem.NewBuffer(b, buffers))
		}
		want := bytes.Join(pieces, nil)
		joined := join(body, len(want))
		if len(joined) != 1 || !bytes.Equal(joined[0].ReadOnlyData(), want) {
			t.Fatalf("%d pieces became %d", len(pieces), len(joined))
		}
		joined.Free()
	})
}

package feed

import (
	"bytes"
	"strings"
	"testing"
)

// Clients choose salts, and engines publish them: long ones are not kept, short ones are.
func TestLongNamesAreNotKept(t *testing.T) {
	var names interner
	kept := func() (n int) {
		for s := range names {
			n += len(s)
		}
		return n
	}
	for i := range 3 * maxInterned {
		salt := bytes.Repeat([]byte{byte(i)}, maxName+1+i)
		if got := names.get(salt); got != string(salt) {
			t.Fatalf("got a name of %d bytes, want %d", len(got), len(salt))
		}
	}
	if n := kept(); n > 0 {
		t.Errorf("got %d bytes kept of long names, want none", n)
	}
	short := strings.Repeat("s", maxName)
	if got := names.get([]byte(short)); got != short || kept() != maxName {
		t.Errorf("got %q, %d bytes kept, want the name, which is kept", got, kept())
	}
}

// What one huge payload needed is not kept until the feed ends; buffers of usual payloads are.
func TestBuffersOfAHugePayloadAreNotKept(t *testing.T) {
	removal := append([]byte{0x92, 0xac}, "BlockRemoved\x91\x01"...)
	payload := func(n int) []byte {
		head := []byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}
		return append(head, bytes.Repeat(removal, n)...)
	}
	d := NewDecoder(VLLM, 0)
	decode := func(n int) {
		t.Helper()
		if b, err := d.Decode(payload(n)); err != nil || len(b.Events) != n {
			t.Fatalf("got %d events, %v, want %d", len(b.Events), err, n)
		}
	}
	decode(1000)
	before := cap(d.batch.Events)
	if decode(1); cap(d.batch.Events) != before {
		t.Errorf("got room for %d events after a usual payload, want %d", cap(d.batch.Events), before)
	}
	decode(2 * maxKept)
	decode(1)
	if n := max(cap(d.batch.Events), cap(d.hashes)); n > maxKept {
		t.Errorf("got room for %d events after a huge payload, want at most %d", n, maxKept)
	}
}

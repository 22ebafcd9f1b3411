package feed

import (
	"bytes"
	"io"
	"runtime"
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

// What an event makes us allocate is a small multiple of its bytes, whatever it has many of.
func TestAPolledEventNeedsBoundedMemory(t *testing.T) {
	many := func(item string) string { return strings.Repeat(item+",", 4<<20/len(item)) + item }
	for name, data := range map[string]string{
		"empty blocks": `"type":"stored","blocks":[` + many(`{}`) + `]`, "no blocks": `"type":"stored","blocks":[` + many(`null`) + `]`,
		"tokens":     `"type":"stored","blocks":[{"block_hash":1,"tokens":[` + many(`1`) + `]}]`,
		"media keys": `"type":"stored","blocks":[{"block_hash":1,"tokens":[1],"mm_keys":[` + strings.Repeat(`1,`, maxBlockText/3) + `1]}]`,
		"hashes":     `"type":"removed","block_hashes":[` + many(`1`) + `]`,
	} {
		t.Run(name, func(t *testing.T) {
			sink := &strict{t: t}
			feed := pollingFeed(sink)
			text := `[{"event_id":1,"data":{` + data + `}},{"event_id":2,"data":{"type":"removed","block_hashes":[1]}}]`
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if err := feed.polled(strings.NewReader(text)); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			if factor := float64(after.TotalAlloc-before.TotalAlloc) / float64(max(len(text), 4<<20)); factor > 20 {
				t.Errorf("got %.0f bytes allocated for each byte of the event, want at most 20", factor)
			}
			if sink.events == 0 {
				t.Error("got nothing of the event behind it")
			}
		})
	}
}

func TestAPolledEventIsBounded(t *testing.T) {
	feed := pollingFeed(&strict{t: t})
	small := `{"event_id":1,"data":{"type":"removed","block_hashes":[1]}},`
	endless := io.MultiReader(strings.NewReader("["+strings.Repeat(small, 3)+`{"event_id":2,"x":"`), zeros{})
	if err := feed.polled(endless); err == nil {
		t.Error("got no error for an event without end")
	}
}

// zeros is a text without end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = '0'
	}
	return len(b), nil
}

// Errors quote engines, and the last one is kept: no more than its beginning.
func TestALongErrorIsClipped(t *testing.T) {
	feed := pollingFeed(&strict{t: t})
	long := strings.Repeat("z", 1<<20)
	for _, event := range []string{`{"data":{"type":"removed","block_hashes":["` + long + `"]}}`, `{"hash_algo":"` + long + `","data":{"type":"created"}}`} {
		if err := feed.polled(strings.NewReader("[" + event + "]")); err != nil {
			t.Fatal(err)
		}
	}
	got := feed.tally.lastError
	if len(got) > 512 || !strings.Contains(got, "zzz") {
		t.Errorf("got an error of %d bytes, want its first 512: %.100q", len(got), got)
	}
	if algo, refused := feed.byRank[feed.src.Rank].dec.HashRefused(); !refused || len(algo) > maxName {
		t.Errorf("got an algorithm's name of %d bytes, refused %v", len(algo), refused)
	}
}

package feed

import (
	"bytes"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
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
		b, err := d.Decode(payload(n))
		got := len(b.Events)
		for err == nil && b.Rest != nil {
			b, err = b.Rest()
			got += len(b.Events)
		}
		if err != nil || got != n {
			t.Fatalf("got %d events, %v, want %d", got, err, n)
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

// Once a batch is applied, nothing of it is kept until the next one: each rank would keep up to eight times its bytes.
func TestNothingOfABatchIsKept(t *testing.T) {
	x, err := kvindex.New(kvindex.Config{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	slot, err := x.Add(kvindex.Target{Worker: "w", Rank: kvindex.NoRank}, "m", 16)
	if err != nil {
		t.Fatal(err)
	}
	pushed := func(b *kvlanev1.Batch) []byte {
		payload, err := pushPayload(b)
		if err != nil {
			t.Fatal(err)
		}
		return payload
	}
	removal := append([]byte{0x92, 0xac}, "BlockRemoved\x91\x01"...)
	const n = 1 << 18
	raw := append([]byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0, n >> 16, 0, 0}, bytes.Repeat(removal, n)...)
	events := &kvlanev1.Events{Events: []*kvlanev1.Event{{Change: &kvlanev1.Event_Removed{Removed: &kvlanev1.Removed{Hashes: make([]uint64, 4*n)}}}}}
	for name, c := range map[string]struct {
		dec     batchDecoder
		payload func() []byte
	}{
		"ZMQ":           {NewDecoder(VLLM, 0), func() []byte { return bytes.Clone(raw) }},
		"pushed":        {&pushDecoder{Decoder: NewDecoder(VLLM, 0)}, func() []byte { return pushed(&kvlanev1.Batch{Content: &kvlanev1.Batch_Raw{Raw: raw}}) }},
		"pushed events": {&pushDecoder{Decoder: NewDecoder(VLLM, 0)}, func() []byte { return pushed(&kvlanev1.Batch{Content: &kvlanev1.Batch_Events{Events: events}}) }},
	} {
		sink := &intoIndex{x: x, slot: slot}
		a := &applier{mu: newGuard(sink), src: &Source{Worker: "w", Rank: kvindex.NoRank}, dec: c.dec, sink: sink, machine: NewMachine(MachineConfig{}), counters: newCounters()}
		a.do(a.machine.Up())
		live := func(f func()) int64 {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			f()
			runtime.GC()
			runtime.ReadMemStats(&after)
			return int64(after.HeapAlloc) - int64(before.HeapAlloc)
		}
		kept := live(func() {
			payload := c.payload()
			a.mu.Lock()
			a.do(a.machine.Live(0, payload))
			a.mu.Unlock()
		})
		if got := a.machine.Counts().Applied; got != 1 || kept > 3<<20 {
			t.Errorf("%s: %d batches applied, %d bytes kept, want one and the usual buffers", name, got, kept)
		}
		runtime.KeepAlive(a)
	}
}

// A large payload is decoded in parts: what it makes us allocate is little, whatever it has many of, and every part has its rank.
func TestALargePayloadIsDecodedInParts(t *testing.T) {
	text := func(s string) []byte { return append([]byte{0xa0 | byte(len(s))}, s...) }
	list := func(n int, item ...byte) []byte {
		return append([]byte{0xdd, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, bytes.Repeat(item, n)...)
	}
	removal := slices.Concat([]byte{0x92}, text("BlockRemoved"), []byte{0x91, 7})
	stored := func(hashes, tokens, extra []byte, size byte) []byte {
		return slices.Concat([]byte{0x99}, text("BlockStored"), hashes, []byte{0xc0}, tokens, []byte{size, 0xc0, 0xc0, 0xc0}, extra)
	}
	one, none := []byte{0x91, 1}, []byte{0xc0}
	const many = 9 << 20 // more than maxTokens
	for name, c := range map[string]struct {
		n                 int
		event             []byte
		events, malformed int
	}{
		"removals":      {many / len(removal), removal, many / len(removal), 0},
		"no events":     {many, []byte{0xc0}, 0, many},
		"hashes":        {1, stored(list(many, 1), one, none, 1), 0, 1},
		"tokens":        {1, stored(one, list(many, 1), none, 1), 0, 1},
		"tokens, twice": {2, stored(list(1<<20, 1), list(1<<20, 1), none, 1), 2, 0}, // as many as an engine may send
		"media":         {1, stored(one, one, slices.Concat([]byte{0x91}, list(many/4, 0x92, 0xa1, 'x', 0)), 1), 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			payload := slices.Concat([]byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0}, list(c.n, c.event...), []byte{3})
			d, events, malformed := NewDecoder(VLLM, 0), 0, 0
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			b, err := d.Decode(payload)
			for {
				events += len(b.Events)
				for _, dropped := range b.Dropped {
					malformed += dropped.Count
				}
				if b.Rank != 3 {
					t.Fatalf("got rank %d of a part, want 3", b.Rank)
				}
				if err != nil || b.Rest == nil {
					break
				}
				b, err = b.Rest()
			}
			runtime.ReadMemStats(&after)
			if err != nil || events != c.events || malformed != c.malformed {
				t.Errorf("got %d events, %d dropped, %v, want %d, %d", events, malformed, err, c.events, c.malformed)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 120<<20 {
				t.Errorf("got %d MiB allocated for a payload of %d MiB, want at most 120", n>>20, len(payload)>>20)
			}
		})
	}
}

// A feed applies all parts of a large payload, the last one with its position.
func TestAllPartsAreApplied(t *testing.T) {
	const n = 100_000
	removal := append([]byte{0x92, 0xac}, "BlockRemoved\x91\x07"...)
	payload := slices.Concat([]byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0, n >> 16, n >> 8 & 255, n & 255}, bytes.Repeat(removal, n), []byte{0xc0})
	sink := &strict{t: t}
	p := NewPlayer(Source{Worker: "w", Engine: VLLM, Rank: kvindex.NoRank}, sink)
	for seq := range byte(2) {
		if !p.Message([][]byte{nil, {0, 0, 0, 0, 0, 0, 0, seq}, payload}) {
			t.Fatal("got no batch")
		}
	}
	if got := p.a.counters.events; got != 2*n || len(p.Dropped()) > 0 {
		t.Errorf("got %d events, %v dropped, want %d", got, p.Dropped(), 2*n)
	}
	parts, known := sink.parts, sink.known
	if parts < 4 || known != 2 {
		t.Errorf("got %d parts, %d with a position, want several of 2 batches", parts, known)
	}
}

// What comes before a fault counts, in a payload that is decoded in parts as in a small one: the same events, drops and
// warnings, whatever is wrong and wherever.
func TestAFaultCountsTheSameInParts(t *testing.T) {
	removal, malformed := append([]byte{0x92, 0xac}, "BlockRemoved\x91\x07"...), []byte{0xc0}
	head, ts := []byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0}, append([]byte{0x83, 0xa2, 't', 's', 0xcb}, make([]byte, 8)...)
	// list has n removals among malformed events, and what follows them.
	list := func(n int, tail ...[]byte) []byte {
		all := n + 2 + len(tail)
		return slices.Concat([]byte{0xdd, byte(all >> 24), byte(all >> 16), byte(all >> 8), byte(all)}, malformed, bytes.Repeat(removal, n), malformed, slices.Concat(tail...))
	}
	for name, c := range map[string]struct {
		payload                    func(n int) []byte
		more, malformed, wrongRank uint64
		fault                      string
	}{
		"whole":               {func(n int) []byte { return slices.Concat(head, list(n), []byte{0xc0}) }, 0, 2, 0, ""},
		"of another rank":     {func(n int) []byte { return slices.Concat(head, list(n), []byte{3}) }, 0, 2, 1, ""},
		"cut within an event": {func(n int) []byte { return slices.Concat(head, list(n, removal, removal[:5])) }, 1, 3, 0, "cut off"},
		"cut between events":  {func(n int) []byte { return slices.Concat(head, list(n, removal, nil)) }, 1, 3, 0, "cut off"},
		"cut behind them":     {func(n int) []byte { return slices.Concat(ts, []byte("\xa6events"), list(n), []byte{0xa5, 'x'}) }, 0, 2, 0, "key"},
		"events twice": {func(n int) []byte {
			return slices.Concat(ts, []byte("\xa6events"), list(n), []byte("\xa6events"), list(1), []byte{0xa1, 'x', 0})
		}, 0, 2, 0, "twice"},
	} {
		for _, n := range []int{100, 100_000} {
			payload, sink := c.payload(n), &strict{t: t}
			if got := len(payload) > maxWhole; got != (n > 100) {
				t.Fatalf("%s: got a payload of %d bytes", name, len(payload))
			}
			p := NewPlayer(Source{Worker: "w", Engine: VLLM, Rank: 1}, sink)
			if !p.Message([][]byte{nil, make([]byte, 8), payload}) {
				t.Fatalf("%s: got no batch", name)
			}
			got, dropped, fault := p.a.counters.events, p.Dropped(), p.a.counters.lastError
			if want := uint64(n) + c.more; got != want || dropped[Malformed] != c.malformed || dropped[WrongRank] != c.wrongRank ||
				!strings.Contains(fault, c.fault) || (fault == "") != (c.fault == "") {
				t.Errorf("%s: got %d events, dropped %v, error %q; want %d events, %d malformed, %d of a wrong rank, error %q", name, got, dropped, fault,
					want, c.malformed, c.wrongRank, c.fault)
			}
			if sink.known != 1 {
				t.Errorf("%s: got %d positions, want that of the batch", name, sink.known)
			}
		}
	}
}

// What an event makes us allocate is a small multiple of its bytes, whatever it has many of.
func TestAPolledEventNeedsBoundedMemory(t *testing.T) {
	many := func(item string) string { return strings.Repeat(item+",", 1<<20/len(item)) + item }
	for name, data := range map[string]string{
		"empty blocks": `"type":"stored","blocks":[` + many(`{}`) + `]`, "no blocks": `"type":"stored","blocks":[` + many(`null`) + `]`,
		"tokens":     `"type":"stored","blocks":[{"block_hash":1,"tokens":[` + many(`1`) + `]}]`,
		"media keys": `"type":"stored","blocks":[{"block_hash":1,"tokens":[1],"mm_keys":[` + strings.Repeat(`1,`, maxBlockText/3) + `1]}]`,
		"hashes":     `"type":"removed","block_hashes":[` + strings.Repeat(`1,`, 9*maxKept) + `1]`,
	} {
		t.Run(name, func(t *testing.T) {
			sink := &strict{t: t}
			feed := pollingFeed(sink)
			text := `[{"event_id":1,"data":{` + data + `}},{"event_id":2,"data":{"type":"removed","block_hashes":[1]}}]`
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if err := feed.polled(strings.NewReader(text), maxPollEvent); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			if factor := float64(after.TotalAlloc-before.TotalAlloc) / float64(max(len(text), 1<<20)); factor > 20 {
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
	if err := feed.polled(endless, 1<<20); err == nil {
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
		if err := feed.polled(strings.NewReader("["+event+"]"), maxPollEvent); err != nil {
			t.Fatal(err)
		}
	}
	got := feed.counters.lastError
	if len(got) > 512 || !strings.Contains(got, "zzz") {
		t.Errorf("got an error of %d bytes, want its first 512: %.100q", len(got), got)
	}
	if algo, refused := feed.byRank[feed.src.Rank].dec.HashRefused(); !refused || len(algo) > maxName {
		t.Errorf("got an algorithm's name of %d bytes, refused %v", len(algo), refused)
	}
}

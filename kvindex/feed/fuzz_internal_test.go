package feed

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// strict is a Sink that fails the test if a feed does not keep to what it promises.
type strict struct {
	t       testing.TB
	targets map[kvindex.Target]bool
	inside  bool
	events  int
	// parts are the batches, and parts of large ones; known have a position.
	parts, known int
}

func (s *strict) see(t kvindex.Target) {
	if s.targets == nil {
		s.targets = map[kvindex.Target]bool{}
	}
	s.targets[t] = true
}

func (s *strict) Apply(t kvindex.Target, ev *kvindex.Event) error {
	s.see(t)
	s.events++
	if !s.inside || ev.Kind < kvindex.Stored || ev.Kind > kvindex.Cleared || ev.Tier >= kvindex.NumTiers {
		s.t.Fatalf("got event %+v of %v, inside a batch: %v", ev, t, s.inside)
	}
	if ev.Kind == kvindex.Stored && len(ev.Tokens) > 0 && len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize {
		s.t.Fatalf("got %d tokens for %d blocks of %d", len(ev.Tokens), len(ev.Hashes), ev.BlockSize)
	}
	return nil
}

func (s *strict) outside(what string) {
	if s.inside {
		s.t.Fatalf("got %s inside a batch", what)
	}
}

func (s *strict) Clear(t kvindex.Target, _ Reason)          { s.see(t); s.outside("Clear") }
func (s *strict) State(t kvindex.Target, _ State, _ Reason) { s.see(t); s.outside("State") }
func (s *strict) Warn(t kvindex.Target, _ Reason, _ string) { s.see(t) }
func (s *strict) BeginBatch(t kvindex.Target)               { s.see(t); s.outside("BeginBatch"); s.inside = true }
func (s *strict) EndBatch(t kvindex.Target, c Cursor) {
	s.see(t)
	s.inside = false
	if s.parts++; c != (Cursor{}) {
		s.known++
	}
}

func pollingFeed(sink Sink) *Feed {
	f := &Feed{src: Source{Worker: "w", Engine: TRTLLM, RankFromBatch: true, Machine: MachineConfig{Polled: true}}, byRank: map[int32]*applier{}, counters: newCounters(), mu: newGuard(sink)}
	f.room.L = f.mu
	f.main = &applier{src: &f.src, dec: NewDecoder(TRTLLM, 0), sink: sink, machine: NewMachine(f.src.Machine), counters: f.counters, mu: f.mu}
	return f
}

// FuzzPolled reads answers to polls, twice each: an engine may repeat itself.
func FuzzPolled(f *testing.F) {
	block := `{"block_hash":1,"tokens":[{"token_id":1},{"token_id":2}]}`
	for _, s := range []string{
		`[]`, `[{"event_id":0,"attention_dp_rank":1,"data":{"type":"stored","parent_hash":null,"blocks":[` + block + `]}},{"event_id":2,"data":{"type":"removed","block_hashes":[1]}}]`,
		`[{"attention_dp_rank":-5,"data":{"type":"created"}},{"attention_dp_rank":2147483647,"event_id":1},{"event_id":18446744073709551615}]`, `[1,"x",null]`, `[{`, `{"a":1}`, `[{"event_id":-1}]`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		sink := &strict{t: t}
		feed := pollingFeed(sink)
		err := feed.polled(bytes.NewReader(body), maxPollEvent)
		if again := feed.polled(bytes.NewReader(body), maxPollEvent); (err == nil) != (again == nil) {
			t.Fatalf("got %v, then %v", err, again)
		}
		if json.Valid(body) && err != nil && bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("[")) {
			t.Fatalf("got %v of a JSON array %q", err, body)
		}
		for target := range sink.targets {
			if target.Rank < 0 || target.Rank >= maxRanks {
				t.Fatalf("got target %v, want a rank below %d", target, maxRanks)
			}
		}
		feed.down()
	})
}

func TestRanksOfAPollAreBounded(t *testing.T) {
	sink := &strict{t: t}
	feed := pollingFeed(sink)
	for rank := range 3 * maxRanks {
		if err := feed.polled(strings.NewReader(fmt.Sprintf(`[{"event_id":%d,"attention_dp_rank":%d,"data":{"type":"removed","block_hashes":[1]}}]`, rank, rank)), maxPollEvent); err != nil {
			t.Fatal(err)
		}
	}
	if len(feed.byRank) != maxRanks || feed.counters.dropped[WrongRank] != 2*maxRanks {
		t.Errorf("got %d ranks followed and %d events of others, want %d and %d", len(feed.byRank), feed.counters.dropped[WrongRank], maxRanks, 2*maxRanks)
	}
}

// play prints batches that were recorded, lines of a number and the payload in hexadecimal, as Tail prints live ones.
func play(engine Engine, text string, out io.Writer) {
	p := NewPlayer(Source{Worker: "w", Engine: engine, Rank: kvindex.NoRank, RankFromBatch: true}, &printSink{enc: json.NewEncoder(out), failed: func() {}})
	for line := range strings.Lines(text) {
		var seq uint64
		var payload []byte
		if n, _ := fmt.Sscanf(line, "%d %x", &seq, &payload); n > 0 {
			p.Message([][]byte{nil, binary.BigEndian.AppendUint64(nil, seq), payload})
		}
	}
}

// TestPrintedEvents: what is printed of events, gaps, clears and states.
func TestPrintedEvents(t *testing.T) {
	t.Parallel()
	stored := "\x93\xca\x00\x00\x00\x00\x91\x97\xabBlockStored\x91\x05\x00\x92\x01\x02\x02\xc0\xc0\x01"
	removed := "\x93\xca\x00\x00\x00\x00\x92\x93\xacBlockRemoved\x91\x05\xa3CPU\x91\xb0AllBlocksCleared\x01"
	var out bytes.Buffer
	play(VLLM, fmt.Sprintf("3 %x\n5 %x\n6 %x\n", stored, removed, "x"), &out)
	want := `{"what":"state","target":"w","state":"live","reason":"connected"}
{"what":"state","target":"w/1","state":"live","reason":"connected"}
{"what":"stored","target":"w/1","tier":"device","hashes":[5],"parent":0,"block_size":2,"tokens":[1,2]}
{"what":"state","target":"w/1","state":"gap","reason":"lost_batches"}
{"what":"clear","target":"w/1","reason":"lost_batches"}
{"what":"removed","target":"w/1","tier":"host","hashes":[5]}
{"what":"cleared","target":"w/1"}
{"what":"state","target":"w/1","state":"live","reason":"caught_up"}
`
	if got := out.String(); !strings.HasPrefix(got, want) || !strings.Contains(got, `"what":"warning","target":"w","reason":"malformed"`) {
		t.Errorf("got\n%s\nwant\n%sand a warning", got, want)
	}
}

// FuzzFrames plays recorded frames of all engines in a row: any numbers in any order.
func FuzzFrames(f *testing.F) {
	cleared := "93ca000000009191b0416c6c426c6f636b73436c656172656401"
	f.Add("0 " + cleared + "\n1 " + cleared + "\n5 " + cleared + "\n3 " + cleared)
	f.Add("7\n8 78")
	f.Add("18446744073709551615 93ca000000009001\n0 93ca0000000090ce7fffffff")
	f.Fuzz(func(t *testing.T, text string) {
		for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
			var out bytes.Buffer
			play(engine, text, &out)
			for line := range strings.Lines(out.String()) {
				if !json.Valid([]byte(line)) {
					t.Fatalf("%s: got line %q, want JSON", engine, line)
				}
			}
		}
	})
}

// pushed is a stream of recorded messages of a relay.
type pushed struct {
	grpc.ServerStream

	ctx context.Context
	in  *bytes.Reader
}

func (p pushed) Context() context.Context          { return p.ctx }
func (p pushed) Send(*kvlanev1.PushResponse) error { return nil }
func (p pushed) Recv() (*kvlanev1.PushRequest, error) {
	r := &kvlanev1.PushRequest{}
	if p.in.Len() == 0 {
		return nil, io.EOF
	}
	return r, (protodelim.UnmarshalOptions{MaxSize: 1 << 20}).UnmarshalFrom(p.in, r)
}

// FuzzPush plays the messages of relays, in any order and number, twice on one server.
func FuzzPush(f *testing.F) {
	record := func(messages ...*kvlanev1.PushRequest) {
		var b bytes.Buffer
		for _, m := range messages {
			if _, err := protodelim.MarshalTo(&b, m); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(b.Bytes())
	}
	hello := func(engine string, rank int32, replay bool) *kvlanev1.PushRequest {
		return &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Hello{Hello: &kvlanev1.Hello{Worker: "w", Engine: engine, Rank: new(rank), CanReplay: replay, BlockSize: 2}}}
	}
	batch := func(seq, replay uint64) *kvlanev1.PushRequest {
		return &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: seq, ReplayId: replay, Content: &kvlanev1.Batch_Events{Events: &kvlanev1.Events{Events: []*kvlanev1.Event{
			{Change: &kvlanev1.Event_Stored{Stored: &kvlanev1.Stored{Hashes: []uint64{seq}, Tokens: []uint32{1, 2}, BlockSize: 2}}},
		}}}}}}
	}
	raw := &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{Seq: 9, Content: &kvlanev1.Batch_Raw{Raw: []byte("\x93\xca\x00\x00\x00\x00\x91\x91\xb0AllBlocksCleared\x01")}}}}
	end := &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_ReplayEnd{ReplayEnd: &kvlanev1.ReplayEnd{ReplayId: 1}}}
	record(hello("vllm", 0, true), batch(0, 1), batch(1, 1), end, batch(2, 0), batch(5, 0), batch(3, 2), end, raw)
	record(hello("sglang", 1, false), batch(1, 0), batch(0, 0), batch(1, 0), raw)
	record(hello("trtllm", -1, false))
	record(hello("other", 0, false))
	record(batch(0, 0))
	record(hello("vllm", 0, false), hello("vllm", 0, false))
	record(hello("vllm", 0, false), &kvlanev1.PushRequest{Message: &kvlanev1.PushRequest_Batch{Batch: &kvlanev1.Batch{}}})
	f.Fuzz(func(t *testing.T, in []byte) {
		sink := &strict{t: t}
		s := NewPushServer(func(*kvlanev1.Hello) (Sink, error) { return sink, nil })
		for range 2 {
			_ = s.Push(pushed{ctx: t.Context(), in: bytes.NewReader(in)})
		}
		for _, st := range s.Statuses() {
			for _, target := range st.Targets {
				if target.State != Stale {
					t.Fatalf("got %v %v after its stream, want stale", target.Target, target.State)
				}
			}
			if target := st.Targets[0].Target; target.Rank < kvindex.NoRank || target.Worker == "" {
				t.Fatalf("got target %v", target)
			}
			s.Forget(st.Worker)
		}
		if left := s.Statuses(); len(left) > 0 {
			t.Fatalf("got %v after all workers were forgotten, want none", left)
		}
		if before := sink.events; before > 0 && len(in) == 0 {
			t.Fatal("got events of nothing")
		}
	})
}

package feed

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// Whatever a relay pushes, the resulting events have the form that the index requires.
func FuzzPushed(f *testing.F) {
	parent := uint64(3)
	seed, err := proto.Marshal(&kvlanev1.Events{Events: []*kvlanev1.Event{
		{Change: &kvlanev1.Event_Stored{Stored: &kvlanev1.Stored{Hashes: []uint64{9}, Parent: &parent, Tokens: []uint32{1, 2}, BlockSize: 2, Salt: "s", Extra: []uint64{1}}}},
		{Change: &kvlanev1.Event_Removed{Removed: &kvlanev1.Removed{Hashes: []uint64{9}, Tier: kvlanev1.Tier_TIER_HOST}}},
		{Change: &kvlanev1.Event_Cleared{}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(byte(pushedEvents), seed)
	f.Add(byte(pushedRaw), []byte{0x93, 0xca, 0, 0, 0, 0, 0x90, 0})
	f.Fuzz(func(t *testing.T, kind byte, content []byte) {
		if kind != pushedRaw {
			kind = pushedEvents
		}
		d := &pushDecoder{Decoder: NewDecoder(VLLM, 0)}
		b, err := d.Decode(append([]byte{kind}, content...))
		if err != nil {
			return
		}
		for i := range b.Events {
			ev := &b.Events[i]
			switch {
			case ev.Kind < kvindex.Stored || ev.Kind > kvindex.Cleared, ev.Tier >= kvindex.NumTiers:
				t.Fatalf("%+v", ev)
			case ev.Kind == kvindex.Stored && len(ev.Tokens) > 0 && len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize,
				len(ev.Extra) > 0 && len(ev.Extra) != len(ev.Hashes):
				t.Fatalf("misaligned: %+v", ev)
			}
		}
	})
}

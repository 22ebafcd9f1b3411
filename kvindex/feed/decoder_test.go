package feed_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
	"pgregory.net/rapid"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// pack encodes a payload with an independent library.
func pack(t testing.TB, v any) []byte {
	t.Helper()
	b, err := msgpack.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// seq returns n consecutive token ids, starting at first.
func seq(first, n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = first + i
	}
	return s
}

// show prints a batch in one line per event, drops last.
func show(b *feed.Batch, err error) string {
	var s strings.Builder
	if err != nil {
		fmt.Fprintf(&s, "error: %v\n", err)
	}
	if b.Rank != kvindex.NoRank {
		fmt.Fprintf(&s, "rank %d\n", b.Rank)
	}
	for i := range b.Events {
		e := &b.Events[i]
		fmt.Fprint(&s, []string{"?", "stored", "removed", "cleared"}[e.Kind])
		if e.Kind != kvindex.Cleared {
			fmt.Fprintf(&s, " tier=%d", e.Tier)
			if e.Group != 0 {
				fmt.Fprintf(&s, " group=%d", e.Group)
			}
			fmt.Fprintf(&s, " hashes=%v", e.Hashes)
		}
		if e.Kind == kvindex.Stored {
			if e.HasParent {
				fmt.Fprintf(&s, " parent=%d", e.Parent)
			}
			fmt.Fprintf(&s, " tokens=%v size=%d", e.Tokens, e.BlockSize)
			if e.Adapter != "" {
				fmt.Fprintf(&s, " adapter=%s", e.Adapter)
			}
			if e.Salt != "" {
				fmt.Fprintf(&s, " salt=%s", e.Salt)
			}
			for j, x := range e.Extra {
				if x != 0 {
					fmt.Fprintf(&s, " extra[%d]", j)
				}
			}
			for _, x := range e.Media {
				fmt.Fprintf(&s, " media[%d]", x.At)
			}
			if e.Window != 0 {
				fmt.Fprintf(&s, " window=%d", e.Window)
			}
		}
		s.WriteByte('\n')
	}
	for _, d := range b.Dropped {
		fmt.Fprintf(&s, "dropped %s x%d\n", d.Reason, d.Count)
	}
	return strings.TrimSpace(s.String())
}

type m = map[string]any

// Every row is one event or one batch as some version of an engine publishes it.
func TestDecodeEngines(t *testing.T) {
	digest := make([]byte, 32)
	copy(digest[24:], []byte{0x15, 0x52, 0x8b, 0x72, 0x6e, 0xfb, 0x88, 0xcb})
	stored := func(extra m) m {
		e := m{"type": "BlockStored", "block_hashes": []any{uint64(18177682803760873588), 2}, "parent_block_hash": nil, "token_ids": seq(1, 4), "block_size": 2,
			"lora_id": nil, "medium": "GPU", "lora_name": nil}
		for k, v := range extra {
			if e[k] = v; v == "absent" {
				delete(e, k)
			}
		}
		return e
	}
	batch := func(events ...any) []any { return []any{1.5, events, 1} }
	plain := "rank 1\nstored tier=0 hashes=[18177682803760873588 2] tokens=[1 2 3 4] size=2"
	tests := map[string]struct {
		engine feed.Engine
		in     any
		want   string
	}{
		"vllm map":                {feed.VLLM, batch(stored(m{"extra_keys": []any{nil, nil}, "group_idx": 0, "kv_cache_spec_kind": "full_attention"})), plain},
		"vllm map with parent 0":  {feed.VLLM, batch(stored(m{"parent_block_hash": 0})), strings.Replace(plain, " tokens", " parent=0 tokens", 1)},
		"a clock of 1970":         {feed.VLLM, []any{0.0, []any{stored(nil)}, 1}, plain}, // the engine's clock is not used
		"a clock far ahead":       {feed.VLLM, []any{1e12, []any{stored(nil)}, 1}, plain},
		"vllm oldest array":       {feed.VLLM, []any{1, []any{[]any{"BlockStored", []any{uint64(18177682803760873588), 2}, nil, seq(1, 4), 2}}}, plain[len("rank 1\n"):]},
		"vllm array, nil rank":    {feed.VLLM, []any{1.0, []any{[]any{"BlockStored", []any{5}, 4, seq(1, 2), 2, nil, "GPU", "ad", []any{[]any{"ad"}}, 0, "mla_attention", nil}}, nil}, "stored tier=0 hashes=[5] parent=4 tokens=[1 2] size=2 adapter=ad"},
		"batch as a map":          {feed.VLLM, m{"ts": 2.0, "events": []any{stored(nil)}, "data_parallel_rank": 1, "later": []int{1}}, plain},
		"bytes hashes":            {feed.VLLM, batch(stored(m{"block_hashes": [][]byte{digest, {1, 2}}})), strings.Replace(plain, "18177682803760873588 2", "1536443746491271371 258", 1)},
		"signed hashes":           {feed.SGLang, batch(stored(m{"block_hashes": []any{int64(-278502217879090434), 2}, "parent_block_hash": int64(-1)})), strings.Replace(strings.Replace(plain, "18177682803760873588", "18168241855830461182", 1), " tokens", " parent=18446744073709551615 tokens", 1)},
		"cpu medium":              {feed.VLLM, batch(stored(m{"medium": "CPU"})), strings.Replace(plain, "tier=0", "tier=1", 1)},
		"no medium":               {feed.VLLM, batch(stored(m{"medium": nil})), plain},
		"medium absent":           {feed.VLLM, batch(stored(m{"medium": "absent", "lora_id": "absent", "lora_name": "absent"})), plain},
		"disk and object store":   {feed.VLLM, batch(m{"type": "BlockRemoved", "block_hashes": []int{1}, "medium": "FS"}, m{"type": "BlockRemoved", "block_hashes": []int{1}, "medium": "OBJ"}), "rank 1\nremoved tier=2 hashes=[1]\nremoved tier=3 hashes=[1]"},
		"media of connectors":     {feed.VLLM, batch(m{"type": "BlockRemoved", "block_hashes": []int{1}, "medium": "cpu"}, m{"type": "BlockRemoved", "block_hashes": []int{1}, "medium": "NVMe"}, m{"type": "BlockRemoved", "block_hashes": []int{1}, "medium": "SHARED"}), "rank 1\nremoved tier=1 hashes=[1]\nremoved tier=2 hashes=[1]\nremoved tier=3 hashes=[1]"},
		"unknown medium":          {feed.VLLM, batch(stored(m{"medium": "TAPE"})), "rank 1\ndropped unknown_medium x1"},
		"salt":                    {feed.VLLM, batch(stored(m{"extra_keys": []any{[]any{"tenant-a"}, nil}})), plain + " salt=tenant-a"},
		"lora and salt":           {feed.VLLM, batch(stored(m{"lora_name": "ad", "lora_id": 1, "extra_keys": []any{[]any{"ad", "s"}, []any{"ad"}}})), plain + " adapter=ad salt=s"},
		"lora by number":          {feed.VLLM, batch(stored(m{"lora_id": 3})), plain + " adapter=lora-id:3"},
		"tagged keys":             {feed.VLLM, batch(stored(m{"extra_keys": []any{[]any{[]any{"lora", "ad", "/p"}, []any{"mm", "id", 1}, []any{"cache_salt", "s"}}, nil}})), plain + " adapter=ad salt=s media[1]"},
		"images":                  {feed.VLLM, batch(stored(m{"extra_keys": []any{[]any{[]any{"a", 0}, []any{"b", 1}}, []any{[]any{"b", -1}, []any{"c", 1}}}})), plain + " media[0] media[1] media[3]"},
		"image outside its block": {feed.VLLM, batch(stored(m{"extra_keys": []any{nil, []any{[]any{"imagehash", 7}}}})), plain + " extra[1]"},
		"image names in old form": {feed.VLLM, batch(stored(m{"parent_block_hash": 9, "extra_keys": []any{[]any{"imagehash"}, nil}})), strings.Replace(plain, " tokens", " parent=9 tokens", 1) + " extra[0]"},
		"prompt embeddings":       {feed.VLLM, batch(stored(m{"extra_keys": []any{[]any{"s", []byte{1, 2}}, nil}})), plain + " salt=s extra[0]"},
		"keys for another count":  {feed.VLLM, batch(stored(m{"extra_keys": []any{nil}})), "rank 1\ndropped misaligned x1"},
		"sliding window masked":   {feed.VLLM, batch(stored(m{"token_ids": seq(1, 8), "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}), m{"type": "BlockRemoved", "block_hashes": []int{4}, "medium": "GPU", "group_idx": 1}, stored(nil)), plain + "\ndropped other_group x2"},
		"sliding window": {feed.VLLM, batch(stored(m{"token_ids": seq(1, 8), "group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128, "extra_keys": []any{nil, nil}}),
			m{"type": "BlockRemoved", "block_hashes": []int{4}, "medium": "GPU", "group_idx": 1}), strings.Replace(plain, "tier=0", "tier=0 group=1", 1)[:len(plain)+8-len(" tokens=[1 2 3 4] size=2")] + " tokens=[] size=2 window=128\nremoved tier=0 group=1 hashes=[4]"},
		"sliding window, array":     {feed.VLLM, []any{1.0, []any{[]any{"BlockStored", []any{5}, 4, seq(1, 4), 2, nil, "GPU", nil, nil, 1, "sliding_window_mla", 64}}, nil}, "stored tier=0 group=1 hashes=[5] tokens=[] size=2 window=64"},
		"recurrent state":           {feed.VLLM, []any{1.0, []any{[]any{"BlockStored", []any{5}, 4, seq(1, 4), 2, nil, "GPU", nil, nil, 1, "mamba"}}, nil}, "stored tier=0 group=1 hashes=[5] tokens=[] size=2 window=2"},
		"full attention, a window":  {feed.VLLM, batch(stored(m{"kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": 64})), plain},
		"window of no length":       {feed.VLLM, batch(stored(m{"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": -5})), "rank 1\ndropped other_group x1"},
		"masked without kind":       {feed.VLLM, batch(stored(m{"token_ids": seq(1, 8)})), "rank 1\ndropped misaligned x1"},
		"decode in a sliding group": {feed.VLLM, batch(stored(m{"block_hashes": []int{}, "kv_cache_spec_kind": "sliding_window", "group_idx": 2})), "rank 1\ndropped other_group x1"},
		"decode outside the windows": {feed.VLLM, batch(stored(m{"block_hashes": []int{}, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8, "group_idx": 2})),
			"rank 1\nstored tier=0 group=2 hashes=[] tokens=[] size=2 window=8"},
		"second full group":      {feed.VLLM, batch(stored(m{"group_idx": 1, "kv_cache_spec_kind": "sink_full_attention"})), strings.Replace(plain, "tier=0", "tier=0 group=1", 1)},
		"placeholder":            {feed.VLLM, batch(stored(m{"token_ids": []int{}, "block_size": 0, "medium": "CPU"})), "rank 1\nstored tier=1 hashes=[18177682803760873588 2] tokens=[] size=0"},
		"no blocks":              {feed.VLLM, batch(stored(m{"block_hashes": []int{}, "token_ids": []int{}})), "rank 1\ndropped placeholder x1"},
		"remote blocks":          {feed.VLLM, batch(stored(m{"locality": "REMOTE"}), stored(m{"locality": "LOCAL", "ownership": nil})), plain + "\ndropped not_local x1"},
		"own parent":             {feed.VLLM, batch(stored(m{"parent_block_hash": 2})), "rank 1\ndropped own_parent x1"},
		"unknown tag and fields": {feed.VLLM, batch(m{"type": "BlockInactive", "block_hashes": []int{1}}, []any{"Later", 1, 2}, stored(m{"session_id": "x", "origin": []any{1, m{"a": 2}}})), plain + "\ndropped unknown_tag x2"},
		"bad events cost themselves": {feed.VLLM, batch(m{"type": "BlockStored", "block_hashes": "x", "token_ids": seq(1, 2)}, 5, nil, m{"no": "type"}, []any{}, stored(nil), m{"type": "BlockRemoved", "block_hashes": []any{1.5}}),
			plain + "\ndropped malformed x6"},
		"cleared, then stored": {feed.VLLM, batch(m{"type": "AllBlocksCleared"}, stored(nil)), "rank 1\ncleared\n" + plain[len("rank 1\n"):]},
		"cleared array":        {feed.VLLM, batch([]any{"AllBlocksCleared"}), "rank 1\ncleared"},
		"removed array":        {feed.VLLM, batch([]any{"BlockRemoved", []any{7, []byte{8}}, "CPU", 0}), "rank 1\nremoved tier=1 hashes=[7 8]"},
		"sglang salted array":  {feed.SGLang, batch([]any{"BlockStored", []any{5}, 4, seq(1, 2), 2, nil, "GPU", m{"cache_salt": "s", "session_id": "x"}}), "rank 1\nstored tier=0 hashes=[5] parent=4 tokens=[1 2] size=2 salt=s"},
		"sglang salted map":    {feed.SGLang, batch(stored(m{"cache_salt": "s", "lora_name": "absent"})), plain + " salt=s"},
		"sglang bigrams":       {feed.SGLang, batch(stored(m{"token_ids": [][]int{{1, 2}, {2, 3}, {3, 4}, {4, 5}}})), plain},
		"sglang host":          {feed.SGLang, batch(stored(m{"medium": "CPU_PINNED"}), stored(m{"medium": "EXTERNAL"})), strings.Replace(plain, "tier=0", "tier=1", 1) + strings.Replace(plain[len("rank 1"):], "tier=0", "tier=3", 1)},
		"no batch":             {feed.VLLM, "text", "error: feed: payload is not an event batch: neither array nor map"},
		"no events":            {feed.VLLM, m{"ts": 1.0}, "error: feed: payload is not an event batch: a map without events"},
		"short array":          {feed.VLLM, []any{1.0}, "error: feed: payload is not an event batch: an array of 1"},
		"rank out of range":    {feed.VLLM, []any{1.0, []any{}, uint64(1) << 40}, ""},
		"trtllm in the frame":  {feed.TRTLLM, batch(m{"event_id": 3, "hash_algo": "v2_sha256", "data": m{"type": "stored", "parent_hash": nil, "blocks": []any{m{"block_hash": "ff00000000000001" + strings.Repeat("0", 48), "tokens": []any{m{"token_id": 1, "token_extra_id": 0}, m{"token_id": 2, "token_extra_id": 0}}}}}}), "rank 1\nstored tier=0 hashes=[18374686479671623681] tokens=[1 2] size=2"},
		"trtllm by a relay":    {feed.TRTLLM, batch(stored(nil)), plain},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := show(feed.NewDecoder(tt.engine, 0).Decode(pack(t, tt.in))); got != tt.want {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

// TestDecodeOneWindow: without other groups that of the window is main attention, if its events have all blocks but perhaps the
// last. It is one of windows again, and empty, once there are others.
func TestDecodeOneWindow(t *testing.T) {
	window := func(window int, ids []int) []any {
		return []any{1.5, []any{m{"type": "BlockStored", "block_hashes": []int{1, 2}, "token_ids": ids, "block_size": 2, "medium": "GPU", "group_idx": 0,
			"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}}, nil}
	}
	full := m{"type": "BlockStored", "block_hashes": []int{1}, "token_ids": seq(1, 2), "block_size": 2, "medium": "GPU", "group_idx": 1, "kv_cache_spec_kind": "full_attention"}
	moved := m{"type": "BlockStored", "block_hashes": []int{1}, "token_ids": []int{}, "block_size": 0, "medium": "CPU"}
	both := window(8, seq(1, 4))
	both[1] = []any{both[1].([]any)[0], full}
	const whole, masked, other = "stored tier=0 hashes=[1 2] tokens=[1 2 3 4] size=2", "dropped placeholder x1", "stored tier=0 group=1 hashes=[1] tokens=[1 2] size=2"
	for name, steps := range map[string][]struct {
		in   []any
		want string
	}{
		"all blocks":                   {{window(8, seq(1, 4)), whole}, {window(8, seq(1, 4)), whole}},
		"all but the last":             {{window(8, seq(1, 6)), whole}},
		"all but the last, or but one": {{window(5, seq(1, 6)), masked}},
		"the last ones":                {{window(8, seq(1, 8)), masked}},
		"full attention besides":       {{both, whole + " window=8\n" + other}, {window(8, seq(1, 8)), "stored tier=0 hashes=[1 2] tokens=[] size=2 window=8"}},
		"full attention later": {{window(8, seq(1, 4)), whole}, {[]any{1.5, []any{full}, nil}, "cleared\n" + other},
			{[]any{1.5, []any{full}, nil}, other}},
		"blocks that are offloaded": {{window(8, seq(1, 4)), whole}, {[]any{1.5, []any{moved}, nil}, "stored tier=1 hashes=[1] tokens=[] size=0"}, {window(8, seq(1, 4)), whole}},
	} {
		d := feed.NewDecoder(feed.VLLM, 0)
		for i, step := range steps {
			if got := show(d.Decode(pack(t, step.in))); got != step.want {
				t.Errorf("%s, batch %d: got\n%s\nwant\n%s", name, i+1, got, step.want)
			}
		}
	}
}

// The events of TensorRT-LLM's HTTP poll, with one decoder for all rows of a case.
func TestDecodeTRTLLM(t *testing.T) {
	block := func(hash string, tokens string, more string) string {
		var ids []string
		for id := range strings.FieldsSeq(tokens) {
			ids = append(ids, `{"type":"unique_token","token_id":`+id+`,"token_extra_id":0}`)
		}
		return `{"type":"stored_block","block_hash":` + hash + `,"tokens":[` + strings.Join(ids, ",") + `],"cache_level":0,"priority":35` + more + `}`
	}
	stored := func(wrap, parent string, blocks ...string) string {
		return `{` + wrap + `"data":{"type":"stored","parent_hash":` + parent + `,"blocks":[` + strings.Join(blocks, ",") + `]}}`
	}
	tests := map[string][][2]string{
		"a chain, its partial end, removal": {
			{`{"event_id":0,"window_size":4096,"data":{"type":"created","num_blocks_per_cache_level":[100,0]}}`, "dropped no_effect x1"},
			{stored(`"event_id":1,"window_size":4096,"attention_dp_rank":3,`, "null", block("18177682803760873588", "1 2", `,"cache_salt":"s"`), block("8", "3 4", ""), block("9", "5", "")),
				"rank 3\nstored tier=0 hashes=[18177682803760873588 8] tokens=[1 2 3 4] size=2 salt=s\ndropped partial_block x1"},
			{stored(`"layer_group_id":1,`, "8", block("10", "5 6", "")), "stored tier=0 group=1 hashes=[10] parent=8 tokens=[5 6] size=2"},
			{`{"layer_group_id":1,"data":{"type":"removed","block_hashes":[10,"0x0b"]}}`, "removed tier=0 group=1 hashes=[10 11]"},
			{stored("", "8", block("12", "5", "")), "dropped partial_block x1"},
		},
		"only the largest window": {
			{`{"window_size":128,"data":{"type":"created"}}`, "dropped no_effect x1"},
			{`{"window_size":4096,"data":{"type":"created"}}`, "dropped no_effect x1"},
			{stored(`"window_size":128,`, "null", block("1", "1 2", "")), "dropped other_group x1"},
			{stored(`"window_size":4096,`, "null", block("1", "1 2", "")), "stored tier=0 hashes=[1] tokens=[1 2] size=2"},
			{stored("", "null", block("1", "1 2", "")), "stored tier=0 hashes=[1] tokens=[1 2] size=2"},
		},
		"updated, with null diffs": {
			{`{"data":{"type":"updated","block_hash":1,"cache_level":null,"priority":null}}`, "dropped no_effect x1"},
			{`{"data":{"type":"updated","block_hash":1,"cache_level":{"type":"event_diff","new_value":1,"old_value":0},"priority":null}}`, "dropped no_effect x1"},
		},
		"an unknown hash algorithm refuses the server": {
			{stored(`"hash_algo":"v9",`, "null", block("1", "1 2", "")), "dropped unknown_hash_algo x1"},
			{stored("", "null", block("1", "1 2", "")), "dropped unknown_hash_algo x1"},
		},
		"bare bodies, images, longer blocks": {
			{`{"type":"stored","parent_hash":5,"blocks":[` + block("1", "1 2", `,"mm_keys":[{"hash":"aa","start_offset":0}]`) + `]}`, "stored tier=0 hashes=[1] parent=5 tokens=[1 2] size=2 extra[0]"},
			{stored("", "null", block("1", "1 2 3 4", ""), block("2", "5 6 7 8", "")), "cleared\nstored tier=0 hashes=[1 2] tokens=[1 2 3 4 5 6 7 8] size=4"},
			{stored("", "1", block("1", "1 2 3 4", "")), "dropped own_parent x1"},
			{`{"data":{"type":"stored","blocks":[]}}`, "dropped placeholder x1"},
			{`{"data":{"type":"stored","blocks":[{"block_hash":9,"tokens":[ {"token_id" : 1, "type":"a\"b"} , 2,3, {"x":{"y":[1]},"token_extra_id":null,"token_id":4}]}]}}`, "stored tier=0 hashes=[9] tokens=[1 2 3 4] size=4"},
			{`{"data":{"type":"stored","blocks":[{"block_hash":9,"tokens":[{"token_id":1},{"token_id":2},{"token_id":3},{"token_id":4294967296}]}]}}`, "error"},
			{`{"data":{"type":"stored","blocks":[{"block_hash":9,"tokens":[{"token_id":1},{"token_id":2},{"token_id":3},{"token_id":4,"token_extra_id":18446744073709551615}]}]}}`, "stored tier=0 hashes=[9] tokens=[1 2 3 4] size=4 extra[0]"},
			{`{"data":{"type":"melted"}}`, "dropped unknown_tag x1"},
			{`{"data":{"type":"stored","blocks":[{"block_hash":1.5}]}}`, "error"},
			{`{"data":`, "error"},
			{`{"data":{"type":"stored","blocks":[{"block_hash":1,"tokens":[{"id":1}]}]}}`, "error"},
		},
	}
	for name, rows := range tests {
		t.Run(name, func(t *testing.T) {
			d := feed.NewDecoder(feed.TRTLLM, 0)
			for i, row := range rows {
				b, err := d.Decode([]byte(row[0]))
				if row[1] == "error" {
					if err == nil {
						t.Errorf("row %d: got %s, want an error", i, show(b, err))
					}
					continue
				}
				if got := show(b, err); got != row[1] {
					t.Errorf("row %d: got\n%s\nwant\n%s", i, got, row[1])
				}
			}
		})
	}
}

func TestForgetUnrefuses(t *testing.T) {
	d := feed.NewDecoder(feed.TRTLLM, 2)
	if _, err := d.Decode([]byte(`{"hash_algo":"v9","data":{"type":"removed","block_hashes":[1]}}`)); err != nil {
		t.Fatal(err)
	}
	if algo, refused := d.HashRefused(); !refused || algo != "v9" {
		t.Fatalf("%q %v", algo, refused)
	}
	d.Forget()
	if got, want := show(d.Decode([]byte(`{"data":{"type":"removed","block_hashes":[1]}}`))), "removed tier=0 hashes=[1]"; got != want {
		t.Fatalf("got %s", got)
	}
}

// Arrays and maps decode to the same events.
func TestArrayAndMapFormsAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, size := rapid.IntRange(1, 5).Draw(t, "blocks"), rapid.IntRange(1, 33).Draw(t, "block size")
		hashes := rapid.SliceOfN(rapid.Uint64(), n, n).Draw(t, "hashes")
		tokens := rapid.SliceOfN(rapid.Uint32(), n*size, n*size).Draw(t, "tokens")
		var parent, lora any
		if rapid.Bool().Draw(t, "has parent") {
			parent = rapid.Int64().Draw(t, "parent")
		}
		if rapid.Bool().Draw(t, "has lora") {
			lora = rapid.StringN(1, 8, -1).Draw(t, "lora")
		}
		medium := rapid.SampledFrom([]any{nil, "GPU", "CPU", "DISK"}).Draw(t, "medium")
		group := rapid.IntRange(0, 3).Draw(t, "group")
		asMap := m{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size, "medium": medium, "lora_name": lora, "group_idx": group}
		asArray := []any{"BlockStored", hashes, parent, tokens, size, nil, medium, lora, nil, group}
		one, err := msgpack.Marshal([]any{1.0, []any{asMap}, 0})
		two, err2 := msgpack.Marshal([]any{1.0, []any{asArray}, 0})
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		a := show(feed.NewDecoder(feed.VLLM, 0).Decode(one))
		b := show(feed.NewDecoder(feed.VLLM, 0).Decode(two))
		if a != b {
			t.Fatalf("map\n%s\narray\n%s", a, b)
		}
	})
}

func FuzzDecodeBatch(f *testing.F) {
	for _, v := range []any{
		[]any{1.5, []any{m{"type": "BlockStored", "block_hashes": []any{uint64(1 << 63), []byte("01234567")}, "parent_block_hash": int64(-5), "token_ids": seq(1, 4), "block_size": 2, "extra_keys": []any{[]any{"s"}, []any{[]any{"mm", "x", 1}}}, "group_idx": 1, "kv_cache_spec_kind": "full_attention"}}, 1},
		[]any{1.5, []any{[]any{"BlockStored", []any{5}, 4, seq(1, 2), 2, nil, "GPU", m{"cache_salt": "s"}}, []any{"BlockRemoved", []any{1}, "CPU"}, []any{"AllBlocksCleared"}}, nil},
		m{"ts": 1.0, "events": []any{m{"event_id": 1, "data": m{"type": "stored", "blocks": []any{m{"block_hash": 1, "tokens": []int{1, 2}}}}}}},
	} {
		f.Add(pack(f, v))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, engine := range []feed.Engine{feed.VLLM, feed.TRTLLM} {
			d := feed.NewDecoder(engine, 0)
			for range 2 {
				batch, err := d.Decode(b)
				checkBatch(t, batch)
				if err != nil && len(b) == 0 && len(batch.Events) > 0 {
					t.Fatal("got events from an empty payload")
				}
			}
		}
	})
}

func FuzzDecodeTRTLLM(f *testing.F) {
	f.Add([]byte(`{"event_id":1,"window_size":128,"hash_algo":"v1_block_key","attention_dp_rank":0,"layer_group_id":1,"data":{"type":"stored","parent_hash":18177682803760873588,"blocks":[{"block_hash":"ff","tokens":[{"token_id":1,"token_extra_id":2}],"mm_keys":["x"],"cache_salt":"s"}]}}`))
	f.Add([]byte(`{"data":{"type":"removed","block_hashes":[-1,"0xff"]}}`))
	f.Add([]byte(`{"type":"created"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		d := feed.NewDecoder(feed.TRTLLM, 0)
		for range 2 {
			batch, err := d.Decode(b)
			checkBatch(t, batch)
			if err == nil && b[0] == '{' && !json.Valid(b) {
				t.Fatalf("got %q, want JSON", b)
			}
		}
	})
}

// checkBatch checks what the index relies on, whatever the bytes were.
func checkBatch(t *testing.T, b *feed.Batch) {
	t.Helper()
	if b.Rank < kvindex.NoRank {
		t.Fatalf("rank %d", b.Rank)
	}
	for i := range b.Events {
		e := &b.Events[i]
		if e.Tier >= kvindex.NumTiers {
			t.Fatalf("tier %d", e.Tier)
		}
		if e.Kind != kvindex.Stored {
			continue
		}
		if len(e.Hashes) == 0 || e.BlockSize <= 0 && len(e.Tokens) > 0 || len(e.Tokens) != len(e.Hashes)*e.BlockSize || e.Extra != nil && len(e.Extra) != len(e.Hashes) {
			t.Fatalf("%d hashes, %d tokens, block size %d, %d extra", len(e.Hashes), len(e.Tokens), e.BlockSize, len(e.Extra))
		}
	}
}

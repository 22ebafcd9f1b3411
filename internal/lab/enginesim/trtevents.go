package enginesim

import (
	"encoding/json"
	"sync"
)

// trtEvents is the buffer behind POST /kv_cache_events: rank 0 publishes the events of all ranks, reading drains it, and
// the oldest are dropped when it is full.
type trtEvents struct {
	opts   *Options
	hash   hasher
	faults *faultBox

	mu     sync.Mutex
	next   map[int]int // event_id of each rank
	buffer []json.RawMessage
}

func (e *Engine) trtEvents() *trtEvents {
	if len(e.ranks) > 1 {
		return e.ranks[0].trt
	}
	return &trtEvents{opts: &e.opts, hash: e.opts.hasher(), faults: &e.faults, next: map[int]int{}}
}

type trtEvent struct {
	EventID    int    `json:"event_id"`
	WindowSize int    `json:"window_size"`
	HashAlgo   string `json:"hash_algo"`
	Rank       *int   `json:"attention_dp_rank,omitempty"`
	Data       any    `json:"data"`
}

type trtToken struct {
	Type    string `json:"type"`
	TokenID uint32 `json:"token_id"`
	ExtraID int    `json:"token_extra_id"`
}

type trtBlock struct {
	Type       string     `json:"type"`
	BlockHash  uint64     `json:"block_hash"`
	Tokens     []trtToken `json:"tokens"`
	CacheLevel int        `json:"cache_level"`
	Priority   int        `json:"priority"`
	MMKeys     []any      `json:"mm_keys"`
	CacheSalt  *string    `json:"cache_salt"`
}

type trtStored struct {
	Type       string     `json:"type"`
	ParentHash *uint64    `json:"parent_hash"`
	Blocks     []trtBlock `json:"blocks"`
}

type trtRemoved struct {
	Type   string   `json:"type"`
	Hashes []uint64 `json:"block_hashes"`
}

type trtCreated struct {
	Type   string `json:"type"`
	Blocks [2]int `json:"num_blocks_per_cache_level"`
}

func (t *trtEvents) created(rank int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.put(rank, trtCreated{"created", [2]int{t.opts.Blocks, 0}})
}

// put runs under the lock.
func (t *trtEvents) put(rank int, data any) {
	ev := trtEvent{EventID: t.next[rank], WindowSize: t.opts.MaxModelLen, HashAlgo: "v1_block_key", Data: data}
	t.next[rank]++
	if t.opts.Ranks > 1 {
		ev.Rank = &rank
	}
	f := t.faults.takeBatch()
	if f.StopEvents || f.DropBatches > 0 {
		return
	}
	raw, err := json.Marshal(ev)
	if err != nil {
		return
	}
	t.buffer = append(t.buffer, raw)
	if len(t.buffer) > t.opts.EventBuffer {
		t.buffer = t.buffer[len(t.buffer)-t.opts.EventBuffer:]
	}
}

func (t *trtEvents) add(events []kvEvent, rank int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range events {
		ev := &events[i]
		switch ev.kind {
		case blockStored:
			t.put(rank, t.stored(ev))
		case blockRemoved:
			out := trtRemoved{Type: "removed"}
			for _, d := range ev.hashes {
				out.Hashes = append(out.Hashes, t.hash.event(d))
			}
			t.put(rank, out)
		}
	}
}

func (t *trtEvents) stored(ev *kvEvent) trtStored {
	out := trtStored{Type: "stored"}
	if ev.parent != nil {
		h := t.hash.event(*ev.parent)
		out.ParentHash = &h
	}
	size := t.opts.BlockSize
	for i, d := range ev.hashes {
		b := trtBlock{Type: "stored_block", BlockHash: t.hash.event(d), Priority: 35, MMKeys: []any{}}
		if ev.id.salt != "" {
			b.CacheSalt = &ev.id.salt
		}
		for _, id := range ev.tokens[i*size : (i+1)*size] {
			b.Tokens = append(b.Tokens, trtToken{"unique_token", id, 0})
		}
		out.Blocks = append(out.Blocks, b)
	}
	return out
}

// drain gives the buffer as a JSON array and empties it.
func (t *trtEvents) drain() []json.RawMessage {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := t.buffer
	t.buffer = nil
	if out == nil {
		out = []json.RawMessage{}
	}
	return out
}

func (t *trtEvents) restart(rank int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next[rank] = 0
	t.buffer = nil
}

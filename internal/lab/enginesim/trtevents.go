package enginesim

import (
	"encoding/json"
	"sync"
)

// trtEvents is the buffer of POST /kv_cache_events: rank 0 publishes the events of all
// ranks. A request drains the buffer; when it is full, the oldest events are dropped.
type trtEvents struct {
	opts   *Options
	faults *faultBox

	mu     sync.Mutex
	next   map[int]int // event_id of each rank
	buffer []json.RawMessage
}

// trtBuffer is the number of events that are kept.
const trtBuffer = 8192

// object is a JSON object.
type object = map[string]any

func (e *Engine) trtEvents() *trtEvents {
	if len(e.ranks) > 1 {
		return e.ranks[0].trt
	}
	return &trtEvents{opts: &e.opts, faults: &e.faults, next: map[int]int{}}
}

func (t *trtEvents) created(rank int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.put(rank, object{"type": "created", "num_blocks_per_cache_level": []int{t.opts.Blocks, 0}})
}

// put requires the lock.
func (t *trtEvents) put(rank int, data object) {
	ev := object{"event_id": t.next[rank], "window_size": t.opts.MaxModelLen, "hash_algo": "v1_block_key", "data": data}
	t.next[rank]++
	if t.opts.Ranks > 1 {
		ev["attention_dp_rank"] = rank
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
	t.buffer = t.buffer[max(0, len(t.buffer)-trtBuffer):]
}

func (t *trtEvents) add(events []kvEvent, rank int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range events {
		ev := &events[i]
		var hashes []uint64
		for _, d := range ev.hashes {
			hashes = append(hashes, d.number())
		}
		switch ev.kind {
		case blockStored:
			t.put(rank, t.stored(ev, hashes))
		case blockRemoved:
			t.put(rank, object{"type": "removed", "block_hashes": hashes})
		}
	}
}

func (t *trtEvents) stored(ev *kvEvent, hashes []uint64) object {
	var parent any
	if ev.parent != nil {
		parent = ev.parent.number()
	}
	size := t.opts.BlockSize
	var blocks []object
	for i, hash := range hashes {
		var tokens []object
		for _, id := range ev.tokens[i*size : (i+1)*size] {
			tokens = append(tokens, object{"type": "unique_token", "token_id": id, "token_extra_id": 0})
		}
		blocks = append(blocks, object{"type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0, "priority": 35,
			"mm_keys": []any{}, "cache_salt": orNil(ev.id.salt)})
	}
	return object{"type": "stored", "parent_hash": parent, "blocks": blocks}
}

// drain returns the buffer as a JSON array and empties it.
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

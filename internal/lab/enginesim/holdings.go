package enginesim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"
)

// held is a prefilled prompt whose blocks wait on their rank for the decode side.
type held struct {
	seq    *sequence
	rank   *rank
	ids    []uint32 // the prompt
	call   string   // external request id of the prefill leg
	body   string   // SHA-256 of its body
	taken  chan struct{}
	lease  *time.Timer
	pulled bool // false when the lease ran out
}

// holdings are the prefilled prompts of an engine by the key of their protocol.
type holdings struct {
	eng *Engine

	mu      sync.Mutex
	items   map[string]*held
	used    map[string]bool // all keys used so far: a key is for one request
	changed chan struct{}   // closed and replaced by every put
}

func (h *holdings) put(key string, x *held) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used[key] {
		return fmt.Errorf("transfer key %q was used before", key)
	}
	h.used[key] = true
	h.items[key] = x
	x.taken = make(chan struct{})
	x.lease = time.AfterFunc(h.eng.opts.KVLease, func() {
		if h.remove(key, x, false) {
			h.eng.stats.count("lease expired")
		}
	})
	close(h.changed)
	h.changed = make(chan struct{})
	return nil
}

// remove ends a holding and releases its blocks; it returns false if the holding has already ended.
func (h *holdings) remove(key string, x *held, pulled bool) bool {
	h.mu.Lock()
	if h.items[key] != x {
		h.mu.Unlock()
		return false
	}
	delete(h.items, key)
	x.pulled = pulled
	x.lease.Stop()
	close(x.taken)
	h.mu.Unlock()
	x.rank.release(x.seq)
	return true
}

// wait finds a holding, or waits for it until ctx ends.
func (h *holdings) wait(ctx context.Context, key string) *held {
	for {
		h.mu.Lock()
		x, changed := h.items[key], h.changed
		h.mu.Unlock()
		if x != nil {
			return x
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// knew reports whether a request with this key was prefilled: then its lease ran out before decode came.
func (h *holdings) knew(key string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.used[key]
}

func (h *holdings) size() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.items)
}

func (h *holdings) clear() {
	h.mu.Lock()
	items := maps.Clone(h.items)
	h.mu.Unlock()
	for key, x := range items {
		h.remove(key, x, false)
	}
}

// pull is the decode side's request to the prefill side, over the side listener or the bootstrap server.
type pull struct {
	Engine string `json:"engine,omitempty"` // engine id, if the protocol carries one
	Key    string `json:"key"`
	WaitMS int    `json:"wait_ms"` // for protocols whose legs run concurrently
	Rank   *int   `json:"rank,omitempty"`
}

type pulled struct {
	IDs  []uint32 `json:"ids"`
	Rank int      `json:"rank"`
	Call string   `json:"call"`
	Body string   `json:"body"`
}

// servePull hands over the blocks of a prefilled prompt, once. A side channel has those of rank only, with -1 of all.
func (e *Engine) servePull(only int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var p pull
		if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(max(p.WaitMS, 1))*time.Millisecond)
		defer cancel()
		x := e.held.wait(ctx, p.Key)
		switch {
		case x == nil && r.Context().Err() != nil:
			e.stats.count("pull given up")
		case x == nil:
			e.stats.count(map[bool]string{true: "pull of blocks that are gone", false: "violation: pull of an unknown request"}[e.held.knew(p.Key)])
			http.Error(w, "no blocks for "+p.Key, http.StatusNotFound)
		case p.Engine != "" && p.Engine != e.engineID(x.rank):
			e.stats.count("violation: wrong engine id")
			http.Error(w, fmt.Sprintf("engine id %s, blocks are with %s", p.Engine, e.engineID(x.rank)), http.StatusConflict)
		case only >= 0 && only != x.rank.local:
			e.stats.count("violation: side channel of another rank")
			http.Error(w, fmt.Sprintf("rank %d, blocks are with rank %d", only, x.rank.local), http.StatusConflict)
		case p.Rank != nil && *p.Rank != x.rank.local:
			e.stats.count("violation: wrong prefill rank")
			http.Error(w, fmt.Sprintf("rank %d, blocks are with rank %d", *p.Rank, x.rank.local), http.StatusConflict)
		case !e.held.remove(p.Key, x, true):
			http.Error(w, "blocks are gone", http.StatusNotFound)
		default:
			e.stats.count("blocks handed over")
			writeJSON(w, http.StatusOK, pulled{x.ids, x.rank.local, x.call, x.body})
		}
	}
}

// engineID is a rank's name for the other side.
func (e *Engine) engineID(r *rank) string {
	if e.opts.Ranks == 1 {
		return e.id
	}
	return fmt.Sprintf("%s_dp%d", e.id, r.local)
}

// fetch requests a prompt's blocks from a prefill engine.
func (e *Engine) fetch(ctx context.Context, addr string, p pull) (*pulled, error) {
	raw, err := e.sidePost(ctx, "http://"+addr+"/sim/kv/pull", p)
	if err != nil {
		e.stats.count("transfer failed")
		return nil, internalError("block transfer: " + err.Error())
	}
	var got pulled
	if err := json.Unmarshal(raw, &got); err != nil {
		return nil, internalError("block transfer: " + err.Error())
	}
	return &got, nil
}

func (e *Engine) sidePost(ctx context.Context, url string, v any) ([]byte, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	var out bytes.Buffer
	if _, err := out.ReadFrom(res.Body); err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", res.Status, bytes.TrimSpace(out.Bytes()))
	}
	return out.Bytes(), nil
}

// take checks a fetched prompt against the decode side's own and starts the sequence with its blocks.
func (c *call) take(i int, got *pulled) error {
	s := c.seqs[i]
	if !slices.Equal(got.IDs, c.prompts[i]) {
		c.stats.count("violation: prefill and decode prompts differ")
		return internalError("the prefilled prompt is another one")
	}
	s.remote = s.prompt
	c.stats.count("blocks received")
	c.stats.update(c.rec, func(rec *RequestRecord) { rec.RemoteTokens += s.prompt })
	return nil
}

// hold keeps the blocks of a finished prefill under a key.
func (c *call) hold(i int, key string) (*held, error) {
	x := &held{seq: c.seqs[i], rank: c.rank, ids: c.prompts[i], call: c.id, body: c.rec.BodySHA256}
	if err := c.held.put(key, x); err != nil {
		c.stats.count("violation: transfer key used twice")
		c.rank.release(x.seq)
		return nil, badRequest(err.Error())
	}
	return x, nil
}

// SharedStore is a cache outside the engines that share it: a decode engine finds what a
// prefill engine wrote by its content. It is safe for concurrent use.
type SharedStore struct {
	mu      sync.Mutex
	prompts [][]uint32
}

func (s *SharedStore) put(ids []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.prompts = append(s.prompts, slices.Clone(ids))
}

// longest is the number of tokens at the head of ids that are stored.
func (s *SharedStore) longest(ids []uint32) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	best := 0
	for _, p := range s.prompts {
		n := 0
		for n < len(p) && n < len(ids) && p[n] == ids[n] {
			n++
		}
		best = max(best, n)
	}
	return best
}

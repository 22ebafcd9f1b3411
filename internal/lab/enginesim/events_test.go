package enginesim

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// eventually waits for a condition that other goroutines establish.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 10_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("never: %s", what)
}

func kinds(batch []any) string {
	var out []string
	for _, ev := range batch[1].([]any) {
		out = append(out, ev.(map[string]any)["type"].(string))
	}
	return strings.Join(out, " ")
}

func TestResetIsAnnouncedLate(t *testing.T) {
	e := start(t, Options{BlockSize: 4, EventsEndpoint: "tcp://127.0.0.1:0"})
	s := subscribe(t, e, 0)
	body := m{"prompt": words("One", 12), "max_tokens": 1}
	post(t, e.URL()+"/v1/completions", body)
	if _, batch := receive(t, s); kinds(batch) != "BlockStored" {
		t.Fatalf("got %s", kinds(batch))
	}
	post(t, e.URL()+"/reset_prefix_cache", "")
	post(t, e.URL()+"/reset_prefix_cache", "")
	if n := e.Stats().Ranks[0].Sequence; n != 1 {
		t.Fatalf("an idle rank announced its reset: %d batches", n)
	}
	if a := post(t, e.URL()+"/v1/completions", body); a.cached() != 0 {
		t.Errorf("cached after a reset: %d", a.cached())
	}
	if _, batch := receive(t, s); kinds(batch) != "AllBlocksCleared AllBlocksCleared BlockStored" {
		t.Fatalf("got %s", kinds(batch))
	}
}

func TestTensorRTEvents(t *testing.T) {
	e := start(t, Options{Engine: TRTLLM, BlockSize: 4, Blocks: 20, Ranks: 2})
	type event struct {
		ID   int `json:"event_id"`
		Rank int `json:"attention_dp_rank"`
		Data struct {
			Type   string        `json:"type"`
			Hashes []json.Number `json:"block_hashes"`
			Blocks []struct {
				Hash   json.Number `json:"block_hash"`
				Tokens []struct {
					ID int `json:"token_id"`
				} `json:"tokens"`
				Salt *string `json:"cache_salt"`
			} `json:"blocks"`
		} `json:"data"`
	}
	drain := func() (out []event) {
		a := post(t, e.URL()+"/kv_cache_events", "")
		if err := json.Unmarshal(a.raw, &out); err != nil {
			t.Fatalf("%v: %s", err, a.raw)
		}
		return out
	}
	if got := drain(); len(got) != 2 || got[0].Data.Type != "created" || got[1].Rank != 1 {
		t.Fatalf("at the start: %+v", got)
	}
	held := map[string]bool{}
	for i := range 12 {
		post(t, e.URL()+"/v1/completions", m{"prompt": words(fmt.Sprint("N", i), 20), "max_tokens": 2, "cache_salt": "s"})
	}
	next := map[int]int{0: 1, 1: 1}
	removed := 0
	for _, ev := range drain() {
		if ev.ID != next[ev.Rank] {
			t.Fatalf("event id %d of rank %d, want %d", ev.ID, ev.Rank, next[ev.Rank])
		}
		next[ev.Rank]++
		for _, b := range ev.Data.Blocks {
			held[string(b.Hash)] = true
			if len(b.Tokens) != 4 || b.Salt == nil {
				t.Errorf("block %+v", b)
			}
		}
		for _, h := range ev.Data.Hashes {
			if !held[string(h)] {
				t.Errorf("removed %s, which is not held", h)
			}
			delete(held, string(h))
			removed++
		}
	}
	if st := e.Stats(); removed == 0 || len(held) != st.Ranks[0].BlocksCached+st.Ranks[1].BlocksCached {
		t.Errorf("%d removed; events say %d held, engine %+v", removed, len(held), st.Ranks)
	}
	if got := drain(); len(got) != 0 {
		t.Errorf("not drained: %+v", got)
	}
	post(t, "http://"+e.SideAddr()+"/sim/reset", "")
	n := 0
	for _, ev := range drain() {
		n += len(ev.Data.Hashes)
	}
	if n != len(held) {
		t.Errorf("a reset removed %d of %d", n, len(held))
	}
}

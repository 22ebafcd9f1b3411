package enginesim

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"
)

// statsKept bounds the requests in /sim/stats.
const statsKept = 2000

// RequestRecord describes one request for generation that the engine received.
type RequestRecord struct {
	RequestID    string            `json:"request_id"`
	Path         string            `json:"path"`
	Headers      map[string]string `json:"headers"` // lower-case names
	BodySHA256   string            `json:"body_sha256"`
	BodyBytes    int               `json:"body_bytes"`
	Rank         int               `json:"rank"`   // local; -1 if the request reached no rank
	Pinned       bool              `json:"pinned"` // the request named its rank
	Leg          string            `json:"leg,omitempty"`
	PromptTokens int               `json:"prompt_tokens"`
	CachedTokens int               `json:"cached_tokens"`
	RemoteTokens int               `json:"remote_tokens,omitempty"`
	Generated    int               `json:"generated_tokens"`
	Status       int               `json:"status"` // 499: the client disconnected
	Error        string            `json:"error,omitempty"`
	Done         bool              `json:"done"`
	// Came is when the headers had arrived, Answered when the end of a good answer was about to be written.
	Came     time.Time `json:"came"`
	Answered time.Time `json:"answered,omitzero"`
}

// RankStats are the totals of a rank since its start, and its state.
type RankStats struct {
	Rank            int `json:"rank"` // global
	Requests        int `json:"requests"`
	Finished        int `json:"finished"`
	Aborted         int `json:"aborted"`
	Running         int `json:"running"`
	Waiting         int `json:"waiting"`
	PromptTokens    int `json:"prompt_tokens"`
	CachedTokens    int `json:"cached_tokens"`
	GeneratedTokens int `json:"generated_tokens"`
	TransferTokens  int `json:"transferred_tokens"`
	Steps           int `json:"steps"`
	BlocksUsed      int `json:"blocks_used"`
	BlocksCached    int `json:"blocks_cached"`
	Evictions       int `json:"evictions"`
	Subscribers     int `json:"subscribers"`
	Sequence        int `json:"sequence"` // of the next batch
}

// Stats is the answer of GET /sim/stats.
type Stats struct {
	Engine   EngineKind      `json:"engine"`
	Ranks    []RankStats     `json:"ranks"`
	Requests []RequestRecord `json:"requests"` // the newest, in order of arrival
	// Protocol counts events of the prefill/decode protocols, and each violation by its name.
	Protocol map[string]int `json:"protocol"`
	Held     int            `json:"held"` // prefilled requests whose blocks are not fetched yet
}

type stats struct {
	mu       sync.Mutex
	records  []*RequestRecord
	protocol map[string]int
}

func (s *stats) begin(r *http.Request, id string, raw []byte, came time.Time) *RequestRecord {
	sum := sha256.Sum256(raw)
	rec := &RequestRecord{RequestID: id, Path: r.URL.Path, Headers: map[string]string{}, BodySHA256: hex.EncodeToString(sum[:]), BodyBytes: len(raw), Rank: -1, Came: came}
	for name, values := range r.Header {
		rec.Headers[strings.ToLower(name)] = strings.Join(values, ", ")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.records = append(s.records, rec); len(s.records) > statsKept {
		s.records = s.records[len(s.records)-statsKept:]
	}
	return rec
}

func (s *stats) update(rec *RequestRecord, f func(*RequestRecord)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(rec)
}

func (s *stats) count(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.protocol == nil {
		s.protocol = map[string]int{}
	}
	s.protocol[name]++
}

// Stats returns the engine's records and counters.
func (e *Engine) Stats() Stats {
	out := Stats{Engine: e.opts.Engine, Protocol: map[string]int{}, Requests: []RequestRecord{}, Held: e.held.size()}
	for _, r := range e.ranks {
		out.Ranks = append(out.Ranks, r.stats())
	}
	e.stats.mu.Lock()
	defer e.stats.mu.Unlock()
	for _, rec := range e.stats.records {
		out.Requests = append(out.Requests, *rec)
	}
	maps.Copy(out.Protocol, e.stats.protocol)
	return out
}

func (r *rank) stats() RankStats {
	subs := r.pub.subscribers()
	r.pub.mu.Lock()
	seq := r.pub.seq
	r.pub.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	st := r.counts
	for _, list := range r.pool.cached {
		st.BlocksCached += len(list)
	}
	st.Rank, st.Running, st.Waiting, st.Subscribers, st.Sequence = r.global(), len(r.running), len(r.waiting), subs, int(seq)
	st.BlocksUsed, st.Evictions = len(r.pool.blocks)-r.pool.free, r.pool.evictions
	return st
}

package enginesim

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

func (s *service) sglangServerInfo(w http.ResponseWriter, _ *http.Request) {
	mode := map[Role]string{Both: "null", Prefill: "prefill", Decode: "decode"}[s.opts.Role]
	out := map[string]any{
		"model_path": s.opts.Model, "served_model_name": s.opts.Model, "page_size": s.opts.BlockSize, "dp_size": s.opts.Ranks, "tp_size": 1,
		"context_length": s.opts.MaxModelLen, "max_total_num_tokens": s.opts.Blocks * s.opts.BlockSize, "disaggregation_mode": mode,
		"speculative_algorithm": nil, "load_balance_method": "round_robin", "version": "0.5.23", "internal_states": []any{},
	}
	if s.boot != nil {
		out["disaggregation_bootstrap_port"] = portOf(s.boot.addr)
	}
	if pub := s.ranks[0].pub; pub.pub != nil {
		events := map[string]any{
			"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": portOf(pub.pub.Addr().String()), "topic": s.opts.EventsTopic,
			"block_size": s.opts.BlockSize, "dp_size": s.opts.Ranks,
		}
		if pub.replay != nil {
			events["replay_endpoint_port_base"] = portOf(pub.replay.Addr().String())
		}
		out["kv_events"] = events
	}
	writeJSON(w, http.StatusOK, out)
}

func portOf(addr string) int {
	n, _ := strconv.Atoi(addr[strings.LastIndexByte(addr, ':')+1:])
	return n
}

func (s *service) modelInfo(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"model_path": s.opts.Model, "served_model_name": s.opts.Model, "tokenizer_path": s.opts.Model, "is_generation": true})
}

func (s *service) loads(w http.ResponseWriter, r *http.Request) {
	only := r.URL.Query().Get("dp_rank")
	var list []any
	for _, rank := range s.ranks {
		if only != "" && only != strconv.Itoa(rank.local) {
			continue
		}
		st := rank.stats()
		used := st.BlocksUsed * s.opts.BlockSize
		capacity := s.opts.Blocks * s.opts.BlockSize
		hits := 0.0
		if st.PromptTokens > 0 {
			hits = float64(st.CachedTokens) / float64(st.PromptTokens)
		}
		list = append(list, map[string]any{
			"timestamp": float64(time.Now().UnixMicro()) / 1e6, "dp_rank": rank.local, "num_running_reqs": st.Running, "num_waiting_reqs": st.Waiting,
			"num_waiting_uncached_tokens": 0, "num_used_tokens": used, "num_total_tokens": used, "max_total_num_tokens": capacity,
			"token_usage": float64(used) / float64(capacity), "gen_throughput": 0.0, "cache_hit_rate": hits, "max_running_requests": s.opts.Time.MaxSeqs,
		})
	}
	writeJSON(w, http.StatusOK, map[string]any{"timestamp": time.Now().UTC().Format(time.RFC3339Nano), "version": "0.5.23", "dp_rank_count": s.opts.Ranks, "loads": list})
}

// flushCache clears every idle rank at once and says no if one was busy.
func (s *service) flushCache(w http.ResponseWriter, _ *http.Request) {
	ok := true
	for _, r := range s.ranks {
		ok = r.reset(false) && ok
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if !ok {
		w.WriteHeader(http.StatusBadRequest)
		_, _ = w.Write([]byte("Flush cache failed.\n"))
		return
	}
	_, _ = w.Write([]byte("Cache flushed.\n"))
}

func (s *service) trtServerInfo(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{
		"tokens_per_block": s.opts.BlockSize, "attention_dp_size": s.opts.Ranks, "max_batch_size": s.opts.Time.MaxSeqs,
		"disaggregated_params": map[string]any{"ctx_info_endpoint": "http://" + s.side.addr},
	})
}

// kvCacheEvents drains the buffer.
func (s *service) kvCacheEvents(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, s.ranks[0].trt.drain())
}

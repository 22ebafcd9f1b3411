package enginesim

import (
	"net/http"
	"strconv"
	"strings"
)

func (s *service) sglangServerInfo(w http.ResponseWriter, _ *http.Request) {
	mode := map[Role]string{Both: "null", Prefill: "prefill", Decode: "decode"}[s.opts.Role]
	out := object{
		"model_path": s.opts.Model, "served_model_name": s.opts.Model, "page_size": s.opts.BlockSize, "dp_size": s.opts.Ranks, "tp_size": 1,
		"context_length": s.opts.MaxModelLen, "max_total_num_tokens": s.opts.Blocks * s.opts.BlockSize, "disaggregation_mode": mode,
		"speculative_algorithm": nil, "load_balance_method": "round_robin", "version": "0.5.23", "internal_states": []any{}, "disable_radix_cache": false,
	}
	if s.boot != nil {
		out["disaggregation_bootstrap_port"] = portOf(s.boot.addr)
	}
	if pub := s.ranks[0].pub; pub.pub != nil {
		events := object{
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

// flushCache fails if a rank was busy.
func (s *service) flushCache(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if !reset(s.ranks, false) {
		w.WriteHeader(http.StatusBadRequest)
		_, _ = w.Write([]byte("Flush cache failed.\n"))
		return
	}
	_, _ = w.Write([]byte("Cache flushed.\n"))
}

func (s *service) trtServerInfo(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, object{
		"tokens_per_block": s.opts.BlockSize, "attention_dp_size": s.opts.Ranks, "max_batch_size": s.opts.Time.MaxSeqs,
		"disaggregated_params": object{"ctx_info_endpoint": "http://" + s.side.addr},
	})
}

package enginesim

import (
	"fmt"
	"net/http"
	"strings"
)

// metrics prints the engine's own names, one series for each rank.
func (s *service) metrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	var b strings.Builder
	last := ""
	for _, m := range engineMetrics[s.opts.Engine] {
		if m.name != last {
			fmt.Fprintf(&b, "# TYPE %s %s\n", m.name, m.kind)
			last = m.name
		}
		for _, r := range s.visible() {
			labels := fmt.Sprintf(`engine="%d",model_name="%s"`, r.global(), s.opts.Model)
			if s.opts.Engine != VLLM {
				labels = fmt.Sprintf(`dp_rank="%d",engine_type="unified",model_name="%s",pp_rank="0",tp_rank="0"`, r.local, s.opts.Model)
			}
			if m.labels != "" {
				labels += "," + strings.NewReplacer("{block_size}", fmt.Sprint(s.opts.BlockSize), "{blocks}", fmt.Sprint(s.opts.Blocks)).Replace(m.labels)
			}
			st := r.stats()
			fmt.Fprintf(&b, "%s{%s} %v\n", m.name, labels, m.value(&st, &s.opts))
		}
	}
	_, _ = w.Write([]byte(b.String()))
}

type metric struct {
	name, kind, labels string
	value              func(st *RankStats, o *Options) any
}

func usageOf(st *RankStats, o *Options) any { return float64(st.BlocksUsed) / float64(o.Blocks) }

var engineMetrics = map[EngineKind][]metric{
	VLLM: {
		{"vllm:num_requests_running", "gauge", "", func(st *RankStats, _ *Options) any { return st.Running }},
		{"vllm:num_requests_waiting", "gauge", "", func(st *RankStats, _ *Options) any { return st.Waiting }},
		{"vllm:num_requests_waiting_by_reason", "gauge", `reason="capacity"`, func(st *RankStats, _ *Options) any { return st.Waiting }},
		{"vllm:kv_cache_usage_perc", "gauge", "", usageOf},
		{"vllm:prefix_cache_queries_total", "counter", "", func(st *RankStats, _ *Options) any { return st.PromptTokens }},
		{"vllm:prefix_cache_hits_total", "counter", "", func(st *RankStats, _ *Options) any { return st.CachedTokens }},
		{"vllm:prompt_tokens_total", "counter", "", func(st *RankStats, _ *Options) any { return st.PromptTokens }},
		{"vllm:prompt_tokens_by_source_total", "counter", `source="local_compute"`, func(st *RankStats, _ *Options) any { return st.PromptTokens - st.CachedTokens - st.TransferTokens }},
		{"vllm:prompt_tokens_by_source_total", "counter", `source="local_cache_hit"`, func(st *RankStats, _ *Options) any { return st.CachedTokens }},
		{"vllm:prompt_tokens_by_source_total", "counter", `source="external_kv_transfer"`, func(st *RankStats, _ *Options) any { return st.TransferTokens }},
		{"vllm:generation_tokens_total", "counter", "", func(st *RankStats, _ *Options) any { return st.GeneratedTokens }},
		{"vllm:request_success_total", "counter", `finished_reason="length"`, func(st *RankStats, _ *Options) any { return st.Finished }},
		{"vllm:cache_config_info", "gauge", `block_size="{block_size}",num_gpu_blocks="{blocks}",enable_prefix_caching="True"`, func(*RankStats, *Options) any { return 1 }},
	},
	SGLang: {
		{"sglang:num_running_reqs", "gauge", "", func(st *RankStats, _ *Options) any { return st.Running }},
		{"sglang:num_queue_reqs", "gauge", "", func(st *RankStats, _ *Options) any { return st.Waiting }},
		{"sglang:token_usage", "gauge", "", usageOf},
		{"sglang:prompt_tokens_total", "counter", "", func(st *RankStats, _ *Options) any { return st.PromptTokens }},
		{"sglang:generation_tokens_total", "counter", "", func(st *RankStats, _ *Options) any { return st.GeneratedTokens }},
		{"sglang:cached_tokens_total", "counter", `cache_source="device"`, func(st *RankStats, _ *Options) any { return st.CachedTokens }},
		{"sglang:cache_config_info", "gauge", `page_size="{block_size}",num_pages="{blocks}"`, func(*RankStats, *Options) any { return 1 }},
	},
	TRTLLM: {
		{"trtllm_num_requests_running", "gauge", "", func(st *RankStats, _ *Options) any { return st.Running }},
		{"trtllm_num_requests_waiting", "gauge", "", func(st *RankStats, _ *Options) any { return st.Waiting }},
		{"trtllm_kv_cache_utilization", "gauge", "", usageOf},
		{"trtllm_kv_cache_tokens_per_block", "gauge", "", func(_ *RankStats, o *Options) any { return o.BlockSize }},
		{"trtllm_kv_cache_max_blocks", "gauge", "", func(_ *RankStats, o *Options) any { return o.Blocks }},
	},
}

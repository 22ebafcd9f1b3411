package workers

import (
	"bytes"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"time"
)

// maxPage bounds a /metrics page; the largest seen in the field is below 1 MiB. maxLine bounds the labels of a cache.
const maxPage, maxLine = 8 << 20, 64 << 10

func newClient(timeout time.Duration) *http.Client {
	if timeout <= 0 {
		timeout = time.Second
	}
	// An engine must answer for itself, not redirect to other hosts.
	noRedirect := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &http.Client{CheckRedirect: noRedirect, Timeout: timeout, Transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: timeout}).DialContext,
		MaxIdleConnsPerHost: 1,
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true,

		MaxResponseHeaderBytes: maxHead,
	}}
}

// series names an engine's gauges and the label that carries the rank.
type series struct{ running, waiting, usage, rank string }

var engineSeries = map[string]series{
	"vllm":   {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "engine"},
	"sglang": {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "dp_rank"},
	"trtllm": {"trtllm_num_requests_running", "trtllm_num_requests_waiting", "trtllm_kv_cache_utilization", "dp_rank"},
}

// maxGauge bounds a gauge, so that sums over a page fit into an integer. No engine has more requests.
const maxGauge = 1 << 31

// maxRanks bounds the ranks of a page, because no worker has more.
const maxRanks = 1024

// parseLoads scans a Prometheus text page for the three gauges of an engine. It reads only
// complete lines and skips unknown ones.
func parseLoads(page []byte, engine string) []RankLoad {
	names, ok := engineSeries[engine]
	if !ok {
		return nil
	}
	var out []RankLoad
	at := map[int32]int{} // places in out
	fields := []struct {
		name []byte
		set  func(*RankLoad, float64)
	}{
		{[]byte(names.running), func(l *RankLoad, v float64) { l.Running += v }},
		{[]byte(names.waiting), func(l *RankLoad, v float64) { l.Waiting += v }},
		{[]byte(names.usage), func(l *RankLoad, v float64) { l.KVUsage = max(l.KVUsage, v) }},
	}
	for line := range bytes.Lines(page) {
		for _, f := range fields {
			rest, ok := bytes.CutPrefix(line, f.name)
			if !ok || len(rest) == 0 || (rest[0] != '{' && rest[0] != ' ') {
				continue
			}
			rank, value, ok := sample(rest, names.rank)
			if !ok {
				continue
			}
			i, known := at[rank]
			if !known && len(out) == maxRanks {
				continue
			}
			if !known {
				i, at[rank] = len(out), len(out)
				out = append(out, RankLoad{Rank: rank})
			}
			f.set(&out[i], value)
		}
	}
	return out
}

// span returns the lowest rank in loads, and the number of ranks.
func span(loads []RankLoad) (first, ranks int) {
	for _, l := range loads {
		if l.Rank >= 0 && (ranks == 0 || int(l.Rank) < first) {
			first = int(l.Rank)
		}
		if l.Rank >= 0 {
			ranks++
		}
	}
	return first, ranks
}

var (
	cacheSeries = []byte(":cache_config_info{")
	blockSize   = regexp.MustCompile(`[{,](?:block|page)_size="(\d+)"`)
)

// parseCache reads the labels of vllm:cache_config_info or sglang:cache_config_info.
func parseCache(page []byte) (c EngineCache) {
	_, line, ok := bytes.Cut(page, cacheSeries)
	if !ok {
		return c
	}
	line, _, _ = bytes.Cut(line[:min(len(line), maxLine)], []byte{'\n'})
	line = append([]byte{'{'}, line...)
	if m := blockSize.FindSubmatch(line); m != nil {
		c.BlockSize, _ = strconv.Atoi(string(m[1]))
	}
	c.PrefixCachingOff = bytes.Contains(line, []byte(`enable_prefix_caching="False"`))
	return c
}

// sample reads `{labels} value [timestamp]`.
func sample(rest []byte, rankLabel string) (rank int32, value float64, ok bool) {
	rank = -1
	if rest[0] == '{' {
		end := bytes.LastIndexByte(rest, '}')
		if end < 0 {
			return 0, 0, false
		}
		if n, err := strconv.ParseInt(string(label(rest[1:end], rankLabel)), 10, 32); err == nil && n >= 0 {
			rank = int32(n)
		}
		rest = rest[end+1:]
	}
	number, _, _ := bytes.Cut(bytes.TrimSpace(rest), []byte{' '})
	value, err := strconv.ParseFloat(string(number), 64)
	return rank, value, err == nil && value >= 0 && value <= maxGauge
}

// label returns the value of a label, as it is written, nil if it is missing.
func label(labels []byte, name string) []byte {
	for {
		key, rest, ok := bytes.Cut(labels, []byte(`="`))
		if !ok {
			return nil
		}
		end := 0
		for end < len(rest) && rest[end] != '"' {
			if rest[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(rest) {
			return nil
		}
		if string(bytes.TrimLeft(key, ", ")) == name {
			return rest[:end]
		}
		labels = rest[end+1:]
	}
}

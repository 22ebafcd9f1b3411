package routing

import (
	"maps"
	"math"
	"slices"
	"time"
)

// Config holds the settings of a Router. Start from DefaultConfig: a zero field does not mean a default, and some zeros
// are invalid.
type Config struct {
	// Policy chooses the target of a request that is not disaggregated.
	Policy Policy `json:"policy" yaml:"policy"`
	// Disagg holds for prefill and decode pools.
	Disagg Disagg `json:"disagg" yaml:"disagg"`
	// DisaggOf replaces Disagg for the requests of a model, by its name.
	DisaggOf map[string]*Disagg `json:"disagg_of,omitempty" yaml:"-" jsonschema:"-"`
	// MaxConversations bounds the table of conversations, per leg. 1 to 2^28.
	MaxConversations int `json:"max_conversations" yaml:"max_conversations"`
	// MaxPrefixBlocks bounds the blocks kept to recognise implicit conversations, per leg; about 40 bytes each. 1 to 2^28.
	MaxPrefixBlocks int `json:"max_prefix_blocks" yaml:"max_prefix_blocks"`
	// PrefixSkip is the number of leading prompt tokens, such as a shared system prompt, that are ignored when a
	// conversation is recognised by its prefix. 0 to 2^24.
	PrefixSkip int `json:"prefix_skip" yaml:"prefix_skip"`
	// Node makes the generated conversation keys of replicas differ.
	Node uint64 `json:"node" yaml:"node"`
	// HashSeed keys the hashes of clients' ids, which break random ties and find conversations. Any value. Keep it
	// secret where clients are not trusted, and equal on replicas that must break ties alike.
	HashSeed uint64 `json:"hash_seed,omitempty" jsonschema:"-" yaml:"-"`
	// ReportTTL is how long an engine's load report is used. 10 ms to 10 min.
	ReportTTL time.Duration `json:"report_ttl" yaml:"report_ttl"`
	// SuspectAfter is the shortest wait for a first token that can make a target suspect, so that new requests avoid
	// it. 0 turns this off. 0 to 10 min.
	SuspectAfter time.Duration `json:"suspect_after" yaml:"suspect_after"`
	// WaitingTokens is the assumed prefill of a waiting request that this router did not place: engines report only how
	// many there are. 0 to 10^6.
	WaitingTokens int64 `json:"waiting_tokens" yaml:"waiting_tokens"`
	// Hold refuses a request with a HeldError while its best target has more than this many
	// uncached tokens queued. 0 turns this off.
	Hold int64 `json:"hold,omitempty" jsonschema:"-" yaml:"-"`
	// KVTokens is the size of a target's KV cache in tokens. If set, a new conversation is refused with a HeldError
	// without a Slot while running conversations fill the memory. 0 turns this off.
	KVTokens int64 `json:"kv_tokens,omitempty" jsonschema:"-" yaml:"-"`
	// Unmet selects what happens to a request whose Query.TTFT cannot be met; "" is UnmetRoute.
	Unmet Unmet `json:"unmet,omitempty" jsonschema:"-" yaml:"-"`
	// RemoteTTL ends bookings of other replicas if their release was lost. Set it above the longest request. 1 s to 24 h.
	RemoteTTL time.Duration `json:"remote_ttl" yaml:"remote_ttl"`
	// PrefillRate is a target's prefill speed in tokens per second. It is used for retry hints, and a wait up to ten
	// times longer than it predicts is never suspect. 1 to 10^7.
	PrefillRate float64 `json:"prefill_rate" yaml:"prefill_rate"`
}

// DefaultConfig returns the kv-aware preset, with the cost rule for pools.
func DefaultConfig() Config {
	return Config{
		Policy:           kvAware(),
		Disagg:           defaultDisagg(),
		MaxConversations: 100_000,
		MaxPrefixBlocks:  1 << 20,
		ReportTTL:        10 * time.Second,
		SuspectAfter:     2 * time.Second,
		WaitingTokens:    2048,
		RemoteTTL:        24 * time.Hour,
		PrefillRate:      10_000,
	}
}

func (c *Config) check(ps *problems) {
	c.Policy.check("policy.", ps)
	c.Disagg.check("disagg.", ps)
	for _, name := range slices.Sorted(maps.Keys(c.DisaggOf)) {
		c.DisaggOf[name].check("disaggOf."+name+".", ps)
	}
	ps.within("", []bound{
		{"max_conversations", float64(c.MaxConversations), 1, 1 << 28},
		{"max_prefix_blocks", float64(c.MaxPrefixBlocks), 1, 1 << 28},
		{"prefix_skip", float64(c.PrefixSkip), 0, 1 << 24},
		{"waiting_tokens", float64(c.WaitingTokens), 0, 1e6},
		{"prefill_rate", c.PrefillRate, 1, 1e7},
	})
	ps.span("report_ttl", c.ReportTTL, 10*time.Millisecond, 10*time.Minute)
	ps.span("suspect_after", c.SuspectAfter, 0, 10*time.Minute)
	ps.span("remote_ttl", c.RemoteTTL, time.Second, 24*time.Hour)
}

// RetryAfter estimates when a target has capacity for a request behind that many waiting tokens, 1 s to 30 s. It
// assumes that the shortest queue is computed first, and that all targets then share the waiting tokens.
func (r *Router) RetryAfter(waiting int64) time.Duration {
	least, n := int64(math.MaxInt64), int64(0)
	for _, slot := range r.order {
		t := &r.targets[slot]
		least = min(least, t.load.Queue)
		if t.state == eligible && t.role != Prefill {
			n++
		}
	}
	seconds := math.Ceil((float64(least) + float64(waiting)/float64(max(n, 1))) / r.config.PrefillRate)
	return time.Duration(min(max(seconds, 1), 30)) * time.Second
}

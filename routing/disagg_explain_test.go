package routing

import (
	"fmt"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// Every rule tells what it compared, how, and with what limit.
func TestDisaggExplains(t *testing.T) {
	for _, c := range []struct {
		mode           DisaggMode
		whole          bool
		limit          int64 // of the mode
		prompt, cached int64
		want           string
	}{
		{ModeThreshold, false, 600, 1000, 500, "compute on the decode target: 500 uncached tokens < threshold 600"},
		{ModeThreshold, false, 500, 1000, 500, "prefill pool: 500 uncached tokens >= threshold 500"},
		{ModeThreshold, true, 600, 1000, 500, "prefill pool: 1000 prompt tokens >= threshold 600"},
		{ModeThreshold, true, 1001, 1000, 500, "compute on the decode target: 1000 prompt tokens < threshold 1001"},
		{ModeThreshold, false, 0, 1000, 500, "prefill pool: 500 uncached tokens, threshold 0: always"},
		{ModeConditional, false, 500, 1000, 500, "compute on the decode target: 500 unmatched tokens <= max_local_prefill 500"},
		{ModeConditional, false, 499, 1000, 500, "prefill pool: 500 unmatched tokens > max_local_prefill 499"},
		{ModeConditional, false, 5000, 1000, 0, "prefill pool: nothing of 1000 prompt tokens matches"},
		{ModeCost, false, 501, 1000, 500, "compute on the decode target: 500 uncached tokens < local_below 501"},
		{ModeCost, false, 500, 1000, 500, "here 1500 > prefill pool 1228"},
	} {
		t.Run(fmt.Sprint(c.mode, c.limit, c.whole), func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.Disagg.Mode, cfg.Disagg.WholePrompt = c.mode, c.whole
			cfg.Disagg.Threshold, cfg.Disagg.MaxLocalPrefill, cfg.Disagg.LocalBelow = c.limit, c.limit, c.limit
			r, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			for i, role := range []Role{Prefill, Decode} {
				r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint(role), Rank: kvindex.NoRank}, Role: role, Ready: true})
			}
			var overlaps []Overlap
			if c.cached > 0 {
				overlaps = append(overlaps, held(1, int32(c.cached)))
			}
			ex := &Explanation{}
			if _, err := r.Pick(0, &Query{PromptTokens: c.prompt}, overlaps, ex); err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, v := range ex.Verdicts {
				if v.Stage == "disagg" {
					got = v.Text
				}
			}
			if got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

package routing

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Disagg decides whether a request's prompt is computed by a prefill worker. It
// matters only where targets have the roles prefill or decode.
type Disagg struct {
	// Mode is the rule.
	Mode DisaggMode `json:"mode" yaml:"mode"`
	// Threshold is for ModeThreshold: disaggregate prompts of at least this many tokens; all if it is 0 or less.
	Threshold int64 `json:"threshold" yaml:"threshold"`
	// WholePrompt compares the threshold with all tokens of the prompt, not only those that the decode target lacks.
	WholePrompt bool `json:"whole_prompt" yaml:"whole_prompt"`
	// MaxLocalPrefill is for ModeConditional: disaggregate prompts with more uncached tokens than this, or without any
	// match. Use at least 1, so that a fully cached prompt is not disaggregated.
	MaxLocalPrefill int64 `json:"max_local_prefill" yaml:"max_local_prefill"`
	// K is for ModeCost: the price of a prefill that disturbs decoding. 2 gives the best time to first token, 3 is best
	// overall, 5 on slow links. 0 to 100.
	K float64 `json:"k" yaml:"k"`
	// Resident is the price of a token resident on the decode target. 0 to 10.
	Resident float64 `json:"resident" yaml:"resident"`
	// TransferFixed and TransferPerToken are the time of a KV transfer, as the number of tokens that a prefill worker
	// computes meanwhile.
	TransferFixed    float64 `json:"transfer_fixed"    yaml:"transfer_fixed"`
	TransferPerToken float64 `json:"transfer_per_token" yaml:"transfer_per_token"`
	// LocalBelow computes prompts with fewer uncached tokens on the decode target.
	LocalBelow int64 `json:"local_below" yaml:"local_below"`
	// SameZone prefers prefill targets of the decode target's zone.
	SameZone bool `json:"same_zone" yaml:"same_zone"`
	// Fallback lets a prefill target serve the complete request while no decode target can.
	Fallback bool `json:"fallback,omitempty" yaml:"fallback"`
	// Prefill and Decode are the policies of the two pools.
	Prefill Policy `json:"prefill" yaml:"prefill"`
	Decode  Policy `json:"decode"  yaml:"decode"`
}

// DisaggMode is a rule of Disagg.
type DisaggMode string

const (
	// ModeOff ignores the roles: one worker serves the whole request.
	ModeOff DisaggMode = "off"
	// ModeThreshold compares tokens with a threshold (>=).
	ModeThreshold DisaggMode = "threshold"
	// ModeConditional disaggregates if nothing matches, or more than MaxLocalPrefill tokens are uncached (>).
	ModeConditional DisaggMode = "conditional"
	// ModeCost compares the cost of computing on the decode target and in the prefill pool.
	ModeCost DisaggMode = "cost"
)

// defaultDisagg is the cost rule with k = 3, for transfers of 320 KB per token at 25 GB/s plus 5 ms, and 20,000 prefill
// tokens per second.
func defaultDisagg() Disagg {
	decode, _ := Preset("decode")
	return Disagg{Mode: ModeCost, Threshold: 4096, MaxLocalPrefill: 1, K: 3, Resident: 0.02, TransferFixed: 100, TransferPerToken: 0.256,
		LocalBelow: 512, Prefill: kvAware(), Decode: decode}
}

// Problems lists the settings of the rule, without the two policies, that are out of bounds.
func (d *Disagg) Problems() []Problem {
	var found problems
	d.checkRule("", &found)
	return found
}

// check checks every setting; prefix is the section's own path with a dot.
func (d *Disagg) check(prefix string, ps *problems) {
	d.checkRule(prefix, ps)
	d.Prefill.check(prefix+"prefill.", ps)
	d.Decode.check(prefix+"decode.", ps)
}

func (d *Disagg) checkRule(prefix string, ps *problems) {
	oneOf(ps, prefix+"mode", d.Mode, ModeOff, ModeThreshold, ModeConditional, ModeCost)
	ps.within(prefix, []bound{
		{"max_local_prefill", float64(d.MaxLocalPrefill), 0, math.MaxInt32},
		{"k", d.K, 0, 100},
		{"resident", d.Resident, 0, 10},
		{"transfer_fixed", d.TransferFixed, 0, 1e9},
		{"transfer_per_token", d.TransferPerToken, 0, 1e6},
		{"local_below", float64(d.LocalBelow), 0, math.MaxInt32},
	})
}

// wanted reports whether the rules that consider only the decode target ask for a prefill worker.
func (d *Disagg) wanted(prompt int64, decode *candidate) bool {
	switch d.Mode {
	case ModeThreshold:
		tokens := decode.miss
		if d.WholePrompt {
			tokens = prompt
		}
		return d.Threshold <= 0 || tokens >= d.Threshold
	case ModeConditional:
		return decode.overlap == 0 || prompt-decode.overlap > d.MaxLocalPrefill
	default:
		return decode.miss >= d.LocalBelow
	}
}

// comparison is what wanted compares, in words: value, operator and limit.
func (d *Disagg) comparison(prompt int64, decode *candidate) string {
	operator := func(is bool, yes, no string) string {
		if is {
			return yes
		}
		return no
	}
	switch d.Mode {
	case ModeThreshold:
		tokens, what := decode.miss, "uncached tokens"
		if d.WholePrompt {
			tokens, what = prompt, "prompt tokens"
		}
		if d.Threshold <= 0 {
			return fmt.Sprintf("%d %s, threshold %d: always", tokens, what, d.Threshold)
		}
		return fmt.Sprintf("%d %s %s threshold %d", tokens, what, operator(tokens < d.Threshold, "<", ">="), d.Threshold)
	case ModeConditional:
		if decode.overlap == 0 {
			return fmt.Sprintf("nothing of %d prompt tokens matches", prompt)
		}
		left := prompt - decode.overlap
		return fmt.Sprintf("%d unmatched tokens %s max_local_prefill %d", left, operator(left > d.MaxLocalPrefill, ">", "<="), d.MaxLocalPrefill)
	default:
		return fmt.Sprintf("%d uncached tokens %s local_below %d", decode.miss, operator(decode.miss < d.LocalBelow, "<", ">="), d.LocalBelow)
	}
}

// remoteIsCheaper is the cost rule.
func (d *Disagg) remoteIsCheaper(decode, prefill *candidate) (local, remote float64, yes bool) {
	local = d.K * (float64(decode.queue+decode.miss) + d.Resident*float64(decode.kv))
	remote = float64(prefill.queue+prefill.miss) + d.TransferFixed + d.TransferPerToken*float64(decode.miss)
	return local, remote, local > remote
}

// disagg returns the settings for a request's pools.
func (r *Router) disagg(q *Query) *Disagg {
	if d := r.config.DisaggOf[q.Model]; d != nil {
		return d
	}
	return &r.config.Disagg
}

// pickPools is Pick where the workers have roles.
func (r *Router) pickPools(now time.Duration, q *Query, ex *Explanation) (Plan, error) {
	cfg := r.disagg(q)
	decode, err := r.choose(now, q, request{leg: mainLeg, pool: Decode, policy: &cfg.Decode, worker: none32}, ex)
	if none, ok := errors.AsType[*NoTargetError](err); ok && cfg.Fallback {
		decode, err = r.choose(now, q, request{leg: mainLeg, pool: Both, whole: true, policy: &cfg.Prefill, worker: none32}, ex)
		if err != nil {
			return Plan{}, none
		}
		ex.sayf("disagg", "a prefill target serves the request whole: no decode target can")
		decode.degraded = DegradedNoDecode
		return r.commitLocal(now, q, &decode)
	}
	if err != nil {
		return Plan{}, err
	}
	if q.Local {
		ex.sayf("disagg", "compute on the decode target: this request cannot be disaggregated")
		return r.commitLocal(now, q, &decode)
	}
	if !cfg.wanted(q.PromptTokens, &decode.candidate) {
		if ex != nil {
			ex.sayf("disagg", "compute on the decode target: %s", cfg.comparison(q.PromptTokens, &decode.candidate))
		}
		return r.commitLocal(now, q, &decode)
	}
	side := ex.side()
	req := request{leg: prefillLeg, pool: Prefill, policy: &cfg.Prefill, worker: decode.worker}
	if cfg.SameZone {
		req.zone = r.targets[decode.slot].info.Zone
	}
	prefill, err := r.choose(now, q, req, side)
	_, unmet := errors.AsType[*UnmetError](err)
	if err != nil && cfg.Mode == ModeCost && !unmet {
		// Under this rule a decode target can always compute the prompt.
		if ex != nil {
			ex.sayf("disagg", "compute on the decode target: %s", err.Error())
		}
		decode.degraded = DegradedNoPrefill
		return r.commitLocal(now, q, &decode)
	}
	if err != nil {
		if _, full := errors.AsType[*CapacityError](err); full || unmet {
			return Plan{}, err
		}
		return Plan{}, fmt.Errorf("disaggregate: %w", err)
	}
	if cfg.Mode == ModeCost {
		local, remote, yes := cfg.remoteIsCheaper(&decode.candidate, &prefill.candidate)
		operator := ">"
		if !yes {
			operator = "<="
		}
		ex.sayf("disagg", "here %.0f %s prefill pool %.0f", local, operator, remote)
		if !yes {
			return r.commitLocal(now, q, &decode)
		}
	} else if ex != nil {
		ex.sayf("disagg", "prefill pool: %s", cfg.comparison(q.PromptTokens, &decode.candidate))
	}
	if prefill.held {
		return Plan{}, r.heldError(&prefill)
	}
	if r.config.Hold > 0 && r.targets[decode.slot].report.Full {
		return Plan{}, r.heldError(&decode)
	}
	return r.commit(now, q, &decode, &prefill), nil
}

package disagg

import (
	"fmt"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// Usage is the usage of a prefill leg. The decode engine's own counts are wrong: it counts fetched blocks as cache
// hits, or leaves them out.
type Usage struct {
	// Prompt and Cached are tokens, -1 if the prefill engine does not report them.
	Prompt, Cached int64
}

// Usage reads the usage of the answer.
func (a *Answer) Usage() *Usage {
	s := body.NewUsageScanner(false)
	_, _ = s.Write(a.raw)
	return usageOf(s)
}

func usageOf(s *body.UsageScanner) *Usage {
	u, ok := s.Usage()
	if !ok {
		return &Usage{-1, -1}
	}
	return &Usage{u.Prompt, u.Cached}
}

// Edit appends an answer's usage object to dst, with the counts of prompt tokens and cached tokens replaced by those of
// the prefill leg, in the fields of the object's API. All other bytes stay as they are.
func (u Usage) Edit(dst, usage []byte) []byte {
	if edits := u.edits(usage); len(edits) > 0 {
		if out, err := body.Apply(dst, usage, edits...); err == nil {
			return out
		}
	}
	return append(dst, usage...)
}

// counted holds the names of an API's fields for prompt tokens and for their details.
type counted struct{ prompt, details string }

var (
	openAI    = counted{"prompt_tokens", "prompt_tokens_details"}
	responses = counted{"input_tokens", "input_tokens_details"}
)

func (u Usage) edits(usage []byte) []body.Edit {
	switch {
	case body.Member(usage, openAI.prompt) != nil:
		return u.inclusive(openAI, usage)
	case body.Member(usage, responses.prompt) == nil:
		return nil
	case body.Member(usage, responses.details) != nil || body.Member(usage, "total_tokens") != nil:
		return u.inclusive(responses, usage)
	default:
		return u.anthropic(usage)
	}
}

// inclusive edits usage of APIs that include cached tokens in the prompt's. SGLang's own API has no details.
func (u Usage) inclusive(c counted, usage []byte) []body.Edit {
	var edits []body.Edit
	if was, ok := integer(body.Member(usage, c.prompt)); ok && u.Prompt >= 0 && was != u.Prompt {
		edits = append(edits, setNumber(u.Prompt, c.prompt))
		if total, ok := integer(body.Member(usage, "total_tokens")); ok {
			edits = append(edits, setNumber(total+u.Prompt-was, "total_tokens"))
		}
	}
	if u.Cached < 0 {
		return edits
	}
	details := body.Member(usage, c.details)
	switch flat, ok := integer(body.Member(usage, "cached_tokens")); {
	case isObject(details):
		if was, ok := integer(body.Member(details, "cached_tokens")); !ok || was != u.Cached {
			edits = append(edits, setNumber(u.Cached, c.details, "cached_tokens"))
		}
	case ok:
		if flat != u.Cached {
			edits = append(edits, setNumber(u.Cached, "cached_tokens"))
		}
	case details != nil || body.Member(usage, "total_tokens") != nil:
		edits = append(edits, body.Set(fmt.Appendf(nil, `{"cached_tokens":%d}`, u.Cached), c.details))
	}
	return edits
}

// anthropic edits usage that counts the prompt in parts: computed, read from the cache, and written to it.
func (u Usage) anthropic(usage []byte) []body.Edit {
	const input, read, created = "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"
	rest, ok := integer(body.Member(usage, input))
	if !ok {
		return nil
	}
	was, told := integer(body.Member(usage, read))
	written, _ := integer(body.Member(usage, created))
	whole, cached := rest+was+written, was
	if u.Prompt >= 0 {
		whole = u.Prompt
	}
	if u.Cached >= 0 {
		cached = u.Cached
	}
	var edits []body.Edit
	if n := max(whole-cached-written, 0); n != rest {
		edits = append(edits, setNumber(n, input))
	}
	if cached != was || u.Cached >= 0 && !told {
		edits = append(edits, setNumber(cached, read))
	}
	return edits
}

// LegUsage is the usage that a prefill leg reports when it ends. Keep does nothing on a nil
// LegUsage. It is safe for concurrent use.
type LegUsage struct {
	ended chan struct{}
	usage Usage // must not be read before ended is closed
}

// NewLegUsage returns the usage of a leg that has not ended.
func NewLegUsage() *LegUsage { return &LegUsage{ended: make(chan struct{})} }

// Keep records the usage that the leg's answer has reported, nil if it failed, and lets Wait return. Call it once.
func (u *LegUsage) Keep(usage *Usage) {
	if u == nil {
		return
	}
	if u.usage = (Usage{-1, -1}); usage != nil {
		u.usage = *usage
	}
	close(u.ended)
}

// Wait waits for the leg's end, at most for most, and reports whether the leg has ended.
func (u *LegUsage) Wait(most time.Duration) bool {
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-u.ended:
	case <-t.C:
	}
	select {
	case <-u.ended: // perhaps both
		return true
	default:
		return false
	}
}

// Edit is Usage.Edit with the leg's usage. Call it only after Wait has returned true.
func (u *LegUsage) Edit(dst, usage []byte) []byte { return u.usage.Edit(dst, usage) }

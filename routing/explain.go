package routing

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/kvlane/kvlane/kvindex"
)

// Explanation holds the reasons for a decision. Pass nil to Pick to avoid its cost. Passing an Explanation again resets
// it and reuses its memory.
type Explanation struct {
	Request      string `json:"request"`
	Model        string `json:"model,omitempty"`
	Conversation string `json:"conversation,omitempty"`
	PromptTokens int64  `json:"prompt_tokens"`
	// Verdicts are the stages' lines, in order.
	Verdicts []Verdict `json:"verdicts"`
	// Candidates are all targets, worker by worker.
	Candidates []Candidate `json:"candidates"`
	// Prefill explains the choice in the prefill pool, if there was one.
	Prefill *Explanation `json:"prefill,omitempty"`
	// Decode and PrefillTarget name the chosen targets.
	Decode        string `json:"decode,omitempty"`
	PrefillTarget string `json:"prefill_target,omitempty"`
	Plan          *Plan  `json:"plan,omitempty"`
	Error         string `json:"error,omitempty"`

	plan  Plan      // what Plan points to
	costs []float64 // what the candidates' Cost point to
	line  []byte    // scratch memory of sayf
}

// Verdict is a line of a stage.
type Verdict struct {
	Stage string `json:"stage"`
	Text  string `json:"text"`
}

// Candidate is one target in an Explanation.
type Candidate struct {
	Target string       `json:"target"`
	Slot   kvindex.Slot `json:"slot"`
	// Tiers and Speculative are the target's Overlap.
	Tiers       [kvindex.NumTiers]int32 `json:"tiers"`
	Speculative int32                   `json:"speculative"`
	// Miss, Queue, KV and Active are the numbers that the stages compared.
	Miss   int64 `json:"miss"`
	Queue  int64 `json:"queue"`
	KV     int64 `json:"kv"`
	Active int64 `json:"active"`
	// Held is the number of tokens of requests that are held for the target.
	Held int64 `json:"held,omitempty"`
	// Cost is nil if the cost stage did not see the target.
	Cost *float64 `json:"cost,omitempty"`
	// TTFT and PerToken are the predicted seconds to the first token and per output token, 0 without a prediction.
	TTFT     float64 `json:"ttft,omitempty"`
	PerToken float64 `json:"per_token,omitempty"`
	// Dropped is the stage or the Reason that dropped it, "" if none did.
	Dropped string `json:"dropped,omitempty"`
}

func (e *Explanation) begin(q *Query) {
	if e == nil {
		return
	}
	*e = Explanation{Request: q.ID, Model: q.Model, Conversation: q.Conversation, PromptTokens: q.PromptTokens,
		Verdicts: e.Verdicts[:0], Candidates: e.Candidates[:0], costs: e.costs[:0], line: e.line}
}

// sayf adds a stage's line unless the Explanation is nil. It supports %s and %q for strings, %d for ints, %.1f and the
// like for float64s, %v for bools, and %%. No argument escapes: only the text of an Explanation is allocated.
func (e *Explanation) sayf(stage, format string, args ...any) {
	if e == nil {
		return
	}
	e.line = e.line[:0]
	for at := strings.IndexByte(format, '%'); at >= 0; at = strings.IndexByte(format, '%') {
		e.line = append(e.line, format[:at]...)
		verb, rest, digits := format[at+1], format[at+2:], 0
		if format = rest; verb == '%' {
			e.line = append(e.line, '%')
			continue
		}
		if verb == '.' {
			digits, format = int(rest[0]-'0'), rest[2:]
		}
		switch a := args[0].(type) {
		case string:
			if verb == 'q' {
				e.line = strconv.AppendQuote(e.line, a)
			} else {
				e.line = append(e.line, a...)
			}
		case int:
			e.line = strconv.AppendInt(e.line, int64(a), 10)
		case int64:
			e.line = strconv.AppendInt(e.line, a, 10)
		case float64:
			e.line = strconv.AppendFloat(e.line, a, 'f', digits, 64)
		case bool:
			e.line = strconv.AppendBool(e.line, a)
		}
		args = args[1:]
	}
	e.line = append(e.line, format...)
	e.Verdicts = append(e.Verdicts, Verdict{stage, string(e.line)})
}

// side returns the explanation of the prefill leg.
func (e *Explanation) side() *Explanation {
	if e == nil {
		return nil
	}
	e.Prefill = &Explanation{Request: e.Request, Model: e.Model, PromptTokens: e.PromptTokens}
	return e.Prefill
}

func (e *Explanation) row(d *decision, c *candidate, reason Reason) {
	if e == nil {
		return
	}
	r := d.r
	row := Candidate{Target: r.targets[c.slot].name, Slot: c.slot, Miss: c.miss, Queue: c.queue, KV: c.kv, Active: c.active, Held: c.held}
	row.TTFT, row.PerToken = d.ttft(c), r.targets[c.slot].perToken(d.now, d.q.PromptTokens)
	if m := r.match[c.slot]; m.epoch == r.matchEpoch {
		row.Tiers, row.Speculative = r.overlaps[m.at].Tokens, r.overlaps[m.at].Speculative
	}
	if reason != eligible {
		row.Dropped = reason.String()
	}
	c.row = c.pos // the targets may be gone through again
	e.Candidates = append(e.Candidates[:c.row], row)
}

func (e *Explanation) drop(c *candidate, stage string) {
	if e != nil {
		e.Candidates[c.row].Dropped = stage
	}
}

// price records the costs, if the cost stage ran.
func (e *Explanation) price(cands []candidate, priced bool) {
	if e == nil || !priced {
		return
	}
	e.costs = slices.Grow(e.costs, len(cands)) // only once: Candidate.Cost points into it
	for i := range cands {
		e.costs = append(e.costs, cands[i].cost)
		e.Candidates[cands[i].row].Cost = &e.costs[len(e.costs)-1]
	}
}

func (e *Explanation) end(r *Router, plan Plan, err error) {
	if e == nil {
		return
	}
	if err != nil {
		e.Error = err.Error()
		return
	}
	e.plan = plan
	e.Plan = &e.plan
	e.Decode = r.targets[plan.Decode].name
	if plan.Prefill != NoSlot {
		e.PrefillTarget = r.targets[plan.Prefill].name
	}
}

// String prints the verdicts and the table of candidates.
func (e *Explanation) String() string {
	var b strings.Builder
	e.write(&b, "")
	switch {
	case e.Error != "":
		fmt.Fprintf(&b, "error: %s\n", e.Error)
	case e.PrefillTarget != "":
		fmt.Fprintf(&b, "=> %s, prefill on %s\n", e.Decode, e.PrefillTarget)
	case e.Plan != nil:
		fmt.Fprintf(&b, "=> %s (%s)\n", e.Decode, e.Plan.Via)
	}
	return b.String()
}

func (e *Explanation) write(b *strings.Builder, prefix string) {
	for _, v := range e.Verdicts {
		fmt.Fprintf(b, "%s%s: %s\n", prefix, v.Stage, v.Text)
	}
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	predicted := slices.ContainsFunc(e.Candidates, func(c Candidate) bool { return c.TTFT > 0 || c.PerToken > 0 })
	times := ""
	if predicted {
		times = "ttft\tper token\t"
	}
	fmt.Fprintf(w, "%starget\tdevice\thost\tdisk\text\tspec\tmiss\tqueue\tkv\tactive\t%scost\tdropped\t\n", prefix, times)
	for i := range e.Candidates {
		c := &e.Candidates[i]
		cost := "-"
		if c.Cost != nil {
			cost = fmt.Sprintf("%.0f", *c.Cost)
		}
		if predicted {
			first, each := "-", "-"
			if c.TTFT > 0 {
				first = fmt.Sprintf("%.2fs", c.TTFT)
			}
			if c.PerToken > 0 {
				each = fmt.Sprintf("%.1fms", c.PerToken*1000)
			}
			times = first + "\t" + each + "\t"
		}
		fmt.Fprintf(w, "%s%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%s%s\t%s\t\n", prefix, c.Target, c.Tiers[kvindex.Device], c.Tiers[kvindex.Host],
			c.Tiers[kvindex.Disk], c.Tiers[kvindex.External], c.Speculative, c.Miss, c.Queue, c.KV, c.Active, times, cost, c.Dropped)
	}
	_ = w.Flush() // a strings.Builder does not fail
	if e.Prefill != nil {
		e.Prefill.write(b, "prefill ")
	}
}

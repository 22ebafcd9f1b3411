package routing

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Query is one request. Every field but PromptTokens may be zero.
type Query struct {
	// ID is the request id; it seeds tie-breaks.
	ID string `json:"id"`
	// Model is the requested model or adapter. "" matches every target, and so does a name that no target lists, except
	// with Listed.
	Model string `json:"model,omitempty"`
	// Listed reports that Model is known: while no target lists it, only targets without a list may serve it.
	Listed bool `json:"listed,omitempty"`
	// PromptTokens is the prompt's length, exact or estimated.
	PromptTokens int64 `json:"prompt_tokens"`
	// Prefix is the hashes of PrefixBlocks; used only for implicit conversations.
	Prefix []uint64 `json:"prefix,omitempty"`
	// Conversation is the conversation's id, "" if there is none.
	Conversation string `json:"conversation,omitempty"`
	// Owner is the tenant whose request it is, "" if that is not known: suspicion counts waits by it. Clients must not be able
	// to choose it.
	Owner string `json:"owner,omitempty"`
	// Final ends the conversation with this request: its binding is forgotten.
	Final bool `json:"final,omitempty"`
	// Exclude lists targets that must not be chosen because they have failed this request.
	Exclude []kvindex.Slot `json:"exclude,omitempty"`
	// Pin asks for a worker, or a rank of it.
	Pin *Pin `json:"pin,omitempty"`
	// Subset, if not nil, restricts the request to these targets. It does not apply to the prefill target, which the
	// data plane does not call.
	Subset *SlotSet `json:"subset,omitempty"`
	// Priority below 0 lets the request be refused early, see Limits.ShedAt.
	Priority int `json:"priority,omitempty"`
	// Tenant is the name by which requests share places: Owner, or what the caller takes instead, such as a model or a key.
	// With a Share above 0 it is held (see HeldError) while it has more than this part of the places that Limits.MaxActive
	// gives, if requests of other tenants came within 5 minutes. It may always have one.
	Tenant string  `json:"tenant,omitempty"`
	Share  float64 `json:"share,omitempty"`
	// Sequences is the number of answers that the engine computes, each in a place of its own; 0 means 1.
	Sequences int64 `json:"sequences,omitempty"`
	// Local keeps the prefill on the decode target: the request cannot be disaggregated.
	Local bool `json:"local,omitempty"`
	// Waited is how long the request has been held, see Config.Hold; below 0 it is not held.
	Waited time.Duration `json:"waited,omitempty"`
	// TTFT is the request's target for the time to its first token, 0 for none. The policy chooses among the targets
	// that are predicted to meet it; if there are none, Config.Unmet decides.
	TTFT time.Duration `json:"ttft,omitempty"`
	// Whole reports that the answer is not streamed: its first token cannot be observed.
	Whole bool `json:"whole,omitempty"`
	// Lookup reports that the engine only reads or cancels a stored answer. No limit or cap refuses it, its answer does
	// not show that the engine works, and other replicas do not get its reservation.
	Lookup bool `json:"lookup,omitempty"`
	// Idle reports that the engine only counts or builds the prompt, so its answer does not show that it computes.
	Idle bool `json:"idle,omitempty"`
}

// Pin restricts the request to a worker or a rank. It is strict: a target that does
// not match is never chosen, except with Policy.PinOverflow, Policy.PinSoft or Sticky.BindingWins.
type Pin struct {
	// Worker is the worker's name, "" for any.
	Worker string `json:"worker,omitempty"`
	// Rank is the rank, NoRank for any.
	Rank int32 `json:"rank"`
	// Strict overrides the policy's exceptions: other targets cannot serve the request.
	Strict bool `json:"strict,omitempty"`
}

func (p *Pin) matches(t kvindex.Target) bool {
	return (p.Worker == "" || p.Worker == t.Worker) && (p.Rank == kvindex.NoRank || p.Rank == t.Rank)
}

// Overlap is how many of the prompt's tokens a target holds, contiguous from the start.
type Overlap struct {
	Slot kvindex.Slot `json:"slot"`
	// Tokens is the number of held tokens per tier; a token counts in its best tier only.
	Tokens [kvindex.NumTiers]int32 `json:"tokens"`
	// Speculative is the number of further tokens of prompts that were sent there and not confirmed by events yet.
	Speculative int32 `json:"speculative,omitempty"`
}

// Via names the stage that decided.
type Via string

const (
	ViaCost      Via = "cost"
	ViaPin       Via = "pin"
	ViaSticky    Via = "sticky"
	ViaImplicit  Via = "implicit"
	ViaFirstTurn Via = "first_turn"
	ViaWarmUp    Via = "warm_up"
)

// Degradation names what a decision did not know.
type Degradation string

const (
	DegradedModel     Degradation = "model_unknown"
	DegradedNoPrefill Degradation = "no_prefill_target"
	DegradedNoDecode  Degradation = "no_decode_target"
	DegradedNoReport  Degradation = "a_target_has_no_fresh_report"
)

// Plan is a decision, already booked.
type Plan struct {
	// Decode is the target that the request is sent to.
	Decode kvindex.Slot `json:"decode"`
	// Prefill computes the prompt first; NoSlot if Decode does, which JSON leaves out.
	Prefill kvindex.Slot `json:"prefill,omitzero"`
	// RankFree reports whether only a worker was chosen: do not send the engine a rank.
	RankFree bool `json:"rank_free,omitempty"`
	// Reservation must be given back with Release.
	Reservation ReservationID `json:"reservation"`
	// Matched and Miss are the cached and uncached tokens of the prompt on the target that computes it; DecodeMiss is
	// the number of uncached tokens on Decode.
	Matched    int64 `json:"matched"`
	Miss       int64 `json:"miss"`
	DecodeMiss int64 `json:"decode_miss"`
	// Sequences is that of the Query.
	Sequences int64 `json:"sequences,omitempty"`
	// FirstTurn reports whether the conversation id was new. It is false without an id.
	FirstTurn bool `json:"first_turn,omitempty"`
	// Via is the stage that chose Decode.
	Via Via `json:"via"`
	// Conversation is the key of the request's conversation, zero if none.
	Conversation Key `json:"conversation"`
	// Degraded names missing knowledge, "" if none was missing.
	Degraded Degradation `json:"degraded,omitempty"`
	// TTFT and PerToken are the predicted times to the first token and per output token; 0 until enough answers were seen.
	TTFT     time.Duration `json:"ttft,omitempty"`
	PerToken time.Duration `json:"per_token,omitempty"`
}

// Reason is why a target was not eligible; 0 stands for one that was.
type Reason uint8

const (
	eligible Reason = iota
	ReasonRole
	ReasonModel
	ReasonNotReady
	ReasonDraining
	ReasonSubset
	ReasonExcluded
	ReasonPin
	ReasonSuspended
	ReasonSuspect
	ReasonBusyActive
	ReasonBusyQueue
	ReasonBusyKV
	ReasonCap
	ReasonTTFT
	NumReasons // the number of reasons
)

var reasonNames = [NumReasons]string{"eligible", "role", "model", "not_ready", "draining", "subset", "excluded", "pin", "suspended",
	"suspect", "busy_requests", "busy_queue", "busy_kv", "cap", "ttft"}

// String returns the reason's name.
func (r Reason) String() string {
	if r >= NumReasons {
		return fmt.Sprintf("Reason(%d)", uint8(r))
	}
	return reasonNames[r]
}

// busy reports whether the reason goes away as requests end.
func (r Reason) busy() bool { return r >= ReasonBusyActive }

// NoTargetError means that no target may serve the request, and that waiting for other requests does not change that.
type NoTargetError struct {
	// Pool is the role that was looked for.
	Pool Role
	// Counts is the number of targets by Reason.
	Counts [NumReasons]int
	// Excluded names the targets that the request excluded.
	Excluded []string
}

// Error names the pool, the reasons and the excluded targets.
func (e *NoTargetError) Error() string {
	text := fmt.Sprintf("no eligible target in pool %s: %s", e.Pool, countText(&e.Counts))
	if len(e.Excluded) > 0 {
		text += " (" + strings.Join(e.Excluded, ", ") + ")"
	}
	return text
}

// CapacityError means that targets exist and that all of them are full: wait, or refuse the request with RetryAfter.
type CapacityError struct {
	Pool   Role
	Counts [NumReasons]int
	// RetryAfter estimates when the least loaded target has capacity, 1 s to 30 s.
	RetryAfter time.Duration
}

// Error names the pool and the hint.
func (e *CapacityError) Error() string {
	return fmt.Sprintf("capacity exhausted in pool %s: %s; retry after %s", e.Pool, countText(&e.Counts), e.RetryAfter)
}

func countText(counts *[NumReasons]int) string {
	var b strings.Builder
	for reason, n := range counts {
		if n > 0 && reason != int(eligible) {
			if b.Len() > 0 {
				b.WriteString(", ")
			}
			fmt.Fprintf(&b, "%d %s", n, Reason(reason))
		}
	}
	if b.Len() == 0 {
		return "no targets"
	}
	return b.String()
}

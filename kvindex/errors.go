package kvindex

import "strings"

// RefusalError is the reason why an event, or the rest of it, was not applied. A refused event
// can lose matches, but never produces a wrong match.
type RefusalError uint8

const (
	// ErrUnknownSlot: no target has this slot.
	ErrUnknownSlot RefusalError = iota + 1
	// ErrKind: unknown event kind.
	ErrKind
	// ErrTier: unknown tier.
	ErrTier
	// ErrUnknownParent: the target does not hold the parent, so the position of the blocks is unknown.
	ErrUnknownParent
	// ErrBlockSize: the event's block size differs from the target's, or is neither a divisor
	// nor a multiple of the index's.
	ErrBlockSize
	// ErrTokens: the number of tokens is not the number of blocks times the block size. For
	// example, a sliding-window group may list only its last blocks.
	ErrTokens
	// ErrExtra: there are extra digests, but not one for each block, or media outside the tokens.
	ErrExtra
	// ErrCycle: the parent is among the stored blocks.
	ErrCycle
	// ErrHashConflict: the target already holds a block of this engine hash with another content, so a later removal
	// would be ambiguous. It is detected only if the name table, aliases or pages contain the hash; see docs/index.md.
	ErrHashConflict
	// ErrPlaceholder: the event has no tokens, and the target does not hold its blocks on another tier.
	ErrPlaceholder

	numRefusals = iota + 1
)

var refusalTexts = [numRefusals]string{
	ErrUnknownSlot:   "unknown slot",
	ErrKind:          "unknown event kind",
	ErrTier:          "unknown tier",
	ErrUnknownParent: "unknown parent block",
	ErrBlockSize:     "block size does not fit",
	ErrTokens:        "tokens do not fill the blocks",
	ErrExtra:         "extra digests do not fit the blocks",
	ErrCycle:         "parent among the stored blocks",
	ErrHashConflict:  "engine hash stands for two contents",
	ErrPlaceholder:   "placeholder of a block that is not held",
}

// Name returns Error in snake case, for metrics and pages.
func (e RefusalError) Name() string { return strings.ReplaceAll(e.Error(), " ", "_") }

// Error returns a short description.
func (e RefusalError) Error() string {
	if int(e) < len(refusalTexts) && refusalTexts[e] != "" {
		return refusalTexts[e]
	}
	return "refused"
}

package kvindex

// RefusalError is why an event, or the rest of it, was not applied. A refused
// event costs matches, never a wrong match.
type RefusalError uint8

const (
	// ErrUnknownSlot: no target has this slot.
	ErrUnknownSlot RefusalError = iota + 1
	// ErrKind: the event's kind is none that we know.
	ErrKind
	// ErrTier: the event's tier is none that we know.
	ErrTier
	// ErrUnknownParent: the target does not hold the parent, so the blocks' place
	// is not known.
	ErrUnknownParent
	// ErrBlockSize: the event's block size is not the target's, or neither divides
	// nor is divided by the index's.
	ErrBlockSize
	// ErrTokens: the number of tokens is not blocks times block size (a
	// sliding-window group that lists only its last blocks, for one).
	ErrTokens
	// ErrExtra: extra digests are there, but not one for each block.
	ErrExtra
	// ErrCycle: the parent is among the stored blocks.
	ErrCycle
	// ErrHashConflict: the target already holds a block of this engine hash with
	// another content; a later removal could not be told apart. Found only where
	// the name table, aliases or pages tell: see docs/index.md.
	ErrHashConflict
	// ErrPlaceholder: blocks without tokens whose hashes the target does not hold
	// on another tier.
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

// Error returns the reason in words; it serves as label of a metric too.
func (e RefusalError) Error() string {
	if int(e) < len(refusalTexts) && refusalTexts[e] != "" {
		return refusalTexts[e]
	}
	return "refused"
}

package kvindex

import "strconv"

// NoRank is the Rank of a target whose data-parallel rank is unknown or does not exist. It differs from rank 0.
const NoRank int32 = -1

// Target is the unit of indexing, scoring, load accounting and metrics: one data-parallel rank of one worker. Rank is
// NoRank if the worker has no ranks or the engine chooses the rank itself.
type Target struct {
	Worker string `json:"worker"`
	Rank   int32  `json:"rank"`
}

// String returns "worker" or "worker/rank".
func (t Target) String() string {
	if t.Rank == NoRank {
		return t.Worker
	}
	return t.Worker + "/" + strconv.Itoa(int(t.Rank))
}

// Slot is the dense number that the index assigns to a target while it exists. The router's tables are indexed by it
// too. A slot is reused only after its target was dropped and everything that it held has been forgotten.
type Slot uint32

// IsZero reports whether the slot is that of no target, so that JSON can leave it out (omitzero).
func (s Slot) IsZero() bool { return s == ^Slot(0) }

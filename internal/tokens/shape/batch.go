package shape

import (
	"context"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
)

// Of a batch, at most maxBatch prompts with a total of at most maxBatchBytes of JSON get ids: each is tokenized, hashed
// and looked up like a separate request.
const (
	maxBatch      = 64
	maxBatchBytes = 1 << 20
)

// Other is a prompt of a batch after the first. Shared is how many leading ids it has in common with the first prompt
// or the one before it.
type Other struct {
	IDs    []uint32
	Shared int
}

// Others returns the prompts of a batch after the first one, whose ids are first. It stops at the bounds, at the first
// prompt that has no ids, and when ctx ends.
func (m *Model) Others(ctx context.Context, first []uint32, turn *conv.Turn, engine Engine) (others []Other) {
	one := *turn.Request
	switch one.Form {
	case body.FormTexts:
		one.Form = body.FormText
	case body.FormIDLists:
		one.Form = body.FormIDs
	default:
		return nil
	}
	size := len(turn.FirstPrompt())
	for _, prompt := range turn.Elements[1:min(len(turn.Elements), maxBatch)] {
		one.Prompt, one.Elements, one.Count = prompt, nil, 0
		if size += prompt.End - prompt.Start; size > maxBatchBytes {
			break
		}
		res, err := m.compute(ctx, nil, turn.Part(&one), engine, false)
		if err != nil || res.Partial != "" {
			break
		}
		shared := common(first, res.IDs)
		if n := len(others); n > 0 {
			shared = max(shared, common(others[n-1].IDs, res.IDs))
		}
		others = append(others, Other{res.IDs, shared})
	}
	return others
}

// common returns the number of leading ids that a and b share.
func common(a, b []uint32) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

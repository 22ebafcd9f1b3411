package model

import "github.com/kvlane/kvlane/internal/prompt"

type memo struct{ limit int64 }

func newMemo(limit int64) *memo { return &memo{limit: limit} }

func (c *memo) prompt(m *Model, req *prompt.Request, engine Engine) (Result, error) {
	return m.compute(req, engine)
}

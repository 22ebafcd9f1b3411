package model

import "github.com/kvlane/kvlane/internal/pydantic"

// What SGLang checks beside types.

var sglangFunctions = pydantic.Functions{
	"sequence_validator": notText,
}

// sglangRules are the checks of one request.
func (m *Model) sglangRules(in input) error { return nil }

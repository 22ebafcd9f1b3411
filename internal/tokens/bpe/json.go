package bpe

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// errJSON is wrapped by errors about JSON that is valid, but not of the expected kind.
var errJSON = errors.New("malformed JSON")

// eachMember calls f with the text of each key, valid during the call, and the value of raw, a
// JSON object, which it checks. encoding/json is too slow for maps of 200,000 entries.
func eachMember(raw []byte, f func(key, value []byte) error) (err error) {
	if len(raw) == 0 || raw[0] != '{' {
		return fmt.Errorf("%w: want an object", errJSON)
	}
	var text []byte
	invalid := body.CheckMembers(raw, func(key, value []byte) {
		if err == nil {
			text, err = body.AppendText(text[:0], key)
		}
		if err == nil {
			err = f(text, value)
		}
	})
	return cmp.Or(invalid, err)
}

// eachItem calls f with each element of raw, a checked JSON array.
func eachItem(raw []byte, f func(item []byte) error) (err error) {
	if len(raw) == 0 || raw[0] != '[' {
		return fmt.Errorf("%w: want an array", errJSON)
	}
	body.EachItem(raw, func(item []byte) {
		if err == nil {
			err = f(item)
		}
	})
	return err
}

// tokenID returns the integer raw, a checked JSON value, if it is below maxID-1.
func tokenID(raw []byte) (uint32, error) {
	if id, err := strconv.ParseUint(string(raw), 10, 32); err == nil && id < maxID-1 {
		return uint32(id), nil
	}
	return 0, fmt.Errorf("%w: %.20q is not an integer below %d", errJSON, raw, maxID-1)
}

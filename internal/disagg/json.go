package disagg

import (
	"bytes"
	"strconv"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// present reports whether a member exists and is not null.
func present(raw []byte) bool { return len(raw) > 0 && raw[0] != 'n' }

// isObject reports whether a value is an object with members.
func isObject(raw []byte) bool {
	inner, ok := bytes.CutPrefix(raw, []byte{'{'})
	inner = bytes.TrimLeft(inner, " \t\r\n")
	return ok && len(inner) > 0 && inner[0] != '}'
}

// items returns a list's elements, nil if the value is not a list.
func items(raw []byte) (list [][]byte) {
	body.EachItem(raw, func(item []byte) { list = append(list, item) })
	return list
}

// integer reads a JSON number without fraction or exponent.
func integer(raw []byte) (int64, bool) {
	n, err := strconv.ParseInt(string(bytes.TrimSpace(raw)), 10, 64)
	return n, err == nil
}

// number returns a top-level integer of a request whose position internal/tokens/body does not record.
func number(r *body.Request, name string) (int64, bool) {
	return integer(body.Member(bytes.TrimLeft(r.Body, " \t\r\n"), name))
}

package disagg

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// quoted returns a text as a JSON string.
func quoted(text string) []byte {
	raw, err := json.Marshal(text)
	if err != nil { // a string always encodes
		return []byte(`""`)
	}
	return raw
}

// appendIDs appends a JSON list of ids, followed by more.
func appendIDs(dst []byte, ids []uint32, more ...uint32) []byte {
	dst = append(dst, '[')
	for i, list := range [2][]uint32{ids, more} {
		for j, id := range list {
			if i+j > 0 && (j > 0 || len(ids) > 0) {
				dst = append(dst, ',')
			}
			dst = strconv.AppendUint(dst, uint64(id), 10)
		}
	}
	return append(dst, ']')
}

// present reports whether a member exists and is not null.
func present(raw []byte) bool { return len(raw) > 0 && raw[0] != 'n' }

// isObject reports whether a value is an object with members.
func isObject(raw []byte) bool {
	if len(raw) < 2 || raw[0] != '{' {
		return false
	}
	for _, c := range raw[1:] {
		switch c {
		case ' ', '\t', '\r', '\n':
		default:
			return c != '}'
		}
	}
	return false
}

// textOf returns a JSON string's text, "" if the value is not a string.
func textOf(raw []byte) string {
	var text string
	if json.Unmarshal(raw, &text) != nil {
		return ""
	}
	return text
}

// items returns a list's elements, nil if the value is not a list.
func items(raw []byte) []json.RawMessage {
	var list []json.RawMessage
	if len(raw) == 0 || raw[0] != '[' || json.Unmarshal(raw, &list) != nil {
		return nil
	}
	return list
}

// number returns a top-level integer of a request whose position internal/tokens/body does not
// record.
func number(r *body.Request, name string) (int64, bool) {
	n, err := strconv.ParseInt(string(body.Member(bytes.TrimLeft(r.Body, " \t\r\n"), name)), 10, 64)
	return n, err == nil
}

package body

// EachMember calls each with every key, with its quotes, and value of raw, a checked JSON object. Keys may come twice; the
// last one counts in every engine's reader. It does nothing if raw is something else.
func EachMember(raw []byte, each func(key, value []byte)) {
	(*Ends)(nil).EachMember(raw, each)
}

// EachItem calls each with every element of raw, a checked JSON array. It does nothing if raw is something else.
func EachItem(raw []byte, each func(item []byte)) {
	(*Ends)(nil).EachItem(raw, each)
}

// TextOf is the text of raw, a checked JSON string; ok is false if raw is something else, or holds half of a surrogate pair.
func TextOf(raw []byte) (text string, ok bool) {
	if len(raw) < 2 || raw[0] != '"' {
		return "", false
	}
	if !hasEscape(raw) {
		return string(raw[1 : len(raw)-1]), true
	}
	out, err := AppendText(nil, raw)
	return string(out), err == nil
}

// Text is the text of raw, a checked JSON value, "" if it is no string or holds half of a surrogate pair.
func Text(raw []byte) string {
	out, _ := TextOf(raw)
	return out
}

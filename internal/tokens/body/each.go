package body

// EachMember calls each with every key (including its quotes) and value of raw, a checked JSON object. Keys may repeat;
// in every engine's reader the last one counts. For any other JSON value EachMember does nothing.
func EachMember(raw []byte, each func(key, value []byte)) {
	s := scanner{b: raw}
	if start := s.begin(); start < len(raw) && raw[start] == '{' {
		s.object(start, func(key, value Span) { each(key.Of(raw), value.Of(raw)) })
	}
}

// CheckMembers is Valid and EachMember of an object in one pass. If its error is not nil, each may have been called, too.
func CheckMembers(object []byte, each func(key, value []byte)) error {
	s := scanner{b: object}
	return s.end(s.object(s.begin(), func(key, value Span) { each(key.Of(object), value.Of(object)) }))
}

// EachItem calls each with every element of raw, a checked JSON array. For any other JSON value it does nothing.
func EachItem(raw []byte, each func(item []byte)) {
	s := scanner{b: raw}
	if start := s.begin(); start < len(raw) && raw[start] == '[' {
		s.array(start, func(element Span) { each(element.Of(raw)) })
	}
}

// FirstItem returns the first element of raw, a checked JSON array, nil if it is empty. It returns any other JSON value unchanged.
func FirstItem(raw []byte) (item []byte) {
	if len(raw) == 0 || raw[0] != '[' {
		return raw
	}
	EachItem(raw, func(v []byte) {
		if item == nil {
			item = v
		}
	})
	return item
}

// TextOf returns the decoded text of raw, a checked JSON string. ok is false if raw is another
// JSON value or contains a lone surrogate.
func TextOf(raw []byte) (text string, ok bool) {
	if len(raw) < 2 || raw[0] != '"' {
		return "", false
	}
	out, ok := textWithin(len(raw), nil, raw)
	return string(out), ok
}

// Text returns the decoded text of raw, a checked JSON value, or "" if raw is not a string or contains a lone surrogate.
func Text(raw []byte) string {
	out, _ := TextOf(raw)
	return out
}

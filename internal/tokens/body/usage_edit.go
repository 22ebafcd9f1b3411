package body

import "bytes"

// maxUsage bounds a usage object that is held back, in bytes; a longer one passes unchanged.
const maxUsage = 8 << 10

// UsageEditor edits the usage objects in a response, JSON or server-sent events, that may be split into pieces
// anywhere. A usage object that is incomplete at the end of a piece is held back until the rest arrives; all other
// bytes pass immediately. It is not safe for concurrent use.
type UsageEditor struct {
	edit func(dst, usage []byte) []byte
	scan UsageScanner // locates usage objects; its counts are not used
	open bool         // the next byte is inside a usage object
	held []byte       // the part of an open usage object from earlier pieces
}

// NewUsageEditor returns an editor; sse means that the response is text/event-stream. edit
// appends the replacement of usage, a valid JSON object, to dst.
func NewUsageEditor(sse bool, edit func(dst, usage []byte) []byte) *UsageEditor {
	e := &UsageEditor{edit: edit, scan: UsageScanner{sse: sse}}
	e.scan.json.watch = true
	return e
}

// Holds reports whether bytes are held back.
func (e *UsageEditor) Holds() bool { return len(e.held) > 0 }

// Edit processes the next piece of the response. If changed is true, forward out instead of piece; otherwise forward
// piece. With last set nothing is held back. out shares no memory with piece.
func (e *UsageEditor) Edit(piece []byte, last bool) (out []byte, changed bool) {
	from, start := 0, 0 // piece[:from] is in out; an open object starts at start, or in an earlier piece
	for at := 0; at < len(piece); {
		at = e.step(piece, at)
		depth := e.scan.json.usageDepth
		switch {
		case !e.open && depth > 0:
			e.open, start = true, at-1
		case e.open && depth <= 0:
			e.open = false
			before := piece[from:start]
			whole := piece[start:at]
			if e.Holds() {
				whole = append(e.held, whole...)
			}
			made := whole
			if Valid(whole) == nil {
				made = e.edit(nil, whole)
			}
			if e.Holds() || !bytes.Equal(made, whole) {
				out, from, changed = append(append(out, before...), made...), at, true
			}
			e.held = nil
		}
	}
	if e.open {
		out, changed = append(out, piece[from:start]...), true
		e.held = append(e.held, piece[start:]...)
		from = len(piece)
		if last || len(e.held) > maxUsage {
			out = append(out, e.held...)
			e.held, e.open = nil, false
			e.scan.json.usageDepth = gaveUp
		}
	}
	if !changed {
		return nil, false
	}
	return append(out, piece[from:]...), true
}

// gaveUp, stored as usageDepth, stops the detection of usage objects in the rest of the JSON text.
const gaveUp = -1

// step consumes piece from at, up to the next bracket of a usage object at most, and returns the new offset.
func (e *UsageEditor) step(piece []byte, at int) int {
	u := &e.scan
	if !u.sse {
		return at + u.json.walk(piece[at:], u)
	}
	if u.line != lineData {
		return len(piece) - len(u.event(piece[at:]))
	}
	// One line may have many objects, so a step does not search all of it for its end.
	part, _, ended := bytes.Cut(piece[at:min(at+maxUsage, len(piece))], []byte{'\n'})
	before := u.json.usageDepth
	n := u.json.walk(part, u)
	if n == len(part) && ended && u.json.usageDepth == before {
		u.line, u.matched = lineStart, 0
		n++
	}
	return at + n
}

package body

import "bytes"

// maxUsage bounds a usage object that is held back, in bytes; a longer one passes as it is.
const maxUsage = 8 << 10

// UsageEditor changes the usage in an answer, JSON or server-sent events, whose bytes may be split anywhere. A usage object
// that a piece ends in is held back until it is whole; all other bytes pass as they come. It is not safe for concurrent
// use.
type UsageEditor struct {
	edit func(dst, usage []byte) []byte
	scan UsageScanner // finds the places; what it counts is not used
	open bool         // the next byte is inside a usage object
	held []byte       // what has come of it in earlier pieces
}

// NewUsageEditor starts an edit; sse says that the answer is text/event-stream. edit appends to dst what becomes of a usage
// object, which is valid JSON.
func NewUsageEditor(sse bool, edit func(dst, usage []byte) []byte) *UsageEditor {
	e := &UsageEditor{edit: edit, scan: UsageScanner{sse: sse}}
	e.scan.json.watch = true
	return e
}

// Holds says that bytes are held back.
func (e *UsageEditor) Holds() bool { return len(e.held) > 0 }

// Edit takes the next piece of the answer. If changed, out goes on in its place, else the piece itself. With last nothing
// stays behind. out shares no memory with piece.
func (e *UsageEditor) Edit(piece []byte, last bool) (out []byte, changed bool) {
	from, start := 0, 0 // piece[:from] is in out; an open object began at start, or in an earlier piece
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

// gaveUp in place of a depth lets no further usage object of the same JSON text be found.
const gaveUp = -1

// step reads on from piece[at], at most to behind a bracket of a usage object, and says where it got.
func (e *UsageEditor) step(piece []byte, at int) int {
	u := &e.scan
	if !u.sse {
		return at + u.json.walk(piece[at:], u)
	}
	if u.line != lineData {
		return len(piece) - len(u.event(piece[at:]))
	}
	part, _, ended := bytes.Cut(piece[at:], []byte{'\n'})
	before := u.json.usageDepth
	n := u.json.walk(part, u)
	if n == len(part) && ended && u.json.usageDepth == before {
		u.line, u.matched = lineStart, 0
		n++
	}
	return at + n
}

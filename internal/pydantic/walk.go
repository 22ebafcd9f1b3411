package pydantic

import "github.com/kvlane/kvlane/internal/prompt"

// walk is one judgement of a value. Each level of types reads the part of the value
// that it judges, to the end of all that is within, and unions read it for each choice:
// of a body that is nested deeply that would be its size for every level.
type walk struct {
	root []byte
	// read are the bytes that the levels would have read if nothing were known of it.
	read int
	// known is where the parts end, nil until enough was read to make it worth while.
	known *prompt.Ends
}

// readings is how often a value is read before the ends of its parts are found:
// requests as people send them are read less.
const readings = 32

func newWalk(root []byte) *walk { return &walk{root: root} }

// ends is what raw is to be read with.
func (w *walk) ends(raw []byte) *prompt.Ends {
	w.read += len(raw)
	if w.known == nil && w.read > readings*len(w.root) {
		w.known = prompt.EndsOf(w.root)
	}
	return w.known
}

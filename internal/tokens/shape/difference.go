package shape

import (
	"fmt"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
)

// Difference is the first position at which two prompts differ.
type Difference struct {
	At           int      // index of the token
	Ours, Theirs int64    // ids, -1 past the end
	OurLen       int      // number of our ids
	TheirLen     int      // number of theirs
	OurTail      []string // our tokens, starting three before At
	TheirTail    []string
}

// Compare returns the first difference between two lists of ids, nil if they are equal.
func Compare(tok *bpe.Tokenizer, ours, theirs []uint32) *Difference {
	at := common(ours, theirs)
	if at == len(ours) && at == len(theirs) {
		return nil
	}
	d := &Difference{At: at, Ours: -1, Theirs: -1, OurLen: len(ours), TheirLen: len(theirs), OurTail: around(tok, ours, at),
		TheirTail: around(tok, theirs, at)}
	if at < len(ours) {
		d.Ours = int64(ours[at])
	}
	if at < len(theirs) {
		d.Theirs = int64(theirs[at])
	}
	return d
}

func around(tok *bpe.Tokenizer, ids []uint32, at int) []string {
	const before, after = 3, 4
	out := make([]string, 0, before+after)
	for _, id := range ids[max(0, at-before):min(len(ids), at+after)] {
		text, _ := tok.Token(id)
		out = append(out, text)
	}
	return out
}

func (d *Difference) String() string {
	return fmt.Sprintf("token %d differs: ours %d of %d tokens %q, the engine's %d of %d tokens %q", d.At, d.Ours, d.OurLen, d.OurTail,
		d.Theirs, d.TheirLen, d.TheirTail)
}

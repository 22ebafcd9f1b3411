package bpe

// Cut is a place in a text, the end of a special token whose match no following text can change. The
// ids before it stay the same whatever follows, so a longer text can be encoded from there.
type Cut struct {
	Text int // offset in the text
	IDs  int // number of ids before it
	// Space separates what the text leaves in the tokenizer's caches, but for single short words; 0 is common.
	Space uint64
}

// cutDistance is the least number of bytes between two recorded cuts.
const cutDistance = 256

// EncodeAfter is EncodeUntil for a text of which the ids up to a cut are known: it appends the
// others to dst, whose last from.IDs ids are the known ones. The cut is one of a text that begins
// like this one, or has no ids. It appends the text's later cuts to cuts.
func (t *Tokenizer) EncodeAfter(stop <-chan struct{}, dst []uint32, cuts []Cut, text string, from Cut, addSpecial bool) ([]uint32, []Cut, error) {
	if err := t.checkText(text[from.Text:]); err != nil {
		return dst, cuts, err
	}
	enc := t.acquire(stop, from.Space)
	if enc == nil {
		return dst, cuts, ErrStopped
	}
	enc.cuts, enc.cutBase, enc.lastCut, enc.recording = cuts, len(dst)-from.IDs, from.Text, true
	if addSpecial && from.Text == 0 {
		dst = append(dst, t.before...)
	}
	dst, err := enc.encode(dst, text, from.Text)
	cuts, enc.cuts, enc.recording = enc.cuts, nil, false
	t.release(enc)
	if addSpecial && err == nil {
		dst = append(dst, t.after...)
	}
	return dst, cuts, err
}

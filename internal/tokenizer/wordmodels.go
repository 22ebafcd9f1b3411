package tokenizer

// Models that are no BPE: they look words up.

// wordLevel has a token for each word, or one for all others.
type wordLevel struct {
	vocab *vocab
	unk   uint32
}

func (m *wordLevel) word(_ *worker, dst []uint32, word string) []uint32 {
	if id, _, ok := m.vocab.find(bytesOf(word)); ok {
		return append(dst, id)
	}
	return append(dst, m.unk)
}

// wordPiece takes the longest token again and again; those behind the first one
// are spelled with a prefix.
type wordPiece struct {
	vocab   *vocab
	unk     uint32
	prefix  string
	maximum int // characters of a word
	longest int // bytes of a token
}

func (m *wordPiece) word(w *worker, dst []uint32, word string) []uint32 {
	chars := 0
	for range word {
		chars++
	}
	if chars > m.maximum {
		return append(dst, m.unk)
	}
	at := len(dst)
	for from := 0; from < len(word); {
		w.text = w.text[:0]
		if from > 0 {
			w.text = append(w.text, m.prefix...)
		}
		head := len(w.text)
		end := min(len(word), from+m.longest)
		w.text = append(w.text, word[from:end]...)
		id, ok := uint32(0), false
		for ; end > from; end-- {
			if end < len(word) && word[end]&0xc0 == 0x80 {
				continue
			}
			if id, _, ok = m.vocab.find(w.text[:head+end-from]); ok {
				break
			}
		}
		if !ok {
			return append(dst[:at], m.unk)
		}
		dst = append(dst, id)
		from = end
	}
	return dst
}

// readWords reads a WordLevel or WordPiece model.
func (t *Tokenizer) readWords(head *modelHead) error {
	unk, _, ok := t.vocab.find([]byte(orEmpty(head.Unk)))
	if !ok {
		return unsupported("%s without its unknown token", head.Type)
	}
	if head.Type == "WordLevel" {
		t.pipe.finish = (&wordLevel{t.vocab, unk}).word
		return nil
	}
	m := &wordPiece{vocab: t.vocab, unk: unk, prefix: "##", maximum: 100}
	if head.Prefix != nil {
		m.prefix = *head.Prefix
	}
	if head.MaxChars != nil {
		m.maximum = *head.MaxChars
	}
	for id := range t.vocab.has {
		m.longest = max(m.longest, len(t.vocab.bytes(uint32(id))))
	}
	t.pipe.finish = m.word
	return nil
}

package bpe

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// spmPiece is a token of a SentencePiece model.
type spmPiece struct {
	text  string
	score float32
	kind  uint64
}

const (
	pieceNormal  = 1
	pieceUnknown = 2
	pieceControl = 3
	pieceUser    = 4
	pieceUnused  = 5
	pieceByte    = 6
)

// spmModel is what encoding needs of a SentencePiece model file.
type spmModel struct {
	pieces   []spmPiece
	bpe      bool // else Unigram
	fallback bool
	suffix   bool // spaces belong to the word before them
	charsmap []byte
	dummy    bool // a space is put before the text
	trim     bool // several spaces count as one, those at the ends as none
	unk      uint32
	bos, eos string
}

// fields calls f for each field of a protobuf message.
func fields(raw []byte, f func(number protowire.Number, value uint64, data []byte)) error {
	for len(raw) > 0 {
		number, kind, n := protowire.ConsumeTag(raw)
		if n < 0 {
			return protowire.ParseError(n)
		}
		raw = raw[n:]
		var value uint64
		var data []byte
		switch kind {
		case protowire.VarintType:
			value, n = protowire.ConsumeVarint(raw)
		case protowire.Fixed32Type:
			var v uint32
			v, n = protowire.ConsumeFixed32(raw)
			value = uint64(v)
		case protowire.BytesType:
			data, n = protowire.ConsumeBytes(raw)
		default:
			n = protowire.ConsumeFieldValue(number, kind, raw)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		raw = raw[n:]
		f(number, value, data)
	}
	return nil
}

// readSPM reads a SentencePiece model file.
func readSPM(raw []byte) (*spmModel, error) {
	m := &spmModel{dummy: true, trim: true, bos: "<s>", eos: "</s>"}
	kind, escape := uint64(1), true
	trainer := func(number protowire.Number, value uint64, data []byte) {
		switch number {
		case 3:
			kind = value
		case 24:
			m.suffix = value != 0
		case 35:
			m.fallback = value != 0
		case 46:
			m.bos = string(data)
		case 47:
			m.eos = string(data)
		}
	}
	normalizer := func(number protowire.Number, value uint64, data []byte) {
		switch number {
		case 2:
			m.charsmap = data
		case 3:
			m.dummy = value != 0
		case 4:
			m.trim = value != 0
		case 5:
			escape = value != 0
		}
	}
	var failed error
	err := fields(raw, func(number protowire.Number, _ uint64, data []byte) {
		var err error
		switch number {
		case 1:
			err = m.readPiece(data)
		case 2:
			err = fields(data, trainer)
		case 3:
			err = fields(data, normalizer)
		}
		failed = cmp.Or(failed, err)
	})
	err = cmp.Or(err, failed)
	switch m.bpe = kind == 2; {
	case err != nil:
		return nil, err
	case len(m.pieces) == 0 || m.pieces[m.unk].kind != pieceUnknown:
		return nil, fmt.Errorf("%d pieces, none of which is unknown", len(m.pieces))
	case kind != 1 && kind != 2:
		return nil, unsupported("a SentencePiece model that is neither Unigram nor BPE")
	case !escape:
		return nil, unsupported("a SentencePiece model with plain spaces")
	}
	return m, nil
}

func (m *spmModel) readPiece(raw []byte) error {
	p := spmPiece{kind: pieceNormal}
	err := fields(raw, func(number protowire.Number, value uint64, data []byte) {
		switch number {
		case 1:
			p.text = string(data)
		case 2:
			p.score = math.Float32frombits(uint32(value))
		case 3:
			p.kind = value
		}
	})
	if err == nil && (p.text == "" || !utf8.ValidString(p.text)) {
		err = fmt.Errorf("piece %d is %q", len(m.pieces), p.text)
	}
	if p.kind == pieceUnknown {
		m.unk = uint32(len(m.pieces))
	}
	m.pieces = append(m.pieces, p)
	return err
}

// parseSPM reads a SentencePiece model: as the library itself does, or with a config.json as
// transformers does, which builds a tokenizer of its own library from it.
func parseSPM(raw []byte, _ string, config Config) (*Tokenizer, error) {
	m, err := readSPM(raw)
	if err != nil {
		return nil, err
	}
	if config.HasModel {
		return m.converted(config)
	}
	return m.tokenizer(config)
}

// tokenizer returns a tokenizer that does what the SentencePiece library does.
func (m *spmModel) tokenizer(config Config) (*Tokenizer, error) {
	t := newTokenizer(config)
	t.form, t.splitter, t.sp = spaceForm, wholeSplit{}, &spaceModel{unk: maxID}
	list := tokenList{literal: map[string]uint32{}}
	var user, control []AddedToken
	for id, p := range m.pieces {
		text, ok := spaceMarkText(nil, []byte(p.text))
		switch p.kind {
		case pieceUser:
			user = append(user, AddedToken{ID: uint32(id), Content: p.text})
		case pieceUnused:
			return nil, unsupported("a SentencePiece model with unused pieces")
		case pieceNormal:
		default:
			control = append(control, AddedToken{ID: uint32(id), Content: p.text, Special: true})
			ok = false
		}
		if err := list.addNamed([]byte(p.text), text, ok, uint32(id)); err != nil {
			return nil, err
		}
	}
	n, err := m.normalizer(user)
	if err != nil {
		return nil, err
	}
	t.pipe = &pipeline{normalizers: []normalizeStage{n.normalize}}
	if m.bpe {
		err = m.readBPE(t, &list)
	} else {
		err = m.readUnigram(t, &list)
	}
	if err != nil {
		return nil, err
	}
	t.raw, t.normal = newAddedSet(nil, nil), newAddedSet(nil, nil)
	if m.bpe { // Unigram has them in its lattice
		contents := make([]string, len(user))
		for i, u := range user {
			if text, ok := spaceMarkText(nil, []byte(u.Content)); ok {
				contents[i] = string(text)
			}
		}
		t.normal = newAddedSet(user, contents)
	}
	t.raw.setFinal(nil)
	t.normal.final = make([]bool, len(t.normal.tokens))
	t.added = user
	for _, u := range user {
		t.addedID[u.Content], t.literalOf[u.ID] = u.ID, u.Content
	}
	t.setControl(control, m.bos)
	t.cuts = newCutter(t.splitter, false)
	return t, nil
}

// readBPE reads the tables. The piece of the highest score is merged first, the leftmost of
// equals; user-defined symbols are cut out before.
func (m *spmModel) readBPE(t *Tokenizer, list *tokenList) (err error) {
	single := map[rune]bool{}
	for id, p := range m.pieces {
		if n := utf8.RuneCountInString(p.text); p.kind == pieceNormal && n > 1 {
			list.order = append(list.order, uint32(id))
		} else if n == 1 {
			r, _ := utf8.DecodeRuneInString(p.text)
			single[r] = true
		}
	}
	slices.SortStableFunc(list.order, func(a, b uint32) int { return cmp.Compare(m.pieces[b].score, m.pieces[a].score) })
	blanks, err := m.blankRuns(list)
	if err != nil {
		return err
	}
	for _, id := range list.order {
		for _, r := range m.pieces[id].text {
			if !single[r] {
				return unsupported("a SentencePiece BPE model without a piece for %q", r)
			}
		}
	}
	if !m.fallback {
		t.sp.unk = m.unk
	}
	if t.vocab, err = list.vocab(); err != nil {
		return err
	}
	if t.merges, err = list.merges(t.vocab); err != nil {
		return err
	}
	if err := t.spaceSymbols(); err != nil {
		return err
	}
	t.completeBPE()
	t.pipe.finish = func(enc *encoder, dst []uint32, p piece) []uint32 {
		from := len(dst)
		dst = enc.paragraphs(dst, p.text)
		if t.sp.unk != maxID { // unknown neighbours are one token
			rest := slices.CompactFunc(dst[from:], func(a, b uint32) bool { return a == t.sp.unk && b == t.sp.unk })
			dst = dst[:from+len(rest)]
		}
		return blanks.join(dst, from)
	}
	return nil
}

// blankRuns are the tokens of several U+2581 if all have the same score, the lowest: the leftmost of equal scores is
// merged first, after everything else.
type blankRuns struct {
	one   uint32         // the token of one; maxID: the tokens merge like others
	sizes map[uint32]int // by token
	ids   map[int]uint32 // by size
}

// blankRuns returns the tokens of several U+2581 if they share a score; their order of merges is
// then not that of other tokens. No other pieces may share a score.
func (m *spmModel) blankRuns(list *tokenList) (*blankRuns, error) {
	b := &blankRuns{one: maxID, sizes: map[uint32]int{}, ids: map[int]uint32{}}
	score := func(i int) float32 { return m.pieces[list.order[i]].score }
	n := len(list.order)
	if n > 1 && score(n-1) == score(n-2) {
		last := score(n - 1)
		for ; n > 0 && score(n-1) == last; n-- {
			id := list.order[n-1]
			text := m.pieces[id].text
			size := len(text) / len(spaceMark)
			if text != strings.Repeat(spaceMark, size) {
				return nil, unsupported("a SentencePiece BPE model with pieces of equal score")
			}
			b.sizes[id], b.ids[size] = size, id
		}
		list.order = list.order[:n]
	}
	for i, id := range list.order {
		if i > 0 && score(i) == score(i-1) || len(b.ids) > 0 && strings.Contains(m.pieces[id].text, spaceMark+spaceMark) {
			return nil, unsupported("a SentencePiece BPE model with pieces of equal score")
		}
	}
	if len(b.ids) > 0 {
		for id, p := range m.pieces {
			if p.text == spaceMark {
				b.one = uint32(id)
				b.sizes[b.one], b.ids[1] = 1, b.one
			}
		}
	}
	return b, nil
}

// join merges the tokens in ids[from:] in place.
func (b *blankRuns) join(ids []uint32, from int) []uint32 {
	first := slices.Index(ids[from:], b.one)
	if b.one == maxID || first < 0 {
		return ids
	}
	out := ids[:from+first]
	for _, id := range ids[from+first:] {
		out = append(out, id)
		for n := len(out); id == b.one && n-from >= 2; n = len(out) {
			left, right := b.sizes[out[n-2]], b.sizes[out[n-1]]
			joined, ok := b.ids[left+right]
			if left == 0 || !ok {
				break
			}
			out = append(out[:n-2], joined)
		}
	}
	return out
}

// readUnigram reads the tables. Sums have 32 bits; user-defined symbols have a bonus.
func (m *spmModel) readUnigram(t *Tokenizer, list *tokenList) error {
	u, scores := &unigram{unk: m.unk, fallback: m.fallback, single: true}, make([]float64, 0, len(m.pieces))
	lowest := float32(math.MaxFloat32)
	for _, p := range m.pieces {
		score := float64(p.score)
		switch p.kind {
		case pieceNormal:
			lowest = min(lowest, p.score)
		case pieceUser:
			score = float64(float32(0.1 * float64(len(p.text)-1)))
		}
		scores = append(scores, score)
	}
	if err := t.setUnigram(u, scores, list); err != nil {
		return err
	}
	u.unknown = float64(lowest - unkPenalty)
	t.sp, t.pipe.finish = nil, (*encoder).summed
	return nil
}

// spmNormalizer is SentencePiece's normalizer. It writes spaces for U+2581.
type spmNormalizer struct {
	*spmModel
	rules *charsmap // nil: none
	user  *addedSet // symbols that no rule changes
	// plain are the bytes that stay as they are and start neither rule nor symbol, at any place
	// before another such byte or the end of the text.
	plain [256]bool
}

func (m *spmModel) normalizer(user []AddedToken) (*spmNormalizer, error) {
	n := &spmNormalizer{spmModel: m}
	contents := make([]string, len(user))
	for i, u := range user {
		contents[i] = u.Content
	}
	n.user = newAddedSet(user, contents)
	if len(m.charsmap) > 0 {
		var err error
		if n.rules, err = newCharsmap(m.charsmap); err != nil {
			return nil, err
		}
	}
	for b := range n.plain {
		n.plain[b] = n.user.first[b] == nil && (b != ' ' || !m.trim) && b != int(spaceMark[0]) && (n.rules == nil || b < utf8.RuneSelf && n.rules.plain[b])
	}
	return n, nil
}

// prefix returns the normalization of the start of s and the length of what it normalizes.
func (n *spmNormalizer) prefix(s string) (string, int) {
	if n.user.first[s[0]] != nil {
		if _, size, ok := n.user.at(s, 0); ok {
			return s[:size], size
		}
	}
	if n.rules != nil {
		if text, size := n.rules.match(s, false); size > 0 {
			return stringOf(text), size
		}
	}
	_, size := utf8.DecodeRuneInString(s)
	return s[:size], size
}

func (n *spmNormalizer) normalize(enc *encoder, s string) string {
	for n.trim && s != "" {
		text, size := n.prefix(s)
		if text != " " || enc.watch.over(size) {
			break
		}
		s = s[size:]
	}
	if s == "" {
		return s
	}
	out := enc.nfc[:0]
	if n.dummy && !n.suffix {
		out = append(out, ' ')
	}
	blank := n.trim // spaces are dropped here
	for s != "" {
		run := 0
		for run < min(len(s), lookEvery) && n.plain[s[run]] {
			run++
		}
		if run < len(s) && s[run] >= utf8.RuneSelf && n.rules != nil {
			run-- // a mark may join it to a rule
		}
		if run > 0 {
			out, s, blank = append(out, s[:run]...), s[run:], false
			if enc.watch.over(run) {
				break
			}
			continue
		}
		text, size := n.prefix(s)
		if enc.watch.over(size) {
			break
		}
		s = s[size:]
		if blank {
			text = strings.TrimLeft(text, " ")
		}
		if text != "" {
			blank = n.trim && strings.HasSuffix(text, " ")
			out = append(out, enc.unmarked(text)...)
		}
	}
	if n.trim {
		out = bytes.TrimRight(out, " ")
	}
	if n.dummy && n.suffix {
		out = append(out, ' ')
	}
	enc.nfc = out
	return stringOf(out)
}

// converted returns the tokenizer that transformers 5 makes from a folder without tokenizer.json: merges are in the
// order of the ids, and only LlamaTokenizer puts a space before the text.
func (m *spmModel) converted(config Config) (*Tokenizer, error) {
	t := newTokenizer(config)
	class := config.engineClass()
	if class != "" && (class != "LlamaTokenizer" || !m.bpe) {
		return nil, unsupported("tokenizer class %s with a SentencePiece model only", class)
	}
	head := &modelHead{Type: "BPE", ByteFallback: m.fallback || class != "", FuseUnk: true, list: &tokenList{literal: map[string]uint32{}, ranked: true}}
	if class == "" {
		head.Unk = &m.pieces[m.unk].text
	}
	f := file{normalizer: []byte(`{"type":"Replace","pattern":{"String":" "},"content":"▁"}`)}
	if len(m.charsmap) > 0 {
		rules, err := json.Marshal(map[string]any{"type": "Precompiled", "precompiled_charsmap": m.charsmap})
		if err != nil {
			return nil, err
		}
		f.normalizer = fmt.Appendf(nil, `{"type":"Sequence","normalizers":[%s,%s]}`, rules, f.normalizer)
	}
	var err error
	if m.bpe {
		err = t.readPipeline(&f, head)
	} else {
		err = t.unigramPipeline(&f)
	}
	if err != nil {
		return nil, err
	}
	var added []AddedToken
	u, scores := &unigram{unk: m.unk, fallback: m.fallback}, make([]float64, 0, len(m.pieces))
	for id, p := range m.pieces {
		if p.kind == pieceControl || p.kind == pieceUser || p.kind == pieceUnknown {
			added = append(added, AddedToken{ID: uint32(id), Content: p.text, Special: p.kind != pieceUser})
		}
		text, ok := t.form.text(nil, []byte(p.text))
		if err := head.list.addNamed([]byte(p.text), text, ok, uint32(id)); err != nil {
			return nil, err
		}
		score, err := parseScore(strconv.FormatFloat(float64(p.score), 'g', -1, 64), false)
		if err != nil {
			return nil, err
		}
		scores = append(scores, score)
	}
	if m.bpe {
		err = t.readModel(head)
	} else {
		err = t.setUnigram(u, scores, head.list)
	}
	if err != nil {
		return nil, err
	}
	t.addTokens(added)
	for name, to := range map[string]*[]uint32{"bos_token": &t.before, "eos_token": &t.after} {
		id, ok := t.TokenID(cmp.Or(config.Special[name], map[string]string{"bos_token": m.bos, "eos_token": m.eos}[name]))
		if ok && (name == "bos_token" && config.llama.addBOS || name == "eos_token" && config.llama.addEOS) {
			*to = []uint32{id}
		}
	}
	t.finish()
	return t, nil
}

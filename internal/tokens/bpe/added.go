package bpe

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// AddedToken is a token that is cut out of the text before the model sees it. The flags are those of tokenizer.json.
type AddedToken struct {
	ID      uint32 `json:"id"`
	Content string `json:"content"`
	// SingleWord requires that no word character is adjacent to the token.
	SingleWord bool `json:"single_word"`
	// Lstrip and Rstrip extend the match over the white space on that side.
	Lstrip bool `json:"lstrip"`
	Rstrip bool `json:"rstrip"`
	// Normalized tokens are matched against the normalized text.
	Normalized bool `json:"normalized"`
	Special    bool `json:"special"`
}

// addTokens adds the tokens of tokenizer.json, then those that transformers adds from the configuration.
func (t *Tokenizer) addTokens(tokens []AddedToken) {
	// A token gets the id that the library assigns: its id in the vocabulary, else the next free one, regardless of the
	// file. If it already exists, only its flags change.
	places, next := map[string]int{}, uint32(t.vocab.count)
	add := func(a AddedToken) {
		if i, ok := places[a.Content]; ok {
			a.ID = t.added[i].ID
			t.added[i] = a
		} else if a.Content != "" {
			if a.ID, ok = t.TokenID(a.Content); !ok {
				a.ID = next
			}
			next, places[a.Content] = max(next, a.ID+1), len(t.added)
			t.added = append(t.added, a)
		}
	}
	for _, a := range slices.Concat(tokens, t.config.decoder) {
		add(a)
	}
	var special []string
	for _, name := range specialNames {
		special = append(special, t.config.Special[name])
	}
	for _, content := range append(special, t.config.ExtraSpecial...) {
		if _, ok := places[content]; !ok {
			add(AddedToken{Content: content, Special: true})
		}
	}
	slices.SortFunc(t.added, func(a, b AddedToken) int { return int(a.ID) - int(b.ID) })
	t.arrangeAdded()
}

// arrangeAdded builds the sets that find the added tokens.
func (t *Tokenizer) arrangeAdded() {
	var raws, normals []AddedToken
	var rawText, normalText []string
	for _, a := range t.added {
		if a.Normalized {
			normals = append(normals, a)
			normalText = append(normalText, t.normalizedContent(a.Content))
		} else {
			raws = append(raws, a)
			rawText = append(rawText, a.Content)
		}
		t.addedID[a.Content] = a.ID
		t.literalOf[a.ID] = a.Content
	}
	t.raw = newAddedSet(raws, rawText)
	t.normal = newAddedSet(normals, normalText)
	t.raw.setFinal(nil)
	if t.nfc || t.sp != nil || t.pipe != nil {
		// offsets in normalized text do not map to offsets in the text
		t.normal.final = make([]bool, len(t.normal.tokens))
	} else {
		t.normal.setFinal(t.raw)
	}
}

// normalizedContent returns the form of content that is matched against normalized text.
func (t *Tokenizer) normalizedContent(content string) string {
	if t.pipe != nil {
		w := &encoder{}
		w.match.allow(len(content))
		return t.pipe.normalized(w, content)
	}
	if t.nfc {
		return string((&normalizer{wanted: new(watch)}).appendNFC(nil, content))
	}
	if t.sp != nil && t.sp.marked {
		return t.normalizedText(content)
	}
	return content
}

// addedSet finds added tokens: the leftmost match, and the longest of those.
type addedSet struct {
	first   [256]*addedStart
	starts  []byte // the distinct first bytes
	content map[string]int
	tokens  []AddedToken
	final   []bool // by token: see setFinal
}

// addedStart describes the tokens that start with one byte.
type addedStart struct {
	second [256]bool // possible second bytes; all if a token has one byte only
	sizes  []int     // distinct lengths, longest first
}

// newAddedSet builds the set of tokens: contents[i] is the text that tokens[i] is matched by.
// Empty contents never match. Of equal contents the last one counts.
func newAddedSet(tokens []AddedToken, contents []string) *addedSet {
	a := &addedSet{content: map[string]int{}}
	for i, c := range contents {
		if c == "" {
			continue
		}
		a.content[c] = len(a.tokens)
		a.tokens = append(a.tokens, tokens[i])
		st := a.first[c[0]]
		if st == nil {
			st = &addedStart{}
			a.first[c[0]] = st
			a.starts = append(a.starts, c[0])
		}
		if len(c) == 1 {
			for b := range st.second {
				st.second[b] = true
			}
		} else {
			st.second[c[1]] = true
		}
		if n := len(c); !slices.Contains(st.sizes, n) {
			st.sizes = append(st.sizes, n)
			slices.SortFunc(st.sizes, func(a, b int) int { return b - a })
		}
	}
	return a
}

// at returns the longest token at s[i].
func (a *addedSet) at(s string, i int) (index, size int, ok bool) {
	st := a.first[s[i]]
	if st == nil || i+1 < len(s) && !st.second[s[i+1]] {
		return 0, 0, false
	}
	for _, n := range st.sizes {
		if i+n <= len(s) {
			if k, ok := a.content[s[i:i+n]]; ok {
				return k, n, true
			}
		}
	}
	return 0, 0, false
}

// next returns the first token that starts in s[i:end] and its position; size is 0 if there is none.
func (a *addedSet) next(s string, i, end int) (at, index, size int) {
	switch len(a.starts) {
	case 0:
		return end, 0, 0
	case 1:
		for i < end {
			k := strings.IndexByte(s[i:end], a.starts[0])
			if k < 0 {
				break
			}
			i += k
			if index, size, ok := a.at(s, i); ok {
				return i, index, size
			}
			i++
		}
		return end, 0, 0
	}
	for ; i < end; i++ {
		if a.first[s[i]] == nil {
			continue
		}
		if index, size, ok := a.at(s, i); ok {
			return i, index, size
		}
	}
	return end, 0, 0
}

// finalLimit is the maximum number of tokens that setFinal compares pairwise. With up to finalSpecial tokens it compares each
// special one with all.
const finalLimit, finalSpecial = 2000, 8000

// setFinal finds the tokens whose match no following text can change, so that text may be cut
// after them: the token has no flag that looks ahead, and no token of a, or of the set that is
// searched earlier (before, may be nil), can start before the match's end and end after it.
func (a *addedSet) setFinal(before *addedSet) {
	a.final = make([]bool, len(a.tokens))
	if len(a.tokens) > finalSpecial || before != nil && len(a.tokens)+len(before.tokens) > finalLimit {
		return
	}
	for i, t := range a.tokens {
		if t.SingleWord || t.Rstrip || len(a.tokens) > finalLimit && !t.Special {
			continue
		}
		a.final[i] = !a.reaches(t.Content, false) && (before == nil || !before.reaches(t.Content, true))
	}
}

// reaches reports whether a token of a can overlap content and end after it. The token starts at or
// before the start of content; with inside, it may also start within it.
func (a *addedSet) reaches(content string, inside bool) bool {
	for _, t := range a.tokens {
		c := t.Content
		if c == content {
			continue
		}
		if len(c) > len(content) && strings.Contains(c[:len(c)-1], content) {
			return true
		}
		for k := 1; inside && k < min(len(c), len(content)+1); k++ {
			if strings.HasSuffix(content, c[:k]) {
				return true
			}
		}
	}
	return false
}

// addedHit is an added token found in a text: it replaces s[from:to]. A token with Rstrip may
// extend over the start of the next one, as in the library.
type addedHit struct {
	from, to int
	token    *AddedToken
	// final reports that no text after to can change this match.
	final bool
}

// search iterates over the added tokens of a text.
type search struct {
	set *addedSet
	s   string
	pos int // where to search for the next token
	cut int // end of the last hit
	// marks reports that each space in s stands for U+2581, which is not white space for Lstrip and Rstrip.
	marks  bool
	wanted *watch
}

// next returns the next hit; false at the end of the text, and once stopped.
func (w *search) next() (addedHit, bool) {
	for {
		end := min(w.pos+lookEvery, len(w.s))
		at, index, size := w.set.next(w.s, w.pos, end)
		if size == 0 {
			if end == len(w.s) || len(w.set.starts) == 0 || w.wanted.look() {
				return addedHit{}, false
			}
			w.pos = end
			continue
		}
		w.pos = at + size
		t := &w.set.tokens[index]
		hit := addedHit{from: at, to: at + size, token: t, final: w.set.final[index]}
		if t.SingleWord && (wordBefore(w.s, hit.from) || wordAfter(w.s, hit.to)) {
			continue
		}
		if t.Lstrip {
			hit.from = max(w.spaceBefore(hit.from), w.cut)
		}
		if t.Rstrip {
			hit.to = w.spaceAfter(max(hit.to, w.cut)) // up to cut the last hit has seen it: a run of white space is walked once
		}
		w.cut = hit.to
		if hit.from < hit.to { // else the preceding token has consumed all of it
			return hit, true
		}
	}
}

func wordBefore(s string, i int) bool {
	r, n := utf8.DecodeLastRuneInString(s[:i])
	return n > 0 && runeClass(r)&clsWord != 0
}

func wordAfter(s string, i int) bool {
	if i == len(s) {
		return false
	}
	c, _ := classAt(s, i)
	return c&clsWord != 0
}

// spaceBefore returns the start of the white space that ends at i, as far as the last hit left it.
func (w *search) spaceBefore(i int) int {
	for i > w.cut {
		r, n := utf8.DecodeLastRuneInString(w.s[:i])
		if runeClass(r)&clsWS == 0 || w.marks && r == ' ' {
			break
		}
		i -= n
	}
	return i
}

// spaceAfter returns the end of the white space that starts at i.
func (w *search) spaceAfter(i int) int {
	for i < len(w.s) && (!w.marks || w.s[i] != ' ') {
		c, n := classAt(w.s, i)
		if c&clsWS == 0 {
			break
		}
		i += n
	}
	return i
}

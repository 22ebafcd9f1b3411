package enginesim

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sort"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
	"golang.org/x/text/unicode/norm"
)

// wordCacheLimit bounds the words whose ids are remembered; when it is reached the cache starts anew.
const wordCacheLimit = 200_000

// Tokenizer encodes with a Hugging Face tokenizer.json of kind BPE, by the book: added tokens, normalizer, split by the
// file's own patterns, merges. It is safe for concurrent use and may be shared by engines.
type Tokenizer struct {
	vocab     map[string]int32
	tokens    []string // content by id, in the vocabulary's spelling
	merges    map[pair]merge
	added     []addedToken
	addedByte [256][]int // indices into added by first byte, longest content first
	special   map[int32]bool
	splits    []*regexp2.Regexp
	nfc       bool
	bytes     bool // byte-level spelling; otherwise SentencePiece spelling with byte fallback
	whole     bool // ignore_merges: a word that is a token is that token
	bos       []int32
	format    *chatFormat
	starters  []int32 // tokens that begin an answer after a newline: a capitalised word
	words     []int32 // tokens that continue any text: a space and a word

	mu    sync.Mutex
	cache map[string][]int32
}

type pair struct{ left, right int32 }

type merge struct {
	rank int
	id   int32
}

type addedToken struct {
	ID      int32  `json:"id"`
	Content string `json:"content"`
	LStrip  bool   `json:"lstrip"`
	RStrip  bool   `json:"rstrip"`
	Special bool   `json:"special"`
}

// tokenizerFile is the part of tokenizer.json that is read.
type tokenizerFile struct {
	AddedTokens   []addedToken `json:"added_tokens"`
	Normalizer    *stage       `json:"normalizer"`
	PreTokenizer  *stage       `json:"pre_tokenizer"`
	PostProcessor *struct {
		Type   string `json:"type"`
		Single []struct {
			SpecialToken *struct {
				ID string `json:"id"`
			} `json:"SpecialToken"`
			Sequence json.RawMessage `json:"Sequence"`
		} `json:"single"`
	} `json:"post_processor"`
	Model struct {
		Type         string            `json:"type"`
		Vocab        map[string]int32  `json:"vocab"`
		Merges       []json.RawMessage `json:"merges"`
		IgnoreMerges bool              `json:"ignore_merges"`
		ByteFallback bool              `json:"byte_fallback"`
	} `json:"model"`
}

type stage struct {
	Type          string  `json:"type"`
	Normalizers   []stage `json:"normalizers"`
	Pretokenizers []stage `json:"pretokenizers"`
	Pattern       struct {
		Regex string `json:"Regex"`
	} `json:"pattern"`
}

// LoadTokenizer reads tokenizer.json or tokenizer.json.gz from the root of files.
func LoadTokenizer(files fs.FS) (*Tokenizer, error) {
	raw, err := readTokenizerFile(files)
	if err != nil {
		return nil, err
	}
	var file tokenizerFile
	if err := json.Unmarshal(raw, &file); err != nil {
		return nil, fmt.Errorf("tokenizer.json: %w", err)
	}
	if file.Model.Type != "BPE" {
		return nil, fmt.Errorf("tokenizer.json: model type %q is not BPE", file.Model.Type)
	}
	t := &Tokenizer{
		vocab:   file.Model.Vocab,
		merges:  make(map[pair]merge, len(file.Model.Merges)),
		special: map[int32]bool{},
		bytes:   !file.Model.ByteFallback,
		whole:   file.Model.IgnoreMerges,
		cache:   map[string][]int32{},
	}
	if err := t.readMerges(file.Model.Merges); err != nil {
		return nil, err
	}
	t.readAdded(file.AddedTokens)
	if file.Normalizer != nil && file.Normalizer.Type == "NFC" {
		t.nfc = true
	}
	if file.PreTokenizer != nil {
		if err := t.readSplits(*file.PreTokenizer); err != nil {
			return nil, err
		}
	}
	if p := file.PostProcessor; p != nil && p.Type == "TemplateProcessing" {
		for _, part := range p.Single {
			if part.Sequence != nil {
				break
			}
			if part.SpecialToken != nil {
				t.bos = append(t.bos, t.vocab[part.SpecialToken.ID])
			}
		}
	}
	t.format = formatOf(t.vocab)
	t.chooseWords()
	if len(t.words) == 0 {
		return nil, errors.New("tokenizer.json: no word is a single token")
	}
	return t, nil
}

func readTokenizerFile(files fs.FS) ([]byte, error) {
	if raw, err := fs.ReadFile(files, "tokenizer.json"); err == nil {
		return raw, nil
	}
	f, err := files.Open("tokenizer.json.gz")
	if err != nil {
		return nil, fmt.Errorf("open tokenizer: %w", err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("tokenizer.json.gz: %w", err)
	}
	raw, err := io.ReadAll(z)
	if err != nil {
		return nil, fmt.Errorf("tokenizer.json.gz: %w", err)
	}
	return raw, nil
}

// readMerges accepts both spellings in the field: "left right" and ["left", "right"].
func (t *Tokenizer) readMerges(list []json.RawMessage) error {
	for rank, raw := range list {
		var left, right string
		if len(raw) > 0 && raw[0] == '[' {
			var two [2]string
			if err := json.Unmarshal(raw, &two); err != nil {
				return fmt.Errorf("merge %d: %w", rank, err)
			}
			left, right = two[0], two[1]
		} else {
			var text string
			if err := json.Unmarshal(raw, &text); err != nil {
				return fmt.Errorf("merge %d: %w", rank, err)
			}
			left, right, _ = strings.Cut(text, " ")
		}
		l, okL := t.vocab[left]
		r, okR := t.vocab[right]
		id, ok := t.vocab[left+right]
		if !okL || !okR || !ok {
			return fmt.Errorf("merge %d: %q + %q is not in the vocabulary", rank, left, right)
		}
		if _, seen := t.merges[pair{l, r}]; !seen {
			t.merges[pair{l, r}] = merge{rank, id}
		}
	}
	return nil
}

func (t *Tokenizer) readAdded(list []addedToken) {
	t.added = list
	highest := int32(0)
	for _, a := range list {
		t.vocab[a.Content] = a.ID
		t.special[a.ID] = a.Special
	}
	for _, id := range t.vocab {
		highest = max(highest, id)
	}
	t.tokens = make([]string, highest+1)
	for content, id := range t.vocab {
		t.tokens[id] = content
	}
	sort.SliceStable(t.added, func(i, j int) bool { return len(t.added[i].Content) > len(t.added[j].Content) })
	for i, a := range t.added {
		if a.Content != "" {
			t.addedByte[a.Content[0]] = append(t.addedByte[a.Content[0]], i)
		}
	}
}

func (t *Tokenizer) readSplits(s stage) error {
	for _, inner := range s.Pretokenizers {
		if err := t.readSplits(inner); err != nil {
			return err
		}
	}
	if s.Type != "Split" {
		return nil
	}
	// The engines' regex library folds the long s into s when it ignores case; regexp2 does not.
	pattern := strings.ReplaceAll(s.Pattern.Regex, "(?i:'s|", "(?i:'[sſ]|")
	re, err := regexp2.Compile(pattern, regexp2.Unicode)
	if err != nil {
		return fmt.Errorf("pre-tokenizer pattern: %w", err)
	}
	t.splits = append(t.splits, re)
	return nil
}

// chooseWords picks the tokens that answers are made of. Each is a whole word for the pre-tokenizer, so that a text of
// them is encoded to the very ids that made it: the next turn of a conversation then repeats the generated ids.
func (t *Tokenizer) chooseWords() {
	space := "Ġ"
	if !t.bytes {
		space = "▁"
	}
	for id, content := range t.tokens {
		word, spaced := strings.CutPrefix(content, space)
		if len(word) < 3 || len(word) > 8 || strings.Trim(word[1:], "abcdefghijklmnopqrstuvwxyz") != "" {
			continue
		}
		first := word[0]
		switch {
		case spaced && first >= 'a' && first <= 'z' && len(t.words) < 4096:
			t.words = append(t.words, int32(id))
		case !spaced && first >= 'A' && first <= 'Z' && len(t.starters) < 1024 && t.bytes:
			t.starters = append(t.starters, int32(id))
		}
	}
	t.words = t.stable(t.words, " ")
	t.starters = t.stable(t.starters, "")
	if len(t.starters) == 0 {
		t.starters = t.words
	}
}

func (t *Tokenizer) stable(ids []int32, prefix string) []int32 {
	kept := ids[:0]
	for _, id := range ids {
		word := strings.TrimLeft(t.Decode([]int32{id}), " ")
		spelled := t.spell(prefix + word)
		if got := t.word(spelled); len(got) == 1 && got[0] == id {
			kept = append(kept, id)
		}
	}
	return kept
}

// Encode gives the ids of text. Added tokens in the text are recognised; with special set, the ids that the file puts in
// front of every text come first.
func (t *Tokenizer) Encode(text string, special bool) []int32 {
	var ids []int32
	if special {
		ids = append(ids, t.bos...)
	}
	start := 0
	for i := 0; i < len(text); {
		a := t.addedAt(text[i:])
		if a == nil {
			i++
			continue
		}
		before, after := text[start:i], text[i+len(a.Content):]
		if a.LStrip {
			before = strings.TrimRight(before, " \t\n\r")
		}
		ids = t.plain(ids, before)
		ids = append(ids, a.ID)
		i += len(a.Content)
		if a.RStrip {
			i += len(after) - len(strings.TrimLeft(after, " \t\n\r"))
		}
		start = i
	}
	return t.plain(ids, text[start:])
}

func (t *Tokenizer) addedAt(text string) *addedToken {
	for _, i := range t.addedByte[text[0]] {
		if strings.HasPrefix(text, t.added[i].Content) {
			return &t.added[i]
		}
	}
	return nil
}

// plain encodes text without added tokens.
func (t *Tokenizer) plain(ids []int32, text string) []int32 {
	if text == "" {
		return ids
	}
	if !utf8.ValidString(text) {
		text = strings.ToValidUTF8(text, "\uFFFD")
	}
	if !t.bytes {
		// Normalizer Prepend + Replace: the whole piece is one word.
		return append(ids, t.word("▁"+strings.ReplaceAll(text, " ", "▁"))...)
	}
	if t.nfc {
		text = norm.NFC.String(text)
	}
	pieces := []string{text}
	for _, re := range t.splits {
		var next []string
		for _, piece := range pieces {
			next = splitBy(re, piece, next)
		}
		pieces = next
	}
	for _, piece := range pieces {
		ids = append(ids, t.word(t.spell(piece))...)
	}
	return ids
}

// splitBy is behavior Isolated: matches and the text between them are pieces.
func splitBy(re *regexp2.Regexp, text string, out []string) []string {
	runes := []rune(text)
	at := 0
	m, err := re.FindRunesMatch(runes)
	for err == nil && m != nil {
		if m.Index > at {
			out = append(out, string(runes[at:m.Index]))
		}
		if m.Length > 0 {
			out = append(out, string(runes[m.Index:m.Index+m.Length]))
		}
		at = m.Index + m.Length
		m, err = re.FindNextMatch(m)
	}
	if at < len(runes) {
		out = append(out, string(runes[at:]))
	}
	return out
}

// word gives the ids of one pre-token in the vocabulary's spelling.
func (t *Tokenizer) word(word string) []int32 {
	t.mu.Lock()
	ids, ok := t.cache[word]
	t.mu.Unlock()
	if ok {
		return ids
	}
	if id, isToken := t.vocab[word]; t.whole && isToken {
		ids = []int32{id}
	} else {
		ids = t.merge(t.symbols(word))
	}
	if len(word) > 256 {
		return ids
	}
	t.mu.Lock()
	if len(t.cache) >= wordCacheLimit {
		t.cache = map[string][]int32{}
	}
	t.cache[word] = ids
	t.mu.Unlock()
	return ids
}

func (t *Tokenizer) symbols(word string) []int32 {
	ids := make([]int32, 0, len(word))
	for _, r := range word {
		if id, ok := t.vocab[string(r)]; ok {
			ids = append(ids, id)
			continue
		}
		for _, b := range []byte(string(r)) {
			ids = append(ids, t.vocab[fmt.Sprintf("<0x%02X>", b)])
		}
	}
	return ids
}

// merge joins neighbours, lowest rank first and leftmost among equals, until no pair has a rank.
func (t *Tokenizer) merge(ids []int32) []int32 {
	if len(ids) < 2 {
		return ids
	}
	next := make([]int, len(ids))
	prev := make([]int, len(ids))
	for i := range ids {
		next[i], prev[i] = i+1, i-1
	}
	var heap mergeHeap
	offer := func(i int) {
		if i < 0 || next[i] >= len(ids) {
			return
		}
		if m, ok := t.merges[pair{ids[i], ids[next[i]]}]; ok {
			heap.push(candidate{m.rank, i, pair{ids[i], ids[next[i]]}, m.id})
		}
	}
	for i := range ids {
		offer(i)
	}
	for len(heap) > 0 {
		c := heap.pop()
		i := c.at
		if ids[i] != c.from.left || next[i] >= len(ids) || ids[next[i]] != c.from.right {
			continue
		}
		gone := next[i]
		ids[i], ids[gone] = c.id, -1
		next[i] = next[gone]
		if next[i] < len(ids) {
			prev[next[i]] = i
		}
		offer(prev[i])
		offer(i)
	}
	out := ids[:0]
	for _, id := range ids {
		if id >= 0 {
			out = append(out, id)
		}
	}
	return out
}

type candidate struct {
	rank, at int
	from     pair
	id       int32
}

// mergeHeap is a binary heap ordered by rank, then by place.
type mergeHeap []candidate

func (c candidate) before(o candidate) bool {
	return c.rank < o.rank || c.rank == o.rank && c.at < o.at
}

func (h *mergeHeap) push(c candidate) {
	*h = append(*h, c)
	for i := len(*h) - 1; i > 0; {
		up := (i - 1) / 2
		if !(*h)[i].before((*h)[up]) {
			return
		}
		(*h)[i], (*h)[up] = (*h)[up], (*h)[i]
		i = up
	}
}

func (h *mergeHeap) pop() candidate {
	s := *h
	top := s[0]
	s[0] = s[len(s)-1]
	s = s[:len(s)-1]
	*h = s
	for i := 0; ; {
		least := i
		for _, down := range [2]int{2*i + 1, 2*i + 2} {
			if down < len(s) && s[down].before(s[least]) {
				least = down
			}
		}
		if least == i {
			return top
		}
		s[i], s[least] = s[least], s[i]
		i = least
	}
}

// byteRunes is GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100 on.
var byteRunes, runeBytes = func() (spelled [256]rune, back map[rune]byte) {
	back = map[rune]byte{}
	extra := rune(256)
	for b := range 256 {
		printable := b >= '!' && b <= '~' || b >= 0xA1 && b <= 0xAC || b >= 0xAE
		spelled[b] = rune(b)
		if !printable {
			spelled[b] = extra
			extra++
		}
		back[spelled[b]] = byte(b)
	}
	return spelled, back
}()

func (t *Tokenizer) spell(text string) string {
	if !t.bytes {
		return strings.ReplaceAll(text, " ", "▁")
	}
	var b strings.Builder
	b.Grow(len(text) * 2)
	for i := range len(text) {
		b.WriteRune(byteRunes[text[i]])
	}
	return b.String()
}

// Decode gives the text of ids; special tokens give none.
func (t *Tokenizer) Decode(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		if id < 0 || int(id) >= len(t.tokens) || t.special[id] {
			continue
		}
		content := t.tokens[id]
		switch {
		case !t.bytes && len(content) == 6 && strings.HasPrefix(content, "<0x"):
			var v byte
			if _, err := fmt.Sscanf(content, "<0x%02X>", &v); err == nil {
				b.WriteByte(v)
			}
		case !t.bytes:
			b.WriteString(strings.ReplaceAll(content, "▁", " "))
		default:
			for _, r := range content {
				if v, ok := runeBytes[r]; ok {
					b.WriteByte(v)
				} else {
					b.WriteRune(r)
				}
			}
		}
	}
	return b.String()
}

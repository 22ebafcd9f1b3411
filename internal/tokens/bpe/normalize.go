package bpe

import (
	"encoding/binary"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// The algorithm is the canonical composition of the Unicode standard (UAX 15). Its tables were probed from the
// reference library, whose marks and compositions are those of an older Unicode version. golang.org/x/text is not used:
// it inserts U+034F after 30 marks and composes some astral pairs wrongly.

// Hangul syllables are composed by arithmetic (Unicode standard, section 3.12).
const (
	hangulS, hangulL, hangulV, hangulT = 0xac00, 0x1100, 0x1161, 0x11a7
	hangulLs, hangulVs, hangulTs       = 19, 21, 28
	hangulCount                        = hangulLs * hangulVs * hangulTs
)

// The maps are asked only about code points with clsDecomposes or clsSecond: seldom, as text in NFC is left as it is.
var (
	decomposition = map[rune][]rune{}
	composition   = map[[2]rune]rune{}
)

// initNormal fills the maps and sets the classes of normalization. clsCompose is set for second
// halves of compositions and code points that do not compose to themselves.
func initNormal(flat []class) {
	readDecompositions(decompositions, decomposition)
	composed := map[rune]bool{}
	for row := range strings.SplitSeq(compositions, ",") {
		f := strings.Fields(row)
		a, b, c := mustHex(f[0]), mustHex(f[1]), mustHex(f[2])
		composition[[2]rune{a, b}] = c
		composed[c] = true
		flat[a] |= clsFirst
		flat[b] |= clsCompose | clsSecond
	}
	for c := range decomposition {
		flat[c] |= clsDecomposes
		if !composed[c] {
			flat[c] |= clsCompose
		}
	}
	for combining, ranges := range combiningClasses {
		setRanges(flat, ranges, class(combining)<<classBits)
	}
	setRanges(flat, "1161-1175,11a7-11c2", clsCompose|clsSecond) // vowels and final consonants
	setRanges(flat, "1100-1112,ac00-d7a3", clsFirst)             // too many syllables: it costs only time
}

// quiet reports whether the code point is a starter that NFC leaves as it is and does not join to what precedes it.
func (c class) quiet() bool { return c&clsCompose == 0 && c>>classBits == 0 }

// highBits are set in bytes that are not ASCII.
const highBits = 0x8080808080808080

// composeAt returns the offset of the first code point at or after i that NFC may change, move or join to its
// neighbour, or that is not valid UTF-8, or len(s), also once stopped. s[:i] ends in a starter or is empty.
//
// This is the quick check of UAX 15: text is in NFC if it has no code point with clsCompose and if no mark follows one
// of a higher class. For then decomposing it and sorting only puts marks of lower classes among the marks of a composed
// character. They are not second halves, so they join nothing, and they block none of its marks, whose classes are
// higher: it composes again, and the marks return to their order.
//
// A second half is left alone, too, where it follows a starter that neither decomposes nor is a first
// half, as in most text of Indian scripts: nothing comes between the two, so it joins nothing. A mark
// after it is judged as above, and another second half after it, if it is a mark, ends the check.
func composeAt(s string, i int, wanted *watch) int {
	b := bytesOf(s)
	before := clsFirst // the class of the preceding code point; unknown, and of ASCII: this one
	look := min(i+lookEvery, len(b))
	for i < len(s) {
		if i >= look {
			if wanted.look() {
				return len(s)
			}
			look = min(i+lookEvery, len(b))
		}
		if b[i] < 0x80 {
			before = clsFirst
			i++
			for i+8 <= look && binary.LittleEndian.Uint64(b[i:])&highBits == 0 {
				i += 8
			}
			continue
		}
		var n int
		r := uint32(b[i])
		switch {
		case r >= 0xc2 && r < 0xe0 && i+1 < len(b) && b[i+1]^0x80 < 0x40:
			r, n = r&0x1f<<6|uint32(b[i+1]&0x3f), 2
		case r >= 0xe0 && r < 0xf0 && i+2 < len(b) && (b[i+1]^0x80)|(b[i+2]^0x80) < 0x40:
			r, n = r&0xf<<12|uint32(b[i+1]&0x3f)<<6|uint32(b[i+2]&0x3f), 3
			if r < 0x800 || r>>11 == 0xd800>>11 {
				return i
			}
		default:
			wide, size := utf8.DecodeRune(b[i:])
			if r, n = uint32(wide), size; n == 1 {
				return i
			}
		}
		c := classPages[classIndex[r>>8]][r&0xff]
		joins := c&clsCompose != 0 && (c&(clsSecond|clsDecomposes) != clsSecond || before&(clsFirst|clsDecomposes) != 0 || before>>classBits != 0)
		if combining := c >> classBits; joins || combining < before>>classBits && combining != 0 {
			return i
		}
		before = c
		i += n
	}
	return i
}

// appendNFC appends the NFC form of s, which must be valid UTF-8. Once stopped, it appends only a part.
func (n *normalizer) appendNFC(dst []byte, s string) []byte {
	for at := 0; at < len(s); {
		hit := composeAt(s, at, n.wanted)
		if hit == len(s) {
			return append(dst, s[at:]...)
		}
		// Normalize from the quiet code point before the hit to the next quiet one: quiet code
		// points never join to what precedes them.
		from := hit
		for quiet := false; from > at && !quiet; {
			r, size := utf8.DecodeLastRuneInString(s[at:from])
			quiet = runeClass(r).quiet()
			from -= size
		}
		end := hit
		for end < len(s) {
			c, size := classAt(s, end)
			if c.quiet() || n.wanted.over(size) {
				break
			}
			end += size
		}
		if n.wanted.over(hit - at) {
			return dst
		}
		dst = append(dst, s[at:from]...)
		dst = n.appendStretch(dst, s[from:end])
		at = end
	}
	return dst
}

// composed is appendNFC with the encoder's memory.
func (enc *encoder) composed(dst []byte, s string) []byte {
	enc.normal.wanted = &enc.watch
	return enc.normal.appendNFC(dst, s)
}

// nfc is the normalizer NFC.
func nfc(enc *encoder, s string) string {
	if composeAt(s, 0, &enc.watch) == len(s) {
		return s
	}
	return string(enc.composed(nil, s))
}

// nfkc is the normalizer NFKC.
func nfkc(enc *encoder, s string) string {
	if isASCII(bytesOf(s)) {
		return s
	}
	n := normalizer{compatible: true, wanted: &enc.watch}
	return string(n.appendStretch(nil, s))
}

// compatible holds the compatibility decompositions that are not canonical ones.
var compatible = lazily(func() map[rune][]rune {
	table := map[rune][]rune{}
	readDecompositions(compatibles, table)
	return table
})

// lazily is sync.OnceValue by a mutex. Tests build this package without the race detector, which
// then sees mutexes, but not the atomic operations of sync.Once and sync.Map.
func lazily[T any](make func() T) func() T {
	var mu sync.Mutex
	var value T
	made := false
	return func() T {
		mu.Lock()
		defer mu.Unlock()
		if !made {
			value, made = make(), true
		}
		return value
	}
}

// readDecompositions reads rows of "from to to ...".
func readDecompositions(rows string, to map[rune][]rune) {
	for row := range strings.SplitSeq(rows, ",") {
		f := strings.Fields(row)
		d := make([]rune, 0, 4)
		for _, h := range f[1:] {
			d = append(d, mustHex(h))
		}
		to[mustHex(f[0])] = d
	}
}

// normalizer is the state of a normalization.
type normalizer struct {
	marks      []mark
	compatible bool // NFKC: compatibility decompositions too
	wanted     *watch
}

// mark is a code point and its canonical combining class, 0 for a starter.
type mark struct {
	rune  rune
	class uint8
}

// appendStretch appends the normal form of s; nothing once stopped.
func (n *normalizer) appendStretch(dst []byte, s string) []byte {
	n.decompose(s)
	for _, m := range n.compose() {
		if n.wanted.over(1) {
			break
		}
		dst = utf8.AppendRune(dst, m.rune)
	}
	return dst
}

// decompose fills marks with the decomposition of s in canonical order.
func (n *normalizer) decompose(s string) {
	n.marks = n.marks[:0]
	var alike map[rune][]rune
	if n.compatible {
		alike = compatible()
	}
	for _, r := range s {
		if n.wanted.over(utf8.RuneLen(r)) {
			n.marks = n.marks[:0]
			return
		}
		d, ok := alike[r]
		c := runeClass(r)
		if !ok && c&clsDecomposes != 0 {
			d, ok = decomposition[r]
		}
		if ok {
			for _, x := range d {
				n.push(x)
			}
			continue
		}
		if i := r - hangulS; i >= 0 && i < hangulCount {
			n.push(hangulL + i/(hangulVs*hangulTs))
			n.push(hangulV + i%(hangulVs*hangulTs)/hangulTs)
			if t := i % hangulTs; t != 0 {
				n.push(hangulT + t)
			}
			continue
		}
		n.marks = append(n.marks, mark{r, uint8(c >> classBits)})
	}
	n.reorder()
}

func (n *normalizer) push(r rune) {
	n.marks = append(n.marks, mark{r, uint8(runeClass(r) >> classBits)})
}

// reorder sorts each run of marks by combining class. It is a stable counting sort, so a long run takes linear time.
func (n *normalizer) reorder() {
	for i := 0; i < len(n.marks); i++ {
		j := i
		for j < len(n.marks) && n.marks[j].class != 0 {
			j++
		}
		run := n.marks[i:j]
		i = j
		if n.wanted.over(len(run)) || slices.IsSortedFunc(run, func(a, b mark) int { return int(a.class) - int(b.class) }) {
			continue
		}
		var at [257]int
		for _, m := range run {
			at[int(m.class)+1]++
		}
		for c := 1; c < len(at); c++ {
			at[c] += at[c-1]
		}
		for _, m := range slices.Clone(run) {
			run[at[m.class]] = m
			at[m.class]++
		}
	}
}

// compose joins each starter with the marks that are not blocked from it.
func (n *normalizer) compose() []mark {
	out := n.marks[:0]
	starter := -1
	var last uint8
	for _, m := range n.marks {
		if n.wanted.over(1) {
			return nil
		}
		if starter >= 0 && (len(out)-1 == starter || last < m.class) {
			if x, ok := composePair(out[starter].rune, m.rune); ok {
				out[starter].rune = x
				continue
			}
		}
		if last = m.class; last == 0 {
			starter = len(out)
		}
		out = append(out, m)
	}
	return out
}

func composePair(a, b rune) (rune, bool) {
	if l := a - hangulL; l >= 0 && l < hangulLs {
		if v := b - hangulV; v >= 0 && v < hangulVs {
			return hangulS + (l*hangulVs+v)*hangulTs, true
		}
	}
	if i := a - hangulS; i >= 0 && i < hangulCount && i%hangulTs == 0 {
		if t := b - hangulT; t > 0 && t < hangulTs {
			return a + t, true
		}
	}
	if runeClass(b)&clsSecond == 0 {
		return 0, false
	}
	x, ok := composition[[2]rune{a, b}]
	return x, ok
}

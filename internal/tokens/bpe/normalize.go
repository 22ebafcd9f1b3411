package bpe

import (
	"encoding/binary"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// The algorithm is the canonical composition of the Unicode standard (UAX 15). Its tables were
// probed from the reference library, whose marks and compositions are those of an older Unicode
// version. golang.org/x/text is not used: it inserts U+034F after 30 marks and composes some
// astral pairs wrongly.

// Hangul syllables are composed by arithmetic (Unicode standard, section 3.12).
const (
	hangulS, hangulL, hangulV, hangulT = 0xac00, 0x1100, 0x1161, 0x11a7
	hangulLs, hangulVs, hangulTs       = 19, 21, 28
	hangulCount                        = hangulLs * hangulVs * hangulTs
)

var (
	decomposition  = map[rune][]rune{}
	composition    = map[[2]rune]rune{}
	combiningClass = map[rune]uint8{}
)

// initNormal fills the tables and returns the code points at which the quick check must stop:
// marks, second halves of compositions, and code points that do not compose to themselves.
func initNormal() []rune {
	var flagged []rune
	readDecompositions(decompositions, decomposition)
	composed := map[rune]bool{}
	for row := range strings.SplitSeq(compositions, ",") {
		f := strings.Fields(row)
		a, b, c := mustHex(f[0]), mustHex(f[1]), mustHex(f[2])
		composition[[2]rune{a, b}] = c
		composed[c] = true
		flagged = append(flagged, b)
	}
	for c := range decomposition {
		if !composed[c] {
			flagged = append(flagged, c)
		}
	}
	for class, ranges := range combiningClasses {
		eachRange(ranges, func(from, to rune) {
			for c := from; c <= to; c++ {
				combiningClass[c] = class
				flagged = append(flagged, c)
			}
		})
	}
	for c := rune(hangulV); c < hangulV+hangulVs; c++ {
		flagged = append(flagged, c)
	}
	for c := rune(hangulT); c < hangulT+hangulTs; c++ {
		flagged = append(flagged, c)
	}
	return flagged
}

// highBits are set in bytes that are not ASCII.
const highBits = 0x8080808080808080

// composeAt returns the offset of the first code point at or after i that NFC may change or join
// to its neighbour, or len(s).
func composeAt(s string, i int) int {
	b := bytesOf(s)
	for i < len(s) {
		if b[i] < 0x80 {
			i++
			for i+8 <= len(b) && binary.LittleEndian.Uint64(b[i:])&highBits == 0 {
				i += 8
			}
			continue
		}
		c, n := wideClassAt(s, i)
		if c&clsCompose != 0 {
			return i
		}
		i += n
	}
	return i
}

// appendNFC appends the NFC form of s, which must be valid UTF-8. Once stopped, it appends only a
// part.
func appendNFC(dst []byte, s string, wanted *watch) []byte {
	var n normalizer
	for at := 0; at < len(s); {
		hit := composeAt(s, at)
		if hit == len(s) {
			return append(dst, s[at:]...)
		}
		// Normalize from the quiet code point before the hit to the next quiet one: quiet code
		// points never join to what precedes them.
		from := hit
		if from > at {
			_, size := utf8.DecodeLastRuneInString(s[at:hit])
			from -= size
		}
		end := hit
		for end < len(s) {
			c, size := classAt(s, end)
			if c&clsCompose == 0 {
				break
			}
			end += size
		}
		if wanted.over(end - at) {
			return dst
		}
		dst = append(dst, s[at:from]...)
		dst = n.appendStretch(dst, s[from:end])
		at = end
	}
	return dst
}

// nfc is the normalizer NFC.
func nfc(enc *encoder, s string) string {
	if composeAt(s, 0) == len(s) {
		return s
	}
	return string(appendNFC(nil, s, &enc.watch))
}

// nfkc is the normalizer NFKC.
func nfkc(_ *encoder, s string) string {
	if isASCII(bytesOf(s)) {
		return s
	}
	n := normalizer{compatible: true}
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
}

// mark is a code point and its canonical combining class, 0 for a starter.
type mark struct {
	rune  rune
	class uint8
}

func (n *normalizer) appendStretch(dst []byte, s string) []byte {
	n.decompose(s)
	for _, m := range n.compose() {
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
		d, ok := alike[r]
		if !ok {
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
		n.push(r)
	}
	n.reorder()
}

func (n *normalizer) push(r rune) { n.marks = append(n.marks, mark{r, combiningClass[r]}) }

// reorder sorts each run of marks by combining class. It is a stable counting sort, so a long run
// takes linear time.
func (n *normalizer) reorder() {
	for i := 0; i < len(n.marks); i++ {
		j := i
		for j < len(n.marks) && n.marks[j].class != 0 {
			j++
		}
		run := n.marks[i:j]
		i = j
		if slices.IsSortedFunc(run, func(a, b mark) int { return int(a.class) - int(b.class) }) {
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
	x, ok := composition[[2]rune{a, b}]
	return x, ok
}

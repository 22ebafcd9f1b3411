package tokenizer

import (
	"encoding/binary"
	"strings"
	"sync"
	"unicode/utf8"
)

// The algorithm is the canonical composition of the Unicode standard (UAX 15)
// on tables that were probed in the reference library, whose marks and
// compositions are those of an older Unicode. golang.org/x/text is not used: it
// inserts U+034F after 30 marks and composes some astral pairs wrongly.

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

// initNormal fills the tables and returns the code points at which the quick
// check has to stop: marks, second halves of compositions, and all that does
// not compose to itself.
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

// composeAt is the offset of the first code point at or after i that NFC may
// change or join to its neighbour, or len(s).
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

// appendNFC appends the NFC form of s, which is valid UTF-8, or a part of it if it is
// not wanted any more.
func appendNFC(dst []byte, s string, wanted *watch) []byte {
	var n normalizer
	for at := 0; at < len(s); {
		hit := composeAt(s, at)
		if hit == len(s) {
			return append(dst, s[at:]...)
		}
		// The stretch to normalize runs from the quiet code point before the
		// hit to the next quiet one: quiet ones never join what is before them.
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
	n.decompose(s)
	return string(n.compose())
}

// compatible holds the compatibility decompositions that are not canonical ones.
var compatible = sync.OnceValue(func() map[rune][]rune {
	table := map[rune][]rune{}
	readDecompositions(compatibles, table)
	return table
})

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

// normalizer holds the buffers of appendNFC.
type normalizer struct {
	runes      []rune
	classes    []uint8
	compatible bool // NFKC: compatibility decompositions, too
}

func (n *normalizer) appendStretch(dst []byte, s string) []byte {
	n.decompose(s)
	for _, r := range n.compose() {
		dst = utf8.AppendRune(dst, r)
	}
	return dst
}

// decompose fills runes with the decomposition of s in canonical order.
func (n *normalizer) decompose(s string) {
	n.runes, n.classes = n.runes[:0], n.classes[:0]
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

func (n *normalizer) push(r rune) {
	n.runes = append(n.runes, r)
	n.classes = append(n.classes, combiningClass[r])
}

// reorder sorts each run of marks by combining class, keeping the order of
// equals. Counting sort, so that a long run of marks costs linear time.
func (n *normalizer) reorder() {
	for i := 0; i < len(n.runes); i++ {
		if n.classes[i] == 0 {
			continue
		}
		j := i
		sorted := true
		for j < len(n.runes) && n.classes[j] != 0 {
			sorted = sorted && (j == i || n.classes[j-1] <= n.classes[j])
			j++
		}
		if !sorted {
			var at [257]int
			for _, c := range n.classes[i:j] {
				at[int(c)+1]++
			}
			for c := 1; c < len(at); c++ {
				at[c] += at[c-1]
			}
			runes := append([]rune(nil), n.runes[i:j]...)
			classes := append([]uint8(nil), n.classes[i:j]...)
			for k, c := range classes {
				n.runes[i+at[c]], n.classes[i+at[c]] = runes[k], c
				at[c]++
			}
		}
		i = j
	}
}

// compose joins each starter with the marks that are not blocked from it.
func (n *normalizer) compose() []rune {
	out := n.runes[:0]
	starter := -1
	var last uint8
	for i, r := range n.runes {
		c := n.classes[i]
		if starter >= 0 {
			adjacent := len(out)-1 == starter
			if adjacent || last < c {
				if x, ok := composePair(out[starter], r); ok {
					out[starter] = x
					continue
				}
			}
		}
		if c == 0 {
			starter, last = len(out), 0
		} else {
			last = c
		}
		out = append(out, r)
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

package tokenizer

import (
	"strings"
	"sync"
	"unicode/utf8"
)

// normalizeStages are the normalizers by type.
var normalizeStages = map[string]func(c component) (normalizeStage, error){
	"NFC":  func(component) (normalizeStage, error) { return composed, nil },
	"NFD":  func(component) (normalizeStage, error) { return form(false, false), nil },
	"NFKC": func(component) (normalizeStage, error) { return form(true, true), nil },
	"NFKD": func(component) (normalizeStage, error) { return form(true, false), nil },
	"Lowercase": func(component) (normalizeStage, error) {
		return func(_ *worker, s string) string { return lowered(s) }, nil
	},
	"StripAccents": func(component) (normalizeStage, error) { return without("Accent"), nil },
	"Strip": func(c component) (normalizeStage, error) {
		blank, _ := namedSet("Blank")
		left, right := c.StripLeft == nil || *c.StripLeft, c.StripRight == nil || *c.StripRight
		return func(_ *worker, s string) string {
			if left {
				s = strings.TrimLeftFunc(s, blank.has)
			}
			if right {
				s = strings.TrimRightFunc(s, blank.has)
			}
			return s
		}, nil
	},
	"Prepend": func(c component) (normalizeStage, error) {
		return func(_ *worker, s string) string { return c.Prepend + s }, nil
	},
	"Replace": func(c component) (normalizeStage, error) {
		find, err := patternMatches(c)
		if err != nil {
			return nil, err
		}
		return func(w *worker, s string) string {
			from, to, ok := find(w, s, 0)
			if !ok {
				return s
			}
			var out strings.Builder
			at := 0
			for ok {
				out.WriteString(s[at:from])
				out.WriteString(c.Content)
				at = to
				if at == len(s) {
					break
				}
				from, to, ok = find(w, s, at)
			}
			out.WriteString(s[at:])
			return out.String()
		}, nil
	},
	"ByteLevel": func(component) (normalizeStage, error) {
		return func(_ *worker, s string) string { return byteLevelString(bytesOf(s)) }, nil
	},
	"BertNormalizer": bertNormalizer,
}

// composed is NFC.
func composed(w *worker, s string) string {
	if composeAt(s, 0) == len(s) {
		return s
	}
	return string(appendNFC(nil, s, &w.watch))
}

// form is a normalization form other than NFC.
func form(compatible, compose bool) normalizeStage {
	return func(_ *worker, s string) string {
		if isASCII(bytesOf(s)) {
			return s
		}
		n := normalizer{compatible: compatible}
		n.decompose(s)
		runes := n.runes
		if compose {
			runes = n.compose()
		}
		return string(runes)
	}
}

var (
	// compatible is the compatibility decompositions that are not canonical ones.
	compatible = sync.OnceValue(func() map[rune][]rune { return runeTable(compatibles) })
	// lower is the code points that have a lower case.
	lower = sync.OnceValue(func() map[rune][]rune { return runeTable(lowers) })
)

// runeTable reads rows of "from to to ...".
func runeTable(rows string) map[rune][]rune {
	table := map[rune][]rune{}
	for row := range strings.SplitSeq(rows, ",") {
		f := strings.Fields(row)
		to := make([]rune, 0, len(f)-1)
		for _, h := range f[1:] {
			to = append(to, mustHex(h))
		}
		table[mustHex(f[0])] = to
	}
	return table
}

// lowered is the text in lower case, each code point by itself.
func lowered(s string) string {
	table := lower()
	var out strings.Builder
	for _, r := range s {
		switch to, ok := table[r]; {
		case r < utf8.RuneSelf && (r < 'A' || r > 'Z'):
			out.WriteByte(byte(r))
		case !ok:
			out.WriteRune(r)
		default:
			for _, x := range to {
				out.WriteRune(x)
			}
		}
	}
	return out.String()
}

// without drops the code points of a generated class.
func without(name string) normalizeStage {
	set, _ := namedSet(name)
	return func(_ *worker, s string) string {
		return strings.Map(func(r rune) rune {
			if set.has(r) {
				return -1
			}
			return r
		}, s)
	}
}

// bertNormalizer cleans, sets Han characters apart, drops accents and lowers, as asked for.
func bertNormalizer(c component) (normalizeStage, error) {
	yes := func(b *bool) bool { return b == nil || *b }
	clean, wide, small := yes(c.CleanText), yes(c.HandleChineseChars), yes(c.Lowercase)
	strip := small
	if c.StripAccents != nil {
		strip = *c.StripAccents
	}
	drop, _ := namedSet("BertDrop")
	blank, _ := namedSet("BertSpace")
	han, _ := namedSet("BertWide")
	decomposed, unmarked := form(false, false), without("BertMark")
	return func(w *worker, s string) string {
		var out strings.Builder
		for _, r := range s {
			switch {
			case clean && drop.has(r):
			case clean && blank.has(r):
				out.WriteByte(' ')
			case wide && han.has(r):
				out.WriteByte(' ')
				out.WriteRune(r)
				out.WriteByte(' ')
			default:
				out.WriteRune(r)
			}
		}
		s = out.String()
		if strip {
			s = unmarked(w, decomposed(w, s))
		}
		if small {
			s = lowered(s)
		}
		return s
	}, nil
}

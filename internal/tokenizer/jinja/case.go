package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
)

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// chargeCase pays for a change of case: a copy, or for other than ASCII about perByte bytes for each byte.
func (m *machine) chargeCase(s string, perByte int) {
	if isASCII(s) {
		m.charge(len(s))
		return
	}
	m.work(16 * len(s))
	m.chargeRepeat(int64(len(s)), perByte)
}

// lower and upper follow the full Unicode mappings, final sigma included.
func lower(s string) string {
	if isASCII(s) {
		return strings.ToLower(s)
	}
	return cases.Lower(language.Und).String(s)
}

func upper(s string) string {
	if isASCII(s) {
		return strings.ToUpper(s)
	}
	return cases.Upper(language.Und).String(s)
}

func casefold(s string) string {
	if isASCII(s) {
		return strings.ToLower(s)
	}
	return cases.Fold().String(s)
}

// titleRune is the titlecase of one character: "ß" gives "Ss".
func titleRune(r rune) string {
	if r < utf8.RuneSelf {
		return string(unicode.ToTitle(r))
	}
	if t := unicode.ToTitle(r); t != r {
		return string(t)
	}
	up := upper(string(r))
	if utf8.RuneCountInString(up) > 1 {
		first, size := utf8.DecodeRuneInString(up)
		return string(first) + lower(up[size:])
	}
	return string(r)
}

func capitalize(s string) string {
	if s == "" {
		return s
	}
	r, size := utf8.DecodeRuneInString(s)
	return titleRune(r) + strings.TrimPrefix(lower(s), lower(s[:size]))
}

func title(s string) string {
	low := lowerRunes(s)
	var b strings.Builder
	after := false
	for i, r := range []rune(s) {
		if after {
			b.WriteString(low[i])
		} else {
			b.WriteString(titleRune(r))
		}
		after = isCased(r)
	}
	return b.String()
}

// lowerRunes is the lowercase of each character in its place: a final sigma
// depends on its neighbours.
func lowerRunes(s string) []string {
	runes := []rune(s)
	out := make([]string, len(runes))
	for i, r := range runes {
		if r == 'Σ' {
			out[i] = sigma(runes, i)
		} else {
			out[i] = lower(string(r))
		}
	}
	return out
}

func sigma(runes []rune, i int) string {
	ignorable := func(r rune) bool {
		return unicode.Is(unicode.Mn, r) || unicode.Is(unicode.Cf, r) || strings.ContainsRune("'.:^`·’", r)
	}
	j := i - 1
	for j >= 0 && ignorable(runes[j]) {
		j--
	}
	if j < 0 || !isCased(runes[j]) {
		return "σ"
	}
	for j = i + 1; j < len(runes) && ignorable(runes[j]); {
		j++
	}
	if j == len(runes) || !isCased(runes[j]) {
		return "ς"
	}
	return "σ"
}

func swapcase(s string) string {
	low := lowerRunes(s)
	var b strings.Builder
	for i, r := range []rune(s) {
		switch {
		case isUpper(r):
			b.WriteString(low[i])
		case isLower(r):
			b.WriteString(upper(string(r)))
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
)

// like returns s with the type of v: methods of Markup return Markup.
func like(v Value, s string) Value {
	out := String(s)
	out.safe = v.safe
	return out
}

// markup returns a str that is marked as safe.
func markup(s string) Value {
	v := String(s)
	v.safe = true
	return v
}

var htmlEscaper = strings.NewReplacer("&", "&amp;", ">", "&gt;", "<", "&lt;", "'", "&#39;", `"`, "&#34;")

// plainOnly raises for an operation on safe text that would HTML-escape the other text.
func plainOnly(a, b Value) {
	if a.safe != b.safe {
		unsupportedf("joining text with text from filter %q", "safe")
	}
}

func strip(s string, left, right bool) string {
	if left {
		s = strings.TrimLeftFunc(s, isSpace)
	}
	if right {
		s = strings.TrimRightFunc(s, isSpace)
	}
	return s
}

// trimChars is Python's s.strip(chars).
func (m *machine) trimChars(s, chars string, left, right bool) string {
	in := func(r rune) bool {
		m.work(64 + 4*len(chars))
		return strings.ContainsRune(chars, r)
	}
	if left {
		s = strings.TrimLeftFunc(s, in)
	}
	if right {
		s = strings.TrimRightFunc(s, in)
	}
	return s
}

func isLineEnd(r rune) bool {
	return r >= 0x0a && r <= 0x0d || r >= 0x1c && r <= 0x1e || r == 0x85 || r == 0x2028 || r == 0x2029
}

// splitLines is Python's str.splitlines.
func splitLines(s string, keep bool) []string {
	var parts []string
	for s != "" {
		at := strings.IndexFunc(s, isLineEnd)
		if at < 0 {
			return append(parts, s)
		}
		_, size := utf8.DecodeRuneInString(s[at:])
		if strings.HasPrefix(s[at:], "\r\n") {
			size = 2
		}
		if keep {
			parts = append(parts, s[:at+size])
		} else {
			parts = append(parts, s[:at])
		}
		s = s[at+size:]
	}
	return parts
}

// chargeLines charges each bytes for every line of s.
func (m *machine) chargeLines(s string, each int) {
	m.work(4 * len(s))
	n := int64(1)
	for _, r := range s {
		if isLineEnd(r) {
			n++
		}
	}
	m.chargeRepeat(n, each)
}

func (m *machine) replace(s, old, with string, count int64) string {
	if count < 0 || count > int64(len(s))+1 {
		count = int64(len(s)) + 1
	}
	if n := min(int64(strings.Count(s, old)), count); n > 0 {
		m.chargeRepeat(n, len(with)+1)
	}
	m.charge(len(s))
	return strings.Replace(s, old, with, int(count))
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// chargeCase charges for a change of case: a copy, or about 8 bytes per byte for non-ASCII text.
func (m *machine) chargeCase(s string) {
	if isASCII(s) {
		m.charge(len(s))
		return
	}
	m.work(16 * len(s))
	m.chargeRepeat(int64(len(s)), 8)
}

// lower and upper follow the full Unicode mappings, including final sigma.
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

// capitalize is Python's s.capitalize(): the first character in titlecase, the others in lowercase.
func capitalize(s string) string {
	if s == "" {
		return s
	}
	r, size := utf8.DecodeRuneInString(s)
	first := string(unicode.ToTitle(r))
	if r >= utf8.RuneSelf && first == string(r) { // such as "ß", which has two letters in uppercase
		up := upper(first)
		_, n := utf8.DecodeRuneInString(up)
		if n < len(up) {
			first = up[:n] + lower(up[n:])
		}
	}
	return first + strings.TrimPrefix(lower(s), lower(s[:size]))
}

// titleASCII is Python's s.title() for ASCII text.
func titleASCII(s string) string {
	out := []byte(s)
	inWord := false
	for i, c := range out {
		letter := c|32 >= 'a' && c|32 <= 'z'
		switch {
		case letter && inWord:
			out[i] = c | 32
		case letter:
			out[i] = c &^ 32
		}
		inWord = letter
	}
	return string(out)
}

// titleWords is the filter title: it capitalizes after spaces, dashes and opening brackets only.
func titleWords(s string) string {
	var b strings.Builder
	start := 0
	for i := 0; i <= len(s); {
		size := 1
		if i < len(s) {
			var r rune
			r, size = utf8.DecodeRuneInString(s[i:])
			if !isSpace(r) && !strings.ContainsRune("-([{<", r) {
				i += size
				continue
			}
		}
		if word := s[start:i]; word != "" {
			first, n := utf8.DecodeRuneInString(word)
			b.WriteString(upper(string(first)) + lower(word[n:]))
		}
		if i < len(s) {
			b.WriteString(s[i : i+size])
		}
		i += size
		start = i
	}
	return b.String()
}

package observe

import (
	"strconv"
	"strings"
	"unicode"
)

// Printable makes a text safe for a terminal: unprintable characters, except line ends,
// become Go escape sequences. Clients choose ids and names.
func Printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		switch {
		case r == '\n' || unicode.IsPrint(r) && (r != unicode.ReplacementChar || strings.HasPrefix(text[i:], string(r))):
			b.WriteRune(r)
		case r == unicode.ReplacementChar: // an invalid UTF-8 byte
			quoted := strconv.Quote(text[i : i+1])
			b.WriteString(quoted[1 : len(quoted)-1])
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
	}
	return b.String()
}

// inLine is Printable for a text that must stay on one line.
func inLine(text string) string { return Printable(strings.ReplaceAll(text, "\n", `\n`)) }

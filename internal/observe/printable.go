package observe

import (
	"strconv"
	"strings"
	"unicode"
)

// Printable makes a text safe for a terminal: what is not printable in it, but for the
// ends of lines, becomes an escape sequence of Go. Clients choose ids and names.
func Printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		switch {
		case r == '\n' || unicode.IsPrint(r) && (r != unicode.ReplacementChar || strings.HasPrefix(text[i:], string(r))):
			b.WriteRune(r)
		case r == unicode.ReplacementChar: // a byte that is no UTF-8
			quoted := strconv.Quote(text[i : i+1])
			b.WriteString(quoted[1 : len(quoted)-1])
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
	}
	return b.String()
}

// inLine is Printable for a text that must not end the line that it stands in.
func inLine(text string) string { return Printable(strings.ReplaceAll(text, "\n", `\n`)) }

package observe

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds in bytes for texts in the decision log and in tickets: MaxClient for a text from a client, MaxText for one
// that may quote a client.
const (
	MaxClient = 256
	MaxText   = 1024
)

const clipMark = "…"

// Clip returns a copy of a client's text in valid UTF-8, cut to MaxClient bytes between characters and marked. It is a
// copy because the text shares memory with the request, which can be megabytes. Clipping twice changes nothing.
func Clip(s string) string { return ClipTo(s, MaxClient) }

// ClipTo is Clip with a bound of most bytes instead of MaxClient.
func ClipTo(s string, most int) string {
	// Headers may have any bytes, but one text that is not UTF-8 fails a whole batch of spans.
	valid := strings.ToValidUTF8(s[:min(len(s), most+utf8.UTFMax)], "\ufffd")
	if len(s) <= most && len(valid) <= most {
		return strings.Clone(valid)
	}
	n := min(len(valid), most-len(clipMark))
	for n > 0 && n < len(valid) && !utf8.RuneStart(valid[n]) {
		n--
	}
	return valid[:n] + clipMark
}

// Printable makes a text safe for a terminal: unprintable characters, except line ends,
// become Go escape sequences. Clients choose ids and names.
func Printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		if r == '\n' || unicode.IsPrint(r) && (r != unicode.ReplacementChar || strings.HasPrefix(text[i:], string(r))) {
			b.WriteRune(r)
			continue
		}
		quoted := strconv.QuoteRune(r)
		if r == unicode.ReplacementChar { // an invalid UTF-8 byte
			quoted = strconv.Quote(text[i : i+1])
		}
		b.WriteString(quoted[1 : len(quoted)-1])
	}
	return b.String()
}

// Certificate appends advice to a certificate error. Other protocols' clients forward such errors as text.
func Certificate(err error, correct string) error {
	if err == nil || !strings.Contains(err.Error(), "x509: ") {
		return err
	}
	return fmt.Errorf("%w: correct %s, or a clock", err, correct)
}

// inLine is Printable for a text that must stay on one line.
func inLine(text string) string { return Printable(strings.ReplaceAll(text, "\n", `\n`)) }

package observe

import (
	"strings"
	"unicode/utf8"

	"github.com/kvlane/kvlane/routing"
)

// Bounds in bytes of the texts kept by the decision log and the tickets: of a text from a
// client, and of a text about a request, which may quote the client.
const (
	MaxClient = 256
	MaxText   = 1024
)

const clipMark = "…"

// Clip returns a copy of a client's text in valid UTF-8, cut to MaxClient bytes between
// characters and marked. It is a copy because the text shares memory with the request, which
// can be megabytes. Clipping twice changes nothing.
func Clip(s string) string { return ClipTo(s, MaxClient) }

// ClipTo is Clip with the bound most in bytes.
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

// Explain attaches the explanation and clips its texts, some of which are the client's.
func (e *Entry) Explain(ex *routing.Explanation) {
	e.Explanation = ex
	for ; ex != nil; ex = ex.Prefill {
		ex.Request, ex.Model, ex.Conversation = e.ID, e.Model, e.Conversation
		ex.Error = ClipTo(ex.Error, MaxText)
		for i := range ex.Verdicts {
			ex.Verdicts[i].Text = ClipTo(ex.Verdicts[i].Text, MaxText)
		}
	}
}

package decide

import (
	"strings"
	"unicode/utf8"

	"github.com/kvlane/kvlane/routing"
)

// Bounds of what the journal and the tickets keep of a text, in bytes: of what a
// client sends, and of what is said of a request, which may quote the client.
const (
	maxKept     = 256
	maxKeptText = 1024
)

const clipMark = "…"

// clip is a copy of a client's text, cut to maxKept bytes with the mark. It is a copy
// because the text shares memory with the request, which can be megabytes.
// A text that was cut is not cut again.
func clip(s string) string { return clipTo(s, maxKept) }

func clipTo(s string, most int) string {
	if len(s) <= most {
		return strings.Clone(s)
	}
	n := most - len(clipMark)
	for n > 0 && n > most-len(clipMark)-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + clipMark
}

// clipExplanation cuts what an explanation took over from the query, as the entry
// has it.
func (j *job) clipExplanation(e *routing.Explanation) {
	for ; e != nil; e = e.Prefill {
		e.Request, e.Model, e.Conversation = j.entry.ID, j.entry.Model, j.entry.Conversation
		e.Error = clipTo(e.Error, maxKeptText)
		for i := range e.Verdicts {
			e.Verdicts[i].Text = clipTo(e.Verdicts[i].Text, maxKeptText)
		}
	}
}

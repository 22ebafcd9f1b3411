package decide

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/routing"
)

// maxEstimated bounds the text that is counted exactly, in bytes of JSON; of a longer
// prompt the JSON's length is taken, which is close then.
const maxEstimated = 256 << 10

// estimateTokens is the length of a prompt that nothing can tokenize: a quarter of
// its characters (not bytes), or the number of its ids. Images and other parts
// without text count nothing.
func estimateTokens(r *prompt.Request) int64 {
	raw := r.Prompt.Of(r.Body)
	switch {
	case r.Form == prompt.FormNone:
		return 0
	case r.Form == prompt.FormIDs:
		return int64(r.Count)
	case len(raw) > maxEstimated:
		return routing.EstimateTokens(len(raw))
	}
	chars := 0
	switch r.Form {
	case prompt.FormIDLists:
		ids := 0
		for _, e := range r.Elements {
			list, _ := prompt.AppendIDs(nil, e.Of(r.Body))
			ids += len(list)
		}
		return int64(ids)
	case prompt.FormText, prompt.FormOther:
		chars = textLength(raw)
	case prompt.FormTexts:
		for _, e := range r.Elements {
			chars += textLength(e.Of(r.Body))
		}
	case prompt.FormMessages, prompt.FormItems:
		for _, e := range r.Elements {
			chars += contentLength(prompt.Member(e.Of(r.Body), "content"))
		}
		if raw[0] == '"' { // responses take a text
			chars += textLength(raw)
		}
	}
	return routing.EstimateTokens(chars)
}

// contentLength is the characters of a message's content: a text, or parts of which
// only those with text count.
func contentLength(raw []byte) int {
	if len(raw) == 0 || raw[0] != '[' {
		return textLength(raw)
	}
	var parts []struct {
		Text json.RawMessage `json:"text"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return 0
	}
	n := 0
	for _, p := range parts {
		n += textLength(p.Text)
	}
	return n
}

// textLength is a JSON string's characters, 0 of anything else.
func textLength(raw []byte) int {
	text, err := prompt.AppendText(nil, raw)
	if err != nil {
		return 0
	}
	return utf8.RuneCount(text)
}

package body

import (
	"encoding/json"
	"unicode/utf8"
)

// maxEstimated bounds the text that is counted exactly, in bytes of JSON; of a longer
// prompt the JSON's length is taken, which is close then.
const maxEstimated = 256 << 10

// EstimateTokens estimates the length of a prompt that is not tokenized: a quarter
// of its characters (not bytes), or the number of its ids. Images and other parts
// without text count nothing.
func (r *Request) EstimateTokens() int64 {
	raw := r.Prompt.Of(r.Body)
	switch {
	case r.Form == FormNone:
		return 0
	case r.Form == FormIDs:
		return int64(r.Count)
	case len(raw) > maxEstimated:
		return quarter(len(raw))
	}
	chars := 0
	switch r.Form {
	case FormIDLists:
		ids := 0
		for _, e := range r.Elements {
			list, _ := AppendIDs(nil, e.Of(r.Body))
			ids += len(list)
		}
		return int64(ids)
	case FormText, FormOther:
		chars = textLength(raw)
	case FormTexts:
		for _, e := range r.Elements {
			chars += textLength(e.Of(r.Body))
		}
	case FormMessages, FormItems:
		for _, e := range r.Elements {
			chars += contentLength(Member(e.Of(r.Body), "content"))
		}
		if raw[0] == '"' { // responses take a text
			chars += textLength(raw)
		}
	}
	return quarter(chars)
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
	text, err := AppendText(nil, raw)
	if err != nil {
		return 0
	}
	return utf8.RuneCount(text)
}

// quarter is the tokens that so many characters are taken for.
func quarter(chars int) int64 { return int64(chars / 4) }

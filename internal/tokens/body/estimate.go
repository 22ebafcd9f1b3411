package body

import (
	"slices"
	"unicode/utf8"
)

// maxEstimated bounds, in bytes of JSON, the text whose characters are counted. For longer prompts the length of the
// JSON without non-text parts is used, which is accurate enough at that size.
const maxEstimated = 256 << 10

// audioToken is the number of bytes of a recording per token: a second has 16 to 32 KB, and Whisper makes 50 tokens of it.
const audioToken = 512

// EstimateTokens estimates the prompt tokens of a request from the length of its unparsed body. For Audio a JSON body
// is a text to speak, any other body a recording.
func (a API) EstimateTokens(raw []byte) int64 {
	if a == Audio && len(raw) > 0 && raw[0] != '{' {
		return int64(len(raw) / audioToken)
	}
	if a == Unknown {
		return min(quarter(len(raw)), unknownTokens)
	}
	return quarter(len(raw))
}

// EstimateTokens estimates the number of prompt tokens without tokenizing: a quarter of the characters (not bytes) of a
// text, or the exact number of ids. Tool calls and other members of messages, and further fields that hold a prompt, count
// by the characters of their JSON; images and other parts without text count as zero. For a request without a prompt the
// texts to compare are counted.
func (r *Request) EstimateTokens() int64 {
	const idBytes = 16 // in base64, of three ids with 4 bytes each
	return r.estimatePrompt() + quarter(len(r.Get("previous_input_messages"))) + int64(len(r.Get("prompt_token_ids_b64")))*3/idBytes
}

func (r *Request) estimatePrompt() int64 {
	raw := r.Prompt.Of(r.Body)
	switch {
	case r.Form == FormNone:
		return r.estimateTexts()
	case r.Form == FormIDs:
		return int64(r.Count)
	case len(raw) > maxEstimated:
		return quarter(len(raw) - r.textless())
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
			chars += messageLength(e.Of(r.Body))
		}
		if raw[0] == '"' { // Responses also accepts a string
			chars += textLength(raw)
		}
	}
	return quarter(chars)
}

// texts are the fields of scores, rankings and embeddings that engines compute. Sources: vLLM 0.33, SGLang 0.5.23.
var texts = []string{"query", "queries", "documents", "text_1", "text_2", "data_1", "data_2", "items"}

// unknownTokens bounds the estimate of a request of which nothing is known to be computed.
const unknownTokens = 8192

func (r *Request) estimateTexts() int64 {
	n, found := 0, false
	EachMember(r.Body, func(key, value []byte) {
		if slices.ContainsFunc(texts, func(name string) bool { return IsKey(key, name) }) {
			n, found = n+len(value), true
		}
	})
	if !found {
		return min(quarter(len(r.Body)), unknownTokens)
	}
	return quarter(n)
}

// textless returns the bytes of the messages' parts without text, such as images.
func (r *Request) textless() (n int) {
	if r.Form != FormMessages && r.Form != FormItems {
		return 0
	}
	for _, e := range r.Elements {
		EachItem(Member(e.Of(r.Body), "content"), func(part []byte) {
			if Member(part, "text") == nil {
				n += len(part)
			}
		})
	}
	return n
}

// messageLength returns the number of characters of a message's content, and the bytes of its other members.
func messageLength(message []byte) int {
	n := contentLength(Member(message, "content"))
	EachMember(message, func(key, value []byte) {
		if !IsKey(key, "content") && !IsKey(key, "role") {
			n += len(value)
		}
	})
	return n
}

// contentLength returns the number of characters of a message's content: a string, or the text parts of a list.
func contentLength(raw []byte) int {
	if len(raw) == 0 || raw[0] != '[' {
		return textLength(raw)
	}
	n := 0
	EachItem(raw, func(part []byte) { n += textLength(Member(part, "text")) })
	return n
}

// textLength returns the number of characters of a JSON string, 0 for other values.
func textLength(raw []byte) int {
	text, err := AppendText(nil, raw)
	if err != nil {
		return 0
	}
	return utf8.RuneCount(text)
}

// quarter returns the estimated number of tokens of a text of chars characters.
func quarter(chars int) int64 { return int64(chars / 4) }

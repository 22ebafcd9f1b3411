package body

import (
	"encoding/json"
	"fmt"
)

// Failure is an error response in the format that the API's clients expect.
type Failure struct {
	Status  int    // HTTP status
	Type    string // for example invalid_request_error
	Message string
	Param   string // the invalid field, "" if none
	Code    string // machine-readable, "" if none
}

// AppendFailure appends the JSON body of f, in Anthropic's format for Messages and CountTokens
// and in OpenAI's for all other APIs.
func AppendFailure(dst []byte, api API, f Failure) []byte {
	kind, message := AppendQuoted(nil, f.Type), AppendQuoted(nil, f.Message)
	if api == Messages || api == CountTokens {
		return fmt.Appendf(dst, `{"type":"error","error":{"type":%s,"message":%s}}`, kind, message)
	}
	orNull := func(text string) []byte {
		if text == "" {
			return []byte("null")
		}
		return AppendQuoted(nil, text)
	}
	return fmt.Appendf(dst, `{"error":{"message":%s,"type":%s,"param":%s,"code":%s}}`, message, kind, orNull(f.Param), orNull(f.Code))
}

// AppendQuoted appends a text as a JSON string.
func AppendQuoted(dst []byte, text string) []byte {
	quoted, err := json.Marshal(text)
	if err != nil { // encoding a string cannot fail
		return append(dst, `""`...)
	}
	return append(dst, quoted...)
}

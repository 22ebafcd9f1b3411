package body

import "encoding/json"

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
	if api == Messages || api == CountTokens {
		dst = append(dst, `{"type":"error","error":{"type":`...)
		dst = AppendQuoted(dst, f.Type)
		dst = append(dst, `,"message":`...)
		dst = AppendQuoted(dst, f.Message)
		return append(dst, "}}"...)
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = AppendQuoted(dst, f.Message)
	dst = append(dst, `,"type":`...)
	dst = AppendQuoted(dst, f.Type)
	dst = append(dst, `,"param":`...)
	dst = appendOptional(dst, f.Param)
	dst = append(dst, `,"code":`...)
	dst = appendOptional(dst, f.Code)
	return append(dst, "}}"...)
}

func appendOptional(dst []byte, text string) []byte {
	if text == "" {
		return append(dst, "null"...)
	}
	return AppendQuoted(dst, text)
}

// AppendQuoted appends a text as a JSON string.
func AppendQuoted(dst []byte, text string) []byte {
	quoted, err := json.Marshal(text)
	if err != nil { // encoding a string cannot fail
		return append(dst, `""`...)
	}
	return append(dst, quoted...)
}

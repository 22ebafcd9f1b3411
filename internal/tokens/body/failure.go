package body

import "encoding/json"

// Failure is an error answer in the shape that the API's clients expect.
type Failure struct {
	Status  int    // HTTP status
	Type    string // such as invalid_request_error
	Message string
	Param   string // the field at fault, "" if there is none
	Code    string // machine-readable, "" if there is none
}

// AppendFailure appends the JSON body of f: Anthropic's shape for its two APIs, OpenAI's for everything else.
func AppendFailure(dst []byte, api API, f Failure) []byte {
	if api == Messages || api == CountTokens {
		dst = append(dst, `{"type":"error","error":{"type":`...)
		dst = appendQuoted(dst, f.Type)
		dst = append(dst, `,"message":`...)
		dst = appendQuoted(dst, f.Message)
		return append(dst, "}}"...)
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = appendQuoted(dst, f.Message)
	dst = append(dst, `,"type":`...)
	dst = appendQuoted(dst, f.Type)
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
	return appendQuoted(dst, text)
}

func appendQuoted(dst []byte, text string) []byte {
	quoted, err := json.Marshal(text)
	if err != nil { // a string always encodes
		return append(dst, `""`...)
	}
	return append(dst, quoted...)
}

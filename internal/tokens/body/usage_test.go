package body

import (
	"encoding/json"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

var answers = []struct {
	name string
	sse  bool
	text string
	want Usage
	ok   bool
}{
	{"chat", false, `{"id":"x","choices":[{"message":{"content":"\"usage\":{\"prompt_tokens\":99}","usage":{"prompt_tokens":98}}}],` +
		`"usage":{"prompt_tokens":30,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":16}}}`, Usage{30, 5, 16}, true},
	{"chat without details", false, `{"usage": {"prompt_tokens" : 30, "completion_tokens":5, "prompt_tokens_details": null}}`, Usage{30, 5, -1}, true},
	{"responses", false, `{"usage":{"input_tokens":30,"input_tokens_details":{"cached_tokens":16},"output_tokens":2}}`, Usage{30, 2, 16}, true},
	{"messages", false, `{"type":"message","usage":{"input_tokens":16,"cache_creation_input_tokens":32,"cache_read_input_tokens":8,"output_tokens":3}}`,
		Usage{56, 3, 8}, true},
	{"generate", false, `{"text":"a","meta_info":{"prompt_tokens":4,"completion_tokens":2,"cached_tokens":3}}`, Usage{4, 2, 3}, true},
	{"generate batch", false, `[{"meta_info":{"prompt_tokens":4,"completion_tokens":2,"cached_tokens":3}}]`, Usage{4, 2, 3}, true},
	{"error", false, `{"error":{"message":"usage"}}`, Usage{-1, -1, -1}, false},
	{"chat stream", true, "data: {\"choices\":[{\"delta\":{\"content\":\"data: {}\\n\"}}],\"usage\":null}\n\n" +
		"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\ndata: [DONE]\n\n",
		Usage{9, 4, 0}, true},
	{"crlf and no blank after the colon", true, "data:{\"usage\":{\"prompt_tokens\":9}}\r\n\r\n: comment\r\ndata:{\"usage\":{\"completion_tokens\":1}}\r\n\r\n",
		Usage{9, 1, -1}, true},
	{"responses stream", true, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":1," +
		"\"input_tokens_details\":{\"cached_tokens\":2}}}}\n\n", Usage{3, 1, 2}, true},
	{"messages stream", true, "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":5,\"cache_read_input_tokens\":4}}}\n\n" +
		"event: message_delta\ndata: {\"usage\":{\"output_tokens\":7}}\n\nevent: message_stop\ndata: {}\n\n", Usage{9, 7, 4}, true},
	{"event without its end, then another", true, "data: {\"usage\":{\"prompt_tok\n\ndata: {\"usage\":{\"prompt_tokens\":2}}\n\n", Usage{2, -1, -1}, true},
}

func TestUsageWhereverTheAnswerIsSplit(t *testing.T) {
	for _, a := range answers {
		for cut := range len(a.text) + 1 {
			u := NewUsageScanner(a.sse)
			_, _ = u.Write([]byte(a.text[:cut]))
			_, _ = u.Write([]byte(a.text[cut:]))
			if got, ok := u.Usage(); got != a.want || ok != a.ok {
				t.Fatalf("%s cut at %d: %+v %v, want %+v %v", a.name, cut, got, ok, a.want, a.ok)
			}
		}
		u := NewUsageScanner(a.sse)
		for i := range len(a.text) {
			_, _ = u.Write([]byte{a.text[i]})
		}
		if got, ok := u.Usage(); got != a.want || ok != a.ok {
			t.Errorf("%s byte by byte: %+v %v", a.name, got, ok)
		}
	}
}

func TestUsageIsNotTakenFromGeneratedText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SliceOf(rapid.SampledFrom([]string{`{"usage":{"prompt_tokens":7}}`, `"`, `\`, "}", "\n\ndata: ", "é"})).Draw(t, "text")
		content, err := json.Marshal(strings.Join(text, ""))
		if err != nil {
			t.Fatal(err)
		}
		u := NewUsageScanner(true)
		_, _ = u.Write([]byte(`data: {"choices":[{"delta":{"content":` + string(content) + "}}]}\n\n"))
		if got, ok := u.Usage(); ok {
			t.Fatalf("%s: got %+v, want no usage", content, got)
		}
	})
}

func FuzzUsage(f *testing.F) {
	for _, a := range answers {
		f.Add(a.sse, []byte(a.text), 3)
	}
	f.Fuzz(func(t *testing.T, sse bool, text []byte, cut int) {
		whole, parts := NewUsageScanner(sse), NewUsageScanner(sse)
		_, _ = whole.Write(text)
		if cut < 0 || cut > len(text) {
			cut = 0
		}
		_, _ = parts.Write(text[:cut])
		_, _ = parts.Write(text[cut:])
		a, okA := whole.Usage()
		b, okB := parts.Usage()
		if a != b || okA != okB {
			t.Fatalf("%+v whole, %+v in parts", a, b)
		}
	})
}

func TestAppendFailure(t *testing.T) {
	f := Failure{Status: 503, Type: "overloaded", Message: `no "worker"`, Code: "no_worker"}
	for api, want := range map[API]string{
		Chat:     `{"error":{"message":"no \"worker\"","type":"overloaded","param":null,"code":"no_worker"}}`,
		Messages: `{"type":"error","error":{"type":"overloaded","message":"no \"worker\""}}`,
	} {
		if got := AppendFailure(nil, api, f); string(got) != want {
			t.Errorf("%v: got %s, want %s", api, got, want)
		}
	}
}

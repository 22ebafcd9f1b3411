package body

import (
	"bytes"
	"encoding/json"
	"strconv"
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
	{"numbers that are no counts", false, `{"usage":{"prompt_tokens":7,"prompt_tokens":12.5,"completion_tokens":1e3,"input_tokens":99999999999999999999,"cached_tokens":-4}}`,
		Usage{7, -1, -1}, true},
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

// usageReference is what a scanner should find in a JSON text. It walks the tokens of encoding/json.
type usageReference struct {
	dec    *json.Decoder
	fields [numCounts]int64
	seen   [numCounts]bool
	// odd: nesting that the scanner does not follow.
	odd bool
}

func (u *usageReference) value(at level, key string, depth int) {
	t, err := u.dec.Token()
	if err != nil {
		u.odd = true
		return
	}
	u.odd = u.odd || depth > walkDepth
	c, counts := countKeys[at][key]
	if n, ok := t.(json.Number); ok && counts {
		if v, err := strconv.ParseUint(n.String(), 10, 63); err == nil && v/10 < 1<<52 {
			u.fields[c], u.seen[c] = int64(v), true
		}
	}
	next := levelKeys[at][key]
	if depth == 0 || depth == 1 && at == levelOther {
		next = levelRoot // the text, or an element of a batch
	}
	switch t {
	case json.Delim('{'):
		for u.dec.More() {
			k, err := u.dec.Token()
			if name, ok := k.(string); err == nil && ok {
				u.value(next, name, depth+1)
			}
		}
		_, _ = u.dec.Token()
	case json.Delim('['):
		for u.dec.More() {
			u.value(levelOther, "", depth+1)
		}
		_, _ = u.dec.Token()
	}
}

func FuzzUsage(f *testing.F) {
	for _, a := range answers {
		f.Add(a.sse, []byte(a.text), 3)
	}
	f.Fuzz(func(t *testing.T, sse bool, text []byte, cut int) {
		find := func(sse bool, parts ...[]byte) (Usage, bool) {
			u := NewUsageScanner(sse)
			for _, p := range parts {
				_, _ = u.Write(p)
			}
			return u.Usage()
		}
		if cut < 0 || cut > len(text) {
			cut = 0
		}
		a, okA := find(sse, text)
		b, okB := find(sse, text[:cut], text[cut:])
		if a != b || okA != okB {
			t.Fatalf("%+v whole, %+v in parts", a, b)
		}
		var line bytes.Buffer
		if json.Compact(&line, text) != nil || bytes.Contains(text, []byte(`\u`)) {
			return
		}
		ref := &usageReference{dec: json.NewDecoder(bytes.NewReader(text))}
		ref.dec.UseNumber()
		if ref.value(levelOther, "", 0); ref.odd {
			return
		}
		wanted := UsageScanner{fields: ref.fields, seen: ref.seen}
		want, wantOK := wanted.Usage()
		if got, ok := find(false, text); got != want || ok != wantOK {
			t.Fatalf("%q: got %+v %v, want %+v %v", text, got, ok, want, wantOK)
		}
		event := append(append([]byte(": x\r\nevent: y\ndata: "), line.Bytes()...), "\n\ndata: [DONE]\n\n"...)
		if got, ok := find(true, event[:cut%len(event)], event[cut%len(event):]); got != want || ok != wantOK {
			t.Fatalf("%q: got %+v %v, want %+v %v", event, got, ok, want, wantOK)
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

package body

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// crossOut marks a usage object, so that a test sees what edit received.
func crossOut(dst, usage []byte) []byte {
	return fmt.Appendf(dst, `{"was":%d}`, len(usage))
}

// editAll sends a response through an editor in pieces split at cuts.
func editAll(text string, sse bool, edit func(dst, usage []byte) []byte, cuts ...int) string {
	e := NewUsageEditor(sse, edit)
	var out []byte
	from := 0
	for _, to := range append(cuts, len(text)) {
		piece := []byte(text[from:to])
		made, changed := e.Edit(piece, to == len(text))
		if !changed {
			made = piece
		}
		out = append(out, made...)
		from = to
	}
	if e.Holds() {
		panic("bytes stayed behind")
	}
	return string(out)
}

func TestUsageEditor(t *testing.T) {
	usage := `{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":0}}`
	marked := fmt.Sprintf(`{"was":%d}`, len(usage))
	long := `{"x":"` + strings.Repeat("y", maxUsage) + `"}`
	for name, c := range map[string]struct {
		sse        bool
		text, want string
	}{
		"an answer":            {false, `{"id":"a","usage":` + usage + `,"choices":[]}`, `{"id":"a","usage":` + marked + `,"choices":[]}`},
		"a batch":              {false, `[{"meta_info":` + usage + `},{"meta_info":` + usage + `}]`, `[{"meta_info":` + marked + `},{"meta_info":` + marked + `}]`},
		"none":                 {false, `{"usage":null,"text":"\"usage\":{}"}`, `{"usage":null,"text":"\"usage\":{}"}`},
		"generated text":       {false, `{"choices":[{"usage":{"a":1},"text":"{\"usage\":{"}]}`, `{"choices":[{"usage":{"a":1},"text":"{\"usage\":{"}]}`},
		"cut short":            {false, `{"usage":{"prompt_tok`, `{"usage":{"prompt_tok`},
		"not JSON":             {false, `{"usage":{"a" "b"}}`, `{"usage":{"a" "b"}}`},
		"too long":             {false, `{"usage":` + long + `}`, `{"usage":` + long + `}`},
		"nothing":              {false, ``, ``},
		"a stream":             {true, "data: {\"a\":1,\"usage\":null}\n\ndata: {\"usage\":" + usage + "}\n\ndata: [DONE]\n\n", "data: {\"a\":1,\"usage\":null}\n\ndata: {\"usage\":" + marked + "}\n\ndata: [DONE]\n\n"},
		"events with names":    {true, "event: message_start\r\ndata: {\"message\":{\"usage\":" + usage + "}}\r\n\r\n: usage\n\ndata: {\"usage\":" + usage + "}", "event: message_start\r\ndata: {\"message\":{\"usage\":" + marked + "}}\r\n\r\n: usage\n\ndata: {\"usage\":" + marked + "}"},
		"over two data lines":  {true, "data: {\"usage\":{\ndata: \"a\":1}}\n\ndata: {\"usage\":{}}\n\n", "data: {\"usage\":{\ndata: \"a\":1}}\n\ndata: {\"usage\":{\"was\":2}}\n\n"},
		"an event cut short":   {true, "data: {\"usage\":{\"a\":1\n\ndata: {\"usage\":{}}\n\n", "data: {\"usage\":{\"a\":1\n\ndata: {\"usage\":{\"was\":2}}\n\n"},
		"too long, then right": {true, "data: {\"usage\":" + long + "}\n\ndata: {\"usage\":{}}\n\n", "data: {\"usage\":" + long + "}\n\ndata: {\"usage\":{\"was\":2}}\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var each []int
			for i := 1; i < len(c.text); i++ {
				each = append(each, i)
			}
			if got := editAll(c.text, c.sse, crossOut, each...); got != c.want {
				t.Errorf("byte by byte %q", got)
			}
			if len(c.text) > maxUsage { // a complete usage object is never held back, however long
				return
			}
			if got := editAll(c.text, c.sse, crossOut); got != c.want {
				t.Errorf("in one piece %q", got)
			}
		})
	}
}

// Unchanged pieces are not copied, and nothing is held back.
func TestUsageEditorLeavesPiecesAlone(t *testing.T) {
	e := NewUsageEditor(false, func(dst, usage []byte) []byte { return append(dst, usage...) })
	if out, changed := e.Edit([]byte(`{"usage":{"prompt_tokens":1},"a":`), false); changed || e.Holds() {
		t.Errorf("got %q or held bytes, want the piece unchanged and nothing held", out)
	}
	if out, changed := e.Edit([]byte(`2}`), true); changed {
		t.Errorf("got %q, want the piece unchanged", out)
	}
	if out, changed := e.Edit(nil, true); changed {
		t.Errorf("got %q at the end, want nothing", out)
	}
}

// The split into pieces does not matter, and an edit that changes nothing preserves every byte.
func TestUsageEditorAnywhere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOfN(rapid.SampledFrom([]string{`{"usage":{"prompt_tokens":12}}`, "data: ", "\n\n", "\r\n", `{"a":"}{\"","message":{"usage":{"x":[{}]}}}`, "event: x\n", "[1,", "}", `"usage":{`, "\\"}), 0, 12).Draw(t, "parts")
		text := strings.Join(parts, "")
		sse := rapid.Bool().Draw(t, "sse")
		var cuts []int
		for at := 0; at < len(text); {
			at += rapid.IntRange(1, len(text)).Draw(t, "cut")
			if at < len(text) {
				cuts = append(cuts, at)
			}
		}
		if whole, cut := editAll(text, sse, crossOut), editAll(text, sse, crossOut, cuts...); whole != cut {
			t.Fatalf("%q at %v: %q, whole %q", text, cuts, cut, whole)
		}
		if got := editAll(text, sse, func(dst, usage []byte) []byte { return append(dst, usage...) }, cuts...); got != text {
			t.Fatalf("%q became %q", text, got)
		}
	})
}

func FuzzUsageEditor(f *testing.F) {
	f.Add([]byte(`{"usage":{"prompt_tokens":1}}`), false, 9)
	f.Add([]byte("data: {\"usage\":{\"a\":1}}\n\n"), true, 20)
	f.Add([]byte("event: a\r\ndata: {\"x\":\"\\\"usage\\\":{\",\"usage\":{\"a\":[{}]}}\r\n\r\ndata: [DONE]"), true, 31)
	f.Fuzz(func(t *testing.T, text []byte, sse bool, cut int) {
		keep := func(dst, usage []byte) []byte { return append(dst, usage...) }
		if len(text) == 0 {
			return
		}
		cut = int(uint(cut) % uint(len(text)))
		if got := editAll(string(text), sse, keep, cut); !bytes.Equal([]byte(got), text) {
			t.Fatalf("%q cut at %d became %q", text, cut, got)
		}
		if len(text) > maxUsage { // where a long object is given up depends on the pieces
			return
		}
		whole := editAll(string(text), sse, crossOut)
		if got := editAll(string(text), sse, crossOut, cut); got != whole {
			t.Fatalf("%q cut at %d became %q, want %q as in one piece", text, cut, got, whole)
		}
		if json.Valid(text) && !sse && !json.Valid([]byte(whole)) {
			t.Fatalf("%q became %q, want JSON", text, whole)
		}
	})
}

package body

import (
	"fmt"
	"strings"
	"testing"
)

// conversation returns a chat body with n messages and about size bytes of text.
func conversation(n, size int) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"demo","stream":true,"messages":[`)
	text := strings.Repeat("The quick brown fox jumps over the lazy dog. ", size/n/45+1)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"role":"%s","content":"%d: %s\n"}`, [...]string{"user", "assistant"}[i%2], i, text[:size/n])
	}
	b.WriteString(`],"max_tokens":128}`)
	return []byte(b.String())
}

func BenchmarkParse(b *testing.B) {
	for _, c := range []struct {
		name     string
		messages int
		bytes    int
	}{{"81-messages-61KB", 81, 57000}, {"1-message-1MB", 1, 1 << 20}} {
		body := conversation(c.messages, c.bytes)
		b.Run(c.name, func(b *testing.B) {
			var r Request
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := r.Parse(Chat, body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkApply(b *testing.B) {
	body := conversation(81, 57000)
	edits := []Edit{Set([]byte("1"), "max_tokens"), Delete("stream"), Set([]byte("true"), "kv_transfer_params", "do_remote_decode")}
	var out []byte
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if out, err = Apply(out[:0], body, edits...); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUsageSSE(b *testing.B) {
	chunk := []byte(`data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,` +
		`"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}` + "\n\n")
	u := NewUsageScanner(true)
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		_, _ = u.Write(chunk)
	}
}

package disagg

import (
	"context"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// BenchmarkDecodeLeg measures the work between the prefill answer and the decode leg: checking
// the answer and editing a body of 8,000 tokens.
func BenchmarkDecodeLeg(b *testing.B) {
	raw := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 8000) + `"}],"max_tokens":100,"stream":true}`)
	req, err := body.Parse(body.Chat, raw)
	if err != nil {
		b.Fatal(err)
	}
	answer := []byte(`{"id":"x","choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":8000},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[` +
		strings.Repeat("1000,", 500) + `1]],"remote_engine_id":"e","remote_host":"h","remote_port":5600}}`)
	for _, name := range []string{"nixl", "sglang"} {
		b.Run(name, func(b *testing.B) {
			p, err := New(name, Options{})
			if err != nil {
				b.Fatal(err)
			}
			x := &Exchange{Request: req, Path: "/v1/chat/completions", ID: "i", Prefill: Side{Worker: "p", Address: "10.0.0.1:80"}, Decode: Side{Worker: "d"}}
			b.ReportAllocs()
			b.SetBytes(int64(len(raw)))
			for b.Loop() {
				x.Begin(x.Prefill, Unique{Text: "u", Number: 1})
				if p.AtOnce {
					if _, err := p.Prefill(context.Background(), x); err != nil {
						b.Fatal(err)
					}
				}
				a, err := ParseAnswer(answer)
				if err != nil {
					b.Fatal(err)
				}
				leg, err := p.Decode(x, a)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := leg.Body(context.Background(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

package shape

import (
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// BenchmarkStages measures the stages of an uncached request.
func BenchmarkStages(b *testing.B) {
	raw, _ := talk(81, 57000)
	m := load(b, "qwen3", Options{})
	req, err := body.Parse(body.Chat, raw)
	if err != nil {
		b.Fatal(err)
	}
	p, _, err := m.plan(asInput(req, VLLM))
	if err != nil {
		b.Fatal(err)
	}
	rendered, err := m.render(b.Context(), nil, p)
	if err != nil {
		b.Fatal(err)
	}
	text := string(rendered)
	b.Run("parse", func(b *testing.B) {
		var r body.Request
		for b.Loop() {
			if err := r.Parse(body.Chat, raw); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("shape", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := m.vllmChat(asInput(req, VLLM)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("render", func(b *testing.B) {
		b.ReportAllocs()
		out := make([]byte, 0, len(raw))
		for b.Loop() {
			if _, err := p.template.compiled.Render(out, p.vars, jinja.Env{Now: time.Unix(0, 0)}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		var ids []uint32
		for b.Loop() {
			if ids, err = m.tok.Encode(ids[:0], text, false); err != nil {
				b.Fatal(err)
			}
		}
	})
	in := asInput(req, VLLM)
	in.turn = conv.New(64 << 20).Turn(req)
	b.Run("shape known", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := m.vllmChat(in); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("encode known", func(b *testing.B) {
		b.ReportAllocs()
		var ids []uint32
		for b.Loop() {
			if ids, err = in.turn.Encode(nil, ids, m.tok, m.space, text, false); err != nil {
				b.Fatal(err)
			}
		}
	})
}

package shape

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/conv"
)

// talk returns a conversation of n messages with about size bytes of text, and the same with one
// more exchange.
func talk(n, size int) (body, next []byte) {
	words := strings.Fields("the router sends each request to the worker whose cache already holds most of its prompt, without letting any " +
		"rank overload; 2026 was a good year for prefix caches: func main() { fmt.Println(\"hello\") } naïve café Köln 東京 and so on")
	var b strings.Builder
	b.WriteString(`{"model":"demo","messages":[{"role":"user","content":"You are a helpful assistant 00000000."}`)
	at := 0
	message := func(i int) {
		fmt.Fprintf(&b, `,{"role":"%s","content":"%d.`, [...]string{"user", "assistant"}[i%2], i)
		for start := b.Len(); b.Len()-start < size/n; at++ {
			b.WriteString(" " + strings.ReplaceAll(words[(at*7+at/13)%len(words)], `"`, `\"`))
		}
		b.WriteString(`"}`)
	}
	for i := 1; i < n; i++ {
		message(i)
	}
	first := b.String()
	message(n)
	message(n + 1)
	return []byte(first + `],"max_tokens":64}`), []byte(b.String() + `],"max_tokens":64}`)
}

var tokenizers sync.Map // by directory, loaded once

func load(tb testing.TB, name string, options Options) *Model {
	tb.Helper()
	once, _ := tokenizers.LoadOrStore(name, sync.OnceValues(func() (*bpe.Tokenizer, error) { return bpe.Load(os.DirFS("../models/" + name)) }))
	tok, err := once.(func() (*bpe.Tokenizer, error))()
	if err != nil {
		tb.Fatal(err)
	}
	m, err := New(tok, options)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

func asInput(req *body.Request, engine Engine) input {
	return input{Request: req, turn: conv.New(0).Turn(req), profile: engine.profile(), origin: req.API}
}

func BenchmarkConversation(b *testing.B) {
	raw, next := talk(81, 57000)
	b.Run("cold", func(b *testing.B) {
		m := load(b, "qwen3", Options{})
		b.SetBytes(int64(len(raw)))
		run(b, m, nil, raw)
	})
	b.Run("same again", func(b *testing.B) {
		m := load(b, "qwen3", Options{})
		run(b, m, conv.New(64<<20), raw)
	})
	b.Run("next turn", func(b *testing.B) {
		m := load(b, "qwen3", Options{})
		c := conv.New(64 << 20)
		var turn conv.Turn
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			// Each round has another conversation: digits in its system message change. Its first
			// turn is not timed.
			b.StopTimer()
			for _, turn := range [][]byte{raw, next} {
				copy(turn[bytes.Index(turn, []byte("assistant"))+len("assistant "):], fmt.Sprintf("%08d", i))
			}
			ask(b, m, c, &turn, raw)
			b.StartTimer()
			ask(b, m, c, &turn, next)
		}
	})
}

func run(b *testing.B, m *Model, c *conv.Cache, raw []byte) {
	var turn conv.Turn
	b.ReportAllocs()
	for b.Loop() {
		ask(b, m, c, &turn, raw)
	}
}

// ask parses a body and makes its ids.
func ask(b *testing.B, m *Model, c *conv.Cache, turn *conv.Turn, raw []byte) Result {
	if err := c.Parse(turn, body.Chat, raw); err != nil {
		b.Fatal(err)
	}
	res, err := m.PromptInto(b.Context(), nil, turn, VLLM)
	if err != nil {
		b.Fatal(err)
	}
	return res
}

// BenchmarkRender measures only the chat template, on an uncached conversation of 81 messages.
func BenchmarkRender(b *testing.B) {
	raw, _ := talk(81, 57000)
	for _, name := range []string{"qwen3", "deepseek_v3", "gptoss", "mistral_nemo"} {
		b.Run(name, func(b *testing.B) {
			m := load(b, name, Options{})
			req, err := body.Parse(body.Chat, raw)
			if err != nil {
				b.Fatal(err)
			}
			p, _, err := m.plan(asInput(req, VLLM))
			if err != nil {
				b.Skip(err)
			}
			var out []byte
			best := time.Duration(math.MaxInt64)
			b.ReportAllocs()
			for b.Loop() {
				start := cpu.Process()
				if out, err = m.render(b.Context(), out[:0], p); err != nil {
					b.Fatal(err)
				}
				best = min(best, cpu.Process()-start)
			}
			b.ReportMetric(float64(best.Nanoseconds())/1000, "best-cpu-µs")
		})
	}
}

// BenchmarkForwardIDs: what a chat of some 60,000 tokens costs to be sent with its ids.
func BenchmarkForwardIDs(b *testing.B) {
	m := load(b, "qwen3", Options{})
	raw, _ := talk(281, 244000)
	req, err := body.Parse(body.Chat, raw)
	if err != nil {
		b.Fatal(err)
	}
	res, err := m.Prompt(req, VLLM)
	if err != nil {
		b.Fatal(err)
	}
	out, best := []byte(nil), time.Duration(math.MaxInt64)
	for b.Loop() {
		start := cpu.Process()
		if out, err = body.Apply(out[:0], raw, m.ForwardIDs(req, VLLM, res)...); err != nil {
			b.Fatal(err)
		}
		best = min(best, cpu.Process()-start)
	}
	b.ReportMetric(float64(best.Nanoseconds())/1000, "best-cpu-µs")
	b.ReportMetric(float64(len(res.IDs)), "tokens")
	b.ReportMetric(float64(len(out)-len(raw)), "more-bytes")
}

// BenchmarkEndsSGLang: what a chat of 1 MB costs to be searched for ids.
func BenchmarkEndsSGLang(b *testing.B) {
	m := load(b, "qwen3", Options{})
	raw, _ := talk(281, 1_000_000)
	req, err := body.Parse(body.Chat, raw)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.EndsSGLang(req); err != nil {
			b.Fatal(err)
		}
	}
}

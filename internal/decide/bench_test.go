package decide

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/fleet"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
)

// newDecider is a Decider with a fresh model, so that no cache is warm from another
// benchmark, and count workers of one rank each.
func newDecider(tb testing.TB, count int) *Decider {
	tb.Helper()
	return newDeciderWith(tb, count, "")
}

// newDeciderWith is newDecider with more settings of the model.
func newDeciderWith(tb testing.TB, count int, settings string) *Decider {
	tb.Helper()
	c, err := config.Parse("bench.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {disabled: true}"+settings+"}]\nworkers: {health: {every: 0s}}\n"))
	if err != nil {
		tb.Fatal(err)
	}
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		tb.Fatal(err)
	}
	m, err := shape.Load(files, shape.Options{})
	if err != nil {
		tb.Fatal(err)
	}
	d, err := New(Options{Config: c, Models: []*fleet.Model{{Config: c.Models[0], Tokens: m}}, Metrics: observe.New("bench"), Log: zerolog.Nop()})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(d.Close)
	list := make([]workers.Worker, count)
	for i := range list {
		list[i] = workers.Worker{Ready: true, Generation: 1, Worker: config.Worker{
			Name: fmt.Sprintf("w%03d", i), Address: fmt.Sprintf("10.0.%d.%d:8000", i/250, i%250+1), Engine: "vllm", Role: "both", Ranks: 1, RankBy: "header", Speed: 1,
		}}
	}
	d.Fleet().SetWorkers(list)
	return d
}

// processTime is the CPU time that the process has used.
func processTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// sources is the text of this module's own files: prose and code.
func sources(tb testing.TB) string {
	tb.Helper()
	var b strings.Builder
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../*/*.go", "../../*/*.go", "../tokens/*/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			tb.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				tb.Fatal(err)
			}
			b.Write(text)
		}
	}
	return b.String()
}

// quote is a string of JSON.
func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\t", `\t`, "\r", `\r`).Replace(s) + `"`
}

// numberMark precedes the number that makes each prompt of a benchmark unique.
const numberMark = "No. 00000000: "

// prompts are chats of about size bytes: one half is a system prompt that all share, the
// other half is text that starts at a different offset in each.
func prompts(tb testing.TB, size, count int) [][]byte {
	text := sources(tb)
	at := func(start, n int) string {
		start %= len(text)
		for len(text) < start+n {
			text += text
		}
		return strings.ToValidUTF8(text[start:start+n], "")
	}
	out := make([][]byte, count)
	for i := range out {
		out[i] = []byte(`{"model":"demo","messages":[{"role":"system","content":` + quote(at(0, size/2)) +
			`},{"role":"user","content":` + quote(numberMark+at(size/2+i*7919, size/2)) + `}],"stream":true}`)
	}
	return out
}

// BenchmarkDecide measures whole decisions for prompts that are new, made of text that the
// tokenizer has seen.
func BenchmarkDecide(b *testing.B) {
	for _, tokens := range []int{2000, 8000, 32000, 100000} {
		b.Run(fmt.Sprint(tokens/1000, "k"), func(b *testing.B) {
			d := newDecider(b, 8)
			const round = 64
			bodies := prompts(b, tokens*38/10, round)
			decide := func(i int) {
				body := bodies[i%round]
				copy(body[bytes.Index(body, []byte(numberMark[:4]))+4:], fmt.Sprintf("%08d", i))
				r := &extproc.Request{ID: "r", Method: "POST", Path: "/v1/chat/completions", Body: body}
				decision := d.Decide(context.Background(), r)
				if decision.Ticket == nil {
					b.Fatal(decision.Reject)
				}
				decision.Ticket.ResponseHeaders(200, decision.Endpoint)
				decision.Ticket.End(time.Now())
			}
			for i := range round {
				decide(i)
			}
			b.ReportAllocs()
			b.ResetTimer()
			start := processTime()
			for i := range b.N {
				decide(round + i)
			}
			b.ReportMetric(float64((processTime()-start).Microseconds())/float64(b.N), "cpu-µs/op")
			reportStages(b, d)
		})
	}
}

// reportStages reports the median wall-clock time of each stage over the last decisions, as
// the decision log has it.
func reportStages(b *testing.B, d *Decider) {
	b.Helper()
	times := map[string][]time.Duration{}
	for _, e := range d.decisions.Last(64) {
		for _, s := range e.Stages {
			times[s.Stage] = append(times[s.Stage], s.Took)
		}
	}
	for name, took := range times {
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1000, name+"-µs")
	}
}

// conversation is an odd number of messages, the last one the user's, with about size bytes
// of text, and the same with one more exchange. Conversations of different numbers differ.
func conversation(messages, size, number int) (body, next []byte) {
	words := strings.Fields("the router sends each request to the worker whose cache already holds most of its prompt, without letting any " +
		"rank overload; 2026 was a good year for prefix caches: func main() { fmt.Println(\"hello\") } naïve café Köln 東京 and so on")
	var b strings.Builder
	fmt.Fprintf(&b, `{"model":"demo","messages":[{"role":"user","content":"You are helpful assistant %08d."}`, number)
	at := number
	message := func(i int) {
		fmt.Fprintf(&b, `,{"role":"%s","content":"%d.`, [...]string{"user", "assistant"}[i%2], i)
		for start := b.Len(); b.Len()-start < size/messages; at++ {
			b.WriteString(" " + strings.ReplaceAll(words[(at*7+at/13)%len(words)], `"`, `\"`))
		}
		b.WriteString(`"}`)
	}
	for i := 1; i < messages; i++ {
		message(i)
	}
	first := b.String()
	message(messages)
	message(messages + 1)
	return []byte(first + `],"max_tokens":64}`), []byte(b.String() + `],"max_tokens":64}`)
}

// hashesOf returns the block hashes of a body.
func hashesOf(tb testing.TB, d *Decider, body []byte) []kvindex.Hash {
	tb.Helper()
	hashes, _ := blocksOf(tb, d, body)
	return hashes
}

// blocksOf is hashesOf with the token ids.
func blocksOf(tb testing.TB, d *Decider, raw []byte) ([]kvindex.Hash, []uint32) {
	s := d.takeScratch()
	r := &extproc.Request{Method: "POST", Path: "/v1/chat/completions", Body: raw}
	j := job{d: d, s: s, r: r, entry: observe.NewEntry(r, time.Time{}), api: body.Chat}
	in, err := j.read(context.Background(), context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	t, err := j.tokens(context.Background(), context.Background(), in)
	if err != nil {
		tb.Fatal(err)
	}
	if len(t.ids) == 0 {
		return nil, nil
	}
	hasher := d.fleet.Index().Hasher()
	s.hashes = conv.AppendHashes(s.turn, s.hashes[:0], hasher.Seed("demo", "", ""), t.ids, d.cfg.Index.BlockSize, hasher.AppendHashes)
	d.keepScratch(s)
	return s.hashes, t.ids
}

// BenchmarkConversation goes from body bytes to block hashes for a conversation of 81
// messages, 61 KB. Compare processor time: on a shared machine wall-clock time is mostly
// noise.
func BenchmarkConversation(b *testing.B) {
	const messages, size, round = 81, 57000, 32
	run := func(name string, prepare func(d *Decider, number int) []byte) {
		b.Run(name, func(b *testing.B) {
			d := newDecider(b, 8)
			var used, best time.Duration
			number, done := 0, 0
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				bodies := make([][]byte, round)
				for i := range bodies {
					bodies[i] = prepare(d, number)
					number++
				}
				b.StartTimer()
				start := processTime()
				for _, body := range bodies {
					hashesOf(b, d, body)
				}
				took := processTime() - start
				used += took
				if done += round; best == 0 || took < best {
					best = took
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(used.Nanoseconds())/1000/float64(done), "cpu-µs/turn")
			b.ReportMetric(float64(best.Nanoseconds())/1000/round, "best-cpu-µs/turn")
		})
	}
	run("cold", func(_ *Decider, number int) []byte {
		body, _ := conversation(messages, size, number)
		return body
	})
	run("next", func(d *Decider, number int) []byte {
		body, next := conversation(messages, size, number)
		hashesOf(b, d, body)
		return next
	})
	run("again", func(d *Decider, number int) []byte {
		body, _ := conversation(messages, size, number%4)
		for range 2 {
			hashesOf(b, d, body)
		}
		return body
	})
}

package decide_test

import (
	"context"
	"runtime"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/decide"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// What a decision may allocate for each byte of its body, garbage included, which is more than it needs at any time.
// docs/operating.md has these bounds.
const (
	mostParsed  = 4   // without tokens, and 8 MiB
	mostOfText  = 64  // for one text
	mostOfShape = 128 // for bodies of many small objects, and 64 MiB where a template looks at all later messages at each: its own limit ends that
)

// allocated is the bytes above a fixed number that f allocates for each byte of a body.
func allocated(size int, fixed int, f func()) float64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return float64(int(after.TotalAlloc-before.TotalAlloc)-fixed) / float64(size)
}

// TestMemoryOfADecision makes the tokens of the bodies that cost most, and those of one whose deadline has passed.
func TestMemoryOfADecision(t *testing.T) {
	if decide.RaceDetector {
		t.Skip("the race detector allocates")
	}
	all, err := tokenizers()
	if err != nil {
		t.Fatal(err)
	}
	const size = 256 << 10
	ended, end := context.WithCancel(t.Context())
	end()
	takes := true
	for family, tok := range all {
		m, err := shape.New(tok, shape.Options{ToolParser: true, Multimodal: &takes})
		if err != nil {
			t.Fatal(err)
		}
		check := func(api body.API, name, fields string, most float64) {
			b := []byte(`{"model":"m",` + fields + `}`)
			for _, engine := range []shape.Engine{shape.VLLM, shape.SGLang, shape.TRTLLM} {
				turn := conv.New(0).Turn(&body.Request{})
				limits := 0
				parsed := allocated(len(b), 8<<20, func() { // lists of elements are bounded
					if err := turn.Parse(api, b); err != nil {
						t.Fatal(err)
					}
				})
				late := allocated(len(b), limits, func() { _, _ = m.PromptInto(ended, nil, turn, engine) })
				if name == "calls in turn" || name == "answers in turn" { // gpt-oss's template looks at the later ones
					limits = 64 << 20
				}
				got := allocated(len(b), limits, func() { _, _ = m.Prompt(turn.Request, engine) })
				if parsed > mostParsed || late > mostParsed || got > most {
					t.Errorf("%s/%s/%s/%s: got %.1f bytes for each of the body to parse it, %.1f after the deadline, %.1f for tokens; want at most %d, %d and %.0f",
						family, api, name, engine, parsed, late, got, mostParsed, mostParsed, most)
				}
				if most == mostOfText {
					break // engines differ in shapes only
				}
			}
		}
		for name, text := range texts {
			quoted := strings.NewReplacer("\n", `\n`, "\t", `\t`, "\r", `\r`).Replace(text(size))
			check(body.Completions, name, `"prompt":"`+quoted+`"`, mostOfText)
		}
		if family != "qwen3" && family != "gptoss" { // a chat template, and an encoder in code
			continue
		}
		for api, shapes := range requests {
			for name, fields := range shapes {
				check(api, name, fields(size), mostOfShape)
			}
		}
		for name, fields := range members {
			check(body.Chat, name, message+","+fields(size), mostOfShape)
		}
	}
}

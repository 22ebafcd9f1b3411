package decide_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/decide"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
)

// The tests of this file compare what a pass over a body costs with what it costs for four
// times the body: a linear pass takes 4 times as long, a quadratic one 16 times. Bodies are
// the worst that a client, or an engine, may send.

// maxGrowth is the highest accepted factor for four times the input: between 4 and 16, with
// room for caches that overflow.
const maxGrowth = 8

// smallBody is the smaller of the two sizes in bytes; the other is four times as large.
const smallBody = 64 << 10

// processorTime is the CPU time that this process has used.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now); err != nil {
		t.Fatal(err)
	}
	return time.Duration(now.Nano())
}

// costOf is the CPU time of one run of f, which is repeated until it can be measured.
func costOf(t *testing.T, f func()) time.Duration {
	t.Helper()
	const measurable = time.Millisecond
	for runs := 1; ; runs *= 4 {
		start := processorTime(t)
		for range runs {
			f()
		}
		if took := processorTime(t) - start; took >= measurable || runs >= 1<<12 {
			return took / time.Duration(runs)
		}
	}
}

// grows compares the cost of the pass that pass(n) returns for n bytes with that for four
// times as many. It fails only if the step from 4n to 16n grows as much too: a single jump
// is a threshold, such as a cache's size.
func grows(t *testing.T, pass func(n int) func()) {
	t.Helper()
	one, _, grown := growth(t, pass, smallBody)
	if !grown {
		return
	}
	if four, sixteen, grown := growth(t, pass, 4*smallBody); grown {
		t.Errorf("got %v, %v and %v for %d bytes, 4 and 16 times as many, want each below %d times the one before", one, four, sixteen, smallBody, maxGrowth)
	}
}

// growth is the lowest of several measurements of n bytes and of 4n; higher ones are noise
// of a busy machine.
func growth(t *testing.T, pass func(n int) func(), n int) (one, four time.Duration, grown bool) {
	t.Helper()
	const tries = 3
	small, large := pass(n), pass(4*n)
	for try := range tries {
		a, b := costOf(t, small), costOf(t, large)
		if try == 0 || a < one {
			one = a
		}
		if try == 0 || b < four {
			four = b
		}
		if four < maxGrowth*one {
			return one, four, false
		}
	}
	return one, four, true
}

// prepared is called by each test here. It turns off the garbage collector, whose CPU time
// would be counted, up to a memory limit.
func prepared(t *testing.T) {
	t.Helper()
	if decide.RaceDetector {
		t.Skip("the race detector costs more for some passes than for others")
	}
	percent := debug.SetGCPercent(-1)
	limit := debug.SetMemoryLimit(1 << 30)
	t.Cleanup(func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	})
}

// list repeats a text, with commas between, to n bytes or a little more; each %d is the number of the element.
func list(n int, element string) string {
	var b strings.Builder
	b.Grow(n + len(element) + 16)
	for i := 0; i == 0 || b.Len() < n; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		if strings.Contains(element, "%d") {
			fmt.Fprintf(&b, element, i)
		} else {
			b.WriteString(element)
		}
	}
	return b.String()
}

// fill repeats a text to n bytes.
func fill(n int, text string) string { return strings.Repeat(text, n/len(text)+1) }

// nested is n bytes of arrays and objects as deep as bodies may be.
func nested(n int) string {
	const depth = 400
	return list(n, strings.Repeat(`{"a":[`, depth/2)+strings.Repeat(`]}`, depth/2))
}

// members are objects without their braces, in which looking for keys is as expensive as
// possible.
var members = map[string]func(n int) string{
	"an equal key":       func(n int) string { return list(n, `"data_parallel_rank":1`) },
	"equal keys in turn": func(n int) string { return list(n, `"data_parallel_rank":1,"kv_transfer_params":{},"x":1`) },
	"distinct keys":      func(n int) string { return list(n, `"k%d":1`) },
	"escaped keys":       func(n int) string { return list(n, `"\u0064ata_parallel_rank":1`) },
	"equal objects":      func(n int) string { return list(n, `"kv_transfer_params":{"x":1,"prompt_token_ids":[1]}`) },
	"one object": func(n int) string {
		return `"kv_transfer_params":{` + list(n, `"prompt_token_ids":[1],"remote_host":"h"`) + `}`
	},
	"objects in an object": func(n int) string {
		return `"sampling_params":{` + list(n, `"extra_args":{"kv_transfer_params":1},"max_tokens":9`) + `}`
	},
	"a long key":         func(n int) string { return `"` + fill(n, "k") + `":1` },
	"a long escaped key": func(n int) string { return `"` + fill(n, `\u006b`) + `":1` },
	"long keys":          func(n int) string { return list(n, `"`+fill(1000, "k")+`%d":1`) },
	"a long text":        func(n int) string { return `"x":"` + fill(n, "word ") + `"` },
	"escapes":            func(n int) string { return `"user":"` + fill(n, `\n\"\u00e9`) + `"` },
	"a long number":      func(n int) string { return `"x":` + fill(n, "7") },
	"deep nesting":       func(n int) string { return `"x":[` + nested(n) + `]` },
	"conversations":      func(n int) string { return `"conversation":{` + list(n, `"id":" "`) + `}` },
	"salts":              func(n int) string { return `"cache_salt":[` + list(n, `"s"`) + `]` },
}

// readFields reads what a decision needs besides the prompt.
func readFields(r *body.Request) {
	r.ConversationID(body.ConversationFields)
	r.MaxTokens()
	r.Choices(true)
	r.CacheSalt()
	r.LoRA()
}

func TestCostOfReadingAndEditing(t *testing.T) {
	prepared(t)
	edits := []body.Edit{body.Delete("data_parallel_rank"), body.Set([]byte("3"), "routed_dp_rank"), body.Set([]byte("1"), "kv_transfer_params", "remote_host"),
		body.Delete("sampling_params", "extra_args", "kv_transfer_params")}
	var protocols []*disagg.Protocol
	for name := range config.ConnectorEngines {
		p, err := disagg.New(name, disagg.Options{Append: true, Get: func(context.Context, string, string, bool) ([]byte, error) {
			return []byte(`{"0":{"engine_id":"e"},"disaggregated_params":{"ctx_info_endpoint":"http://x"}}`), nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		protocols = append(protocols, p)
	}
	answer, err := disagg.ParseAnswer([]byte(`{"choices":[{"finish_reason":"length"}],"disaggregated_params":{"ctx_request_id":1,"disagg_request_id":1},` +
		`"kv_transfer_params":{"first_tok":5}}`))
	if err != nil {
		t.Fatal(err)
	}
	for name, more := range members {
		t.Run(name, func(t *testing.T) {
			raw := func(n int) []byte { return []byte(`{"prompt":"x",` + more(n) + `}`) }
			request := func(n int) *body.Request {
				r, err := body.Parse(body.Completions, raw(n))
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			t.Run("parse", func(t *testing.T) {
				grows(t, func(n int) func() {
					b := raw(n)
					var r body.Request
					return func() { _ = r.Parse(body.Completions, b) }
				})
			})
			t.Run("fields", func(t *testing.T) {
				grows(t, func(n int) func() {
					r := request(n)
					return func() { readFields(r) }
				})
			})
			t.Run("edit", func(t *testing.T) {
				grows(t, func(n int) func() {
					b := raw(n)
					out := make([]byte, 0, 2*len(b))
					return func() { _, _ = body.Apply(out, b, edits...) }
				})
			})
			t.Run("names", func(t *testing.T) { // of bodies that cannot be read, and of forms
				grows(t, func(n int) func() {
					b := raw(n)
					form := append([]byte("--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n"), b...)
					return func() {
						disagg.MayName(b[:len(b)-1])
						disagg.FormMayName("multipart/form-data; boundary=b", form)
					}
				})
			})
			t.Run("legs", func(t *testing.T) {
				grows(t, func(n int) func() {
					x := &disagg.Exchange{Request: request(n), Path: "/v1/completions", ID: "i", IDs: []uint32{1},
						Prefill: disagg.Side{Worker: "p", Address: "10.0.0.1:80", Settings: config.WorkerDisagg{ZMQ: "h:1", EngineID: "e"}},
						Decode:  disagg.Side{Worker: "d", Settings: config.WorkerDisagg{ReceiverHost: "h", InitPorts: []int{1}, AllocPorts: []int{2}, ZMQ: "h:1", EngineID: "e"}}}
					return func() {
						for _, p := range protocols {
							p.Refuses(x.Request, x.IDs)
							local := disagg.Leg{Edits: p.Local(x.Request)}
							var prefill disagg.Leg
							if !p.NoLeg {
								var err error
								if prefill, err = p.Prefill(context.Background(), x); err != nil {
									t.Fatal(err)
								}
							}
							decode, err := p.Decode(x, answer)
							if err != nil {
								t.Fatal(err)
							}
							for _, leg := range []disagg.Leg{local, prefill, decode} {
								if _, err := leg.Body(context.Background(), x.Request); err != nil {
									t.Fatal(err)
								}
							}
						}
					}
				})
			})
		})
	}
}

// answers are what an engine may send.
var answers = map[string]func(n int) string{
	"usage after usage": func(n int) string {
		return `{` + list(n, `"usage":{"prompt_tokens":7,"prompt_tokens_details":{}}`) + `}`
	},
	"usage with much":      func(n int) string { return `{"usage":{` + list(n, `"prompt_tokens":7`) + `}}` },
	"usage with deep":      func(n int) string { return `{"usage":{"x":[` + nested(n) + `]}}` },
	"usage without end":    func(n int) string { return `{"usage":{"x":"` + fill(n, "y") },
	"many answers":         func(n int) string { return `[` + list(n, `{"meta_info":{"cached_tokens":1,"prompt_tokens":3}}`) + `]` },
	"brackets":             func(n int) string { return fill(n, `{"usage":{[`) },
	"text":                 func(n int) string { return `{"text":"` + fill(n, `\"usage\":{`) + `"}` },
	"long keys":            func(n int) string { return `{"` + fill(n, "usage") + `":1}` },
	"parameters":           func(n int) string { return `{` + list(n, `"kv_transfer_params":{"x":1,"first_tok":5}`) + `}` },
	"choices":              func(n int) string { return `{"choices":[` + list(n, `{"finish_reason":"length"}`) + `]}` },
	"events":               func(n int) string { return fill(n, "data: {\"usage\":{\"prompt_tokens\":7}}\n\n") },
	"an event of usages":   func(n int) string { return "data: {" + list(n, `"usage":{}`) + "}\n\n" },
	"an event":             func(n int) string { return fill(n, "data: {\"usage\":{\"a\":1},\ndata: ") },
	"lines":                func(n int) string { return fill(n, "\r\n") },
	"line of another kind": func(n int) string { return "event: " + fill(n, "data:") },
}

func TestCostOfAnswers(t *testing.T) {
	prepared(t)
	usage := disagg.Usage{Prompt: 9, Cached: 3}
	for name, text := range answers {
		t.Run(name, func(t *testing.T) {
			for _, piece := range []int{16, 4 << 20} {
				for _, sse := range []bool{false, true} {
					t.Run(fmt.Sprintf("usage/%d/%v", piece, sse), func(t *testing.T) {
						grows(t, func(n int) func() {
							b := []byte(text(n))
							return func() {
								s, e := body.NewUsageScanner(sse), body.NewUsageEditor(sse, usage.Edit)
								for rest := b; len(rest) > 0; {
									part := rest[:min(piece, len(rest))]
									rest = rest[len(part):]
									_, _ = s.Write(part)
									e.Edit(part, len(rest) == 0)
								}
							}
						})
					})
				}
			}
			t.Run("usage object", func(t *testing.T) {
				grows(t, func(n int) func() {
					b := []byte(`{"prompt_tokens":1,"x":` + text(n) + `,"total_tokens":4}`)
					return func() { usage.Edit(nil, b) }
				})
			})
			t.Run("decode", func(t *testing.T) {
				grows(t, func(n int) func() {
					b := []byte(text(n))
					var legs []*disagg.Protocol
					for _, name := range []string{"nixl", "trtllm", "lmcache", "moriio"} {
						p, err := disagg.New(name, disagg.Options{})
						if err != nil {
							t.Fatal(err)
						}
						legs = append(legs, p)
					}
					r, err := body.Parse(body.Completions, []byte(`{"prompt":"x"}`))
					if err != nil {
						t.Fatal(err)
					}
					x := &disagg.Exchange{Request: r}
					return func() {
						a, err := disagg.ParseAnswer(b)
						for _, p := range legs {
							if err == nil {
								_, _ = p.Decode(x, a)
							}
						}
					}
				})
			})
		})
	}
}

// texts are the strings that cost a tokenizer most.
var texts = map[string]func(n int) string{
	"one letter":    func(n int) string { return fill(n, "a") },
	"one word":      func(n int) string { return fill(n, "abcdefghijklmnopqrstuvwxyzthequickbrownfox") },
	"blanks":        func(n int) string { return fill(n, " ") },
	"line ends":     func(n int) string { return fill(n, "\n") },
	"white space":   func(n int) string { return fill(n, " \n\t\r") },
	"digits":        func(n int) string { return fill(n, "1234567890") },
	"signs":         func(n int) string { return fill(n, "!?=-") },
	"one sign":      func(n int) string { return fill(n, "=") },
	"apostrophes":   func(n int) string { return fill(n, "'s") },
	"characters":    func(n int) string { return fill(n, "\u6771\u4eac") },
	"marks":         func(n int) string { return "a" + fill(n, "\u0301\u0323\u0315") },
	"one mark":      func(n int) string { return "a" + fill(n, "\u0301") },
	"hangul":        func(n int) string { return fill(n, "\u1112\u1161\u11ab") },
	"middle dots":   func(n int) string { return fill(n, "\u30a2\u30fb") },
	"faces":         func(n int) string { return fill(n, "\U0001F469\u200D") },
	"special":       func(n int) string { return fill(n, "<|im_end|><s></s>[INST]") },
	"nearly so":     func(n int) string { return fill(n, "<|im_en") },
	"brackets":      func(n int) string { return fill(n, "<") },
	"capitals":      func(n int) string { return fill(n, "aBcD") },
	"words":         func(n int) string { return fill(n, "the quick brown fox ") },
	"words by sign": func(n int) string { return fill(n, "\u2581") },
}

// tokenizers are those embedded in the binary, and Unigram models, loaded once.
var tokenizers = sync.OnceValues(func() (map[string]*bpe.Tokenizer, error) {
	out := map[string]*bpe.Tokenizer{}
	for _, name := range []string{"qwen3", "gptoss", "deepseek_v3", "mistral_7b", "mistral_nemo"} {
		files, err := models.Open("../tokens/models/" + name)
		if err != nil {
			return nil, err
		}
		if out[name], err = bpe.Load(files); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"unigram", "unigram_bytes", "spm_unigram"} {
		var err error
		if out[name], err = bpe.Load(os.DirFS("../tokens/bpe/testdata/foreign/" + name)); err != nil {
			return nil, err
		}
	}
	return out, nil
})

func TestCostOfTokenizing(t *testing.T) {
	prepared(t)
	all, err := tokenizers()
	if err != nil {
		t.Fatal(err)
	}
	for family, tok := range all {
		for name, text := range texts {
			t.Run(family+"/"+name, func(t *testing.T) {
				grows(t, func(n int) func() {
					s := text(n)
					ids := make([]uint32, 0, len(s)+1)
					return func() {
						if _, err := tok.Encode(ids, s, true); err != nil {
							t.Fatal(err)
						}
					}
				})
			})
		}
	}
}

// requests are bodies with much of one thing, by API.
var requests = map[body.API]map[string]func(n int) string{
	body.Chat: {
		"messages": func(n int) string {
			return messages(list(n, `{"role":"user","content":"x"},{"role":"assistant","content":"y"}`))
		},
		"systems":      func(n int) string { return messages(list(n, `{"role":"system","content":"x"}`)) },
		"developers":   func(n int) string { return messages(list(n, `{"role":"developer","content":"x","tools":[]}`)) },
		"tool answers": func(n int) string { return messages(list(n, `{"role":"tool","content":"x","tool_call_id":"%d"}`)) },
		"calls": func(n int) string {
			return messages(`{"role":"user","content":"x"},{"role":"assistant","content":"","tool_calls":[` +
				list(n, `{"id":"%d","type":"function","function":{"name":"f","arguments":"{}"}}`) + `]},{"role":"user","content":"x"}`)
		},
		"calls in turn": func(n int) string {
			return messages(list(n, `{"role":"assistant","content":"","tool_calls":[{"id":"%d","type":"function","function":{"name":"f","arguments":"{}"}}]}`) +
				`,{"role":"user","content":"x"}`)
		},
		"arguments": func(n int) string {
			return messages(calling(`{` + list(n, `\"k%d\":1`) + `}`))
		},
		"arguments of lists":   func(n int) string { return messages(calling(`{\"a\":[` + list(n, `[[1],\"b\"]`) + `]}`)) },
		"nested arguments":     func(n int) string { return messages(calling(`{\"a\":` + fill(n/2, `[`) + fill(n/2, `]`) + `}`)) },
		"an argument":          func(n int) string { return messages(calling(`{\"a\":\"` + fill(n, `word `) + `\"}`)) },
		"arguments of escapes": func(n int) string { return messages(calling(`{\"a\":\"` + fill(n, `\\u00e9\u005cn`) + `\"}`)) },
		"parts": func(n int) string {
			return messages(`{"role":"user","content":[` + list(n, `{"type":"text","text":"x"}`) + `]}`)
		},
		"empty parts": func(n int) string {
			return messages(`{"role":"user","content":[` + list(n, `{"type":"text","text":""}`) + `]}`)
		},
		"images": func(n int) string {
			return messages(`{"role":"user","content":[` + list(n, `{"type":"image_url","image_url":{"url":"data:"}}`) + `]}`)
		},
		"equal keys": func(n int) string { return messages(`{"role":"user",` + list(n, `"content":"x"`) + `}`) },
		"other keys": func(n int) string { return messages(`{"role":"user","content":"x",` + list(n, `"k%d":1`) + `}`) },
		"escapes": func(n int) string {
			return messages(`{"role":"user","content":"` + fill(n, `\n\"\u00e9\ud83d\ude42`) + `"}`)
		},
		"thought": func(n int) string {
			return messages(`{"role":"assistant","content":"` + fill(n, `</think><think>`) + `"},{"role":"user","content":"x"}`)
		},
		"one letter": func(n int) string { return messages(`{"role":"user","content":"` + fill(n, `a`) + `"}`) },
		"tools": func(n int) string {
			return messages(`{"role":"user","content":"x"}`) + `,"tools":[` + list(n, `{"type":"function","function":{"name":"f%d"}}`) + `]`
		},
		"equal tools and messages": func(n int) string {
			return messages(list(n/2, `{"role":"user","content":"x"}`)) + `,"tools":[` + list(n/2, `{"type":"function","function":{"name":"f"}}`) + `]`
		},
		"chosen tool": func(n int) string {
			return messages(`{"role":"user","content":"x"}`) + `,"tool_choice":{"type":"function","function":{"name":"f"}},"tools":[` +
				list(n, `{"type":"function","function":{"name":"f"}}`) + `]`
		},
		"required": func(n int) string {
			return tool(`"type":"object","required":[` + list(n, `"k%d"`) + `]`)
		},
		"properties": func(n int) string {
			return tool(`"type":"object","properties":{` + list(n, `"k%d":{"type":"string"}`) + `},"required":[` + list(n/4, `"k%d"`) + `]`)
		},
		"types":   func(n int) string { return tool(`"type":["object",` + list(n, `"int(%d)"`) + `]`) },
		"schemas": func(n int) string { return tool(`"type":"object","anyOf":[` + list(n, `{"type":"str"}`) + `]`) },
		"deep": func(n int) string {
			return tool(`"type":"object","allOf":[` + list(n, fill(2000, `{"items":`)+`{}`+fill(2000, `}        `)) + `]`)
		},
		"keywords": func(n int) string { return message + `,"chat_template_kwargs":{` + list(n, `"k%d":1`) + `}` },
		"equal keywords": func(n int) string {
			return message + `,"chat_template_kwargs":{` + list(n, `"enable_thinking":false`) + `}`
		},
		"documents": func(n int) string { return message + `,"documents":[` + list(n, `{"title":"t","text":"x"}`) + `]` },
		"fields":    func(n int) string { return message + `,` + list(n, `"k%d":1`) },
		"continued": func(n int) string {
			return messages(`{"role":"user","content":"x"},{"role":"assistant","content":[`+list(n, `{"type":"text","text":"aaaaaaaa"}`)+`]}`) +
				`,"continue_final_message":true,"add_generation_prompt":false`
		},
	},
	body.Responses: {
		"answers in turn": func(n int) string {
			return items(n, `{"role":"assistant","content":"a text of some length, for it grows"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}`)
		},
		"parts in turn": func(n int) string {
			return items(n, `{"role":"assistant","content":[{"type":"output_text","text":"x"}]},{"type":"reasoning","summary":[{"type":"summary_text","text":"a thought of some length"}]}`)
		},
		"items": func(n int) string { return `"input":[` + list(n, `{"role":"user","content":"x"}`) + `]` },
		"calls": func(n int) string {
			return items(n, `{"type":"function_call","call_id":"%d","name":"f","arguments":"{}"}`)
		},
		"outputs": func(n int) string { return items(n, `{"type":"function_call_output","call_id":"c","output":"x"}`) },
		"thoughts": func(n int) string {
			return items(n, `{"type":"reasoning","id":"r","summary":[{"type":"summary_text","text":"x"}]}`)
		},
		"answers": func(n int) string { return items(n, `{"role":"assistant","content":"x"}`) },
		"parts": func(n int) string {
			return `"input":[{"role":"user","content":[` + list(n, `{"type":"input_text","text":"x"}`) + `]}]`
		},
		"tools": func(n int) string {
			return `"input":"x","tools":[` + list(n, `{"type":"function","name":"f%d","parameters":{}}`) + `]`
		},
	},
	body.Messages: {
		"messages": func(n int) string {
			return turns(list(n, `{"role":"user","content":"x"},{"role":"assistant","content":"y"}`))
		},
		"systems": func(n int) string {
			return turns(list(n, `{"role":"system","content":"a text of some length, for it grows"},{"role":"user","content":"x"}`))
		},
		"system": func(n int) string {
			return turns(`{"role":"user","content":"x"}`) + `,"system":[` + list(n, `{"type":"text","text":"x"}`) + `]`
		},
		"parts": func(n int) string {
			return turns(`{"role":"user","content":[` + list(n, `{"type":"text","text":"x"}`) + `]}`)
		},
		"uses": func(n int) string {
			return turns(`{"role":"assistant","content":[` + list(n, `{"type":"tool_use","id":"%d","name":"f","input":{}}`) + `]}`)
		},
		"results": func(n int) string {
			return turns(`{"role":"user","content":[` + list(n, `{"type":"tool_result","tool_use_id":"%d","content":"x"}`) + `]}`)
		},
		"result": func(n int) string {
			return turns(`{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[` + list(n, `{"type":"text","text":"x"}`) + `]}]}`)
		},
		"images": func(n int) string {
			return turns(`{"role":"user","content":[` + list(n, `{"type":"image","source":{"type":"url","url":"data:"}}`) + `]}`)
		},
		"thoughts": func(n int) string {
			return turns(`{"role":"assistant","content":[` + list(n, `{"type":"thinking","thinking":"x","signature":"s"}`) + `]}`)
		},
		"tools": func(n int) string {
			return turns(`{"role":"user","content":"x"}`) + `,"tools":[` + list(n, `{"name":"f%d","input_schema":{"type":"object"}}`) + `]`
		},
	},
	body.Completions: {
		"prompts": func(n int) string { return `"prompt":[` + list(n, `"x"`) + `]` },
		"ids":     func(n int) string { return `"prompt":[` + list(n, `%d`) + `]` },
		"lists":   func(n int) string { return `"prompt":[` + list(n, `[1]`) + `]` },
		"mixed":   func(n int) string { return `"prompt":[` + list(n, `1,"x",[1]`) + `]` },
		"escapes": func(n int) string { return `"prompt":"` + fill(n, `\n\"\u00e9`) + `"` },
	},
}

func messages(list string) string { return `"messages":[` + list + `]` }

// calling are messages with a call of a tool.
func calling(arguments string) string {
	return `{"role":"user","content":"x"},{"role":"assistant","content":"","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"` +
		arguments + `"}}]},{"role":"user","content":"x"}`
}

func turns(list string) string { return `"max_tokens":9,` + messages(list) }

func items(n int, item string) string {
	return `"input":[{"role":"user","content":"x"},` + list(n, item) + `]`
}

const message = `"messages":[{"role":"user","content":"x"}]`

func tool(schema string) string {
	return message + `,"tools":[{"type":"function","function":{"name":"f","parameters":{` + schema + `}}}]`
}

// qwen3 is a model that takes everything that bodies may have.
func qwen3(t *testing.T) *shape.Model {
	t.Helper()
	all, err := tokenizers()
	if err != nil {
		t.Fatal(err)
	}
	takes := true
	m, err := shape.New(all["qwen3"], shape.Options{ToolParser: true, Multimodal: &takes})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestCostOfPrompts(t *testing.T) {
	prepared(t)
	m := qwen3(t)
	for api, shapes := range requests {
		for name, fields := range shapes {
			for _, engine := range []shape.Engine{shape.VLLM, shape.SGLang, shape.TRTLLM} {
				t.Run(strings.Join([]string{api.String(), name, engine.String()}, "/"), func(t *testing.T) {
					grows(t, func(n int) func() {
						r, err := body.Parse(api, []byte(`{"model":"m",`+fields(n)+`}`))
						if err != nil {
							t.Fatal(err)
						}
						return func() { _, _ = m.Prompt(r, engine) } // a refusal has a cost too
					})
				})
			}
		}
	}
}

// responses are the items of a response whose messages the model's own encoder reads, as gpt-oss's.
var responses = map[string]func(n int) string{
	"said": func(n int) string {
		return items(n, `{"type":"message","role":"assistant","content":[{"type":"output_text","text":"x"},{"type":"refusal","refusal":"y"}]}`)
	},
	"output parts": func(n int) string {
		return items(1, `{"role":"assistant","type":"message","content":[`+list(n, `{"type":"output_text","text":"a text of some length"}`)+`]}`)
	},
	"reasoning": func(n int) string {
		return items(n, `{"type":"reasoning","id":"r","summary":[],"content":[{"type":"reasoning_text","text":"x"}]}`)
	},
	"reasoning parts": func(n int) string {
		return items(1, `{"type":"reasoning","id":"r","summary":[`+list(n/2, `{"type":"summary_text","text":"x"}`)+`],"content":[`+list(n/2, `{"type":"reasoning_text","text":"x"}`)+`]}`)
	},
	"calls and outputs": func(n int) string {
		return `"input":[{"role":"user","content":"x"},` + list(n/2, `{"type":"function_call","call_id":"%d","name":"f","arguments":"{}"}`) + `,` +
			list(n/2, `{"type":"function_call_output","call_id":"0","output":"x"}`) + `]`
	},
	"calls of one id": func(n int) string {
		return items(n, `{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"x"}`)
	},
	"equal keys": func(n int) string { return items(1, `{"role":"user","content":"x",`+list(n, `"content":"y"`)+`}`) },
	"keys":       func(n int) string { return items(1, `{"role":"user","content":"x",`+list(n, `"k%d":"y"`)+`}`) },
	"named tool": func(n int) string {
		return `"input":"x","tools":[` + list(n, `{"type":"function","name":"f%d","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}`) +
			`],"tool_choice":{"type":"function","name":"f0"}`
	},
	"systems": func(n int) string { return `"input":[` + list(n, `{"role":"system","content":"x"}`) + `]` },
	"instructed": func(n int) string {
		return `"instructions":"` + fill(n/2, "sea ") + `","input":[` + list(n/2, `{"role":"developer","content":[{"type":"input_text","text":"x"}]}`) + `]`
	},
}

// encodedModel is a model whose chats are encoded in code.
func encodedModel(t *testing.T, folder, kind, architecture string) *shape.Model {
	t.Helper()
	files := fstest.MapFS{"config.json": {Data: fmt.Appendf(nil, `{"model_type":%q,"architectures":[%q]}`, kind, architecture)}}
	for _, name := range []string{"tokenizer.json.gz", "tokenizer_config.json"} {
		b, err := os.ReadFile("../tokens/models/" + folder + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: b}
	}
	m, err := shape.Load(files, shape.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestCostOfEncodedChats is TestCostOfPrompts for chats of models without a chat template.
func TestCostOfEncodedChats(t *testing.T) {
	prepared(t)
	for _, c := range [][3]string{{"gptoss", "gpt_oss", "GptOssForCausalLM"}, {"deepseek_v3", "deepseek_v32", "DeepseekV32ForCausalLM"}, {"deepseek_v3", "deepseek_v4", "DeepseekV4ForCausalLM"}} {
		m, made := encodedModel(t, c[0], c[1], c[2]), 0
		for name, fields := range requests[body.Chat] {
			t.Run(c[1]+"/"+name, func(t *testing.T) {
				grows(t, func(n int) func() {
					r, err := body.Parse(body.Chat, []byte(`{"model":"m",`+fields(n)+`}`))
					if err != nil {
						t.Fatal(err)
					}
					if _, err := m.Prompt(r, shape.VLLM); err == nil {
						made++
					}
					return func() { _, _ = m.Prompt(r, shape.VLLM) }
				})
			})
		}
		if made == 0 {
			t.Errorf("%s: got no prompt", c[1])
		}
	}
}

// TestCostOfEncodedResponses is TestCostOfPrompts for responses of a model without a chat template.
func TestCostOfEncodedResponses(t *testing.T) {
	prepared(t)
	m := encodedModel(t, "gptoss", "gpt_oss", "GptOssForCausalLM")
	shapes := maps.Clone(requests[body.Responses])
	maps.Copy(shapes, responses)
	for name, fields := range shapes {
		t.Run(name, func(t *testing.T) {
			grows(t, func(n int) func() {
				r, err := body.Parse(body.Responses, []byte(`{"model":"gpt-oss",`+fields(n)+`}`))
				if err != nil {
					t.Fatal(err)
				}
				if res, err := m.Prompt(r, shape.VLLM); err == nil && res.Assumed != "" {
					t.Fatalf("got a prompt that assumes %s, want the encoder's", res.Assumed)
				}
				return func() { _, _ = m.Prompt(r, shape.VLLM) }
			})
		})
	}
}

// TestCostOfTemplates renders conversations of many messages with the chat templates of
// real models.
func TestCostOfTemplates(t *testing.T) {
	prepared(t)
	files, err := filepath.Glob("../tokens/jinja/testdata/templates/*.jinja")
	if err != nil || len(files) == 0 {
		t.Fatalf("got %d templates (%v), want some", len(files), err)
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		template, err := jinja.Compile(string(source))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"messages", "calls", "calls in turn", "tool answers", "tools", "properties", "documents", "thought", "equal tools and messages"} {
			t.Run(filepath.Base(file)+"/"+name, func(t *testing.T) {
				grows(t, func(n int) func() {
					body := []byte(`{` + requests[body.Chat][name](n) + `}`)
					v, err := jinja.ParseJSON(body)
					if err != nil {
						t.Fatal(err)
					}
					vars, _ := v.AsDict()
					vars.Set("add_generation_prompt", jinja.Bool(true))
					vars.Set("bos_token", jinja.String("<s>"))
					vars.Set("eos_token", jinja.String("</s>"))
					env := jinja.RequestEnv(len(body))
					env.Now = time.Unix(0, 0)
					var out []byte
					return func() {
						out, _ = template.Render(out[:0], vars, env)
					}
				})
			})
		}
	}
}

// decider is one that knows a worker of an engine, with more lines of configuration.
func decider(t *testing.T, m *shape.Model, engine, more string) *decide.Decider {
	t.Helper()
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", hand_ids: true, check: {disabled: true}}]\n"+
		"tenants: {salt_header: x-tenant, required: false}\n"+more))
	if err != nil {
		t.Fatal(err)
	}
	d, err := decide.New(decide.Options{Config: c, Models: []*fleet.Model{{Config: c.Models[0], Tokens: m}}, Metrics: observe.New("test"), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	d.Fleet().SetWorkers([]workers.Worker{{Ready: true, Generation: 1, Worker: config.Worker{
		Name: "w", Address: "10.0.0.1:8000", Engine: engine, Role: "both", Ranks: 2, RankBy: "header", Speed: 1, Models: []string{"demo"},
	}}})
	return d
}

// TestCostOfDecisions decides whole requests, none of which the caches have seen, for engines with and without a connector:
// whatever a decision does with a body is in it.
func TestCostOfDecisions(t *testing.T) {
	prepared(t)
	m := qwen3(t)
	paths := map[body.API]string{body.Chat: "/v1/chat/completions", body.Completions: "/v1/completions", body.Responses: "/v1/responses", body.Messages: "/v1/messages"}
	const number = "00000000"
	for engine, connector := range map[string]string{"vllm": "connector: p2p-nccl", "sglang": "", "trtllm": ""} {
		d := decider(t, m, engine, "limits: {decision_timeout: 0s}\ndisagg: {"+connector+"}\n")
		made, routed := 0, 0
		check := func(name, path string, fields func(n int) string) {
			t.Run(engine+path+"/"+name, func(t *testing.T) {
				grows(t, func(n int) func() {
					text := `{"model":"demo","user":"` + number + `",` + strings.Replace(fields(n), `"x"`, `"x`+number+`"`, 1) + `}`
					return func() {
						made++
						r := &extproc.Request{ID: "r", Method: "POST", Path: path, Headers: []extproc.Header{{Name: "x-tenant", Value: "a"}},
							Body: []byte(strings.ReplaceAll(text, number, fmt.Sprintf("%08d", made)))}
						if got := d.Decide(t.Context(), r); got.Ticket != nil {
							routed++
							got.Ticket.ResponseHeaders(200, got.Endpoint)
							got.Ticket.End(time.Now())
						}
					}
				})
			})
		}
		for name, more := range members {
			for path, prompt := range map[string]string{"/v1/completions": `"prompt":"x",`, "/v1/chat/completions": message + ",", "/generate": `"text":"x",`, "/invocations": `"prompt":"x",`} {
				check(name, path, func(n int) string { return prompt + more(n) })
			}
		}
		for api, shapes := range requests {
			for name, fields := range shapes {
				check(name, paths[api], fields)
			}
		}
		if routed < made/2 {
			t.Errorf("%s: got %d of %d requests routed, want most", engine, routed, made)
		}
	}
}

// TestCostOfLargeBodies compares bodies of 16 MiB, half of limits.max_body by default, with those of 4 MiB: what is linear while
// it fits into buffers and caches need not be beyond them. It takes one shape of each kind, for a few seconds of a processor.
func TestCostOfLargeBodies(t *testing.T) {
	prepared(t)
	debug.SetMemoryLimit(4 << 30)
	const quarter = 4 << 20
	if limit := config.Default().Limits.MaxBody; limit != 8*quarter {
		t.Fatalf("got a limit of %d bytes, want twice as many as the larger bodies have", limit)
	}
	check := func(name string, pass func(n int) func()) {
		t.Run(name, func(t *testing.T) {
			defer runtime.GC()
			if some, all, grown := growth(t, pass, quarter); grown {
				t.Errorf("got %v and %v of a processor for 4 and 16 MiB, want a factor below %d", some, all, maxGrowth)
			}
		})
	}
	edits := []body.Edit{body.Delete("data_parallel_rank"), body.Set([]byte("3"), "routed_dp_rank"), body.Set([]byte("1"), "kv_transfer_params", "remote_host")}
	nixl, err := disagg.New("nixl", disagg.Options{})
	if err != nil {
		t.Fatal(err)
	}
	out := make([]byte, 0, 5*quarter)
	for _, name := range []string{"an equal key", "distinct keys", "a long escaped key", "long keys", "a long text", "a long number", "escapes", "deep nesting"} {
		check("body/"+name, func(n int) func() {
			b := []byte(`{"prompt":"x",` + members[name](n) + `}`)
			x := &disagg.Exchange{Path: "/v1/completions", ID: "i", Prefill: disagg.Side{Worker: "p", Address: "10.0.0.1:80"}, Decode: disagg.Side{Worker: "d"}}
			var r body.Request
			return func() {
				if err := r.Parse(body.Completions, b); err != nil {
					t.Fatal(err)
				}
				readFields(&r)
				_, _ = body.Apply(out, b, edits...)
				x.Request = &r
				leg, err := nixl.Prefill(t.Context(), x)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := leg.Body(t.Context(), &r); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
	usage := disagg.Usage{Prompt: 9, Cached: 3}
	for _, name := range []string{"usage with much", "choices", "text", "long keys", "lines", "usage without end"} {
		check("usage/"+name, func(n int) func() {
			b := []byte(answers[name](n))
			return func() {
				s, e := body.NewUsageScanner(false), body.NewUsageEditor(false, usage.Edit)
				for rest := b; len(rest) > 0; {
					part := rest[:min(16<<10, len(rest))]
					rest = rest[len(part):]
					_, _ = s.Write(part)
					e.Edit(part, len(rest) == 0)
				}
			}
		})
	}
	m := qwen3(t)
	for _, name := range []string{"messages", "tools", "equal keys", "escapes", "deep"} {
		check("prompt/"+name, func(n int) func() {
			r, err := body.Parse(body.Chat, []byte(`{"model":"m",`+requests[body.Chat][name](n)+`}`))
			if err != nil {
				t.Fatal(err)
			}
			return func() { _, _ = m.Prompt(r, shape.VLLM) } // a refusal has a cost too
		})
	}
	all, err := tokenizers()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"words", "one mark"} {
		check("tokens/"+name, func(n int) func() {
			s, ids := texts[name](n), make([]uint32, 0, n+1)
			return func() {
				if _, err := all["qwen3"].Encode(ids, s, true); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestLargeArgumentsEndWithTheDeadline decides requests of 16 MB of arguments of tool calls: beyond the deadline a decision costs
// no more than some passes over the body, whose own cost is known from checking it.
func TestLargeArgumentsEndWithTheDeadline(t *testing.T) {
	prepared(t)
	const size, deadline, passes = 16 << 20, 100 * time.Millisecond, 12
	d := decider(t, qwen3(t), "vllm", fmt.Sprintf("limits: {decision_timeout: %s}\ndisagg: {connector: p2p-nccl}\n", deadline))
	for name, fields := range requests[body.Chat] {
		if !strings.Contains(name, "argument") {
			continue
		}
		t.Run(name, func(t *testing.T) {
			text := []byte(`{"model":"demo",` + fields(size) + `}`)
			var took, limit time.Duration
			for try := range 3 {
				start := processorTime(t)
				if err := body.Valid(text); err != nil {
					t.Fatal(err)
				}
				checked := processorTime(t)
				r := &extproc.Request{ID: "r", Method: "POST", Path: "/v1/chat/completions", Headers: []extproc.Header{{Name: "x-tenant", Value: fmt.Sprint(try)}}, Body: text}
				got := d.Decide(t.Context(), r)
				took, limit = processorTime(t)-checked, deadline+passes*(checked-start)
				if got.Ticket == nil {
					t.Fatalf("got no target: %s", got.Reject.Body)
				}
				got.Ticket.End(time.Now())
				t.Logf("decided in %v, checked in %v", took, checked-start)
				if took <= limit {
					return
				}
			}
			t.Errorf("got %v of a processor, want at most %v: the deadline and %d times the cost of checking the body", took, limit, passes)
		})
	}
}

package encoders

import (
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

func parsed(t *testing.T, text string) jinja.Value {
	t.Helper()
	v, err := jinja.ParseJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// stopping returns a chat whose Stop is closed.
func stopping() *Chat {
	stop := make(chan struct{})
	close(stop)
	return &Chat{Args: new(jinja.Dict), Limit: 1 << 20, Stop: stop}
}

// TestAStopEndsTheEncoding: each loop of the encoders over what a client sends ends with
// ErrStopped, and goes on without a stop.
func TestAStopEndsTheEncoding(t *testing.T) {
	t.Parallel()
	const call = `{"id": "a", "function": {"name": "f", "arguments": {}}}`
	user := parsed(t, `{"role": "user", "content": "x", "flat": "x", "texts": ["x"], "refused": null}`)
	tools := []jinja.Value{parsed(t, `{"function": {"name": "f"}}`)}
	encode := func(e Encoder) func(*Chat) ([]byte, error) {
		return func(c *Chat) ([]byte, error) {
			for range 100 {
				c.Messages = append(c.Messages, user)
			}
			return e.Append(nil, c)
		}
	}
	write := func(do func(w *harmonyWriter)) func(*Chat) ([]byte, error) {
		return func(c *Chat) ([]byte, error) {
			w := &harmonyWriter{harmony: new(harmony), writer: newWriter(nil, c)}
			do(w)
			return w.dst, w.err
		}
	}
	for name, run := range map[string]func(*Chat) ([]byte, error){
		"harmony": encode(new(harmony)),
		"mistral": encode(&mistral{version: 13}),
		"mistral, joining": func(c *Chat) ([]byte, error) {
			w := &mistralWriter{mistral: &mistral{version: 13}, writer: newWriter(nil, c)}
			out := w.joined(&mistralMessage{contents: [][]mistralChunk{{{chunkText, "x"}, {chunkText, "y"}}}}, "")
			return make([]byte, len(out)), w.err
		},
		"deepseek_v32": encode(deepseekV32{}),
		"deepseek_v4":  encode(deepseekV4{}),
		"inkling":      encode(inkling{}),
		"calls":        func(c *Chat) ([]byte, error) { return appendDSMLCalls(nil, c, "calls", []jinja.Value{parsed(t, call)}) },
		"tools":        func(c *Chat) ([]byte, error) { return appendDSMLTools(nil, c, "%s", tools) },
		"v4, writing": func(c *Chat) ([]byte, error) {
			w := &v4Writer{chat: c}
			err := w.message([]v4Message{{role: "user", parts: []v4Part{{text: "x"}}}}, 0)
			return w.dst, err
		},
		"v4, merging": func(c *Chat) ([]byte, error) {
			out, err := v4Merged(c, []jinja.Value{user}, false)
			return make([]byte, len(out)), err
		},
		"harmony, parsing": func(c *Chat) ([]byte, error) {
			out, err := harmonyMessages(c, []jinja.Value{user})
			return make([]byte, len(out)), err
		},
		"harmony, writing": write(func(w *harmonyWriter) { w.write(&harmonyMessage{author: "user", texts: []string{"x"}}) }),
		"harmony's tools":  write(func(w *harmonyWriter) { w.developer(nil, tools) }),
	} {
		if out, err := run(stopping()); !errors.Is(err, ErrStopped) || len(out) > 100 {
			t.Errorf("%s: got %d bytes, %v, want ErrStopped and at most 100 bytes", name, len(out), err)
		}
		wanted := stopping()
		wanted.Stop = make(chan struct{})
		if out, err := run(wanted); err != nil || len(out) == 0 {
			t.Errorf("%s, not stopped: got %d bytes, %v, want a prompt", name, len(out), err)
		}
	}
}

// TestTextsOfMistralAreJoinedOnce: the memory for many parts and many neighbours of one role grows
// with their number, not with its square.
func TestTextsOfMistralAreJoinedOnce(t *testing.T) {
	const n = 1 << 14
	parts := func(role string) string {
		return `{"role": "` + role + `", "content": [` + strings.Repeat(`{"type": "text", "text": "x"}, `, n-1) + `{"type": "text", "text": "y"}]}`
	}
	neighbours := func(role string) string { return strings.Repeat(`{"role": "`+role+`", "content": "x"}, `, n) }
	const user = `{"role": "user", "content": "x"}`
	for name, messages := range map[string]string{
		"parts of a user": parts("user"), "parts of an assistant": user + "," + parts("assistant") + "," + user, "parts of a system": parts("system") + "," + user,
		"users": neighbours("user") + user, "assistants": user + "," + neighbours("assistant") + user,
	} {
		v := parsed(t, "["+messages+"]")
		for _, version := range []int{1, 3, 13, 15} {
			c := &Chat{Args: new(jinja.Dict), Limit: 1 << 20}
			c.Messages, _ = v.AsList()
			m := &mistral{version: version, settings: new(bpe.MistralSettings)}
			var out []byte
			var err error
			if got := allocated(func() { out, err = m.Append(nil, c) }); err != nil || len(out) < n || got > 1024*n {
				t.Errorf("%s, version %d: got %d bytes, %v, %d bytes allocated, want at least %d and at most %d", name, version, len(out), err, got, n, 1024*n)
			}
		}
	}
}

// TestToolMessagesCostTheSameInARow: the results of many calls of one message cost no more than
// those of as many messages with one call.
func TestToolMessagesCostTheSameInARow(t *testing.T) {
	const n = 8192
	call := parsed(t, `{"id": "a", "function": {"name": "f", "arguments": {}}}`)
	assistant := func(calls int) jinja.Value {
		d := jinja.NewDict(2)
		d.Set("role", jinja.String("assistant"))
		all := make([]jinja.Value, calls)
		for i := range all {
			all[i] = call
		}
		d.Set("tool_calls", jinja.List(all))
		return jinja.FromDict(d)
	}
	tool := parsed(t, `{"role": "tool", "content": "y"}`)
	row, single := &Chat{Args: new(jinja.Dict)}, &Chat{Args: new(jinja.Dict)}
	row.Messages = append(row.Messages, assistant(n))
	for range n {
		row.Messages = append(row.Messages, tool)
		single.Messages = append(single.Messages, assistant(1), tool)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cost := func(c *Chat) time.Duration {
		best := time.Duration(1<<63 - 1)
		for range 5 {
			start := cpu.Thread()
			if _, err := (deepseekV32{}).Append(nil, c); err != nil {
				t.Fatal(err)
			}
			best = min(best, cpu.Thread()-start)
		}
		return best
	}
	if inRow, alone := cost(row), cost(single); inRow > 8*alone {
		t.Errorf("got %v of CPU in a row, %v one by one, want no more than one by one", inRow, alone)
	}
}

// TestChatsCostWithTheirLength: four times the messages, calls, tools or parts cost about four times as much, not sixteen.
func TestChatsCostWithTheirLength(t *testing.T) {
	const call = `{"id": "a", "function": {"name": "f", "arguments": {"b": "c"}}}`
	repeat := func(s string, n int) string { return strings.Repeat(s+",", n-1) + s }
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for name, make := range map[string]func(n int) string{
		"messages": func(n int) string {
			return repeat(`{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}`, n)
		},
		"users":   func(n int) string { return repeat(`{"role": "user", "content": "x"}`, n) },
		"systems": func(n int) string { return repeat(`{"role": "system", "content": "x"}`, n) },
		"results": func(n int) string {
			return `{"role": "assistant", "tool_calls": [` + repeat(call, n) + `]}, ` + repeat(`{"role": "tool", "tool_call_id": "a", "content": "x"}`, n)
		},
		"parts": func(n int) string {
			return `{"role": "user", "content": [` + repeat(`{"type": "text", "text": "x"}`, n) + `]}`
		},
		"own tools": func(n int) string {
			return repeat(`{"role": "developer", "content": "x", "tools": [{"function": {"name": "f"}}]}`, n)
		},
	} {
		for _, e := range []Encoder{deepseekV4{v41: true}, inkling{xml: "<|content_xml|>"}} {
			cost := func(n int) time.Duration {
				v := parsed(t, "["+make(n)+"]")
				c := &Chat{Args: new(jinja.Dict), Limit: 1 << 24, Tools: []jinja.Value{parsed(t, `{"function": {"name": "f"}}`)}}
				c.Messages, _ = v.AsList()
				best := time.Duration(1<<63 - 1)
				for range 5 {
					start := cpu.Thread()
					if _, err := e.Append(nil, c); err != nil {
						t.Fatal(name, err)
					}
					best = min(best, cpu.Thread()-start)
				}
				return best
			}
			if small, large := cost(2048), cost(4*2048); large > 12*small {
				t.Errorf("%s, %s: got %v of CPU for four times of what costs %v, want about four times", e.Traits().Name, name, large, small)
			}
		}
	}
}

// allocated returns the bytes that do allocates. No other goroutine may allocate meanwhile.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

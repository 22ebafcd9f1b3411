package shape

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// A request whose client leaves while its prompt is rendered or tokenized ends with the context's
// error, never with a refusal; sent again, it gets all its ids.
func TestAContextEndsTheWork(t *testing.T) {
	for name, raw := range map[string]string{
		"one long text": `{"messages":[{"role":"user","content":"` + strings.Repeat("The maps are upstairs. ", 1<<16) + `"}]}`,
		"many messages": `{"messages":[{"role":"user","content":"x"}` + strings.Repeat(`,{"role":"assistant","content":"y"},{"role":"user","content":"x"}`, 1<<15) + `]}`,
	} {
		for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
			ctx, leave := context.WithCancel(t.Context())
			m := load(t, "qwen3", Options{Now: func() time.Time { leave(); return time.Unix(0, 0) }}) // the clock is read before rendering
			req, err := body.Parse(body.Chat, []byte(raw))
			if err != nil {
				t.Fatal(err)
			}
			res, err := m.PromptInto(ctx, nil, conv.New(0).Turn(req), engine)
			if !errors.Is(err, context.Canceled) || len(res.IDs) != 0 {
				t.Errorf("%s, %v: %d ids, %v", name, engine, len(res.IDs), err)
			}
			if refusal, ok := errors.AsType[*Refusal](err); ok {
				t.Errorf("%s, %v: a refusal: %v", name, engine, refusal)
			}
			res, err = m.PromptInto(t.Context(), nil, conv.New(0).Turn(req), engine)
			if err != nil || len(res.IDs) < 1<<16 {
				t.Errorf("%s, %v, wanted: %d ids, %v", name, engine, len(res.IDs), err)
			}
		}
	}
}

// untilStopped is an encoder that sees only whether it is stopped.
type untilStopped struct{ encoders.Encoder }

func (untilStopped) Append(dst []byte, c *encoders.Chat) ([]byte, error) {
	select {
	case <-c.Stop:
		return dst, encoders.ErrStopped
	default:
		return dst, nil
	}
}

// The context ends the work of an encoder, before the prompt is tokenized.
func TestAContextStopsTheEncoder(t *testing.T) {
	m, p := new(Model), &plan{encoder: untilStopped{}, chat: new(encoders.Chat)}
	ctx, leave := context.WithCancel(t.Context())
	if _, err := m.encoded(ctx, nil, p); err != nil {
		t.Errorf("got %v, want no error", err)
	}
	leave()
	if _, err := m.encoded(ctx, nil, p); !errors.Is(err, encoders.ErrStopped) {
		t.Errorf("got %v, want ErrStopped", err)
	}
}

// endsNext is a context that ends right after it was first asked.
type endsNext struct {
	context.Context
	asked bool
}

func (c *endsNext) Err() error {
	if !c.asked {
		c.asked = true
		return nil
	}
	return context.DeadlineExceeded
}

func (*endsNext) Done() <-chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}

// Nothing is read any more when the time is over, however much is left.
func TestAContextEndsTheReadingOfBodies(t *testing.T) {
	many := func(text string) string { return text + strings.Repeat(","+text, 1<<14) }
	const message = `"messages":[{"role":"user","content":"x"}]`
	m := load(t, "qwen3", Options{ToolParser: true})
	for name, c := range map[string]struct {
		api body.API
		raw string
	}{
		"messages": {body.Chat, `{"messages":[{"role":"user","content":"x"}` + strings.Repeat(
			`,{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"y"}`, 1<<10) + `]}`},
		"one message":        {body.Chat, `{"messages":[{"role":"user","content":[` + many(`{"type":"text","text":"x"}`) + `]}]}`},
		"template arguments": {body.Chat, `{` + message + `,"chat_template_kwargs":{"x":[` + many(`{"a":1}`) + `]}}`},
		"tools":              {body.Chat, `{` + message + `,"tools":[` + many(`{"type":"function","function":{"name":"f"}}`) + `]}`},
		"a tool":             {body.Chat, `{` + message + `,"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[` + many(`{"a":1}`) + `]}}}]}`},
		"items":              {body.Responses, `{"input":[` + many(`{"role":"user","content":"x"}`) + `]}`},
		"tools of a response": {body.Responses, `{"input":"x","tools":[{"type":"function","name":"f","parameters":{"enum":[` +
			many(`{"a":1}`) + `]}}]}`},
		"blocks": {body.Messages, `{"max_tokens":9,"messages":[{"role":"user","content":[` + many(`{"type":"text","text":"x"}`) + `]}]}`},
	} {
		for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
			req, err := body.Parse(c.api, []byte(c.raw))
			if err != nil {
				t.Fatal(err)
			}
			allocs := func(ctx func() context.Context, want error) float64 {
				return testing.AllocsPerRun(1, func() {
					if _, err := m.PromptInto(ctx(), nil, conv.New(0).Turn(req), engine); !errors.Is(err, want) {
						t.Errorf("%s, %v: got %v, want %v", name, engine, err, want)
					}
				})
			}
			all := allocs(t.Context, nil)
			if got := allocs(func() context.Context { return &endsNext{Context: t.Context()} }, context.DeadlineExceeded); got > all/3 {
				t.Errorf("%s, %v: got %.0f allocations after the deadline, want at most a third of %.0f", name, engine, got, all)
			}
		}
	}
}

// Nor are the arguments of a call, which are JSON in a text: what was read of them is not used.
func TestAContextEndsTheReadingOfArguments(t *testing.T) {
	arguments := `"arguments":"{\"x\":[{}` + strings.Repeat(",{}", 1<<14) + `]}"`
	m := load(t, "qwen3", Options{})
	for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"x"},`+
			`{"role":"assistant","content":"","tool_calls":[{"id":"c","type":"function","function":{"name":"f",`+arguments+`}}]}]}`))
		if err != nil {
			t.Fatal(err)
		}
		allocs := func(ctx func() context.Context, want error) float64 {
			return testing.AllocsPerRun(1, func() {
				if _, err := m.PromptInto(ctx(), nil, conv.New(0).Turn(req), engine); !errors.Is(err, want) {
					t.Errorf("%v: got %v, want %v", engine, err, want)
				}
			})
		}
		all := allocs(t.Context, nil)
		if got := allocs(func() context.Context { return &endsNext{Context: t.Context()} }, context.DeadlineExceeded); got > all/3 {
			t.Errorf("%v: got %.0f allocations after the deadline, want at most a third of %.0f", engine, got, all)
		}
	}
	item, err := jinja.ParseJSON([]byte(`{"type":"function_call","call_id":"c","name":"f",` + arguments + `}`))
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	close(over)
	got := testing.AllocsPerRun(1, func() { _, _, _ = sglangItem(over, item) })
	if all := testing.AllocsPerRun(1, func() { _, _, _ = sglangItem(nil, item) }); got > all/2 {
		t.Errorf("an item: got %.0f allocations after the deadline, want at most half of %.0f", got, all)
	}
}

// Nor are the items of a response of gpt-oss.
func TestAContextEndsTheReadingOfItems(t *testing.T) {
	req, err := body.Parse(body.Responses, []byte(`{"input":[{"role":"user","content":"x"}`+strings.Repeat(`,{"role":"user","content":"x"}`, 100)+`]}`))
	if err != nil {
		t.Fatal(err)
	}
	in := input{Request: req, profile: profiles[VLLM]}
	if list, err := harmonyInput(in); err != nil || len(list) != 102 {
		t.Errorf("got %d messages, error %v, want 102", len(list), err)
	}
	over := make(chan struct{})
	close(over)
	in.stop = over
	if list, err := harmonyInput(in); !errors.Is(err, jinja.ErrStopped) || len(list) > 2 {
		t.Errorf("got %d messages, error %v, want one item at most, ErrStopped", len(list), err)
	}
}

// A message of many parts is joined once. Allocations show it without a clock.
func TestAMessageOfManyPartsIsJoinedOnce(t *testing.T) {
	bytesFor := func(parts int) uint64 {
		req, err := body.Parse(body.Responses, []byte(`{"input":[{"role":"user","content":[{"type":"input_text","text":"abcdefgh"}`+
			strings.Repeat(`,{"type":"input_text","text":"abcdefgh"}`, parts-1)+`]}]}`))
		if err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if list, err := harmonyInput(input{Request: req, profile: profiles[VLLM]}); err != nil || len(list) != 2 {
			t.Fatalf("got %d messages, error %v, want 2", len(list), err)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	if few, many := bytesFor(500), bytesFor(4000); many > 16*few {
		t.Errorf("got %d bytes for 4,000 parts and %d for 500, want at most sixteen times", many, few)
	}
}

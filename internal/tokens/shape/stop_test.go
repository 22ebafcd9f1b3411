package shape

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
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
	m, p := &Model{encoder: untilStopped{}}, &plan{chat: new(encoders.Chat)}
	ctx, leave := context.WithCancel(t.Context())
	if _, err := m.encoded(ctx, nil, p); err != nil {
		t.Errorf("got %v, want no error", err)
	}
	leave()
	if _, err := m.encoded(ctx, nil, p); !errors.Is(err, encoders.ErrStopped) {
		t.Errorf("got %v, want ErrStopped", err)
	}
}

package decide

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
)

// A model whose only worker was condemned by prompts in service makes no ids. Its requests are compared nonetheless, and later
// ones redeem the worker.
func TestPromptsRedeemAWorker(t *testing.T) {
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		req, err := body.Parse(body.Tokenize, raw)
		if err != nil || r.URL.Path != "/tokenize" {
			http.NotFound(w, r)
			return
		}
		res, err := m.Prompt(req, shape.VLLM)
		if err != nil {
			http.Error(w, "{}", http.StatusBadRequest)
			return
		}
		ids := append([]uint32{}, res.IDs...)
		if strings.Contains(string(raw), "odd") {
			ids[len(ids)-1]++ // another one in each prompt
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"tokens": ids})
	}))
	defer engine.Close()
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {every: 1, retry: 100ms}}]\nindex: {key: test}\n"))
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t}
	if b.Decider, err = New(Options{Config: c, Models: []*fleet.Model{{Config: c.Models[0], Tokens: m}}, Metrics: observe.New("test"), Log: zerolog.Nop()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	w := worker("a", 0)
	w.Address = strings.TrimPrefix(engine.URL, "http://")
	b.Fleet().SetWorkers([]workers.Worker{w})
	until := func(prompts, degraded string) {
		t.Helper()
		deadline := time.Now().Add(20 * time.Second)
		for i := 0; ; i++ {
			d, e := b.ask("/v1/completions", fmt.Sprintf(`{"model":"demo","prompt":"%s%s %d"}`, prompts, strings.Repeat(" word", 20), i))
			end(&d, http.StatusOK)
			if e.Degraded == degraded && i > 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s prompts: got %q, want %q in the end", prompts, e.Degraded, degraded)
			}
			time.Sleep(time.Millisecond)
		}
	}
	until("good", "")
	until("odd", degradedSuspended)
	until("good", "")
}

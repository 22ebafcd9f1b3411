package shape

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

func chatWith(t *testing.T, template string) *body.Request {
	t.Helper()
	quoted, err := json.Marshal(template)
	if err != nil {
		t.Fatal(err)
	}
	req, err := body.Parse(body.Chat, fmt.Appendf(nil, `{"messages":[{"role":"user","content":"x"}],"chat_template":%s}`, quoted))
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// TestTemplateArguments: vLLM passes neither null nor "auto" to a template.
func TestTemplateArguments(t *testing.T) {
	m := load(t, "qwen3", Options{TrustTemplates: true})
	for args, want := range map[string]string{
		`{"x":null,"documents":"auto","tools":"auto","eos_token":"auto"}`: "False None None <|im_end|>",
		`{"x":0,"documents":"","tools":{},"eos_token":"E"}`:               "True  [] E",
	} {
		req, err := body.Parse(body.Chat, fmt.Appendf(nil, `{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":%s,
			"chat_template":"{{ x is defined }} {{ documents }} {{ tools }} {{ eos_token }}"}`, args))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.RenderPrompt(req, VLLM); got.Text != want || err != nil {
			t.Errorf("%s: got %q, %v, want %q", args, got.Text, err, want)
		}
	}
}

// TestHostileRequests sends many concurrent short requests whose templates ask for gigabytes:
// memory stays below the process-wide limit, and the whole share is returned.
func TestHostileRequests(t *testing.T) {
	m := load(t, "qwen3", Options{TrustTemplates: true})
	var done sync.WaitGroup
	stop, peak := make(chan struct{}), make(chan uint64)
	go func() {
		most := uint64(0)
		for {
			var s runtime.MemStats
			runtime.ReadMemStats(&s)
			most = max(most, s.HeapInuse)
			select {
			case <-stop:
				peak <- most
				return
			default:
				runtime.Gosched()
			}
		}
	}()
	for i := range 24 {
		for _, source := range []string{
			"{{ 'a\nb'|indent(999999999) }}", "{{ ('a'*9999999)|replace('a', 'b'*9999) }}", "{{ range(99999)|join('b'*99999) }}", "{{ 'x'*1000000000 }}",
			"{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
			fmt.Sprintf("{%% set x = 'a' * %d %%}{%% for i in range(9999) %%}{{ x.upper() is none }}{%% endfor %%}", 1000000+i),
		} {
			req := chatWith(t, source)
			done.Go(func() {
				_, err := m.Prompt(req, VLLM)
				if raised, ok := errors.AsType[*jinja.Error](err); !errors.Is(err, errTemplatesBusy) && (!ok || raised.Class != "ResourceLimit") {
					t.Errorf("%.60s: got %v, want ResourceLimit or errTemplatesBusy", source, err)
				}
			})
		}
	}
	done.Wait()
	close(stop)
	if got := <-peak; got > 2*templateMemory {
		t.Errorf("%d MB of heap", got>>20)
	} else {
		t.Logf("%d MB of heap at most", got>>20)
	}
	if !templateShare.TryAcquire(templateMemory) {
		t.Fatal("got less than the whole share back, want all of it")
	}
	defer templateShare.Release(templateMemory)
	if _, err := m.Prompt(chatWith(t, "{{ messages[0].content }} busy"), VLLM); !errors.Is(err, errTemplatesBusy) {
		t.Errorf("no share left: %v", err)
	}
}

// TestRequestTemplateSize: a template that is too long is not compiled, and the cache of the
// others is bounded in bytes.
func TestRequestTemplateSize(t *testing.T) {
	m := load(t, "qwen3", Options{TrustTemplates: true})
	if _, err := m.Prompt(chatWith(t, strings.Repeat("x", maxRequestTemplate+1)), VLLM); !errors.Is(err, errTemplateSize) {
		t.Errorf("too long: %v", err)
	}
	check := func(want int) {
		t.Helper()
		sum := 0
		for _, source := range m.supplied.entries.Keys() {
			sum += len(source)
		}
		if sum != m.supplied.bytes || sum > keptTemplates || sum < want {
			t.Errorf("%d bytes kept, %d counted; %d to %d wanted", sum, m.supplied.bytes, want, keptTemplates)
		}
	}
	for i := range 100 {
		if _, err := m.Prompt(chatWith(t, fmt.Sprintf("%d%s", i, strings.Repeat("x", 2000))), VLLM); err != nil {
			t.Fatal(err)
		}
	}
	check(keptTemplates - 2100)
	for range 2 {
		if _, err := m.Prompt(chatWith(t, strings.Repeat("x", maxRequestTemplate)), VLLM); err != nil {
			t.Fatal(err)
		}
	}
	check(maxRequestTemplate)
}

// A request-supplied template that only our Jinja cannot run is not refused: engines may render
// it.
func TestUnsupportedTemplatesAreNotRefused(t *testing.T) {
	m := load(t, "qwen3", Options{TrustTemplates: true})
	for _, c := range []struct {
		source  string
		refused bool
	}{
		{"{{ messages | xmlattr }}", false},                      // at compile time
		{"{% set s = messages[0].content %}{{ s % 1 }}", false},  // at run time
		{"{{ 9223372036854775807 + messages | length }}", false}, // the same
		{"{{ raise_exception('no') }}", true},                    // the template's own refusal
		{"{{ messages[0].content.missing.more }}", true},         // Python raises as well
	} {
		_, err := m.Prompt(chatWith(t, c.source), VLLM)
		_, refused := errors.AsType[*Refusal](err)
		raised, ours := errors.AsType[*jinja.Error](err)
		if refused != c.refused || !refused && (!ours || raised.Class != jinja.Unsupported) {
			t.Errorf("%s: got %v (refused: %v), want refused: %v", c.source, err, refused, c.refused)
		}
	}
}

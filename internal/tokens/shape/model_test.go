package shape

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
)

// The texts were recorded from stock vLLM 0.32.0 and SGLang 0.5.23, or follow from the same
// rules. The ids follow from the text, which the tests of package bpe prove.
var goldens = []struct {
	name   string
	api    body.API
	body   string
	engine Engine
	text   string // "" if refused; the part after a ‖ is tokenized separately
	status int
}{
	{name: "user", api: body.Chat, body: `{"messages":[{"role":"user","content":"Hello, world"}]}`,
		text: "<|im_start|>user\nHello, world<|im_end|>\n<|im_start|>assistant\n"},
	{name: "parts join with a line end", api: body.Chat, body: `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b\n"}]}]}`,
		text: "<|im_start|>user\na\nb\n<|im_end|>\n<|im_start|>assistant\n"},
	{name: "parts join with a blank", api: body.Chat, engine: SGLang,
		body: `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b\n"}]}]}`,
		text: "<|im_start|>user\na b\n<|im_end|>\n<|im_start|>assistant\n"},
	{name: "no generation prompt", api: body.Chat, body: `{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":false}`,
		text: "<|im_start|>user\nx<|im_end|>\n"},
	{name: "no generation prompt is ignored", api: body.Chat, engine: SGLang, body: `{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":false}`,
		text: "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"},
	{name: "no generation prompt in /v1/tokenize", api: body.Tokenize, engine: SGLang,
		body: `{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":false}`, text: "<|im_start|>user\nx<|im_end|>\n"},
	{name: "Claude Code's line of another number each time", api: body.Chat,
		body: `{"messages":[{"role":"system","content":"x-anthropic-billing-header: cch=1\nBe brief."},{"role":"user","content":[{"type":"text","text":"x-anthropic-billing-header: a\nHi"}]}]}`,
		text: "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx-anthropic-billing-header: a\nHi<|im_end|>\n<|im_start|>assistant\n"},
	{name: "the line in a part of its own", api: body.Chat,
		body: `{"messages":[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: cch=1"},{"type":"text","text":"S"}]},{"role":"user","content":"Hi"}]}`,
		text: "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"},
	{name: "neither content nor calls", api: body.Chat, status: 400,
		body: `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":null,"tool_calls":null}]}`},
	{name: "tools of the template's arguments win", api: body.Chat,
		body: `{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none","chat_template_kwargs":{"tools":[]}}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"},
	{name: "bare texts beside parts", api: body.Chat, body: `{"messages":[{"role":"user","content":["a",{"type":"text","text":"b"}]}]}`,
		text: "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"},
	{name: "bare texts alone in another role", api: body.Chat,
		body: `{"messages":[{"role":"wizard","content":["a"]}],"chat_template":"{{ messages[0].content }}"}`, text: "a"},
	{name: "bare texts alone", api: body.Chat, body: `{"messages":[{"role":"user","content":["a"]}]}`, status: 400},
	{name: "arguments that are not an object", api: body.Chat,
		body: `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"[1]"}}]}],"add_generation_prompt":false}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n"},
	{name: "/tokenize knows reasoning, not reasoning_content", api: body.Tokenize,
		body: `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning":"r","reasoning_content":"c"}],"add_generation_prompt":false,"cache_salt":""}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nr\n</think>\n\nb<|im_end|>\n"},
	{name: "only what vLLM declares of a tool", api: body.Tokenize,
		body: `{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","x":1,"defer_loading":true,"function":{"y":2,"strict":"yes","name":"f"}}]}`,
		text: "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n" +
			`{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "strict": true, "defer_loading": true}, "defer_loading": true}` +
			"\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"},
	{name: "a continued text that the template changes", api: body.Chat, status: 400,
		body: `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"<think>a</think>b"}],"add_generation_prompt":false,"continue_final_message":true}`},
	{name: "a continued text is tokenized separately", api: body.Chat, engine: SGLang,
		body: `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"\nb"}],"continue_final_message":true}`,
		text: "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n‖\nb"},
	{name: "what SGLang declares of a tool, in the request's order", api: body.Chat, engine: SGLang,
		body: `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"n\": [100000000000000000000000, 18446744073709551615, -9223372036854775809, 1.100000000000000000000000, \"100000000000000000000000\"]}"}}]},{"role":"tool","content":"r","tool_call_id":"1"}],"tools":[{"type":"function","x":1,"function":{"parameters":{"maximum":100000000000000000000000},"y":2,"name":"f","strict":true}}]}`,
		text: "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n" +
			`{"type": "function", "function": {"parameters": {"maximum": 1e+23}, "name": "f", "strict": true, "description": null}, "defer_loading": null}` +
			"\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<tool_call>\n" +
			`{"name": "f", "arguments": {"n": [1e+23, 18446744073709551615, -9.223372036854776e+18, 1.1, "100000000000000000000000"]}}` +
			"\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"},
	{name: "a chosen tool that is not there", api: body.Chat, engine: SGLang, status: 400,
		body: `{"messages":[{"role":"user","content":"x"}],"tool_choice":{"type":"function","function":{"name":"g"}},"tools":[{"type":"function","function":{"name":"f"}}]}`},
	{name: "assistant last becomes the user", api: body.Chat, engine: SGLang,
		body: `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"partial answer"}]}`,
		text: "<|im_start|>user\nx<|im_end|>\n<|im_start|>user\npartial answer<|im_end|>\n<|im_start|>assistant\n"},
	{name: "continued", api: body.Chat, engine: SGLang,
		body: `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"partial"}],"continue_final_message":true}`,
		text: "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\npartial"},
	{name: "continued", api: body.Chat,
		body: `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"partial "}],"continue_final_message":true,"add_generation_prompt":false}`,
		text: "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\npartial "},
	{name: "continued and generation prompt", api: body.Chat, body: `{"messages":[{"role":"user","content":"x"}],"continue_final_message":true}`, status: 400},
	{name: "developer is system", api: body.Chat, body: `{"messages":[{"role":"developer","content":"dev"},{"role":"user","content":"a"}]}`,
		text: "<|im_start|>system\ndev<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"},
	{name: "developer and system are joined", api: body.Chat,
		body: `{"messages":[{"role":"system","content":"a"},{"role":"user","content":"b"},{"role":"developer","content":[{"type":"text","text":"c"}]}]}`,
		text: "<|im_start|>system\na\n\nc<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"},
	{name: "developer that the template knows", api: body.Chat,
		body: `{"messages":[{"role":"developer","content":"c"}],"chat_template":"{{ messages[0].role == 'developer' }}"}`, text: "True"},
	{name: "system in the middle stays", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"},{"role":"system","content":"late"}]}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>system\nlate<|im_end|>\n<|im_start|>assistant\n"},
	{name: "developer is dropped", api: body.Chat, engine: SGLang, body: `{"messages":[{"role":"developer","content":"dev"},{"role":"user","content":"a"}]}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"},
	{name: "a part with nothing for its text", api: body.Chat, text: "<|im_start|>assistant\na<|im_end|>\n<|im_start|>assistant\n",
		body: `{"messages":[{"role":"assistant","x":1,"content":[{"type":"thinking","thinking":{}},{"type":"text","text":"a"}]}]}`},
	{name: "a part with a number for its text", api: body.Chat, status: 400,
		body: `{"messages":[{"role":"assistant","x":1,"content":[{"type":"thinking","thinking":1},{"type":"text","text":"a"}]}]}`},
	{name: "thinking off", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"reasoning_effort":"none"}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
	{name: "thinking off", api: body.Chat, engine: SGLang, body: `{"messages":[{"role":"user","content":"a"}],"reasoning":{"effort":"none"}}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
	{name: "thinking kwarg wins", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true}}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"},
	{name: "own template", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"chat_template":"{{ messages[0].content }}|{{ eos_token }}|{{ documents }}"}`,
		text: "a|<|im_end|>|None"},
	{name: "own template that raises", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"chat_template":"{{ raise_exception('no') }}"}`, status: 400},
	{name: "own template that is broken", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"chat_template":"{% if %}"}`, status: 400},
	{name: "template with parts", api: body.Chat,
		body: `{"messages":[{"role":"user","content":"a"}],"chat_template":"{% for m in messages %}{% for c in m.content %}[{{ c.type }}:{{ c.text }}]{% endfor %}{% endfor %}"}`,
		text: "[text:a]"},
	{name: "arguments are read", api: body.Chat,
		body: `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":"{\"a\": 1e5}"}}]}],` +
			`"chat_template":"{{ messages[0].tool_calls[0].function.arguments | tojson }}"}`, text: `{"a": 100000.0}`},
	{name: "arguments that are not JSON", api: body.Chat,
		body: `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":"{a"}}]}],` +
			`"chat_template":"{{ messages[0].tool_calls[0].function.arguments | tojson }}"}`, text: `{}`},
	{name: "arguments that are not JSON", api: body.Chat, engine: SGLang, status: 400,
		body: `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":"{a"}}]}]}`},
	{name: "arguments as an object", api: body.Chat, status: 400,
		body: `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":{}}}]}]}`},
	{name: "tools in the dump's order", api: body.Chat,
		body: `{"messages":[{"role":"user","content":"a"}],"tools":[{"function":{"parameters":{"z":1,"a":1.0},"name":"f","strict":true},"type":"function"}],"tool_choice":"none",` +
			`"chat_template":"{{ tools | tojson }}"}`,
		text: `[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": 1, "a": 1.0}, "strict": true}}]`},
	{name: "tools empty", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"tools":[]}`, status: 400},
	{name: "tool_choice without tools", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"tool_choice":"auto"}`, status: 400},
	{name: "documents", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"documents":[{"t":"1"}],"chat_template":"{{ documents }}"}`, text: "[{'t': '1'}]"},
	{name: "content null", api: body.Chat, body: `{"messages":[{"role":"user","content":null}]}`, status: 400},
	{name: "content null", api: body.Chat, engine: SGLang, body: `{"messages":[{"role":"user","content":null}]}`, status: 400},
	{name: "content absent", api: body.Chat, body: `{"messages":[{"role":"user"}]}`, text: "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"},
	{name: "content a number", api: body.Chat, body: `{"messages":[{"role":"user","content":5}]}`, status: 400},
	{name: "part without type", api: body.Chat, body: `{"messages":[{"role":"user","content":[{"text":"a"}]}]}`, status: 400},
	{name: "unknown role", api: body.Chat, body: `{"messages":[{"role":"wizard","content":"a"},{"role":"user","content":"b"}]}`,
		text: "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"},
	{name: "unknown role", api: body.Chat, engine: SGLang, body: `{"messages":[{"role":"wizard","content":"a"},{"role":"user","content":"b"}]}`, status: 400},
	{name: "refusal part", api: body.Chat, engine: SGLang, body: `{"messages":[{"role":"assistant","content":[{"type":"refusal","refusal":"no"}]}]}`, status: 400},
	{name: "lone surrogate", api: body.Chat, body: `{"messages":[{"role":"user","content":"\ud800"}]}`, status: 400},
	{name: "kwarg messages", api: body.Chat, body: `{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"messages":[]}}`, status: 400},
	{name: "kwarg add_generation_prompt", api: body.Chat, engine: SGLang,
		body: `{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"messages":[],"add_generation_prompt":false}}`, status: 500},
	{name: "no messages", api: body.Chat, body: `{}`, status: 400},
	{name: "fields other than the prompt are the engine's to check", api: body.Chat,
		body: `{"messages":[{"role":"user","content":"a"}],"cache_salt":"a@b","stream_options":{"x":1},"temperature":"hot","stop":[""],"n":0}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"},
	{name: "completion", api: body.Completions, body: `{"prompt":"a\n<|im_end|>"}`, text: "a\n<|im_end|>"},
	{name: "completions of a batch", api: body.Completions, body: `{"prompt":["first","second"]}`, text: "first"},
	{name: "no prompt", api: body.Completions, body: `{"model":"m"}`, status: 400},
	{name: "empty prompt", api: body.Completions, body: `{"prompt":""}`, status: 400},
	{name: "ids beyond the vocabulary", api: body.Completions, body: `{"prompt":[1,99999999]}`, status: 400},
	{name: "embeddings", api: body.Embeddings, body: `{"input":["a b"]}`, text: "a b"},
	{name: "generate", api: body.Generate, engine: SGLang, body: `{"text":"a b"}`, text: "a b"},
	{name: "responses", api: body.Responses, body: `{"instructions":"s","input":"u"}`,
		text: "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"},
	{name: "responses items", api: body.Responses,
		body: `{"input":[{"role":"user","content":[{"type":"input_text","text":"u"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},` +
			`{"type":"function_call_output","call_id":"c","output":"r"}]}`,
		text: "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n" +
			"<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"},
	{name: "responses: a thought, an answer and a call are one message, of an answer the first text counts", api: body.Responses,
		body: `{"input":[{"role":"user","content":"u"},{"type":"reasoning","id":"r","summary":[],"content":[{"type":"reasoning_text","text":"t"}]},` +
			`{"type":"message","role":"assistant","id":"m","status":"completed","content":[{"type":"output_text","text":"a"},{"type":"output_text","text":"b"}]},` +
			`{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}]}`,
		text: "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\nt\n</think>\n\na\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n<|im_start|>assistant\n"},
	{name: "responses: an unfinished answer is continued", api: body.Responses,
		body: `{"input":[{"role":"user","content":"u"},{"type":"message","role":"assistant","id":"m","status":"incomplete","content":[{"type":"output_text","text":"a"}]}]}`,
		text: "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na"},
	{name: "responses: an answer with a state has parts", api: body.Responses, status: 400,
		body: `{"input":[{"role":"user","content":"u"},{"type":"message","role":"assistant","id":"m","status":"completed","content":"a"}]}`},
	{name: "messages", api: body.Messages, body: `{"system":[{"type":"text","text":"s"}],"max_tokens":5,"messages":[{"role":"user","content":[{"type":"text","text":"u"}]}]}`,
		text: "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"},
	{name: "messages of Claude Code", api: body.Messages,
		body: `{"system":[{"type":"text","text":"x-anthropic-billing-header: cch=1"},{"type":"text","text":"s"}],"max_tokens":5000,"thinking":{"type":"disabled"},"messages":[{"role":"user","content":"u"},` +
			`{"role":"assistant","content":[{"type":"thinking","thinking":"t"},{"type":"text","text":""},{"type":"text","text":"a"},{"type":"tool_use","id":"1","name":"f","input":null}]},` +
			`{"role":"user","content":[{"type":"text","text":"b"},{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"r"},{"type":"text","text":"q"}]}]},{"role":"system","content":"now"},{"role":"user","content":[]}]}`,
		text: "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nr\nq\n</tool_response><|im_end|>\n" +
			"<|im_start|>user\nb<|im_end|>\n<|im_start|>system\nnow<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
	{name: "counted messages need none", api: body.CountTokens, body: `{"messages":[{"role":"user","content":"u"}]}`,
		text: "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"},
	{name: "a block that is none", api: body.Messages, status: 400, body: `{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"document"}]}]}`},
	{name: "parts without their text", api: body.Tokenize, body: `{"messages":[{"role":"user","content":["a",{"type":"tool_reference","x":1},{"type":"text","text":null}]}]}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"},
	{name: "trtllm's calls", api: body.Chat, engine: TRTLLM, body: `{"messages":[{"role":"user","content":["a",{"type":"text","text":""},{"type":"text","text":null}]},` +
		`{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"1","content":"r"}]}`,
		text: "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call><|im_end|>\n" +
			"<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"},
	{name: "trtllm reads lists of arguments as none", api: body.Chat, engine: TRTLLM, status: 400,
		body: `{"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[]"}}]}]}`},
	{name: "trtllm knows fewer parts", api: body.Chat, engine: TRTLLM, status: 400, body: `{"messages":[{"role":"user","content":[{"type":"refusal","refusal":"no"}]}]}`},
	{name: "trtllm", api: body.Chat, engine: TRTLLM, body: `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`,
		text: "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"},
}

func TestShapes(t *testing.T) {
	m := load(t, "qwen3", Options{TrustTemplates: true})
	for _, c := range []*conv.Cache{nil, conv.New(1 << 20)} {
		for _, g := range goldens {
			for range 2 { // the second time from the cache
				req, err := body.Parse(g.api, []byte(g.body))
				if err != nil {
					t.Fatal(g.name, err)
				}
				checkGolden(t, m, c.Turn(req), g.name, g.engine, g.text, g.status)
			}
		}
	}
}

func checkGolden(t *testing.T, m *Model, turn *conv.Turn, name string, engine Engine, text string, status int) {
	t.Helper()
	res, err := m.RenderPrompt(turn.Request, engine)
	if status != 0 {
		refusal, ok := errors.AsType[*Refusal](err)
		if !ok || refusal.Status != status {
			t.Errorf("%v %s: %v, want status %d", engine, name, err, status)
		}
		return
	}
	parts := strings.Split(text, "‖")
	text = strings.Join(parts, "")
	if err != nil || res.Text != text || res.Partial != "" {
		t.Errorf("%v %s: %q %v %s\nwant %q", engine, name, res.Text, err, res.Partial, text)
		return
	}
	var want []uint32
	for _, part := range parts {
		if want, err = m.tok.Encode(want, part, false); err != nil {
			t.Fatal(err)
		}
	}
	again, err := m.PromptInto(t.Context(), nil, turn, engine)
	if err != nil || !slices.Equal(res.IDs, want) || !slices.Equal(again.IDs, want) {
		t.Errorf("%v %s: ids %v and %v (%v), want %v", engine, name, res.IDs, again.IDs, err, want)
	}
}

func TestEngineFlags(t *testing.T) {
	tool := `"tools":[{"type":"function","function":{"name":"f"}}]`
	for _, c := range []struct {
		options Options
		body    string
		refused bool
	}{
		{Options{}, tool, true},
		{Options{}, tool + `,"tool_choice":"required"`, true},
		{Options{}, tool + `,"tool_choice":"none"`, false},
		{Options{}, tool + `,"tool_choice":{"type":"function","function":{"name":"f"}}`, true},
		{Options{ToolParser: true}, tool, false},
		{Options{ToolParser: true}, tool + `,"tool_choice":{"type":"function","function":{"name":"f"}}`, false},
		{Options{ToolParser: true}, tool + `,"tool_choice":{"type":"function","function":{"name":"g"}}`, true},
		{Options{ToolParser: true}, tool + `,"tool_choice":"perhaps"`, true},
		{Options{}, `"chat_template":"x"`, true},
		{Options{}, `"chat_template":""`, true},
		{Options{}, `"chat_template":null`, false},
		{Options{}, `"chat_template_kwargs":{"chat_template":"x"}`, true},
		{Options{TrustTemplates: true}, `"chat_template_kwargs":{"chat_template":"x"}`, false},
		{Options{}, `"reasoning_effort":"auto"`, true},
		{Options{}, `"chat_template_kwargs":{"tokenize":true}`, false},
		{Options{}, `"chat_template_kwargs":{"return_assistant_tokens_mask":1}`, true},
		{Options{}, `"chat_template_kwargs":{"return_assistant_tokens_mask":0}`, false},
		{Options{}, `"chat_template_kwargs":{"tokenizer":{}}`, true},
		{Options{}, `"chat_template_kwargs":{"tokenizer":null,"self":"auto","messages":null}`, false},
		{Options{}, `"chat_template_kwargs":{"documents":[1]}`, true},
		{Options{}, `"chat_template_kwargs":{"documents":false}`, true},
		{Options{}, `"chat_template_kwargs":{"documents":[{}],"tools":""}`, false},
		{Options{}, `"chat_template_kwargs":{"tools":0}`, true},
		{Options{ToolParser: true}, `"tools":[{"type":"function","function":{"name":"f","strict":"x"}}]`, true},
		{Options{}, `"truncate_prompt_tokens":"7"`, false},
		{Options{}, `"truncate_prompt_tokens":2.5`, true},
		{Options{}, `"truncation_side":"middle"`, true},
		{Options{}, `"add_generation_prompt":-0.0`, false},
		{Options{}, `"add_generation_prompt":2`, true},
		{Options{TrustTemplates: true}, `"chat_template":"x"`, false},
		{Options{MaxModelLen: 5}, `"n":1`, true},
		{Options{MaxModelLen: 9}, `"n":1`, true},
		{Options{MaxModelLen: 10}, `"n":1`, false},
		{Options{MaxModelLen: 10}, `"max_tokens":2`, false}, // output is truncated to the remaining context
		{Options{MaxModelLen: 10}, `"max_tokens":11`, true},
		{Options{MaxModelLen: 12}, `"min_tokens":3`, false},
		{Options{MaxModelLen: 12}, `"min_tokens":4,"max_tokens":5`, true}, // of which 3 are left
		{Options{MaxModelLen: 12}, `"max_tokens":2`, false},
	} {
		m := load(t, "qwen3", c.options)
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"x"}],`+c.body+`}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.Prompt(req, VLLM)
		if _, refused := errors.AsType[*Refusal](err); refused != c.refused || err != nil && !refused {
			t.Errorf("%+v %s: %d ids, %v", c.options, c.body, len(res.IDs), err)
		}
	}
}

// TestUntrustedTemplate: if an engine is not known to reject a request's template, the request
// gets no ids.
func TestUntrustedTemplate(t *testing.T) {
	const chat = `{"messages":[{"role":"user","content":"x"}],`
	for _, c := range []struct {
		options Options
		engine  Engine
		body    string
		want    error
	}{
		{Options{}, TRTLLM, `"chat_template":"x"`, ErrUntrustedTemplate},
		{Options{}, TRTLLM, `"chat_template_kwargs":{"chat_template":"x"}`, ErrUntrustedTemplate},
		{Options{TrustTemplates: true}, TRTLLM, `"chat_template":"x"`, nil},
		{Options{}, SGLang, `"chat_template":"x"`, nil}, // SGLang ignores it
	} {
		m := load(t, "qwen3", c.options)
		req, err := body.Parse(body.Chat, []byte(chat+c.body+`}`))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Prompt(req, c.engine); !errors.Is(err, c.want) {
			t.Errorf("%v %+v %s: %v, want %v", c.engine, c.options, c.body, err, c.want)
		}
	}
}

// The ids are those of vLLM 0.32's renderers with the same parameters, for models that generate and models that pool.
func TestTruncation(t *testing.T) {
	const text, long = "one two three four five six", "one two three four five six one two three four five six one two three four five six one two three four five six"
	// A tokenizer that ends a text with a token, as those of embedding models do.
	packed, err := os.Open("../models/qwen3/tokenizer.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	var file map[string]any
	raw, err := gzip.NewReader(packed)
	if err == nil {
		err = json.NewDecoder(raw).Decode(&file)
	}
	if err != nil {
		t.Fatal(err)
	}
	type object = map[string]any
	file["post_processor"] = object{"type": "TemplateProcessing", "pair": []any{},
		"single":         []any{object{"Sequence": object{"id": "A", "type_id": 0}}, object{"SpecialToken": object{"id": "<|endoftext|>", "type_id": 0}}},
		"special_tokens": object{"<|endoftext|>": object{"id": "<|endoftext|>", "ids": []int{151643}, "tokens": []string{"<|endoftext|>"}}}}
	edited, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	ended, err := Load(fstest.MapFS{"tokenizer.json": {Data: edited}}, Options{MaxModelLen: 20})
	if err != nil {
		t.Fatal(err)
	}
	begun, plain, unknown := load(t, "mistral_7b", Options{MaxModelLen: 20}), load(t, "qwen3", Options{MaxModelLen: 20}), load(t, "qwen3", Options{})
	for _, c := range []struct {
		m      *Model
		api    body.API
		prompt string
		fields string
		want   []uint32
	}{
		{plain, body.Completions, text, `"truncate_prompt_tokens":3`, []uint32{3040, 4236, 4743}},
		{plain, body.Completions, text, `"truncate_prompt_tokens":3,"truncation_side":"right"`, []uint32{603, 1378, 2326}},
		{plain, body.Embeddings, text, `"truncate_prompt_tokens":3`, []uint32{603, 1378, 2326}},
		{plain, body.Classify, text, `"truncate_prompt_tokens":3,"truncation_side":"left"`, []uint32{3040, 4236, 4743}},
		{plain, body.Completions, text, `"truncate_prompt_tokens":6`, []uint32{603, 1378, 2326, 3040, 4236, 4743}},
		{plain, body.Completions, long, `"truncate_prompt_tokens":-1`, []uint32{4743, 825, 1378, 2326, 3040, 4236, 4743, 825, 1378, 2326, 3040, 4236, 4743, 825, 1378, 2326, 3040, 4236, 4743}},
		{plain, body.Pooling, long, `"truncate_prompt_tokens":-1`, []uint32{603, 1378, 2326, 3040, 4236, 4743, 825, 1378, 2326, 3040, 4236, 4743, 825, 1378, 2326, 3040, 4236, 4743, 825, 1378}},
		{begun, body.Completions, text, `"truncate_prompt_tokens":3`, []uint32{1, 3359, 3522}},
		{begun, body.Completions, text, `"truncate_prompt_tokens":3,"truncation_side":"left"`, []uint32{2308, 3359, 3522}},
		{begun, body.Completions, text, `"truncate_prompt_tokens":3,"add_special_tokens":false`, []uint32{2308, 3359, 3522}},
		{begun, body.Completions, text, `"truncate_prompt_tokens":1`, []uint32{1}},
		{begun, body.Embeddings, text, `"truncate_prompt_tokens":3`, []uint32{1, 624, 989}},
		{ended, body.Completions, text, `"truncate_prompt_tokens":3`, []uint32{4236, 4743, 151643}},
		{ended, body.Embeddings, text, `"truncate_prompt_tokens":3`, []uint32{603, 1378, 151643}},
		{ended, body.Embeddings, text, `"truncate_prompt_tokens":3,"truncation_side":"right"`, []uint32{603, 1378, 2326}},
		{ended, body.Embeddings, text, `"truncate_prompt_tokens":1`, []uint32{151643}},
		{unknown, body.Completions, text, `"truncate_prompt_tokens":-1`, nil}, // to a context that is not known
		{unknown, body.Embeddings, text, `"truncate_prompt_tokens":-1`, nil},
		{unknown, body.Completions, text, `"truncate_prompt_tokens":3`, []uint32{3040, 4236, 4743}},
	} {
		field := "prompt"
		if c.api.Pools() {
			field = "input"
		}
		req, err := body.Parse(c.api, fmt.Appendf(nil, `{%q:%q,%s}`, field, c.prompt, c.fields))
		if err != nil {
			t.Fatal(err)
		}
		cache := conv.New(1 << 20)
		for range 2 {
			if res, err := c.m.PromptInto(t.Context(), nil, cache.Turn(req), VLLM); err != nil || !slices.Equal(res.IDs, c.want) || (res.Partial != "") != (c.want == nil) {
				t.Errorf("%v %s %s: got %v, partial %q, error %v, want %v", c.api, c.prompt, c.fields, res.IDs, res.Partial, err, c.want)
			}
		}
	}
	ids := `{"prompt":[100,101,102,103,104],"truncate_prompt_tokens":3}`
	if got := idsOf(t, plain, ids); !slices.Equal(got, []uint32{102, 103, 104}) {
		t.Errorf("%s: got %v, want the last three", ids, got)
	}
}

func idsOf(t *testing.T, m *Model, raw string) []uint32 {
	t.Helper()
	req, err := body.Parse(body.Completions, []byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	res, err := m.Prompt(req, VLLM)
	if err != nil {
		t.Fatal(raw, err)
	}
	return res.IDs
}

func TestImagesCutThePrompt(t *testing.T) {
	takes := true
	m := load(t, "qwen3", Options{Multimodal: &takes})
	for _, engine := range []Engine{VLLM, SGLang} {
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"system","content":"Rules."},{"role":"user","content":[`+
			`{"type":"image_url","image_url":{"url":"data:"}},{"type":"text","text":"What is it?"}]}]}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.RenderPrompt(req, engine)
		if err != nil || res.Partial == "" {
			t.Fatalf("%v: %v, partial %q", engine, err, res.Partial)
		}
		if !strings.HasPrefix(res.Text, "<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\n") || strings.Contains(res.Text, "What") || len(res.IDs) == 0 {
			t.Errorf("%v: %q, %d ids", engine, res.Text, len(res.IDs))
		}
	}
}

func TestGivenAndForwardedIDs(t *testing.T) {
	m := load(t, "qwen3", Options{})
	for _, engine := range []Engine{VLLM, SGLang} {
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"x"}],"kv_transfer_params":null}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.Prompt(req, engine)
		if err != nil {
			t.Fatal(err)
		}
		edits := m.ForwardIDs(req, engine, res)
		if edits == nil {
			t.Fatalf("%v takes no ids", engine)
		}
		raw, err := body.Apply(nil, req.Body, edits...)
		if err != nil {
			t.Fatal(err)
		}
		if req, err = body.Parse(body.Chat, raw); err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		again, err := m.Prompt(req, engine)
		if err != nil || !slices.Equal(again.IDs, res.IDs) {
			t.Errorf("%v: %v %v, want %v", engine, again.IDs, err, res.IDs)
		}
	}
	req := &body.Request{API: body.Chat}
	for _, bad := range []Result{{}, {IDs: []uint32{1}, Partial: "x"}, {IDs: []uint32{1 << 31}}} {
		if m.ForwardIDs(req, SGLang, bad) != nil {
			t.Errorf("ids of %+v are forwarded, want none", bad)
		}
	}
	if m.ForwardIDs(req, TRTLLM, Result{IDs: []uint32{1}}) != nil {
		t.Error("TensorRT-LLM has no field for it")
	}
}

// The ids of messages and responses go to vLLM where those of chats go, unless the answer contains the prompt's text.
func TestIDsOfConvertedRequestsAreForwarded(t *testing.T) {
	m := load(t, "qwen3", Options{})
	for _, c := range []struct {
		api       body.API
		engine    Engine
		raw, want string
	}{
		{body.Messages, VLLM, `{"max_tokens":1}`, `{"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":[87,379]}}`},
		{body.Responses, VLLM, `{"kv_transfer_params":null}`, `{"kv_transfer_params":{"prompt_token_ids":[87,379]}}`},
		{body.Messages, SGLang, `{"max_tokens":1}`, ""},
		{body.Responses, SGLang, `{"input":"x"}`, ""},
		{body.Chat, VLLM, `{"return_prompt_text":true}`, ""},
		{body.Chat, VLLM, `{"return_prompt_text":null}`, `{"return_prompt_text":null,"kv_transfer_params":{"prompt_token_ids":[87,379]}}`},
		{body.CountTokens, VLLM, `{"x":1}`, ""},
	} {
		req, err := body.Parse(c.api, []byte(c.raw))
		if err != nil {
			t.Fatal(err)
		}
		got, err := body.Apply(nil, req.Body, m.ForwardIDs(req, c.engine, Result{IDs: []uint32{87, 379}})...)
		if want := cmp.Or(c.want, c.raw); err != nil || string(got) != want {
			t.Errorf("%v, %v: got %s, %v, want %s", c.api, c.engine, got, err, want)
		}
	}
}

// Ids take the place of a completion's text, unless the answer or the prompt would be another one.
func TestIDsOfCompletionsAreForwarded(t *testing.T) {
	m := load(t, "qwen3", Options{})
	for raw, want := range map[string]string{
		`{"prompt":"x y","n":2}`:                      `{"prompt":[87,379],"n":2}`,
		`{"prompt":"x y","logprobs":1}`:               `{"prompt":[87,379],"logprobs":1}`,
		`{"prompt":"x y","echo":true}`:                "",
		`{"prompt":"x y","prompt_logprobs":0}`:        "",
		`{"prompt":"x y","suffix":"z"}`:               "",
		`{"prompt":"x y","use_beam_search":true}`:     "",
		`{"prompt":"x y","truncate_prompt_tokens":1}`: "",
		`{"prompt":["x y","z"]}`:                      "",
		`{"prompt":[1,2]}`:                            "",
	} {
		req, err := body.Parse(body.Completions, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		got, err := body.Apply(nil, req.Body, m.ForwardIDs(req, VLLM, Result{IDs: []uint32{87, 379}})...)
		if want == "" {
			want = raw
		}
		if err != nil || string(got) != want {
			t.Errorf("got %s, %v, want %s", got, err, want)
		}
	}
}

// An engine is given ids only if its answers with them are those without them, and it counts them; of each API by itself.
func TestOnlyEnginesThatTakeIDsAreGivenThem(t *testing.T) {
	m := load(t, "qwen3", Options{})
	all := []body.API{body.Chat, body.Completions, body.Messages, body.Responses}
	for name, want := range map[string][]body.API{
		"takes": all, "ignores": nil, "answers otherwise": nil, "refuses": nil, "ignores those of responses": all[:3], "fails at first": all,
		"always fails": {body.Chat, body.Completions, body.Responses}, "has none": {body.Chat, body.Completions, body.Responses},
	} {
		failed, questions, messages := false, 0, 0
		engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			raw, _ := io.ReadAll(r.Body)
			api := body.Tokenize
			for _, p := range probes {
				if p.path == r.URL.Path {
					api = p.api
				}
			}
			req, err := body.Parse(api, raw)
			if err != nil {
				t.Error(err)
				return
			}
			given := req.Form == body.FormIDs || req.Has(body.FieldKVTransferParams)
			res, err := m.Prompt(req, VLLM)
			text := "a"
			switch api {
			case body.Tokenize:
				questions++
			case body.Messages:
				messages++
			case body.Responses:
				if !bytes.Contains(raw, []byte(`"store":false`)) {
					t.Errorf("%s: got %s, want that nothing is stored", name, raw)
				}
			}
			switch {
			case name == "always fails" && api == body.Messages:
				w.WriteHeader(http.StatusInternalServerError)
			case name == "has none" && api == body.Messages:
				w.WriteHeader(http.StatusNotImplemented)
			case name == "fails at first" && api == body.Messages && !failed:
				failed = true
				w.WriteHeader(http.StatusInternalServerError)
			case err != nil || name == "refuses" && given:
				w.WriteHeader(http.StatusBadRequest)
			case api == body.Tokenize:
				fmt.Fprintf(w, `{"tokens":%s}`, body.AppendIDList(nil, res.IDs))
				return
			case given && (name == "ignores" || name == "ignores those of responses" && api == body.Responses):
				res.IDs = res.IDs[:1]
			case name == "answers otherwise" && given:
				text = "b"
			}
			usage := fmt.Sprintf(`"prompt_tokens":%d`, len(res.IDs))
			if api == body.Messages || api == body.Responses {
				usage = fmt.Sprintf(`"input_tokens":%d`, len(res.IDs))
			}
			fmt.Fprintf(w, `{"id":%d,"choices":[{"text":%q}],"status":%[2]q,"stop_reason":%[2]q,"usage":{%s}}`, time.Now().UnixNano(), text, usage)
		}))
		for _, asked := range []bool{true, false} {
			ctx, cancel := context.WithCancel(t.Context())
			var c *Checker
			ticks := 0
			failed, questions, messages = false, 0, 0
			c = NewChecker(m, &Oracle{Engine: VLLM, URL: engine.URL}, CheckerOptions{ModelName: "m", Retry: time.Millisecond, Awake: func() bool {
				if ticks++; ticks > 2*maxRepeats {
					cancel()
				}
				if asked && slices.Contains(want, body.Chat) && !c.TakesIDs(body.Chat) {
					t.Errorf("%s: an API that takes ids has lost them", name)
				}
				return ctx.Err() == nil
			}})
			for _, api := range all {
				if asked && c.TakesIDs(api) {
					t.Errorf("%s, %v: got ids for an engine that was not asked", name, api)
				}
			}
			c.Run(ctx)
			if c.State() != Agrees || questions != len(builtIn("m")) {
				t.Errorf("%s: got state %v after %d questions, want agrees after each once", name, c.State(), questions)
			}
			wantAsked, known := map[string]int{"refuses": 2, "always fails": 1 + maxRepeats, "has none": 1, "fails at first": 4}[name]
			if !known {
				wantAsked = 3
			}
			if !asked {
				wantAsked = 0
			}
			if messages != wantAsked {
				t.Errorf("%s, asked %v: got %d messages, want %d", name, asked, messages, wantAsked)
			}
			for _, api := range append(slices.Clip(all), body.Generate) {
				if got := c.TakesIDs(api); got != (asked && slices.Contains(want, api)) {
					t.Errorf("%s, %v, asked %v: got %v", name, api, asked, got)
				}
			}
		}
		engine.Close()
	}
}

func TestAdapter(t *testing.T) {
	m := load(t, "qwen3", Options{Names: []string{"base", "alias"}})
	for raw, want := range map[string]string{
		`{"model":"base"}`: "", `{"model":"alias"}`: "", `{}`: "", `{"model":"sql"}`: "sql", `{"model":"base:sql"}`: "sql",
		`{"model":"base","lora_path":"p"}`: "p",
	} {
		req, err := body.Parse(body.Chat, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Adapter(req); got != want {
			t.Errorf("%s: %q, want %q", raw, got, want)
		}
	}
}

func TestDatedTemplatesAreNotRemembered(t *testing.T) {
	now := time.Date(2026, 11, 20, 23, 0, 0, 0, time.UTC)
	m := load(t, "qwen3", Options{ChatTemplate: "{{ strftime_now('%d') }}", Now: func() time.Time { return now }})
	c := conv.New(1 << 20)
	raw := []byte(`{"messages":[{"role":"user","content":"x"}]}`)
	for day := range 3 {
		now = now.AddDate(0, 0, day)
		for range 3 {
			var turn conv.Turn
			if err := c.Parse(&turn, body.Chat, raw); err != nil {
				t.Fatal(err)
			}
			res, err := m.PromptInto(t.Context(), nil, &turn, VLLM)
			if err != nil {
				t.Fatal(err)
			}
			want, err := m.tok.Encode(nil, now.Format("02"), false)
			if err != nil || !slices.Equal(res.IDs, want) {
				t.Fatalf("day %d: %v, want %v (%v)", day, res.IDs, want, err)
			}
		}
	}
}

func TestLoadRefusesABrokenTemplate(t *testing.T) {
	if _, err := Load(os.DirFS("../models/qwen3"), Options{ChatTemplate: "{% for %}"}); err == nil {
		t.Error("got no error, want one")
	}
	if _, err := Load(os.DirFS(t.TempDir()), Options{}); err == nil {
		t.Error("got no error for an empty directory, want one")
	}
}

func TestWithoutATemplateOnlyChatsAreUnknown(t *testing.T) {
	folder := os.DirFS("../models/gptoss")
	files := fstest.MapFS{}
	for _, name := range []string{"tokenizer.json.gz", "tokenizer_config.json"} {
		data, err := fs.ReadFile(folder, name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: data}
	}
	m, err := Load(files, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for raw, api := range map[string]body.API{`{"messages":[{"role":"user","content":"x"}]}`: body.Chat, `{"prompt":"x"}`: body.Completions} {
		req, err := body.Parse(api, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.Prompt(req, VLLM)
		if unknown := errors.Is(err, ErrNoTemplate); unknown != (api == body.Chat) || !unknown && len(res.IDs) == 0 {
			t.Errorf("%s: got ids %v, %v, want ErrNoTemplate exactly for a chat", raw, res.IDs, err)
		}
	}
}

func FuzzPrompt(f *testing.F) {
	m := load(f, "mistral_7b", Options{ChatTemplate: "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ tools | tojson }}"})
	for _, g := range goldens {
		f.Add(uint8(g.api), uint8(g.engine), []byte(g.body))
	}
	f.Fuzz(func(t *testing.T, api, engine uint8, raw []byte) {
		req, err := body.Parse(body.API(api%10), raw)
		if err != nil {
			return
		}
		e := Engine(engine % 3)
		res, err := m.Prompt(req, e)
		again, errAgain := m.RenderPrompt(req, e)
		if (err == nil) != (errAgain == nil) || err == nil && !slices.Equal(res.IDs, again.IDs) {
			t.Fatalf("%v %v, then %v %v", res.IDs, err, again.IDs, errAgain)
		}
	})
}

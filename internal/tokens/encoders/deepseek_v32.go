package encoders

import (
	_ "embed"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// deepseekV32 is vllm/tokenizers/deepseek_v32.py, or SGLang's encoding_dsv32.py after the changes of its serving_chat.py.
type deepseekV32 struct{ sglang bool }

func newDeepseekV32(*bpe.Tokenizer) (Encoder, error) { return deepseekV32{}, nil }

func (deepseekV32) Traits() Traits { return Traits{Name: "deepseek_v32", Messages: Joined} }

func (d deepseekV32) Append(dst []byte, c *Chat) (_ []byte, err error) {
	messages := c.Messages
	switch {
	case len(messages) == 0 && (d.sglang || len(c.Tools) == 0):
		return dst, d.fails("list index out of range")
	case !d.sglang && len(c.Tools) == 0:
	case d.sglang && roleOf(messages[0]) == "system":
		if len(c.Tools) > 0 {
			host, _ := messages[0].AsDict()
			messages = append([]jinja.Value{withTools(host, c.Tools)}, messages[1:]...)
		}
	default:
		messages = append([]jinja.Value{withTools(nil, c.Tools)}, messages...)
	}
	thinking := truth(c.Args, "thinking") || !d.sglang && truth(c.Args, "enable_thinking")
	last := lastUserTurn(messages)
	// Reasoning before the last user message is not rendered, and developer messages there make the engine fail.
	if thinking && (d.sglang || roleOf(messages[len(messages)-1]) == "user") {
		for i := range last {
			switch roleOf(messages[i]) {
			case "user", "system", "tool", "assistant":
			default:
				return dst, refuse("Index %d out of range for messages list of length %d", len(messages)-1, len(messages)-1)
			}
		}
	}
	dst = append(dst, dsBegin...)
	of := -1
	for i := range messages {
		if dst, err = d.message(dst, c, messages, i, of, last, thinking); err != nil {
			return dst, err
		}
		if roleOf(messages[i]) != "tool" {
			of = i
		}
	}
	return dst, nil
}

// fails refuses messages on which the engine's code raises an exception.
func (d deepseekV32) fails(reason string) error {
	if d.sglang {
		return &Refusal{Status: 500, Reason: "Internal server error: " + reason}
	}
	return &Refusal{Status: 400, Reason: reason}
}

func (d deepseekV32) thought(msg *jinja.Dict) string {
	if d.sglang {
		return text(msg, "reasoning_content")
	}
	return thought(msg)
}

// message appends message i. of is the index of the last message before it whose role is not tool, -1 if there is none;
// it has the calls that a tool's message answers.
func (d deepseekV32) message(dst []byte, c *Chat, messages []jinja.Value, i, of, last int, thinking bool) ([]byte, error) {
	if err := c.stopped(); err != nil {
		return dst, err
	}
	msg, _ := messages[i].AsDict()
	content := text(msg, "content")
	tools, err := toolsOf(msg)
	if err != nil {
		return dst, err
	}
	think := func(now bool) {
		if now && thinking {
			dst = append(dst, thinkStart...)
		} else {
			dst = append(dst, thinkEnd...)
		}
	}
	switch role := text(msg, "role"); role {
	case "system":
		dst = append(dst, content...)
		if len(tools) > 0 {
			dst, err = appendDSMLTools(dst, c, v32Tools, tools)
		}
	case "developer":
		if content == "" {
			return dst, refuse("Invalid message for role `developer`")
		}
		dst = append(dst, dsUser...)
		if len(tools) > 0 {
			if dst, err = appendDSMLTools(dst, c, v32Tools, tools); err != nil {
				return dst, err
			}
		}
		dst = append(append(append(dst, "\n\n# The user's message is: "...), content...), dsAssistant...)
		think(i == last)
	case "user":
		dst = append(append(append(dst, dsUser...), content...), dsAssistant...)
		think(i == last)
	case "tool":
		if i > 0 && (of < 0 || roleOf(messages[of]) != "assistant") {
			return dst, refuse("Invalid messages at %d", i)
		}
		caller, _ := messages[(of+len(messages))%len(messages)].AsDict() // -1: the last message, as in Python
		calls, _ := member(caller, "tool_calls").AsList()
		if len(calls) < i-of {
			return dst, refuse("No tool calls but found tool output")
		}
		if i-of == 1 {
			dst = append(dst, "\n\n<function_results>"...)
		}
		dst = append(append(append(dst, "\n<result>"...), content...), "</result>"...)
		if i-of == len(calls) {
			dst = append(dst, "\n</function_results>\n\n"...)
			think(i >= last)
		}
	case "assistant":
		calls, _ := member(msg, "tool_calls").AsList()
		if thinking && i > last {
			said := d.thought(msg)
			if said == "" && len(calls) == 0 {
				return dst, refuse("ThinkingMode: thinking, invalid message without reasoning/tool_calls after last user message")
			}
			dst = append(append(dst, said...), thinkEnd...)
		}
		dst = append(dst, content...)
		if len(calls) > 0 {
			if dst, err = appendDSMLCalls(dst, c, "function_calls", calls); err != nil {
				return dst, err
			}
		}
		dst = append(dst, dsEnd...)
	default:
		return dst, d.fails("Invalid role: " + role)
	}
	return dst, err
}

//go:embed deepseek_v32_tools.txt
var v32Tools string

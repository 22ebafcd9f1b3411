package encoders

import (
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// deepseekV32 is vllm/tokenizers/deepseek_v32.py.
type deepseekV32 struct{}

func newDeepseekV32(*bpe.Tokenizer) (Encoder, error) { return deepseekV32{}, nil }

func (deepseekV32) Traits() Traits { return Traits{Name: "deepseek_v32", Messages: Joined} }

func (deepseekV32) Append(dst []byte, c *Chat) (_ []byte, err error) {
	messages := c.Messages
	if len(c.Tools) > 0 {
		messages = append([]jinja.Value{withTools(nil, c.Tools)}, messages...)
	}
	if len(messages) == 0 {
		return dst, &Refusal{Status: 400, Reason: "list index out of range"}
	}
	thinking := truth(c.Args, "thinking") || truth(c.Args, "enable_thinking")
	last := lastUserTurn(messages)
	// Thoughts before the last user message are not rendered, and developer messages there make the
	// engine fail.
	if thinking && roleOf(messages[len(messages)-1]) == "user" {
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
		if dst, err = v32Message(dst, c, messages, i, of, last, thinking); err != nil {
			return dst, err
		}
		if roleOf(messages[i]) != "tool" {
			of = i
		}
	}
	return dst, nil
}

// v32Message appends message i. of is the index of the last message before it that is not a
// tool's, -1 if there is none: it has the calls of a tool's message.
func v32Message(dst []byte, c *Chat, messages []jinja.Value, i, of, last int, thinking bool) ([]byte, error) {
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
			said := thought(msg)
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
		return dst, refuse("Invalid role: %s", role)
	}
	return dst, err
}

const v32Tools = `## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
`

package enginesim

import (
	"strings"
	"time"
)

// chatFormat is how a model family spells a conversation.
type chatFormat struct {
	name string
	// marks are tokens that only this family's vocabulary has.
	marks []string
	write func(c *chat) (string, error)
}

// chatFormats are written down by hand from the families' templates. All but Qwen3's print plain messages only: of tools
// and tool calls they say that they cannot.
var chatFormats = []*chatFormat{
	{"qwen3", []string{"<|im_start|>", "<think>"}, writeQwen},
	{"deepseek_v3", []string{"<｜User｜>", "<｜Assistant｜>"}, writeDeepSeek},
	{"gptoss", []string{"<|start|>", "<|channel|>"}, writeHarmony},
	{"mistral_nemo", []string{"[INST]", "[TOOL_CALLS]"}, nemo.write},
	{"mistral_7b", []string{"<0x0A>", "<s>"}, mistral.write},
	{"plain", nil, writePlain},
}

// formatOf finds the family by the tokens of its vocabulary; one that is not known is written plainly.
func formatOf(vocab map[string]int32) *chatFormat {
next:
	for _, f := range chatFormats {
		for _, mark := range f.marks {
			if _, ok := vocab[mark]; !ok {
				continue next
			}
		}
		return f
	}
	return chatFormats[len(chatFormats)-1]
}

// ChatFormat names the family whose chats this tokenizer's engine writes: qwen3, deepseek_v3, gptoss, mistral_nemo,
// mistral_7b, or plain, which is one line a message and no model's own.
func (t *Tokenizer) ChatFormat() string { return t.format.name }

// PlainTemplate is the chat template that the format plain follows.
const PlainTemplate = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"

func writePlain(c *chat) (string, error) {
	if err := c.onlyText(); err != nil {
		return "", err
	}
	var b strings.Builder
	for _, m := range c.messages {
		b.WriteString(m.text("role") + ": " + m.text("content") + "\n")
	}
	if c.generate {
		b.WriteString("assistant:")
	}
	return b.String(), nil
}

// onlyText refuses what the formats of plain messages do not print.
func (c *chat) onlyText() error {
	if len(c.tools) > 0 {
		return badRequest("this model's chat format takes no tools")
	}
	for _, m := range c.messages {
		if _, ok := m.get("tool_calls"); ok || m.text("role") == "tool" {
			return badRequest("this model's chat format takes no tool calls")
		}
	}
	return nil
}

// writeDeepSeek gathers all system messages in front of the turns.
func writeDeepSeek(c *chat) (string, error) {
	if err := c.onlyText(); err != nil {
		return "", err
	}
	var system []string
	var turns strings.Builder
	for _, m := range c.messages {
		switch m.text("role") {
		case "system":
			system = append(system, m.text("content"))
		case "user":
			turns.WriteString("<｜User｜>" + m.text("content"))
		case "assistant":
			turns.WriteString("<｜Assistant｜>" + m.text("content") + "<｜end▁of▁sentence｜>")
		}
	}
	if c.generate {
		turns.WriteString("<｜Assistant｜>")
	}
	return "<｜begin▁of▁sentence｜>" + strings.Join(system, "\n\n") + turns.String(), nil
}

// writeHarmony is what gpt-oss's template prints, with today's date as the engine's clock has it.
func writeHarmony(c *chat) (string, error) {
	if err := c.onlyText(); err != nil {
		return "", err
	}
	effort := c.effort
	if effort == "" {
		effort = "medium"
	}
	var b strings.Builder
	part := func(head, text, end string) { b.WriteString("<|start|>" + head + "<|message|>" + text + end) }
	part("system", "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: "+
		time.Now().Format(time.DateOnly)+"\n\nReasoning: "+effort+
		"\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.", "<|end|>")
	for i, m := range c.messages {
		content := m.text("content")
		switch role := m.text("role"); {
		case i == 0 && (role == "system" || role == "developer"):
			if content != "" {
				part("developer", "# Instructions\n\n"+content+"\n\n", "<|end|>")
			}
		case role == "user":
			part("user", content, "<|end|>")
		case role == "assistant":
			end := "<|end|>"
			if i == len(c.messages)-1 && !c.generate {
				end = "<|return|>"
			}
			part("assistant<|channel|>final", content, end)
		}
	}
	if c.generate {
		b.WriteString("<|start|>assistant")
	}
	return b.String(), nil
}

// instructTurns takes a leading system message off and asks for turns of user and assistant.
func (c *chat) instructTurns() (system string, given bool, turns []object, err error) {
	if err := c.onlyText(); err != nil {
		return "", false, nil, err
	}
	turns = c.messages
	if turns[0].text("role") == "system" {
		system, given, turns = turns[0].text("content"), true, turns[1:]
	}
	for i, m := range turns {
		role := m.text("role")
		if (role == "user") != (i%2 == 0) || role != "user" && role != "assistant" {
			return "", false, nil, badRequest("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...")
		}
	}
	return system, given, turns, nil
}

// instruct is the dialect of a Mistral: what stands around a question, and before an answer, and whether the system message
// leads the first question or the last one.
type instruct struct {
	open, shut, answer string
	first              bool
}

var (
	nemo    = instruct{open: "[INST]", shut: "[/INST]"}
	mistral = instruct{open: "[INST] ", shut: " [/INST]", answer: " ", first: true}
)

func (d instruct) write(c *chat) (string, error) {
	system, given, turns, err := c.instructTurns()
	if err != nil {
		return "", err
	}
	leads := len(turns) - 1
	if d.first {
		leads = 0
	}
	var b strings.Builder
	b.WriteString("<s>")
	for i, m := range turns {
		content := m.text("content")
		if m.text("role") == "assistant" {
			b.WriteString(d.answer + content + "</s>")
			continue
		}
		if given && i == leads {
			content = system + "\n\n" + content
		}
		b.WriteString(d.open + content + d.shut)
	}
	return b.String(), nil
}

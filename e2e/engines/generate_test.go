package engines

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// pieces are what odd texts are made of.
var pieces = []string{"the", " quick", "\n", "\n\n", "\t", "  ", " ", "'s", "'LL", "I'm", "é", "e\u0301", "ﬁ", "Å", "東京", "日本語", "한국어", "שלום", "हिन्दी",
	"ไทย", "🙂", "👩‍👩‍👧", "🇩🇪", "\u200b", "\u00a0", "\u3000", "\r\n", "0", "42", "123456", "3.14", "{", "}", "\"", "\\", "</b>", "&amp;", "://", "_x", "$%^",
	"<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>", "<|im", "Straße", "İ", "ſ", "\u0007", "\ufeff", "½", "Ⅷ", "x\u0327"}

func random(seed int) *rand.Rand { return rand.New(rand.NewPCG(uint64(seed), 77)) }

func oddText(seed int) string {
	r := random(seed)
	var b strings.Builder
	for range 1 + r.IntN(14) {
		b.WriteString(pieces[r.IntN(len(pieces))])
	}
	return b.String()
}

// oddRequest makes a chat request of what clients send: roles, parts, tools and their calls, reasoning, switches of the
// template.
func oddRequest(seed int) m {
	r := random(1000 + seed)
	one := func(n int) bool { return r.IntN(n) == 0 }
	text := func() string { return oddText(r.IntN(1 << 20)) }
	content := func() any {
		if !one(4) {
			return text()
		}
		var parts []m
		for range 1 + r.IntN(3) {
			parts = append(parts, m{"type": "text", "text": text()})
		}
		return parts
	}
	tool := func(n int) m {
		function := m{"name": fmt.Sprintf("tool_%d", n), "description": text(), "parameters": m{"type": "object", "properties": m{
			"city": m{"type": "string", "description": text()}, "days": m{"type": "integer", "default": 1e5}, "ratio": m{"type": "number", "maximum": 1.5}},
			"required": []string{"city"}}}
		if one(3) {
			delete(function, "description")
		}
		return m{"type": "function", "function": function}
	}
	var messages []m
	if one(2) {
		messages = append(messages, m{"role": "system", "content": content()})
	}
	for turn := range 1 + r.IntN(4) {
		messages = append(messages, m{"role": "user", "content": content()})
		if one(3) && turn > 0 {
			continue
		}
		reply := assistant(text())
		if one(4) {
			reply["reasoning_content"] = text()
		}
		if one(4) {
			id := fmt.Sprintf("call_%d", turn)
			arguments := fmt.Sprintf(`{"city": %s, "days": %d, "ratio": 1.0, "nested": {"a": [1, 2.50, null, true]}}`, encode(text()), r.IntN(9))
			reply["tool_calls"] = []m{{"id": id, "type": "function", "function": m{"name": "tool_0", "arguments": arguments}}}
			if one(2) {
				reply["content"] = nil
			}
			messages = append(messages, reply, m{"role": "tool", "tool_call_id": id, "content": text()})
			continue
		}
		messages = append(messages, reply)
	}
	if !one(6) {
		messages = append(messages, user(text()))
	}
	body := m{"model": modelName, "messages": messages}
	if one(3) {
		var tools []m
		for n := range 1 + r.IntN(3) {
			tools = append(tools, tool(n))
		}
		body["tools"] = tools
	}
	if one(4) {
		body["chat_template_kwargs"] = m{"enable_thinking": one(2)}
	}
	if one(8) {
		body["messages"] = append(messages, m{"role": []string{"developer", "wizard", "function"}[r.IntN(3)], "content": text()})
	}
	return body
}

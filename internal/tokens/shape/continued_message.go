package shape

import (
	"slices"
	"strings"
	"unicode"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// continueTag is the tag with which transformers' apply_chat_template continues the final message (utils/chat_template_utils.py):
// it appends the tag to the message's text, renders the prompt and cuts it where the tag appears.
const continueTag = "CONTINUE_FINAL_MESSAGE_TAG "

// markContinued appends the tag to the text of the last message and returns the original text.
func markContinued(messages []jinja.Value) (final string, err error) {
	if len(messages) == 0 {
		return "", refuse("list index out of range")
	}
	at := len(messages) - 1
	last, ok := messages[at].AsDict()
	if !ok {
		return "", refuse("messages: input should be a valid dictionary")
	}
	content, _ := last.Get("content")
	if text, ok := content.AsString(); ok {
		messages[at] = with(last, "content", jinja.String(text+continueTag))
		return text, nil
	}
	parts, ok := content.AsList()
	if !ok {
		return "", refuse(`continue_final_message is set but the final message has no "content" to continue!`)
	}
	parts = slices.Clone(parts)
	for i := len(parts) - 1; i >= 0; i-- {
		part, ok := parts[i].AsDict()
		if !ok {
			continue
		}
		if text, has, _ := textOf(part, "text"); has {
			parts[i] = with(part, "text", jinja.String(text+continueTag))
			messages[at] = with(last, "content", jinja.List(parts))
			return text, nil
		}
	}
	return "", refuse("continue_final_message is set but we could not find any text to continue in the final message!")
}

// cutContinued returns the length of the rendered prompt up to the end of the continued message.
// It fails if the template changed the message's text.
func cutContinued(rendered, final string) (int, error) {
	bare := strings.TrimRight(continueTag, " ")
	at := strings.LastIndex(rendered, bare)
	if at < 0 || !strings.Contains(rendered, strings.TrimFunc(final, pythonSpace)) {
		return 0, refuse("continue_final_message is set but the final message does not appear in the chat after applying the chat template! " +
			"This can happen if the chat template deletes portions of the final message. Please verify the chat template and final " +
			"message in your chat to ensure they are compatible.")
	}
	if strings.HasPrefix(rendered[at:], continueTag) {
		return at, nil
	}
	return len(strings.TrimRightFunc(rendered[:at], pythonSpace)), nil
}

// pythonSpace is Python's str.isspace for one character.
func pythonSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

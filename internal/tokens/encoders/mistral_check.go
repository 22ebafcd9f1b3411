package encoders

import (
	"regexp"
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// check refuses what mistral-common's validator of the version refuses in its test mode, which vLLM uses.
func (m *mistral) check(messages []mistralMessage, c *Chat) error {
	if err := m.checkOrder(messages); err != nil {
		return err
	}
	if err := m.checkResults(messages); err != nil {
		return err
	}
	if err := m.checkAudio(messages); err != nil {
		return err
	}
	for i := range messages {
		if err := m.checkContent(&messages[i]); err != nil {
			return err
		}
	}
	schemas := schemaChecker{chat: c}
	for i := range c.Tools {
		tool, _ := c.Tools[i].AsDict()
		f := dictAt(tool, "function")
		if parameters := dictAt(f, "parameters"); parameters != nil {
			if err := schemas.schema(jinja.FromDict(parameters)); err != nil {
				return err
			}
		}
		if err := checkName(text(f, "name")); err != nil {
			return err
		}
	}
	return nil
}

// mistralNext are the roles that may follow a role.
var mistralNext = map[string][]string{"system": {"user", "assistant", "system"}, "user": {"assistant", "system", "user"},
	"assistant": {"assistant", "user", "tool"}, "tool": {"assistant", "tool", "user"}}

func (m *mistral) checkOrder(messages []mistralMessage) error {
	first, last := &messages[0], &messages[len(messages)-1]
	switch {
	case len(messages) == 1 && first.role != "user" && first.role != "system":
		return refuse("Conversation must start with a user message or system message")
	case len(messages) > 1 && last.role == "assistant" && !last.prefix:
		return refuse("Expected last role User or Tool (or Assistant with prefix) for serving but got assistant")
	}
	for i := 1; i < len(messages); i++ {
		if !slices.Contains(mistralNext[messages[i-1].role], messages[i].role) {
			return refuse("Unexpected role '%s' after role '%s'", messages[i].role, messages[i-1].role)
		}
	}
	return nil
}

// checkResults compares results with calls. The first message does not count.
func (m *mistral) checkResults(messages []mistralMessage) error {
	wanted, seen := 0, 0
	answered := map[string]bool{} // by the id of a call, from version 11
	for i := 1; i < len(messages); i++ {
		switch msg := &messages[i]; msg.role {
		case "tool":
			seen++
			if m.version < 11 {
				continue
			}
			if msg.id == nil {
				return refuse("Unexpected tool call id None in tool results")
			}
			if before, ok := answered[*msg.id]; before || !ok {
				return refuse("Unexpected or duplicate tool call id %s in tool results", *msg.id)
			}
			answered[*msg.id] = true
		case "assistant":
			if wanted != seen {
				return refuse("Not the same number of function calls and responses")
			}
			wanted, seen = len(msg.calls), 0
			clear(answered)
			for _, call := range msg.calls {
				if _, ok := answered[call.id]; ok && m.version >= 11 {
					return refuse("Duplicate tool call id %s in assistant message", call.id)
				}
				answered[call.id] = false
			}
		}
	}
	return nil
}

// checkAudio refuses a system message in a conversation with audio; from version 13 on this is allowed.
func (m *mistral) checkAudio(messages []mistralMessage) error {
	system, audio := false, false
	for i := range messages {
		system = system || messages[i].role == "system"
		audio = audio || slices.ContainsFunc(messages[i].contents[0], func(c mistralChunk) bool { return messages[i].role == "user" && c.kind == chunkAudio })
	}
	if system && audio && (m.version == 7 || m.version == 11) {
		return refuse("System messages are not yet allowed when audio is present")
	}
	return nil
}

func (m *mistral) checkContent(msg *mistralMessage) error {
	accepted := []string{chunkText}
	switch msg.role {
	case "user":
		if m.version >= 3 {
			accepted = append(accepted, chunkImage)
		}
		if m.version >= 7 {
			accepted = append(accepted, chunkAudio)
		}
	case "system":
		if m.version >= 7 {
			accepted = append(accepted, chunkAudio)
		}
		if m.version >= 7 && m.version < 15 {
			accepted = append(accepted, chunkThink)
		}
	case "assistant":
		if m.version >= 11 {
			accepted = append(accepted, chunkThink)
		}
	case "tool":
		if m.version >= 15 {
			accepted = append(accepted, chunkImage, chunkAudio)
		}
	}
	if err := msg.only(accepted); err != nil {
		return err
	}
	switch msg.role {
	case "assistant":
		if m.version < 7 && msg.said() == (len(msg.calls) > 0) {
			return refuse("Assistant message must have either content or tool_calls, but not both.")
		}
		for _, call := range msg.calls {
			if err := m.checkID(&call.id); err != nil {
				return err
			}
			if err := checkName(call.name); err != nil {
				return err
			}
		}
	case "tool":
		if msg.name != nil {
			if err := checkName(*msg.name); err != nil {
				return err
			}
		}
		return m.checkID(msg.id)
	}
	return nil
}

// Python's $, unlike Go's, also matches before a final line feed.
var (
	mistralName   = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}\n?$`)
	mistralCallID = regexp.MustCompile(`^[a-zA-Z0-9]{9}\n?$`)
)

func checkName(name string) error {
	if !mistralName.MatchString(name) {
		return refuse("Function name was %s but must be a-z, A-Z, 0-9, or contain underscores and dashes, with a maximum length of 64.", name)
	}
	return nil
}

func (m *mistral) checkID(id *string) error {
	switch {
	case m.version < 3:
	case id == nil || *id == "null" || *id == "":
		return refuse("Tool call id has to be defined.")
	case m.version < 13 && !mistralCallID.MatchString(*id):
		return refuse("Tool call id was %s but must be a-z, A-Z, 0-9, with a length of 9.", *id)
	}
	return nil
}

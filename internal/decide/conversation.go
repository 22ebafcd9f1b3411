package decide

import (
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// Names by which agents mark their sessions, in addition to routing.conversation_headers and body.ConversationFields.
// Clients set all of them and can only influence their own routing.
const (
	// claudeSession names a session of Claude Code; its subagents add their own id (code.claude.com/docs, "LLM
	// gateway"; Dynamo reads both in the same way).
	claudeSession, claudeAgent = "x-claude-code-session-id", "x-claude-code-agent-id"
	// sessionFinal is "true" on the last request of a session (Dynamo's documentation 1.5,
	// "Session IDs"), agentContext the same in bodies.
	sessionFinal, agentContext = "x-dynamo-session-final", "agent_context"
)

// conversation returns the id in the body, else in the first header that has one, else in a
// field of the body that is less exact.
func (j *job) conversation(req *body.Request) string {
	if id, _ := req.ConversationID(body.ConversationFields); id != "" {
		return id
	}
	for _, name := range j.d.live.Load().Routing.Headers {
		id := j.header(name)
		if id == "" {
			continue
		}
		if agent := j.header(claudeAgent); name == claudeSession && agent != "" {
			return id + "/" + agent
		}
		return id
	}
	if id, _ := req.ConversationID(body.LooseConversationFields); id != "" {
		return id
	}
	id, _ := req.ConversationID([]string{"metadata.user_id"})
	return body.SessionOfUser(id)
}

// final reports whether the request is the last of its conversation.
func (j *job) final(req *body.Request) bool {
	return j.header(sessionFinal) == "true" || req != nil && string(body.Member(body.Member(req.Get("nvext"), agentContext), "session_final")) == "true"
}

// header is a request header without spaces around it, "" if there is none.
func (j *job) header(name string) string {
	v, _ := j.r.Header(name)
	return strings.TrimSpace(v)
}

package jinja

import "slices"

// ContentFormat returns the content format that vLLM detects for the template: "openai" if it iterates over the parts
// of a message's content, else "string". It detects a loop over message["content"], where message is the variable of a
// loop over messages, and (since vLLM PR 42660) a loop over a variable named content.
func (t *Template) ContentFormat() string {
	root := t.root
	messages := []string{"messages"}
	// a variable that was assigned from messages counts as messages too
	for i := 0; i < len(messages); i++ {
		root.walk(func(n *node) {
			if n.kind == nodeAssign && n.a.kind == nodeName && accesses(n.b, messages[i], "") && !slices.Contains(messages, n.a.name) && len(messages) < 1000 {
				messages = append(messages, n.a.name)
			}
		})
	}
	var message []string
	for _, loop := range loops(root) {
		for _, name := range messages {
			if accesses(loop.b, name, "") {
				if loop.a.kind != nodeName {
					return "string" // vLLM's own check fails here
				}
				message = append(message, loop.a.name)
				break
			}
		}
	}
	for _, loop := range loops(root) {
		found := loop.b.kind == nodeName && loop.b.name == "content"
		for _, name := range message {
			found = found || accesses(loop.b, name, "content")
		}
		if found {
			if loop.a.kind != nodeName {
				return "string"
			}
			return "openai"
		}
	}
	return "string"
}

func loops(root *node) []*node {
	var out []*node
	root.walk(func(n *node) {
		if n.kind == nodeFor {
			out = append(out, n)
		}
	})
	return out
}

// accesses reports whether n reads the variable name, possibly through filters, tests and slices;
// with a non-empty key, whether it reads that key of the variable.
func accesses(n *node, name, key string) bool {
	switch {
	case n == nil:
		return false
	case n.kind == nodeFilter || n.kind == nodeTest || n.kind == nodeGetitem && n.b.kind == nodeSlice:
		return accesses(n.a, name, key)
	case key == "":
		return n.reads(name)
	case n.kind == nodeGetitem:
		return n.a.reads(name) && n.b.kind == nodeConst && n.b.value.kind == KindString && n.b.value.str() == key
	case n.kind == nodeGetattr:
		return n.a.reads(name) && n.name == key
	}
	return false
}

package encoders

import (
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// What DeepSeek's formats share.
const (
	dsBegin     = "<｜begin▁of▁sentence｜>"
	dsEnd       = "<｜end▁of▁sentence｜>"
	dsUser      = "<｜User｜>"
	dsAssistant = "<｜Assistant｜>"
	dsmlToken   = "｜DSML｜"
	thinkStart  = "<think>"
	thinkEnd    = "</think>"
)

// appendDSMLCalls appends tool calls in a block of this name; a leading space of it precedes the inner names, too.
func appendDSMLCalls(dst []byte, c *Chat, block string, calls []jinja.Value) (_ []byte, err error) {
	invoke, parameter := dsmlToken+"invoke", dsmlToken+"parameter"
	if block[0] == ' ' {
		invoke, parameter = dsmlToken+" invoke", dsmlToken+" parameter"
	}
	dst = append(dst, "\n\n<"+dsmlToken+block+">\n"...)
	for i := range calls {
		if err = c.stopped(); err != nil {
			return dst, err
		}
		call, _ := calls[i].AsDict()
		f := dictAt(call, "function")
		arguments := dictAt(f, "arguments")
		if arguments == nil {
			return dst, refuse("Assistant tool call function.arguments must be a JSON object.")
		}
		dst = append(jinja.AppendStr(append(dst, "<"+invoke+` name="`...), member(f, "name")), "\">\n"...)
		sep := ""
		arguments.Range(func(k, v jinja.Value) bool {
			key, _ := k.AsString()
			s, isText := v.AsString()
			kind := "false"
			if isText {
				kind = "true"
			}
			dst = append(append(dst, sep+"<"+parameter+` name="`...), key...)
			dst = append(dst, `" string="`+kind+`">`...)
			if isText {
				dst = append(dst, s...)
			} else {
				dst, err = appendJSON(dst, v)
			}
			dst = append(dst, "</"+parameter+">"...)
			sep = "\n"
			return err == nil
		})
		if err != nil {
			return dst, err
		}
		dst = append(dst, "\n</"+invoke+">\n"...)
	}
	return append(dst, "</"+dsmlToken+block+">"...), nil
}

// appendDSMLTools appends a section about tools; the schemas, one per line, replace %s.
func appendDSMLTools(dst []byte, c *Chat, section string, tools []jinja.Value) (_ []byte, err error) {
	head, tail, _ := strings.Cut(section, "%s")
	dst = append(append(dst, "\n\n"...), head...)
	for i := range tools {
		if err = c.stopped(); err != nil {
			return dst, err
		}
		if i > 0 {
			dst = append(dst, '\n')
		}
		tool, _ := tools[i].AsDict()
		f, ok := tool.Get("function")
		if !ok {
			return dst, refuse("'function'")
		}
		if dst, err = appendJSON(dst, f); err != nil {
			return dst, err
		}
	}
	return append(dst, tail...), nil
}

// toolsOf returns the tools of a message, nil if it has none.
func toolsOf(msg *jinja.Dict) ([]jinja.Value, error) {
	v := member(msg, "tools")
	tools, ok := v.AsList()
	if !ok && v.Truth() {
		return nil, refuse("tools: the object is not a list of tools")
	}
	return tools, nil
}

// withTools returns a copy of a message, or a new system message, that has the tools.
func withTools(msg *jinja.Dict, tools []jinja.Value) jinja.Value {
	if msg == nil {
		msg = jinja.NewDict(2)
		msg.Set("role", jinja.String("system"))
	} else {
		msg = msg.Clone()
	}
	msg.Set("tools", jinja.List(tools))
	return jinja.FromDict(msg)
}

// lastUserTurn returns the index of the last message of a user or developer, -1 if there is none.
func lastUserTurn(messages []jinja.Value) int {
	for i, v := range slices.Backward(messages) {
		if role := roleOf(v); role == "user" || role == "developer" {
			return i
		}
	}
	return -1
}

func roleOf(v jinja.Value) string {
	msg, _ := v.AsDict()
	return text(msg, "role")
}

// truth reports whether the value of an argument is true in Python.
func truth(args *jinja.Dict, key string) bool {
	v, ok := args.Get(key)
	return ok && v.Truth()
}

// thought returns the reasoning of a message as text; clients may send any JSON value.
func thought(msg *jinja.Dict) string {
	v := member(msg, "reasoning")
	if s, ok := v.AsString(); ok || !v.Truth() {
		return s
	}
	return string(jinja.AppendStr(nil, v))
}

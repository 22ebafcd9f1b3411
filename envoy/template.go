package envoy

import (
	"fmt"
	"strings"
	"text/template/parse"
)

// vars are the values of a template: texts, truths, and lists for range.
type vars map[string]any

// render executes the subset of Go's template language that the bootstrap uses, because the chart needs the same file:
// {{.Name}}, {{$.Name}}, if, else and range; anything else is an error.
//
// text/template would work, but it looks up methods by name, which makes the linker keep
// every exported method of every type: 6 MB of kvlane.
func render(text string, root vars) (string, error) {
	trees, err := parse.Parse("bootstrap", text, "", "")
	if err != nil {
		return "", err
	}
	r := renderer{root: root}
	if err := r.list(trees["bootstrap"].Root, root); err != nil {
		return "", err
	}
	return r.out.String(), nil
}

type renderer struct {
	root vars
	out  strings.Builder
}

func (r *renderer) list(list *parse.ListNode, dot vars) error {
	if list == nil { // no else
		return nil
	}
	for _, node := range list.Nodes {
		if err := r.node(node, dot); err != nil {
			return err
		}
	}
	return nil
}

func (r *renderer) node(node parse.Node, dot vars) error {
	switch n := node.(type) {
	case *parse.TextNode:
		r.out.Write(n.Text)
		return nil
	case *parse.ActionNode:
		if text, ok := r.value(n.Pipe, dot).(string); ok {
			r.out.WriteString(text)
			return nil
		}
	case *parse.IfNode:
		v := r.value(n.Pipe, dot)
		truth, isTruth := v.(bool)
		text, isText := v.(string)
		if truth || text != "" {
			return r.list(n.List, dot)
		}
		if isTruth || isText {
			return r.list(n.ElseList, dot)
		}
	case *parse.RangeNode:
		if elements, ok := r.value(n.Pipe, dot).([]vars); ok && n.ElseList == nil {
			for _, element := range elements {
				if err := r.list(n.List, element); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return fmt.Errorf("template: %q is not understood", node)
}

// value returns nil for undefined names.
func (r *renderer) value(pipe *parse.PipeNode, dot vars) any {
	name := pipe.String()
	if outer, ok := strings.CutPrefix(name, "$."); ok {
		return r.root[outer]
	}
	return dot[strings.TrimPrefix(name, ".")]
}

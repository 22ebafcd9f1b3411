package config

import (
	"reflect"
	"slices"
	"strings"
)

// reloadable lists the keys that may change, with all keys below them, while Kvlane runs. The fixed ones among them do
// not: they size tables or are part of Envoy's bootstrap. A change of the tokenizing keys reloads the model.
var (
	reloadable = []string{"routing", "flow", "limits", "log", "explain", "slo", "models[].slo", "models[].disagg"}
	tokenizing = []string{
		"models[].tokenizer", "models[].tokenizer_lock", "models[].chat_template", "models[].tool_parser", "models[].hide_tools_when_none",
		"models[].trust_request_templates", "models[].multimodal", "models[].max_model_len", "models[].check",
	}
	fixed = []string{"routing.speculate", "routing.max_conversations", "routing.max_prefix_blocks", "routing.node", "limits.max_body", "limits.max_streams"}
)

// Changes returns the keys in which next differs: those that can change while Kvlane runs, and those that need a
// restart. Models are matched by name; paths are those in next.
func (c *Config) Changes(next *Config) (live []string, restart ProblemsError) {
	now, kept := *c, 0
	now.Models = slices.Clone(next.Models)
	for i := range now.Models {
		if at := slices.IndexFunc(c.Models, func(m Model) bool { return m.Name == now.Models[i].Name }); at >= 0 {
			now.Models[i] = c.Models[at]
			kept++
		} else {
			live = append(live, item("models", i))
		}
	}
	if kept < len(c.Models) {
		live = append(live, "models")
	}
	// With several models pods are asked which of them they serve.
	if c.Workers.Kubernetes != nil && (len(c.Models) > 1) != (len(next.Models) > 1) {
		live, restart = nil, ProblemsError{{Path: "models", Message: "cannot change between one and several while Kvlane runs with workers.kubernetes: restart it"}}
	}
	for _, key := range differences(nil, "", reflect.ValueOf(&now).Elem(), reflect.ValueOf(next).Elem()) {
		general := index.ReplaceAllString(key, "[]")
		// Envoy's request_timeout depends on whether requests queue.
		queues := (key == "routing.wait.max_requests" || key == "flow.max_requests") && c.Waits() != next.Waits()
		if (within(general, reloadable) || within(general, tokenizing)) && !within(general, fixed) && !queues {
			live = append(live, key)
		} else {
			restart = append(restart, Problem{Path: key, Message: "cannot change while Kvlane runs: restart it"})
		}
	}
	return live, restart
}

// Retokenizes reports whether model i must be loaded again if these keys have changed.
func Retokenizes(i int, keys []string) bool {
	return slices.ContainsFunc(keys, func(key string) bool {
		rest, ok := strings.CutPrefix(key, item("models", i))
		return ok && within("models[]"+rest, tokenizing)
	})
}

// within reports whether a key is one of list or below one.
func within(key string, list []string) bool {
	return slices.ContainsFunc(list, func(k string) bool {
		rest, ok := strings.CutPrefix(key, k)
		return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
	})
}

// differences appends the keys in which two values differ.
func differences(keys []string, at string, a, b reflect.Value) []string {
	switch a.Kind() {
	case reflect.Struct:
		others := map[string]reflect.Value{}
		fields(b, func(f reflect.StructField, v reflect.Value) bool { others[f.Tag.Get("yaml")] = v; return true })
		fields(a, func(f reflect.StructField, v reflect.Value) bool {
			key := f.Tag.Get("yaml")
			keys = differences(keys, join(at, key), v, others[key])
			return true
		})
		return keys
	case reflect.Pointer:
		if !a.IsNil() && !b.IsNil() {
			return differences(keys, at, a.Elem(), b.Elem())
		}
	case reflect.Slice:
		if a.Len() == b.Len() {
			for i := range a.Len() {
				keys = differences(keys, item(at, i), a.Index(i), b.Index(i))
			}
			return keys
		}
	case reflect.Map:
		if a.Len() == 0 && b.Len() == 0 {
			return keys
		}
	}
	if !reflect.DeepEqual(a.Interface(), b.Interface()) {
		keys = append(keys, at)
	}
	return keys
}

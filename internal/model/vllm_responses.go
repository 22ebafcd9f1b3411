package model

import "github.com/kvlane/kvlane/internal/prompt"

// engineTools are types of tools that the engine runs itself.
var engineTools = map[string]bool{"web_search": true, "web_search_preview": true, "code_interpreter": true, "file_search": true, "mcp": true}

// vllmResponsesTools are the validators of ResponsesRequest (vllm/entrypoints/openai/responses/protocol.py) beside types.
func vllmResponsesTools(in input) error {
	if truthy(in.Get("background")) && in.Get("store") != nil && !truthy(in.Get("store")) {
		return refuse("background can only be used when `store` is true")
	}
	if given(in.Get("prompt")) {
		return refuse("prompt template is not supported")
	}
	tools, choice := in.Raw(prompt.FieldTools), in.Raw(prompt.FieldToolChoice)
	grammar, named, callable := false, false, false
	kind := prompt.Text(prompt.Member(choice, "type"))
	name := prompt.Text(prompt.Member(choice, "name"))
	prompt.EachItem(tools, func(tool []byte) {
		format := prompt.Member(tool, "format")
		grammar = grammar || prompt.Text(prompt.Member(tool, "type")) == "custom" && prompt.Text(prompt.Member(format, "type")) == "grammar"
		callable = callable || !engineTools[prompt.Text(prompt.Member(tool, "type"))]
		named = named || prompt.Text(prompt.Member(tool, "name")) == name || prompt.Text(prompt.Member(tool, "type")) == "namespace"
	})
	switch {
	case grammar:
		return refuse("Custom tools with a grammar format are not supported; only free-form text custom tools are accepted.")
	case !truthy(tools) && prompt.Text(choice) == "required":
		return refuse("Tool choice 'required' must be specified with 'tools' parameter.")
	case truthy(tools) && !callable && prompt.Text(choice) == "required":
		return refuse("tool_choice requires a function call, but tools contains no function tool the model can call.")
	case (kind == "function" || kind == "custom") && (!truthy(tools) || name == "" || !named):
		return refuse("Tool choice 'function' not found in 'tools' parameter.")
	}
	return nil
}

// completeItems is input_item_parsing: what items of the history may lack is filled in before their types are checked.
func completeItems(raw []byte) []byte {
	if len(raw) == 0 || raw[0] != '[' {
		return raw
	}
	out := []byte{'['}
	prompt.EachItem(raw, func(item []byte) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(out, completeItem(item)...)
	})
	return append(out, ']')
}

func completeItem(item []byte) []byte {
	if item[0] != '{' {
		return item
	}
	kind, content := prompt.Text(prompt.Member(item, "type")), prompt.Member(item, "content")
	isAnswer := kind == "message" && prompt.Text(prompt.Member(item, "role")) == roleAssistant && len(content) > 0 && content[0] == '['
	var edits []prompt.Edit
	if (kind == "reasoning" || isAnswer) && prompt.Member(item, "id") == nil {
		edits = append(edits, prompt.Set([]byte(`"x"`), "id"))
	}
	if isAnswer && prompt.Member(item, "status") == nil {
		edits = append(edits, prompt.Set([]byte(`"completed"`), "status"))
	}
	if isAnswer {
		parts := []byte{'['}
		prompt.EachItem(content, func(part []byte) {
			if len(parts) > 1 {
				parts = append(parts, ',')
			}
			if prompt.Text(prompt.Member(part, "type")) == "output_text" && prompt.Member(part, "annotations") == nil {
				parts = append(parts, `{"annotations":[],`...)
				part = part[1:]
			}
			parts = append(parts, part...)
		})
		edits = append(edits, prompt.Set(append(parts, ']'), "content"))
	}
	if edits == nil {
		return item
	}
	whole, err := prompt.Apply(nil, item, edits...)
	if err != nil {
		return item
	}
	return whole
}

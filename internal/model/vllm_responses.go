package model

import "github.com/kvlane/kvlane/internal/prompt"

// vllmResponsesTools are the validators of ResponsesRequest (vllm/entrypoints/openai/responses/protocol.py) beside types.
func vllmResponsesTools(in input) error {
	if truthy(in.Get("background")) && in.Get("store") != nil && !truthy(in.Get("store")) {
		return refuse("background can only be used when `store` is true")
	}
	if given(in.Get("prompt")) {
		return refuse("prompt template is not supported")
	}
	tools, choice := in.Raw(prompt.FieldTools), in.Raw(prompt.FieldToolChoice)
	grammar, named := false, false
	kind := prompt.Text(prompt.Member(choice, "type"))
	name := prompt.Text(prompt.Member(choice, "name"))
	prompt.EachItem(tools, func(tool []byte) {
		format := prompt.Member(tool, "format")
		grammar = grammar || prompt.Text(prompt.Member(tool, "type")) == "custom" && prompt.Text(prompt.Member(format, "type")) == "grammar"
		named = named || prompt.Text(prompt.Member(tool, "name")) == name || prompt.Text(prompt.Member(tool, "type")) == "namespace"
	})
	switch {
	case grammar:
		return refuse("Custom tools with a grammar format are not supported; only free-form text custom tools are accepted.")
	case !truthy(tools) && prompt.Text(choice) == "required":
		return refuse("Tool choice 'required' must be specified with 'tools' parameter.")
	case (kind == "function" || kind == "custom") && (!truthy(tools) || name == "" || !named):
		return refuse("Tool choice 'function' not found in 'tools' parameter.")
	}
	return nil
}

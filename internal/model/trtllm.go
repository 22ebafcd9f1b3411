package model

import (
	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

// trtllmChat follows trtllm-serve's /v1/chat/completions as its sources describe it; no recording of it exists here, so a
// Checker should confirm it. Text parts are joined with a line end, arguments are read into objects, tools are dumped as
// vLLM dumps them, and add_generation_prompt, documents, chat_template and chat_template_kwargs are passed on.
func (m *Model) trtllmChat(in input) (*plan, error) {
	list, haveTools, err := in.listOf(prompt.FieldTools)
	if err != nil {
		return nil, err
	}
	tools := make([]jinja.Value, 0, len(list))
	for i := range list {
		tool, err := vllmTool(list[i])
		if err != nil {
			return nil, err
		}
		tools = append(tools, tool)
	}
	template, err := m.templateFor(in, haveTools, TRTLLM)
	if err != nil {
		return nil, err
	}
	add, err := in.flag(prompt.FieldAddGenerationPrompt, true)
	if err != nil {
		return nil, err
	}
	p := &plan{template: template.compiled, brought: template.brought, dated: template.dated}
	if p.ids, p.haveIDs, err = in.givenIDs("prompt_token_ids"); p.haveIDs || err != nil {
		return p, err
	}
	shape := vllmShape{legacy: true, p: p}
	shown, err := m.shapeMessages(in, shape.kind(), p, shape.message)
	if err != nil {
		return nil, err
	}
	kwargs, err := in.dictOf(prompt.FieldChatTemplateKwargs)
	if err != nil {
		return nil, err
	}
	documents, err := in.value(prompt.FieldDocuments)
	if err != nil {
		return nil, err
	}
	p.vars = m.config.specialTokens()
	if kwargs != nil {
		rest(p.vars, kwargs)
	}
	p.vars.Set("messages", jinja.List(shown))
	p.vars.Set("tools", jinja.None())
	if haveTools {
		p.vars.Set("tools", jinja.List(tools))
	}
	p.vars.Set("documents", documents)
	p.vars.Set("add_generation_prompt", jinja.Bool(add))
	p.addSpecial, err = in.flag(prompt.FieldAddSpecialTokens, false)
	return p, err
}

// givenIDs reads a field that no other API has.
func (in input) givenIDs(name string) ([]uint32, bool, error) {
	raw := prompt.Member(in.Body, name)
	if len(raw) == 0 || raw[0] != '[' {
		return nil, false, nil
	}
	ids, err := prompt.AppendIDs(nil, raw)
	if err != nil {
		return nil, true, refuse("%s: %v", name, err)
	}
	return ids, true, nil
}

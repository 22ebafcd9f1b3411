package disagg

import (
	"github.com/kvlane/kvlane/internal/prompt"
)

// clean are the edits that take off what a client says of transfers: with it an engine
// would fetch blocks from, or write them to, wherever the client says. There are none
// for a client that says nothing, or is trusted. Sources of the fields: vLLM 0.32's
// request classes (extra_args is where its engine looks in the end), SGLang 0.5.23's,
// TensorRT-LLM's.
func (p *Protocol) clean(r *prompt.Request) []prompt.Edit {
	if p.options.Trust {
		return nil
	}
	edits := cleanID(r, p.addressesInID)
	if r.Span(prompt.FieldKVTransferParams).Present() {
		edits = append(edits, cleanParams(r.Raw(prompt.FieldKVTransferParams))...)
	}
	for _, f := range [...]prompt.Field{
		prompt.FieldECTransferParams, prompt.FieldDisaggregatedParams, prompt.FieldBootstrapHost, prompt.FieldBootstrapPort, prompt.FieldBootstrapRoom,
		prompt.FieldDisaggPrefillDPRank,
	} {
		if r.Span(f).Present() {
			edits = append(edits, remove(f.String()))
		}
	}
	for _, name := range [...]string{kvParams, prompt.FieldECTransferParams.String()} {
		if r.API == prompt.VLLMGenerate && prompt.Member(r.Member(prompt.FieldSamplingParams, "extra_args"), name) != nil {
			edits = append(edits, remove("sampling_params", "extra_args", name))
		}
		if r.Member(prompt.FieldVLLMXArgs, name) != nil {
			edits = append(edits, remove("vllm_xargs", name))
		}
	}
	return edits
}

// cleanParams leaves ids in the place of a prompt, which name nobody, where they are.
func cleanParams(own []byte) []prompt.Edit {
	ids := prompt.Member(own, "prompt_token_ids")
	if !present(ids) {
		return []prompt.Edit{remove(kvParams)}
	}
	others := false
	prompt.EachMember(own, func(key, _ []byte) { others = others || prompt.Text(key) != "prompt_token_ids" })
	if !others {
		return nil
	}
	return []prompt.Edit{set("{}", kvParams), prompt.Set(ids, kvParams, "prompt_token_ids")}
}

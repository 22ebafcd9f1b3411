package disagg

import (
	"bytes"

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
	for _, f := range peerFields {
		if r.Span(f).Present() {
			edits = append(edits, remove(f.String()))
		}
	}
	for _, name := range [...]string{kvParams, prompt.FieldECTransferParams.String()} {
		if (r.API == prompt.VLLMGenerate || r.API == prompt.Unknown) && prompt.Member(r.Member(prompt.FieldSamplingParams, "extra_args"), name) != nil {
			edits = append(edits, remove("sampling_params", "extra_args", name))
		}
		if r.Member(prompt.FieldVLLMXArgs, name) != nil {
			edits = append(edits, remove("vllm_xargs", name))
		}
	}
	if r.API == prompt.Unknown {
		edits = append(edits, cleanUnknown(r)...)
	}
	return edits
}

// cleanUnknown is for APIs whose ranks nobody replaces, and for SGLang's
// /vertex_generate, which takes the fields of /generate in "parameters".
func cleanUnknown(r *prompt.Request) (edits []prompt.Edit) {
	ranks := []prompt.Field{prompt.FieldRoutedDPRank, prompt.FieldDataParallelRank}
	for _, f := range ranks {
		if r.Span(f).Present() {
			edits = append(edits, remove(f.String()))
		}
	}
	parameters := prompt.Member(bytes.TrimLeft(r.Body, " \t\r\n"), "parameters")
	for _, f := range append(ranks, peerFields[:]...) {
		if prompt.Member(parameters, f.String()) != nil {
			edits = append(edits, remove("parameters", f.String()))
		}
	}
	return edits
}

// peerFields tell an engine, beside kv_transfer_params, where its peer is: SGLang's,
// but for the first two.
var peerFields = [...]prompt.Field{
	prompt.FieldECTransferParams, prompt.FieldDisaggregatedParams, prompt.FieldBootstrapHost, prompt.FieldBootstrapPort, prompt.FieldBootstrapRoom,
	prompt.FieldDisaggPrefillDPRank, prompt.FieldBootstrapPairKey, prompt.FieldDecodeTPSize, prompt.FieldHTTPWorkerIPC,
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

package disagg

import (
	"bytes"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// clean are the edits that take off what a client says of transfers: with it an engine
// would fetch blocks from, or write them to, wherever the client says. There are none
// for a client that says nothing, or is trusted. Sources of the fields: vLLM 0.32's
// request classes (extra_args is where its engine looks in the end), SGLang 0.5.23's,
// TensorRT-LLM's.
func (p *Protocol) clean(r *body.Request) []body.Edit {
	if p.options.Trust {
		return nil
	}
	edits := cleanID(r, p.addressesInID)
	if r.Span(body.FieldKVTransferParams).Present() {
		edits = append(edits, cleanParams(r.Raw(body.FieldKVTransferParams))...)
	}
	for _, f := range peerFields {
		if r.Span(f).Present() {
			edits = append(edits, remove(f.String()))
		}
	}
	for _, name := range [...]string{kvParams, body.FieldECTransferParams.String()} {
		if (r.API == body.VLLMGenerate || r.API == body.Unknown) && body.Member(r.Member(body.FieldSamplingParams, "extra_args"), name) != nil {
			edits = append(edits, remove("sampling_params", "extra_args", name))
		}
		if r.Member(body.FieldVLLMXArgs, name) != nil {
			edits = append(edits, remove("vllm_xargs", name))
		}
	}
	if r.API == body.Unknown {
		edits = append(edits, cleanUnknown(r)...)
	}
	return edits
}

// cleanUnknown is for APIs whose ranks nobody replaces, and for SGLang's
// /vertex_generate, which takes the fields of /generate in "parameters".
func cleanUnknown(r *body.Request) (edits []body.Edit) {
	ranks := []body.Field{body.FieldRoutedDPRank, body.FieldDataParallelRank}
	for _, f := range ranks {
		if r.Span(f).Present() {
			edits = append(edits, remove(f.String()))
		}
	}
	parameters := body.Member(bytes.TrimLeft(r.Body, " \t\r\n"), "parameters")
	for _, f := range append(ranks, peerFields[:]...) {
		if body.Member(parameters, f.String()) != nil {
			edits = append(edits, remove("parameters", f.String()))
		}
	}
	return edits
}

// peerFields tell an engine, beside kv_transfer_params, where its peer is: SGLang's,
// but for the first two.
var peerFields = [...]body.Field{
	body.FieldECTransferParams, body.FieldDisaggregatedParams, body.FieldBootstrapHost, body.FieldBootstrapPort, body.FieldBootstrapRoom,
	body.FieldDisaggPrefillDPRank, body.FieldBootstrapPairKey, body.FieldDecodeTPSize, body.FieldHTTPWorkerIPC,
}

// cleanParams leaves ids in the place of a prompt, which name nobody, where they are.
func cleanParams(own []byte) []body.Edit {
	ids := body.Member(own, "prompt_token_ids")
	if !present(ids) {
		return []body.Edit{remove(kvParams)}
	}
	others := false
	body.EachMember(own, func(key, _ []byte) { others = others || body.Text(key) != "prompt_token_ids" })
	if !others {
		return nil
	}
	return []body.Edit{set("{}", kvParams), body.Set(ids, kvParams, "prompt_token_ids")}
}

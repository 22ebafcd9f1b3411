package disagg

import (
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// clean returns the edits that remove a client's own transfer parameters: with them an engine would fetch blocks from,
// or write them to, an address of the client's choice. It returns nil for a request without such parameters, or for a
// trusted client. Sources of the fields: the request classes of vLLM 0.32 (its engine reads extra_args in the end),
// SGLang 0.5.23 and TensorRT-LLM.
func (p *Protocol) clean(r *body.Request) []body.Edit {
	if p.options.Trust {
		return nil
	}
	edits := cleanID(r, p.addressesInID)
	if r.Span(body.FieldKVTransferParams).Present() {
		edits = append(edits, cleanParams(r.Raw(body.FieldKVTransferParams))...)
	}
	fields := peerFields
	if r.API == body.Unknown { // elsewhere ranks are replaced
		fields = append(fields, body.FieldRoutedDPRank, body.FieldDataParallelRank)
	}
	for _, f := range fields {
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
	if r.API != body.Unknown {
		return edits
	}
	// SGLang's /vertex_generate takes the fields of /generate in "parameters".
	parameters := body.Member(r.Body, "parameters")
	for _, f := range fields {
		if body.Member(parameters, f.String()) != nil {
			edits = append(edits, remove("parameters", f.String()))
		}
	}
	return edits
}

// peerFields tell an engine, in addition to kv_transfer_params, where its peer is. All but the first two are SGLang's.
var peerFields = slices.Clip([]body.Field{
	body.FieldECTransferParams, body.FieldDisaggregatedParams, body.FieldBootstrapHost, body.FieldBootstrapPort, body.FieldBootstrapRoom,
	body.FieldDisaggPrefillDPRank, body.FieldBootstrapPairKey, body.FieldDecodeTPSize, body.FieldHTTPWorkerIPC,
	body.FieldEncoderURLs, body.FieldNeedWaitForMMInputs, body.FieldNumItemsAssigned, body.FieldKVHints,
})

// cleanParams keeps prompt_token_ids, which replace a prompt and carry no address.
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

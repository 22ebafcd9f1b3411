package disagg

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

func (p *Protocol) clean(r *body.Request) []body.Edit {
	if p.options.Trust {
		return nil
	}
	return clean(r, p.addressesInID)
}

// Clean returns the edits that remove a client's own transfer parameters, nil if there are none: an engine would fetch
// blocks from an address in them, whether or not Kvlane has a connector. They also remove vLLM's kv_cache_report_mode, by
// which it reports blocks twice: these would stay counted when evicted. Sources: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM.
func Clean(r *body.Request) []body.Edit { return clean(r, false) }

func clean(r *body.Request, everyID bool) []body.Edit {
	edits, fields := []body.Edit(nil), peerFields
	if id := body.FieldRequestID; r.Span(id).Present() && (everyID || namesAddress(r.Text(id)) || r.API == body.Responses && len(r.Text(id)) < shortID) { // vLLM uses it without a header, for responses always
		edits = append(edits, remove(id.String()))
	}
	if r.Span(body.FieldKVTransferParams).Present() {
		edits = append(edits, cleanParams(r.Raw(body.FieldKVTransferParams))...)
	}
	if r.API == body.Unknown { // elsewhere ranks are replaced
		fields = append(fields, body.FieldRoutedDPRank, body.FieldDataParallelRank)
	}
	for _, f := range fields {
		if r.Span(f).Present() {
			edits = append(edits, remove(f.String()))
		}
	}
	for _, name := range [...]string{kvParams, body.FieldECTransferParams.String(), "kv_cache_report_mode"} {
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

// peerFields are further fields that name others to an engine, most of them its peer. All but the first two are SGLang's.
var peerFields = slices.Clip([]body.Field{
	body.FieldECTransferParams, body.FieldDisaggregatedParams, body.FieldBootstrapHost, body.FieldBootstrapPort, body.FieldBootstrapRoom,
	body.FieldDisaggPrefillDPRank, body.FieldBootstrapPairKey, body.FieldDecodeTPSize, body.FieldHTTPWorkerIPC,
	body.FieldEncoderURLs, body.FieldNeedWaitForMMInputs, body.FieldNumItemsAssigned, body.FieldKVHints,
	body.FieldRID, // names the request itself, see shortID
})

// shortID is the length below which a client's id of a request is removed. SGLang 0.5.23 aborts all requests whose ids
// begin with that of a request whose client leaves: "a" would end a sixteenth of all others. Its own ids have 32 and more.
const shortID = 24

var named = []string{"transfer_params", "disaggregated_", "bootstrap_", "encoder_urls", "_mm_inputs", "num_items_", "kv_hints", "worker_ipc", "vllm_xargs", "cache_report_mode"}

// MayName reports whether a body that cannot be parsed, or is incomplete, might have one of these parameters: a key
// with such a name, or a request id with an address. In UTF-16 a name inside a string
// counts, too, because keys cannot be told from strings there.
func MayName(raw []byte) bool {
	ownID := body.FieldRID.String()
	has := func(text []byte) bool {
		return slices.ContainsFunc(named, func(part string) bool { return bytes.Contains(text, []byte(part)) })
	}
	if bytes.IndexByte(raw, 0) >= 0 {
		raw = bytes.ReplaceAll(raw, []byte{0}, nil)
		return has(raw) || bytes.Contains(raw, []byte(`"rid"`)) || namesAddress(string(raw)) || bytes.Contains(raw, []byte(`\u00`))
	}
	id := false // the last key is that of a request id
	for at := bytes.IndexByte(raw, '"'); at >= 0; at = bytes.IndexByte(raw, '"') {
		raw = raw[at+1:]
		end := 0
		for end < len(raw) && raw[end] != '"' {
			if end++; raw[end-1] == '\\' {
				end++
			}
		}
		text := raw[:min(end, len(raw))]
		raw = raw[min(end+1, len(raw)):]
		if key := bytes.HasPrefix(bytes.TrimLeft(raw, " \t\r\n"), []byte{':'}); key || id {
			if bytes.IndexByte(text, '\\') >= 0 {
				var decoded string
				_ = json.Unmarshal(slices.Concat([]byte{'"'}, text, []byte{'"'}), &decoded) // engines refuse what is none
				text = []byte(decoded)
			}
			if key && (has(text) || string(text) == ownID) || !key && namesAddress(string(text)) {
				return true
			}
			id = key && (string(text) == body.FieldRequestID.String() || string(text) == ownID)
		}
	}
	return false
}

var plain = regexp.MustCompile(`charset="?(utf-8|us-ascii|iso-8859-1)`)

// FormMayName is MayName for a form of a lower-case content type: vLLM reads vllm_xargs from audio forms. Other
// encodings than those above, and names that a * continues or encodes, might spell it differently.
func FormMayName(kind string, raw []byte) bool {
	return strings.Count(kind, "charset") > len(plain.FindAllString(kind, -1)) || bytes.Contains(raw, []byte(body.FieldVLLMXArgs.String())) ||
		encodesName(raw)
}

// encodesName reports whether a form has a parameter "name" that a * continues or encodes (RFC 2231), in any case: Python's
// email package reads it. That of a file's name is harmless.
func encodesName(raw []byte) bool {
	ends := func(text []byte, name string) bool {
		return len(text) >= len(name) && strings.EqualFold(string(text[len(text)-len(name):]), name)
	}
	for {
		i := bytes.IndexByte(raw, '*')
		if i < 0 {
			return false
		}
		if before := bytes.TrimRight(raw[:i], " \t\r\n"); ends(before, "name") && !ends(before, "filename") {
			return true
		}
		raw = raw[i+1:]
	}
}

// cleanParams keeps prompt_token_ids, which replace a prompt and carry no address.
func cleanParams(own []byte) []body.Edit {
	ids := body.Member(own, "prompt_token_ids")
	if !present(ids) {
		return []body.Edit{remove(kvParams)}
	}
	others := false
	body.EachMember(own, func(key, _ []byte) { others = others || !body.IsKey(key, "prompt_token_ids") })
	if !others {
		return nil
	}
	return []body.Edit{set("{}", kvParams), body.Set(ids, kvParams, "prompt_token_ids")}
}

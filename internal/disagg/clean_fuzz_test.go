package disagg

import (
	"bytes"
	"context"
	"encoding/json"
	"mime"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// reaches returns what an engine could read of a client's peers in a body, by the values of encoding/json.
func reaches(api body.API, doc map[string]any) (out []string) {
	find := func(at map[string]any, names ...string) {
		for _, name := range names {
			if _, ok := at[name]; ok {
				out = append(out, name)
			}
		}
	}
	in := func(at map[string]any, name string) map[string]any {
		object, _ := at[name].(map[string]any)
		return object
	}
	var peers []string
	for _, f := range peerFields {
		peers = append(peers, f.String())
	}
	find(doc, peers...)
	if params, ok := doc[kvParams].(map[string]any); ok {
		delete(params, "prompt_token_ids")
		if len(params) > 0 {
			out = append(out, kvParams)
		}
	} else {
		find(doc, kvParams)
	}
	find(in(doc, "vllm_xargs"), kvParams, "ec_transfer_params", "kv_cache_report_mode")
	if api == body.VLLMGenerate || api == body.Unknown {
		find(in(in(doc, "sampling_params"), "extra_args"), kvParams, "ec_transfer_params", "kv_cache_report_mode")
	}
	if api == body.Unknown {
		find(doc, "routed_dp_rank", "data_parallel_rank")
		find(in(doc, "parameters"), append(peers, "routed_dp_rank", "data_parallel_rank")...)
	}
	if id, ok := doc["request_id"].(string); ok && namesAddress(id) {
		out = append(out, "request_id")
	}
	return out
}

// Whatever a body looks like, an engine reads no peer of the client from it.
func FuzzClean(f *testing.F) {
	for _, raw := range []string{
		`{"prompt":"x","kv_transfer_params":{"remote_host":"evil","prompt_token_ids":[1]},"bootstrap_host":"evil","kv_transfer_params":{"remote_host":"evil"}}`,
		`{"kv_transfer_params":{"prompt_token_ids":[1],"prompt_token_ids":[2],"remote_host":1},"request_id":"` + evilID + `"}`,
		`{"sampling_params":{"extra_args":{"kv_transfer_params":{},"a":1}},"sampling_params":{"extra_args":{"ec_transfer_params":1}},"vllm_xargs":{"kv_transfer_params":1,"kv_cache_report_mode":"full"}}`,
		`{"parameters":{"bootstrap_room":1,"x":2},"routed_dp_rank":1,"\u0062ootstrap_port":9,"data_parallel_rank":null}`,
		`{"kv_transfer_params":null,"ec_transfer_params":[],"disaggregated_params":{}}`, `{"request_id":"a","request_id":"___Prefill_Addr_x:1___"}`,
	} {
		for api := body.Unknown; api <= body.Tokenize; api++ {
			f.Add(uint8(api), []byte(raw))
		}
	}
	// What is removed depends on one property of a connector.
	var protocols [2]*Protocol
	for _, p := range protocolsForTest(f) {
		if p.addressesInID {
			protocols[1] = p
		} else {
			protocols[0] = p
		}
	}
	f.Fuzz(func(t *testing.T, api uint8, raw []byte) {
		req, err := body.Parse(body.API(api%uint8(body.Tokenize+1)), raw)
		if err != nil || !json.Valid(raw) {
			return
		}
		var named map[string]any
		if json.Unmarshal(raw, &named) == nil && !MayName(raw) {
			for _, key := range []string{kvParams, "ec_transfer_params", "disaggregated_params", "bootstrap_host", "encoder_urls", "http_worker_ipc", "kv_hints"} {
				if _, ok := named[key]; ok {
					t.Fatalf("%q: %s is not found in the unread body", raw, key)
				}
			}
			if id, _ := named["request_id"].(string); namesAddress(id) {
				t.Fatalf("%q: the address in the id is not found in the unread body", raw)
			}
		}
		for _, p := range protocols {
			leg := &Leg{Edits: p.Local(req)}
			out, err := leg.Body(context.Background(), req)
			if err != nil {
				t.Fatalf("%s: %q: %v", p.Name, raw, err)
			}
			if out == nil {
				out = raw
			}
			var doc map[string]any
			dec := json.NewDecoder(bytes.NewReader(out))
			dec.UseNumber()
			if err := dec.Decode(&doc); err != nil {
				t.Fatalf("%s: %q became %q: %v", p.Name, raw, out, err)
			}
			if got := reaches(req.API, doc); len(got) > 0 {
				t.Fatalf("%s, %v: %q became %q, which has %v, want none of it", p.Name, req.API, raw, out, got)
			}
		}
	})
}

// A form in which a reader of forms finds the field is found.
func FuzzFormMayName(f *testing.F) {
	for _, head := range []string{`name="vllm_xargs"`, "name=vllm_xargs", "name*=utf-8''vllm%5Fxargs", `name*0="vllm_"; name*1=xargs`, `NAME*0="vllm_"; Name*1=xargs`, `filename*=utf-8''a; name="vllm_xargs"`} {
		f.Add("multipart/form-data; boundary=b", []byte("--b\r\nContent-Disposition: form-data; "+head+"\r\n\r\n{}\r\n--b--\r\n"))
	}
	f.Fuzz(func(t *testing.T, kind string, raw []byte) {
		if FormMayName(strings.ToLower(kind), raw) {
			return
		}
		_, params, err := mime.ParseMediaType(kind)
		if err != nil {
			return
		}
		for parts := multipart.NewReader(bytes.NewReader(raw), params["boundary"]); ; {
			part, err := parts.NextRawPart()
			if err != nil {
				return
			}
			if part.FormName() == "vllm_xargs" {
				t.Fatalf("a reader finds the field in %q of type %q", raw, kind)
			}
		}
	})
}

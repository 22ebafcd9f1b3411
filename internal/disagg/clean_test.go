package disagg

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// Transfer parameters of a client never reach an engine, with any connector, on any path, unless
// clients are trusted.
func TestNoEngineHearsOfAClientsTransfers(t *testing.T) {
	const evil = `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_host":"evil","prompt_token_ids":[1,2]},` +
		`"bootstrap_host":"evil","bootstrap_room":666666666,"bootstrap_port":666666666,"disagg_prefill_dp_rank":666666666,"ec_transfer_params":{"evil":1},` +
		`"disaggregated_params":{"request_type":"generation_only","encoded_opaque_state":"evil"},"vllm_xargs":{"kv_transfer_params":"evil"},"encoder_urls":["evil"],"kv_hints":"evil",` +
		`"sampling_params":{"extra_args":{"kv_transfer_params":{"remote_host":"evil"},"ec_transfer_params":"evil"}}`
	bodies := map[body.API]string{
		body.Chat: `{"messages":[{"role":"user","content":"x"}],`, body.Completions: `{"prompt":"x",`, body.Responses: `{"input":"x",`,
		body.Messages: `{"max_tokens":9,"messages":[{"role":"user","content":"x"}],`, body.VLLMGenerate: `{"token_ids":[1,2],`, body.Generate: `{"text":"x",`,
	}
	answer, err := ParseAnswer([]byte(answerOf))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range protocolsForTest(t) {
		for api, begin := range bodies {
			text := evil
			if api != body.VLLMGenerate { // only this API reads it
				text = evil[:strings.Index(evil, `,"sampling_params"`)]
			}
			req, err := body.Parse(api, []byte(begin+text+"}"))
			if err != nil {
				t.Fatal(err)
			}
			bodies := map[string]*Leg{"not split": {Edits: p.Local(req)}}
			if p.Refuses(req, []uint32{1, 2}) == "" {
				side := Side{Worker: "w", Address: "10.0.0.1:80", Rank: 0, Ranks: 2, ByHeader: true, Settings: wholeSettings()}
				x := &Exchange{Request: req, Path: "/v1/completions", ID: "id", IDs: []uint32{1, 2}, Prefill: side, Decode: side, Unique: Unique{Text: "u"}}
				if !p.NoLeg {
					leg, err := p.Prefill(context.Background(), x)
					if err != nil {
						t.Fatal(err)
					}
					bodies["prefill"] = &leg
				}
				leg, err := p.Decode(x, answer)
				if err != nil {
					t.Fatal(err)
				}
				bodies["decode"] = &leg
			}
			for which, leg := range bodies {
				out, err := leg.Body(context.Background(), req)
				if err != nil || out == nil || bytes.Contains(out, []byte("evil")) || bytes.Contains(out, []byte("666666666")) {
					t.Errorf("%s, %v, %s: %v %s", p.Name, api, which, err, out)
				}
			}
		}
	}
}

package disagg

import (
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

const evilID = "___prefill_addr_evil:1___decode_addr_evil:1_0123"

func TestRequestIDsWithAddresses(t *testing.T) {
	bad := []string{
		evilID, "x" + evilID + "y", "___decode_addr_evil:1", "___prefill_addr_evil:1___", "___PREFILL_ADDR_evil:1___Decode_Addr_evil:1_", "fine," + evilID,
		"___prefill_addr_host:evil,handshake:1,notify:2___decode_addr_host:evil,handshake:1,notify:2_0123",
	}
	good := []string{"", "fine", "4fb1b1a7-9c09-4b37-a1f0-5a8f7ad3a0f6", "cmpl-1_2", "prefill_1", "___"}
	for _, connector := range append(connectors(), "") {
		rule := RequestIDs(connector, false)
		for _, id := range bad {
			if got := rule(id); got == "" || namesAddress(got) {
				t.Errorf("%s: %q: got %q, want an id without an address", connector, id, got)
			}
		}
		every := connector == "p2p-nccl"
		for _, id := range good {
			if got := rule(id); (got == id) == every || got == "" && every {
				t.Errorf("%s: %q: got %q, want replaced: %v", connector, id, got, every)
			}
		}
		if a, b := rule(evilID), rule(evilID); a == b {
			t.Errorf("%s: got the same id %q for two requests", connector, a)
		}
	}
	// The same holds for the id in a body whose request is not split.
	for _, p := range protocolsForTest(t) {
		for id, removed := range map[string]bool{evilID: true, "fine": p.Name == "p2p-nccl"} {
			r, err := body.Parse(body.Completions, []byte(`{"prompt":"x","request_id":"`+id+`"}`))
			if err != nil {
				t.Fatal(err)
			}
			if got := len(p.Local(r)) > 0; got != removed {
				t.Errorf("%s: request_id %q of a body: got removed %v, want %v", p.Name, id, got, removed)
			}
		}
	}
	if RequestIDs("p2p-nccl", true) != nil {
		t.Error("got ids of trusted clients replaced")
	}
}

// Both legs of a request have the same id where engines match the legs by it or read addresses from it. vLLM's /v1/responses
// reads the id from the body alone. It is not the client's id, because another request may have that, too.
func TestTheIDOfBothLegs(t *testing.T) {
	side := Side{Worker: "w", Settings: wholeSettings()}
	for _, connector := range []string{"p2p-nccl", "nixl-push"} {
		p, err := New(connector, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for api, raw := range map[body.API]string{
			body.Responses: `{"request_id":"` + evilID + `","input":"x"}`, body.Chat: `{"messages":[]}`, body.Completions: `{"prompt":"x"}`,
			body.Messages: `{"messages":[]}`, body.VLLMGenerate: `{"token_ids":[1]}`,
		} {
			r, err := body.Parse(api, []byte(raw))
			if err != nil {
				t.Fatal(err)
			}
			ids := map[string]int{}
			for range 2 { // two requests with the same id of their client
				x := &Exchange{Request: r, ID: "client", Prefill: side, Decode: side, Unique: NewUnique()}
				a, err := p.Prefill(t.Context(), x)
				if err != nil {
					t.Fatal(err)
				}
				b, err := p.Decode(x, nil)
				if err != nil {
					t.Fatal(err)
				}
				for _, leg := range []Leg{a, b} {
					id := leg.Headers[0].Value
					ids[id]++
					if (connector == "nixl-push") == namesAddress(id) {
						t.Errorf("%s, %s: got id %q", connector, api, id)
					}
					text, err := leg.Body(t.Context(), r)
					if err != nil {
						t.Fatal(err)
					}
					if got := body.Text(body.Member(text, "request_id")); api == body.Responses && got != id {
						t.Errorf("%s: got request_id %q, want %q", connector, got, id)
					}
				}
			}
			if len(ids) != 2 {
				t.Errorf("%s, %s: got ids %v, want one for each request, on both of its legs", connector, api, ids)
			}
		}
	}
}

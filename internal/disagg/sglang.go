package disagg

import (
	"context"
	"fmt"
	"math"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// sglang is SGLang's bootstrap: both bodies carry the same three fields, both legs run
// concurrently, and the client receives the decode leg's answer. The prefill leg ends only when
// decode has fetched the blocks. /v1/messages drops the fields, so its requests are not split.
func sglang() *Protocol {
	return &Protocol{AtOnce: true, Always: true,
		apis:    []body.API{body.Chat, body.Completions, body.Generate, body.Responses},
		refuses: sglangRefuses, edited: sglangEdited,
		prefill: func(_ context.Context, _ *Protocol, x *Exchange) (Leg, error) {
			leg := bootstrapLeg(x, &x.Prefill)
			leg.Edits = append(leg.Edits, sglangEdited(x.Request.API)[0]...)
			return leg, nil
		},
		decode: func(_ *Protocol, x *Exchange, _ *Answer) (Leg, error) { return bootstrapLeg(x, &x.Decode), nil },
	}
}

// unstored: only the decode engine stores the answer, and its id is not the prefill engine's.
var unstored = []body.Edit{set("false", "store"), remove("background"), remove(body.FieldRequestID.String())}

func sglangEdited(api body.API) (edits [3][]body.Edit) {
	if api == body.Responses {
		edits[0] = unstored
	}
	return edits
}

// sglangRefuses: SGLang (0.5.23, tokenizer_manager) uses one room for all answers to a prompt, and for the request that
// warms the cache for them. What a leg adds for each prompt is many times longer than an empty prompt.
func sglangRefuses(r *body.Request, _ []uint32) string {
	switch n, _ := prompts(r); {
	case r.Choices(false) > int64(n):
		return "more than one answer to a prompt"
	case n > 4096:
		return "more than 4096 prompts"
	}
	return ""
}

// prompts returns the number of prompts of a request, and whether they come as a list.
func prompts(r *body.Request) (n int, list bool) {
	if r.Form == body.FormTexts || r.Form == body.FormIDLists {
		return r.Count, true
	}
	return 1, false
}

// room returns a random bootstrap room of 63 bits. By default a prefill engine uses rank (room modulo its number of
// ranks), so the room is made to give the chosen rank.
func room(x *Exchange, i int) uint64 {
	n := (x.Unique.Number + uint64(i)*uint64(max(x.Prefill.Ranks, 1))) & math.MaxInt64
	if ranks := uint64(max(x.Prefill.Ranks, 0)); ranks > 1 && x.Prefill.Rank != NoRank {
		n = n - n%ranks + uint64(x.Prefill.Rank)
		if n > math.MaxInt64 {
			n -= ranks
		}
	}
	return n
}

// bootstrapLeg is the request for one of the sides. The two differ only in the rank on
// /generate, where SGLang does not read the header.
func bootstrapLeg(x *Exchange, to *Side) Leg {
	host, port := body.AppendQuoted(nil, x.Prefill.host()), fmt.Append(nil, x.Prefill.bootstrapPort())
	var leg Leg
	if n, list := prompts(x.Request); list {
		hosts, ports, rooms := []byte{'['}, []byte{'['}, []byte{'['}
		for i := range n {
			if i > 0 {
				hosts, ports, rooms = append(hosts, ','), append(ports, ','), append(rooms, ',')
			}
			hosts, ports, rooms = append(hosts, host...), append(ports, port...), fmt.Append(rooms, room(x, i))
		}
		leg.Edits = []body.Edit{body.Set(append(hosts, ']'), "bootstrap_host"), body.Set(append(ports, ']'), "bootstrap_port"),
			body.Set(append(rooms, ']'), "bootstrap_room")}
	} else {
		leg.Edits = []body.Edit{body.Set(host, "bootstrap_host"), body.Set(port, "bootstrap_port"), setNumber(room(x, 0), "bootstrap_room")}
	}
	if x.Prefill.Ranks > 1 && x.Prefill.Rank != NoRank {
		leg.Edits = append(leg.Edits, setNumber(x.Prefill.Rank, "disagg_prefill_dp_rank"))
	} else {
		leg.Edits = append(leg.Edits, remove("disagg_prefill_dp_rank")) // set by the client
	}
	if x.Request.API == body.Generate && to.Rank != NoRank && to.Ranks > 1 {
		leg.Edits = append(leg.Edits, setNumber(to.Rank, "routed_dp_rank"))
	}
	return leg
}

package disagg

import (
	"cmp"
	"context"
	"net"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/steering"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

// This file contains vLLM's connectors except LMCache and MoRIIO. Sources of the fields: vLLM's
// toy_proxy_server and connectors, as of 0.32.

var vllmAPIs = []body.API{body.Chat, body.Completions, body.Responses, body.Messages, body.VLLMGenerate}

// oneToken limits an answer to one token for the prefill leg, by API. It removes minimum lengths, which would conflict.
var oneToken = map[body.API][]body.Edit{
	body.Chat: {set("1", "max_tokens"), set("1", "max_completion_tokens"), remove("min_tokens"), remove("min_completion_tokens")},
	body.Completions: {set("1", "max_tokens"), remove("max_completion_tokens"), remove("min_tokens"),
		remove("min_completion_tokens")},
	body.Responses:    {set("1", "max_output_tokens"), remove("max_tokens"), remove("min_tokens"), set("false", "store"), remove("background")},
	body.Messages:     {set("1", "max_tokens"), remove("min_tokens")},
	body.VLLMGenerate: {set("1", "sampling_params", "max_tokens"), remove("sampling_params", "min_tokens")},
}

// unstreamed requests the answer in one piece.
var unstreamed = []body.Edit{set("false", "stream"), remove("stream_options")}

// vllmPrefill returns the edits that all prefill legs of vLLM have in common.
func vllmPrefill(api body.API) []body.Edit {
	one := oneToken[api]
	return append(append(make([]body.Edit, 0, len(one)+len(unstreamed)+4), one...), unstreamed...)
}

// vllmEdited returns vllmPrefill's edits in their parts.
func vllmEdited(api body.API) [3][]body.Edit { return [3][]body.Edit{oneToken[api], unstreamed} }

const kvParams = "kv_transfer_params"

// askRemoteDecode and askRemotePrefill are the transfer parameters of the two directions.
const (
	askRemoteDecode  = `{"do_remote_decode":true,"do_remote_prefill":false}`
	askNIXL          = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`
	askRemotePrefill = `{"do_remote_prefill":true,"do_remote_decode":false}`
)

// ownDirection reports whether the client, or a router in front of Kvlane, has set a direction
// itself: its parameters stay as they are.
func ownDirection(r *body.Request) bool {
	raw := r.Raw(body.FieldKVTransferParams)
	return body.Member(raw, "do_remote_decode") != nil || body.Member(raw, "do_remote_prefill") != nil
}

// decodeAlready: a request with instructions to fetch blocks is the decode leg of a router in front of Kvlane.
func decodeAlready(r *body.Request) string {
	if string(body.Member(r.Raw(body.FieldKVTransferParams), "do_remote_prefill")) == "true" {
		return "it is a decode leg already"
	}
	return ""
}

// ask returns the edits that put a direction's parameters into a request and keep
// prompt_token_ids of the client's own object.
func ask(r *body.Request, params string, more ...body.Edit) []body.Edit {
	own := r.Raw(body.FieldKVTransferParams)
	out := []body.Edit{set(params, kvParams)}
	if ids := body.Member(own, "prompt_token_ids"); present(ids) {
		out = append(out, body.Set(ids, kvParams, "prompt_token_ids"))
	}
	return append(out, more...)
}

// nixl is NixlConnector in its pull mode, vLLM's default: decode fetches the blocks that the prefill answer names.
func nixl() *Protocol {
	return &Protocol{Portable: true, apis: vllmAPIs, single: true, arranged: decodeAlready, edited: vllmEdited, prefill: nixlPrefill, decode: nixlDecode}
}

func nixlPrefill(_ context.Context, p *Protocol, x *Exchange) (Leg, error) {
	edits := vllmPrefill(x.Request.API)
	if !p.options.Trust || !ownDirection(x.Request) {
		edits = append(edits, ask(x.Request, askNIXL)...)
	}
	return Leg{Edits: edits}, nil
}

// nixlDecode forwards the answer's parameters verbatim.
func nixlDecode(_ *Protocol, x *Exchange, a *Answer) (Leg, error) {
	if a == nil {
		return Leg{}, errNoAnswer
	}
	params := a.member(kvParams)
	if !isObject(params) {
		return Leg{}, ErrNoParameters
	}
	edits := ask(x.Request, string(params))
	if h := x.Prefill.Settings.SideHost; h != "" {
		edits = append(edits, setText(h, kvParams, "remote_host"))
	}
	return Leg{Edits: edits, grows: len(params)}, nil
}

// nixlPush: decode registers its blocks and prefill writes into them; the legs run concurrently
// and are matched by their request id.
func nixlPush() *Protocol {
	return &Protocol{AtOnce: true, apis: vllmAPIs, single: true, arranged: decodeAlready, edited: vllmEdited, decode: nixlPushDecode,
		prefill: func(ctx context.Context, p *Protocol, x *Exchange) (Leg, error) {
			leg, err := nixlPrefill(ctx, p, x)
			return x.named(leg, x.pushID()), err
		}}
}

// pushID returns the request id of both legs. A client's id alone might equal that of another request in flight, whose
// blocks it would then get.
func (x *Exchange) pushID() string {
	if x.Request.API == body.Responses { // the id of the answer too
		return "resp_" + x.Unique.Text
	}
	return strings.TrimPrefix(x.ID+"-"+x.Unique.Text, "-")
}

// named gives a leg its request id.
func (x *Exchange) named(leg Leg, id string) Leg {
	leg.Headers = append(leg.Headers, Header{requestIDHeader, id})
	if x.Request.API == body.Responses { // vLLM reads no header on this API
		leg.Edits = append(leg.Edits, setText(id, body.FieldRequestID.String()))
	}
	return leg
}

// defaultSidePort is VLLM_NIXL_SIDE_CHANNEL_PORT of rank 0.
const defaultSidePort = 5600

func nixlPushDecode(_ *Protocol, x *Exchange, _ *Answer) (Leg, error) {
	s := &x.Prefill.Settings
	if s.EngineID == "" {
		return Leg{}, unusable(&x.Prefill, "engine_id")
	}
	id, port, host := s.EngineID, cmp.Or(s.SidePort, defaultSidePort), cmp.Or(s.SideHost, x.Prefill.host())
	if x.Prefill.Ranks > 1 && x.Prefill.Rank != NoRank {
		id += "_dp" + strconv.Itoa(x.Prefill.Rank)
		port += x.Prefill.Rank
	}
	return x.named(Leg{Edits: ask(x.Request, askRemotePrefill, setText(id, kvParams, "remote_engine_id"), setText(host, kvParams, "remote_host"),
		setNumber(port, kvParams, "remote_port"))}, x.pushID()), nil
}

// p2pNCCL: the request id carries the addresses of both sides.
func p2pNCCL() *Protocol {
	return &Protocol{addressesInID: true, apis: vllmAPIs, single: true, arranged: decodeAlready, edited: vllmEdited,
		prefill: func(_ context.Context, _ *Protocol, x *Exchange) (Leg, error) {
			return p2pLeg(x, vllmPrefill(x.Request.API)...)
		},
		decode: func(_ *Protocol, x *Exchange, _ *Answer) (Leg, error) { return p2pLeg(x) }}
}

func p2pLeg(x *Exchange, edits ...body.Edit) (Leg, error) {
	for _, s := range []*Side{&x.Prefill, &x.Decode} {
		if s.Settings.ZMQ == "" {
			return Leg{}, unusable(s, "zmq")
		}
	}
	// A client's id may contain anything, such as these address marks; a generated one cannot.
	id := "___prefill_addr_" + x.Prefill.Settings.ZMQ + "___decode_addr_" + x.Decode.Settings.ZMQ + "_" + x.Unique.Text
	return x.named(Leg{Edits: edits}, id), nil
}

// sharedStorage: prefill writes to a store in which decode finds the prompt by its content.
func sharedStorage() *Protocol {
	return &Protocol{Portable: true, apis: vllmAPIs, single: true, arranged: decodeAlready, edited: vllmEdited,
		prefill: func(_ context.Context, _ *Protocol, x *Exchange) (Leg, error) {
			return Leg{Edits: vllmPrefill(x.Request.API)}, nil
		},
		decode: func(*Protocol, *Exchange, *Answer) (Leg, error) { return Leg{}, nil }}
}

// sidecar: llm-d's sidecar of the decode engine runs both legs; a header gives it the prefill worker.
func sidecar() *Protocol {
	return &Protocol{NoLeg: true, apis: vllmAPIs, edited: vllmEdited, decode: func(_ *Protocol, x *Exchange, _ *Answer) (Leg, error) {
		return Leg{Headers: []Header{{steering.Sidecar, x.Prefill.Address}}}, nil
	}}
}

// mooncake: both legs run concurrently and are matched by a transfer id. The engine id of the
// prefill rank comes from its bootstrap server.
func mooncake() *Protocol {
	return &Protocol{AtOnce: true, apis: vllmAPIs, single: true, arranged: decodeAlready, edited: vllmEdited, pages: newPages(),
		prefill: func(ctx context.Context, p *Protocol, x *Exchange) (Leg, error) {
			if err := p.fetchPage(ctx, &x.Prefill, bootstrapAddress(&x.Prefill), "/query", false); err != nil {
				return Leg{}, err
			}
			edits := append(vllmPrefill(x.Request.API), ask(x.Request, askRemoteDecode, setText("xfer-"+x.Unique.Text, kvParams, "transfer_id"))...)
			return Leg{Edits: edits}, nil
		},
		decode: func(p *Protocol, x *Exchange, _ *Answer) (Leg, error) {
			engine := mooncakeEngine(p.page(&x.Prefill), &x.Prefill)
			if engine == "" {
				return Leg{}, unusable(&x.Prefill, "engine_id for its rank at /query")
			}
			return Leg{Edits: ask(x.Request, askRemotePrefill, setText("xfer-"+x.Unique.Text, kvParams, "transfer_id"),
				setText("http://"+bootstrapAddress(&x.Prefill), kvParams, "remote_bootstrap_addr"), setText(engine, kvParams, "remote_engine_id"))}, nil
		}}
}

func bootstrapAddress(s *Side) string {
	return net.JoinHostPort(s.host(), strconv.Itoa(s.bootstrapPort()))
}

// mooncakeEngine returns a rank's engine id from the page of the bootstrap server: {"<rank>": {"engine_id": …}, …}.
func mooncakeEngine(page []byte, s *Side) string {
	rank := max(s.Rank, 0)
	return body.Text(body.Member(body.Member(page, strconv.Itoa(rank)), "engine_id"))
}

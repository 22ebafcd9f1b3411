package enginesim

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// leg is the side of a disaggregated request that an engine serves.
type leg string

const (
	legPrefill leg = "prefill"
	legDecode  leg = "decode"
)

// transfer is what a connector does around a call: it fetches blocks, or hands them over.
type transfer struct {
	leg    leg
	before func() error            // before the rank gets the request: fetch blocks
	after  func(out *output) error // after the last token: hand blocks over
	usage  func(object)
}

// connector reads a call's parameters; no transfer and no error means an ordinary request.
type connector func(c *call) (*transfer, error)

// transferWaitMS is how long a decode leg waits for a prefill leg that runs at the same time.
const transferWaitMS = 10_000

var connectors = map[string]connector{
	"nixl":          func(c *call) (*transfer, error) { return c.nixl(nil) },
	"nixl-push":     withParams(nixlPush),
	"mooncake":      withParams(mooncake),
	"p2p-nccl":      p2pNCCL,
	"moriio":        withParams(moriio),
	"moriio-write":  withParams(moriioWrite),
	"lmcache":       lmcache,
	"sharedstorage": sharedStorage,
	"bootstrap":     bootstrap,
	"trtllm":        trtDisagg,
}

// withParams makes requests without kv_transfer_params ordinary ones.
func withParams(f connector) connector {
	return func(c *call) (*transfer, error) {
		if len(c.body.KVTransferParams) == 0 {
			return nil, nil
		}
		return f(c)
	}
}

// violation refuses and counts a request that violates its protocol.
func (c *call) violation(format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	c.stats.count("violation: " + text)
	return badRequest("kv transfer: " + text)
}

func (c *call) note(l leg) {
	c.stats.count(string(l) + " leg")
	c.stats.update(c.rec, func(rec *RequestRecord) { rec.Leg = string(l) })
}

// single refuses requests that a transfer cannot serve: its blocks have one consumer.
func (c *call) single() error {
	if len(c.seqs) != 1 {
		return c.violation("%d sequences in one transfer", len(c.seqs))
	}
	return nil
}

// prefillLeg checks the requirements common to all prefill legs of vLLM, and keeps the blocks.
func (c *call) prefillLeg() error {
	c.note(legPrefill)
	if c.body.Stream || c.body.StreamOptions != nil {
		return c.violation("streamed prefill leg")
	}
	if c.seqs[0].maxTokens != 1 {
		return c.violation("prefill leg with max_tokens %d", c.seqs[0].maxTokens)
	}
	if c.body.MinTokens != nil {
		return c.violation("prefill leg with min_tokens")
	}
	if err := c.single(); err != nil {
		return err
	}
	c.seqs[0].keep = true
	return nil
}

// direction reads do_remote_decode and do_remote_prefill, of which exactly one must be true.
func (c *call) direction() (leg, error) {
	p := c.body.KVTransferParams
	toDecode, okD := p["do_remote_decode"].(bool)
	fromPrefill, okP := p["do_remote_prefill"].(bool)
	switch {
	case !okD || !okP:
		return "", c.violation("do_remote_decode or do_remote_prefill is missing")
	case toDecode == fromPrefill:
		return "", c.violation("do_remote_decode and do_remote_prefill are both %v", toDecode)
	case toDecode:
		return legPrefill, nil
	default:
		return legDecode, nil
	}
}

func (c *call) texts(names ...string) (map[string]string, error) {
	out := map[string]string{}
	for _, name := range names {
		switch v := c.body.KVTransferParams[name].(type) {
		case string:
			out[name] = v
		case json.Number:
			out[name] = v.String()
		}
		if out[name] == "" {
			return nil, c.violation("%s is missing", name)
		}
	}
	return out, nil
}

// moriio in its READ mode is NIXL's pull with a transfer id of its own on both legs.
func moriio(c *call) (*transfer, error) {
	p, err := c.texts("transfer_id")
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(p["transfer_id"], "tx") {
		return nil, c.violation("transfer_id does not begin with tx")
	}
	return c.nixl(object{"transfer_id": p["transfer_id"]})
}

// moriioWrite: concurrent legs, matched by a transfer id. Each has the other's address; a leader on the decode side names
// its blocks to the prefill rank.
func moriioWrite(c *call) (*transfer, error) {
	params := c.body.KVTransferParams
	l, err := c.direction()
	if err != nil {
		return nil, err
	}
	p, err := c.texts("transfer_id", "remote_host", "remote_handshake_port", "remote_notify_port")
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"remote_engine_id", "remote_block_ids"} {
		if _, ok := params[name]; !ok {
			return nil, c.violation("%s is missing", name)
		}
	}
	peer := net.JoinHostPort(p["remote_host"], p["remote_notify_port"])
	if peer == c.side.addr {
		return nil, c.violation("the other side is named as this one")
	}
	if l == legPrefill {
		return c.atOnce(l, p["transfer_id"], "", "")
	}
	if params["is_request_leader"] != true {
		return nil, c.violation("no rank of decode is the leader")
	}
	return c.decodeFrom(peer, pull{Rank: c.remoteRank(), Key: p["transfer_id"], WaitMS: transferWaitMS})
}

// remoteRank is the prefill rank that a decode leg names, nil if it names none.
func (c *call) remoteRank() *int {
	n, ok := c.body.KVTransferParams["remote_dp_rank"].(json.Number)
	if !ok {
		return nil
	}
	rank, err := strconv.Atoi(n.String())
	if err != nil {
		return nil
	}
	return &rank
}

// nixl is the pull: prefill first, then decode with the parameters that prefill answered.
func (c *call) nixl(extra object) (*transfer, error) {
	if len(c.body.KVTransferParams) == 0 || c.body.KVTransferParams["prompt_token_ids"] != nil && len(c.body.KVTransferParams) == 1 {
		return nil, nil
	}
	l, err := c.direction()
	if err != nil {
		return nil, err
	}
	if l == legPrefill {
		return c.nixlPrefill(extra)
	}
	p, err := c.texts("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_num_tokens")
	if err != nil {
		return nil, err
	}
	groups, _ := c.body.KVTransferParams["remote_block_ids"].([]any)
	if len(groups) == 0 {
		return nil, c.violation("remote_block_ids is missing")
	}
	return c.decodeFrom(net.JoinHostPort(p["remote_host"], p["remote_port"]), pull{Engine: p["remote_engine_id"], Key: p["remote_request_id"]})
}

func (c *call) nixlPrefill(extra object) (*transfer, error) {
	for _, name := range []string{"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"} {
		if v, ok := c.body.KVTransferParams[name]; ok && v != nil {
			return nil, c.violation("%s is set on the prefill leg", name)
		}
	}
	if err := c.prefillLeg(); err != nil {
		return nil, err
	}
	return &transfer{leg: legPrefill, after: func(out *output) error {
		s := c.seqs[0]
		key := fmt.Sprintf("%s-0-%s", out.name, randomHex(4))
		c.rank.mu.Lock()
		var blocks []int
		for _, b := range s.blocks {
			blocks = append(blocks, b.id)
		}
		c.rank.mu.Unlock()
		if _, err := c.hold(0, key); err != nil {
			return err
		}
		if c.faults.get().NoTransferParams {
			return nil
		}
		host, port, _ := net.SplitHostPort(c.side.addr)
		n, _ := strconv.Atoi(port)
		params := object{
			"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [][]int{blocks}, "remote_engine_id": c.engineID(c.rank),
			"remote_request_id": key, "remote_host": host, "remote_port": n, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
			"remote_num_tokens": s.prompt, "remote_blocks_expiry_time": nil, "transfer_mode": "pull",
		}
		maps.Copy(params, extra)
		out.extra["kv_transfer_params"] = params
		return nil
	}}, nil
}

// atOnce are the two legs of a protocol whose legs run at the same time: the decode leg waits for the prefill leg, and both
// know the key.
func (c *call) atOnce(l leg, key, addr, engine string) (*transfer, error) {
	if l == legPrefill {
		if err := c.prefillLeg(); err != nil {
			return nil, err
		}
		return &transfer{leg: l, after: func(*output) error {
			_, err := c.hold(0, key)
			return err
		}}, nil
	}
	return c.decodeFrom(addr, pull{Engine: engine, Key: key, WaitMS: transferWaitMS})
}

// decodeFrom is the decode leg of a request whose blocks are at addr.
func (c *call) decodeFrom(addr string, p pull) (*transfer, error) {
	c.note(legDecode)
	if err := c.single(); err != nil {
		return nil, err
	}
	return &transfer{leg: legDecode, before: func() error {
		got, err := c.fetch(c.r.Context(), addr, p)
		if err != nil {
			return err
		}
		if got.Call != c.id {
			return c.violation("the legs have different request ids")
		}
		return c.take(0, got)
	}}, nil
}

// nixlPush: concurrent legs, matched by their request id.
func nixlPush(c *call) (*transfer, error) {
	l, err := c.direction()
	if err != nil {
		return nil, err
	}
	if c.r.Header.Get("X-Request-ID") == "" {
		return nil, c.violation("no X-Request-Id")
	}
	if l == legPrefill {
		return c.atOnce(l, c.id, "", "")
	}
	p, err := c.texts("remote_engine_id", "remote_host", "remote_port")
	if err != nil {
		return nil, err
	}
	return c.atOnce(l, c.id, net.JoinHostPort(p["remote_host"], p["remote_port"]), p["remote_engine_id"])
}

// mooncake: concurrent legs, matched by a transfer id; the prefill rank's engine id comes from its /query.
func mooncake(c *call) (*transfer, error) {
	l, err := c.direction()
	if err != nil {
		return nil, err
	}
	p, err := c.texts("transfer_id")
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(p["transfer_id"], "xfer-") {
		return nil, c.violation("transfer_id does not begin with xfer-")
	}
	if l == legPrefill {
		if c.opts.Ranks > 1 && c.only < 0 && !c.pinned {
			return nil, c.violation("prefill leg without X-data-parallel-rank")
		}
		return c.atOnce(l, p["transfer_id"], "", "")
	}
	remote, err := c.texts("remote_bootstrap_addr", "remote_engine_id")
	if err != nil {
		return nil, err
	}
	addr, ok := strings.CutPrefix(remote["remote_bootstrap_addr"], "http://")
	if !ok {
		return nil, c.violation("remote_bootstrap_addr is not an http URL")
	}
	return c.atOnce(l, p["transfer_id"], addr, remote["remote_engine_id"])
}

// p2pNCCL: the addresses are part of the request id; prefill first.
func p2pNCCL(c *call) (*transfer, error) {
	rest, ok := strings.CutPrefix(c.id, "___prefill_addr_")
	if !ok {
		return nil, nil
	}
	prefill, rest, ok := strings.Cut(rest, "___decode_addr_")
	decode, unique, ok2 := strings.Cut(rest, "_")
	if !ok || !ok2 || unique == "" {
		return nil, c.violation("request id lacks an address or its unique part")
	}
	switch c.side.addr {
	case prefill:
		return c.atOnce(legPrefill, c.id, "", "")
	case decode:
		return c.atOnce(legDecode, c.id, prefill, "")
	}
	return nil, c.violation("neither address of the request id is this engine's")
}

// sharedStorage: prefill first with one token; decode finds the prompt by its content.
func sharedStorage(c *call) (*transfer, error) {
	if c.opts.Shared == nil {
		return nil, internalError("no shared store")
	}
	if c.opts.Role != Decode && len(c.seqs) == 1 && c.seqs[0].maxTokens == 1 {
		c.note(legPrefill)
		return &transfer{leg: legPrefill, after: func(*output) error {
			c.opts.Shared.put(c.prompts[0])
			return nil
		}}, nil
	}
	return c.fromStore(c.opts.Shared)
}

// fromStore starts sequences with the whole blocks found in a store outside the engine.
func (c *call) fromStore(store *SharedStore) (*transfer, error) {
	found := 0
	for _, s := range c.seqs {
		s.remote = store.longest(s.ids) / c.opts.BlockSize * c.opts.BlockSize
		found += s.remote
	}
	if found == 0 {
		return nil, nil
	}
	c.note(legDecode)
	c.stats.update(c.rec, func(rec *RequestRecord) { rec.RemoteTokens += found })
	return &transfer{leg: legDecode}, nil
}

// lmcache: prefill pushes the blocks to the receiver that the request names and answers the
// first token; decode gets the prompt's ids followed by that token.
func lmcache(c *call) (*transfer, error) {
	p := c.body.KVTransferParams
	if len(p) == 0 || p["prompt_token_ids"] != nil && len(p) == 1 {
		return c.fromStore(&c.received)
	}
	if c.api != body.Completions {
		return nil, c.violation("prefill leg on another path than /v1/completions")
	}
	if p["ret_first_tok"] != true {
		return nil, c.violation("ret_first_tok is missing")
	}
	spec, ok := p["disagg_spec"].(object)
	if !ok {
		return nil, c.violation("disagg_spec is missing")
	}
	id, _ := spec["req_id"].(string)
	host, _ := spec["receiver_host"].(string)
	init, _ := spec["receiver_init_port"].([]any)
	alloc, _ := spec["receiver_alloc_port"].([]any)
	if id == "" || host == "" || len(init) == 0 || len(alloc) == 0 {
		return nil, c.violation("disagg_spec lacks req_id, receiver_host, receiver_init_port or receiver_alloc_port")
	}
	if err := c.prefillLeg(); err != nil {
		return nil, err
	}
	c.seqs[0].keep = false
	return &transfer{leg: legPrefill, after: func(out *output) error {
		addr := net.JoinHostPort(host, fmt.Sprint(init[0]))
		if _, err := c.sidePost(c.r.Context(), "http://"+addr+"/sim/kv/push", pulled{IDs: c.prompts[0], Call: id}); err != nil {
			c.stats.count("transfer failed")
			return internalError("block transfer: " + err.Error())
		}
		if !c.faults.get().NoTransferParams {
			out.extra["kv_transfer_params"] = object{"first_tok": out.choices[0].ids[0]}
		}
		return nil
	}}, nil
}

// int64s reads a number or a list of numbers.
func int64s(raw json.RawMessage) ([]int64, bool) {
	var one int64
	if json.Unmarshal(raw, &one) == nil && len(raw) > 0 && raw[0] != 'n' {
		return []int64{one}, true
	}
	var many []int64
	if json.Unmarshal(raw, &many) == nil && len(many) > 0 {
		return many, true
	}
	return nil, false
}

// firstRoom is the bootstrap room that decides the prefill rank of a request that names none.
func (c *call) firstRoom() (int64, bool) {
	rooms, ok := int64s(c.body.BootstrapRoom)
	if !ok || rooms[0] < 0 {
		return 0, false
	}
	return rooms[0], true
}

// bootstrap is SGLang's protocol: concurrent legs with the same body, joined by a room at the prefill engine.
func bootstrap(c *call) (*transfer, error) {
	if c.body.BootstrapRoom == nil && c.body.BootstrapHost == nil {
		if c.opts.Role != Both {
			return nil, c.violation("no bootstrap_room")
		}
		return nil, nil
	}
	rooms, ok := int64s(c.body.BootstrapRoom)
	if !ok || len(rooms) != len(c.prompts) || len(c.seqs) != len(c.prompts) {
		return nil, c.violation("bootstrap_room does not fit %d prompts and %d sequences", len(c.prompts), len(c.seqs))
	}
	for _, room := range rooms {
		if room < 0 {
			return nil, c.violation("bootstrap_room is negative")
		}
	}
	var hosts []string
	var host string
	if json.Unmarshal(c.body.BootstrapHost, &host) == nil && host != "" {
		hosts = []string{host}
	} else if json.Unmarshal(c.body.BootstrapHost, &hosts) != nil || len(hosts) != len(rooms) {
		return nil, c.violation("bootstrap_host is missing")
	}
	ports, ok := int64s(c.body.BootstrapPort)
	if !ok {
		return nil, c.violation("bootstrap_port is missing")
	}
	addr := net.JoinHostPort(hosts[0], fmt.Sprint(ports[0]))
	if c.opts.Role == Prefill || c.opts.Role == Both && c.boot != nil && addr == c.boot.addr {
		if _, own, _ := net.SplitHostPort(c.boot.addr); own != fmt.Sprint(ports[0]) {
			return nil, c.violation("bootstrap_port %d is not this engine's", ports[0])
		}
		return c.bootstrapPrefill(rooms), nil
	}
	c.note(legDecode)
	return &transfer{leg: legDecode, before: func() error {
		for i, room := range rooms {
			p := pull{Key: fmt.Sprint("room ", room), WaitMS: transferWaitMS, Rank: c.body.DisaggPrefillRank}
			got, err := c.fetch(c.r.Context(), addr, p)
			if err != nil {
				return err
			}
			if got.Body != c.rec.BodySHA256 {
				c.stats.count("the legs have different bodies")
			}
			if err := c.take(i, got); err != nil {
				return err
			}
		}
		return nil
	}}, nil
}

// bootstrapPrefill answers when the decode side has taken the blocks, or fails if it never does.
func (c *call) bootstrapPrefill(rooms []int64) *transfer {
	c.note(legPrefill)
	for _, s := range c.seqs {
		s.maxTokens, s.keep = 1, true
	}
	return &transfer{leg: legPrefill, after: func(*output) error {
		for i, room := range rooms {
			x, err := c.hold(i, fmt.Sprint("room ", room))
			if err != nil {
				return err
			}
			select {
			case <-c.r.Context().Done():
				c.held.remove(fmt.Sprint("room ", room), x, false)
				return internalError("the prefill leg was cut")
			case <-x.taken:
			}
			if !x.pulled {
				return internalError("no decode leg came to the room")
			}
		}
		return nil
	}}
}

// trtDisagg is TensorRT-LLM's protocol: context_only, then generation_only with the context
// server's answer; with schedule_style generation_first both run concurrently.
func trtDisagg(c *call) (*transfer, error) {
	p := c.body.DisaggregatedParam
	kind, _ := p["request_type"].(string)
	id, _ := p["disagg_request_id"].(json.Number)
	switch kind {
	case "":
		if len(p) > 0 && p["route_hint"] == nil {
			return nil, c.violation("disaggregated_params without request_type")
		}
		return nil, nil
	case "context_only":
		return c.trtContext(p, id)
	case "generation_only":
		return c.trtGeneration(p, id)
	}
	return nil, c.violation("request_type %s", kind)
}

func (c *call) trtContext(p object, id json.Number) (*transfer, error) {
	c.note(legPrefill)
	if c.body.Stream || c.body.StreamOptions != nil {
		return nil, c.violation("streamed context_only request")
	}
	if err := c.single(); err != nil {
		return nil, err
	}
	if n, err := id.Int64(); id != "" && (err != nil || n < 1<<42) {
		return nil, c.violation("disagg_request_id below 2^42")
	}
	s := c.seqs[0]
	finish := "length"
	if s.maxTokens > 1 {
		finish = "not_finished"
	}
	s.maxTokens, s.keep = 1, true
	return &transfer{leg: legPrefill, after: func(out *output) error {
		if c.faults.get().ContextEnds {
			c.rank.release(s)
			out.choices[0].finish = "stop"
			out.perChoice["disaggregated_params"] = object{"request_type": "context_only", "ctx_request_id": nil, "disagg_request_id": nil}
			return nil
		}
		ctxID := cmp.Or(id, json.Number(fmt.Sprint(rand.Int64N(1<<62))))
		if _, err := c.hold(0, "ctx "+ctxID.String()); err != nil {
			return err
		}
		out.choices[0].finish = finish
		if c.faults.get().NoTransferParams {
			return nil
		}
		out.extra["prompt_token_ids"] = c.prompts[0]
		params := object{
			"request_type": "context_only", "ctx_request_id": ctxID, "disagg_request_id": ctxID, "first_gen_tokens": out.choices[0].ids,
			"encoded_opaque_state": base64.StdEncoding.EncodeToString([]byte(c.side.addr + " " + c.engineID(c.rank))),
			"ctx_dp_rank":          c.rank.local, "ctx_info_endpoint": "http://" + c.side.addr,
		}
		for _, name := range []string{"schedule_style", "conversation_id"} {
			if v, ok := p[name]; ok {
				params[name] = v
			}
		}
		out.perChoice["disaggregated_params"] = params
		return nil
	}}, nil
}

func (c *call) trtGeneration(p object, id json.Number) (*transfer, error) {
	c.note(legDecode)
	if err := c.single(); err != nil {
		return nil, err
	}
	ctxID, _ := p["ctx_request_id"].(json.Number)
	if ctxID == "" {
		return nil, c.violation("generation_only without ctx_request_id")
	}
	var addr, engine string
	if p["schedule_style"] == "generation_first" {
		if ctxID != id {
			return nil, c.violation("generation_first: ctx_request_id and disagg_request_id differ")
		}
		where, _ := p["ctx_info_endpoint"].(string)
		if list, ok := p["ctx_info_endpoint"].([]any); ok && len(list) > 0 {
			where, _ = list[0].(string)
		}
		addr = strings.TrimPrefix(where, "http://")
	} else {
		state, _ := p["encoded_opaque_state"].(string)
		raw, err := base64.StdEncoding.DecodeString(state)
		if err == nil {
			addr, engine, _ = strings.Cut(string(raw), " ")
		}
		if c.api == body.Chat && c.body.PromptTokenIDs == nil {
			return nil, c.violation("generation_only chat without prompt_token_ids")
		}
	}
	if addr == "" {
		return nil, c.violation("generation_only without the context server's state")
	}
	t := &transfer{leg: legDecode, before: func() error {
		got, err := c.fetch(c.r.Context(), addr, pull{Engine: engine, Key: "ctx " + ctxID.String(), WaitMS: transferWaitMS})
		if err != nil {
			return err
		}
		return c.take(0, got)
	}}
	if u, ok := p["ctx_usage"].(object); ok {
		t.usage = func(out object) {
			for _, name := range []string{"prompt_tokens", "prompt_tokens_details"} {
				if v, ok := u[name]; ok {
					out[name] = v
				}
			}
			if n, ok := out["prompt_tokens"].(json.Number); ok {
				prompt, _ := n.Int64()
				out["total_tokens"] = prompt + int64(out["completion_tokens"].(int))
			}
		}
	}
	return t, nil
}

// transferRoutes are the block transfers of the side listener.
func (e *Engine) transferRoutes(m *http.ServeMux, only int) {
	m.HandleFunc("POST /sim/kv/pull", e.servePull(only))
	m.HandleFunc("POST /sim/kv/push", func(w http.ResponseWriter, r *http.Request) {
		var p pulled
		if err := json.NewDecoder(r.Body).Decode(&p); err != nil || len(p.IDs) == 0 {
			http.Error(w, "no ids", http.StatusBadRequest)
			return
		}
		e.received.put(p.IDs)
		e.stats.count("blocks received")
		writeJSON(w, http.StatusOK, true)
	})
}

// bootstrapMux is the server at which the legs of SGLang and Mooncake meet.
func (e *Engine) bootstrapMux() http.Handler {
	m := http.NewServeMux()
	m.HandleFunc("POST /sim/kv/pull", e.servePull(-1))
	m.HandleFunc("GET /query", func(w http.ResponseWriter, _ *http.Request) {
		out := object{}
		for _, r := range e.ranks {
			out[strconv.Itoa(r.local)] = object{"engine_id": e.engineID(r)}
		}
		writeJSON(w, http.StatusOK, out)
	})
	m.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	return m
}

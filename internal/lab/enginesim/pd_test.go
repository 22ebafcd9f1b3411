package enginesim

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// xpyd is a prefill and a decode engine.
type xpyd struct {
	p, d   *Engine
	prompt string
}

func startPair(t *testing.T, o Options) *xpyd {
	t.Helper()
	o.BlockSize = 4
	o.EventsEndpoint = "tcp://127.0.0.1:0"
	op, od := o, o
	op.Role, od.Role = Prefill, Decode
	return &xpyd{p: start(t, op), d: start(t, od), prompt: words("Shared", 22)}
}

// clean asserts that nothing is held or used on either side.
func (x *xpyd) clean(t *testing.T) {
	t.Helper()
	for name, e := range map[string]*Engine{"prefill": x.p, "decode": x.d} {
		eventually(t, name+" holds nothing", func() bool {
			st := e.Stats()
			used := st.Held
			for _, r := range st.Ranks {
				used += r.BlocksUsed + r.Running + r.Waiting
			}
			return used == 0
		})
	}
}

func violations(e *Engine) (out []string) {
	for name := range e.Stats().Protocol {
		if strings.HasPrefix(name, "violation") {
			out = append(out, name)
		}
	}
	return out
}

// received asserts that the decode side took over the prompt's blocks, with one event for
// them, and counted none of them as its own cache hits.
func (x *xpyd) received(t *testing.T, a *answer) {
	t.Helper()
	if a.status != 200 {
		t.Fatalf("decode: %d %s", a.status, a.raw)
	}
	if v := append(violations(x.p), violations(x.d)...); len(v) > 0 {
		t.Fatalf("violations: %v", v)
	}
	st := x.d.Stats()
	rec := st.Requests[len(st.Requests)-1]
	if rec.RemoteTokens < 20 || rec.Leg != "decode" || rec.CachedTokens != 0 || st.Ranks[rec.Rank].TransferTokens < 20 {
		t.Fatalf("decode leg %+v, rank %+v", rec, st.Ranks[rec.Rank])
	}
	x.clean(t)
}

func (x *xpyd) body(extra m) m {
	b := m{"model": "demo", "prompt": x.prompt, "max_tokens": 6}
	maps.Copy(b, extra)
	return b
}

var nixlAsk = m{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil}

func TestNIXL(t *testing.T) {
	x := startPair(t, Options{Ranks: 2})
	s := subscribe(t, x.d, 1)
	a := post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": nixlAsk}), "X-Request-Id", "r1")
	if a.status != 200 || a.body.KV["remote_num_tokens"] != 22.0 || x.p.Stats().Held != 1 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	b := post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": a.body.KV}), "X-Request-Id", "r1", "X-data-parallel-rank", "1")
	x.received(t, b)
	_, batch := receive(t, s)
	if ev := batch[1].([]any)[0].(map[string]any); len(ev["block_hashes"].([]any)) != 5 {
		t.Errorf("first event of the decode side: %v", ev)
	}
	whole := post(t, start(t, Options{BlockSize: 4}).URL()+"/v1/completions", x.body(nil))
	if b.body.Choices[0].Text != whole.body.Choices[0].Text {
		t.Error("the text differs from that of one engine")
	}
	// Blocks that decode already holds are not counted as transferred again.
	a = post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": nixlAsk}), "X-Request-Id", "r2")
	if a.cached() != 20 {
		t.Errorf("prefill cached %d", a.cached())
	}
	b = post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": a.body.KV}), "X-Request-Id", "r2", "X-data-parallel-rank", "1")
	if b.cached() != 20 {
		t.Errorf("decode cached %d of its own", b.cached())
	}
	x.clean(t)
}

func TestNIXLIsStrict(t *testing.T) {
	x := startPair(t, Options{Ranks: 2})
	with := func(base m, key string, v any) m {
		out := maps.Clone(base)
		if v == "gone" {
			delete(out, key)
		} else {
			out[key] = v
		}
		return out
	}
	for _, row := range []struct {
		name string
		body m
	}{
		{"streamed", x.body(m{"max_tokens": 1, "stream": true, "kv_transfer_params": nixlAsk})},
		{"more than a token", x.body(m{"kv_transfer_params": nixlAsk})},
		{"two answers", x.body(m{"max_tokens": 1, "n": 2, "kv_transfer_params": nixlAsk})},
		{"both ways", x.body(m{"max_tokens": 1, "kv_transfer_params": with(nixlAsk, "do_remote_prefill", true)})},
		{"no direction", x.body(m{"max_tokens": 1, "kv_transfer_params": with(nixlAsk, "do_remote_prefill", "gone")})},
		{"remote host on prefill", x.body(m{"max_tokens": 1, "kv_transfer_params": with(nixlAsk, "remote_host", "h")})},
	} {
		if a := post(t, x.p.URL()+"/v1/completions", row.body); a.status != 400 {
			t.Errorf("prefill %s: %d %s", row.name, a.status, a.raw)
		}
	}
	ask := func(id string) m {
		a := post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": nixlAsk}), "X-Request-Id", id)
		return a.body.KV
	}
	for i, row := range []struct {
		name, key string
		value     any
		id        string
		status    int
	}{
		{"no engine id", "remote_engine_id", "gone", "", 400},
		{"wrong engine id", "remote_engine_id", "other", "", 500},
		{"no blocks", "remote_block_ids", "gone", "", 400},
		{"wrong request", "remote_request_id", "other", "", 500},
		{"wrong port", "remote_port", 1, "", 500},
		{"other X-Request-Id", "tp_size", 1, "another", 400},
	} {
		id := fmt.Sprint("s", i)
		params := with(ask(id), row.key, row.value)
		if row.id != "" {
			id = row.id
		}
		if a := post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": params}), "X-Request-Id", id); a.status != row.status {
			t.Errorf("decode %s: %d %s", row.name, a.status, a.raw)
		}
	}
	params := ask("other prompt")
	if a := post(t, x.d.URL()+"/v1/completions", m{"prompt": "another", "kv_transfer_params": params}, "X-Request-Id", "other prompt"); a.status != 500 {
		t.Errorf("another prompt: %d", a.status)
	}
	if a := post(t, x.d.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": nixlAsk})); a.status != 400 {
		t.Errorf("prefill leg at a decode engine: %d", a.status)
	}
	if len(violations(x.d)) < 4 || len(violations(x.p)) < 4 {
		t.Errorf("violations: %v %v", violations(x.p), violations(x.d))
	}
	x.p.Restart()
	x.clean(t)
}

// both sends two legs concurrently and returns their answers.
func both(t *testing.T, prefill, decode func() *answer) (p, d *answer) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() { d = decode() })
	wg.Go(func() { p = prefill() })
	wg.Wait()
	if p.status != 200 {
		t.Fatalf("prefill: %d %s", p.status, p.raw)
	}
	return p, d
}

func TestConcurrentLegs(t *testing.T) {
	t.Run("mooncake", func(t *testing.T) {
		x := startPair(t, Options{Connector: "mooncake", Ranks: 2})
		res, err := http.Get("http://" + x.p.BootstrapAddr() + "/query")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var query map[string]struct {
			ID string `json:"engine_id"`
		}
		if err := json.NewDecoder(res.Body).Decode(&query); err != nil {
			t.Fatal(err)
		}
		ask := m{"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "xfer-1"}
		get := m{"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": "xfer-1", "remote_bootstrap_addr": "http://" + x.p.BootstrapAddr(), "remote_engine_id": query["1"].ID}
		_, d := both(t,
			func() *answer {
				return post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": ask}), "X-Request-Id", "r", "X-data-parallel-rank", "1")
			},
			func() *answer {
				return post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": get}), "X-Request-Id", "r")
			})
		x.received(t, d)
		// A wrong rank is detected.
		ask["transfer_id"], get["transfer_id"] = "xfer-2", "xfer-2"
		post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": ask}), "X-Request-Id", "r", "X-data-parallel-rank", "0")
		if d := post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": get}), "X-Request-Id", "r"); d.status != 500 {
			t.Errorf("wrong rank: %d", d.status)
		}
		if a := post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": m{"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "xfer-3"}})); a.status != 400 {
			t.Errorf("unpinned prefill leg: %d", a.status)
		}
	})
	t.Run("nixl-push", func(t *testing.T) {
		x := startPair(t, Options{Connector: "nixl-push"})
		host, port, _ := net.SplitHostPort(x.p.SideAddr())
		get := m{"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": x.p.engineID(x.p.ranks[0]), "remote_host": host, "remote_port": port}
		_, d := both(t,
			func() *answer {
				return post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": nixlAsk}), "X-Request-Id", "r")
			},
			func() *answer {
				return post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": get}), "X-Request-Id", "r")
			})
		x.received(t, d)
	})
	t.Run("nixl-push, a side channel a rank", func(t *testing.T) {
		ports, err := FreePorts(2)
		if err != nil {
			t.Fatal(err)
		}
		p := start(t, Options{Connector: "nixl-push", Ranks: 2, BlockSize: 4, Role: Prefill, SideAddr: fmt.Sprint("127.0.0.1:", ports)})
		x := &xpyd{p: p, d: start(t, Options{Connector: "nixl-push", Ranks: 2, BlockSize: 4, Role: Decode}), prompt: words("Shared", 22)}
		for i, row := range []struct{ rank, idRank, portRank, status int }{{1, 1, 1, 200}, {0, 0, 0, 200}, {1, 0, 1, 500}, {1, 1, 0, 500}} {
			id := fmt.Sprint("r", i)
			get := m{"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": p.engineID(p.ranks[row.idRank]), "remote_host": "127.0.0.1", "remote_port": ports + row.portRank}
			_, d := both(t,
				func() *answer {
					return post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": nixlAsk}), "X-Request-Id", id, "X-data-parallel-rank", fmt.Sprint(row.rank))
				},
				func() *answer {
					return post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": get}), "X-Request-Id", id)
				})
			if d.status != row.status {
				t.Errorf("%+v: %d %s", row, d.status, d.raw)
			}
		}
		if v := violations(p); len(v) != 2 {
			t.Errorf("%v", v)
		}
	})
	t.Run("sglang", func(t *testing.T) {
		x := startPair(t, Options{Engine: SGLang, Ranks: 2})
		host, port, _ := net.SplitHostPort(x.p.BootstrapAddr())
		body := func(room int64) string {
			return fmt.Sprintf(`{"prompt":%q,"max_tokens":6,"bootstrap_host":%q,"bootstrap_port":%s,"bootstrap_room":%d,"disagg_prefill_dp_rank":1}`, x.prompt, host, port, room)
		}
		_, d := both(t,
			func() *answer { return post(t, x.p.URL()+"/v1/completions", body(1<<62+1)) },
			func() *answer { return post(t, x.d.URL()+"/v1/completions", body(1<<62+1)) })
		x.received(t, d)
		if n := x.d.Stats().Protocol["the legs have different bodies"]; n != 0 {
			t.Errorf("%d pairs of different bodies", n)
		}
		for _, bad := range []string{`"bootstrap_room":-1`, `"bootstrap_room":[1,2]`, `"bootstrap_room":7`} {
			raw := fmt.Sprintf(`{"prompt":"x","bootstrap_host":%q,%s}`, host, bad)
			if a := post(t, x.p.URL()+"/v1/completions", raw); a.status != 400 {
				t.Errorf("%s: %d", bad, a.status)
			}
		}
		if a := post(t, x.d.URL()+"/v1/completions", `{"prompt":"x"}`); a.status != 400 {
			t.Errorf("decode without a room: %d", a.status)
		}
		// A room for rank 0, although the request names rank 1.
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = tryPost(x.p.URL()+"/v1/completions", body(2)) })
		if a := post(t, x.d.URL()+"/v1/completions", body(2)); a.status != 500 {
			t.Errorf("wrong prefill rank: %d", a.status)
		}
		x.p.Restart() // the prefill leg would wait for its lease
		wg.Wait()
		x.clean(t)
	})
	t.Run("sglang without a decode leg", func(t *testing.T) {
		x := startPair(t, Options{Engine: SGLang, KVLease: 10 * time.Millisecond})
		host, port, _ := net.SplitHostPort(x.p.BootstrapAddr())
		raw := fmt.Sprintf(`{"prompt":%q,"bootstrap_host":%q,"bootstrap_port":%s,"bootstrap_room":5}`, x.prompt, host, port)
		if a := post(t, x.p.URL()+"/v1/completions", raw); a.status != 500 {
			t.Errorf("%d %s", a.status, a.raw)
		}
		if a := post(t, x.p.URL()+"/v1/completions", raw); a.status != 400 {
			t.Errorf("a room used twice: %d %s", a.status, a.raw)
		}
		// Decode comes after the lease, which breaks no rule, and for a request that there never was.
		for key, counts := range map[string]string{"room 5": "pull of blocks that are gone", "room 6": "violation: pull of an unknown request"} {
			if a := post(t, "http://"+x.p.BootstrapAddr()+"/sim/kv/pull", m{"key": key}); a.status != 404 || x.p.Stats().Protocol[counts] != 1 {
				t.Errorf("%s: %d %s, %v", key, a.status, a.raw, x.p.Stats().Protocol)
			}
		}
		x.clean(t)
	})
}

func TestTensorRTContextFirst(t *testing.T) {
	x := startPair(t, Options{Engine: TRTLLM, Ranks: 2})
	id := json.Number(fmt.Sprint(int64(1)<<42 + 5))
	a := post(t, x.p.URL()+"/v1/completions", x.body(m{"disaggregated_params": m{"request_type": "context_only", "disagg_request_id": id, "conversation_id": "c"}}))
	var ctx struct {
		IDs     []uint32 `json:"prompt_token_ids"`
		Usage   m        `json:"usage"`
		Choices []struct {
			Finish string `json:"finish_reason"`
			Params m      `json:"disaggregated_params"`
		} `json:"choices"`
	}
	d := json.NewDecoder(strings.NewReader(string(a.raw)))
	d.UseNumber()
	if err := d.Decode(&ctx); err != nil || a.status != 200 || len(ctx.IDs) != 22 || ctx.Choices[0].Finish != "not_finished" {
		t.Fatalf("%v %s", err, a.raw)
	}
	params := ctx.Choices[0].Params
	params["request_type"] = "generation_only"
	params["ctx_usage"] = ctx.Usage
	g := post(t, x.d.URL()+"/v1/completions", x.body(m{"prompt": ctx.IDs, "disaggregated_params": params}))
	x.received(t, g)
	if g.body.Usage.Prompt != 22 {
		t.Errorf("usage %s", g.raw)
	}
	for name, bad := range map[string]m{
		"stale label":  {"request_type": "context_only", "conversation_id": "c"},
		"no context":   {"request_type": "generation_only"},
		"no state":     {"request_type": "generation_only", "ctx_request_id": id},
		"unknown type": {"request_type": "context_and_generation"},
		"no type":      {"conversation_id": "c"},
	} {
		if a := post(t, x.d.URL()+"/v1/completions", x.body(m{"disaggregated_params": bad})); a.status != 400 {
			t.Errorf("%s: %d %s", name, a.status, a.raw)
		}
	}
	if a := post(t, x.p.URL()+"/v1/completions", x.body(m{"disaggregated_params": m{"request_type": "context_only", "disagg_request_id": 7}})); a.status != 400 {
		t.Errorf("small id: %d", a.status)
	}
}

func TestTensorRTGenerationFirst(t *testing.T) {
	x := startPair(t, Options{Engine: TRTLLM})
	id := int64(1)<<42 + 6
	style := m{"disagg_request_id": id, "schedule_style": "generation_first"}
	ctx, gen := maps.Clone(style), maps.Clone(style)
	ctx["request_type"] = "context_only"
	gen["request_type"], gen["ctx_request_id"], gen["ctx_info_endpoint"] = "generation_only", id, []string{"http://" + x.p.SideAddr()}
	_, d := both(t,
		func() *answer { return post(t, x.p.URL()+"/v1/completions", x.body(m{"disaggregated_params": ctx})) },
		func() *answer { return post(t, x.d.URL()+"/v1/completions", x.body(m{"disaggregated_params": gen})) })
	x.received(t, d)
}

func TestOtherConnectors(t *testing.T) {
	t.Run("moriio", func(t *testing.T) {
		x := startPair(t, Options{Connector: "moriio"})
		ask := maps.Clone(nixlAsk)
		ask["transfer_id"] = "tx-1"
		a := post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": ask}), "X-Request-Id", "r")
		x.received(t, post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": a.body.KV}), "X-Request-Id", "r"))
		if a := post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": nixlAsk})); a.status != 400 {
			t.Errorf("no transfer id: %d", a.status)
		}
	})
	t.Run("moriio-write", func(t *testing.T) {
		x := startPair(t, Options{Connector: "moriio-write"})
		to := func(e *Engine, l leg, more m) m {
			host, port, _ := net.SplitHostPort(e.SideAddr())
			params := m{"do_remote_decode": l == legPrefill, "do_remote_prefill": l == legDecode, "transfer_id": "tx-1", "remote_engine_id": nil,
				"remote_block_ids": []int{}, "remote_host": host, "remote_handshake_port": 6301, "remote_notify_port": json.Number(port)}
			maps.Copy(params, more)
			return params
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1, "kv_transfer_params": to(x.d, legPrefill, nil)}), "X-Request-Id", "r")
		})
		a := post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": to(x.p, legDecode, m{"is_request_leader": true})}), "X-Request-Id", "r")
		wg.Wait()
		x.received(t, a)
		for name, bad := range map[string]m{"no leader": to(x.p, legDecode, nil), "itself": to(x.d, legDecode, m{"is_request_leader": true})} {
			if a := post(t, x.d.URL()+"/v1/completions", x.body(m{"kv_transfer_params": bad})); a.status != 400 {
				t.Errorf("%s: %d", name, a.status)
			}
		}
	})
	t.Run("p2p-nccl", func(t *testing.T) {
		x := startPair(t, Options{Connector: "p2p-nccl"})
		id := fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_u1", x.p.SideAddr(), x.d.SideAddr())
		post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1}), "X-Request-Id", id)
		x.received(t, post(t, x.d.URL()+"/v1/completions", x.body(nil), "X-Request-Id", id))
		for _, bad := range []string{"___prefill_addr_x", "___prefill_addr_1.1.1.1:1___decode_addr_1.1.1.1:2_u"} {
			if a := post(t, x.d.URL()+"/v1/completions", x.body(nil), "X-Request-Id", bad); a.status != 400 {
				t.Errorf("%s: %d", bad, a.status)
			}
		}
	})
	t.Run("sharedstorage", func(t *testing.T) {
		x := startPair(t, Options{Connector: "sharedstorage", Shared: &SharedStore{}})
		post(t, x.p.URL()+"/v1/completions", x.body(m{"max_tokens": 1}))
		x.received(t, post(t, x.d.URL()+"/v1/completions", x.body(nil)))
	})
	t.Run("lmcache", func(t *testing.T) {
		x := startPair(t, Options{Connector: "lmcache"})
		host, port, _ := net.SplitHostPort(x.d.SideAddr())
		ids := x.d.opts.Tokenizer.Encode(x.prompt, false)
		ask := m{"ret_first_tok": true, "disagg_spec": m{"req_id": "q", "receiver_host": host, "receiver_init_port": []string{port}, "receiver_alloc_port": []string{port}}}
		a := post(t, x.p.URL()+"/v1/completions", m{"prompt": ids, "max_tokens": 1, "kv_transfer_params": ask})
		if a.status != 200 {
			t.Fatalf("%d %s", a.status, a.raw)
		}
		first := uint32(a.body.KV["first_tok"].(float64))
		x.received(t, post(t, x.d.URL()+"/v1/completions", m{"prompt": append(ids, first), "max_tokens": 5}))
		delete(ask, "ret_first_tok")
		if a := post(t, x.p.URL()+"/v1/completions", m{"prompt": ids, "max_tokens": 1, "kv_transfer_params": ask}); a.status != 400 {
			t.Errorf("no ret_first_tok: %d", a.status)
		}
	})
}

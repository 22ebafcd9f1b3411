package disagg

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

// touched are all fields that some connector may change; all others belong to the client.
var touched = map[string]bool{
	"max_tokens": true, "max_completion_tokens": true, "max_output_tokens": true, "min_tokens": true, "min_completion_tokens": true,
	"stream": true, "stream_options": true, "store": true, "background": true, "sampling_params": true, "kv_transfer_params": true,
	"disaggregated_params": true, "bootstrap_host": true, "bootstrap_port": true, "bootstrap_room": true, "request_id": true, "disagg_prefill_dp_rank": true,
	"routed_dp_rank": true, "prompt": true, "prompt_token_ids": true, "truncate_prompt_tokens": true,
}

// spelled are values whose spelling a decoder would not preserve.
var spelled = []string{`1e5`, `1.0`, `-0`, `"h\u00e9\/"`, `{ "b" : 1 , "a":[ ] }`, `[1,2 ,3]`, `null`, `"\ud83d\ude42"`, `12345678901234567890`, `true`, `""`}

// wholeSettings are all settings that any connector uses.
func wholeSettings() config.WorkerDisagg {
	return config.WorkerDisagg{ReceiverHost: "h", InitPorts: []int{1}, AllocPorts: []int{2}, ZMQ: "h:1", EngineID: "e"}
}

// answerOf is a valid prefill answer for every connector.
const answerOf = `{"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":1,"disagg_request_id":1}}],
	"prompt_token_ids":[1,2],"kv_transfer_params":{"do_remote_prefill":true,"first_tok":5}}`

func protocolsForTest(t testing.TB) []*Protocol {
	t.Helper()
	var out []*Protocol
	for _, name := range connectors() {
		for _, appends := range []bool{false, true} {
			p, err := New(name, Options{Append: appends, Get: func(context.Context, string, string, bool) ([]byte, error) {
				return []byte(`{"0":{"engine_id":"e"},"disaggregated_params":{"ctx_info_endpoint":"http://x"}}`), nil
			}})
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, p)
		}
	}
	return out
}

// members returns a body's top-level members in order, as written.
func members(t *rapid.T, body []byte) (keys []string, values map[string]string) {
	values = map[string]string{}
	d := json.NewDecoder(bytes.NewReader(body))
	if _, err := d.Token(); err != nil {
		t.Fatal(err)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			t.Fatal(err)
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			t.Fatal(err)
		}
		keys = append(keys, key.(string))
		values[key.(string)] = string(raw)
	}
	return keys, values
}

// Law: an edit changes only the bytes of its own field; the others keep their bytes
// and their order, on both legs of every connector.
func TestLegsKeepEveryOtherByte(t *testing.T) {
	all := protocolsForTest(t)
	rapid.Check(t, func(t *rapid.T) {
		p := rapid.SampledFrom(all).Draw(t, "protocol")
		api := rapid.SampledFrom([]body.API{body.Chat, body.Completions, body.Responses, body.Messages, body.VLLMGenerate, body.Generate}).Draw(t, "api")
		space := rapid.SampledFrom([]string{"", " ", "\n\t"})
		var b strings.Builder
		b.WriteString(space.Draw(t, "lead") + "{")
		names := rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"model", "messages", "tools", "x", "y\\u0020", "metadata", "max_tokens", "stream",
			"min_tokens", "sampling_params", "kv_transfer_params", "stop", "seed", "prompt", "input", "token_ids", "text"}), 1, 10, rapid.ID).Draw(t, "names")
		for i, name := range names {
			if i > 0 {
				b.WriteString(",")
			}
			fmt.Fprintf(&b, "%s%q%s:%s%s", space.Draw(t, "before"), name, space.Draw(t, "between"), rapid.SampledFrom(spelled).Draw(t, "value"), space.Draw(t, "after"))
		}
		b.WriteString("}" + space.Draw(t, "tail"))
		raw := []byte(strings.ReplaceAll(b.String(), `\\u`, `\u`))
		req, err := body.Parse(api, raw)
		if err != nil {
			t.Fatal(err)
		}
		lax := *p
		lax.edited = func(body.API) (none [3][]body.Edit) { return none } // also for values that engines may refuse
		if lax.Refuses(req, []uint32{1, 2}) != "" {
			return
		}
		side := Side{Worker: "w", Address: "10.0.0.1:80", Rank: 0, Ranks: 2, ByHeader: true, Settings: wholeSettings()}
		x := &Exchange{Request: req, Path: "/v1/completions", ID: "id", IDs: []uint32{1, 2}, Prefill: side, Decode: side, Unique: NewUnique()}
		var legs []Leg
		if !p.NoLeg {
			leg, err := p.Prefill(context.Background(), x)
			if err != nil {
				t.Fatal(err)
			}
			if p.Name != "lmcache" || api != body.Chat { // its prefill leg is a different request
				legs = append(legs, leg)
			}
		}
		answer, err := ParseAnswer([]byte(answerOf))
		if err != nil {
			t.Fatal(err)
		}
		leg, err := p.Decode(x, answer)
		if err != nil {
			t.Fatal(err)
		}
		before := string(raw)
		beforeKeys, beforeValues := members(t, raw)
		for i := range append(legs, leg) {
			l := append(legs, leg)[i]
			out, err := l.Body(context.Background(), req)
			if err != nil {
				t.Fatal(err)
			}
			if string(raw) != before {
				t.Fatal("got changes in the request's own bytes")
			}
			if out == nil {
				continue
			}
			keys, values := members(t, out)
			at := 0
			for _, k := range beforeKeys {
				if touched[k] {
					continue
				}
				if values[k] != beforeValues[k] {
					t.Fatalf("%s: %s: want %s, got %s", p.Name, k, beforeValues[k], values[k])
				}
				for at < len(keys) && keys[at] != k {
					at++
				}
				if at == len(keys) {
					t.Fatalf("%s: got %s at another position in %s", p.Name, k, out)
				}
			}
			for _, k := range keys {
				if _, was := beforeValues[k]; !was && !touched[k] {
					t.Fatalf("%s: got new field %s", p.Name, k)
				}
			}
		}
	})
}

// A room is in range, unique within a batch, and equal to the prefill rank modulo the number of
// ranks.
func TestRooms(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 64).Draw(t, "ranks")
		rank := rapid.IntRange(0, ranks-1).Draw(t, "rank")
		x := &Exchange{Prefill: Side{Rank: rank, Ranks: ranks}, Unique: Unique{Number: rapid.Uint64().Draw(t, "number")}}
		seen := map[uint64]bool{}
		for i := range 8 {
			n := room(x, i)
			if n>>63 != 0 || ranks > 1 && n%uint64(ranks) != uint64(rank) || seen[n] {
				t.Fatalf("room %d of rank %d/%d: %d", i, rank, ranks, n)
			}
			seen[n] = true
		}
	})
}

// Numbers of replicas are above those of TensorRT-LLM's servers, within 63 bits, and never equal.
func TestTransferIDs(t *testing.T) {
	seen := map[uint64]bool{}
	for range 4 {
		p, err := New("trtllm", Options{})
		if err != nil {
			t.Fatal(err)
		}
		for range 25_000 {
			n := p.transferID()
			if n < 1<<42 || n>>63 != 0 || seen[n] {
				t.Fatalf("got %d, seen before %v", n, seen[n])
			}
			seen[n] = true
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{answerOf, `{"choices":[{"finish_reason":"stop","message":{}}]}`, `{"kv_transfer_params":{}}`, `[]`, ``, "{\"choices\":[{}]}"} {
		f.Add(seed, `{"prompt":"x","stream":true}`)
	}
	all := protocolsForTest(f)
	f.Fuzz(func(t *testing.T, answer, raw string) {
		a, err := ParseAnswer([]byte(answer))
		if err != nil {
			return
		}
		for _, api := range []body.API{body.Completions, body.Chat} {
			req, err := body.Parse(api, []byte(raw))
			if err != nil {
				return
			}
			side := Side{Worker: "w", Address: "10.0.0.1:80", Rank: 0, Ranks: 2, Settings: wholeSettings()}
			for _, p := range all {
				if p.AtOnce || p.Refuses(req, []uint32{1}) != "" {
					continue
				}
				leg, err := p.Decode(&Exchange{Request: req, IDs: []uint32{1}, Prefill: side, Decode: side}, a)
				if err != nil {
					continue
				}
				out, err := leg.Body(context.Background(), req)
				if err != nil || out != nil && !json.Valid(out) {
					t.Fatalf("%s: %v %q", p.Name, err, out)
				}
			}
		}
	})
}

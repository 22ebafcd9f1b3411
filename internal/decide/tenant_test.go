package decide

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

const saltHeader = "x-tenant"

// saltOf returns the salt that an engine reads from a body, "" for none.
func saltOf(t *testing.T, api body.API, r *extproc.Request, d *extproc.Decision) string {
	t.Helper()
	raw := d.Body
	if raw == nil {
		raw = r.Body
	}
	p, err := body.Parse(api, raw)
	if err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
	return p.CacheSalt()
}

func TestATenantsSaltReachesTheEngine(t *testing.T) {
	const chat = `{"model":"demo","messages":[{"role":"user","content":"x"}]%s}`
	a := TenantSalt("a", nil)
	for name, c := range map[string]struct {
		engine, path, body, tenant, want string
		status                           int
	}{
		"chat":                      {path: "/v1/chat/completions", body: fmt.Sprintf(chat, ""), tenant: "a", want: a},
		"another tenant":            {path: "/v1/chat/completions", body: fmt.Sprintf(chat, ""), tenant: "b", want: TenantSalt("b", nil)},
		"a salt of the client's":    {path: "/v1/chat/completions", body: fmt.Sprintf(chat, `,"cache_salt":"x"`), tenant: "a", want: TenantSalt("a", []byte(`"x"`))},
		"another tenant's salt":     {path: "/v1/chat/completions", body: fmt.Sprintf(chat, `,"cache_salt":"`+a+`"`), tenant: "b", want: TenantSalt("b", []byte(`"`+a+`"`))},
		"two salts, one escaped":    {path: "/v1/chat/completions", body: fmt.Sprintf(chat, `,"cache_salt":"x","cache\u005fsalt":"y"`), tenant: "a", want: TenantSalt("a", []byte(`"y"`))},
		"null":                      {path: "/v1/chat/completions", body: fmt.Sprintf(chat, `,"cache_salt":null`), tenant: "a", want: a},
		"SGLang's own API":          {engine: "sglang", path: "/generate", body: `{"text":"x"}`, tenant: "a", want: a},
		"TensorRT-LLM":              {engine: "trtllm", path: "/v1/chat/completions", body: fmt.Sprintf(chat, ""), tenant: "a", want: a},
		"no tenant":                 {path: "/v1/chat/completions", body: fmt.Sprintf(chat, ""), status: 403},
		"no body to read":           {path: "/v1/chat/completions", body: "", tenant: "a", status: 400},
		"UTF-16":                    {path: "/v1/completions", body: "\xff\xfe{\x00}\x00", tenant: "a", status: 400},
		"an API without salt":       {path: "/v1/messages", body: fmt.Sprintf(chat, `,"max_tokens":1`), tenant: "a", status: 400},
		"SGLang has none for these": {engine: "sglang", path: "/v1/embeddings", body: `{"model":"demo","input":"x"}`, tenant: "a", status: 400},
		"SGLang's Ollama API":       {engine: "sglang", path: "/api/generate", body: `{"model":"demo","prompt":"x"}`, tenant: "a", status: 400},
		"TensorRT-LLM neither":      {engine: "trtllm", path: "/v1/completions", body: `{"model":"demo","prompt":"x"}`, tenant: "a", status: 400},
		"an unknown API":            {path: "/invocations", body: `{"prompt":"x"}`, tenant: "a", status: 400},
		"an unknown API, no tenant": {path: "/invocations", body: `{"prompt":"x"}`, status: 403},
		"no cache":                  {path: "/tokenize", body: `{"model":"demo","prompt":"x"}`, tenant: "a"},
	} {
		t.Run(name, func(t *testing.T) {
			w := worker("a", 1)
			if c.engine != "" {
				w.Engine = c.engine
			}
			b := newBench(t, "tenants: {salt_header: X-Tenant}\n", w)
			r := b.request(c.path, c.body)
			if c.tenant != "" {
				r.Headers = []extproc.Header{{Name: saltHeader, Value: c.tenant}}
			}
			d := b.Decide(t.Context(), r)
			defer end(&d, 200)
			if c.status != 0 {
				if d.Reject == nil || d.Reject.Status != c.status {
					t.Errorf("got %+v, want status %d", d.Reject, c.status)
				}
				return
			}
			if d.Reject != nil {
				t.Fatalf("got %d %s, want it sent on", d.Reject.Status, d.Reject.Body)
			}
			api, _ := body.Detect("POST", c.path)
			if got := saltOf(t, api, r, &d); got != c.want {
				t.Errorf("got salt %q, want %q", got, c.want)
			}
			if load := b.ledger(); load.Reservations != 1 {
				t.Errorf("got %d reservations, want 1", load.Reservations)
			}
		})
	}
}

// Engines keep sessions and media for all tenants by the names that clients give them: with one, a client would get another
// tenant's prompt or image.
func TestNoTenantNamesWhatAllShare(t *testing.T) {
	const chat, message = "/v1/chat/completions", `{"model":"demo","%s":[{"role":"user","content":[{"type":"text","text":"uuid \u0075uid"}]},{"role":"user","content":[%s]}]}`
	with, without := newBench(t, "tenants: {salt_header: X-Tenant, required: false}\n", worker("a", 1)), newBench(t, "", worker("a", 1))
	for _, c := range []struct {
		path, body string
		refused    bool
	}{
		{chat, fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":null,"uuid":"x"}`), true},
		{chat, fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":null,"u\u0075id":"x"}`), true},
		{chat, fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":{"url":"data:,uuid"}}`), false},
		{chat, fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":{"url":"data:,","content_hash":"sha256:0"}}`), true},
		{chat, fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":{"url":"data:,","content_hash":null}}`), false},
		{chat, `{"model":"demo","tools":[{"uuid":1}],"metadata":{"uuid":"x"},"messages":[{"role":"user","content":"uuid"}]}`, false},
		{chat, fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":{"url":"data:,"},"uuid":null}`), false},
		{"/v1/responses", fmt.Sprintf(message, "input", `{"type":"input_image","uuid":"x"}`), true},
		{"/invocations", fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":null,"uuid":"x"}`), true},
		{"/score", `{"model":"demo","queries":"x","documents":[{"content":[{"type":"image_url","image_url":null,"uuid":"x"}]}]}`, true},
		{"/v1/score", `{"model":"demo","text_1":{"content":[{"type":"image_url","image_url":null,"u\u0075id":"x"}]},"text_2":"x"}`, true},
		{"/v2/rerank", `{"model":"demo","query":{"content":[{"type":"image_url","image_url":null,"uuid":"x"}]},"documents":["x"]}`, true},
		{"/rerank", `{"model":"demo","query":"uuid","documents":[{"content":[{"type":"text","text":"uuid"}]}]}`, false},
		{"/pooling", fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":null,"uuid":"x"}`), true},
		{"/classify", fmt.Sprintf(message, "messages", `{"type":"image_url","image_url":null,"uuid":"x"}`), true},
		{"/v1/chat/completions/batch", `{"model":"demo","messages":[[{"role":"user","content":[{"type":"image_url","image_url":null,"uuid":"x"}]}]]}`, true},
		{"/v1/messages", `{"model":"demo","messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"uuid":"x"}}]}]}`, false},
		{"/inference/v1/generate", `{"model":"demo","token_ids":[1],"features":{"mm_hashes":{"image":["x"]}}}`, true},
		{"/inference/v1/generate", `{"model":"demo","token_ids":[1],"content_parts":[{"type":"image_url","uuid":"x"}]}`, true},
		{"/inference/v1/generate", `{"model":"demo","token_ids":[1],"features":null}`, false},
		{"/generate", `{"text":"x","mm_hashes":["0"]}`, true},
		{"/generate", `{"text":"x","mm_content_hashes":["0"]}`, true},
		{"/generate", `{"text":"x","image_data":[{"url":"data:,","content_hash":"sha256:0"}]}`, true},
		{"/generate", `{"text":["x"],"image_data":[[{"format":"processor_output","h\u0061sh":1}]]}`, true},
		{"/generate", `{"text":"x","image_data":{"format":"precomputed_embedding","pad_value":1}}`, true},
		{"/generate", `{"text":"\"hash\" uuid","image_data":[{"url":"data:,hash"}]}`, false},
		{"/vertex_generate", `{"instances":[{"text":"x","image_data":[{"url":"data:,","content_hash":"sha256:0"}]}]}`, true},
		{chat, `{"model":"demo","metadata":{"hash":"x"},"messages":[{"role":"user","content":"uuid","identity":1}]}`, false},
		{"/generate", `{"text":"repeat the above","session_params":{"id":"x"}}`, true},
		{"/vertex_generate", `{"instances":[{"text":"x"}],"parameters":{"session_params":{"id":"x"}}}`, true},
		{"/vertex_generate", `{"instances":[{"text":"x"}],"parameters":{"stream":false}}`, false},
	} {
		for b, want := range map[*bench]bool{with: c.refused, without: false} {
			d := b.Decide(t.Context(), b.request(c.path, c.body))
			if got := d.Reject != nil && d.Reject.Details == "kvlane_tenant_not_salted"; got != want {
				t.Errorf("%s %s: got refused %v %+v, want %v", c.path, c.body, got, d.Reject, want)
			}
			end(&d, 200)
		}
	}
}

// SGLang marks blocks by session_id, and may prefer requests by routing_key, for all tenants alike: the former becomes the tenant's
// own, the latter is removed. The conversation stays the client's.
func TestSessionsOfEnginesAreTheTenantsOwn(t *testing.T) {
	own := func(tenant, session string) string { return TenantSalt(tenant, []byte("session "+session)) }
	for _, c := range []struct {
		path, body, tenant string
		want, not          []string // what the engine gets, and what not
		id                 string   // of the conversation
	}{
		{"/generate", `{"text":"x","session_id":"s"}`, "a", []string{`"session_id":"` + own("a", `"s"`) + `"`}, []string{`"s"`}, "s"},
		{"/generate", `{"text":"x","session_id":"s"}`, "b", []string{`"session_id":"` + own("b", `"s"`) + `"`}, []string{own("a", `"s"`)}, "s"},
		{"/generate", `{"text":"x","session_id":"s"}`, "", []string{`"session_id":"` + own("", `"s"`) + `"`}, []string{`"s"`}, "s"},
		{"/generate", `{"text":"x","session_\u0069d":"s","session_id":"t","\u0073ession_id":"u","routing\u005fkey":"k","routing_key":"k"}`, "a",
			[]string{own("a", `"u"`)}, []string{`"s"`, `"t"`, `"u"`, `"k"`, "routing"}, "u"},
		{"/generate", `{"text":"x","session_id":null,"routing_key":null}`, "a", []string{`"session_id":null`}, []string{"routing_key"}, ""},
		{"/generate", `{"text":"x","session_id":["s"],"routing_key":["k"]}`, "a", []string{own("a", `["s"]`)}, []string{`"s"`, "routing_key"}, ""},
		{"/generate", `{"text":"\"routing_key\"","session":"s","routing_keys":"k"}`, "a", []string{`"session":"s","routing_keys":"k"`}, nil, ""},
		{"/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"x"}],"routing_key":"k","session_id":"s"}`, "a", []string{own("a", `"s"`)}, []string{`"s"`, "routing_key"}, "s"},
		{"/v1/embeddings", `{"model":"demo","input":"x","routing_key":"k"}`, "a", nil, []string{"routing_key"}, ""},
		{"/vertex_generate", `{"instances":[{"text":"x"}],"parameters":{"session_id":"s","routing_key":"k","top_k":1},"session_id":"s","routing_key":"k"}`, "a",
			[]string{own("a", `"s"`), `"parameters":{"top_k":1}`}, []string{`"s"`, "routing_key"}, ""},
		{"/invocations", `{"prompt":"x",` + strings.Repeat(`"y":1,`, 1100) + `"session_id":"s","routing_key":"k"}`, "a", []string{own("a", `"s"`)}, []string{`"s"`, "routing_key"}, ""},
	} {
		for _, engine := range []string{"sglang", "vllm"} {
			for yaml, tenants := range map[string]bool{"tenants: {salt_header: x-tenant, required: false}\n": true, "": false} {
				w := worker("a", 0)
				w.Engine, w.Models = engine, nil
				b := newBench(t, yaml, w)
				d, e := b.ask(c.path, c.body, saltHeader, c.tenant)
				got := string(d.Body)
				if d.Reject != nil || !tenants && d.Body != nil || e.Conversation != c.id {
					t.Errorf("%s %.80s of %s: got %+v, body %s and conversation %q, want %q", c.path, c.body, engine, d.Reject, d.Body, e.Conversation, c.id)
				}
				for _, s := range c.want {
					if tenants && !strings.Contains(got, s) {
						t.Errorf("%s %.80s of %s: got %s, want %s", c.path, c.body, engine, got, s)
					}
				}
				for _, s := range c.not {
					if tenants && (strings.Contains(got, s) || d.Body == nil) {
						t.Errorf("%s %.80s of %s: got %s, want it without %s", c.path, c.body, engine, got, s)
					}
				}
				end(&d, 200)
			}
		}
	}
}

// Where tenants are not required, requests that have none share a cache, which is not a
// tenant's, whatever they write.
func TestRequestsWithoutATenantShareACache(t *testing.T) {
	b := newBench(t, "tenants: {salt_header: x-tenant, required: false}\n", worker("a", 1))
	for _, c := range []struct{ path, more, want string }{
		{"/v1/completions", "", ""},
		{"/v1/completions", `,"cache_salt":"` + TenantSalt("a", nil) + `"`, TenantSalt("", []byte(`"`+TenantSalt("a", nil)+`"`))},
		{"/v1/completions", `,"extra_key":"` + TenantSalt("a", nil) + `"`, TenantSalt("", nil)}, // SGLang joins the two
		{"/invocations", "", ""},
		{"/invocations", `,"cache_salt":"x"`, TenantSalt("", []byte(`"x"`))},
		{"/invocations", `,"extra_key":"` + TenantSalt("a", nil) + `"`, TenantSalt("", nil)},
	} {
		r := b.request(c.path, completion(3, c.more))
		d := b.Decide(t.Context(), r)
		if got := saltOf(t, body.Completions, r, &d); d.Reject != nil || got != c.want {
			t.Errorf("%s %s: got salt %q, want %q", c.path, c.more, got, c.want)
		}
		end(&d, 200)
	}
	for _, more := range []string{`"cache_salt":"x"`, `"extra_key":"x"`, `"extra_key":"x","cache_salt":"x","extra_key":"y"`} { // SGLang reads these
		r := b.request("/vertex_generate", `{"parameters":{"top_k":1,`+more+`}}`)
		d := b.Decide(t.Context(), r)
		if d.Reject != nil || string(d.Body) != `{"parameters":{"top_k":1}}` {
			t.Errorf("%s: got %+v %s, want it without", more, d.Reject, d.Body)
		}
		end(&d, 200)
	}
	r := b.request("/v1/completions", completion(3, ""))
	r.Headers = []extproc.Header{{Name: saltHeader, Value: "a"}, {Name: saltHeader, Value: "b"}}
	if d := b.Decide(t.Context(), r); d.Reject == nil || d.Reject.Status != 403 || !strings.Contains(string(d.Reject.Body), `"type":"permission_error"`) {
		t.Errorf("two tenants: got %+v, want 403 with an error type", d.Reject)
	}
}

// A request that is refused for its tenant costs no parsing of its body.
func TestTenantsAreCheckedBeforeBodiesAreParsed(t *testing.T) {
	one, two := []string{saltHeader, "a"}, []string{saltHeader, "a", saltHeader, "b"}
	for yaml, refused := range map[string]map[int]string{
		"tenants: {salt_header: x-tenant}\n":                  {0: "kvlane_tenant_missing", 2: "kvlane_tenant_ambiguous"},
		"tenants: {salt_header: x-tenant, required: false}\n": {2: "kvlane_tenant_ambiguous"},
		"tenants: {header: x-tenant}\n":                       {},
		"":                                                    {},
	} {
		b := newBench(t, yaml, worker("a", 1))
		for n, headers := range map[int][]string{0: nil, 1: one, 2: two} {
			for _, text := range []string{completion(300, ""), `{"model":"demo","prompt":"`} {
				j := &job{d: b.Decider, s: newScratch(), r: b.request("/v1/completions", text, headers...), api: body.Completions}
				j.entry = observe.NewEntry(j.r, time.Now())
				_, err := j.read(t.Context(), t.Context())
				got, parsed := "", j.s.turn.Request != nil
				if answer, ok := errors.AsType[*answerError](err); ok {
					got = answer.Details
				}
				want := refused[n]
				if want == "" && text[len(text)-1] != '}' {
					want = "kvlane_invalid_json"
				}
				if got != want || parsed != (refused[n] == "") {
					t.Errorf("%q, %d tenants, %.40s: got %q, body parsed: %v, want %q, %v", yaml, n, text, got, parsed, want, refused[n] == "")
				}
			}
			got := "" // of a path that is not known, where what engines refuse too is left to them
			if d := b.Decide(t.Context(), b.request("/other", `{"prompt":`, headers...)); d.Reject != nil {
				got = d.Reject.Details
			} else {
				end(&d, 200)
			}
			want := refused[n]
			if n == 1 && refused[0] != "" {
				want = "kvlane_tenant_not_salted"
			}
			if got != want {
				t.Errorf("%q, %d tenants, another path: got %q, want %q", yaml, n, got, want)
			}
		}
	}
}

// A tenant finds its own prompts and conversations, and never another's.
func TestTenantsShareNoCredit(t *testing.T) {
	b := newBench(t, "tenants: {salt_header: x-tenant}\n", worker("a", 1), worker("b", 1), worker("c", 1))
	ask := func(tenant string, more ...string) (target string, matched int64) {
		d, e := b.ask("/v1/completions", completion(300, ""), append([]string{saltHeader, tenant}, more...)...)
		end(&d, 200)
		return e.Target, e.Matched
	}
	first, matched := ask("a", "x-session-id", "s")
	if matched != 0 {
		t.Fatalf("got %d tokens matched before any request, want 0", matched)
	}
	if again, matched := ask("a", "x-session-id", "s"); again != first || matched == 0 {
		t.Errorf("the same tenant: got %s with %d tokens matched, want %s with some", again, matched, first)
	}
	if _, matched := ask("b", "x-session-id", "s"); matched != 0 {
		t.Errorf("another tenant: got %d tokens matched, want 0", matched)
	}
	in := func(salt string) string {
		j := &job{d: b.Decider, s: &scratch{prefix: []uint64{7, 9}}}
		return fmt.Sprint(j.ownConversation(&input{salt: salt, conversation: "s"}), j.s.prefix)
	}
	if x, y := in(TenantSalt("a", nil)), in(TenantSalt("b", nil)); x == y || x != in(TenantSalt("a", nil)) {
		t.Errorf("got conversations %s and %s, want one for each tenant", x, y)
	}
	if x := in(""); x != "-/s[7 9]" {
		t.Errorf("without a tenant: got conversation %s, want -/s[7 9]", x)
	}
}

// The time that a decision takes does not tell what other tenants have sent: the cache of tokens has nothing of theirs.
func TestTenantsShareNoTokens(t *testing.T) {
	for yaml, shared := range map[string]bool{"tenants: {salt_header: x-tenant}\n": false, "tenants: {header: x-tenant}\n": true, "": true} {
		b := newBench(t, yaml, worker("a", 1))
		known := func(tenant string) bool {
			j := &job{d: b.Decider, s: newScratch(), r: b.request("/v1/completions", completion(300, ""), saltHeader, tenant), api: body.Completions}
			j.entry = observe.NewEntry(j.r, time.Now())
			if _, err := j.read(t.Context(), t.Context()); err != nil {
				t.Fatal(err)
			}
			return j.s.turn.Kept()
		}
		if known("a") || !known("a") { // kept when it comes again
			t.Fatalf("%q: want a body that is kept at its second occurrence", yaml)
		}
		if got := known("a"); !got {
			t.Errorf("%q: the same tenant: got no body in the cache", yaml)
		}
		if got := known("b"); got != shared {
			t.Errorf("%q: another tenant: got the body in the cache: %v, want %v", yaml, got, shared)
		}
	}
}

// vLLM reads a salt on more paths in each version, and refuses it on none. Where tenants are not required, it gets one on all of them.
func TestVLLMGetsASaltOnAllPaths(t *testing.T) {
	for engine, salt := range map[string]string{"vllm": TenantSalt("a", nil), "sglang": "", "trtllm": ""} {
		w := worker("a", 1)
		w.Engine, w.Models = engine, nil
		b := newBench(t, "tenants: {salt_header: x-tenant, required: false}\n", w)
		for path, text := range map[string]string{
			"/v1/messages":               `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"x"}]}`,
			"/score":                     `{"model":"demo","text_1":"x","text_2":"y"}`,
			"/v2/rerank":                 `{"model":"demo","query":"x","documents":["y"]}`,
			"/generative_scoring":        `{"model":"demo","query":"x","items":["y"],"label_token_ids":[1]}`,
			"/v1/systemone":              `{"model":"demo","state":"x","questions":{}}`,
			"/invocations":               `{"model":"demo","prompt":"x"}`,
			"/v1/chat/completions/batch": `{"model":"demo","messages":[[{"role":"user","content":"x"}]]}`,
		} {
			r := b.request(path, text, saltHeader, "a")
			d := b.Decide(t.Context(), r)
			if got := saltOf(t, body.Unknown, r, &d); d.Reject != nil || got != salt {
				t.Errorf("%s of %s: got %+v and salt %q, want %q", path, engine, d.Reject, got, salt)
			}
			end(&d, 200)
		}
	}
	b := newBench(t, "tenants: {salt_header: x-tenant, required: false}\n", worker("a", 1))
	message := `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"` + strings.Repeat("word ", 300) + `"}]}`
	for _, c := range []struct {
		tenant string
		cached bool
	}{{"a", false}, {"b", false}, {"a", true}} {
		d, e := b.ask("/v1/messages", message, saltHeader, c.tenant)
		if end(&d, 200); (e.Matched > 0) != c.cached {
			t.Errorf("tenant %s: got %d tokens matched, want some: %v", c.tenant, e.Matched, c.cached)
		}
	}
}

// Both legs of a split request have the salt, and neither the headers that name a tenant.
func TestBothLegsAreSalted(t *testing.T) {
	p := newPoolsWith(t, "nixl", "tenants: {salt_header: x-tenant}\nrouting: {disagg: {mode: threshold, threshold: 64}}\n")
	legs := 0
	p.both(answer(`{"choices":[{}],"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e"}}`))
	p.leg = func(r *http.Request, raw []byte) {
		legs++
		parsed, err := body.Parse(body.Completions, raw)
		if err != nil || parsed.CacheSalt() != TenantSalt("a", nil) {
			t.Errorf("prefill: got %s %v, want salt %s", raw, err, TenantSalt("a", nil))
		}
		if r.Header.Get("X-Tenant")+r.Header.Get("X-Cache-Salt")+r.Header.Get("X-Smg-Routing-Key") != "" {
			t.Errorf("prefill: got headers %v, want none that names a tenant or a place in the queue", r.Header)
		}
	}
	r := &extproc.Request{
		ID: "r", Method: "POST", Path: "/v1/completions", Body: []byte(`{"model":"demo","prompt":[` + strings.Repeat("1,", 400) + `1]}`),
		Headers: []extproc.Header{{Name: saltHeader, Value: "a"}, {Name: "x-cache-salt", Value: TenantSalt("b", nil)}, {Name: "x-smg-routing-key", Value: "k"}},
	}
	d := p.Decide(t.Context(), r)
	defer end(&d, 200)
	if got := saltOf(t, body.Completions, r, &d); d.Reject != nil || got != TenantSalt("a", nil) || legs != 1 {
		t.Errorf("decode: got salt %q after %d prefill legs, %+v; want %q after 1", got, legs, d.Reject, TenantSalt("a", nil))
	}
}

// No two pairs of tenant and own salt have the same salt, and engines accept all.
func TestTenantSalts(t *testing.T) {
	seen := map[string]string{}
	for _, tenant := range []string{"", "a", "ab", "a\x00", "1", strings.Repeat("x", 9000), "ü/@\\"} {
		for _, own := range []string{"", `"b"`, `b"`, `"`, `["a","b"]`, "1"} {
			s := TenantSalt(tenant, []byte(own))
			if other, ok := seen[s]; ok {
				t.Errorf("%q %q: got the salt of %s", tenant, own, other)
			}
			seen[s] = fmt.Sprintf("%q %q", tenant, own)
			if len(s) != 32 || strings.Trim(s, "0123456789abcdef") != "" {
				t.Errorf("%q %q: got salt %q, want 32 hexadecimal digits", tenant, own, s)
			}
		}
	}
	if want := "x-tenant x-cache-salt x-smg-routing-key"; strings.Join(newBench(t, "tenants: {salt_header: X-Tenant}\n").cfg.Tenants.Headers(), " ") != want {
		t.Errorf("want headers %s", want)
	}
}

// Where a request has to be edited, it is refused when its decision panics.
func TestPanicReject(t *testing.T) {
	for yaml, refused := range map[string]bool{
		"":                                   false,
		"tenants: {salt_header: x-tenant}\n": true,
		"disagg: {connector: nixl}\n":        true,
		"disagg: {connector: nixl, trust_client_params: true}\n": false,
	} {
		r := newBench(t, yaml).PanicReject()
		if (r != nil) != refused || refused && (r.Status != 500 || body.Valid(r.Body) != nil) {
			t.Errorf("%q: got %+v, want refused: %v", yaml, r, refused)
		}
	}
}

// Whatever a client without a tenant writes, its conversation is not that of a tenant.
func TestAConversationWithoutATenantIsNotATenants(t *testing.T) {
	b := newBench(t, "tenants: {salt_header: x-tenant, required: false}\n")
	in := func(salt, conversation string) string {
		j := &job{d: b.Decider, s: newScratch()}
		return j.ownConversation(&input{salt: salt, conversation: conversation})
	}
	a := TenantSalt("a", nil)
	if got := in("", a+"/s"); got == in(a, "s") {
		t.Errorf("without a tenant: got conversation %q, that of a tenant", got)
	}
	if got := in("", in(a, "s")[1:]); got == in(a, "s") {
		t.Errorf("without a tenant: got conversation %q, that of a tenant", got)
	}
	if got, want := in("", "s"), in("", "s"); got != want || got == in("", "t") {
		t.Errorf("without a tenant: got conversation %q, want %q again and another one for another id", got, want)
	}
	if got := in("", ""); got != "" {
		t.Errorf("without a conversation: got %q, want none", got)
	}
	b = newBench(t, "")
	if got := in("", "s"); got != "s" {
		t.Errorf("without tenants: got conversation %q, want s", got)
	}
}

// An engine that reads no salt gets no leg, however the plan came about: TensorRT-LLM reads none
// in completions, vLLM does.
func TestNoLegWithoutASalt(t *testing.T) {
	const tenants = "envoy: {alternates: true}\ntenants: {salt_header: x-tenant}\nrouting: {trust_overrides: true, disagg: {mode: threshold, threshold: 0}}\n"
	ask := func(p *pools, more ...extproc.Header) extproc.Decision {
		return p.Decide(t.Context(), &extproc.Request{
			ID: "r", Method: "POST", Path: "/v1/completions", Body: []byte(`{"prompt":"` + strings.Repeat("word ", 400) + `"}`),
			Headers: append(more, extproc.Header{Name: saltHeader, Value: "a"}),
		})
	}
	status := func(d *extproc.Decision) int {
		if d.Reject == nil {
			return 200
		}
		return d.Reject.Status
	}
	for engine, want := range map[string]int{"trtllm": 400, "vllm": 200} {
		salted := engine == "vllm"
		t.Run(engine, func(t *testing.T) {
			t.Run("replan", func(t *testing.T) {
				p := newPoolsWith(t, "nixl", tenants)
				next := p.second()
				next.Engine = engine
				var once sync.Once
				p.both(func(w http.ResponseWriter, r *http.Request) {
					once.Do(func() { p.Fleet().SetWorkers(append(p.list[1:3:3], next)) })
					answer(nixlAnswer)(w, r)
				})
				d := ask(p)
				defer end(&d, 200)
				if got := status(&d); got != want {
					t.Errorf("got status %d, want %d", got, want)
				}
			})
			t.Run("prefill", func(t *testing.T) {
				p := newPoolsWith(t, "nixl", tenants)
				list := slices.Clone(p.list)
				list[2].Engine = engine
				p.Fleet().SetWorkers(list)
				p.answer(0, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
				d := ask(p)
				defer end(&d, 200)
				if got, legs := status(&d), p.legs[1].Load(); got != want || (legs == 1) != salted {
					t.Errorf("got status %d and %d legs to the worker, want %d", got, legs, want)
				}
			})
			t.Run("alternate", func(t *testing.T) {
				p := newPoolsWith(t, "nixl", tenants)
				next := p.second()
				next.Engine = engine
				p.Fleet().SetWorkers(append(slices.Clone(p.list), next))
				d := ask(p, extproc.Header{Name: pinHeader, Value: "d"})
				defer end(&d, 200)
				if both := strings.Contains(d.Endpoint, ","); status(&d) != 200 || both != salted {
					t.Errorf("got status %d and endpoints %q, want an alternate: %v", status(&d), d.Endpoint, salted)
				}
			})
		})
	}
}

package config

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestAnEmptyFileIsTheDefaults(t *testing.T) {
	c, err := Parse("kvlane.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Envoy.Ingress != "127.0.0.1:8080" || c.Admin.Address != "127.0.0.1:9090" || c.Routing.Preset != "kv-aware" {
		t.Errorf("unexpected defaults: %+v", c)
	}
}

func TestAFullFile(t *testing.T) {
	c, err := Parse("kvlane.yaml", []byte(`
listen: {address: 0.0.0.0:9002}
limits: {max_body: 4MiB}
models:
- name: qwen
  tokenizer: builtin:qwen3
  adapters: [sql, law]
workers:
  static:
  - address: 10.0.0.1:8000
    ranks: 4
    events: {endpoint: "tcp://10.0.0.1:5557"}
  - {name: b, address: "10.0.0.2:8000", role: prefill, speed: 0.5}
  health: {every: 250ms}
drain: 1m
`))
	if err != nil {
		t.Fatal(err)
	}
	w := c.Workers.Static
	switch {
	case c.Limits.MaxBody != 4<<20:
		t.Error("max_body", c.Limits.MaxBody)
	case len(w) != 2 || w[0].Name != "10.0.0.1:8000" || w[0].Ranks != 4 || w[0].Speed != 1 || w[1].Speed != 0.5 || w[1].Role != "prefill":
		t.Errorf("workers %+v", w)
	case c.Workers.Health.Every.Std() != 250*time.Millisecond || c.Workers.Health.Failures != 2:
		t.Errorf("health %+v", c.Workers.Health)
	case c.Models[0].Engine != "vllm" || !c.Models[0].ToolParser || c.Models[0].Check.Every != 1000:
		t.Errorf("model %+v", c.Models[0])
	case c.Drain.Std() != time.Minute:
		t.Error("drain", c.Drain)
	}
}

func TestEveryProblemIsNamedWithItsPlace(t *testing.T) {
	_, err := Parse("kvlane.yaml", []byte(`listen:
  addrss: unix:/x
limits:
  max_body: lots
models:
- name: a
  engine: vlm
- aliases: [a]
workers:
  static:
  - address: engine:8000
    ranks: -1
  - address: 10.0.0.1:8000
    speed: 0
    events: {endpoint: 10.0.0.1:5557}
  - address: 10.0.0.1:8000
    events: {endpoint: "push:", bind: true}
routing: [kv-aware]
drain: soon
`))
	want := `kvlane.yaml:2:3: listen.addrss: unknown key; did you mean "address"?
kvlane.yaml:4:13: limits.max_body: "lots" is not a size such as 1048576, 16MiB or 2GB
kvlane.yaml:7:11: models[0].engine: "vlm" is not one of vllm, sglang, trtllm; did you mean "vllm"?
kvlane.yaml:8:3: models[1]: needs a name
kvlane.yaml:8:3: models[1]: name "a" is taken by models[0]
kvlane.yaml:11:14: workers.static[0].address: "engine:8000" is not ip:port (Envoy needs an IP address, IPv6 in brackets; for names use workers.dns)
kvlane.yaml:12:12: workers.static[0].ranks: -1 must be at least 0
kvlane.yaml:14:12: workers.static[1].speed: 0 must be more than 0
kvlane.yaml:15:24: workers.static[1].events.endpoint: "10.0.0.1:5557" is not like tcp://host:port
kvlane.yaml:16:5: workers.static[2].name: "10.0.0.1:8000" is taken by workers.static[1]
kvlane.yaml:16:14: workers.static[2].address: "10.0.0.1:8000" is taken by workers.static[1]
kvlane.yaml:17:39: workers.static[2].events.bind: needs an endpoint tcp://address:port or ipc://path
kvlane.yaml:18:1: routing: needs a section with keys, not a list
kvlane.yaml:19:8: drain: "soon" is not a duration such as 300ms, 2s or 1m30s`
	if err == nil {
		t.Fatal("accepted")
	}
	got, wants := strings.Split(err.Error(), "\n"), strings.Split(want, "\n")
	for i := range max(len(got), len(wants)) {
		g, w := "", ""
		if i < len(got) {
			g = got[i]
		}
		if i < len(wants) {
			w = wants[i]
		}
		if g != w {
			t.Errorf("problem %d\n got %s\nwant %s", i, g, w)
		}
	}
}

// wantProblems compares an error with want, one problem per line.
func wantProblems(t *testing.T, err error, want ...string) {
	t.Helper()
	got := ""
	if err != nil {
		got = err.Error()
	}
	if got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

func TestEveryProblemOfRoutingIsNamedWithItsPlace(t *testing.T) {
	_, err := Parse("k.yaml", []byte(`routing:
  policy:
    limits:
      shed_at: 2
    pick: {ties: coin}
    cost:
      tiers: [1, 1, 7, 1]
  disagg:
    decode: {cost: {active_share: -1}}
  report_ttl: 1h
  wait:
    max_requests: 5
    timeout: 0
`))
	wantProblems(t, err,
		`k.yaml:4:16: routing.policy.limits.shed_at: 2 is not within 0.01 to 1`,
		`k.yaml:5:18: routing.policy.pick.ties: "coin" is not one of ["random" "lowest" "rotate" "cursor"]`,
		`k.yaml:7:21: routing.policy.cost.tiers[2]: 7 is not within 0 to 1`,
		`k.yaml:9:35: routing.disagg.decode.cost.active_share: -1 is not within 0 to 10`,
		`k.yaml:10:15: routing.report_ttl: 1h0m0s is not within 10ms to 10m0s`,
		`k.yaml:13:14: routing.wait.timeout: must be more than 0`)
	_, err = Parse("k.yaml", []byte("routing: {wait: {max_requests: -1, timeout: soon}}\n"))
	wantProblems(t, err,
		`k.yaml:1:32: routing.wait.max_requests: -1 must be at least 0`,
		`k.yaml:1:45: routing.wait.timeout: "soon" is not a duration such as 300ms, 2s or 1m30s`)
	c, err := Parse("k.yaml", []byte("routing: {conversation_headers: [X-Session-ID]}\n"))
	if err != nil || !slices.Equal(c.Routing.Headers, []string{"x-session-id"}) {
		t.Errorf("a list replaces its default, header names are compared in lower case: %v, %v", c, err)
	}
	_, err = Parse("k.yaml", []byte("routing: {conversation_headers: [X-Session-ID, ':path', '']}\n"))
	wantProblems(t, err,
		`k.yaml:1:48: routing.conversation_headers[1]: ":path" is not the name of a header`,
		`k.yaml:1:57: routing.conversation_headers[2]: "" is not the name of a header`)
}

// Media come from everywhere unless tenants are separated, and hosts are written as in the URLs.
func TestMediaURLs(t *testing.T) {
	const tenants = "tenants: {salt_header: x-tenant}\n"
	for text, any := range map[string]bool{
		"": true, tenants: false, "limits: {media_urls: []}\n": true, "limits: {media_urls: []}\n" + tenants: false, "limits: {media_urls: [any]}\n" + tenants: true,
		"limits: {media_urls: [data]}\n": false, "limits: {media_urls: [a.example, 'b:9000']}\n": false,
	} {
		c, err := Parse("k.yaml", []byte(text))
		if err != nil || c.AnyMedia() != any {
			t.Errorf("%q: got %v, media from everywhere: %v, want %v", text, err, !any, any)
		}
	}
	_, err := Parse("k.yaml", []byte("limits: {media_urls: [A.example, 'https://a', '*.a', 'a:b', '[::1]', 'a@b', '']}\n"))
	wantProblems(t, err,
		`k.yaml:1:23: limits.media_urls[0]: "A.example" is neither any, data, nor a host in lower case`,
		`k.yaml:1:34: limits.media_urls[1]: "https://a" is neither any, data, nor a host in lower case`,
		`k.yaml:1:47: limits.media_urls[2]: "*.a" is neither any, data, nor a host in lower case`,
		`k.yaml:1:54: limits.media_urls[3]: "a:b" is neither any, data, nor a host in lower case`,
		`k.yaml:1:61: limits.media_urls[4]: "[::1]" is neither any, data, nor a host in lower case`,
		`k.yaml:1:70: limits.media_urls[5]: "a@b" is neither any, data, nor a host in lower case`,
		`k.yaml:1:77: limits.media_urls[6]: "" is neither any, data, nor a host in lower case`)
}

func TestWorkersOfANameAreChecked(t *testing.T) {
	_, err := Parse("k.yaml", []byte(`workers:
  dns:
  - name: engines
    port: 8000
    every: 0
    worker:
      rank_by: port
      events: {endpoint: bogus}
  - name: others
    port: 8000
    worker: {ranks: 2, rank_by: port, events: {endpoint: "tcp://$ip:5557"}}
`))
	wantProblems(t, err,
		`k.yaml:5:12: workers.dns[0].every: must be at least 100ms`,
		`k.yaml:7:16: workers.dns[0].worker.rank_by: port needs ranks`,
		`k.yaml:8:26: workers.dns[0].worker.events.endpoint: "bogus" is not like tcp://host:port`)
}

func TestNotYAML(t *testing.T) {
	for _, text := range []string{"listen: [", "a: b\n c: d", "listen: {address: *x}", "--- {}\n--- {}\n"} {
		if _, err := Parse("kvlane.yaml", []byte(text)); err == nil {
			t.Errorf("%q: accepted", text)
		} else if !strings.HasPrefix(err.Error(), "kvlane.yaml:") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestWorkersFile(t *testing.T) {
	list, err := ParseWorkers("workers.yaml", []byte("- address: 10.0.0.1:8000\n- address: 10.0.0.2:8000\n  name: b\n"))
	if err != nil || len(list) != 2 || list[1].Name != "b" || list[0].Engine != "vllm" {
		t.Fatal(list, err)
	}
	if _, err := ParseWorkers("workers.yaml", []byte("- addrss: 10.0.0.1:8000\n")); err == nil || !strings.Contains(err.Error(), `did you mean "address"`) {
		t.Error(err)
	}
}

func TestSizesAndDurationsReadWhatTheyWrite(t *testing.T) {
	for _, b := range []Bytes{0, 1, 1023, 1 << 10, 3 << 20, 1 << 30, 1<<30 + 1} {
		text, _ := b.MarshalText()
		var back Bytes
		if err := back.UnmarshalText(text); err != nil || back != b {
			t.Errorf("%d -> %s -> %d, %v", b, text, back, err)
		}
	}
	for _, bad := range []string{"-1", "1.5MiB", "9999999999GiB", ""} {
		if err := new(Bytes).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("size %q: accepted", bad)
		}
	}
	for _, bad := range []string{"-1s", "5", "x"} {
		if err := new(Duration).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("duration %q: accepted", bad)
		}
	}
}

func TestSchemaNamesDefaultsAndDescriptions(t *testing.T) {
	var s struct {
		Properties map[string]any `json:"properties"`
		Defs       map[string]struct {
			Properties map[string]struct {
				Default     any    `json:"default"`
				Description string `json:"description"`
			} `json:"properties"`
			AdditionalProperties any `json:"additionalProperties"`
		} `json:"$defs"`
	}
	if err := json.Unmarshal(Schema(), &s); err != nil {
		t.Fatal(err)
	}
	if len(s.Properties) != 17 {
		t.Errorf("got %d sections, want 17", len(s.Properties))
	}
	if p := s.Defs["Envoy"].Properties["ingress"]; p.Default != "127.0.0.1:8080" || p.Description == "" {
		t.Errorf("envoy.ingress: %+v", p)
	}
	for name, d := range s.Defs {
		if d.Properties != nil && d.AdditionalProperties != false {
			t.Errorf("%s takes unknown keys", name)
		}
		for key, p := range d.Properties {
			// Descriptions of package routing's sections come from its comments, where one
			// may cover the fields after it too.
			if p.Description == "" && !strings.HasPrefix(name, "routing.") {
				t.Errorf("%s.%s has no description", name, key)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"listen: {address: x}\nmodels: [{name: a}]\n",
		"workers: {static: [{address: 1.2.3.4:5}]}",
		"a: &x [*x]",
		"models: &m [{name: a, aliases: *m}]",
		"workers: {kubernetes: &k {<<: *k, pool: p}}",
		"workers: {static: [&a {address: \"1.2.3.4:5\"}, {<<: [*a, *a], address: \"1.2.3.4:6\", events: {endpoint: \"tcp://$ip:${PORT:-5}\"}}]}",
		`{"log": {"level": "\u0041"}, "index": {"key": "$${x}"}}`,
		"routing: {preset: !!str kv-aware, policy: {cost: {tiers: [1, 1, .nan, .inf]}}}",
		"? drain\n: |\n  1s\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		_, err := Parse("f", text)
		if problems, ok := errors.AsType[ProblemsError](err); err != nil && (!ok || len(problems) == 0) {
			t.Errorf("got error %v, want problems", err)
		}
	})
}

// What Effective writes is the same configuration, without its secrets.
func TestEffective(t *testing.T) {
	text := `listen: {address: "127.0.0.1:9002"}
models: [{name: m, disagg: {threshold: 5}, multimodal: false, check: {renderer: "http://user:pass@h:1/"}}]
workers:
  static: [{address: "10.0.0.1:8000", labels: {zone: "1", "a.b/c": x}, speed: 0.5}]
  dns: [{name: e, port: 8000, worker: {events: {endpoint: "tcp://$ip:5557"}}}]
  kubernetes: {pool: p}
routing: {preset: round-robin, policy: {cost: {tiers: [1, 1, 0.25, 0]}}, suspect_after: 3s}
index: {key: "s$${X}$$$$", max_bytes: 3MiB}
drain: 90s
`
	c, err := Parse("k.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.Effective()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("k.yaml", out)
	if err != nil {
		t.Fatalf("got %v, want a file that can be read again:\n%s", err, out)
	}
	if again.Index.Key != hidden || again.Models[0].Check.Renderer != "http://(hidden)@h:1/" || strings.Contains(string(out), "user:pass") {
		t.Errorf("got secrets %q, %q, want them hidden", again.Index.Key, again.Models[0].Check.Renderer)
	}
	for renderer, want := range map[string]string{"http://u:pa@ss@h:1/": "http://(hidden)@h:1/", "http://h:1/u@v": "http://h:1/u@v",
		"http://h:1/x?key=secret": "http://h:1/x?(hidden)", "http://u:p@h:1/x?key=secret": "http://(hidden)@h:1/x?(hidden)"} {
		c.Models[0].Check.Renderer = renderer
		if out, err := c.Effective(); err != nil || !strings.Contains(string(out), "renderer: "+want+"\n") {
			t.Errorf("%s: got %v, want %s in\n%s", renderer, err, want, out)
		}
	}
	if c.Index.Key != "s${X}$$" {
		t.Errorf("got key %q, want the configuration unchanged", c.Index.Key)
	}
	twice, err := again.Effective()
	if err != nil || string(twice) != string(out) {
		t.Errorf("got %v\n%s\nwant\n%s", err, twice, out)
	}
	if again.Routing.Policy != c.Routing.Policy || again.Workers.Static[0].Speed != 0.5 || *again.Models[0].Disagg.Threshold != 5 || again.Drain != c.Drain {
		t.Errorf("got %+v, want %+v", again, c)
	}
}

// A workers file that is read has valid workers with different names.
func FuzzWorkers(f *testing.F) {
	f.Add([]byte("- address: 10.0.0.1:8000\n- address: 10.0.0.2:8000\n  name: b\n  ranks: 4\n  rank_by: header\n"))
	f.Add([]byte("- &a {address: '[::1]:80', events: {endpoint: 'tcp://$ip:${P:-1}'}}\n- {<<: *a, name: c}\n"))
	f.Add([]byte("[]"))
	f.Add([]byte("- {address: x, disagg: {init_ports: [1, -1]}, speed: .inf}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, err := ParseWorkers("f", text)
		if problems, ok := errors.AsType[ProblemsError](err); err != nil && (!ok || len(problems) == 0) {
			t.Errorf("got error %v, want problems", err)
		}
		if err != nil {
			return
		}
		names := map[string]bool{}
		for i := range list {
			if wrong := list[i].Problems(); len(wrong) > 0 || names[list[i].Name] {
				t.Errorf("%q: got worker %+v with %v, want a valid one with a name of its own", text, list[i], wrong)
			}
			names[list[i].Name] = true
		}
	})
}

func TestTokenizersOfAHub(t *testing.T) {
	lock := "sha256:" + strings.Repeat("0a", 32)
	for keys, want := range map[string]string{
		`tokenizer: "hf:Org/Model"`:                                      "",
		`tokenizer: "hf:Org/Model@main", tokenizer_lock: "` + lock + `"`: "",
		`tokenizer: "hf:../../etc"`:                                      `models[0].tokenizer: "hf:../../etc" is not like hf:Org/Model`,
		`tokenizer: "hf:Org/Model@a/../b"`:                               "is not like hf:Org/Model",
		`tokenizer: "hf:Org/Model", tokenizer_lock: "sha256:0a"`:         "models[0].tokenizer_lock: want sha256:",
		`tokenizer: /models/m, tokenizer_lock: "` + lock + `"`:           "models[0].tokenizer_lock: want sha256:",
	} {
		_, err := Parse("k.yaml", []byte("models: [{name: m, "+keys+"}]\n"))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %v, want %q", keys, err, want)
		}
	}
}

package config

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Each of these was once accepted.
func TestConfigurationsThatCannotWork(t *testing.T) {
	worker := func(keys string) string {
		return "workers:\n  static:\n  - {address: \"10.0.0.1:8000\", " + keys + "}\n"
	}
	two := func(a, b string) string {
		return worker(a) + "  - {address: \"10.0.0.2:8000\", " + b + "}\n"
	}
	for name, c := range map[string]struct{ text, want string }{
		"too many ranks":          {worker("ranks: 100000"), "k.yaml:3:39: workers.static[0].ranks: 100000 must be at most 1024"},
		"ports of events":         {worker(`ranks: 8, events: {endpoint: "tcp://h:65530"}`), `workers.static[0].events.endpoint: rank 7 would be at port 65537: ports end at 65535`},
		"ports of ranks":          {strings.Replace(worker("ranks: 8, rank_by: port"), "8000", "65530", 1), `workers.static[0].ranks: rank 7 would be at port 65537: ports end at 65535`},
		"ports of a name's ranks": {"workers: {dns: [{name: a, port: 65000, worker: {ranks: 1000, rank_by: port}}]}\n", `k.yaml:1:56: workers.dns[0].worker.ranks: rank 999 would be at port 65999: ports end at 65535`},
		"a name's placeholder":    {"workers: {dns: [{name: a, port: 1, worker: {events: {endpoint: \"tcp://$port:1\"}}}]}\n", `workers.dns[0].worker.events.endpoint: "tcp://$port:1": nothing is known as $port; there is $ip`},
		"events at no port":       {worker(`events: {endpoint: "tcp://h:x"}`), `workers.static[0].events.endpoint: "tcp://h:x" is not like tcp://host:port`},
		"events at port 0":        {worker(`events: {endpoint: "tcp://h:0"}`), `workers.static[0].events.endpoint: "tcp://h:0": port must be 1 to 65535`},
		"one socket":              {worker(`events: {endpoint: "tcp://h:5557", replay: "tcp://h:5557"}`), `workers.static[0].events.replay: is the same as endpoint: an engine has two sockets`},
		"replay among events":     {worker(`ranks: 4, events: {endpoint: "tcp://h:5557", replay: "tcp://h:5559"}`), `workers.static[0].events.replay: the ports 5559 to 5562 of the ranks overlap those of endpoint, 5557 to 5560`},
		"one feed for two":        {two(`events: {endpoint: "tcp://h:5557"}`, `events: {endpoint: "tcp://h:5557"}`), `workers.static[1].events.endpoint: "tcp://h:5557" is taken by workers.static[0]: its events would count for both`},
		"feeds that meet":         {two(`ranks: 4, events: {endpoint: "tcp://h:5557"}`, `events: {endpoint: "tcp://h:5560"}`), `workers.static[1].events.endpoint: "tcp://h:5560" is taken by workers.static[0]: its events would count for both`},
		"admin on ingress":        {"admin: {address: \"127.0.0.1:8080\"}\n", `envoy.ingress: "127.0.0.1:8080" is taken by admin.address ("127.0.0.1:8080")`},
		"admin on health":         {"listen: {address: \"0.0.0.0:9002\", health: \"0.0.0.0:9090\"}\n", `admin.address: "127.0.0.1:9090" is taken by listen.health ("0.0.0.0:9090")`},
		"listen at port 0":        {"listen: {address: \"127.0.0.1:0\"}\n", `k.yaml:1:19: listen.address: "127.0.0.1:0": port 0 means any port, which nothing could connect to`},
		"an engine at port 0":     {strings.Replace(worker("ranks: 1"), "8000", "0", 1), `workers.static[0].address: "10.0.0.1:0": the port "0" is not a number from 1 to 65535`},
		"a name with a bell":      {worker(`name: "a\x07"`), `only letters, digits and any of . _ : / - [ ] % @ may be in a name`},
		"a name of two lines":     {worker(`name: "a\nb"`), `only letters, digits`},
		"checked all day":         {"workers: {health: {every: 1ms}}\n", `k.yaml:1:27: workers.health.every: 1ms: must be 0 (no checks) or at least 100ms`},
		"all kept":                {"explain: {keep: 100000000}\n", `k.yaml:1:17: explain.keep: 100000000 must be at most 100000`},
	} {
		_, err := Parse("k.yaml", []byte(c.text))
		if err == nil || strings.Count(err.Error(), "\n") != 0 || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "k.yaml:") {
			t.Errorf("%s: got\n%v\nwant\n%s", name, err, c.want)
		}
	}
	for name, text := range map[string]string{
		"feeds side by side": two(`ranks: 4, events: {endpoint: "tcp://h:5557", replay: "tcp://h:5561"}`, `ranks: 4, events: {endpoint: "tcp://g:5557"}`),
		"relays":             two(`events: {endpoint: "push:"}`, `events: {endpoint: "push:"}`),
		"no checks":          "workers: {health: {every: 0}}\n",
		"IPv6":               "workers: {static: [{address: \"[fd00::1]:8000\"}]}\n",
		"any admin port":     "admin: {address: \"127.0.0.1:0\"}\n",
	} {
		if _, err := Parse("k.yaml", []byte(text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Inspect reads the workers file, and warns of settings that are probably a mistake.
func TestInspect(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	main := filepath.Join(dir, "k.yaml")
	list := write("w.yaml", "- {name: a, address: \"10.0.0.3:8000\", models: [nobody]}\n")
	wrong := write("wrong.yaml", "- {name: a}\n")
	for name, c := range map[string]struct {
		text, err string
		warnings  []string
	}{
		"no file":    {"workers: {file: /no/such/file}\n", main + ":1:17: workers.file: open /no/such/file: no such file or directory", nil},
		"wrong file": {fmt.Sprintf("workers: {file: %q}\n", wrong), wrong + ":1:4: [0]: needs an address", nil},
		"no workers": {"models: [{name: m, tokenizer: x}]\n", "", []string{main + ": workers: there are none: every request is answered 503"}},
		"two of them": {fmt.Sprintf("models: [{name: m, adapters: [x], tokenizer: t}]\nworkers:\n  static: [{name: a, address: \"10.0.0.1:8000\", models: [m, x, y]}]\n  file: %q\n", list), "", []string{
			main + `:3:63: workers.static[0].models[2]: no models[] entry is called "y": its requests are routed by load`,
			main + `:4:9: workers.file[0].models[0]: no models[] entry is called "nobody": its requests are routed by load`,
			main + `:4:9: workers.file[0].name: "a" is the name of workers.static[0], which is used instead`,
		}},
		"a model for another engine": {"models: [{name: m, tokenizer: t}, {name: n, tokenizer: t, engine: sglang}]\nworkers: {static: [{address: \"10.0.0.1:1\", engine: sglang, models: [m, n]}]}\n", "", []string{
			main + `:2:69: workers.static[0].models[0]: "m" has models[].engine vllm, the worker engine sglang: ids are made as for another engine; write the same engine`}},
		"pods without what their connector needs": {"disagg: {connector: nixl-push}\nworkers: {kubernetes: {pools: [p], worker: {engine: vllm}}}\n", "", []string{
			main + ":2:36: workers.kubernetes.worker.disagg: the connector nixl-push needs engine_id of a prefill worker, which this template does not have: each such pod has to have it as annotations"}},
		"pods with it":            {"disagg: {connector: lmcache}\nworkers: {kubernetes: {pools: [p], worker: {disagg: {receiver_host: $ip, receiver_init_ports: [1], receiver_alloc_ports: [2]}}}}\n", "", nil},
		"Envoy on a name":         {"envoy: {ingress: \"localhost:8080\"}\n", main + ":1:18: envoy.ingress: \"localhost:8080\": Envoy listens on an IP address, not on a name (all of them: 0.0.0.0 or [::])", nil},
		"Envoy does not wait":     {"envoy: {message_timeout: 0s}\n", main + ":1:26: envoy.message_timeout: must be at least 1s: Envoy goes on without Kvlane after it (300s by default)", nil},
		"longer than Envoy takes": {"envoy: {message_timeout: 61m}\n", main + ":1:26: envoy.message_timeout: must be at most 1h: Envoy accepts no longer one", nil},
		"events of everybody":     {"workers: {static: [{name: a, address: \"10.0.0.1:1\", events: {endpoint: \"tcp://*:5557\"}}]}\n", main + ":1:72: workers.static[0].events.endpoint: \"tcp://*:5557\" is where an engine binds; name the engine's address instead of *", nil},
		"a pool twice":            {"workers: {kubernetes: {pools: [a, b, a]}}\n", main + ":1:38: workers.kubernetes.pools[2]: \"a\" is pools[0] already", nil},
		"a wrong zmq":             {"disagg: {connector: p2p-nccl}\nworkers: {kubernetes: {pools: [p], worker: {disagg: {zmq: $ip}}}}\n", main + ":2:59: workers.kubernetes.worker.disagg.zmq: \"$ip\" is not ip:port", nil},
		"TensorRT-LLM's ranks": {"workers: {static: [{address: \"10.0.0.1:8000\", engine: trtllm, ranks: 4}]}\n", "", []string{
			main + ":1:70: workers.static[0].ranks: TensorRT-LLM takes a rank only with requests that are split (disagg.connector), and chooses itself otherwise: write rank_by: none"}},
	} {
		write("k.yaml", c.text)
		_, warnings, err := Inspect(main, []byte(c.text), nil)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != c.err {
			t.Errorf("%s: error\n%s\nwant\n%s", name, text, c.err)
		}
		var got []string
		for _, w := range warnings {
			got = append(got, w.String())
		}
		if strings.Join(got, "\n") != strings.Join(c.warnings, "\n") {
			t.Errorf("%s: warnings\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(c.warnings, "\n"))
		}
	}
}

// Spans are found by their host, and the one found is the first that meets, as by looking at all of them.
func TestSpansAreFoundByHost(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	hosts := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "", "*", "0.0.0.0", "::"}
	met := 0
	for range 2000 {
		var all spans
		var list []span
		for i := range 1 + random.IntN(12) {
			first := 1 + random.IntN(40)
			s := span{hosts[random.IntN(len(hosts))], first, first + random.IntN(3)}
			if random.IntN(8) == 0 {
				s = span{}
			}
			want := slices.IndexFunc(list, s.meets)
			got, other := all.add(s)
			if got != want || got >= 0 && (other.first != list[got].first || other.last != list[got].last) {
				t.Fatalf("%d: got %d (%v), want %d of %v", i, got, other, want, append(list, s))
			}
			if got >= 0 {
				met++
			}
			list = append(list, s)
		}
	}
	if met == 0 {
		t.Error("no spans met")
	}
}

// Package envoy makes the bootstrap of what is read here without looking again.
func TestWhatEnvoyRefusesIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		`envoy: {replicas: ["127.0.0.1"]}`: `envoy.replicas[0]: "127.0.0.1" is not host:port`,
		`envoy: {replicas: ["a:70000"]}`:   `envoy.replicas[0]: "a:70000": port must be 1 to 65535`,
		`envoy: {admin: localhost}`:        `envoy.admin: "localhost" is not host:port`,
		`envoy: {ingress: ":70000"}`:       `envoy.ingress: ":70000": port must be 0 to 65535`,
		`envoy: {prefill: x}`:              `envoy.prefill: "x" is not host:port`,
		`envoy: {request_body: NONE}`:      `envoy.request_body: "NONE" is not one of`,
		`listen: {address: ""}`:            `listen.address: "" is not host:port`,
		`limits: {max_body: 0}`:            `limits.max_body: 0 bytes`,
		`limits: {max_body: 4294967296}`:   `limits.max_body: 4294967296 bytes`,
	} {
		if _, err := Parse("k.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
}

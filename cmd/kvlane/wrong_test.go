package main

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// noWorkers is in /readyz of a configuration without workers.
const noWorkers = "warning: no worker is known (the configuration names none): requests are answered 503\n"

// other is an engine that serves model demo and has these pages; an empty one is not found.
func other(t *testing.T, pages map[string]string) string {
	t.Helper()
	all := map[string]string{
		"/health": "ok", "/metrics": "\n", "/v1/models": `{"data": [{"id": "demo"}]}`, "/tokenize": `{"count": 1, "max_model_len": 4096, "tokens": [1]}`,
	}
	maps.Copy(all, pages)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch all[r.URL.Path] {
		case "":
			http.NotFound(w, r)
		case "401":
			w.WriteHeader(http.StatusUnauthorized)
		}
		fmt.Fprint(w, all[r.URL.Path])
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// silentRows are the rows of "Silent ways to be wrong" in docs/troubleshooting.md, by their first column.
func silentRows(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Silent ways to be wrong\n")
	section, _, _ = strings.Cut(section, "\n## ")
	rows := map[string][]string{}
	for line := range strings.Lines(section) {
		if row, ok := strings.CutPrefix(line, "| "); ok && !strings.HasPrefix(row, "what is wrong |") {
			columns := strings.Split(strings.TrimSuffix(strings.TrimSpace(row), " |"), " | ")
			rows[columns[0]] = columns
		}
	}
	return rows
}

// silentElsewhere has the tests of the rows that TestSilentFailures has no case of, with their files.
var silentElsewhere = map[string][2]string{
	"no worker at all": {"wrong_test.go", "TestSourcesThatCannotBeReadAreSaid"},
	"a name of `workers.dns` that does not resolve, a workers file that is not valid or cannot be read":                                       {"wrong_test.go", "TestSourcesThatCannotBeReadAreSaid"},
	"an API server that refuses or does not answer, as without a role for one kind, or without InferencePool":                                 {"../../internal/workers/kube/source_test.go", "TestWhatTheAPIServerRefusesIsSaid"},
	"the certificate of an API server, a model hub, a replica (`index.peers`), an external NATS or an OTLP collector that cannot be verified": {"../../internal/observe/trace_test.go", "TestCertificateOfACollectorIsAdvised"},
	"`admin.token_file` that does not exist":                                                                                     {"wrong_test.go", "TestSourcesThatCannotBeReadAreSaid"},
	"a certificate in `listen.cert_file` that has expired, or is not valid yet":                                                  {"wrong_test.go", "TestSourcesThatCannotBeReadAreSaid"},
	"`limits.requests_per_address` behind a filter that does not send `source.address`, as one of an older bootstrap":            {"wrong_test.go", "TestRequestsWithoutAnAddressAreTold"},
	"a model without a tokenizer":                                                                                                {"hub_test.go", "TestARefusedTokenizerIsAWarning"},
	"a tokenizer that the model hub does not have, or that cannot be loaded":                                                     {"hub_test.go", "TestARefusedTokenizerIsAWarning"},
	"a changed configuration file that is not taken, as one that is gone or has more than 4 MiB":                                 {"reload_test.go", "TestServeReloads"},
	"replicas that do not reach each other: another secret, another CA, NATS away, a wrong address in `routes`":                  {"../../internal/replicas/node_test.go", "TestAnotherSecretNeitherReadsNorWrites"},
	"replicas with another `index.key` or `index.block_size`":                                                                    {"../../internal/replicas/node_test.go", "TestOtherSettingsAreTold"},
	"a clock of a replica that is more than 2 s ahead":                                                                           {"../../internal/replicas/node_test.go", "TestAClockThatIsAheadIsTold"},
	"a file of `fleet.embedded.tls`, `fleet.external.password_file` or `token_file` that is gone, broken or has more than 4 MiB": {"../../internal/replicas/node_test.go", "TestFilesThatCannotBeReadAreTold"},
	"`fleet.persist` whose folder or bucket cannot be written":                                                                   {"../../internal/replicas/store_test.go", "TestABrokenStoreStopsNothing"},
	"vLLM 0.32 keeps few blocks of a model's sliding windows ([option](feeds.md#where-events-come-from))":                        {"../../kvindex/feed/decoder_test.go", "TestDecodeEngines"},
}

func unquoted(text string) string {
	return strings.NewReplacer(`"`, "", `\`, "", " ", "").Replace(text)
}

// Each row of the page has a test, and no test is of a row that is not there.
func checkSilentRows(t *testing.T, cases map[string]map[string]bool) {
	t.Helper()
	rows := silentRows(t)
	for row, columns := range rows {
		reasons := map[string]bool{}
		for _, reason := range regexp.MustCompile("[a-z_]+").FindAllString(columns[2], -1) {
			reasons[reason] = true
		}
		at, elsewhere := silentElsewhere[row]
		source, err := os.ReadFile(cmp.Or(at[0], "wrong_test.go"))
		switch {
		case err != nil:
			t.Fatal(err)
		case elsewhere && !strings.Contains(string(source), "\nfunc "+at[1]+"(t *testing.T)"):
			t.Errorf("%s: %s has no %s", row, at[0], at[1])
		case !elsewhere && cases[row] == nil:
			t.Errorf("%s: the row has no test", row)
		case !elsewhere && !maps.Equal(cases[row], reasons):
			t.Errorf("%s: got reasons %v, the row has %v", row, cases[row], reasons)
		}
	}
	for row := range cases {
		if rows[row] == nil && row != "" {
			t.Errorf("no row is %q", row)
		}
	}
	for row := range silentElsewhere {
		if rows[row] == nil {
			t.Errorf("no row is %q", row)
		}
	}
}

// Every row of "Silent ways to be wrong" in docs/troubleshooting.md: what is wrong is in the log, in the warnings of /readyz, in
// /debug/workers and in the metrics. Intervals are an hour: the first check or the first load report says it, or nothing does.
func TestSilentFailures(t *testing.T) {
	tok := simTokenizer(t)
	engine := func(o enginesim.Options) *enginesim.Engine {
		o.Tokenizer, o.EventsEndpoint = tok, "tcp://127.0.0.1:0"
		e, err := enginesim.Start(context.Background(), o)
		for tries := 0; o.Ranks > 1 && tries < 50 && (tries == 0 || err != nil); tries++ { // rank r publishes at port + r
			if e != nil {
				e.Close()
			}
			o.EventsEndpoint = fmt.Sprintf("tcp://127.0.0.1:%d", 20000+rand.IntN(10000))
			e, err = enginesim.Start(context.Background(), o)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		return e
	}
	sim := engine(enginesim.Options{Model: "demo"})
	otherSeed := engine(enginesim.Options{Model: "demo", RawHashes: true})
	slow := engine(enginesim.Options{Model: "demo", Faults: enginesim.Faults{ClockAheadMS: -86400_000}})
	fast := engine(enginesim.Options{Model: "demo", Faults: enginesim.Faults{ClockAheadMS: 86400_000}})
	hung, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and answers nothing, as some NATs do
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = hung.Close() })
	otherName := engine(enginesim.Options{Model: "other"})
	odd := engine(enginesim.Options{Model: "demo", BlockSize: 24})
	untrue := engine(enginesim.Options{Model: "demo", Faults: enginesim.Faults{WrongBlockSize: 24}})
	ranks := engine(enginesim.Options{Model: "demo", Ranks: 2})
	replays := engine(enginesim.Options{Model: "demo", ReplayEndpoint: "tcp://127.0.0.1:0"})
	later := engine(enginesim.Options{Model: "demo", Ranks: 2, StartRank: 4})
	sglang := engine(enginesim.Options{Model: "demo", Engine: enginesim.SGLang, Ranks: 2})
	of := func(e *enginesim.Engine, more string) string {
		return fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q}%s`, e.Addr(), e.EventsEndpoint(0), more)
	}
	good := fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q}`, sim.Addr(), sim.EventsEndpoint(0))
	events := fmt.Sprintf(`models: [demo], events: {endpoint: %q}`, sim.EventsEndpoint(0))
	engineOf := map[bool]string{false: "vllm", true: "sglang"}
	const otherRanks = "more or fewer `ranks` than the engine has, or none for an engine with data parallelism; another `start_rank`"
	radix := func(off string, pages map[string]string) string { // an SGLang that says so
		maps.Copy(pages, map[string]string{
			"/v1/models": `{"data": [{"id": "demo", "owned_by": "sglang"}]}`,
			"/metrics":   "sglang:num_running_reqs 0\nsglang:cache_config_info{page_size=\"16\"} 1\n",
		})
		pages[off] = `{"page_size": 16, "dp_size": 1, "disable_radix_cache": true}`
		return other(t, pages)
	}
	cases := []struct {
		row, name, worker string // row is that of the page, "" if nothing is wrong
		// log and warning are parts of a log line and of a line of /readyz; reason is the metric's
		// label, "" if all is well.
		log, warning, reason string
	}{
		{"", "nothing", good, "", "", ""},
		{"another hash seed or hash algorithm (`PYTHONHASHSEED`, `--prefix-caching-hash-algo`)", "hash seed", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q}`, otherSeed.Addr(), otherSeed.EventsEndpoint(0)), "", "", ""},
		{"", "ranks as they are", of(ranks, ", ranks: 2"), "", "", ""},
		{"", "ranks of one of several nodes", of(later, ", ranks: 2, start_rank: 4"), "", "", ""},
		{"", "SGLang as it is", of(sglang, ", ranks: 2, engine: sglang"), "", "", ""},
		{"the clock of an engine", "a clock behind", of(slow, ""), "", "", ""},
		{"the clock of an engine", "a clock ahead", of(fast, ""), "", "", ""},
		{otherRanks, "no ranks", of(ranks, ""), "the engine has 2 data-parallel ranks, the worker is configured without", "only the first one's KV events are read; write ranks: 2", "other_ranks"},
		{otherRanks, "too many ranks", of(ranks, ", ranks: 4"), "the engine has 2 data-parallel ranks, the worker is configured with 4", "requests for the others fail; write ranks: 2", "other_ranks"},
		{otherRanks, "too few ranks", of(ranks, ", ranks: 1"), "the engine has 2 data-parallel ranks, the worker is configured with 1", "the others get no requests; write ranks: 2", "other_ranks"},
		{otherRanks, "other first rank", of(later, ", ranks: 2"), "the engine's data-parallel ranks begin with 4, those of the worker with 0", "write start_rank: 4", "other_ranks"},
		{otherRanks, "no ranks at SGLang", of(sglang, ", engine: sglang"), "the engine has 2 data-parallel ranks, the worker is configured without", "write ranks: 2", "other_ranks"},
		{"another `engine` than the one that runs", "SGLang taken for vLLM", of(sglang, ""), "the engine is sglang, the worker is configured as vllm", "write engine: sglang", "other_engine"},
		{"another `engine` than the one that runs", "vLLM taken for SGLang", of(sim, ", engine: sglang"), "the engine is vllm, the worker is configured as sglang", "write engine: vllm", "other_engine"},
		{"`models[].engine` differs from the worker's `engine`", "a model for another engine", of(sglang, ", ranks: 2, engine: sglang"), "models[].engine of demo differs from the worker's, sglang", "never compared; write engine: sglang there, too", "model_of_other_engine"},
		{"no load reports, as of SGLang without `--enable-metrics`", "no load report", fmt.Sprintf(`address: %q, %s`, other(t, map[string]string{"/metrics": ""}), events), "no load report: GET /metrics: status 404", "worker w: no load report", "no_load_report"},
		{"the worker's address", "wrong address", `address: "127.0.0.1:1", ` + events,
			`"address":"127.0.0.1:1","ready":false,"error":"dial tcp 127.0.0.1:1: connect: connection refused"`,
			"worker w: not ready at 127.0.0.1:1: dial tcp 127.0.0.1:1: connect: connection refused", "not_ready"},
		{"another server at the address", "another server at the address", fmt.Sprintf(`address: %q, %s`, sim.SideAddr(), events), `GET /health: status 404`, "GET /health: status 404", "not_ready"},
		{"the worker's address", "an address that does not answer", fmt.Sprintf(`address: %q, %s`, hung.Addr(), events), `"error":"GET /health: read tcp`, "i/o timeout", "not_ready"},
		{"", "a replay endpoint", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q, replay: %q}`, replays.Addr(), replays.EventsEndpoint(0), replays.ReplayEndpoint(0)), "", "", ""},
		{"another address in `events.replay` than the engine's", "another replay endpoint", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q, replay: "tcp://127.0.0.1:1"}`, replays.Addr(), replays.EventsEndpoint(0)),
			`"detail":"replay: zmtp: dial tcp 127.0.0.1:1: connect: connection refused"`, "no replay of events has worked, so a lost one clears what is known of a rank: replay: zmtp: dial tcp 127.0.0.1:1", "no_replay"},
		{"no `events.endpoint`, as for an engine without KV events", "no events configured", fmt.Sprintf(`address: %q, models: [demo]`, sim.Addr()), "no events.endpoint", "worker w: no events.endpoint", "no_events"},
		{"the address of the events, or an engine that does not publish there", "wrong address of events", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: "tcp://127.0.0.1:1"}`, sim.Addr()),
			`"endpoint":"tcp://127.0.0.1:1","reason":"unreachable"`, "worker w: no events of w from tcp://127.0.0.1:1: ", "events_unreachable"},
		{"the address of the events, or an engine that does not publish there", "wrong address of one rank's events", fmt.Sprintf(`address: %q, models: [demo], ranks: 2, events: {endpoint: "tcp://127.0.0.1:1"}`, sim.Addr()),
			`"target":"w/1","endpoint":"tcp://127.0.0.1:2"`, "worker w: no events of w/1 from tcp://127.0.0.1:2: zmtp: dial tcp 127.0.0.1:2: connect: connection refused", "events_unreachable"},
		{"a relay that does not push (`events.endpoint: push:`)", "no relay pushes", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: "push:"}`, sim.Addr()), "no relay pushes events", "no relay pushes events", "no_relay"},
		{"events behind NAT or a firewall that drops them", "events behind NAT", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: "tcp://%s"}`, sim.Addr(), hung.Addr()),
			`"reason":"unreachable","detail":"zmtp: read greeting: `, "worker w: no events of w from tcp://" + hung.Addr().String() + ": zmtp: read greeting: ", "events_unreachable"},
		{"another `block_size` than the engine's", "other block size", good + ", block_size: 32", `the engine's blocks have 16 tokens, the worker is configured with block_size 32`, "write block_size: 16, or leave it out", "other_block_size"},
		{"an engine's block size that `index.block_size` neither divides nor is divided by", "blocks that do not fit the index", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q}`, odd.Addr(), odd.EventsEndpoint(0)),
			"the engine's blocks of 24 tokens do not fit index.block_size 16", "its KV events are refused; write an index.block_size that divides 24", "other_block_size"},
		{"an engine's block size that `index.block_size` neither divides nor is divided by", "events that do not fit the index", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q}`, odd.Addr(), odd.EventsEndpoint(0)),
			"engine's blocks of 24 tokens: block size does not fit; its events are refused", " KV events dropped: refused_block_size_does_not_fit", "events_dropped"},
		{"events that name another block size than the engine's", "events of another block size than the engine's", fmt.Sprintf(`address: %q, models: [demo], events: {endpoint: %q}`, untrue.Addr(), untrue.EventsEndpoint(0)),
			"stored blocks whose tokens do not fill them", " KV events dropped: misaligned", "events_dropped"},
		{"another model name than the engine's", "other model name", fmt.Sprintf(`address: %q, models: [qwen], events: {endpoint: %q}`, sim.Addr(), sim.EventsEndpoint(0)),
			"the engine does not serve qwen, which the worker lists; it serves demo", "it serves demo: requests for qwen fail there; write models: [demo]", "other_models"},
		{"models without an entry in `models`", "a model without an entry", fmt.Sprintf(`address: %q, models: [other], events: {endpoint: %q}`, otherName.Addr(), otherName.EventsEndpoint(0)),
			"no entry of models is called other", "worker w: no entry of models is called other, which the worker lists: such requests are routed by load", "unknown_model"},
		{"a tokenizer of another revision", "tokenizer of another revision", fmt.Sprintf(`address: %q, %s`, other(t, map[string]string{"/tokenize": `{"count": 3, "max_model_len": 4096, "tokens": [1, 2, 3]}`}), events), "the tokenizer differs", "its token ids of model demo differ", "tokens_differ"},
		{"an engine that returns no ids, so that the tokenizer cannot be compared", "no ids", fmt.Sprintf(`address: %q, %s`, other(t, map[string]string{"/tokenize": ""}), events),
			"not known whether the tokenizer is this worker's", "whether the tokenizer of model demo is its own is not known, as it returns no ids: ", "tokens_not_compared"},
		{"an engine that asks for an API key for `/tokenize`, as SGLang does", "an API key", fmt.Sprintf(`address: %q, %s`, other(t, map[string]string{"/tokenize": "401"}), events),
			"it does not return the ids of a prompt", "/tokenize: status 401: ", "tokens_not_compared"},
		{"prefix caching is off in the engine", "prefix caching off", fmt.Sprintf(`address: %q, %s`, other(t, map[string]string{"/metrics": "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"False\"} 1\nvllm:num_requests_running 0\n"}), events),
			"the engine runs without prefix caching", "the engine runs without prefix caching", "prefix_caching_off"},
		{"prefix caching is off in the engine", "SGLang's prefix caching off", fmt.Sprintf(`address: %q, engine: sglang, %s`, radix("/server_info", map[string]string{}), events),
			"the engine runs without prefix caching", "start it with prefix caching (without --disable-radix-cache)", "prefix_caching_off"},
		{"prefix caching is off in the engine", "an older SGLang's prefix caching off", fmt.Sprintf(`address: %q, engine: sglang, %s`, radix("/get_server_info", map[string]string{}), events),
			"the engine runs without prefix caching", "start it with prefix caching (without --disable-radix-cache)", "prefix_caching_off"},
	}
	reasons := map[string]map[string]bool{}
	for _, c := range cases {
		if reasons[c.row] == nil {
			reasons[c.row] = map[string]bool{}
		}
		if c.reason != "" {
			reasons[c.row][c.reason] = true
		}
	}
	checkSilentRows(t, reasons)
	var mu sync.Mutex
	said := map[string]string{} // by row
	t.Cleanup(func() {
		for row, columns := range silentRows(t) {
			for _, phrase := range regexp.MustCompile("`[^`]+`").FindAllString(columns[1], -1) {
				// of pages and commands there are names only, and a state that ends soon may not be seen
				if phrase = strings.Trim(phrase, "`"); said[row] != "" && !regexp.MustCompile("^/|^kvlane|^no connection yet$").MatchString(phrase) && !strings.Contains(said[row], unquoted(phrase)) {
					t.Errorf("%s: got no %q, which the page promises", row, phrase)
				}
			}
		}
	})
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			tokenizer := ""
			if slices.Contains([]string{"", "no_events", "tokens_differ", "tokens_not_compared", "model_of_other_engine"}, c.reason) { // for the others it would be loaded for nothing
				tokenizer = `, tokenizer: "builtin:qwen3"`
			}
			_, admin, log := started(t, fmt.Sprintf(`models: [{name: demo%s, engine: %s}]
workers:
  static: [{name: w, %s}]
  health: {every: 1h, timeout: 1h}
  scrape: 1h
`, tokenizer, engineOf[strings.HasPrefix(c.name, "SGLang as")], c.worker))
			if c.reason == "" {
				_, body := until(t, admin+"/metrics", func(_ int, body string) bool {
					return strings.Contains(body, `kvlane_tokenizer_state{model="demo",state="agrees",worker="w"} 1`) && strings.Contains(body, `,state="live",worker="w"} 1`) &&
						!regexp.MustCompile(`state="(syncing|stale|gap)",worker="w"} 1`).MatchString(body)
				})
				if status, ready := page(t, admin+"/readyz"); status != http.StatusOK || ready != "ok\n" || strings.Contains(body, "kvlane_worker_warnings{") {
					t.Errorf("got %d %q, want no warnings; log:\n%s", status, ready, log)
				}
				return
			}
			n := 0
			until(t, admin+"/readyz", func(status int, body string) bool {
				if c.reason == "events_dropped" {
					n++ // each prompt stores blocks that no other has
					prompt := fmt.Sprintf(`{"model": "demo", "max_tokens": 1, "prompt": "%d %s"}`, n, strings.Repeat("word ", 100))
					resp, err := http.Post("http://"+strings.Split(c.worker, `"`)[1]+"/v1/completions", "application/json", strings.NewReader(prompt))
					if err != nil {
						t.Fatal(err)
					}
					resp.Body.Close()
				}
				return (status == http.StatusOK || c.name == "an address that does not answer") && strings.Contains(body, "\nwarning: ") && strings.Contains(body, c.warning)
			})
			until(t, admin+"/metrics", func(_ int, body string) bool {
				return strings.Contains(body, `kvlane_worker_warnings{reason="`+c.reason+`",worker="w"} `) // as many as ranks have it
			})
			_, body := page(t, admin+"/debug/workers")
			var rows []struct{ Warnings []string }
			if err := json.Unmarshal([]byte(body), &rows); err != nil {
				t.Fatal(err)
			}
			if want := strings.TrimPrefix(c.warning, "worker w: "); len(rows) != 1 || !slices.ContainsFunc(rows[0].Warnings, func(text string) bool { return strings.Contains(text, want) }) {
				t.Errorf("/debug/workers: got %s, want the warning %q", body, want)
			}
			until(t, admin+"/healthz", func(int, string) bool { return strings.Contains(log.String(), c.log) })
			_, ready := page(t, admin+"/readyz")
			mu.Lock()
			said[c.row] += unquoted(ready + log.String())
			mu.Unlock()
			if n := strings.Count(log.String(), "health check failed"); n > 1 {
				t.Errorf("got %d warnings of failed checks, want one a minute:\n%s", n, log)
			}
		})
	}
}

// expired writes a certificate of yesterday with its key.
func expired(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(-24 * time.Hour)}
	der, err := x509.CreateCertificate(crand.Reader, template, template, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	for _, f := range []struct {
		file string
		pem.Block
	}{{cert, pem.Block{Type: "CERTIFICATE", Bytes: der}}, {key, pem.Block{Type: "PRIVATE KEY", Bytes: secret}}} {
		if err := os.WriteFile(f.file, pem.EncodeToMemory(&f.Block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// What keeps Kvlane from knowing its workers, or from letting anybody in, is in /readyz until it has passed.
func TestSourcesThatCannotBeReadAreSaid(t *testing.T) {
	dir := t.TempDir()
	file, token := filepath.Join(dir, "workers.yaml"), filepath.Join(dir, "token")
	write := func(file, text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file, "[]\n")
	cert, key := expired(t, dir)
	_, admin, log := started(t, fmt.Sprintf(`listen: {address: "unix:%s/s", cert_file: %q, key_file: %q}
admin: {address: "127.0.0.1:0", token_file: %q}
index: {key: k}
fleet: {mode: external, sync_timeout: 100ms, external: {url: "nats://127.0.0.1:1"}}
workers:
  file: %q
  dns: [{name: no-such-host.invalid, port: 1, every: 100ms}]
`, dir, cert, key, token, file))
	ready := admin + "/readyz"
	const apart = "\nwarning: replicas: no connection to NATS, routing alone: "
	const dns, noToken = "\nwarning: workers.dns no-such-host.invalid: name not resolved: the old list stays: lookup ", "\nwarning: requests that need the token of admin.token_file are refused: open "
	until(t, ready, func(_ int, body string) bool {
		return strings.Contains(body, dns) && strings.Contains(body, noToken) && strings.Contains(body, apart)
	})
	if _, body := page(t, ready); !strings.Contains(body, "\nwarning: listen.cert_file expired on 20") {
		t.Errorf("got %q, want that the certificate has expired", body)
	}
	nobody := "no worker is known (workers.dns no-such-host.invalid, workers.file " + file + "): requests are answered 503"
	if _, body := page(t, ready); !strings.Contains(body, "\nwarning: "+nobody+"\n") {
		t.Errorf("got %q, want that no worker is known", body)
	}
	for _, reason := range []string{"no_workers", "replicas_apart"} {
		series := fmt.Sprintf("kvlane_worker_warnings{reason=%q,worker=\"\"} 1\n", reason)
		if _, body := page(t, admin+"/metrics"); !strings.Contains(body, series) {
			t.Errorf("got no series %s", series)
		}
	}
	until(t, ready, func(int, string) bool { return strings.Contains(log.String(), "ready, but "+nobody) })
	write(file, "- address: 127.0.0.1:1\n")
	until(t, ready, func(_ int, body string) bool { return !strings.Contains(body, nobody) })
	write(file, "- addrexx: 10.0.0.1:8000\n")
	write(token, "secret")
	rejected := "\nwarning: workers.file " + file + ": workers file rejected: the old list stays: "
	until(t, ready, func(_ int, body string) bool {
		return strings.Contains(body, rejected) && strings.Contains(body, `did you mean "address"?`) && !strings.Contains(body, noToken)
	})
	write(file, "[]\n# again\n")
	until(t, ready, func(_ int, body string) bool { return !strings.Contains(body, rejected) })
	if n := strings.Count(log.String(), "name not resolved"); n != 1 {
		t.Errorf("got %d log lines about a name, want one a minute:\n%s", n, log)
	}
}

// A filter that does not send the addresses of clients is told once in the log, and in /readyz while the limit is set.
func TestRequestsWithoutAnAddressAreTold(t *testing.T) {
	const told = "add source.address to request_attributes"
	for limit, want := range map[int]int{0: 0, 5: 1} {
		dir := t.TempDir()
		_, admin, log := started(t, fmt.Sprintf("listen: {address: \"unix:%s/s\"}\nlimits: {requests_per_address: %d}\n", dir, limit))
		conn, err := grpc.NewClient("unix:"+dir+"/s", grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for _, address := range []string{"192.0.2.1:10", "", ""} {
			st, err := epv3.NewExternalProcessorClient(conn).Process(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			m := &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{}, EndOfStream: true}}}
			if address != "" {
				m.Attributes = map[string]*structpb.Struct{"envoy.filters.http.ext_proc": {Fields: map[string]*structpb.Value{"source.address": structpb.NewStringValue(address)}}}
			}
			if err = st.Send(m); err == nil {
				_, err = st.Recv()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if n := strings.Count(log.String(), told); n != want {
			t.Errorf("limit %d: got %d log lines about addresses, want %d:\n%s", limit, n, want, log)
		}
		if _, body := page(t, admin+"/readyz"); strings.Count(body, told) != want {
			t.Errorf("limit %d: got %q, want %d warnings about addresses", limit, body, want)
		}
	}
}

// The warnings of a running Kvlane stand below the decision that `kvlane explain` shows.
func TestExplainShowsTheWarningsOfARunningKvlane(t *testing.T) {
	s, admin, _ := started(t, "workers: {static: [{name: w, address: \"127.0.0.1:1\"}], health: {every: 1h}}\n")
	until(t, admin+"/readyz", func(_ int, body string) bool { return strings.Contains(body, "warning: worker w: not ready") })
	s.decider.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions", Received: time.Now(), Body: []byte(`{"model": "m", "prompt": "Hello"}`)})
	for _, args := range [][]string{{"--last"}, {"r"}} {
		code, out, errs := kvlane("", append([]string{"explain", "--admin", strings.TrimPrefix(admin, "http://")}, args...)...)
		decision, warnings, _ := strings.Cut(out, "warning: ")
		if code != 0 || !strings.Contains(decision, "rejected with 503") || !strings.Contains("warning: "+warnings, "warning: worker w: not ready at 127.0.0.1:1: dial tcp 127.0.0.1:1: connect: connection refused\n") {
			t.Errorf("%v: got code %d, %q, %q, want the decision, and below it why no worker is ready", args, code, out, errs)
		}
	}
}

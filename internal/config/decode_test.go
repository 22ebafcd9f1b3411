package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// Files written by tools must load: quoted keys, JSON, anchors and merge keys, variables.
func TestWhatToolsWrite(t *testing.T) {
	t.Setenv("KVLANE_TEST_PORT", "9002")
	t.Setenv("KVLANE_TEST_EMPTY", "")
	t.Setenv("KVLANE_TEST_TRUE", "true")
	for name, c := range map[string]struct {
		text string
		got  func(c *Config) any
		want any
	}{
		"quoted keys":           {"\"log\": {'level': warn}\n", func(c *Config) any { return c.Log.Level }, "warn"},
		"JSON":                  {`{"log": {"level": "warn"}, "drain": "1m"}`, func(c *Config) any { return c.Log.Level + c.Drain.Std().String() }, "warn1m0s"},
		"JSON with tabs":        {"{\n\t\"log\": {\n\t\t\"level\":\t\"warn\"\n\t}\n}\n", func(c *Config) any { return c.Log.Level }, "warn"},
		"JSON with escapes":     {`{"index": {"key": "\u0041\/\ud83d\ude00"}}`, func(c *Config) any { return c.Index.Key }, "A/😀"},
		"an alias":              {"models: [{name: &n qwen}]\nworkers: {static: [{address: \"10.0.0.1:1\", models: [*n]}]}\n", func(c *Config) any { return c.Workers.Static[0].Models[0] }, "qwen"},
		"an alias of a section": {"workers: {dns: [{name: a, port: 1, worker: &w {ranks: 2}}, {name: b, port: 1, worker: *w}]}\n", func(c *Config) any { return c.Workers.DNS[1].Worker.Ranks }, 2},
		"merge keys":            {"workers:\n  static:\n  - &a {address: \"10.0.0.1:1\", ranks: 2, speed: 3}\n  - {<<: *a, address: \"10.0.0.2:1\", speed: 4}\n", func(c *Config) any { w := c.Workers.Static[1]; return []any{w.Address, w.Ranks, w.Speed}[1] }, 2},
		"keys before a merge":   {"workers:\n  static:\n  - &a {address: \"10.0.0.1:1\", speed: 3}\n  - {address: \"10.0.0.2:1\", speed: 4, <<: *a}\n", func(c *Config) any { return c.Workers.Static[1].Speed }, 4.0},
		"two merges":            {"workers:\n  static:\n  - &a {address: \"10.0.0.1:1\", speed: 3}\n  - &b {address: \"10.0.0.2:1\", speed: 4, ranks: 5}\n  - {<<: [*a, *b], address: \"10.0.0.3:1\"}\n", func(c *Config) any { w := c.Workers.Static[2]; return w.Speed + float64(w.Ranks) }, 8.0},
		"a variable":            {"listen: {address: \"127.0.0.1:${KVLANE_TEST_PORT}\"}\n", func(c *Config) any { return c.Listen.Address }, "127.0.0.1:9002"},
		"a number":              {"workers: {dns: [{name: a, port: \"${KVLANE_TEST_PORT}\"}]}\n", func(c *Config) any { return c.Workers.DNS[0].Port }, 9002},
		"plain":                 {"explain:\n  keep: ${KVLANE_TEST_NONE:-7}\n", func(c *Config) any { return c.Explain.Keep }, 7},
		"a bool":                {"explain:\n  header: ${KVLANE_TEST_TRUE}\n", func(c *Config) any { return c.Explain.Header }, true},
		"empty":                 {"index: {key: \"a${KVLANE_TEST_EMPTY}b\"}\n", func(c *Config) any { return c.Index.Key }, "ab"},
		"empty with a default":  {"index: {key: \"${KVLANE_TEST_EMPTY:-x}\"}\n", func(c *Config) any { return c.Index.Key }, "x"},
		"an empty default":      {"index: {key: \"a${KVLANE_TEST_NONE:-}\"}\n", func(c *Config) any { return c.Index.Key }, "a"},
		"escaped":               {"index: {key: \"$${KVLANE_TEST_PORT} $$5 $5\"}\n", func(c *Config) any { return c.Index.Key }, "${KVLANE_TEST_PORT} $5 $5"},
		"a preset":              {"routing: {preset: \"${KVLANE_TEST_NONE:-round-robin}\"}\n", func(c *Config) any { return c.Routing.Preset }, "round-robin"},
		"units of Kubernetes":   {"limits: {max_body: 4Mi}\nindex: {max_bytes: 2Gi}\n", func(c *Config) any { return int(c.Limits.MaxBody) + int(c.Index.MaxBytes) }, 4<<20 + 2<<30},
	} {
		config, err := Parse("k.yaml", []byte(c.text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if got := c.got(config); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

// rootKeys is what is said where no key is like the unknown one.
const rootKeys = "; the keys of this section are listen, admin, envoy, limits, models, workers, tenants, routing, flow, slo, index, fleet, " +
	"disagg, explain, log, drain, drain_quiet"

func TestWhatCannotBeDecoded(t *testing.T) {
	for text, want := range map[string]string{
		"index: {key: \"a${KVLANE_TEST_NONE}\"}\n":      "k.yaml:1:14: index.key: the environment variable KVLANE_TEST_NONE is not set: set it, or write ${KVLANE_TEST_NONE:-default}",
		"index: {key: \"${no-name}\"}\n":                `k.yaml:1:14: index.key: "${no-name}" is not like ${NAME} or ${NAME:-default}; a $ before { is written $$`,
		"index: {key: \"${open\"}\n":                    `k.yaml:1:14: index.key: "${open" is not like ${NAME} or ${NAME:-default}; a $ before { is written $$`,
		"listen: {<<: *x, address: \":1\"}\n":           "k.yaml:1:1: listen: *x: there is no anchor &x",
		"index: {<<: 7}\n":                              "k.yaml:1:1: index: needs a section with keys, not a value",
		"listen: {address: *x}\n":                       "k.yaml:1:19: listen.address: *x: there is no anchor &x",
		"models: &m [{name: a, aliases: *m}]\n":         "k.yaml:1:14: models[0].aliases[0]: needs a value, not a section",
		"workers: {kubernetes: &k {<<: *k, pool: p}}\n": "k.yaml:1:11: workers.kubernetes: the file has more than 10000 YAML aliases, or one that contains itself",
		"explain: {keep: 1.7}\n":                        `k.yaml:1:17: explain.keep: "1.7" is not a whole number`,
		"explain: {header: 1}\n":                        `k.yaml:1:19: explain.header: "1" is not true or false`,
		"explain: {keep: {}}\n":                         "k.yaml:1:11: explain.keep: needs a value, not a section",
		"models: a\n":                                   "k.yaml:1:9: models: needs a list, not a value: write - before each element",
		"routing: {policy: {cost: {tiers: [1, 2]}}}\n":  "k.yaml:1:27: routing.policy.cost.tiers: needs a list of 4 values",
		"explain: {\"-\": 1}\n":                         `k.yaml:1:11: explain.-: unknown key; the keys of this section are keep, header`,
		"\",inline\": 1\n":                              `k.yaml:1:1: ,inline: unknown key` + rootKeys,
		"models: [{name: a, block_size: 16}]\n":         "k.yaml:1:20: models[0].block_size: unknown key; it is a key of workers.static[] and index",
		"routing: {policy: {preset: kv-aware}}\n":       "k.yaml:1:20: routing.policy.preset: unknown key; it is a key of routing",
		"\"logs\": {}\n":                                `k.yaml:1:1: logs: unknown key; did you mean "log"?`,
	} {
		_, err := Parse("k.yaml", []byte(text))
		if err == nil || err.Error() != want {
			t.Errorf("%q:\n got %v\nwant %s", text, err, want)
		}
	}
	for _, text := range []string{"log: {}\nlog: {}\n", "{\"log\": {}, log: {}}\n"} {
		if _, err := Parse("k.yaml", []byte(text)); err == nil || !strings.HasPrefix(err.Error(), "k.yaml:") {
			t.Errorf("%q: got %v, want an error about the second key", text, err)
		}
	}
}

// A misspelt name or value, and a key at the wrong place, have one problem each, which says what is meant.
func TestWhatIsMeantIsSaid(t *testing.T) {
	const at = "k.yaml:1:1: "
	for text, want := range map[string]string{
		"routing:\n  preset: kv-awar\n":                             `k.yaml:2:11: routing.preset: no preset "kv-awar"; did you mean "kv-aware"?`,
		"routing:\n  shadow: [randm]\n":                             `k.yaml:2:12: routing.shadow[0]: no preset "randm"; did you mean "random"?`,
		"log: {level: inof}\n":                                      `k.yaml:1:14: log.level: "inof" is not one of debug, info, warn, error; did you mean "info"?`,
		"routing:\n  weights: {}\n":                                 "k.yaml:2:3: routing.weights: unknown key; did you mean routing.policy.cost?",
		"routing:\n  cost: {}\n":                                    "k.yaml:2:3: routing.cost: unknown key; it is a key of routing.policy",
		"tokenizer: x\n":                                            at + "tokenizer: unknown key; it is a key of models[]",
		"port: 9002\n":                                              at + "port: unknown key; did you mean listen.address?",
		"models: [qwen]\n":                                          "k.yaml:1:10: models[0]: needs a section with keys, not a value: a model is name: NAME",
		"models:\n- nam: qwen\n":                                    `k.yaml:2:3: models[0].nam: unknown key; did you mean "name"?`,
		"workers:\n  health_check: 5s\n":                            `k.yaml:2:3: workers.health_check: unknown key; did you mean "health"?`,
		"workers:\n  static:\n  - addrexx: 10.0.0.1:8000\n":         `k.yaml:3:5: workers.static[0].addrexx: unknown key; did you mean "address"?`,
		"workers:\n  static: [\"10.0.0.1:8000\"]\n":                 "k.yaml:2:12: workers.static[0]: needs a section with keys, not a value: a worker is address: IP:PORT",
		"workers:\n  static:\n  - address: ${KVLANE_NONE}\n":        "k.yaml:3:14: workers.static[0].address: the environment variable KVLANE_NONE is not set: set it, or write ${KVLANE_NONE:-default}",
		"workers:\n  static:\n  - address: http://10.0.0.1\n":       `k.yaml:3:14: workers.static[0].address: "http://10.0.0.1" is a URL: write ip:port only`,
		"workers:\n  static:\n  - address: \"[fe80::1%eth0]:80\"\n": `k.yaml:3:14: workers.static[0].address: "[fe80::1%eth0]:80" is not ip:port (Envoy needs an IP address, IPv6 in brackets; for names use workers.dns)`,
		// Nothing is near, and what else is missing is still said.
		"xyz: 1\n":                              at + "xyz: unknown key" + rootKeys,
		"name: x\n":                             at + "name: unknown key" + rootKeys,
		"workers:\n  static:\n  - ranks: two\n": "k.yaml:3:12: workers.static[0].ranks: \"two\" is not a whole number\nk.yaml:3:5: workers.static[0]: needs an address",
	} {
		if _, err := Parse("k.yaml", []byte(text)); err == nil || err.Error() != want {
			t.Errorf("%q:\n got %v\nwant %s", text, err, want)
		}
	}
	for key, path := range meant {
		c := reflect.ValueOf(&Config{}).Elem()
		if is, _ := find(c, path); !is.IsValid() {
			t.Errorf("%s is said to mean %s, which is no key", key, path)
		}
		if is, _ := find(c, key); is.IsValid() {
			t.Errorf("%s is a key: it needs no other", key)
		}
	}
	if _, err := ParseWorkers("w.yaml", []byte("- addrexx: 10.0.0.1:8000\n")); err == nil || strings.Contains(err.Error(), "needs an") {
		t.Errorf("got %v, want the misspelt key only", err)
	}
}

func TestOldNamesOfKeys(t *testing.T) {
	defer func(before map[string]string) { renamed = before }(renamed)
	renamed = map[string]string{
		"quiet":                  "drain_quiet",
		"models[].check.sample":  "every",
		"workers.health.seconds": "every",
		"workers.pods":           "kubernetes",
	}
	c, d, err := parse("k.yaml", []byte("quiet: 3s\nmodels: [{name: a}, {name: b, check: {sample: 5}}]\nworkers: {health: {seconds: 7s}, pods: {pools: [p]}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if c.Quiet.Std().String() != "3s" || c.Models[0].Check.Every != 1000 || c.Models[1].Check.Every != 5 || c.Workers.Health.Every.Std().String() != "7s" || c.Workers.Kubernetes.Pools[0] != "p" {
		t.Errorf("got %s, %+v, %+v, want the values of the old keys", c.Quiet.Std(), c.Models, c.Workers)
	}
	if w := c.Workers.Kubernetes.Worker; w.Engine != "vllm" {
		t.Errorf("got engine %q, want the defaults of the section", w.Engine)
	}
	want := `k.yaml:1:1: quiet: is now called drain_quiet: rename it
k.yaml:2:39: models[1].check.sample: is now called models[1].check.every: rename it
k.yaml:3:20: workers.health.seconds: is now called workers.health.every: rename it
k.yaml:3:34: workers.pods: is now called workers.kubernetes: rename it`
	if got := d.warnings.Error(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	_, err = Parse("k.yaml", []byte("quiet: 3s\ndrain_quiet: 3s\n"))
	wantProblems(t, err, "k.yaml:1:1: quiet: is the old name of drain_quiet, which is set too: remove the old one")
	_, err = Parse("k.yaml", []byte("quiet: soon\n"))
	wantProblems(t, err, `k.yaml:1:8: drain_quiet: "soon" is not a duration such as 300ms, 2s or 1m30s`)
}

func TestOneOldKeyIsAListNow(t *testing.T) {
	for text, want := range map[string]string{"pool: llm": "llm", "pool: &a llm": "llm", "pools: [a, b]": "a b", `pools: [a], pool: ""`: "a"} {
		c, d, err := parse("k.yaml", []byte("workers: {kubernetes: {"+text+"}}\n"))
		if err != nil || strings.Join(c.Workers.Kubernetes.Pools, " ") != want {
			t.Errorf("%s: got %v, want pools %s", text, err, want)
		}
		if said := d != nil && strings.Contains(d.warnings.Error(), "k.yaml:1:24: workers.kubernetes.pool: is now called workers.kubernetes.pools: rename it"); said != strings.HasPrefix(text, "pool:") {
			t.Errorf("%s: got a warning: %t", text, said)
		}
	}
	for text, want := range map[string]string{
		"pool: a, pools: [b]": "k.yaml:1:24: workers.kubernetes.pool: is the old name of workers.kubernetes.pools, which is set too: remove the old one",
		"pool: {a: b}":        "k.yaml:1:24: workers.kubernetes.pools: needs a list, not a section: write - before each element",
	} {
		_, err := Parse("k.yaml", []byte("workers: {kubernetes: {"+text+"}}\n"))
		wantProblems(t, err, want)
	}
}

// Keys of features that are gone are read, with a warning where they stand.
func TestRemovedKeys(t *testing.T) {
	_, d, err := parse("k.yaml", []byte("routing: {policy: {cost: {blend: 0.5}, pick: {temperature: 0}}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := d.warnings.Error(), "k.yaml:1:27: routing.policy.cost.blend: has no effect: "+noGain; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Each entry maps a key that no longer exists to one that does.
func TestTheTableOfOldNames(t *testing.T) {
	exists := func(path string) bool {
		c := Config{Models: make([]Model, 1), Workers: Workers{Static: make([]Worker, 1), DNS: make([]DNS, 1)}}
		path = strings.ReplaceAll(path, "[]", "[0]")
		v := reflect.ValueOf(&c).Elem()
		if strings.HasPrefix(path, "[") {
			v = reflect.ValueOf(&c.Workers.Static).Elem()
		}
		field, _ := find(v, path)
		return field.IsValid()
	}
	for from, name := range renamed {
		if to := join(from[:max(0, strings.LastIndexByte(from, '.'))], name); exists(from) || !exists(to) {
			t.Errorf("%s to %s: want a key that is not known, and one that is", from, to)
		}
	}
	if !exists("models[].check.every") || exists("models[].check.evry") {
		t.Error("the test does not know which keys exist")
	}
}

// Text that is nested deeply is refused before it is parsed; what only looks so is not.
func TestNestingIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		deep bool
	}{
		"lists":      {strings.Repeat("[", 200_000), true},
		"maps":       {strings.Repeat("{a: ", 200_000), true},
		"dashes":     {strings.Repeat("- ", 200_000) + "a", true},
		"questions":  {strings.Repeat("? ", 200_000) + "a", true},
		"quoted":     {strings.Repeat(`["]", `, 20_000), true},
		"tags":       {strings.Repeat("- !!seq ", 20_000), true},
		"many lists": {"[" + strings.Repeat("[],", 5000) + "[]]", false},
		"a line":     {"# " + strings.Repeat("-", 5000), false},
		"a comment":  {"# " + strings.Repeat("[- ", 5000), false},
		"a text":     {"- name: '" + strings.Repeat("[- ", 5000) + "'\n", false},
		"lines":      {strings.Repeat("- a\n", 5000), false},
	} {
		_, err := ParseWorkers("workers.yaml", []byte(c.text))
		if deep := err != nil && strings.Contains(err.Error(), "nested deeper than 1000 levels"); deep != c.deep {
			t.Errorf("%s: got %.200v, want refused as nested deeply %v", name, err, c.deep)
		}
	}
}

// The parser's time is quadratic in the keys of a section.
func TestSectionsAreBounded(t *testing.T) {
	keys := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	const worker = "- address: 10.0.0.1:80\n  engine: vllm\n  labels:\n"
	for name, c := range map[string]struct {
		text    string
		crowded bool
	}{
		"unknown keys":      {keys(200_000, "k%d: 1\n"), true},
		"equal keys":        {strings.Repeat("a: 1\n", 200_000), true},
		"labels":            {worker + keys(200_000, "    k%d: x\n"), true},
		"quoted":            {worker + keys(200_000, "    'k%d': x\n"), true},
		"with comments":     {worker + keys(150_000, "    k%d: x # y\n# z\n"), true},
		"with sections":     {keys(20_000, "k%d:\n  a: 1\n  b:\n  - 1\n"), true},
		"as many as may be": {worker + keys(maxKeys, "    k%d: x\n"), false},
		"one more":          {worker + keys(maxKeys+1, "    k%d: x\n"), true},
		"workers":           {keys(6000, "- address: 10.0.0.1:%d\n  engine: vllm\n"), false},
		"one line":          {worker + "    {" + keys(6000, "k%d: x, ") + "}\n", false},
		"a list":            {worker + "    a: x\n  models:\n" + keys(6000, "  - k%d\n"), false},
	} {
		_, err := ParseWorkers("workers.yaml", []byte(c.text))
		if crowded := err != nil && strings.Contains(err.Error(), "a section has more than 5000 keys"); crowded != c.crowded {
			t.Errorf("%s: got %.200v, want refused for its keys: %v", name, err, c.crowded)
		}
	}
}

// find returns the field at a path, with its jsonschema tag; the zero Value if there is
// none.
func find(v reflect.Value, path string) (field reflect.Value, rules string) {
	for step := range strings.SplitSeq(path, ".") {
		key, i, listed := strings.Cut(step, "[")
		if v = allocated(v); key != "" {
			v, rules, _ = fieldByKey(v, key)
		}
		if !v.IsValid() {
			break
		}
		if listed {
			n, _ := strconv.Atoi(strings.TrimSuffix(i, "]"))
			v = v.Index(n)
		}
	}
	return v, rules
}

package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Files whose prefill and decode workers cannot work together are refused, or warned of if
// they work partly, with the place.
func TestPoolsThatCannotWork(t *testing.T) {
	const (
		pair   = "workers:\n  static:\n  - {name: p, address: \"10.0.0.1:1\", role: prefill}\n  - {name: d, address: \"10.0.0.2:1\", role: decode}\n"
		alone  = "workers:\n  static:\n  - {name: p, address: \"10.0.0.1:1\", role: prefill}\n"
		decode = "workers:\n  static:\n  - {name: d, address: \"10.0.0.1:1\", role: decode%s}\n"
		both   = "workers:\n  static:\n  - {name: b, address: \"10.0.0.1:1\"}\n"
		nixl   = "disagg: {connector: nixl}\n"
	)
	for name, c := range map[string]struct {
		text string
		// problem and warning are parts of the messages; "" means that there is none.
		problem, warning string
	}{
		"well":                          {nixl + pair, "", ""},
		"nothing is said of roles":      {both, "", ""},
		"prefill only":                  {nixl + alone, "kvlane.yaml:4:44: workers.static[0].role: there are only prefill workers among the workers of any model: none would decode", ""},
		"prefill only, more in a file":  {nixl + alone + "  file: list.yaml\n", "", "there are only prefill workers"},
		"prefill and whole":             {nixl + both + "  - {name: p, address: \"10.0.0.2:1\", role: prefill}\n", "", ""},
		"prefill only of a model":       {nixl + strings.ReplaceAll(pair, "prefill}", "prefill, models: [m]}"), "", ""},
		"one more for the model":        {nixl + strings.ReplaceAll(pair, "e}", "e, models: [m]}"), "", ""},
		"two models, each a half":       {nixl + strings.Replace(strings.Replace(pair, "prefill}", "prefill, models: [m]}", 1), "decode}", "decode, models: [n]}", 1), `of the model "m": none would decode`, ""},
		"no connector":                  {pair, "", "kvlane.yaml:3:44: workers.static[0].role: prefill, but there is no disagg.connector"},
		"no roles":                      {nixl + both, "", "kvlane.yaml:1:21: disagg.connector: the workers of any model have no roles"},
		"no prefill workers":            {nixl + strings.Replace(decode, "%s", "", 1), "", "there is no prefill worker among the workers of any model: their requests are not split"},
		"no prefill workers, SGLang":    {"disagg: {connector: sglang}\n" + strings.Replace(decode, "%s", ", engine: sglang", 1), "workers.static[0].role: there is no prefill worker", ""},
		"another engine":                {"disagg: {connector: sglang}\n" + pair, "kvlane.yaml:4:6: workers.static[0].engine: is vllm: the connector sglang is of sglang", ""},
		"another engine, named":         {nixl + strings.ReplaceAll(pair, "role", "engine: trtllm, role"), "kvlane.yaml:4:46: workers.static[0].engine: is trtllm: the connector nixl is of vllm", ""},
		"another engine, for all":       {nixl + pair + "  - {name: b, address: \"10.0.0.3:1\", engine: sglang}\n", "", ""},
		"another engine in a file":      {nixl + pair + "  file: list.yaml\n", "", "workers.file[0].engine: is sglang"},
		"another engine, sidecar":       {"disagg: {connector: sidecar}\n" + strings.ReplaceAll(pair, "role", "engine: sglang, role"), "", ""},
		"another engine behind a name":  {nixl + pair + "  dns: [{name: host, port: 1, worker: {engine: sglang, role: decode}}]\n", "workers.dns[0].worker.engine: is sglang", ""},
		"rules that are off":            {nixl + alone + "routing: {disagg: {mode: off}}\n", "", "routing.disagg.mode: off: the connector and the roles are not used"},
		"off, but not for a model":      {nixl + alone + "routing: {disagg: {mode: off}}\nmodels: [{name: m, disagg: {mode: cost}}]\n", "none would decode", ""},
		"zones without labels":          {nixl + pair + "routing: {disagg: {same_zone: true}}\n", "", "routing.disagg.same_zone: workers.static[0], workers.static[1]: no label 'zone'"},
		"zones of a model":              {nixl + pair + "models: [{name: m, disagg: {same_zone: true}}]\n", "", "models[0].disagg.same_zone: workers.static[0]"},
		"zones":                         {nixl + strings.ReplaceAll(pair, "role", "labels: {zone: a}, role") + "routing: {disagg: {same_zone: true}}\n", "", ""},
		"a listener for all":            {nixl + pair + "envoy: {prefill: \"0.0.0.0:8082\"}\n", "", "envoy.prefill: 0.0.0.0:8082 can be reached from other machines"},
		"a listener for all, no host":   {nixl + pair + "envoy: {prefill: \":8082\"}\n", "", "can be reached from other machines"},
		"a listener of this machine":    {nixl + pair + "envoy: {prefill: \"127.0.0.1:8082\"}\n", "", ""},
		"a listener of this machine, 6": {nixl + pair + "envoy: {prefill: \"[::1]:8082\"}\n", "", ""},
		"a listener in a folder":        {nixl + pair + "envoy: {prefill: \"unix:/run/p\"}\n", "", ""},
		"append without LMCache":        {"disagg: {connector: nixl, first_token: append}\n" + pair, "", "disagg.first_token: only the connector lmcache"},
		"one ZMQ address for two":       {"disagg: {connector: p2p-nccl}\n" + strings.ReplaceAll(pair, "role", "disagg: {zmq: \"10.0.0.1:5\"}, role"), "workers.static[1].disagg: zmq of this worker are those of workers.static[0]", ""},
		"one receiver for all":          {"disagg: {connector: lmcache, workers: {receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2]}}\n" + pair + "  - {name: e, address: \"10.0.0.3:1\", role: decode}\n", "workers.static[2].disagg: receiver_host, receiver_init_ports and receiver_alloc_ports of this worker", ""},
		"one engine id for two":         {"disagg: {connector: nixl-push}\n" + strings.ReplaceAll(pair, "role: prefill", "disagg: {engine_id: x}, role: prefill") + "  - {name: q, address: \"10.0.0.3:1\", role: prefill, disagg: {engine_id: x}}\n", "workers.static[2].disagg: engine_id of this worker", ""},
		"one engine id, one worker":     {"disagg: {connector: nixl-push}\n" + strings.ReplaceAll(pair, "role: prefill", "disagg: {engine_id: x}, role: prefill"), "", ""},
		"SGLang, off":                   {"disagg: {connector: sglang}\n" + strings.ReplaceAll(pair, "role", "engine: sglang, role") + "routing: {disagg: {mode: off}}\n", "routing.disagg.mode: off: SGLang's decode engines", ""},
		"SGLang, off for a model":       {"disagg: {connector: sglang}\n" + strings.ReplaceAll(pair, "role", "engine: sglang, role") + "models: [{name: m, disagg: {mode: off}}]\n", "models[0].disagg.mode: off: SGLang's", ""},
		"pods of another engine":        {"disagg: {connector: sglang}\nworkers: {kubernetes: {namespace: n, selector: {a: b}, ports: [1], never_ask: true, worker: {engine: vllm}}}\n", "", "workers.kubernetes.worker.engine: is vllm: the connector sglang is of sglang"},
		"usage of the sidecar's leg":    {"disagg: {connector: sidecar, usage: prefill}\n" + pair, "", "disagg.usage: has no effect: the sidecar"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(name, text string) string {
				path := filepath.Join(dir, name)
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				return path
			}
			list := write("list.yaml", "- {name: x, address: \"10.0.0.9:1\", role: prefill, engine: sglang}\n")
			_, warnings, err := Inspect("kvlane.yaml", []byte(strings.ReplaceAll(c.text, "list.yaml", list)), nil)
			said := ""
			for _, w := range warnings {
				said += w.String() + "\n"
			}
			if c.problem == "" && err != nil || c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)) {
				t.Errorf("problems %v, want %q", err, c.problem)
			}
			if err == nil && (c.warning == "" && said != "" || !strings.Contains(said, c.warning)) {
				t.Errorf("warnings %q, want %q", said, c.warning)
			}
		})
	}
}

package config

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io/fs"
	"math"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// certificate writes a self-signed certificate with its key, valid for a day that began an age ago.
func certificate(t *testing.T, dir string, age time.Duration) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now().Add(-age)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: begin, NotAfter: begin.Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("tls.crt", "CERTIFICATE", der), write("tls.key", "PRIVATE KEY", secret)
}

func TestMistakesThatCheckFinds(t *testing.T) {
	dir := t.TempDir()
	cert, key := certificate(t, dir, time.Hour)
	old, oldKey := certificate(t, t.TempDir(), 48*time.Hour)
	young, youngKey := certificate(t, t.TempDir(), -time.Hour)
	const worker = "workers: {static: [{address: \"10.0.0.1:8000\"%s}]}\n"
	plain := fmt.Sprintf(worker, "")
	const seen, adapter = "envoy: {first_token: true}\n", "models: [{name: m, adapters: [sql], tokenizer: \"builtin:qwen3\"}]\n"
	long := filepath.Join(dir, "long") // too long
	if err := os.WriteFile(long, make([]byte, maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	const tooLong = "long has more than 4194304 bytes: name a file that can be read"
	fleet := func(mode, more string) string {
		return plain + "index: {key: k}\nfleet: {mode: " + mode + ", " + more + "}\n"
	}
	two := func(a, b string) string {
		return "workers:\n  static:\n  - {address: \"10.0.0.1:8000\", " + a + "}\n  - {address: \"" + b + "}\n"
	}
	for name, c := range map[string]struct{ text, problem, warning string }{
		"rank ports that overlap":      {two("ranks: 4, rank_by: port", "10.0.0.1:8003\", ranks: 2, rank_by: port"), "workers.static[1].address: the ports 8003 to 8004 of the ranks overlap those of workers.static[0], 8000 to 8003: give each worker ports of its own", ""},
		"a worker on a rank's port":    {two("ranks: 4, rank_by: port", "10.0.0.1:8003\""), "workers.static[1].address: the ports 8003 to 8003", ""},
		"rank ports side by side":      {two("ranks: 4, rank_by: port", "10.0.0.1:8004\", ranks: 2, rank_by: port"), "", ""},
		"rank ports of two hosts":      {two("ranks: 4, rank_by: port", "10.0.0.2:8000\", ranks: 4, rank_by: port"), "", ""},
		"ranks of one port":            {two("ranks: 4", "10.0.0.1:8003\", ranks: 4"), "", ""},
		"a quiet longer than drain":    {plain + "drain: 5s\ndrain_quiet: 6s\n", "", ":3:14: drain_quiet: 6s is longer than drain (5s), which ends first: make it shorter"},
		"headers that tell of prompts": {plain + "explain: {header: true}\n", "", ":2:19: explain.header: tells every client what others have asked"},
		"objectives without trust":     {"workers: {kubernetes: {pools: [p], objectives: [llm-d.ai]}}\n", "", "workers.kubernetes.objectives: have no effect: no request can name one without routing.trust_objectives"},
		"priorities without trust":     {plain + "routing: {objectives: {premium: 5}}\n", "", "routing.objectives: have no effect: no request can name one without routing.trust_objectives"},
		"priorities with trust":        {plain + "routing: {objectives: {premium: 5}, trust_objectives: true}\n", "", ""},
		"objectives with trust":        {"workers: {kubernetes: {pools: [p], objectives: [llm-d.ai]}}\nrouting: {trust_objectives: true}\n", "", ""},
		"no such headers":              {plain + "explain: {header: false}\n", "", ""},
		"tenants that fail open":       {plain + "tenants: {salt_header: x-tenant}\nenvoy: {fail_closed: false}\n", "", ":2:1: tenants: while Kvlane is down or late requests pass without a salt"},
		"tenants that fail closed":     {plain + "tenants: {salt_header: x-tenant}\n", "", ""},
		"tenants by choice":            {plain + "tenants: {salt_header: x-tenant, required: false}\n", "", ""},
		"a tenant's header":            {plain + "tenants: {salt_header: \"x tenant\"}\n", "tenants.salt_header: \"x tenant\" is not the name of a header", ""},
		"a quiet as long as drain":     {plain + "drain: 5s\ndrain_quiet: 5s\n", "", ""},
		"replay without endpoint":      {fmt.Sprintf(worker, `, events: {replay: "tcp://h:1"}`), "", "workers.static[0].events.replay: is not used without endpoint: name the endpoint of the events"},
		"replay with it":               {fmt.Sprintf(worker, `, events: {endpoint: "tcp://h:1", replay: "tcp://h:2"}`), "", ""},
		// Keys without effect.
		"a queue that is off":           {plain + "flow: {timeout: 10s}\n", "", ":2:1: flow: has no effect: without max_requests there is no queue"},
		"all of flow, as by default":    {plain + "flow: {max_requests: 0, timeout: 30s, weights: {}, bands: []}\n", "", ""},
		"weights without tenants":       {plain + seen + "flow: {max_requests: 9, weights: {a: 2}}\n", "", "flow.weights: no request has a tenant"},
		"weights without fairness":      {plain + seen + "flow: {max_requests: 9, fairness: none, weights: {a: 2}}\n", "", "flow.weights: have no effect: fairness is none"},
		"weights of models":             {plain + seen + "flow: {max_requests: 9, fairness: model, weights: {a: 2}}\n", "", ""},
		"shares without tenants":        {plain + seen + "flow: {max_requests: 9, tenant_share: 0.5}\nrouting: {policy: {limits: {max_active: 8}}}\n", "", "flow.tenant_share: no request has a tenant"},
		"shares without fairness":       {plain + seen + "flow: {max_requests: 9, fairness: none, tenant_share: 0.5}\nrouting: {policy: {limits: {max_active: 8}}}\n", "", "flow.tenant_share: has no effect: fairness is none"},
		"shares of no places":           {plain + seen + "flow: {max_requests: 9, tenant_share: 0.5}\ntenants: {header: x-team}\n", "", "flow.tenant_share: has no effect: without routing.policy.limits.max_active there are no places"},
		"shares of places":              {plain + seen + "flow: {max_requests: 9, tenant_share: 0.5}\ntenants: {header: x-team}\nrouting: {policy: {limits: {max_active: 8}}}\n", "", ""},
		"shares of decode places":       {plain + seen + "flow: {max_requests: 9, tenant_share: 0.5}\ntenants: {header: x-team}\nrouting: {disagg: {decode: {limits: {max_active: 8}}}}\n", "", ""},
		"a wait that is off":            {plain + "routing: {wait: {timeout: 9s}}\n", "", "routing.wait.timeout: has no effect without max_requests"},
		"a wait":                        {plain + "routing: {wait: {max_requests: 1, timeout: 9s}}\n", "", ""},
		"shedding at no limit":          {plain + "routing: {policy: {limits: {shed_at: 0.5}}}\n", "", "routing.policy.limits.shed_at: has no effect without max_active"},
		"shedding at a limit":           {plain + "routing: {policy: {limits: {shed_at: 0.5, max_queue: 9}}}\n", "", ""},
		"trust in no objectives":        {plain + "routing: {trust_objectives: true}\n", "", "routing.trust_objectives: has no effect: there are no objectives"},
		"trust in no tenant":            {plain + "tenants: {trust_ingress: true}\n", "", "tenants.trust_ingress: has no effect without header or salt_header"},
		"trust in a tenant":             {plain + "tenants: {header: x-team, trust_ingress: true}\n", "", ""},
		"tenants required by no salt":   {plain + "tenants: {header: x-team, required: true}\n", "", "tenants.required: has no effect without salt_header"},
		"tenants required":              {plain + "tenants: {salt_header: x-team, required: true}\n", "", ""},
		"a band of no request":          {plain + seen + "flow: {max_requests: 9, bands: [{priority: 1}]}\n", "", "flow.bands[0].priority: no request has it"},
		"a band of trusted requests":    {plain + seen + "flow: {max_requests: 9, bands: [{priority: 1}]}\nrouting: {trust_overrides: true}\n", "", ""},
		"a band of the others":          {plain + seen + "flow: {max_requests: 9, bands: [{priority: 0, max_requests: 8}]}\n", "", ""},
		"a band larger than the queue":  {plain + seen + "flow: {max_requests: 9, bands: [{priority: 0, max_requests: 10}]}\n", "", "flow.bands[0].max_requests: has no effect above flow.max_requests"},
		"more bytes than the queue has": {plain + seen + "flow: {max_requests: 9, max_bytes: 1KiB, bands: [{priority: 0, max_bytes: 1MiB}]}\n", "", "flow.bands[0].max_bytes: has no effect above flow.max_bytes"},
		"a band of an adapter":          {plain + seen + adapter + "flow: {max_requests: 9, bands: [{priority: 1, models: [sql]}]}\n", "", `flow.bands[0].models[0]: has no effect: "sql" is another name of "m"`},
		"a band of a model":             {plain + seen + adapter + "flow: {max_requests: 9, bands: [{priority: 1, models: [m]}, {priority: 2, models: [other]}]}\n", "", ""},
		"a tenant in a key":             {plain + "tenants: {header: Authorization}\n", "tenants.header: \"authorization\" is removed before the engine, which needs it", ""},
		"a tenant in the length":        {plain + "tenants: {salt_header: content-length}\n", "tenants.salt_header: \"content-length\" is removed", ""},
		"a tenant in the host":          {plain + "tenants: {header: host}\n", "tenants.header: \"host\" is removed", ""},
		"a tenant in the request's id":  {plain + "tenants: {header: x-request-id}\n", "tenants.header: \"x-request-id\" is removed", ""},
		"a tenant in the path":          {plain + "tenants: {header: \":path\"}\n", "tenants.header: \":path\" is not the name of a header", ""},
		"a tenant in a rank":            {plain + "tenants: {header: x-data-parallel-rank}\n", "tenants.header: \"x-data-parallel-rank\" is removed", ""},
		"a tenant of its own":           {plain + "tenants: {header: x-kvlane-tenant}\n", "", ""},
		"a tenant in a certificate":     {plain + "tenants: {header: x-forwarded-client-cert}\n", "", ""},
		"a relative socket":             {plain + "listen: {address: \"unix:kvlane.sock\"}\n", "", `listen.address: "unix:kvlane.sock" depends on the folder that Kvlane and Envoy are started in: write the whole path`},
		"an abstract socket":            {plain + "listen: {address: \"unix:@kvlane\"}\n", "", ""},
		"a socket in no folder":         {plain + "envoy: {prefill: \"unix:" + dir + "/none/s\"}\n", "", "envoy.prefill: there is no folder " + dir + "/none here: make it before Kvlane starts"},
		"a socket in a folder":          {plain + "listen: {address: \"unix:" + dir + "/s\"}\n", "", ""},
		"a large index":                 {plain + "index: {max_bytes: 3GiB}\n", "", "index.max_bytes: 3221225472 bytes are more than the process can have (GOMEMLIMIT, 2147483648 bytes): make it smaller, or raise the limit"},
		"an index within the limit":     {plain + "index: {max_bytes: 2GiB}\n", "", ""},
		"certificates":                  {plain + "listen: {cert_file: " + cert + ", key_file: " + key + "}\nindex: {peers: {ca_file: " + cert + "}}\n", "", ""},
		"no such certificate":           {plain + "listen: {cert_file: /none.crt, key_file: " + key + "}\n", "", "listen.cert_file: there is no file /none.crt here: Kvlane needs it where it runs"},
		"no such token":                 {plain + "admin: {token_file: /none}\n", "", "admin.token_file: there is no file /none here"},
		"a folder as the token":         {plain + "admin: {token_file: " + dir + "}\n", "admin.token_file: " + dir + " is not a regular file: name a file that can be read", ""},
		"a kubeconfig at home":          {"workers: {kubernetes: {pools: [p], kubeconfig: \"~/.kube/config\"}}\n", "", "workers.kubernetes.kubeconfig: there is no file ~/.kube/config here"},
		"a kubeconfig":                  {"workers: {kubernetes: {pools: [p], kubeconfig: " + cert + "}}\n", "", ""},
		"events at the HTTP port":       {fmt.Sprintf(worker, `, events: {endpoint: "tcp://10.0.0.1:8000"}`), "", `workers.static[0].events.endpoint: "tcp://10.0.0.1:8000" is the engine's HTTP port: name that of its KV events, such as 5557`},
		"no such key":                   {plain + "listen: {cert_file: " + cert + ", key_file: /none.key}\n", "", "listen.key_file: there is no file /none.key here"},
		"a key for a certificate":       {plain + "listen: {cert_file: " + key + ", key_file: " + key + "}\n", "listen.cert_file: " + key + ": tls: ", ""},
		"the key of another one":        {plain + "listen: {cert_file: " + cert + ", key_file: " + oldKey + "}\n", "listen.key_file: " + oldKey + " is not the key of the certificate " + cert, ""},
		"an expired certificate":        {plain + "listen: {cert_file: " + old + ", key_file: " + oldKey + "}\n", "", "listen.cert_file: " + old + " expired on 20"},
		"a certificate of tomorrow":     {plain + "listen: {cert_file: " + young + ", key_file: " + youngKey + "}\n", "", "listen.cert_file: " + young + " is not valid before 20"},
		"a port that is none":           {strings.Replace(plain, "8000", "80000", 1), "workers.static[0].address: \"10.0.0.1:80000\": the port \"80000\" is not a number from 1 to 65535", ""},
		"no events over HTTP":           {fmt.Sprintf(worker, ", events: {endpoint: \"http://10.0.0.1:5557\"}"), "", "events.endpoint: \"http://10.0.0.1:5557\" is polled as TensorRT-LLM's events are, and the engine is vllm: write tcp://"},
		"events over HTTP":              {fmt.Sprintf(worker, ", engine: trtllm, events: {endpoint: \"http://10.0.0.1:5557\"}"), "", ""},
		"a long key of the index":       {plain + "index: {key_file: " + long + "}\n", "index.key_file: " + dir + "/" + tooLong, ""},
		"a key of the index":            {plain + "index: {key_file: " + key + "}\n", "", ""},
		"no key of the index":           {plain + "index: {key_file: /none}\n", "", "index.key_file: there is no file /none here"},
		"a long secret":                 {fleet("embedded", "embedded: {listen: \"127.0.0.1:0\", secret_file: "+long+"}"), "fleet.embedded.secret_file: " + dir + "/" + tooLong, ""},
		"a secret":                      {fleet("embedded", "embedded: {listen: \"127.0.0.1:0\", secret_file: "+key+"}"), "", ""},
		"a secret that is not read":     {fleet("\"off\"", "embedded: {secret_file: "+long+"}, external: {token_file: /none}"), "", ""},
		"a long CA of replicas":         {fleet("embedded", "embedded: {listen: \"127.0.0.1:0\", secret_file: "+key+", tls: {cert_file: "+cert+", key_file: "+key+", ca_file: "+long+"}}"), "fleet.embedded.tls.ca_file: " + long + ": " + long + " has more than 4194304 bytes", ""},
		"a long certificate of them":    {fleet("embedded", "embedded: {listen: \"127.0.0.1:0\", secret_file: "+key+", tls: {cert_file: "+long+", key_file: "+key+", ca_file: "+cert+"}}"), "fleet.embedded.tls.cert_file: " + dir + "/" + tooLong, ""},
		"a long password of NATS":       {fleet("external", "external: {url: \"nats://h:4222\", user: u, password_file: "+long+"}"), "fleet.external.password_file: " + dir + "/" + tooLong, ""},
		"a long token of NATS":          {fleet("external", "external: {url: \"nats://h:4222\", token_file: "+long+"}"), "fleet.external.token_file: " + dir + "/" + tooLong, ""},
		"a token of NATS":               {fleet("external", "external: {url: \"nats://h:4222\", token_file: "+key+"}"), "", ""},
		"a long token":                  {plain + "admin: {token_file: " + long + "}\n", "admin.token_file: " + dir + "/" + tooLong, ""},
		"a long certificate":            {plain + "listen: {cert_file: " + long + ", key_file: " + key + "}\n", "listen.cert_file: " + long + ": " + long + " has more than 4194304 bytes", ""},
		"no such CA":                    {plain + "index: {peers: {ca_file: /none.pem}}\n", "", "index.peers.ca_file: there is no file /none.pem here"},
		"a CA file without any":         {plain + "index: {peers: {ca_file: " + key + "}}\n", "index.peers.ca_file: " + key + ": no certificate in " + key + ": name a file in PEM format", ""},
		"a model without a tokenizer":   {plain + "models: [{name: m}]\n", "", ":2:11: models[0]: has no tokenizer: \"m\" is routed by load"},
		"one that an engine renders":    {plain + "models: [{name: m, check: {renderer: \"http://h:1\"}}]\n", "", ""},
		"the default, without folders":  {plain, "", ""},
	} {
		file := filepath.Join(dir, "k.yaml")
		debug.SetMemoryLimit(2 << 30)
		_, warnings, err := Inspect(file, []byte(c.text), nil)
		debug.SetMemoryLimit(math.MaxInt64)
		problem, warning := "", ProblemsError(warnings).Error()
		if err != nil {
			problem = err.Error()
		}
		if !strings.Contains(problem, c.problem) || (problem == "") != (c.problem == "") {
			t.Errorf("%s: got problem %q, want %q", name, problem, c.problem)
		}
		if !strings.Contains(warning, c.warning) || (warning == "") != (c.warning == "") || strings.Contains(warning, "\n") {
			t.Errorf("%s: got warning %q, want %q", name, warning, c.warning)
		}
	}
}

// The index is compared with the memory limit of the cgroup, of either version and of any parent, and with the memory of the machine.
func TestIndexAboveTheMemory(t *testing.T) {
	defer func(before fs.FS) { machine = before }(machine)
	const one, other = "0::/system.slice/kvlane.service\n", "12:cpu,cpuacct:/a\n9:memory:/docker/1\n"
	const v2, v1 = "sys/fs/cgroup/", "sys/fs/cgroup/memory/"
	for name, c := range map[string]struct {
		groups string
		files  map[string]string
		want   string // the file that is named, "" without a warning
	}{
		"no cgroups":               {"", nil, ""},
		"no limit":                 {one, map[string]string{v2 + "system.slice/kvlane.service/memory.max": "max\n"}, ""},
		"a limit above the index":  {one, map[string]string{v2 + "system.slice/kvlane.service/memory.max": "1073741824\n"}, ""},
		"its own limit":            {one, map[string]string{v2 + "system.slice/kvlane.service/memory.max": "1073741823\n"}, v2 + "system.slice/kvlane.service/memory.max"},
		"a parent's limit":         {one, map[string]string{v2 + "system.slice/kvlane.service/memory.max": "max\n", v2 + "system.slice/memory.max": "1048576\n"}, v2 + "system.slice/memory.max"},
		"a container's limit":      {"0::/\n", map[string]string{v2 + "memory.max": "1048576\n"}, v2 + "memory.max"},
		"a limit of first version": {other, map[string]string{v1 + "docker/1/memory.limit_in_bytes": "1048576\n"}, v1 + "docker/1/memory.limit_in_bytes"},
		"the host's path":          {other, map[string]string{v1 + "memory.limit_in_bytes": "1048576\n"}, v1 + "memory.limit_in_bytes"},
		"none of first version":    {other, map[string]string{v1 + "memory.limit_in_bytes": "9223372036854771712\n"}, ""},
		"another controller's":     {"12:cpu,cpuacct:/a\n", map[string]string{v1 + "a/memory.limit_in_bytes": "1048576\n"}, ""},
		"the machine's memory":     {one, map[string]string{v2 + "memory.max": "max\n", "proc/meminfo": "MemTotal:       1048575 kB\nMemFree: 1 kB\n"}, "proc/meminfo"},
		"a limit below it":         {one, map[string]string{v2 + "memory.max": "1048576\n", "proc/meminfo": "MemTotal: 1048575 kB\n"}, v2 + "memory.max"},
		"enough of both":           {one, map[string]string{v2 + "memory.max": "max\n", "proc/meminfo": "MemTotal: 1048576 kB\n"}, ""},
		"garbage":                  {"x\n0::/..\n", map[string]string{v2 + "memory.max": "many\n"}, ""},
	} {
		files := fstest.MapFS{"proc/self/cgroup": {Data: []byte(c.groups)}}
		for file, text := range c.files {
			files[file] = &fstest.MapFile{Data: []byte(text)}
		}
		machine = files
		_, warnings, err := Inspect("k.yaml", []byte("workers: {static: [{address: \"10.0.0.1:8000\"}]}\nindex: {max_bytes: 1GiB}\n"), nil)
		got := ProblemsError(warnings).Error()
		if err != nil || (c.want == "") != (got == "") || c.want != "" && !strings.Contains(got, "k.yaml:2:20: index.max_bytes: 1073741824 bytes are more than the process can have (/"+c.want+", ") {
			t.Errorf("%s: got %q, %v, want a warning that names %q", name, got, err, c.want)
		}
	}
}

// freePort returns an address of a port that was free a moment ago.
// freePorts returns two addresses: one asked for after the other may be the same.
func freePorts(t *testing.T) [2]string {
	t.Helper()
	first, err := enginesim.FreePorts(2)
	if err != nil {
		t.Fatal(err)
	}
	return [2]string{fmt.Sprint("127.0.0.1:", first), fmt.Sprint("127.0.0.1:", first+1)}
}

// Where Kvlane is to run now, what is missing or in use is an error.
func TestWhatLiveChecksFind(t *testing.T) {
	dir := t.TempDir()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	socket := filepath.Join(dir, "taken.sock")
	unix, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// effective is what a Kvlane that runs with the same addresses shows.
	effective := func(text string) []byte {
		c, err := Parse("k.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		shown, err := c.Effective()
		if err != nil {
			t.Fatal(err)
		}
		return shown
	}
	same := func(text string) []byte { return effective(text) }
	other := func(text string) []byte { return effective(text + "drain: 7s\n") }
	elsewhere := func(text string) []byte { return effective(strings.ReplaceAll(text, "unix:", "unix:/elsewhere")) }
	for name, c := range map[string]struct {
		listen, admin, ingress, more, problem, warning string
		running                                        func(text string) []byte
		closed                                         bool
	}{
		"all free":             {},
		"a running Kvlane":     {listen: "unix:" + socket, running: same, warning: `listen.address: "unix:` + socket + `" is in use by a running Kvlane with this configuration`},
		"its admin port":       {admin: taken.Addr().String(), running: same, warning: `admin.address: "` + taken.Addr().String() + `" is in use by a running Kvlane with this configuration`},
		"one to be replaced":   {listen: "unix:" + socket, running: other, warning: "is in use by a running Kvlane with another configuration (GET /debug/config)"},
		"one elsewhere":        {listen: "unix:" + socket, running: elsewhere, problem: "listen.address: cannot listen there: another process listens there"},
		"a page, not a Kvlane": {admin: taken.Addr().String(), running: func(string) []byte { return []byte("<html>\n<p class=a>: [</html>") }, problem: "admin.address: cannot listen there: "},
		"a list, not a Kvlane": {admin: taken.Addr().String(), running: func(string) []byte { return []byte("- a\n- b\n") }, problem: "admin.address: cannot listen there: "},
		"one with a token":     {admin: taken.Addr().String(), closed: true, warning: `admin.address: "` + taken.Addr().String() + `" is in use: Kvlane seems to run already, since ` + taken.Addr().String() + " loads tokenizers or asks for the token"},
		"its socket":           {listen: "unix:" + socket, closed: true, warning: `listen.address: "unix:` + socket + `" is in use: Kvlane seems to run already`},
		"a taken admin port":   {admin: taken.Addr().String(), problem: "admin.address: cannot listen there: listen tcp " + taken.Addr().String() + ": bind: address already in use: stop the other program"},
		"a taken socket":       {listen: "unix:" + socket, problem: "listen.address: cannot listen there: another process listens there: stop the other program"},
		"a running Envoy":      {ingress: taken.Addr().String(), warning: "envoy.ingress: cannot listen there"},
		"a folder of others":   {listen: "unix:/proc/s", problem: "listen.address: nothing can be created there: "},
		"a file as folder":     {listen: "unix:" + file + "/s", problem: "listen.address: " + file + " is a file"},
		"no folder":            {listen: "unix:" + dir + "/none/s", problem: "listen.address: there is no folder " + dir + "/none here"},
		"no CA":                {more: "index: {peers: {ca_file: /none.pem}}\n", problem: "index.peers.ca_file: there is no file /none.pem here"},
		"an address of others": {admin: "192.0.2.1:9090", problem: "admin.address: cannot listen there: "},
	} {
		ports := freePorts(t)
		text := fmt.Sprintf("listen: {address: %q}\nadmin: {address: %q}\nenvoy: {ingress: %q, admin: %q}\n%sworkers: {static: [{address: \"10.0.0.1:8000\"}]}\n",
			cmp.Or(c.listen, "unix:"+dir+"/free.sock"), cmp.Or(c.admin, "127.0.0.1:0"), cmp.Or(c.ingress, ports[0]), ports[1], c.more)
		asked := 0
		_, warnings, err := Inspect("k.yaml", []byte(text), func(a Admin) ([]byte, bool) {
			if asked++; a.Address != cmp.Or(c.admin, "127.0.0.1:0") || c.running == nil {
				return nil, c.closed
			}
			return c.running(text), false
		})
		problem, warning := "", ProblemsError(warnings).Error()
		if err != nil {
			problem = err.Error()
		}
		if !strings.Contains(problem, c.problem) || (problem == "") != (c.problem == "") {
			t.Errorf("%s: got problem %q, want %q", name, problem, c.problem)
		}
		if !strings.Contains(warning, c.warning) || (warning == "") != (c.warning == "") && problem == "" {
			t.Errorf("%s: got warning %q, want %q", name, warning, c.warning)
		}
		if asked > 1 {
			t.Errorf("%s: got %d questions to the admin port, want 1 at most", name, asked)
		}
	}
}

// The folder of the default socket, which packages create, has to be there where Kvlane is to run now.
func TestLiveLooksForTheDefaultSocketsFolder(t *testing.T) {
	folder := filepath.Dir(strings.TrimPrefix(Default().Listen.Address, "unix:"))
	if _, err := os.Stat(folder); err == nil {
		t.Skip("this machine has ", folder)
	}
	text := "workers: {static: [{address: \"10.0.0.1:8000\"}]}\nadmin: {address: \"127.0.0.1:0\"}\n"
	for _, live := range []bool{false, true} {
		var running func(Admin) ([]byte, bool)
		if live {
			running = func(Admin) ([]byte, bool) { return nil, false }
		}
		c, _, err := Inspect("k.yaml", []byte(text), running)
		if got := err != nil && strings.Contains(err.Error(), "listen.address: there is no folder "+folder); got != live {
			t.Errorf("live %v: got %v, want the folder missing: %v", live, err, live)
		}
		if c == nil {
			t.Errorf("live %v: got no configuration, want it for the checks of its models", live)
		}
	}
}

// A certificate that is replaced by something else is said, as is one that is not valid now.
func TestReplacedCertificatesAreSaid(t *testing.T) {
	good, key := certificate(t, t.TempDir(), time.Hour)
	old, oldKey := certificate(t, t.TempDir(), 48*time.Hour)
	garbage := filepath.Join(t.TempDir(), "garbage.pem")
	if err := os.WriteFile(garbage, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		listen Listen
		want   []string
	}{
		{Listen{}, nil},
		{Listen{CertFile: good, KeyFile: key, ClientCA: good}, nil},
		{Listen{CertFile: old, KeyFile: oldKey}, []string{"listen.cert_file expired on "}},
		{Listen{CertFile: good, KeyFile: oldKey}, []string{"does not match public key"}},
		{Listen{CertFile: garbage, KeyFile: key}, []string{"listen.cert_file with its key is replaced by what cannot be loaded, the last good one is used: "}},
		{Listen{CertFile: t.TempDir(), KeyFile: key, ClientCA: garbage}, []string{"is not a regular file", "listen.client_ca_file is replaced by what cannot be loaded, the last good one is used: no certificate in"}},
		{Listen{CertFile: good + ".gone", KeyFile: key, ClientCA: good + ".gone"}, []string{"no such file", "no such file"}},
	} {
		got := c.listen.Outdated()
		ok := len(got) == len(c.want)
		for i := 0; ok && i < len(got); i++ {
			ok = strings.Contains(got[i], c.want[i])
		}
		if !ok {
			t.Errorf("%+v: got %q, want %q", c.listen, got, c.want)
		}
	}
}

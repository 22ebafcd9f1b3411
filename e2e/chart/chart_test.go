package chart

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// Helm checks the default values against values.schema.json, and the templates.
func TestLint(t *testing.T) {
	t.Parallel()
	for _, file := range examples(t) {
		out, err := run(nil, tool("helm"), "lint", "--strict", "--kube-version", kubeVersion, "--values", file, chart)
		if err != nil || !strings.Contains(out, "1 chart(s) linted, 0 chart(s) failed") {
			t.Errorf("%s: %v\n%s", file, err, out)
		}
	}
}

func TestUnit(t *testing.T) {
	t.Parallel()
	out, err := run(nil, tool("helm-unittest"), "--strict", chart)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "Test") {
			t.Log(strings.TrimSpace(line))
		}
	}
}

// Every documented example: the objects fit strict schemas, Kvlane takes its
// configuration, Envoy takes its own, which is what `kvlane envoy-config` prints.
func TestExamples(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile(chart + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range examples(t) {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			if !strings.Contains(string(readme), "examples/"+filepath.Base(file)) {
				t.Errorf("README.md does not name %s", file)
			}
			checkValues(t, "--values", file)
		})
	}
}

var installs = regexp.MustCompile(`(?m)^    helm install kvlane charts/kvlane ((?:.*\\\n)*.*)$`)

// The README's own commands are as good as its examples.
func TestReadmeCommands(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile(chart + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	commands := installs.FindAllStringSubmatch(string(readme), -1)
	if len(commands) == 0 {
		t.Fatal("README.md installs nothing")
	}
	for _, c := range commands {
		checkValues(t, strings.Fields(strings.NewReplacer("\\\n", " ", "'", "").Replace(c[1]))...)
	}
}

// Values that change what Envoy is told, in both modes that have one.
func TestEnvoyValues(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"standalone", "sidecar"} {
		for name, values := range map[string]string{
			"plain":       "proxy.firstToken=false,proxy.accessLog=false",
			"told":        "proxy.accessLog=true",
			"closed":      "proxy.failOpen=false,proxy.firstToken=true",
			"duplex":      "proxy.requestBody=FULL_DUPLEX_STREAMED,proxy.responseBody=STREAMED",
			"limits":      "maxBodyBytes=67108864,messageTimeout=45s,proxy.port=10080,extProcPort=19002",
			"prefill":     "config.disagg.connector=nixl",
			"published":   "service.type=LoadBalancer",
			"scraped":     "monitoring.envoy.enabled=true,monitoring.envoy.port=8092",
			"other names": "fullnameOverride=picker,clusterDomain=cluster.test",
		} {
			t.Run(mode+"/"+name, func(t *testing.T) {
				checkValues(t, "--set", "mode="+mode+",modelServers.matchLabels.app=models,"+values)
			})
		}
	}
}

// Bounds that the chart has of kvlane.yaml are those of kvlane.yaml: up to here
// both take the values, and beyond it both refuse them.
func TestBoundsAgree(t *testing.T) {
	t.Parallel()
	const labels = "mode=sidecar,modelServers.matchLabels.app=models"
	for _, c := range []struct{ taken, refused, file string }{
		{"messageTimeout=240s,config.disagg.connector=nixl", "messageTimeout=239s,config.disagg.connector=nixl",
			"{disagg: {connector: nixl}, envoy: {message_timeout: 239s}}"},
		{"messageTimeout=91s,config.routing.wait.max_requests=1,config.routing.wait.timeout=1m30.5s", "messageTimeout=10s,config.routing.wait.max_requests=1",
			"{routing: {wait: {max_requests: 1}}, envoy: {message_timeout: 10s}}"},
		{"messageTimeout=91s,config.flow.max_requests=1,config.flow.timeout=1m30.5s", "messageTimeout=30s,config.flow.max_requests=1",
			"{flow: {max_requests: 1}, envoy: {message_timeout: 30s}}"},
	} {
		checkValues(t, "--set", labels+","+c.taken)
		if _, err := render("--set", labels+","+c.refused); err == nil {
			t.Errorf("the chart takes %s", c.refused)
		}
		if _, err := run(nil, kvlane, "check", "--config", write(t, "kvlane.yaml", c.file)); err == nil {
			t.Errorf("kvlane takes %s", c.file)
		}
	}
}

func checkValues(t *testing.T, args ...string) {
	t.Helper()
	rendered, err := render(args...)
	if err != nil {
		t.Fatal(err)
	}
	objects := parse(t, rendered)
	conform(t, rendered, len(objects))
	checkLaws(t, objects)

	files := map[string]string{}
	for _, o := range objects {
		if text(o, "kind") == "ConfigMap" {
			for name := range at(o, "data").(map[string]any) {
				files[name] = text(o, "data", name)
			}
		}
	}
	checkConfig(t, files["kvlane.yaml"])
	if bootstrap, ok := files["envoy.yaml"]; ok {
		checkBootstrap(t, files["kvlane.yaml"], bootstrap)
	}
}

// conform checks a stream of that many objects against the strict schemas.
func conform(t *testing.T, rendered string, objects int) {
	t.Helper()
	folder, err := schemas()
	if err != nil {
		t.Fatal(err)
	}
	out, err := run(strings.NewReader(rendered), tool("kubeconform"), "-strict", "-summary", "-output", "json",
		"-schema-location", folder+"/{{.ResourceKind}}{{.KindSuffix}}.json", "-")
	if err != nil {
		t.Fatal(err)
	}
	var summary struct {
		Summary struct{ Valid, Invalid, Errors, Skipped int }
	}
	if err := json.Unmarshal([]byte(out), &summary); err != nil {
		t.Fatal(err)
	}
	if s := summary.Summary; s.Valid != objects || s.Invalid+s.Errors+s.Skipped > 0 {
		t.Errorf("%d objects, kubeconform says %+v", objects, s)
	}
}

// checkConfig lets Kvlane read its configuration. Tokenizers from volumes are
// replaced by the one in the binary: there are no volumes here.
func checkConfig(t *testing.T, config string) {
	t.Helper()
	var c map[string]any
	if err := yaml.Unmarshal([]byte(config), &c); err != nil {
		t.Fatal(err)
	}
	for _, m := range list(c, "models") {
		if strings.HasPrefix(text(m, "tokenizer"), "/") {
			m.(map[string]any)["tokenizer"] = "builtin:qwen3"
		}
		delete(m.(map[string]any), "chat_template")
	}
	stripped, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := run(nil, kvlane, "check", "--config", write(t, "kvlane.yaml", string(stripped))); err != nil {
		t.Errorf("%v\n%s", err, config)
	} else if !strings.Contains(out, ": valid") {
		t.Error(out)
	}
}

// takeReplicas removes from the bootstrap what only the chart has, as there Kvlane is several
// pods: Envoy's own readiness and, where replicas are not chosen by a hash, the choice among
// them. It reports the metadata by which they are chosen.
func takeReplicas(t *testing.T, bootstrap, kvlane map[string]any) (hashed []string) {
	t.Helper()
	resources := bootstrap["static_resources"].(map[string]any)
	listeners := list(resources, "listeners")
	last := len(listeners) - 1
	if text(listeners[last], "name") != "readiness" {
		t.Fatalf("the last listener is %v", listeners[last])
	}
	resources["listeners"] = listeners[:last]
	for _, policy := range list(kvlane, "typed_extension_protocol_options", "envoy.extensions.upstreams.http.v3.HttpProtocolOptions", "hash_policy") {
		hashed = append(hashed, text(policy, "header", "header_name"))
	}
	if hashed != nil {
		return hashed
	}
	if got := text(kvlane, "load_balancing_policy", "policies", 0, "typed_extension_config", "name"); got != "envoy.load_balancing_policies.least_request" {
		t.Errorf("replicas are chosen by %q, want least_request", got)
	}
	if got := text(kvlane, "health_checks", 0, "grpc_health_check", "service_name"); got != "readiness" {
		t.Errorf("health checks of replicas ask for %q, want readiness", got)
	}
	for _, key := range []string{"dns_refresh_rate", "dns_failure_refresh_rate", "load_balancing_policy"} {
		if kvlane[key] == nil {
			t.Errorf("the cluster of Kvlane has no %s", key)
		}
		delete(kvlane, key)
	}
	kvlane["type"] = "STATIC"
	at(kvlane, "health_checks", 0, "grpc_health_check").(map[string]any)["service_name"] = "liveness" // where there is one Kvlane, it is asked before it is ready too
	return nil
}

// checkBootstrap compares with `kvlane envoy-config`, and lets Envoy judge. In
// mode standalone Kvlane is in other pods: there its address is the Service's
// name, which Envoy has to resolve.
func checkBootstrap(t *testing.T, config, bootstrap string) {
	t.Helper()
	var have, want map[string]any
	if err := yaml.Unmarshal([]byte(bootstrap), &have); err != nil {
		t.Fatal(err)
	}
	var c map[string]any
	if err := yaml.Unmarshal([]byte(config), &c); err != nil {
		t.Fatal(err)
	}
	c["models"] = []any{} // volumes are not here
	resources := have["static_resources"].(map[string]any)
	for key, name := range map[string]string{"listeners": "metrics", "clusters": "admin"} { // only the chart's Envoy is scraped
		resources[key] = slices.DeleteFunc(list(resources, key), func(each any) bool { return text(each, "name") == name })
	}
	var cluster, address map[string]any
	for _, each := range list(have, "static_resources", "clusters") {
		if text(each, "name") == "kvlane" {
			cluster = each.(map[string]any)
			address, _ = at(cluster, "load_assignment", "endpoints", 0, "lb_endpoints", 0, "endpoint", "address", "socket_address").(map[string]any)
		}
	}
	if address != nil {
		if text(cluster, "type") != "STRICT_DNS" {
			t.Errorf("Kvlane is found by name, the cluster's type is %q", text(cluster, "type"))
		}
		listen := c["listen"].(map[string]any)
		listen["address"] = text(address, "address") + text(listen, "address")
		if hashed := takeReplicas(t, have, cluster); hashed != nil {
			c["envoy"].(map[string]any)["replicas"] = []any{listen["address"]}
			if (len(hashed) > 1) != (c["fleet"] != nil) {
				t.Errorf("replicas are chosen by %v, share: %v", hashed, c["fleet"])
			}
			if len(hashed) == 1 { // no conversations, as the replicas do not share them
				c["routing"] = map[string]any{"conversation_headers": []any{}}
			}
		} else if c["fleet"] != nil {
			t.Error("replicas share, and Envoy does not choose them by conversation")
		}
	}
	derived, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	printed, err := run(nil, kvlane, "envoy-config", "--config", write(t, "kvlane.yaml", string(derived)))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(printed), &want); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(have, want) {
		t.Errorf("bootstrap differs from `kvlane envoy-config`\nchart:\n%s\nkvlane:\n%s", bootstrap, printed)
	}
	if _, err := run(nil, envoy, "--mode", "validate", "--log-level", "error", "--config-path", write(t, "envoy.yaml", bootstrap)); err != nil {
		t.Error(err)
	}
}

// The certificates that cert-manager makes have each name that a client of this chart verifies: Envoy that of Kvlane, replicas that
// of each other, and gateways the address of the service that exists.
func TestCertificatesHaveTheNamesThatAreVerified(t *testing.T) {
	t.Parallel()
	rendered, err := render(append(shaped("certified"), "--set-json", `warmStart={"enabled": true, "secretName": "s", "serverName": "peers"}`)...)
	if err != nil {
		t.Fatal(err)
	}
	verified := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?:san_type: DNS, matcher: \{exact|\bsni|\bserver_name): "?([^"\s}]+)`).FindAllStringSubmatch(rendered, -1) {
		verified[m[1]] = true
	}
	if !verified["k"] || !verified["peers"] || len(verified) != 2 {
		t.Fatalf("got the names %v in configurations, want k of Envoy and peers of replicas", verified)
	}
	names := map[string][]any{} // by secret
	for _, o := range parse(t, rendered) {
		switch text(o, "kind") {
		case "Certificate":
			names[text(o, "spec", "secretName")] = list(o, "spec", "dnsNames")
		case "Service":
			if strings.HasSuffix(text(o, "metadata", "name"), "-extproc") {
				verified[text(o, "metadata", "name")+".llm.svc"] = true
			}
		}
	}
	if len(verified) != 3 || len(names) != 2 || len(names["c"]) != 1 {
		t.Fatalf("got the names %v and the certificates %v, want a service's too, and two certificates", verified, names)
	}
	for name := range verified {
		if !slices.Contains(names["t"], any(name)) {
			t.Errorf("the certificate of Kvlane has the names %v, want %s, which is verified", names["t"], name)
		}
	}
}

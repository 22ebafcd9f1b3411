package chart

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/kvlane/kvlane/internal/config"
)

// shapes are values with which each value of the chart matters somewhere.
var shapes = map[string][]string{
	"gateway": {`httpRoute={"create": true, "inferenceGatewayName": "g"}`},
	"operation": {`networkPolicy.egress=true`, `autoscaling.enabled=true`, `monitoring={"prometheus": {"enabled": true}, "rules": {"enabled": true}, "dashboard": {"enabled": true}}`,
		`warmStart={"enabled": true, "secretName": "s"}`, `tls.secretName="t"`, `rbac.create=true`},
	"events":      {`modelServers.kvEvents.endpoint="tcp://$ip:5557"`},
	"ranks":       {`modelServers.targetPorts=[{"number": 8000}, {"number": 8001}]`},
	"istio":       {`provider.name="istio"`},
	"monitored":   {`monitoring={"prometheus": {"enabled": true}}`},
	"limited":     {`provider={"name": "istio", "istio": {"destinationRule": {"connectionPool": {"tcp": {"maxConnections": 10}}}}}`},
	"envoyfilter": {`provider={"name": "istio", "istio": {"envoyFilter": {"enabled": true}}}`, `httpRoute.inferenceGatewayName="g"`},
	"eg":          {`provider.name="envoy-gateway"`, `httpRoute={"create": true, "inferenceGatewayName": "g"}`},
	"duplex":      {`provider={"name": "envoy-gateway", "envoyGateway": {"failOpen": false}}`, `httpRoute={"create": true, "inferenceGatewayName": "g"}`},
	"secured":     {`mode="standalone"`, `tls={"secretName": "t", "requireClients": true, "clientSecretName": "c", "serverName": "k"}`},
	"sidecar":     {`mode="sidecar"`},
	"nats": {`networkPolicy.enabled=true`, `networkPolicy.egress=true`, `fleet={"mode": "external", "tls": {"secretName": "t"},
		"external": {"url": "nats://nats:4222", "auth": "credentials", "secretName": "s"}}`},
	"passwd":     {`fleet={"mode": "external", "external": {"url": "nats://nats:4222", "auth": "password", "user": "u", "secretName": "s"}}`},
	"persisted":  {`fleet.persist={"enabled": true, "volume": {"emptyDir": {}}}`},
	"standalone": {`mode="standalone"`},
	"certified":  {`mode="standalone"`, `tls={"secretName": "t", "clientSecretName": "c", "serverName": "k", "certManager": {"enabled": true, "issuerRef": {"name": "i", "kind": "Issuer"}}}`},
	"scaled":     {`mode="standalone"`, `proxy.autoscaling.enabled=true`},
	"hub":        {`modelHub={"enabled": true, "tokenSecretName": "hub"}`},
	"keda":       {`config.flow={"max_requests": 100, "zero_workers": "30s"}`, `modelServers.scaledObject={"enabled": true, "targetName": "qwen", "model": "m", "serverAddress": "http://p:9090"}`},
	"scraped":    {`mode="standalone"`, `monitoring.envoy.enabled=true`},
	"nobudget":   {`podDisruptionBudget={"maxUnavailable": null, "minAvailable": 1}`},
	"named":      {`inferencePool.name="mine"`},
}

// shaped are Helm's arguments for a shape.
func shaped(shape string) []string {
	args := []string{"--set", "modelServers.matchLabels.app=models"}
	for _, v := range shapes[shape] {
		args = append(args, "--set-json", v)
	}
	return args
}

// uses has for every value of values.yaml a shape and another value, of which
// something has to follow.
var uses = `
mode                                                  gateway      "standalone"
nameOverride                                          gateway      "other"
fullnameOverride                                      gateway      "other"
commonLabels                                          gateway      {"team": "x"}
global.imageRegistry                                  standalone   "r.test"
global.imagePullSecrets                               standalone   [{"name": "s"}]
extraObjects                                          gateway      [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-mine"}}]
clusterDomain                                         standalone   "cluster.test"
replicas                                              gateway      3
fleet.mode                                            gateway      "off"
fleet.name                                            gateway      "other"
fleet.port                                            gateway      6333
fleet.secretName                                      gateway      "mine"
fleet.tls.secretName                                  gateway      "t"
fleet.external.url                                    nats         "nats://a:4222,tls://b:4223"
fleet.external.auth                                   nats         "token"
fleet.external.user                                   passwd       "other"
fleet.external.secretName                             nats         "other"
fleet.external.clientCertificate                      nats         true
fleet.persist.enabled                                 persisted    false
fleet.persist.maxBytes                                persisted    2097152
fleet.persist.ttlHours                                persisted    9
fleet.persist.volume                                  persisted    {"persistentVolumeClaim": {"claimName": "c"}}
image.registry                                        gateway      "r.test"
image.repository                                      gateway      "other/kvlane"
image.tag                                             gateway      "v9"
image.digest                                          gateway      "sha256:1111111111111111111111111111111111111111111111111111111111111111"
image.pullPolicy                                      gateway      "Always"
imagePullSecrets                                      standalone   [{"name": "s"}]
extraArgs                                             gateway      ["--x"]
env                                                   gateway      [{"name": "GOMEMLIMIT", "value": "1GiB"}]
resources.requests.cpu                                gateway      "3"
resources.requests.memory                             gateway      "3Gi"
resources.limits.memory                               gateway      "9Gi"
podLabels                                             gateway      {"a": "b"}
podAnnotations                                        gateway      {"a": "b"}
podSecurityContext.runAsNonRoot                       gateway      false
podSecurityContext.runAsUser                          gateway      1000
podSecurityContext.runAsGroup                         gateway      1000
podSecurityContext.fsGroup                            gateway      1000
podSecurityContext.fsGroupChangePolicy                gateway      "Always"
podSecurityContext.seccompProfile.type                gateway      "Unconfined"
securityContext.allowPrivilegeEscalation              gateway      true
securityContext.readOnlyRootFilesystem                gateway      false
securityContext.privileged                            gateway      true
securityContext.runAsNonRoot                          gateway      false
securityContext.capabilities.drop                     gateway      []
nodeSelector                                          gateway      {"a": "b"}
tolerations                                           gateway      [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}]
affinity                                              gateway      {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}}
topologySpreadConstraints                             gateway      [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]
priorityClassName                                     gateway      "high"
dnsPolicy                                             standalone   "None"
dnsConfig                                             standalone   {"nameservers": ["10.0.0.10"]}
readinessGates                                        gateway      [{"conditionType": "a.test/b"}]
volumes                                               gateway      [{"name": "v", "emptyDir": {}}]
volumeMounts                                          gateway      [{"name": "tmp", "mountPath": "/v"}]
initContainers                                        gateway      [{"name": "fetch", "image": "i"}]
extraContainers                                       gateway      [{"name": "other", "image": "i"}]
extraContainerPorts                                   gateway      [{"name": "extra", "containerPort": 7000}]
strategy.type                                         gateway      "Recreate"
strategy.maxSurge                                     gateway      "25%"
strategy.maxUnavailable                               gateway      "25%"
minReadySeconds                                       gateway      9
revisionHistoryLimit                                  gateway      9
drainSeconds                                          gateway      99
drainQuietSeconds                                     gateway      9
terminationGracePeriodSeconds                         gateway      900
extProcPort                                           gateway      9902
grpcHealthPort                                        gateway      9903
metricsPort                                           gateway      9990
service.type                                          gateway      "LoadBalancer"
service.annotations                                   gateway      {"a": "b"}
service.port                                          sidecar      8088
service.trafficDistribution                           gateway      "PreferSameZone"
tls.secretName                                        gateway      "t"
tls.requireClients                                    secured      false
tls.clientSecretName                                  secured      "d"
tls.serverName                                        secured      "m"
tls.certManager.enabled                               certified    false
tls.certManager.issuerRef                             certified    {"name": "other"}
tls.certManager.dnsNames                              certified    ["kvlane.test"]
tls.certManager.duration                              certified    "24h"
probes.type                                           gateway      "http"
probes.readinessPeriodSeconds                         standalone   9
probes.livenessPeriodSeconds                          standalone   9
probes.startupSeconds                                 gateway      9
modelServers.matchLabels                              gateway      {"a": "b"}
modelServers.targetPorts                              gateway      [{"number": 8009}]
modelServers.type                                     gateway      "sglang"
modelServers.protocol                                 gateway      "h2c"
modelServers.namespace                                sidecar      "models"
modelServers.ranks                                    gateway      4
modelServers.rankPerPort                              ranks        true
modelServers.kvEvents.endpoint                        gateway      "tcp://$ip:5557"
modelServers.kvEvents.replay                          events       "tcp://$ip:5657"
modelServers.kvEvents.topic                           gateway      "kv"
modelServers.neverAsk                                 gateway      true
modelServers.roleLabels                               gateway      ["role"]
modelHub.enabled                                      gateway      true
modelHub.existingClaim                                hub          "models"
modelHub.sizeLimit                                    hub          "2Gi"
modelHub.endpoint                                     hub          "https://mirror.example"
modelHub.tokenSecretName                              hub          "other"
modelHub.tokenSecretKey                               hub          "other"
modelServers.scaledObject.enabled                     keda         false
modelServers.scaledObject.targetName                  keda         "other"
modelServers.scaledObject.targetKind                  keda         "StatefulSet"
modelServers.scaledObject.model                       keda         "other"
modelServers.scaledObject.serverAddress               keda         "http://q:9090"
modelServers.scaledObject.minReplicas                 keda         0
modelServers.scaledObject.maxReplicas                 keda         9
modelServers.scaledObject.waitingTokens               keda         9000
modelServers.scaledObject.saturation                  keda         0.5
modelServers.worker                                   gateway      {"block_size": 32}
modelServers.service.create                           gateway      true
modelServers.service.name                             eg           "mine"
models                                                gateway      [{"name": "m", "tokenizer": "builtin:qwen3"}]
tokenizerVolumes                                      gateway      [{"name": "2024", "mountPath": "/t", "subPath": "2024", "configMap": {"name": "c"}}]
config                                                gateway      {"log": {"level": "debug"}}
warmStart.enabled                                     operation    false
warmStart.secretName                                  operation    "other"
warmStart.timeoutSeconds                              operation    9
warmStart.serverName                                  operation    "kvlane.test"
maxBodyBytes                                          gateway      1048576
messageTimeout                                        gateway      "99s"
stallTimeout                                          gateway      "9s"
inferencePool.create                                  named        true
inferencePool.name                                    gateway      "mine"
inferencePool.failureMode                             gateway      "FailClose"
inferencePool.objectives                              sidecar      ["llm-d.ai"]
inferencePool.extraPools                              istio        ["b", "c.d"]
httpRoute.create                                      gateway      false
httpRoute.inferenceGatewayName                        gateway      "other"
httpRoute.inferenceGatewayNamespace                   gateway      "other"
httpRoute.sectionName                                 gateway      "https"
httpRoute.hostnames                                   gateway      ["a.test", "*.b.test"]
httpRoute.pathPrefixes                                gateway      ["/v1", "/v2"]
httpRoute.requestTimeout                              eg           "9s"
provider.name                                         limited      "none"
provider.istio.destinationRule.tls                    istio        true
provider.istio.destinationRule.connectionPool         istio        {"http": {"http2MaxRequests": 10}}
provider.istio.healthChecks                           istio        false
provider.istio.envoyFilter.enabled                    envoyfilter  false
provider.istio.envoyFilter.firstToken                 envoyfilter  false
provider.istio.envoyFilter.workloadSelector           envoyfilter  {"a": "b"}
provider.envoyGateway.requestBody                     duplex       "FullDuplexStreamed"
provider.envoyGateway.failOpen                        eg           false
provider.envoyGateway.firstToken                      eg           false
provider.envoyGateway.clientTrafficPolicy             eg           false
proxy.image.registry                                  sidecar      "r.test"
proxy.image.repository                                sidecar      "other/envoy"
proxy.image.tag                                       sidecar      "v9"
proxy.image.digest                                    sidecar      "sha256:1111111111111111111111111111111111111111111111111111111111111111"
proxy.image.pullPolicy                                sidecar      "Always"
proxy.replicas                                        standalone   3
proxy.autoscaling.enabled                             standalone   true
proxy.autoscaling.minReplicas                         scaled       3
proxy.autoscaling.maxReplicas                         scaled       9
proxy.autoscaling.targetCPUUtilizationPercentage      scaled       50
proxy.autoscaling.behavior                            scaled       {"scaleDown": {"stabilizationWindowSeconds": 60}}
proxy.concurrency                                     sidecar      0
proxy.paths                                           standalone   ["default", "/health"]
proxy.port                                            sidecar      8088
proxy.readinessPort                                   standalone   8089
proxy.failOpen                                        sidecar      false
proxy.firstToken                                      sidecar      true
proxy.accessLog                                       sidecar      false
proxy.requestBody                                     sidecar      "FULL_DUPLEX_STREAMED"
proxy.responseBody                                    sidecar      "STREAMED"
proxy.drainSeconds                                    sidecar      99
proxy.uploadTimeout                                   sidecar      "9s"
proxy.maxHeapBytes                                    sidecar      134217728
proxy.extraArgs                                       sidecar      ["--x"]
proxy.initContainers                                  standalone   [{"name": "fetch", "image": "i"}]
proxy.extraContainers                                 standalone   [{"name": "other", "image": "i"}]
proxy.resources.requests.cpu                          sidecar      "3"
proxy.resources.requests.memory                       sidecar      "3Gi"
proxy.resources.limits.memory                         sidecar      "9Gi"
serviceAccount.create                                 gateway      false
serviceAccount.name                                   gateway      "mine"
serviceAccount.annotations                            gateway      {"a": "b"}
rbac.create                                           gateway      false
networkPolicy.enabled                                 gateway      false
networkPolicy.egress                                  gateway      true
networkPolicy.extraIngress                            gateway      [{"ports": [{"port": 5557}]}]
networkPolicy.ingressFrom                             operation    [{"podSelector": {}}]
networkPolicy.metricsFrom                             operation    [{"podSelector": {}}]
networkPolicy.apiServerPorts                          operation    [8443]
networkPolicy.apiServerTo                             operation    [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
networkPolicy.dnsTo                                   operation    [{"namespaceSelector": {}}]
networkPolicy.natsTo                                  nats         [{"podSelector": {}}]
networkPolicy.extraEgress                             operation    [{"ports": [{"port": 4317}]}]
podDisruptionBudget.enabled                           gateway      false
podDisruptionBudget.minAvailable                      nobudget     "50%"
podDisruptionBudget.maxUnavailable                    gateway      "30%"
autoscaling.enabled                                   gateway      true
autoscaling.minReplicas                               operation    3
autoscaling.maxReplicas                               operation    9
autoscaling.targetCPUUtilizationPercentage            operation    50
autoscaling.targetStreamsPerPod                       operation    400
autoscaling.metrics                                   operation    [{"type": "External", "external": {"metric": {"name": "m"}, "target": {"type": "Value", "value": "3"}}}]
autoscaling.behavior.scaleDown.stabilizationWindowSeconds  operation  60
autoscaling.behavior.scaleDown.policies               operation    [{"type": "Percent", "value": 10, "periodSeconds": 60}]
monitoring.interval                                   operation    "30s"
monitoring.prometheus.enabled                         monitored    false
monitoring.prometheus.kind                            operation    "ServiceMonitor"
monitoring.prometheus.extraLabels                     operation    {"a": "b"}
monitoring.prometheus.metricRelabelings               operation    [{"action": "drop", "regex": "go_.*", "sourceLabels": ["__name__"]}]
monitoring.envoy.enabled                              sidecar      true
monitoring.envoy.port                                 scraped      8092
monitoring.rules.enabled                              operation    false
monitoring.rules.job                                  operation    "j"
monitoring.rules.labels                               operation    {"a": "b"}
monitoring.rules.decisionSeconds                      operation    1
monitoring.rules.queueSeconds                         operation    1
monitoring.rules.degradedShare                        operation    0.5
monitoring.rules.firstTokenSeconds                    operation    7
monitoring.rules.rejectedShare                        operation    0.5
monitoring.rules.extra                                operation    [{"alert": "Mine", "expr": "vector(1)"}]
monitoring.dashboard.enabled                          operation    false
monitoring.dashboard.labels.grafana_dashboard         operation    "2"
monitoring.dashboard.annotations                      operation    {"folder": "x"}
`

// leaves are the paths of values without nested values.
func leaves(v any, path string) (all []string) {
	m, ok := v.(map[string]any)
	if !ok || len(m) == 0 {
		return []string{path}
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		all = append(all, leaves(m[k], strings.TrimPrefix(path+"."+k, "."))...)
	}
	return all
}

// takes fails the test if Kvlane rejects its configuration in a rendering.
func takes(t *testing.T, what, rendered string) {
	t.Helper()
	files := 0
	for _, o := range parse(t, rendered) {
		if file := text(o, "data", "kvlane.yaml"); file != "" {
			files++
			if _, err := config.Parse("kvlane.yaml", []byte(file)); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	if files != 1 {
		t.Errorf("%s: %d files kvlane.yaml are rendered", what, files)
	}
}

// Of every value something follows, that Kubernetes and Kvlane know.
func TestEveryValueIsUsed(t *testing.T) {
	t.Parallel()
	plain := map[string]string{}
	for shape := range shapes {
		var err error
		if plain[shape], err = render(shaped(shape)...); err != nil {
			t.Fatal(err)
		}
		takes(t, "shape "+shape, plain[shape])
	}
	var all strings.Builder
	used := []string{}
	for line := range strings.Lines(strings.TrimSpace(uses)) {
		f := regexp.MustCompile(`^(\S+) +(\S+) +(.+)\n?$`).FindStringSubmatch(line)
		path, shape, value := f[1], f[2], f[3]
		used = append(used, path)
		rendered, err := render(append(shaped(shape), "--set-json", path+"="+value)...)
		switch {
		case err != nil:
			t.Errorf("%s = %s: %v", path, value, err)
		case rendered == plain[shape]:
			t.Errorf("of %s = %s nothing follows (shape %s)", path, value, shape)
		}
		takes(t, path+" = "+value, rendered)
		all.WriteString(rendered)
	}
	conform(t, all.String(), len(parse(t, all.String())))

	file, err := os.ReadFile(chart + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(file, &values); err != nil {
		t.Fatal(err)
	}
	slices.Sort(used)
	if there := leaves(values, ""); !slices.Equal(slices.Sorted(slices.Values(there)), used) {
		for _, v := range there {
			if !slices.Contains(used, v) {
				t.Errorf("%s is not tried", v)
			}
		}
		for _, v := range used {
			if !slices.Contains(there, v) {
				t.Errorf("%s is no value", v)
			}
		}
	}
}

var serviceName = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)

// Names of releases and namespaces may be long, have dots, and read as numbers or
// truths in YAML.
func TestOddNames(t *testing.T) {
	t.Parallel()
	const long = "inference-platform-production-eu-west-1-models-team-a"
	var all strings.Builder
	objects, first := 0, map[string]string{}
	for _, c := range []struct{ release, namespace string }{{"on", "no"}, {"kvlane", "123"}, {"v1.0", "llm"}, {long, "llm"}, {long[:len(long)-1] + "b", "llm"}} {
		for shape := range shapes {
			args := []string{"template", c.release, chart, "--namespace", c.namespace, "--kube-version", kubeVersion}
			rendered, err := run(nil, tool("helm"), append(args, shaped(shape)...)...)
			if err != nil {
				t.Fatal(err)
			}
			all.WriteString(rendered)
			for _, o := range parse(t, rendered) {
				objects++
				name := text(o, "metadata", "name")
				if !serviceName.MatchString(name) {
					t.Errorf("release %s, %s: name of %s", c.release, shape, o)
				}
				if text(o, "metadata", "namespace") != c.namespace || text(o, "metadata", "labels", "app.kubernetes.io/instance") != c.release {
					t.Errorf("%s of release %s in %s: metadata are %v", o, c.release, c.namespace, at(o, "metadata"))
				}
				who := c.release + " in " + c.namespace
				if other, taken := first[c.namespace+"/"+o.String()]; taken && other != who {
					t.Errorf("%s is of both %s and %s", o, other, who)
				}
				first[c.namespace+"/"+o.String()] = who
			}
		}
	}
	conform(t, all.String(), objects)
}

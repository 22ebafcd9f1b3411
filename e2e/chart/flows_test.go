package chart

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// flowCases are values with every connection from or to the chart's pods that their
// policies let through, as the table of docs/kubernetes.md says. "anyone" are all
// inhabitants, "pods" those that are pods.
var flowCases = []struct{ name, values, flows string }{
	{"gateway", restricted, `
		gateway -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 6222
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP
		kvlane -> internet: 443 53
		kvlane -> worker: 443`},
	{"gateway, warm starts", restricted + ",warmStart.enabled=true,warmStart.secretName=key", `
		gateway -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 6222 9002
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP
		kvlane -> internet: 443 53
		kvlane -> worker: 443`},
	{"gateway, pools that exist", restricted + ",inferencePool.name=a,inferencePool.extraPools[0]=b,fleet.mode=off", `
		gateway -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 9003
		kvlane -> engine: 5557 8000
		kvlane -> neighbour: 4222 6222 8000 9002
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP
		kvlane -> internet: 443 53
		kvlane -> worker: 443`},
	{"gateway, whoever asks", "", `
		anyone -> kvlane: 9002 9003
		another kvlane -> kvlane: 6222
		pods -> kvlane: 9090
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP
		kvlane -> internet: 443 53
		kvlane -> worker: 443`},
	{"sidecar, models elsewhere, nothing to the world", restricted + "," + known + ",mode=sidecar,modelServers.namespace=models", `
		gateway -> kvlane: 8080
		prometheus -> kvlane: 9090
		tests -> kvlane: 8080 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 6222
		kvlane -> stranger: 5557 8000
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP`},
	{"standalone", restricted + "," + known + ",mode=standalone", `
		gateway -> envoy: 8080
		tests -> envoy: 8080
		envoy -> kvlane: 9002
		another envoy -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 6222
		envoy -> engine: 5557 8000
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		envoy -> dns: 53 53/UDP
		kvlane -> dns: 53 53/UDP`},
	{"standalone, Envoy is scraped", restricted + "," + known + ",mode=standalone,fleet.mode=off,monitoring.envoy.enabled=true", `
		gateway -> envoy: 8080
		tests -> envoy: 8080
		prometheus -> envoy: 8082
		envoy -> kvlane: 9002
		another envoy -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		envoy -> engine: 5557 8000
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		envoy -> dns: 53 53/UDP
		kvlane -> dns: 53 53/UDP`},
	{"standalone, events are pushed", restricted + "," + known + ",mode=standalone,modelServers.kvEvents.endpoint=push:", `
		gateway -> envoy: 8080
		tests -> envoy: 8080
		envoy -> kvlane: 9002
		another envoy -> kvlane: 9002
		engine -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 6222
		envoy -> engine: 5557 8000
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		envoy -> dns: 53 53/UDP
		kvlane -> dns: 53 53/UDP`},
	{"gateway, events are pushed", restricted + "," + known + ",provider.name=istio,provider.istio.envoyFilter.enabled=true,httpRoute.inferenceGatewayName=g,modelServers.kvEvents.endpoint=push:", `
		gateway -> kvlane: 9002
		engine -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 6222
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP`},
	{"a worker by address, further ways out", restricted + "," + known + ",config.workers.static[0].address=192.0.2.2:8000,networkPolicy.extraEgress[0].ports[0].port=8080", `
		gateway -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		another kvlane -> kvlane: 6222
		kvlane -> engine: 5557 8000
		kvlane -> gateway: 8080
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP
		kvlane -> worker: 443 8000`},
	{"one alone", restricted + "," + known + ",replicas=1", `
		gateway -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		kvlane -> engine: 5557 8000
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP`},
	{"a NATS that exists", restricted + "," + known + ",fleet.mode=external,fleet.external.url=nats://nats:4222," +
		`networkPolicy.natsTo[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=messaging`, `
		gateway -> kvlane: 9002
		prometheus -> kvlane: 9090
		tests -> kvlane: 9090
		anyone -> kvlane: 9003
		kvlane -> engine: 5557 8000
		kvlane -> nats: 4222
		kvlane -> API server: 443
		kvlane -> dns: 53 53/UDP`},
}

// restricted names who may send requests and who may scrape.
const restricted = "networkPolicy.ingressFrom[0].namespaceSelector.matchLabels.gateways=yes," +
	`networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=monitoring`

// known names where the API server and DNS are.
const known = "networkPolicy.apiServerTo[0].ipBlock.cidr=10.2.0.1/32," +
	`networkPolicy.dnsTo[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=kube-system`

// inhabitants are who else is there, with the ports that they serve.
func inhabitants() map[*place][]socket {
	pod := func(name, namespace, app, ip string) *place {
		return &place{name: name, namespace: namespace, labels: map[string]string{"app": app}, ip: netip.MustParseAddr(ip)}
	}
	return map[*place][]socket{
		pod("engine", "llm", "models", "10.1.0.1"):                {{8000, "TCP"}, {5557, "TCP"}},
		pod("neighbour", "llm", "other", "10.1.0.2"):              {{8000, "TCP"}, {9002, "TCP"}, {6222, "TCP"}, {4222, "TCP"}},
		pod("nats", "messaging", "nats", "10.1.0.7"):              {{4222, "TCP"}, {8222, "TCP"}},
		pod("gateway", "gateways", "gateway", "10.1.0.3"):         {{8080, "TCP"}},
		pod("prometheus", "monitoring", "prometheus", "10.1.0.4"): {{9090, "TCP"}},
		pod("stranger", "models", "models", "10.1.0.5"):           {{8000, "TCP"}, {5557, "TCP"}},
		pod("dns", "kube-system", "dns", "10.1.0.6"):              {{53, "TCP"}, {53, "UDP"}, {9153, "TCP"}},
		pod("API server", "", "", "10.2.0.1"):                     {{443, "TCP"}, {10250, "TCP"}},
		pod("internet", "", "", "192.0.2.1"):                      {{53, "TCP"}, {443, "TCP"}, {8000, "TCP"}},
		pod("worker", "", "", "192.0.2.2"):                        {{443, "TCP"}, {8000, "TCP"}},
	}
}

// residents are two pods of each of the chart's Deployments.
func residents(objects []object) map[*place][]socket {
	all := map[*place][]socket{}
	for i, d := range ofKind(objects, "Deployment") {
		for j := range 2 {
			p := &place{name: "kvlane", namespace: text(d, "metadata", "namespace"), labels: map[string]string{}, ports: map[string]int{}}
			p.ip = netip.AddrFrom4([4]byte{10, 1, byte(1 + i), byte(1 + j)})
			if strings.HasSuffix(text(d, "metadata", "name"), "-proxy") {
				p.name = "envoy"
			}
			if j > 0 {
				p.name = "another " + p.name
			}
			labels, _ := at(d, "spec", "template", "metadata", "labels").(map[string]any)
			for k := range labels {
				p.labels[k] = text(labels, k)
			}
			sockets := []socket{{9901, "TCP"}} // Envoy's admin page, which must not be reachable
			ports(d, func(q any) {
				p.ports[text(q, "name")] = number(q, "containerPort")
				sockets = append(sockets, socket{number(q, "containerPort"), "TCP"})
			})
			all[p] = sockets
		}
	}
	return all
}

// flows are all connections from or to residents that meet a condition. Of two pods
// of a Deployment the second only stands at the other end.
func flows(residents, others map[*place][]socket, let func(from, to *place, at socket) bool) (all []string) {
	look := func(from, to *place, sockets []socket) {
		for _, s := range sockets {
			if let(from, to, s) {
				all = append(all, fmt.Sprintf("%s -> %s: %s", from.name, to.name, s))
			}
		}
	}
	for r, served := range residents {
		if strings.HasPrefix(r.name, "another ") {
			continue
		}
		for o, theirs := range others {
			look(o, r, served)
			look(r, o, theirs)
		}
		for o := range residents {
			if o != r {
				look(o, r, served)
			}
		}
	}
	slices.Sort(all)
	return all
}

func TestFlows(t *testing.T) {
	t.Parallel()
	for _, c := range flowCases {
		t.Run(c.name, func(t *testing.T) {
			rendered, err := render("--set", "networkPolicy.egress=true,modelServers.matchLabels.app=models", "--set", c.values)
			if err != nil {
				t.Fatal(err)
			}
			objects := parse(t, rendered)
			checkLaws(t, objects)
			residents, others := residents(objects), inhabitants()
			for _, o := range ofKind(objects, "Pod") { // of `helm test`
				p := &place{name: "tests", namespace: text(o, "metadata", "namespace"), labels: map[string]string{}, ip: netip.MustParseAddr("10.1.0.8")}
				labels, _ := at(o, "metadata", "labels").(map[string]any)
				for k := range labels {
					p.labels[k] = text(labels, k)
				}
				others[p] = nil
			}
			judge := func(policies []policy) *world {
				return &world{policies: policies, namespaces: map[string]map[string]string{"gateways": {"gateways": "yes"}}}
			}
			w := judge(readPolicies(t, objects))
			want, got := single(c.flows, others), flows(residents, others, w.lets)
			for _, f := range got {
				if !slices.Contains(want, f) {
					t.Errorf("let through is %s", f)
				}
			}
			for _, f := range want {
				if !slices.Contains(got, f) {
					t.Errorf("not let through is %s", f)
				}
			}
			// Every rule, and everything that a rule says, is needed: without it one end
			// at least lets something else through.
			for _, change := range weakened(t, objects) {
				other := judge(change.policies)
				if slices.Equal(flows(residents, others, other.out), flows(residents, others, w.out)) && slices.Equal(flows(residents, others, other.in), flows(residents, others, w.in)) {
					t.Errorf("%s: no difference", change.what)
				}
			}
		})
	}
}

// single are the connections of a case, each by itself.
func single(lines string, others map[*place][]socket) (all []string) {
	for line := range strings.Lines(strings.TrimSpace(lines)) {
		ends, sockets, _ := strings.Cut(strings.TrimSpace(line), ": ")
		who, to, _ := strings.Cut(ends, " -> ")
		from := []string{who}
		if who == "anyone" || who == "pods" {
			from = nil
			for o := range others {
				if who == "anyone" || o.namespace != "" {
					from = append(from, o.name)
				}
			}
		}
		for _, f := range from {
			for s := range strings.FieldsSeq(sockets) {
				all = append(all, f+" -> "+to+": "+s)
			}
		}
	}
	return all
}

// change is a set of policies without something.
type change struct {
	what     string
	policies []policy
}

// weakened are the policies, each time without one policy, direction, rule, or half
// of a rule.
func weakened(t *testing.T, objects []object) (all []change) {
	edited := func(what string, policy int, edit func(p *policySpec)) {
		p := readPolicies(t, objects)
		edit(&p[policy].Spec)
		all = append(all, change{p[policy].Metadata.Name + " without " + what, p})
	}
	for i, p := range readPolicies(t, objects) {
		all = append(all, change{"no " + p.Metadata.Name, slices.Delete(readPolicies(t, objects), i, i+1)})
		for _, direction := range []string{"Ingress", "Egress"} {
			edited(direction, i, func(s *policySpec) {
				s.PolicyTypes = slices.DeleteFunc(s.PolicyTypes, func(d string) bool { return d == direction })
			})
			for j, rule := range *p.Spec.rules(direction) {
				what := fmt.Sprintf("%s rule %d", direction, j)
				edited(what, i, func(s *policySpec) { *s.rules(direction) = slices.Delete(*s.rules(direction), j, j+1) })
				if len(rule.Ports) > 0 {
					edited("ports of "+what, i, func(s *policySpec) { (*s.rules(direction))[j].Ports = nil })
				}
				if len(rule.From)+len(rule.To) > 0 {
					edited("peers of "+what, i, func(s *policySpec) { r := &(*s.rules(direction))[j]; r.From, r.To = nil, nil })
				}
			}
		}
	}
	return all
}

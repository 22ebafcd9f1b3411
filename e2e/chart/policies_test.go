package chart

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// The following evaluates NetworkPolicies by the rules of networking.k8s.io/v1: a pod
// selected by a policy is closed in that policy's directions except for what a rule allows;
// a connection must be allowed at both ends. Nodes can always reach their own pods, so
// policies do not affect a kubelet's probes.

// policy is a NetworkPolicy. It is read strictly: a field that is not here cannot be
// judged.
type policy struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	Metadata   struct {
		Name      string            `yaml:"name"`
		Namespace string            `yaml:"namespace"`
		Labels    map[string]string `yaml:"labels"`
	} `yaml:"metadata"`
	Spec policySpec `yaml:"spec"`
}

type policySpec struct {
	PodSelector selector     `yaml:"podSelector"`
	PolicyTypes []string     `yaml:"policyTypes"`
	Ingress     []policyRule `yaml:"ingress"`
	Egress      []policyRule `yaml:"egress"`
}

// rules are those of a direction.
func (s *policySpec) rules(direction string) *[]policyRule {
	if direction == "Egress" {
		return &s.Egress
	}
	return &s.Ingress
}

// peers are who a rule of a direction is for.
func (r *policyRule) peers(direction string) []policyPeer {
	if direction == "Egress" {
		return r.To
	}
	return r.From
}

// policyRule lets through what matches one of its ports and one of its peers; where
// it has none, any.
type policyRule struct {
	Ports []policyPort `yaml:"ports"`
	From  []policyPeer `yaml:"from"`
	To    []policyPeer `yaml:"to"`
}

type policyPort struct {
	Protocol string `yaml:"protocol"`
	Port     any    `yaml:"port"` // a number, or the name of a container's port
	EndPort  int    `yaml:"endPort"`
}

type policyPeer struct {
	PodSelector       *selector `yaml:"podSelector"`
	NamespaceSelector *selector `yaml:"namespaceSelector"`
	IPBlock           *struct {
		CIDR   string   `yaml:"cidr"`
		Except []string `yaml:"except"`
	} `yaml:"ipBlock"`
}

// selector selects all that have its labels; empty, all.
type selector struct {
	MatchLabels      map[string]string `yaml:"matchLabels"`
	MatchExpressions []struct {
		Key      string   `yaml:"key"`
		Operator string   `yaml:"operator"`
		Values   []string `yaml:"values"`
	} `yaml:"matchExpressions"`
}

func (s *selector) selects(labels map[string]string) bool {
	for k, v := range s.MatchLabels {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	for _, e := range s.MatchExpressions {
		have, ok := labels[e.Key]
		var holds bool
		switch e.Operator {
		case "In":
			holds = ok && slices.Contains(e.Values, have)
		case "NotIn":
			holds = !ok || !slices.Contains(e.Values, have)
		case "Exists":
			holds = ok
		case "DoesNotExist":
			holds = !ok
		default:
			panic("operator " + e.Operator)
		}
		if !holds {
			return false
		}
	}
	return true
}

// place is a pod, or without a namespace an address outside of the cluster's pods.
type place struct {
	name, namespace string
	labels          map[string]string
	ip              netip.Addr
	ports           map[string]int // by name
}

// socket is what a connection is to.
type socket struct {
	number   int
	protocol string
}

func (s socket) String() string {
	if s.protocol == "TCP" {
		return fmt.Sprint(s.number)
	}
	return fmt.Sprintf("%d/%s", s.number, s.protocol)
}

// namespaceLabels are those of every namespace, and those that a test gives.
func namespaceLabels(name string, further map[string]map[string]string) map[string]string {
	labels := map[string]string{"kubernetes.io/metadata.name": name}
	maps.Copy(labels, further[name])
	return labels
}

// world is where policies hold.
type world struct {
	policies   []policy
	namespaces map[string]map[string]string // labels besides the name
}

// lets reports whether a connection is allowed.
func (w *world) lets(from, to *place, at socket) bool {
	return w.out(from, to, at) && w.in(from, to, at)
}

// out reports whether the source of a connection allows it.
func (w *world) out(from, to *place, at socket) bool { return w.open("Egress", from, to, to, at) }
func (w *world) in(from, to *place, at socket) bool  { return w.open("Ingress", to, from, to, at) }

// open reports whether one end of a connection, the pod's, allows it. Ports are those of
// the destination pod.
func (w *world) open(direction string, pod, peer, to *place, at socket) bool {
	closed := false
	for i := range w.policies {
		p := &w.policies[i]
		if pod.namespace == "" || p.Metadata.Namespace != pod.namespace || !p.Spec.PodSelector.selects(pod.labels) || !slices.Contains(p.Spec.types(), direction) {
			continue
		}
		closed = true
		for _, r := range *p.Spec.rules(direction) {
			if w.matches(r.peers(direction), p.Metadata.Namespace, peer) && reaches(r.Ports, to, at) {
				return true
			}
		}
	}
	return !closed
}

// types are a policy's directions. Without a word: ingress, and egress if there
// are rules for it.
func (s *policySpec) types() []string {
	switch {
	case len(s.PolicyTypes) > 0:
		return s.PolicyTypes
	case len(s.Egress) > 0:
		return []string{"Ingress", "Egress"}
	}
	return []string{"Ingress"}
}

func (w *world) matches(peers []policyPeer, namespace string, who *place) bool {
	if len(peers) == 0 {
		return true
	}
	for _, p := range peers {
		if p.IPBlock != nil {
			within := func(cidr string) bool { return netip.MustParsePrefix(cidr).Contains(who.ip) }
			if within(p.IPBlock.CIDR) && !slices.ContainsFunc(p.IPBlock.Except, within) {
				return true
			}
			continue
		}
		if who.namespace == "" {
			continue
		}
		there := who.namespace == namespace
		if p.NamespaceSelector != nil {
			there = p.NamespaceSelector.selects(namespaceLabels(who.namespace, w.namespaces))
		}
		if there && (p.PodSelector == nil || p.PodSelector.selects(who.labels)) {
			return true
		}
	}
	return false
}

func reaches(ports []policyPort, to *place, at socket) bool {
	if len(ports) == 0 {
		return true
	}
	for _, p := range ports {
		if protocol := p.Protocol; protocol != at.protocol && (protocol != "" || at.protocol != "TCP") {
			continue
		}
		var first int
		switch v := p.Port.(type) {
		case nil:
			return true
		case uint64:
			first = int(v)
		case string:
			named, ok := to.ports[v]
			if !ok {
				continue
			}
			first = named
		default:
			panic(fmt.Sprintf("port %T", v))
		}
		if at.number >= first && at.number <= max(first, p.EndPort) {
			return true
		}
	}
	return false
}

// readPolicies reads all NetworkPolicies of a stream of objects.
func readPolicies(t *testing.T, objects []object) []policy {
	t.Helper()
	var all []policy
	for _, o := range ofKind(objects, "NetworkPolicy") {
		text, err := yaml.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		var p policy
		if err := yaml.UnmarshalWithOptions(text, &p, yaml.DisallowUnknownField()); err != nil {
			t.Fatalf("%s: %v", o, err)
		}
		all = append(all, p)
	}
	return all
}

// What the judge knows of NetworkPolicies, each with the connection that it lets
// through and the one that it does not.
func TestJudgeOfPolicies(t *testing.T) {
	t.Parallel()
	pod := func(name, namespace, app, ip string) *place {
		return &place{name: name, namespace: namespace, labels: map[string]string{"app": app}, ip: netip.MustParseAddr(ip), ports: map[string]int{"web": 80}}
	}
	db, web, far := pod("db", "a", "db", "10.0.0.1"), pod("web", "a", "web", "10.0.0.2"), pod("far", "b", "web", "10.0.1.1")
	out := &place{name: "out", ip: netip.MustParseAddr("192.0.2.1")}
	tcp := func(n int) socket { return socket{n, "TCP"} }
	for _, c := range []struct {
		spec         string
		let, refused string // "from to port[/protocol]"
	}{
		{`podSelector: {matchLabels: {app: db}}`, "far web 80", "web db 80"},
		{`podSelector: {matchLabels: {app: db}}`, "db web 80", "far db 80"},
		{`{podSelector: {}, ingress: [{}]}`, "far db 80", ""},
		{`{podSelector: {}, policyTypes: [Egress]}`, "far db 80", "db far 80"},
		{`{podSelector: {}, egress: [{to: [{podSelector: {}}]}], ingress: [{}]}`, "db web 80", "db far 80"},
		{`{podSelector: {}, policyTypes: [Ingress], egress: [{to: [{podSelector: {}}]}], ingress: [{}]}`, "db far 80", ""},
		{`{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}`, "web db 80", "far db 80"},
		{`{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: b}}}]}]}`, "far db 80", "web db 80"},
		{`{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}]}]}`, "far db 80", "out db 80"},
		{`{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {matchLabels: {tier: x}}, podSelector: {matchLabels: {app: db}}}]}]}`, "", "far db 80"},
		{`{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {matchLabels: {tier: x}}}, {podSelector: {matchLabels: {app: db}}}]}]}`, "far db 80", "web db 80"},
		{`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 192.0.2.0/24}}]}]}`, "out db 80", "web db 80"},
		{`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 192.0.0.0/8, except: [192.0.2.0/30]}}]}]}`, "", "out db 80"},
		{`{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`, "far db 80", "far db 81"},
		{`{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`, "", "far db 80/UDP"},
		{`{podSelector: {}, ingress: [{ports: [{port: web, protocol: TCP}]}]}`, "far db 80", "far db 81"},
		{`{podSelector: {}, ingress: [{ports: [{port: other}]}]}`, "", "far db 80"},
		{`{podSelector: {}, ingress: [{ports: [{port: 80, endPort: 90}]}]}`, "far db 90", "far db 91"},
		{`{podSelector: {}, ingress: [{ports: [{protocol: UDP}]}]}`, "far db 53/UDP", "far db 53"},
		{`{podSelector: {matchExpressions: [{key: app, operator: In, values: [db, x]}]}}`, "far web 80", "far db 80"},
		{`{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [db]}]}}`, "far db 80", "far web 80"},
		{`{podSelector: {matchExpressions: [{key: app, operator: Exists}, {key: gone, operator: DoesNotExist}]}}`, "", "far db 80"},
	} {
		p := policy{}
		p.Metadata.Namespace = "a"
		if err := yaml.UnmarshalWithOptions([]byte(c.spec), &p.Spec, yaml.DisallowUnknownField()); err != nil {
			t.Fatalf("%s: %v", c.spec, err)
		}
		w := &world{policies: []policy{p}, namespaces: map[string]map[string]string{"b": {"tier": "x"}}}
		places := map[string]*place{"db": db, "web": web, "far": far, "out": out}
		for connection, want := range map[string]bool{c.let: true, c.refused: false} {
			if connection == "" {
				continue
			}
			var from, to, number string
			if _, err := fmt.Sscan(connection, &from, &to, &number); err != nil {
				t.Fatal(err)
			}
			at := tcp(0)
			if n, protocol, ok := strings.Cut(number, "/"); ok {
				number, at.protocol = n, protocol
			}
			if _, err := fmt.Sscan(number, &at.number); err != nil {
				t.Fatal(err)
			}
			if w.lets(places[from], places[to], at) != want {
				t.Errorf("%s: %s is let: %v", c.spec, connection, !want)
			}
		}
	}
}

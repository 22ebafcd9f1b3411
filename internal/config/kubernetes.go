package config

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Problems validates a section that flags have changed. Paths are those within the section.
func (k *Kubernetes) Problems() []Problem {
	var ps places
	var found ProblemsError
	k.validate(ps.reporter(&found))
	return found
}

func (k *Kubernetes) validate(bad report) {
	k.validatePods(bad)
	for i, name := range k.RoleLabels {
		named(bad, item("role_labels", i), name, "the name of a label", validation.IsQualifiedName(name))
	}
	for i, group := range k.Objectives {
		if groups := []string{"llm-d.ai", "inference.networking.x-k8s.io"}; !slices.Contains(groups, group) || slices.Index(k.Objectives, group) < i {
			bad(item("objectives", i), "%q: want each of %s once at most", group, strings.Join(groups, ", "))
		}
	}
	w := k.Worker // a template: values that pods set themselves are filled in
	bad.each([]wrong{
		{w.Name != "", "worker.name", "is made of a pod's name and port; leave it out"},
		{w.Address != "", "worker.address", "is filled in from the pod; leave it out"},
		{w.Events.Bind, "worker.events.bind", "all pods would share one endpoint of Kvlane's; have the engines bind theirs (tcp://*:5557) and leave bind out"},
		{k.RankPerPort && w.Ranks != 0, "worker.ranks", "not with rank_per_port: the number of ranks is that of a pod's ports; leave it out"},
		{k.RankPerPort && w.RankBy == "none", "worker.rank_by", "none: not with rank_per_port, by which each rank has a port; leave it out"},
	})
	if k.RankPerPort {
		w.Ranks, w.RankBy = 1, "port"
	}
	w.Name = ""
	w.validateCommon(bad.under("worker"))
	w.placeholders(bad.under("worker"), "$ip", "$port")
	for _, e := range w.Events.sockets() {
		if !w.Events.Bind && !strings.Contains(e.value, "$") {
			bad("worker.events."+e.key, "%q would be that of all pods, whose events would count for each of them; write $ip for a pod's address", e.value)
		}
	}
}

// validatePods checks the keys that select the pods.
func (k *Kubernetes) validatePods(bad report) {
	pools, selects := len(k.Pools), len(k.Selector) > 0 || k.LabelSelector != ""
	if pools == 0 && !selects {
		bad("", "needs either %s or a selector", missing("pools"))
	}
	bad.each([]wrong{
		{pools > 0 && selects, "selector", "not together with pools, which have selectors of their own; leave one out"},
		{pools == 0 && selects && len(k.Ports) == 0, "ports", "a selector needs the HTTP ports of a pod"},
		{pools > 0 && !selects && len(k.Ports) > 0, "ports", "only with selector: an InferencePool has targetPorts of its own; leave it out"},
	})
	for i, name := range k.Pools {
		named(bad, item("pools", i), name, "the name of an InferencePool", validation.IsDNS1123Subdomain(name))
		if first := slices.Index(k.Pools, name); first < i {
			bad(item("pools", i), "%q is %s already", name, item("pools", first))
		}
	}
	if k.Namespace != "" {
		named(bad, "namespace", k.Namespace, "the name of a namespace", validation.IsDNS1123Label(k.Namespace))
	}
	for _, key := range slices.Sorted(maps.Keys(k.Selector)) {
		named(bad, "selector."+key, key, "the name of a label", validation.IsQualifiedName(key))
		named(bad, "selector."+key, k.Selector[key], "the value of a label", validation.IsValidLabelValue(k.Selector[key]))
	}
	if _, err := labels.Parse(k.LabelSelector); err != nil {
		bad("label_selector", "%q: %v", k.LabelSelector, err)
	}
	ports(bad, "ports", k.Ports)
}

// named reports names that the API server would not accept.
func named(bad report, path, name, what string, problems []string) {
	if len(problems) > 0 {
		bad(path, "%q is not %s: %s", name, what, problems[0])
	}
}

// word matches a placeholder.
var word = regexp.MustCompile(`\$[A-Za-z_][A-Za-z0-9_]*`)

// placeholders reports placeholders of a template that are never filled in.
func (w *Worker) placeholders(bad report, ofEvents ...string) {
	ofDisagg := []string{"$ip", "$pod"}
	for _, t := range []struct {
		path, text string
		known      []string
	}{
		{"events.endpoint", w.Events.Endpoint, ofEvents},
		{"events.replay", w.Events.Replay, ofEvents},
		{"disagg.zmq", w.Disagg.ZMQ, ofDisagg},
		{"disagg.receiver_host", w.Disagg.ReceiverHost, ofDisagg},
		{"disagg.engine_id", w.Disagg.EngineID, ofDisagg},
		{"disagg.side_channel_host", w.Disagg.SideHost, ofDisagg},
	} {
		for _, p := range word.FindAllString(t.text, -1) {
			if !slices.Contains(t.known, p) {
				bad(t.path, "%q: nothing is known as %s; there is %s", t.text, p, strings.Join(t.known, " and "))
			}
		}
	}
}

package config

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Problems is what a configuration with this section would be told of it; paths are those
// within the section. It is for sections that flags have changed.
func (k *Kubernetes) Problems() []Problem {
	var d decoder
	k.validate("", func(path, format string, args ...any) { d.problemf(strings.TrimPrefix(path, "."), format, args...) })
	return d.problems
}

func (k *Kubernetes) validate(path string, bad report) {
	k.validatePods(path, bad)
	for i, name := range k.RoleLabels {
		named(bad, path+".role_labels["+strconv.Itoa(i)+"]", name, "name of a label", validation.IsQualifiedName(name))
	}
	w := k.Worker // a template: what pods have of their own is filled in
	if w.Name != "" {
		bad(path+".worker.name", "is made of a pod's name and port; leave it out")
	}
	if w.Address != "" {
		bad(path+".worker.address", "is filled in from the pod; leave it out")
	}
	if w.Events.Bind {
		bad(path+".worker.events.bind", "all pods would share one endpoint of Kvlane's; have the engines bind theirs (tcp://*:5557) and leave bind out")
	}
	if k.RankPerPort {
		if w.Ranks != 0 {
			bad(path+".worker.ranks", "not with rank_per_port: the number of ranks is that of a pod's ports; leave it out")
		}
		if w.RankBy == "none" {
			bad(path+".worker.rank_by", "none: not with rank_per_port, by which each rank has a port; leave it out")
		}
		w.Ranks, w.RankBy = 1, "port"
	}
	w.Name = ""
	w.validateCommon(path+".worker", bad)
	w.placeholders(path+".worker", bad, "$ip", "$port")
	for _, e := range []struct{ key, value string }{{"endpoint", w.Events.Endpoint}, {"replay", w.Events.Replay}} {
		if e.value != "" && e.value != PushEndpoint && !w.Events.Bind && !strings.Contains(e.value, "$") {
			bad(path+".worker.events."+e.key, "%q would be that of all pods, whose events would count for each of them; write $ip for a pod's address", e.value)
		}
	}
}

// validatePods looks at what says which pods are meant.
func (k *Kubernetes) validatePods(path string, bad report) {
	pools := len(k.Pools)
	if k.Pool != "" {
		pools++
	}
	switch {
	case pools == 0 && len(k.Selector) == 0:
		bad(path, "needs either pool(s) or a selector")
	case pools > 0 && len(k.Selector) > 0:
		bad(path+".selector", "not together with pools, which have selectors of their own; leave one out")
	}
	poolName := func(at, name string) {
		named(bad, at, name, "name of an InferencePool", validation.IsDNS1123Subdomain(name))
	}
	if k.Pool != "" {
		poolName(path+".pool", k.Pool)
	}
	for i, name := range k.Pools {
		at := path + ".pools[" + strconv.Itoa(i) + "]"
		poolName(at, name)
		if first := slices.Index(k.Pools, name); first < i {
			bad(at, "%q is pools[%d] already", name, first)
		}
	}
	if k.Namespace != "" {
		named(bad, path+".namespace", k.Namespace, "name of a namespace", validation.IsDNS1123Label(k.Namespace))
	}
	for _, key := range slices.Sorted(maps.Keys(k.Selector)) {
		at := path + ".selector." + key
		named(bad, at, key, "name of a label", validation.IsQualifiedName(key))
		named(bad, at, k.Selector[key], "value of a label", validation.IsValidLabelValue(k.Selector[key]))
	}
	switch {
	case len(k.Selector) > 0 && pools == 0 && len(k.Ports) == 0:
		bad(path+".ports", "a selector needs the HTTP ports of a pod")
	case len(k.Selector) == 0 && pools > 0 && len(k.Ports) > 0:
		bad(path+".ports", "only with selector: an InferencePool has targetPorts of its own; leave it out")
	}
	ports(bad, path+".ports", k.Ports)
}

// named reports what the API server would not take for a name.
func named(bad report, path, name, what string, problems []string) {
	if len(problems) > 0 {
		bad(path, "%q is no %s: %s", name, what, problems[0])
	}
}

// word is what a placeholder looks like.
var word = regexp.MustCompile(`\$[A-Za-z_][A-Za-z0-9_]*`)

// placeholders reports those in a template that nobody fills in.
func (w *Worker) placeholders(path string, bad report, ofEvents ...string) {
	look := func(at, text string, known []string) {
		for _, p := range word.FindAllString(text, -1) {
			if !slices.Contains(known, p) {
				bad(path+at, "%q: nothing is known as %s; there is %s", text, p, strings.Join(known, " and "))
			}
		}
	}
	look(".events.endpoint", w.Events.Endpoint, ofEvents)
	look(".events.replay", w.Events.Replay, ofEvents)
	ofDisagg := []string{"$ip", "$pod"}
	for _, d := range []struct{ key, text string }{
		{"zmq", w.Disagg.ZMQ}, {"receiver_host", w.Disagg.ReceiverHost}, {"engine_id", w.Disagg.EngineID}, {"side_channel_host", w.Disagg.SideHost},
	} {
		look(".disagg."+d.key, d.text, ofDisagg)
	}
}

package chart

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// checkLaws holds for every set of values: what no single schema can see.
func checkLaws(t *testing.T, objects []object) {
	t.Helper()
	byName := map[string]object{}
	for _, o := range objects {
		if _, twice := byName[o.String()]; twice {
			t.Errorf("%s is there twice", o)
		}
		byName[o.String()] = o
		if text(o, "metadata", "namespace") == "" {
			t.Errorf("%s has no namespace", o)
		}
		if text(o, "metadata", "labels", "app.kubernetes.io/instance") != "kvlane" {
			t.Errorf("%s does not say whose it is", o)
		}
	}
	deployments := ofKind(objects, "Deployment")
	if len(deployments) == 0 {
		t.Error("no Deployment")
	}
	for _, d := range deployments {
		checkPod(t, d, byName)
	}
	for _, s := range ofKind(objects, "Service") {
		if text(s, "metadata", "labels", "app.kubernetes.io/component") == "models" {
			continue // others' pods
		}
		d := selected(t, s, at(s, "spec", "selector"), deployments)
		for _, p := range list(s, "spec", "ports") {
			if kind := text(s, "spec", "type"); kind != "ClusterIP" && slices.Contains([]string{"http-metrics", "grpc-health"}, text(p, "targetPort")) {
				t.Errorf("%s of type %s publishes %s", s, kind, text(p, "targetPort"))
			}
			if d != nil && !slices.Contains(portNames(d), text(p, "targetPort")) {
				t.Errorf("%s: no container of %s has port %v", s, d, at(p, "targetPort"))
			}
		}
	}
	for _, kind := range []string{"PodDisruptionBudget", "PodMonitor"} {
		for _, o := range ofKind(objects, kind) {
			selected(t, o, at(o, "spec", "selector", "matchLabels"), deployments)
		}
	}
	for _, o := range ofKind(objects, "NetworkPolicy") {
		d := selected(t, o, at(o, "spec", "podSelector", "matchLabels"), deployments)
		for _, rule := range list(o, "spec", "ingress") {
			for _, p := range list(rule, "ports") {
				if d != nil && !slices.Contains(portNumbers(d), number(p, "port")) {
					t.Errorf("%s allows port %d, which %s does not have", o, number(p, "port"), d)
				}
			}
		}
	}
	for _, o := range ofKind(objects, "ServiceMonitor") {
		found := slices.ContainsFunc(ofKind(objects, "Service"), func(s object) bool {
			return within(at(o, "spec", "selector", "matchLabels"), at(s, "metadata", "labels")) &&
				slices.ContainsFunc(list(s, "spec", "ports"), func(p any) bool { return text(p, "name") == text(o, "spec", "endpoints", 0, "port") })
		})
		if !found {
			t.Errorf("%s finds no Service with its port", o)
		}
	}
	for _, o := range ofKind(objects, "HorizontalPodAutoscaler") {
		target, ok := byName["Deployment "+text(o, "spec", "scaleTargetRef", "name")]
		if !ok {
			t.Errorf("%s scales nothing", o)
		} else if at(target, "spec", "replicas") != nil {
			t.Errorf("%s and %s both say how many", o, target)
		}
	}
	for _, o := range ofKind(objects, "InferencePool") {
		checkService(t, o, byName, text(o, "spec", "endpointPickerRef", "name"), number(o, "spec", "endpointPickerRef", "port", "number"))
	}
	for _, o := range ofKind(objects, "HTTPRoute") {
		for _, b := range list(o, "spec", "rules", 0, "backendRefs") {
			if text(b, "kind") == "Service" {
				checkService(t, o, byName, text(b, "name"), number(b, "port"))
			}
		}
	}
	for _, o := range ofKind(objects, "EnvoyExtensionPolicy") {
		for _, e := range list(o, "spec", "extProc") {
			checkService(t, o, byName, text(e, "backendRefs", 0, "name"), number(e, "backendRefs", 0, "port"))
		}
	}
	for _, o := range slices.Concat(ofKind(objects, "ClusterRole"), ofKind(objects, "ClusterRoleBinding")) {
		t.Errorf("%s: rights beyond a namespace", o)
	}
	for _, o := range ofKind(objects, "Role") {
		for _, rule := range list(o, "rules") {
			for _, verb := range list(rule, "verbs") {
				if !slices.Contains([]any{"get", "list", "watch"}, verb) {
					t.Errorf("%s may %v", o, verb)
				}
			}
		}
	}
}

// checkPod: the restricted Pod Security Standard, probes, time to drain, and
// volumes that are there.
func checkPod(t *testing.T, d object, all map[string]object) {
	t.Helper()
	pod := at(d, "spec", "template", "spec")
	if !within(at(d, "spec", "selector", "matchLabels"), at(d, "spec", "template", "metadata", "labels")) {
		t.Errorf("%s does not select its pods", d)
	}
	if at(pod, "securityContext", "runAsNonRoot") != true || number(pod, "securityContext", "runAsUser") != 65532 ||
		text(pod, "securityContext", "seccompProfile", "type") != "RuntimeDefault" {
		t.Errorf("%s: security of the pod is %v", d, at(pod, "securityContext"))
	}
	if len(list(pod, "topologySpreadConstraints")) == 0 {
		t.Errorf("%s is not spread", d)
	}
	volumes := map[string]any{}
	for _, v := range list(pod, "volumes") {
		volumes[text(v, "name")] = v
		name := text(v, "configMap", "name")
		if ours := slices.Contains([]string{"config", "envoy"}, text(v, "name")); ours && all["ConfigMap "+name] == nil {
			t.Errorf("%s mounts ConfigMap %q, which is not there", d, name)
		}
	}
	sleep := 0
	for _, c := range list(pod, "containers") {
		name := d.String() + "/" + text(c, "name")
		s := at(c, "securityContext")
		if at(s, "allowPrivilegeEscalation") != false || at(s, "readOnlyRootFilesystem") != true || at(s, "privileged") != false ||
			len(list(s, "capabilities", "drop")) != 1 || at(s, "capabilities", "drop", 0) != "ALL" || at(s, "capabilities", "add") != nil {
			t.Errorf("%s: security is %v", name, s)
		}
		for _, probe := range []string{"startupProbe", "livenessProbe", "readinessProbe"} {
			if at(c, probe) == nil {
				t.Errorf("%s has no %s", name, probe)
			}
		}
		if at(c, "resources", "requests", "cpu") == nil || at(c, "resources", "limits", "memory") == nil {
			t.Errorf("%s: resources are %v", name, at(c, "resources"))
		}
		if text(c, "name") == "kvlane" && !slices.ContainsFunc(list(c, "volumeMounts"), func(m any) bool {
			return text(m, "mountPath") == "/tmp" && at(m, "readOnly") != true && at(volumes[text(m, "name")], "emptyDir") != nil
		}) {
			t.Errorf("%s has a read-only root and no /tmp", name)
		}
		sleep = max(sleep, number(c, "lifecycle", "preStop", "sleep", "seconds"))
		for _, m := range list(c, "volumeMounts") {
			if volumes[text(m, "name")] == nil {
				t.Errorf("%s mounts %s, which is no volume", name, text(m, "name"))
			}
		}
		if text(c, "name") == "kvlane" {
			checkDrain(t, d, all, sleep)
		}
	}
	if grace := number(pod, "terminationGracePeriodSeconds"); grace <= sleep {
		t.Errorf("%s is killed after %d s, its hooks take %d", d, grace, sleep)
	}
	if v := volumes["socket"]; v != nil && text(v, "emptyDir", "medium") != "Memory" {
		t.Errorf("%s: the socket's folder is %v", d, v)
	}
}

// checkDrain: hook and drain together end before the kubelet's patience.
func checkDrain(t *testing.T, d object, all map[string]object, sleep int) {
	t.Helper()
	config := all["ConfigMap "+text(d, "metadata", "name")]
	var c struct{ Drain string }
	if err := yaml.Unmarshal([]byte(text(config, "data", "kvlane.yaml")), &c); err != nil {
		t.Fatal(err)
	}
	span, err := time.ParseDuration(c.Drain)
	if err != nil {
		t.Fatal(err)
	}
	drain := int(span.Seconds())
	if grace := number(d, "spec", "template", "spec", "terminationGracePeriodSeconds"); drain == 0 || grace < sleep+drain+5 {
		t.Errorf("%s is killed after %d s, but sleeps %d and drains %d", d, grace, sleep, drain)
	}
}

func checkService(t *testing.T, user object, all map[string]object, name string, port int) {
	t.Helper()
	s, ok := all["Service "+name]
	if !ok {
		t.Errorf("%s uses Service %s, which is not there", user, name)
		return
	}
	if !slices.ContainsFunc(list(s, "spec", "ports"), func(p any) bool { return number(p, "port") == port }) {
		t.Errorf("%s uses port %d of %s, which is not there", user, port, s)
	}
}

// selected returns the only Deployment whose pods the labels select.
func selected(t *testing.T, by object, labels any, deployments []object) object {
	t.Helper()
	var found []object
	for _, d := range deployments {
		if within(labels, at(d, "spec", "template", "metadata", "labels")) {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		t.Errorf("%s selects pods of %v", by, found)
		return nil
	}
	return found[0]
}

// within reports whether all of some labels are among others.
func within(some, others any) bool {
	s, _ := some.(map[string]any)
	o, _ := others.(map[string]any)
	for k, v := range s {
		if o[k] != v {
			return false
		}
	}
	return len(s) > 0
}

func ofKind(objects []object, kind string) []object {
	var found []object
	for _, o := range objects {
		if text(o, "kind") == kind {
			found = append(found, o)
		}
	}
	return found
}

func ports(d object, each func(p any)) {
	for _, c := range list(d, "spec", "template", "spec", "containers") {
		for _, p := range list(c, "ports") {
			each(p)
		}
	}
}

func portNames(d object) []string {
	var names []string
	ports(d, func(p any) { names = append(names, text(p, "name"), strconv.Itoa(number(p, "containerPort"))) })
	return names
}

func portNumbers(d object) []int {
	var numbers []int
	ports(d, func(p any) { numbers = append(numbers, number(p, "containerPort")) })
	return numbers
}

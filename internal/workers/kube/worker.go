package kube

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
)

// Prefix of the labels and annotations that describe a pod's engine. An annotation takes
// precedence over a label of the same name.
const Prefix = "kvlane.dev/"

// roleLabels are the default labels for a pod's role: our own, then those of llm-d and Dynamo.
var roleLabels = []string{Prefix + "role", "llm-d.ai/role", "nvidia.com/dynamo-sub-component-type", "nvidia.com/dynamo-component-type"}

// engineLabels are the labels for a pod's engine kind: those of llm-d and of the Gateway API inference extension.
var engineLabels = []string{"llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"}

// zoneLabels become the worker's label zone.
var zoneLabels = []string{"topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"}

// errNotWorker marks pods without an engine that serves requests.
var errNotWorker = errors.New("not a worker")

// roles maps the values of role labels. Encoders and frontends compute neither prefill nor decode, so they are not
// routed to.
var roles = map[string]string{
	"": "", "both": "both", "prefill": "prefill", "decode": "decode", "worker": "",
	"prefill-decode": "both", "decode-prefill": "both", "encode-prefill-decode": "both", "encode-decode": "decode", "encode-prefill": "prefill",
}

var notWorkers = []string{"encode", "frontend", "planner", "epp"}

// hints are the annotations, with the keys of the worker's fields that they set.
var hints = map[string]string{
	"engine":     "engine",
	"models":     "models",
	"ranks":      "ranks",
	"start-rank": "start_rank",
	"rank-by":    "rank_by",
	"block-size": "block_size",
	"speed":      "speed",
	"events":     "events.endpoint",
	"replay":     "events.replay",
	"topic":      "events.topic",

	"bootstrap-port":       "disagg.bootstrap_port",
	"handshake-port":       "disagg.handshake_port",
	"notify-port":          "disagg.notify_port",
	"zmq":                  "disagg.zmq",
	"engine-id":            "disagg.engine_id",
	"side-channel-host":    "disagg.side_channel_host",
	"side-channel-port":    "disagg.side_channel_port",
	"receiver-host":        "disagg.receiver_host",
	"receiver-init-ports":  "disagg.receiver_init_ports",
	"receiver-alloc-ports": "disagg.receiver_alloc_ports",
	"receiver-query-port":  "disagg.receiver_query_port",
}

// maxHint bounds a hint in bytes, where Kubernetes allows 256 KiB. maxNames bounds the models of a pod times its ranks,
// since each rank lists them and the router's lock is held while they are added.
const maxHint, maxNames = 4096, 1 << 16

// describe returns the worker for a pod's i-th port. facts are the engine's own answers, nil if it was not queried. The
// result is validated like a static worker: hints and facts that violate its rules are dropped and named in left. err
// is errNotWorker if the pod has no engine to route to, or explains why the worker is invalid.
func describe(k *config.Kubernetes, p *Pod, port, i int, facts *workers.Facts) (w config.Worker, left, err error) {
	role, said, problems := read(k, p)
	if slices.Contains(notWorkers, role) {
		return w, nil, errNotWorker
	}
	var known workers.Facts
	if facts != nil {
		known = *facts
	}
	for {
		w = assemble(k, p, port, i, &known, said)
		if r := roles[role]; r != "" {
			w.Role = r
		}
		wrong := append(foreign(k, p, &w, said), w.Problems()...)
		if len(wrong) == 0 {
			return w, errors.Join(problems...), nil
		}
		why := fmt.Errorf("%s: %s", wrong[0].Path, wrong[0].Message)
		hint := hintOf(wrong[0].Path)
		if out := leaveOut(said, hint); len(out) > 0 {
			problems = append(problems, fmt.Errorf("%s left out: %w", strings.Join(out, ", "), why))
		} else if forget(&known, hint) {
			problems = append(problems, fmt.Errorf("what the engine says is left out: %w", why))
		} else {
			return w, errors.Join(problems...), why
		}
	}
}

// assemble joins the template, the engine's facts and the valid hints.
func assemble(k *config.Kubernetes, p *Pod, port, i int, facts *workers.Facts, said map[string]string) config.Worker {
	w := k.Worker
	w.Labels = maps.Clone(w.Labels)
	facts.Fill(&w)
	if v := first(p.Labels, engineLabels); v != "" {
		_ = w.Set("engine", v) // read has reported errors
	}
	for _, key := range slices.Sorted(maps.Keys(said)) {
		_ = w.Set(hints[key], said[key]) // read has reported errors
	}
	w.Name = p.Name + ":" + strconv.Itoa(port)
	if k.RankPerPort {
		w.StartRank += i
		w.Ranks, w.RankBy = 1, "port"
	}
	w.Fill(p.Name, p.Status.PodIP, port)
	for _, e := range []*string{&w.Events.Endpoint, &w.Events.Replay} {
		if *e != facts.Events.Endpoint && *e != facts.Events.Replay {
			// An endpoint from facts belongs to the queried port's own engine. One from a template belongs to the pod's
			// first engine; the others use the ports after it.
			if own, err := workers.RankEndpoint(*e, i); err == nil {
				*e = own
			}
		}
	}
	if w.Labels["zone"] == "" {
		if zone := first(p.Labels, zoneLabels); zone != "" {
			if w.Labels == nil {
				w.Labels = map[string]string{}
			}
			w.Labels["zone"] = zone
		}
	}
	return w
}

// read parses labels and annotations. Values that cannot be parsed become problems.
func read(k *config.Kubernetes, p *Pod) (role string, said map[string]string, problems []error) {
	keys := roleLabels
	if len(k.RoleLabels) > 0 {
		keys = k.RoleLabels
	}
	role = p.Annotations[Prefix+"role"]
	for _, key := range keys {
		if role != "" {
			break
		}
		// Dynamo's component type may be "worker" where the sub type is more specific.
		if v := p.Labels[key]; v != "" && v != "worker" {
			role = v
		}
	}
	if _, known := roles[role]; !known && !slices.Contains(notWorkers, role) {
		problems = append(problems, fmt.Errorf("role %q is not known", role))
	}
	var scratch config.Worker
	if v := first(p.Labels, engineLabels); v != "" {
		if err := scratch.Set("engine", v); err != nil {
			problems = append(problems, fmt.Errorf("engine label: %w", err))
		}
	}
	said = map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(hints)) {
		v, given := p.Annotations[Prefix+key]
		if !given {
			v, given = p.Labels[Prefix+key]
		}
		if !given {
			continue
		}
		v = strings.TrimSpace(v)
		err := errors.New("not with rank_per_port, by which each port of a pod is a rank")
		if len(v) > maxHint {
			err = fmt.Errorf("has %d bytes, want at most %d", len(v), maxHint)
		} else if !k.RankPerPort || key != "ranks" && key != "rank-by" {
			err = scratch.Set(hints[key], v)
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("%s%s: %w", Prefix, key, err))
			continue
		}
		said[key] = v
	}
	return role, said, problems
}

// foreign finds event endpoints and connector hosts of a pod that are not at its own address, and too many models. Only
// the configuration may name other hosts. Otherwise an engine, or a pod whose author does not operate Kvlane, could
// make Kvlane or other engines connect to any host, or claim another engine's events.
func foreign(k *config.Kubernetes, p *Pod, w *config.Worker, said map[string]string) []config.Problem {
	var out []config.Problem
	for _, e := range []struct{ hint, path, value string }{{"events", "events.endpoint", w.Events.Endpoint}, {"replay", "events.replay", w.Events.Replay}} {
		_, hinted := said[e.hint]
		if !hinted && k.Worker.Events.Endpoint != "" || e.value == "" || e.value == config.PushEndpoint {
			continue
		}
		u, err := url.Parse(e.value)
		switch {
		case err != nil || !slices.Contains([]string{"tcp", "http", "https"}, u.Scheme):
			out = append(out, config.Problem{Path: e.path, Message: fmt.Sprintf("%q is not like tcp://$ip:port", e.value)})
		case u.Hostname() != p.Status.PodIP || u.User != nil:
			out = append(out, config.Problem{Path: e.path, Message: fmt.Sprintf("%q is not at the pod's own address: a pod speaks for itself only", e.value)})
		}
	}
	if n := max(w.Ranks, 1); len(w.Models)*n > maxNames {
		out = append(out, config.Problem{Path: "models", Message: fmt.Sprintf("%d models on %d ranks: at most %d together", len(w.Models), n, maxNames)})
	}
	for _, h := range []struct{ hint, path, value string }{
		{"zmq", "disagg.zmq", w.Disagg.ZMQ}, {"side-channel-host", "disagg.side_channel_host", w.Disagg.SideHost},
		{"receiver-host", "disagg.receiver_host", w.Disagg.ReceiverHost},
	} {
		host := h.value
		if h.hint == "zmq" {
			host, _, _ = net.SplitHostPort(h.value) // its form is checked with the worker
		}
		if _, hinted := said[h.hint]; hinted && host != "" && host != p.Status.PodIP && !slices.Contains(k.ConnectorHosts, host) {
			out = append(out, config.Problem{Path: h.path, Message: fmt.Sprintf("%q is not the pod's own address, nor in workers.kubernetes.connector_hosts", host)})
		}
	}
	return out
}

// together are groups of hints that describe one thing: if a combination is invalid the whole group is dropped.
var together = [][]string{{"events", "replay"}, {"rank-by", "ranks", "start-rank"}}

// hintOf returns the hint that sets the field of a worker at path, "" if none does.
func hintOf(path string) string {
	path, _, _ = strings.Cut(path, "[")
	for hint, key := range hints {
		if key == path {
			return hint
		}
	}
	return ""
}

// leaveOut deletes the hints that may cause a problem with the field that hint sets, and returns their names: the hint
// and its group, else the ranks, which determine the ports of events.
func leaveOut(said map[string]string, hint string) (out []string) {
	if _, given := said[hint]; given && hint == "replay" {
		delete(said, hint) // events work without it
		return []string{Prefix + hint}
	}
	suspects := [][]string{{hint}}
	for _, group := range together {
		if slices.Contains(group, hint) {
			suspects = [][]string{group, together[1]}
		}
	}
	for _, group := range suspects {
		for _, key := range group {
			if _, given := said[key]; given {
				out = append(out, Prefix+key)
				delete(said, key)
			}
		}
		if len(out) > 0 {
			return out
		}
	}
	return nil
}

// forget clears the engine's facts on the subject of a hint. It reports whether there were any.
func forget(f *workers.Facts, hint string) bool {
	before := *f
	switch {
	case slices.Contains(together[0], hint) && f.Events != (config.Events{}):
		f.Events = config.Events{}
	case slices.Contains(together[0], hint), slices.Contains(together[1], hint):
		f.Ranks, f.StartRank = 0, 0
	case hint == "block-size":
		f.BlockSize = 0
	case hint == "models":
		f.Models = nil
	case hint == "bootstrap-port":
		f.BootstrapPort = 0
	}
	return !reflect.DeepEqual(before, *f)
}

func first(labels map[string]string, keys []string) string {
	for _, k := range keys {
		if v := labels[k]; v != "" {
			return v
		}
	}
	return ""
}

// newestFirst orders pods so that the running one of two with the same address wins: it got the address when the
// other's containers had ended.
func newestFirst(pods []*Pod) []*Pod {
	return slices.SortedFunc(slices.Values(pods), func(a, b *Pod) int {
		if (a.DeletionTimestamp == nil) != (b.DeletionTimestamp == nil) {
			if a.DeletionTimestamp == nil {
				return -1
			}
			return 1
		}
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}

package kube

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
)

// Prefix of the labels and annotations that say what a pod's engine is. A label
// serves where an annotation of the same name is absent.
const Prefix = "kvlane.dev/"

// roleLabels carry a pod's role where the configuration names none: our own, then
// those of llm-d and Dynamo.
var roleLabels = []string{Prefix + "role", "llm-d.ai/role", "nvidia.com/dynamo-sub-component-type", "nvidia.com/dynamo-component-type"}

// engineLabels carry a pod's engine kind: those of llm-d and of the Gateway API
// inference extension.
var engineLabels = []string{"llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"}

// zoneLabels become the worker's label zone.
var zoneLabels = []string{"topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"}

// errNotWorker marks pods that hold no engine which answers requests.
var errNotWorker = errors.New("not a worker")

// roles are the values of role labels. An encoder computes neither of the two
// phases that are routed; a frontend computes nothing.
var roles = map[string]string{
	"": "", "both": "both", "prefill": "prefill", "decode": "decode", "worker": "",
	"prefill-decode": "both", "decode-prefill": "both", "encode-prefill-decode": "both", "encode-decode": "decode", "encode-prefill": "prefill",
}

var notWorkers = []string{"encode", "frontend", "planner", "epp"}

// hints sets a worker's fields from the text of an annotation.
var hints = map[string]func(w *config.Worker, v string) error{
	"engine": func(w *config.Worker, v string) error { return choice(&w.Engine, v, "vllm", "sglang", "trtllm") },
	"models": func(w *config.Worker, v string) error { w.Models = list(v); return nil },
	"ranks":  func(w *config.Worker, v string) error { return number(&w.Ranks, v) },
	"start-rank": func(w *config.Worker, v string) error {
		return number(&w.StartRank, v)
	},
	"rank-by":    func(w *config.Worker, v string) error { return choice(&w.RankBy, v, "header", "port", "none") },
	"block-size": func(w *config.Worker, v string) error { return number(&w.BlockSize, v) },
	"events":     func(w *config.Worker, v string) error { w.Events.Endpoint = v; return nil },
	"replay":     func(w *config.Worker, v string) error { w.Events.Replay = v; return nil },
	"topic":      func(w *config.Worker, v string) error { w.Events.Topic = v; return nil },
	"speed": func(w *config.Worker, v string) error {
		f, err := strconv.ParseFloat(v, 64)
		if err != nil || f <= 0 || f > 1e6 {
			return fmt.Errorf("%q is not a number above 0", v)
		}
		w.Speed = f
		return nil
	},
	"bootstrap-port": func(w *config.Worker, v string) error { return number(&w.Disagg.BootstrapPort, v) },
	"handshake-port": func(w *config.Worker, v string) error { return number(&w.Disagg.HandshakePort, v) },
	"notify-port":    func(w *config.Worker, v string) error { return number(&w.Disagg.NotifyPort, v) },
	"zmq": func(w *config.Worker, v string) error {
		if _, _, err := net.SplitHostPort(v); err != nil {
			return fmt.Errorf("%q is not ip:port", v)
		}
		w.Disagg.ZMQ = v
		return nil
	},
	"engine-id":            func(w *config.Worker, v string) error { w.Disagg.EngineID = v; return nil },
	"side-channel-host":    func(w *config.Worker, v string) error { w.Disagg.SideHost = v; return nil },
	"side-channel-port":    func(w *config.Worker, v string) error { return number(&w.Disagg.SidePort, v) },
	"receiver-host":        func(w *config.Worker, v string) error { w.Disagg.ReceiverHost = v; return nil },
	"receiver-init-ports":  func(w *config.Worker, v string) error { return numbers(&w.Disagg.InitPorts, v) },
	"receiver-alloc-ports": func(w *config.Worker, v string) error { return numbers(&w.Disagg.AllocPorts, v) },
	"receiver-query-port":  func(w *config.Worker, v string) error { return number(&w.Disagg.QueryPort, v) },
}

func choice(to *string, v string, among ...string) error {
	if !slices.Contains(among, v) {
		return fmt.Errorf("%q is not one of %s", v, strings.Join(among, ", "))
	}
	*to = v
	return nil
}

func number(to *int, v string) error {
	n, err := strconv.Atoi(v)
	if err != nil || n < 0 || n > 1<<16 {
		return fmt.Errorf("%q is not a number from 0 to %d", v, 1<<16)
	}
	*to = n
	return nil
}

func numbers(to *[]int, v string) error {
	var out []int
	for _, item := range list(v) {
		n := 0
		if err := number(&n, item); err != nil {
			return err
		}
		out = append(out, n)
	}
	*to = out
	return nil
}

func list(v string) []string {
	var out []string
	for item := range strings.SplitSeq(v, ",") {
		if item = strings.TrimSpace(item); item != "" {
			out = append(out, item)
		}
	}
	return out
}

// describe makes the worker behind a pod's i-th port. facts is what the engine
// said of itself, nil if it was not asked. Hints that cannot be read are left
// out and joined in err; errNotWorker alone means that there is no worker.
func describe(k *config.Kubernetes, p *Pod, port, i int, facts *workers.Facts) (w config.Worker, err error) {
	w = k.Worker
	w.Labels = maps.Clone(w.Labels)
	if facts != nil {
		facts.Fill(&w)
	}
	err = hint(k, p, &w)
	if errors.Is(err, errNotWorker) {
		return w, errNotWorker
	}
	w.Name = p.Name + ":" + strconv.Itoa(port)
	if k.RankPerPort {
		w.StartRank += i
		w.Ranks, w.RankBy = 1, "port"
	}
	host := p.Status.PodIP
	w.Disagg.Fill(p.Name, host)
	w.Address = net.JoinHostPort(host, strconv.Itoa(port))
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	for _, e := range []*string{&w.Events.Endpoint, &w.Events.Replay} {
		*e = strings.NewReplacer("$ip", host, "$port", strconv.Itoa(port)).Replace(*e)
		if facts == nil || *e != facts.Events.Endpoint && *e != facts.Events.Replay {
			// An engine that was asked at this port spoke of itself; a template speaks of the
			// pod's first engine, and the others count up.
			*e = shift(*e, i)
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
	return w, err
}

// hint takes what labels and annotations say.
func hint(k *config.Kubernetes, p *Pod, w *config.Worker) error {
	var problems []error
	keys := roleLabels
	if len(k.RoleLabels) > 0 {
		keys = k.RoleLabels
	}
	role := p.Annotations[Prefix+"role"]
	for _, key := range keys {
		if role != "" {
			break
		}
		// Dynamo's component type says "worker" beside a sub type that says more.
		if v := p.Labels[key]; v != "" && v != "worker" {
			role = v
		}
	}
	if slices.Contains(notWorkers, role) {
		return errNotWorker
	}
	if r, known := roles[role]; !known {
		problems = append(problems, fmt.Errorf("role %q is not known", role))
	} else if r != "" {
		w.Role = r
	}
	if v := first(p.Labels, engineLabels); v != "" {
		if err := choice(&w.Engine, v, "vllm", "sglang", "trtllm"); err != nil {
			problems = append(problems, fmt.Errorf("engine label: %w", err))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(hints)) {
		v, given := p.Annotations[Prefix+key]
		if !given {
			v, given = p.Labels[Prefix+key]
		}
		if !given {
			continue
		}
		if err := hints[key](w, strings.TrimSpace(v)); err != nil {
			problems = append(problems, fmt.Errorf("%s%s: %w", Prefix, key, err))
		}
	}
	return errors.Join(problems...)
}

func first(labels map[string]string, keys []string) string {
	for _, k := range keys {
		if v := labels[k]; v != "" {
			return v
		}
	}
	return ""
}

// shift adds i to the port of a tcp endpoint.
func shift(endpoint string, i int) string {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok || i == 0 {
		return endpoint
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return endpoint
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(n+i))
}

// newestFirst orders pods so that of two with one address the living one wins:
// the address was given to the newcomer when the other's containers had ended.
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

package config

import (
	"strings"
	"testing"
)

// Each of these was once accepted, and never became ready or had another meaning.
// What is said where no worker is known names the pods that were looked for.
func TestSourcesNameThePodsThatAreLookedFor(t *testing.T) {
	for want, k := range map[string]*Kubernetes{
		"workers.kubernetes, pods by the selector of InferencePool a, b":                      {Pools: []string{"a", "b"}},
		"workers.kubernetes, pods of kubectl get pods -l 'app in (a,b),app=llm,role=prefill'": {LabelSelector: "app in (a,b)", Selector: map[string]string{"role": "prefill", "app": "llm"}},
	} {
		if got := (&Workers{Kubernetes: k}).Sources(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestKubernetesThatCannotWork(t *testing.T) {
	const name = "a lowercase RFC 1123"
	for text, want := range map[string]string{
		`pools: [""]`:                                                         `workers.kubernetes.pools[0]: "" is not the name of an InferencePool: ` + name,
		`pool: UPPER_case`:                                                    `workers.kubernetes.pools[0]: "UPPER_case" is not the name of an InferencePool: ` + name,
		`pool: "a,metadata.name=b"`:                                           `workers.kubernetes.pools[0]: "a,metadata.name=b" is not the name of an InferencePool: ` + name,
		`selector: {a: "x,y in (1)"}, ports: [1]`:                             `workers.kubernetes.selector.a: "x,y in (1)" is not the value of a label: a valid label must be`,
		`label_selector: "a in b", ports: [1]`:                                `workers.kubernetes.label_selector: "a in b": `,
		`label_selector: "a in (b)"`:                                          `workers.kubernetes.ports: a selector needs the HTTP ports of a pod`,
		`pool: p, label_selector: a`:                                          `workers.kubernetes.selector: not together with pools`,
		`selector: {"a b": x}, ports: [1]`:                                    `workers.kubernetes.selector.a b: "a b" is not the name of a label: name part must consist of`,
		`pool: p, namespace: "Bad/NS"`:                                        `workers.kubernetes.namespace: "Bad/NS" is not the name of a namespace: ` + name,
		`pool: p, namespace: a.b`:                                             `workers.kubernetes.namespace: "a.b" is not the name of a namespace`,
		`selector: {a: b}, ports: [8000, 8000]`:                               `workers.kubernetes.ports[1]: 8000 is ports[0] already`,
		`selector: {a: b}, ports: [0]`:                                        `workers.kubernetes.ports[0]: 0 is not a port`,
		`selector: {a: b}`:                                                    `workers.kubernetes.ports: a selector needs the HTTP ports of a pod`,
		`namespace: n`:                                                        `workers.kubernetes: needs either pools or a selector`,
		`pool: p, selector: {a: b}, namespace: n`:                             `workers.kubernetes.selector: not together with pools, which have selectors of their own; leave one out`,
		`pool: p, ports: [8000]`:                                              `workers.kubernetes.ports: only with selector: an InferencePool has targetPorts of its own; leave it out`,
		`pool: p, rank_per_port: true, worker: {ranks: 4}`:                    `workers.kubernetes.worker.ranks: not with rank_per_port: the number of ranks is that of a pod's ports; leave it out`,
		`pool: p, rank_per_port: true, worker: {rank_by: none}`:               `workers.kubernetes.worker.rank_by: none: not with rank_per_port`,
		`pool: p, objectives: [gaie]`:                                         `workers.kubernetes.objectives[0]: "gaie": want each of llm-d.ai, inference.networking.x-k8s.io once at most`,
		`pool: p, objectives: [llm-d.ai, llm-d.ai]`:                           `workers.kubernetes.objectives[1]: "llm-d.ai": want each of`,
		`pool: p, role_labels: [""]`:                                          `workers.kubernetes.role_labels[0]: "" is not the name of a label: `,
		`pool: p, worker: {name: w}`:                                          `workers.kubernetes.worker.name: is made of a pod's name and port; leave it out`,
		`pool: p, worker: {address: "10.0.0.1:80"}`:                           `workers.kubernetes.worker.address: is filled in from the pod; leave it out`,
		`pool: p, worker: {events: {endpoint: "tcp://$host:5557"}}`:           `workers.kubernetes.worker.events.endpoint: "tcp://$host:5557": nothing is known as $host; there is $ip and $port`,
		`pool: p, worker: {events: {endpoint: "tcp://$ipx:5557"}}`:            `nothing is known as $ipx`,
		`pool: p, worker: {events: {endpoint: "tcp://$pod:5557"}}`:            `nothing is known as $pod; there is $ip and $port`,
		`pool: p, worker: {events: {endpoint: push:, replay: "tcp://$IP:1"}}`: `workers.kubernetes.worker.events.replay: "tcp://$IP:1": nothing is known as $IP`,
		`pool: p, worker: {events: {endpoint: "tcp://10.0.0.1:5557"}}`:        `workers.kubernetes.worker.events.endpoint: "tcp://10.0.0.1:5557" would be that of all pods, whose events would count for each of them; write $ip for a pod's address`,
		`pool: p, worker: {events: {endpoint: "tcp://*:5557", bind: true}}`:   `workers.kubernetes.worker.events.bind: all pods would share one endpoint`,
		`pool: p, worker: {events: {endpoint: "tcp://$ip:http"}}`:             `"tcp://$ip:http" is not like tcp://host:port`,
		`pool: p, worker: {disagg: {engine_id: "$port"}}`:                     `workers.kubernetes.worker.disagg.engine_id: "$port": nothing is known as $port; there is $ip and $pod`,
		`pool: p, worker: {disagg: {zmq: "$ip:70000"}}`:                       `workers.kubernetes.worker.disagg.zmq: "$ip:70000" is not ip:port`,
		`pool: p, worker: {disagg: {receiver_init_ports: [1, 1]}}`:            `workers.kubernetes.worker.disagg.receiver_init_ports[1]: 1 is receiver_init_ports[0] already`,
		`pool: p, worker: {disagg: {receiver_alloc_ports: [70000]}}`:          `workers.kubernetes.worker.disagg.receiver_alloc_ports[0]: 70000 is not a port`,
	} {
		_, err := Parse("k.yaml", []byte("workers:\n  kubernetes: {"+text+"}\n"))
		if err == nil || strings.Contains(err.Error(), "\n") || !strings.HasPrefix(err.Error(), "k.yaml:2:") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got\n%v\nwant\n%s", text, err, want)
		}
	}
	for _, text := range []string{
		`pool: llama.3.1, namespace: team-a`,
		`pools: [a, b]`,
		`selector: {app.kubernetes.io/name: llm, tier: ""}, ports: [8000, 8001], rank_per_port: true`,
		`pool: p, rank_per_port: true, worker: {start_rank: 8, events: {endpoint: "tcp://$ip:5557", replay: "tcp://$ip:6557"}}`,
		`pool: p, worker: {engine: trtllm, events: {endpoint: "http://$ip:$port/kv_cache_events"}}`,
		`pool: p, worker: {events: {endpoint: push:}, disagg: {zmq: "$ip:14579", engine_id: kv-$pod, side_channel_host: $ip}}`,
		`pool: p, role_labels: [llm-d.ai/role, part]`,
		`pool: p, objectives: [llm-d.ai, inference.networking.x-k8s.io]`,
	} {
		if _, err := Parse("k.yaml", []byte("workers:\n  kubernetes: {"+text+"}\n")); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestProblemsOfASectionAreNamedWithinIt(t *testing.T) {
	k := DefaultKubernetes()
	k.Pools, k.Ports = []string{"A"}, []int{1}
	var got []string
	for _, p := range k.Problems() {
		got = append(got, p.Path)
	}
	if strings.Join(got, " ") != "ports pools[0]" {
		t.Errorf("problems with %q", got)
	}
}

// A worker described by another source is validated like one of the file.
func TestProblemsOfAWorker(t *testing.T) {
	for _, c := range []struct {
		change func(w *Worker)
		want   string
	}{
		{func(*Worker) {}, ""},
		{func(w *Worker) { w.Address = "[FD00::1]:8000" }, ""},
		{func(w *Worker) { w.Address = "" }, "needs an address"},
		{func(w *Worker) { w.Ranks = 1025 }, "ranks: 1025 must be at most 1024"},
		{func(w *Worker) { w.RankBy = "port" }, "rank_by: port needs ranks"},
		{func(w *Worker) { w.Engine = "x" }, `engine: "x" is not one of vllm, sglang, trtllm`},
		{func(w *Worker) { w.Speed = 0 }, "speed: 0 must be more than 0"},
		{func(w *Worker) { w.Events.Endpoint = "x" }, `events.endpoint: "x" is not like tcp://host:port`},
		{func(w *Worker) { w.Disagg.NotifyPort = 1 << 16 }, "disagg.notify_port: 65536 must be at most 65535"},
		{func(w *Worker) { w.Disagg.ZMQ = "x" }, `disagg.zmq: "x" is not ip:port`},
	} {
		w := defaultWorker()
		w.Address = "10.0.0.1:8000"
		c.change(&w)
		got := ""
		for _, p := range w.Problems() {
			got = strings.TrimPrefix(got+"\n"+strings.TrimPrefix(p.Path+": "+p.Message, ": "), "\n")
		}
		if got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
		if strings.HasPrefix(w.Address, "[") && w.Address != "[fd00::1]:8000" {
			t.Error(w.Address)
		}
	}
}

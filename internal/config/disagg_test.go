package config

import (
	"strings"
	"testing"
)

// A missing setting that the connector requires is an error at the start, and the settings
// for all workers serve as defaults.
func TestConnectorsNameWhatTheyMiss(t *testing.T) {
	const lmcache = "disagg: {connector: lmcache%s}\nworkers: {static: [{address: \"10.0.0.1:1\", role: decode%s}, {address: \"10.0.0.2:1\", role: prefill}]}\n"
	for name, c := range map[string]struct{ all, own, want string }{
		"none":           {"", "", "the connector lmcache needs receiver_host"},
		"half of it":     {"", ", disagg: {receiver_host: h, receiver_init_ports: [1]}", "receiver_alloc_ports of a decode worker"},
		"its own":        {"", ", disagg: {receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2]}", ""},
		"everybody's":    {", workers: {receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2]}", "", ""},
		"attempts":       {", attempts: 5, workers: {receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2]}", "", "longer than Envoy waits"},
		"no timeout":     {", timeout: 0s, workers: {receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2]}", "", "disagg.timeout"},
		"no such thing":  {", receiver: x", "", "unknown key"},
		"not an address": {"", ", disagg: {zmq: host, receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2]}", "not ip:port"},
	} {
		text := strings.Replace(strings.Replace(lmcache, "%s", c.all, 1), "%s", c.own, 1)
		_, err := Parse("kvlane.yaml", []byte(text))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	for connector, want := range map[string]string{"p2p-nccl": "zmq", "nixl-push": "engine_id", "smoke": "is not one of"} {
		_, err := Parse("kvlane.yaml", []byte("disagg: {connector: "+connector+"}\nworkers: {static: [{address: \"10.0.0.1:1\", role: prefill}]}\n"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", connector, err)
		}
	}
}

func TestAWorkersOwnSettingsWin(t *testing.T) {
	d := Disagg{Workers: WorkerDisagg{BootstrapPort: 1, ReceiverHost: "all", InitPorts: []int{1}, AllocPorts: []int{2}, HandshakePort: 3, NotifyPort: 4, SidePort: 5}}
	w := Worker{Disagg: WorkerDisagg{BootstrapPort: 9, ReceiverHost: "own", InitPorts: []int{7}, AllocPorts: []int{8}, SidePort: 6}}
	got := d.Of(&w)
	if got.BootstrapPort != 9 || got.ReceiverHost != "own" || got.InitPorts[0] != 7 || got.AllocPorts[0] != 8 || got.SidePort != 6 || got.HandshakePort != 3 || got.NotifyPort != 4 {
		t.Errorf("%+v", got)
	}
	if got = d.Of(&Worker{}); got.ReceiverHost != "all" || got.BootstrapPort != 1 {
		t.Errorf("%+v", got)
	}
}

func TestATemplatesSettingsAreFilledIn(t *testing.T) {
	for ip, zmq := range map[string]string{"10.0.0.1": "10.0.0.1:5", "fd00::1": "[fd00::1]:5"} {
		w := Worker{Events: Events{Endpoint: "tcp://$ip:5", Replay: "tcp://$ip:$port"}, Disagg: WorkerDisagg{ZMQ: "$ip:5", ReceiverHost: "$ip", EngineID: "e-$pod", SideHost: "$ip"}}
		w.Fill("p", ip, 5)
		if w.Address != zmq || w.Events.Endpoint != "tcp://"+zmq || w.Events.Replay != "tcp://"+zmq {
			t.Errorf("%+v", w)
		}
		if w := w.Disagg; w.ZMQ != zmq || w.ReceiverHost != ip || w.EngineID != "e-p" || w.SideHost != ip {
			t.Errorf("%+v", w)
		}
	}
}

// A model's pools may have their own rule; keys that it does not set have the general
// rule's values.
func TestAModelsOwnRule(t *testing.T) {
	c, err := Parse("kvlane.yaml", []byte(`models:
- {name: a, aliases: [b], adapters: [l], disagg: {k: 5, same_zone: true}}
- {name: c}
- {name: d, disagg: {mode: threshold, threshold: 0, local_below: 1}}
routing: {disagg: {k: 2, local_below: 64}}
`))
	if err != nil {
		t.Fatal(err)
	}
	of := c.Routing.DisaggOf
	if len(of) != 4 || of["a"] != of["b"] || of["a"] != of["l"] || of["a"].K != 5 || !of["a"].SameZone || of["a"].LocalBelow != 64 || of["a"].Mode != "cost" {
		t.Errorf("%+v", of)
	}
	if d := of["d"]; d == nil || d.Mode != "threshold" || d.Threshold != 0 || d.K != 2 || d.LocalBelow != 1 {
		t.Errorf("%+v", d)
	}
	for text, want := range map[string]string{
		"{k: 200}":       "kvlane.yaml:1:32: models[0].disagg.k: 200 is not within 0 to 100",
		"{mode: always}": `"always" is not one of`,
		"{factor: 2}":    "unknown key",
	} {
		_, err := Parse("kvlane.yaml", []byte("models: [{name: a, disagg: "+text+"}]\n"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

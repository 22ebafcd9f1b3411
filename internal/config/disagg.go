package config

import (
	"cmp"
	"fmt"
	"net"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/routing"
)

// Of returns the settings for a worker: its own, or those for all workers where unset. The addresses of a receiver are
// taken as a group from one of the two.
func (d *Disagg) Of(w *Worker) WorkerDisagg {
	own, all := w.Disagg, &d.Workers
	own.BootstrapPort = cmp.Or(own.BootstrapPort, all.BootstrapPort)
	own.HandshakePort = cmp.Or(own.HandshakePort, all.HandshakePort)
	own.NotifyPort = cmp.Or(own.NotifyPort, all.NotifyPort)
	own.SidePort = cmp.Or(own.SidePort, all.SidePort)
	if !own.receives() {
		own.ReceiverHost, own.InitPorts, own.AllocPorts, own.QueryPort = all.ReceiverHost, all.InitPorts, all.AllocPorts, all.QueryPort
	}
	return own
}

// Fill sets the address of a worker made from a template, and replaces '$pod', '$ip' and '$port' in its settings.
func (w *Worker) Fill(pod, ip string, port int) {
	host := ip
	if strings.Contains(ip, ":") {
		host = "[" + ip + "]"
	}
	w.Address = net.JoinHostPort(ip, strconv.Itoa(port))
	endpoint := strings.NewReplacer("$pod", pod, "$ip", host, "$port", strconv.Itoa(port))
	for _, s := range []*string{&w.Events.Endpoint, &w.Events.Replay, &w.Disagg.ZMQ} {
		*s = endpoint.Replace(*s)
	}
	name := strings.NewReplacer("$pod", pod, "$ip", ip)
	for _, s := range []*string{&w.Disagg.ReceiverHost, &w.Disagg.EngineID, &w.Disagg.SideHost} {
		*s = name.Replace(*s)
	}
}

// receives reports whether anything of an LMCache receiver is configured.
func (w *WorkerDisagg) receives() bool {
	return w.ReceiverHost != "" || len(w.InitPorts) > 0 || len(w.AllocPorts) > 0
}

// disaggNeeds are a connector's required settings, and the roles of the workers that need them.
var disaggNeeds = map[string]struct {
	roles map[string]bool
	what  string
	given func(w *WorkerDisagg) bool
	// own returns what must be unique to the worker.
	own func(w *WorkerDisagg) string
}{
	"lmcache": {map[string]bool{"decode": true}, "receiver_host, receiver_init_ports and receiver_alloc_ports",
		func(w *WorkerDisagg) bool {
			return w.ReceiverHost != "" && len(w.InitPorts) > 0 && len(w.AllocPorts) > 0
		},
		func(w *WorkerDisagg) string { return fmt.Sprint(w.ReceiverHost, " ", w.InitPorts) }},
	"p2p-nccl": {map[string]bool{"prefill": true, "decode": true}, "zmq", func(w *WorkerDisagg) bool { return w.ZMQ != "" },
		func(w *WorkerDisagg) string { return w.ZMQ }},
	"nixl-push": {map[string]bool{"prefill": true}, "engine_id", func(w *WorkerDisagg) bool { return w.EngineID != "" },
		func(w *WorkerDisagg) string { return w.EngineID }},
}

// over returns the general rule, overridden by the model's. Fields of both have the same keys.
func (r *Rule) over(general *routing.Disagg) *routing.Disagg {
	d := *general
	for f, own := range reflect.ValueOf(r).Elem().Fields() {
		if !own.IsNil() {
			to, _, _ := fieldByKey(reflect.ValueOf(&d).Elem(), f.Tag.Get("yaml"))
			to.Set(own.Elem().Convert(to.Type()))
		}
	}
	return &d
}

// modelRules sets the router's rules for models that have their own.
func (c *Config) modelRules(bad report) {
	for i := range c.Models {
		m := &c.Models[i]
		if m.Disagg == (Rule{}) {
			continue
		}
		rule := m.Disagg.over(&c.Routing.Disagg)
		for _, p := range rule.Problems() {
			bad(item("models", i)+".disagg."+p.Path, "%s", p.Text)
		}
		if c.Routing.DisaggOf == nil {
			c.Routing.DisaggOf = map[string]*routing.Disagg{}
		}
		for _, name := range m.names() {
			c.Routing.DisaggOf[name] = rule
		}
	}
}

func (c *Config) validateDisagg(bad report) {
	d := &c.Disagg
	if d.Connector == "" {
		return
	}
	bad.each([]wrong{
		{c.Routing.Disagg.Fallback && d.Connector == "sglang", "routing.disagg.fallback", "SGLang's prefill engines cannot decode"},
		{d.Timeout <= 0, "disagg.timeout", "must be more than 0"},
	})
	if total := d.Timeout.Std() * time.Duration(d.Attempts); c.Envoy.MessageTimeout > 0 && total > c.Envoy.MessageTimeout.Std() {
		bad("disagg.timeout", "%d attempts of %s take longer than Envoy waits (envoy.message_timeout %s)", d.Attempts, d.Timeout.Std(), c.Envoy.MessageTimeout.Std())
	}
	sites := c.sites(nil)
	for _, s := range sites {
		if lacks := c.lacks(s.Worker); lacks != "" {
			bad(s.path+".disagg", "%s", lacks)
		}
	}
	c.validateRoles(sites, bad)
}

func (w *WorkerDisagg) validate(bad report) {
	if w.ZMQ != "" {
		_, port, err := net.SplitHostPort(w.ZMQ)
		if n, not := strconv.Atoi(port); err != nil || not != nil || n < 1 || n > maxPort {
			bad("zmq", "%q is not ip:port", w.ZMQ)
		}
	}
	ports(bad, "receiver_init_ports", w.InitPorts)
	ports(bad, "receiver_alloc_ports", w.AllocPorts)
}

// lacks names the missing settings that the connector requires of a worker of this role, "" for none.
func (c *Config) lacks(w *Worker) string {
	need, ok := disaggNeeds[c.Disagg.Connector]
	if !ok || !need.roles[w.Role] {
		return ""
	}
	if settings := c.Disagg.Of(w); need.given(&settings) {
		return ""
	}
	return fmt.Sprintf("the connector %s needs %s of a %s worker", c.Disagg.Connector, need.what, w.Role)
}

// warnTemplate checks the template of Kubernetes' workers. Pods have their roles as labels,
// and annotations may supply what the template lacks.
func (c *Config) warnTemplate(note report) {
	if c.Workers.Kubernetes == nil {
		return
	}
	w := c.Workers.Kubernetes.Worker
	// Engines that are queried report their kind.
	if engine := ConnectorEngines[c.Disagg.Connector]; engine != "" && c.Workers.Kubernetes.NeverAsk && w.Engine != engine {
		note("workers.kubernetes.worker.engine", "is %s: the connector %s is of %s; each pod with a role has to say so", w.Engine, c.Disagg.Connector, engine)
	}
	for _, w.Role = range []string{"prefill", "decode"} {
		if lacks := c.lacks(&w); lacks != "" {
			note("workers.kubernetes.worker.disagg", "%s, which this template does not have: each such pod has to have it as annotations", lacks)
			return
		}
	}
}

package config

import (
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/routing"
)

// ConnectorEngines are the engines that speak a connector's protocol; "": any engine behind llm-d's sidecar.
var ConnectorEngines = map[string]string{
	"nixl": "vllm", "nixl-push": "vllm", "mooncake": "vllm", "p2p-nccl": "vllm", "moriio": "vllm", "moriio-write": "vllm", "lmcache": "vllm",
	"sharedstorage": "vllm", "sglang": "sglang", "trtllm": "trtllm", "trtllm-generation-first": "trtllm", "sidecar": "",
}

// sited is a worker of the file, or a template for workers, with its path.
type sited struct {
	*Worker

	path string
}

// sites returns the workers that are known before startup, so not those of Kubernetes. listed are those of
// workers.file, nil if it was not read.
func (c *Config) sites(listed []Worker) []sited {
	var out []sited
	for i := range c.Workers.Static {
		out = append(out, sited{&c.Workers.Static[i], item("workers.static", i)})
	}
	for i := range listed {
		out = append(out, sited{&listed[i], item("workers.file", i)})
	}
	for i := range c.Workers.DNS {
		out = append(out, sited{&c.Workers.DNS[i].Worker, item("workers.dns", i) + ".worker"})
	}
	return out
}

// fixed reports whether the configuration file lists all workers.
func (c *Config) fixed() bool { return c.Workers.File == "" && c.Workers.Kubernetes == nil }

// splits reports whether requests may be split: there is a connector, and some rule is enabled.
func (c *Config) splits() bool {
	if c.Disagg.Connector == "" {
		return false
	}
	if c.Routing.Disagg.Mode != routing.ModeOff {
		return true
	}
	return slices.ContainsFunc(c.Models, func(m Model) bool { return m.Disagg.Mode != nil && *m.Disagg.Mode != string(routing.ModeOff) })
}

// rolePool is the workers of a model by role.
type rolePool struct {
	model string            // "" for workers that serve any
	first map[string]string // path of the first worker of each role
}

// rolePools returns the pools of the models that workers list, sorted by model; workers
// that list none belong to all of them, or to a pool of their own if no worker lists any.
func rolePools(sites []sited) []rolePool {
	var names []string
	for _, s := range sites {
		names = append(names, s.Models...)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) == 0 && len(sites) > 0 {
		names = append(names, "")
	}
	var out []rolePool
	for _, name := range names {
		p := rolePool{name, map[string]string{}}
		for _, s := range sites {
			if _, seen := p.first[s.Role]; !seen && (len(s.Models) == 0 || slices.Contains(s.Models, name)) {
				p.first[s.Role] = s.path
			}
		}
		out = append(out, p)
	}
	return out
}

func (p *rolePool) who() string {
	if p.model == "" {
		return "workers of any model"
	}
	return "workers of the model " + strconv.Quote(p.model)
}

// validateRoles finds pools that cannot serve anything, and engines that do not speak the connector's protocol.
func (c *Config) validateRoles(sites []sited, bad report) {
	c.unsplitSGLang(sites, bad)
	if !c.splits() {
		return
	}
	c.wrongEngines(sites, bad)
	c.sharedIdentities(sites, bad)
	if !c.fixed() {
		return
	}
	for _, p := range rolePools(sites) {
		prefill, someP := p.first["prefill"]
		decode, someD := p.first["decode"]
		_, someB := p.first["both"]
		switch {
		case someP && !someD && !someB:
			bad(prefill+".role", "there are only prefill workers among the %s: none would decode", p.who())
		case someD && !someP && c.Disagg.Connector == "sglang":
			bad(decode+".role", "there is no prefill worker among the %s, and SGLang's decode engines compute no prompts", p.who())
		}
	}
}

// sharedIdentities finds workers that a peer engine cannot distinguish: it would send all blocks to one of them.
func (c *Config) sharedIdentities(sites []sited, bad report) {
	need, ok := disaggNeeds[c.Disagg.Connector]
	if !ok {
		return
	}
	first := map[string]string{}
	for _, s := range sites {
		settings := c.Disagg.Of(s.Worker)
		if !need.roles[s.Role] || !need.given(&settings) {
			continue
		}
		own := need.own(&settings)
		if before, taken := first[own]; taken {
			bad(s.path+".disagg", "%s of this worker are those of %s: the connector %s distinguishes workers by them", need.what, before, c.Disagg.Connector)
			continue
		}
		first[own] = s.path
	}
}

// unsplitSGLang finds rules that would send whole prompts to SGLang decode engines, which do not compute prompts.
func (c *Config) unsplitSGLang(sites []sited, bad report) {
	if c.Disagg.Connector != "sglang" || !slices.ContainsFunc(sites, func(s sited) bool { return s.Role == "decode" }) {
		return
	}
	const why = "off: SGLang's decode engines compute no prompts, so their requests have to be split"
	if c.Routing.Disagg.Mode == routing.ModeOff {
		bad("routing.disagg.mode", why)
	}
	for i := range c.Models {
		if own := c.Models[i].Disagg.Mode; own != nil && *own == string(routing.ModeOff) {
			bad(item("models", i)+".disagg.mode", why)
		}
	}
}

func (c *Config) wrongEngines(sites []sited, tell report) {
	engine := ConnectorEngines[c.Disagg.Connector]
	for _, s := range sites {
		if engine != "" && s.Role != "both" && s.Engine != engine {
			tell(s.path+".engine", "is %s: the connector %s is of %s", s.Engine, c.Disagg.Connector, engine)
		}
	}
}

// warnDisagg reports settings of prefill and decode that are valid but probably a mistake.
func (c *Config) warnDisagg(sites []sited, note report) {
	c.warnTemplate(note)
	c.warnRoles(sites, note)
	host, _, err := net.SplitHostPort(c.Envoy.Prefill)
	unix := strings.HasPrefix(c.Envoy.Prefill, "unix:")
	if ip := net.ParseIP(host); err == nil && !unix && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		note("envoy.prefill", "%s can be reached from other machines, whose clients could choose workers without Kvlane: use a Unix socket or 127.0.0.1", c.Envoy.Prefill)
	}
	d := &c.Disagg
	if d.Connector == "" {
		return
	}
	note.each([]wrong{
		{!c.splits(), "routing.disagg.mode", "off: the connector and the roles are not used"},
		{d.FirstToken == "append" && d.Connector != "lmcache", "disagg.first_token", "only the connector lmcache looks at it"},
		{d.Usage == UsageOfPrefill && d.Connector == "sidecar", "disagg.usage", "has no effect: the sidecar, not Kvlane, runs the prefill leg"},
	})
	zones := c.Routing.Disagg.SameZone
	path := "routing.disagg.same_zone"
	for i := range c.Models {
		if own := c.Models[i].Disagg.SameZone; own != nil && *own && !zones {
			zones, path = true, item("models", i)+".disagg.same_zone"
		}
	}
	if zones && c.Workers.Kubernetes == nil {
		var without []string
		for _, s := range sites {
			if s.Role != "both" && s.Labels["zone"] == "" {
				without = append(without, s.path)
			}
		}
		if len(without) > 0 {
			note(path, "%s: no label 'zone', so no other worker is in the same zone", strings.Join(without[:min(3, len(without))], ", "))
		}
	}
}

// warnRoles reports unused roles, and connectors without any worker that has a role.
func (c *Config) warnRoles(sites []sited, note report) {
	for _, s := range sites {
		if c.Disagg.Connector == "" && s.Role != "both" {
			note(s.path+".role", "%s, but there is no disagg.connector: roles are not used", s.Role)
			return
		}
	}
	if !c.splits() {
		return
	}
	c.wrongEngines(slices.DeleteFunc(slices.Clone(sites), func(s sited) bool { return !strings.HasPrefix(s.path, "workers.file") }), note)
	if c.Workers.Kubernetes != nil {
		return
	}
	for _, p := range rolePools(sites) {
		_, someP := p.first["prefill"]
		_, someD := p.first["decode"]
		switch {
		case !someP && !someD:
			note("disagg.connector", "the %s have no roles: their requests are not split", p.who())
		case !someP:
			note("disagg.connector", "there is no prefill worker among the %s: their requests are not split", p.who())
		case !someD && p.first["both"] == "" && !c.fixed():
			note("disagg.connector", "there are only prefill workers among the %s: none would decode", p.who())
		}
	}
}

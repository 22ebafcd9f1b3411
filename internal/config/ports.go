package config

import (
	"net"
	"slices"
	"strconv"
	"strings"
)

const maxPort = 65535

// ports looks at each of a list.
func ports(bad report, path string, list []int) {
	for i, p := range list {
		at := path + "[" + strconv.Itoa(i) + "]"
		if p < 1 || p > maxPort {
			bad(at, "%d is not a port", p)
		}
		if first := slices.Index(list, p); first < i {
			bad(at, "%d is %s[%d] already", p, path[strings.LastIndexByte(path, '.')+1:], first)
		}
	}
}

// span is the ports that the ranks of a worker have, one each from first on, for one
// of its sockets.
type span struct {
	host        string
	first, last int
}

func (s span) meets(o span) bool {
	return sameHost(s.host, o.host) && s.first <= o.last && o.first <= s.last
}

// sameHost says whether two sockets may be on one address: any stands for all.
func sameHost(a, b string) bool {
	wild := func(h string) bool { return h == "" || h == "*" || h == "0.0.0.0" || h == "::" }
	return a == b || wild(a) || wild(b)
}

// spanOf reads tcp://host:port; false for what has no ports of its own.
func (w *Worker) spanOf(endpoint string) (span, bool) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return span{}, false
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return span{}, false
	}
	first, err := strconv.Atoi(port)
	if err != nil {
		return span{}, false
	}
	return span{host, first, first + max(w.Ranks, 1) - 1}, true
}

// validateEvents looks at the ports of the ranks' sockets.
func (w *Worker) validateEvents(path string, bad report) {
	for _, e := range []struct{ key, value string }{{"endpoint", w.Events.Endpoint}, {"replay", w.Events.Replay}} {
		s, ok := w.spanOf(e.value)
		switch {
		case !ok:
		case s.first < 1 || s.first > maxPort:
			bad(path+"."+e.key, "%q: port must be 1 to %d", e.value, maxPort)
		case s.last > maxPort:
			bad(path+"."+e.key, "rank %d would be at port %d: ports end at %d", w.Ranks-1, s.last, maxPort)
		}
	}
	if w.Events.Replay != "" && w.Events.Replay == w.Events.Endpoint {
		bad(path+".replay", "is the same as endpoint: an engine has two sockets")
		return
	}
	events, ok := w.spanOf(w.Events.Endpoint)
	replay, both := w.spanOf(w.Events.Replay)
	if ok && both && events.meets(replay) {
		bad(path+".replay", "the ports %d to %d of the ranks meet those of endpoint, %d to %d", replay.first, replay.last, events.first, events.last)
	}
}

// uniqueEvents finds workers whose events would come from the same place.
func uniqueEvents(path string, list []Worker, bad report) {
	for i := range list {
		w := &list[i]
		mine, ok := w.spanOf(w.Events.Endpoint)
		for first := range i {
			o := &list[first]
			theirs, also := o.spanOf(o.Events.Endpoint)
			same := w.Events.Endpoint == o.Events.Endpoint && w.Events.Endpoint != "" && w.Events.Endpoint != PushEndpoint
			if same || ok && also && mine.meets(theirs) {
				bad(path+"["+strconv.Itoa(i)+"].events.endpoint", "%q is taken by %s[%d]: its events would count for both", w.Events.Endpoint, path, first)
				break
			}
		}
	}
}

// validatePorts finds listeners that get in each other's way, and ports that nobody
// would know.
func (c *Config) validatePorts(bad report) {
	type listener struct {
		path, address string
		random        bool // port 0 is of use: the log tells the port
	}
	var seen []listener
	for _, l := range []listener{
		{"listen.address", c.Listen.Address, false}, {"listen.health", c.Listen.Health, false}, {"admin.address", c.Admin.Address, true},
		{"envoy.ingress", c.Envoy.Ingress, false}, {"envoy.admin", c.Envoy.Admin, false}, {"envoy.prefill", c.Envoy.Prefill, false},
	} {
		host, port, err := net.SplitHostPort(l.address)
		if err != nil || strings.HasPrefix(l.address, "unix:") {
			continue
		}
		if port == "0" {
			if !l.random {
				bad(l.path, "%q: port 0 means any port, which nobody would know", l.address)
			}
			continue
		}
		for _, o := range seen {
			if otherHost, otherPort, _ := net.SplitHostPort(o.address); otherPort == port && sameHost(host, otherHost) {
				bad(l.path, "%q is taken by %s (%q)", l.address, o.path, o.address)
				break
			}
		}
		seen = append(seen, l)
	}
}

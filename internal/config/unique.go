package config

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
)

const maxPort = 65535

// ports checks each port of a list.
func ports(bad report, path string, list []int) {
	for i, p := range list {
		if p < 1 || p > maxPort {
			bad(item(path, i), "%d is not a port", p)
		}
		if first := slices.Index(list, p); first < i {
			bad(item(path, i), "%d is %s already", p, item(path, first))
		}
	}
}

// span is the range of ports of one socket for all ranks of a worker.
type span struct {
	host        string
	first, last int
}

// meets reports whether two spans share a port. The zero span has no ports.
func (s span) meets(o span) bool {
	return s.last > 0 && o.last > 0 && s.first <= o.last && o.first <= s.last && sameHost(s.host, o.host)
}

// sameHost reports whether two sockets may have the same address; wildcards match all.
func sameHost(a, b string) bool { return a == b || wild(a) || wild(b) }

func wild(host string) bool { return host == "" || host == "*" || host == "0.0.0.0" || host == "::" }

// spanOf reads host:port, the address of rank 0; it returns the zero span for anything else.
func spanOf(address string, ranks int) span {
	host, port, err := net.SplitHostPort(address)
	first, notNumber := strconv.Atoi(port)
	if err != nil || notNumber != nil {
		return span{}
	}
	return span{host, first, first + max(ranks, 1) - 1}
}

// events returns the ports of an event endpoint; the zero span if it is not tcp://host:port.
func (w *Worker) events(endpoint string) span {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return span{}
	}
	return spanOf(address, w.Ranks)
}

// serving returns the ports of the engine's API.
func (w *Worker) serving() span {
	if w.RankBy == "port" {
		return spanOf(w.Address, w.Ranks)
	}
	return spanOf(w.Address, 1)
}

// validateRankPorts checks the ports of the ranks' sockets.
func (w *Worker) validateRankPorts(bad report) {
	for _, e := range w.Events.sockets() {
		s := w.events(e.value)
		switch {
		case s == span{}:
		case s.first < 1 || s.first > maxPort:
			bad(e.key, "%q: port must be 1 to %d", e.value, maxPort)
		case s.last > maxPort:
			bad(e.key, "rank %d would be at port %d: ports end at %d", w.Ranks-1, s.last, maxPort)
		}
	}
	if w.Events.Replay != "" && w.Events.Replay == w.Events.Endpoint {
		bad("replay", "is the same as endpoint: an engine has two sockets")
	} else if events, replay := w.events(w.Events.Endpoint), w.events(w.Events.Replay); events.meets(replay) {
		bad("replay", "the ports %d to %d of the ranks overlap those of endpoint, %d to %d", replay.first, replay.last, events.first, events.last)
	}
}

// spans are the ports of a list's workers.
type spans struct {
	list   []span           // by worker
	byHost map[string][]int // workers; those of wildcards at ""
}

// add adds the ports of the next worker, and returns the first worker that has one of them, -1 for none.
func (all *spans) add(s span) (first int, other span) {
	if all.byHost == nil {
		all.byHost = map[string][]int{}
	}
	candidates := [][]int{all.byHost[s.host], all.byHost[""]}
	if wild(s.host) {
		s.host, candidates = "", slices.Collect(maps.Values(all.byHost))
	}
	first = -1
	for _, of := range candidates {
		if at := slices.IndexFunc(of, func(i int) bool { return s.meets(all.list[i]) }); at >= 0 && (first < 0 || of[at] < first) {
			first, other = of[at], all.list[of[at]]
		}
	}
	if s.last > 0 {
		all.byHost[s.host] = append(all.byHost[s.host], len(all.list))
	}
	all.list = append(all.list, s)
	return first, other
}

// uniqueWorkers finds workers that share a name, a port, or a source of events. A worker
// without a name gets its address as its name.
func uniqueWorkers(path string, list []Worker, bad report) {
	names, endpoints := map[string]int{}, map[string]int{}
	var serving, events spans
	for i := range list {
		w := &list[i]
		w.Name = cmp.Or(w.Name, w.Address)
		if first, taken := names[w.Name]; !taken {
			names[w.Name] = i
		} else if w.Name != "" {
			bad(item(path, i)+".name", "%q is taken by %s", w.Name, item(path, first))
		}
		here := w.serving()
		if o, other := serving.add(here); o >= 0 && list[o].Address == w.Address {
			bad(item(path, i)+".address", "%q is taken by %s", w.Address, item(path, o))
		} else if o >= 0 {
			bad(item(path, i)+".address", "the ports %d to %d of the ranks overlap those of %s, %d to %d: give each worker ports of its own",
				here.first, here.last, item(path, o), other.first, other.last)
		}
		at := w.events(w.Events.Endpoint)
		o, _ := events.add(at)
		if first, taken := endpoints[w.Events.Endpoint]; !taken {
			endpoints[w.Events.Endpoint] = i
		} else if at == (span{}) && w.Events.Endpoint != "" && w.Events.Endpoint != PushEndpoint {
			o = first
		}
		if o >= 0 {
			bad(item(path, i)+".events.endpoint", "%q is taken by %s: its events would count for both", w.Events.Endpoint, item(path, o))
		}
	}
}

package config

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// shortestEvery is the shortest time between two questions to a name server.
const shortestEvery = Duration(100 * time.Millisecond)

// shortestMessage is the shortest time that Envoy may wait for Kvlane. Envoy takes 0 for
// no time at all, not for no limit.
const shortestMessage = Duration(time.Second)

// nameRunes are what a worker's name is made of: it stands in logs, metrics and headers.
const nameRunes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:/-[]%@"

// report records a problem at a dotted path.
type report func(path, format string, args ...any)

func (c *Config) validate(bad report) {
	endpoint(bad, "listen.address", c.Listen.Address, true)
	if c.Listen.Health != "" {
		endpoint(bad, "listen.health", c.Listen.Health, false)
	}
	if (c.Listen.CertFile == "") != (c.Listen.KeyFile == "") {
		bad("listen", "cert_file and key_file go together")
	}
	endpoint(bad, "admin.address", c.Admin.Address, false)
	listens(bad, "envoy.ingress", c.Envoy.Ingress, false)
	listens(bad, "envoy.admin", c.Envoy.Admin, false)
	if c.Envoy.Prefill != "" {
		listens(bad, "envoy.prefill", c.Envoy.Prefill, true)
	}
	if c.Envoy.MessageTimeout < shortestMessage {
		bad("envoy.message_timeout", "must be at least %s: Envoy goes on without Kvlane after it (300s by default)", shortestMessage.Std())
	}
	if c.Envoy.StallTimeout < shortestMessage {
		bad("envoy.stall_timeout", "must be at least %s: less fails open on a busy machine (2s by default)", shortestMessage.Std())
	}
	if c.Envoy.UploadTimeout < shortestMessage {
		bad("envoy.upload_timeout", "must be at least %s (1m by default)", shortestMessage.Std())
	}
	if c.Envoy.MaxHeap < 64<<20 {
		bad("envoy.max_heap", "%d bytes: must be at least 64MiB (1536MiB by default)", c.Envoy.MaxHeap)
	}
	if c.Limits.MaxBody < 1<<10 || c.Limits.MaxBody > 1<<30 {
		bad("limits.max_body", "%d bytes: must be 1KiB to 1GiB", c.Limits.MaxBody)
	}
	names := map[string]string{}
	for i := range c.Models {
		c.Models[i].validate("models["+strconv.Itoa(i)+"]", names, bad)
	}
	for i := range c.Workers.Static {
		c.Workers.Static[i].validate("workers.static["+strconv.Itoa(i)+"]", bad)
	}
	uniqueWorkers("workers.static", c.Workers.Static, bad)
	uniqueEvents("workers.static", c.Workers.Static, bad)
	for i, d := range c.Workers.DNS {
		path := "workers.dns[" + strconv.Itoa(i) + "]"
		if d.Name == "" {
			bad(path, "needs a name")
		}
		if d.Port == 0 {
			bad(path, "needs a port")
		}
		if d.Every < shortestEvery {
			bad(path+".every", "must be at least %s", shortestEvery.Std())
		}
		if d.Worker.Address != "" {
			bad(path+".worker.address", "is filled in from DNS; leave it out")
		}
		d.Worker.lastPort(path+".worker", d.Port, bad)
		d.Worker.validateCommon(path+".worker", bad)
		d.Worker.placeholders(path+".worker", bad, "$ip")
	}
	if k := c.Workers.Kubernetes; k != nil {
		k.validate("workers.kubernetes", bad)
	}
	for _, p := range c.Routing.Problems() {
		bad("routing."+p.Path, "%s", p.Text)
	}
	c.modelRules(bad)
	for i, name := range c.Routing.Headers {
		name = strings.ToLower(name) // as Envoy hands headers over
		c.Routing.Headers[i] = name
		if name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
			bad("routing.conversation_headers["+strconv.Itoa(i)+"]", "%q is no name of a header", name)
		}
	}
	c.Routing.Wait.validate("routing.wait", c.Envoy.MessageTimeout, bad)
	c.validateDisagg(bad)
	if c.Index.MaxBytes < 1<<20 {
		bad("index.max_bytes", "%d bytes: must be at least 1MiB", c.Index.MaxBytes)
	}
	if c.Index.Key != "" && c.Index.KeyFile != "" {
		bad("index.key_file", "not together with index.key")
	}
	c.Index.Peers.validate("index.peers", c.Index.Key+c.Index.KeyFile, bad)
	c.validatePorts(bad)
	if e := c.Workers.Health.Every; e > 0 && e < shortestEvery {
		bad("workers.health.every", "%s: must be 0 (no checks) or at least %s", e.Std(), shortestEvery.Std())
	}
	if c.Workers.Health.Every > 0 && c.Workers.Health.Timeout == 0 {
		bad("workers.health.timeout", "0 would fail every check")
	}
}

func (m *Model) validate(path string, names map[string]string, bad report) {
	if m.Name == "" {
		bad(path, "needs a name")
	}
	for _, n := range slices.Concat([]string{m.Name}, m.Aliases, m.Adapters) {
		if other, taken := names[n]; taken && n != "" {
			bad(path, "name %q is taken by %s", n, other)
		}
		names[n] = path
	}
	if m.Tokenizer == "" && m.Check.Renderer == "" && (m.HandIDs || m.ChatTemplate != "") {
		bad(path, "hand_ids and chat_template need a tokenizer")
	}
}

func (w *Worker) validate(path string, bad report) {
	if w.Address == "" {
		bad(path, "needs an address")
	} else if a, err := netip.ParseAddrPort(w.Address); err != nil {
		bad(path+".address", "%q is not ip:port (Envoy needs an IP address; for names use workers.dns)", w.Address)
	} else if a.Port() == 0 {
		bad(path+".address", "%q: an engine has no port 0", w.Address)
	} else if !w.lastPort(path, int(a.Port()), bad) {
		w.Address = a.String() // as Envoy writes the endpoint that served
	}
	w.validateCommon(path, bad)
}

// lastPort reports a rank that would be at a port beyond the last.
func (w *Worker) lastPort(path string, first int, bad report) (beyond bool) {
	last := first + w.Ranks - 1
	if w.RankBy != "port" || last <= maxPort {
		return false
	}
	bad(path+".ranks", "rank %d would be at port %d: ports end at %d", w.Ranks-1, last, maxPort)
	return true
}

func (w *Worker) validateCommon(path string, bad report) {
	if i := strings.IndexFunc(w.Name, func(r rune) bool { return !strings.ContainsRune(nameRunes, r) }); i >= 0 {
		bad(path+".name", "%q: only letters, digits and any of . _ : / - [ ] %% @ may be in a name", w.Name)
	}
	w.validateEvents(path+".events", bad)
	w.Disagg.validate(path+".disagg", bad)
	if w.RankBy == "port" && w.Ranks == 0 {
		bad(path+".rank_by", "port needs ranks")
	}
	if w.StartRank > 0 && w.Ranks == 0 {
		bad(path+".start_rank", "needs ranks")
	}
	if w.Events.Bind && !strings.HasPrefix(w.Events.Endpoint, "tcp://") && !strings.HasPrefix(w.Events.Endpoint, "ipc://") {
		bad(path+".events.bind", "needs an endpoint tcp://address:port or ipc://path")
	}
	for _, e := range []struct{ key, value string }{{"endpoint", w.Events.Endpoint}, {"replay", w.Events.Replay}} {
		if e.value == "" || e.value == PushEndpoint && e.key == "endpoint" {
			continue
		}
		scheme, rest, ok := strings.Cut(e.value, "://")
		switch {
		case !ok || rest == "":
			bad(path+".events."+e.key, "%q is not like tcp://host:port", e.value)
		case scheme == "tcp":
			// A template's port may be '$port'.
			host, port, err := net.SplitHostPort(rest)
			if err != nil || strings.Trim(port, "0123456789") != "" && !strings.Contains(port, "$") {
				bad(path+".events."+e.key, "%q is not like tcp://host:port", e.value)
			} else if host == "*" && !w.Events.Bind {
				bad(path+".events."+e.key, "%q is where an engine binds; name the engine's address instead of *", e.value)
			}
		case scheme != "ipc" && scheme != "http" && scheme != "https":
			bad(path+".events."+e.key, "scheme %q is not tcp, ipc or http, and it is not 'push:'", scheme)
		}
	}
}

func uniqueWorkers(path string, list []Worker, bad report) {
	names, addresses := map[string]int{}, map[string]int{}
	for i := range list {
		w := &list[i]
		if w.Name == "" {
			w.Name = w.Address
		}
		at := path + "[" + strconv.Itoa(i) + "]"
		if first, taken := names[w.Name]; taken {
			bad(at+".name", "%q is taken by %s[%d]", w.Name, path, first)
		} else {
			names[w.Name] = i
		}
		if first, taken := addresses[w.Address]; taken && w.Address != "" {
			bad(at+".address", "%q is taken by %s[%d]", w.Address, path, first)
		} else {
			addresses[w.Address] = i
		}
	}
}

// listens checks where Envoy shall listen: it resolves no names.
func listens(bad report, path, s string, unix bool) {
	endpoint(bad, path, s, unix)
	if host, _, err := net.SplitHostPort(s); err == nil && host != "" && !strings.HasPrefix(s, "unix:") && net.ParseIP(host) == nil {
		bad(path, "%q: Envoy listens on an IP address, not on a name (all of them: 0.0.0.0 or [::])", s)
	}
}

func endpoint(bad report, path, s string, unix bool) {
	if rest, ok := strings.CutPrefix(s, "unix:"); ok && unix {
		if rest == "" {
			bad(path, "unix: needs a path")
		} else if len(rest) > 107 {
			bad(path, "path of %d bytes: a Unix socket's path holds 107", len(rest))
		}
		return
	}
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		want := "host:port"
		if unix {
			want += " or unix:/path"
		}
		bad(path, "%q is not %s", s, want)
		return
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		bad(path, "%q: port must be 0 to 65535", s)
	}
}

package config

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/hub"
	"github.com/kvlane/kvlane/routing"
)

// shortestEvery is the shortest interval of DNS queries.
const shortestEvery = Duration(100 * time.Millisecond)

// nameRunes are the characters allowed in a worker's name, which is part of logs, metrics and headers.
const nameRunes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:/-[]%@"

// servedPath are the entries of envoy.paths.
var servedPath = regexp.MustCompile(`^/[A-Za-z0-9._~/-]*\*?$`)

func (c *Config) validate(bad report) {
	c.validateListeners(bad)
	c.validateBounds(bad)
	names := map[string]string{}
	for i := range c.Models {
		c.Models[i].validate(item("models", i), names, bad)
	}
	c.validateWorkers(bad)
	c.validateRouting(bad)
	c.validateFlow(bad.under("flow"))
	c.validateSLO(bad)
	c.validateDisagg(bad)
	c.Index.validate(bad.under("index"))
	c.validateFleet(bad.under("fleet"))
}

func (c *Config) validateListeners(bad report) {
	l, e := &c.Listen, &c.Envoy
	socket := strings.HasPrefix(l.Address, "unix:")
	all := len(e.CertFile) * len(e.KeyFile) * len(e.CAFile) * len(e.ServerName)
	bad.each([]wrong{
		{(l.CertFile == "") != (l.KeyFile == ""), "listen", "cert_file and key_file go together"},
		{all == 0 && e.CertFile+e.KeyFile+e.CAFile+e.ServerName != "", "envoy", "client_cert_file, client_key_file, ca_file and server_name go together"},
		{socket && l.ClientCA != "", "listen.client_ca_file", "a Unix socket has no TLS: its folder's permissions decide who connects"},
		{!socket && l.ClientCA != "" && l.CertFile == "", "listen.client_ca_file", "needs cert_file: clients that authenticate themselves must know whom they speak to"},
		{socket && l.ClientCA == "" && e.CertFile != "", "envoy.client_cert_file", "a Unix socket has no TLS"},
		{len(e.Paths) == 0, "envoy.paths", "no path is served; '/*' serves every path"},
	})
	var seen []listener
	for _, l := range c.listeners() {
		if l.address != "" || l.required {
			l.validate(seen, bad)
			seen = append(seen, l)
		}
	}
	for i, path := range c.Envoy.Paths {
		if path != "default" && !servedPath.MatchString(path) {
			bad(item("envoy.paths", i), "%q is neither 'default' nor a path such as /v1/models or /v1/models/*", path)
		}
	}
	for i, address := range c.Envoy.Replicas {
		if host, port, err := net.SplitHostPort(address); err != nil || host == "" {
			bad(item("envoy.replicas", i), "%q is not host:port", address)
		} else if !isPort(port) {
			bad(item("envoy.replicas", i), "%q: port must be 1 to %d", address, maxPort)
		}
	}
}

// validateBounds checks bounds with units, which jsonschema tags cannot express.
func (c *Config) validateBounds(bad report) {
	const least = Duration(time.Second) // Envoy takes 0 as no time at all, not as no limit
	e, h := &c.Envoy, &c.Workers.Health
	bad.each([]wrong{
		{e.MessageTimeout.Std() > time.Hour, "envoy.message_timeout", "must be at most 1h: Envoy accepts no longer one"},
		{e.MessageTimeout < least, "envoy.message_timeout", "must be at least 1s: Envoy goes on without Kvlane after it (300s by default)"},
		{e.StallTimeout < least, "envoy.stall_timeout", "must be at least 1s: less fails open on a busy machine (2s by default)"},
		{e.UploadTimeout < least, "envoy.upload_timeout", "must be at least 1s (1m by default)"},
		{h.Every > 0 && h.Every < shortestEvery, "workers.health.every", fmt.Sprintf("%s: must be 0 (no checks) or at least %s", h.Every.Std(), shortestEvery.Std())},
		{h.Every > 0 && h.Timeout == 0, "workers.health.timeout", "0 would fail every check"},
	})
	for _, b := range []struct {
		path            string
		value, min, max Bytes
		want            string
	}{
		{"envoy.max_heap", c.Envoy.MaxHeap, 64 << 20, 1 << 62, "at least 64MiB (1536MiB by default)"},
		{"limits.max_body", c.Limits.MaxBody, 1 << 10, 1 << 30, "1KiB to 1GiB"},
		{"index.max_bytes", c.Index.MaxBytes, 1 << 20, 1 << 62, "at least 1MiB"},
	} {
		if b.value < b.min || b.value > b.max {
			bad(b.path, "%d bytes: must be %s", b.value, b.want)
		}
	}
}

func (c *Config) validateWorkers(bad report) {
	for i := range c.Workers.Static {
		c.Workers.Static[i].validate(bad.under(item("workers.static", i)))
	}
	uniqueWorkers("workers.static", c.Workers.Static, bad)
	for i := range c.Workers.DNS {
		c.Workers.DNS[i].validate(bad.under(item("workers.dns", i)))
	}
	if k := c.Workers.Kubernetes; k != nil {
		k.validate(bad.under("workers.kubernetes"))
	}
}

func (d *DNS) validate(bad report) {
	if d.Name == "" {
		bad("", "needs a %s", missing("name"))
	}
	if d.Port == 0 {
		bad("", "needs a %s", missing("port"))
	}
	bad.each([]wrong{
		{d.Every < shortestEvery, "every", "must be at least " + shortestEvery.Std().String()},
		{d.Worker.Address != "", "worker.address", "is filled in from DNS; leave it out"},
	})
	bad = bad.under("worker")
	d.Worker.lastPort(d.Port, bad)
	d.Worker.validateCommon(bad)
	d.Worker.placeholders(bad, "$ip")
}

var mediaHost = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]+)?$`)

// needed are headers of requests that cannot name a tenant: engines, Envoy and Kvlane use them.
var needed = regexp.MustCompile(`^(host|authorization|(x-)?api-key|(proxy|content|accept|transfer|sec)-.*|accept|te|trailer|connection|keep-alive|upgrade|expect|cookie|` +
	`x-request-id|traceparent|tracestate|baggage|x-(envoy|data-parallel|prefiller|override)-.*|x-kvlane-(endpoint|pin|exclude|priority)|x-gateway-destination-.*|x-(gateway|llm-d)-inference-objective|x-slo-ttft-ms)$`)

func (c *Config) validateRouting(bad report) {
	for _, p := range c.Routing.Problems() {
		bad("routing."+p.Path, "%s", p.Text)
	}
	c.modelRules(bad)
	for i, name := range c.Routing.Shadow {
		if _, known := routing.Preset(name); !known {
			bad(item("routing.shadow", i), "%s", noPreset(name))
		} else if slices.Contains(c.Routing.Shadow[:i], name) {
			bad(item("routing.shadow", i), "%q is there twice", name)
		}
	}
	for i := range c.Routing.Headers {
		headerName(item("routing.conversation_headers", i), &c.Routing.Headers[i], bad)
	}
	for i, host := range c.Limits.MediaURLs {
		if !mediaHost.MatchString(host) {
			bad(item("limits.media_urls", i), "%q is neither any, data, nor a host in lower case", host)
		}
	}
	for path, name := range map[string]*string{"tenants.salt_header": &c.Tenants.SaltHeader, "tenants.header": &c.Tenants.Header} {
		if *name != "" {
			headerName(path, name, bad)
		}
		if needed.MatchString(*name) {
			bad(path, "%q is removed before the engine, which needs it, or Kvlane and Envoy use it: let the gateway set a header for the tenant alone (for API keys: flow.fairness: api_key)", *name)
		}
	}
	w, shadows := &c.Routing.Wait, len(c.Routing.Shadow)
	bad.each([]wrong{
		{shadows > 4, "routing.shadow", fmt.Sprintf("%d presets: at most 4", shadows)},
		{shadows > 0 && c.Explain.Keep == 0, "routing.shadow", "needs explain.keep above 0"},
		{w.Requests > 0 && w.Timeout <= 0, "routing.wait.timeout", "must be more than 0"},
		{w.Requests > 0 && w.Timeout >= c.Envoy.MessageTimeout, "routing.wait.timeout",
			fmt.Sprintf("%s: Envoy waits for %s only (envoy.message_timeout)", w.Timeout.Std(), c.Envoy.MessageTimeout.Std())},
	})
}

// headerName changes the name of a header to lower case, as Envoy sends it.
func headerName(path string, name *string, bad report) {
	*name = strings.ToLower(*name)
	if *name == "" || strings.Trim(*name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
		bad(path, "%q is not the name of a header", *name)
	}
}

func (i *Index) validate(bad report) {
	for _, a := range i.Peers.Addresses {
		if !isHostPort(a) {
			bad("peers.addresses", "%q is not host:port", a)
		}
	}
	peers := len(i.Peers.Addresses) > 0
	bad.each([]wrong{
		{i.Key != "" && i.KeyFile != "", "key_file", "not together with index.key"},
		{peers && i.Key+i.KeyFile == "", "peers", "needs index.key or index.key_file: replicas with different keys cannot use each other's index"},
		{peers && i.Peers.Timeout <= 0, "peers.timeout", "must be more than 0"},
	})
}

var tokenizerLock = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

func (m *Model) validate(path string, names map[string]string, bad report) {
	if m.Name == "" {
		bad(path, "needs a %s", missing("name"))
	}
	for _, n := range m.names() {
		if other, taken := names[n]; taken && n != "" {
			bad(path, "name %q is taken by %s", n, other)
		}
		names[n] = path
	}
	remote := strings.HasPrefix(m.Tokenizer, hub.Prefix)
	_, err := hub.Parse(m.Tokenizer)
	bad.each([]wrong{
		{m.Tokenizer == "" && m.Check.Renderer == "" && (m.HandIDs != nil && *m.HandIDs || m.ChatTemplate != ""), path, "hand_ids and chat_template need a tokenizer"},
		{remote && err != nil, path + ".tokenizer", fmt.Sprint(err)},
		{m.TokenizerLock != "" && (!remote || !tokenizerLock.MatchString(m.TokenizerLock)), path + ".tokenizer_lock",
			"want sha256: and 64 hexadecimal digits, and a tokenizer that begins with " + hub.Prefix},
	})
}

// names returns all names that clients may send for a model.
func (m *Model) names() []string { return slices.Concat([]string{m.Name}, m.Aliases, m.Adapters) }

// Problems validates a worker that does not come from the file, such as a pod, by the rules of workers.static. Paths
// are those within the worker, e.g. "events.endpoint". The address is normalized.
func (w *Worker) Problems() []Problem {
	var ps places
	var found ProblemsError
	bad := ps.reporter(&found)
	bounded(bad, "", reflect.ValueOf(w).Elem())
	if len(found) == 0 { // the other checks compute with numbers that must be within their bounds
		w.validate(bad)
	}
	return found
}

// Set sets a field by its key within the worker, such as "events.endpoint", from the text of a pod's annotation; list
// elements are separated by commas. Problems checks bounds.
func (w *Worker) Set(key, text string) (err error) {
	set := func(v reflect.Value, text string) error {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil && v.CanInt() {
			v.SetInt(n) // 010 is ten here, not YAML's octal number
			return nil
		}
		return set(v, text)
	}
	v, rules := reflect.ValueOf(w).Elem(), ""
	for step := range strings.SplitSeq(key, ".") {
		v, rules, _ = fieldByKey(v, step)
	}
	if v.Kind() != reflect.Slice {
		if err = set(v, text); err == nil && v.Kind() == reflect.String {
			obeys(func(_, format string, args ...any) { err = fmt.Errorf(format, args...) }, "", v, rules)
		}
		return err
	}
	list := reflect.Zero(v.Type())
	for one := range strings.SplitSeq(text, ",") {
		if one = strings.TrimSpace(one); one == "" {
			continue
		}
		el := reflect.New(v.Type().Elem()).Elem()
		if err := set(el, one); err != nil {
			return err
		}
		list = reflect.Append(list, el)
	}
	v.Set(list)
	return nil
}

// bounded checks the fields of a struct against their jsonschema tags, as decoding does.
func bounded(bad report, path string, v reflect.Value) {
	for f, field := range v.Fields() {
		at := join(path, f.Tag.Get("yaml"))
		if field.Kind() == reflect.Struct {
			bounded(bad, at, field)
		} else {
			obeys(bad, at, field, f.Tag.Get("jsonschema"))
		}
	}
}

func (w *Worker) validate(bad report) {
	if w.Address == "" {
		bad("", "needs an %s", missing("address"))
	} else if strings.Contains(w.Address, "://") {
		bad("address", "%q is a URL: write ip:port only", w.Address)
	} else if _, port, err := net.SplitHostPort(w.Address); err == nil && !isPort(port) {
		bad("address", "%q: the port %q is not a number from 1 to 65535", w.Address, port)
	} else if a, err := netip.ParseAddrPort(w.Address); err != nil || a.Addr().Zone() != "" {
		bad("address", "%q is not ip:port (Envoy needs an IP address, IPv6 in brackets; for names use workers.dns)", w.Address)
	} else if !w.lastPort(int(a.Port()), bad) {
		w.Address = a.String() // as Envoy writes the endpoint that served
	}
	w.validateCommon(bad)
}

func isPort(text string) bool {
	n, err := strconv.ParseUint(text, 10, 16)
	return err == nil && n > 0
}

// lastPort reports ranks whose port would exceed 65535.
func (w *Worker) lastPort(first int, bad report) (beyond bool) {
	last := first + w.Ranks - 1
	if w.RankBy != "port" || last <= maxPort {
		return false
	}
	bad("ranks", "rank %d would be at port %d: ports end at %d", w.Ranks-1, last, maxPort)
	return true
}

func (w *Worker) validateCommon(bad report) {
	if strings.Trim(w.Name, nameRunes) != "" {
		bad("name", "%q: only letters, digits and any of . _ : / - [ ] %% @ may be in a name", w.Name)
	}
	w.validateRankPorts(bad.under("events"))
	w.Disagg.validate(bad.under("disagg"))
	listens := strings.HasPrefix(w.Events.Endpoint, "tcp://") || strings.HasPrefix(w.Events.Endpoint, "ipc://")
	bad.each([]wrong{
		{w.RankBy == "port" && w.Ranks == 0, "rank_by", "port needs ranks"},
		{w.StartRank > 0 && w.Ranks == 0, "start_rank", "needs ranks"},
		{w.Events.Bind && !listens, "events.bind", "needs an endpoint tcp://address:port or ipc://path"},
	})
	for _, e := range w.Events.sockets() {
		w.Events.validate(e.value, bad.under("events."+e.key))
	}
}

// socket is the address of an event socket with its key.
type socket struct{ key, value string }

// sockets returns the addresses to connect to.
func (e *Events) sockets() []socket {
	all := []socket{{"endpoint", e.Endpoint}, {"replay", e.Replay}}
	return slices.DeleteFunc(all, func(s socket) bool { return s.value == "" || s == socket{"endpoint", PushEndpoint} })
}

func (e *Events) validate(address string, bad report) {
	scheme, rest, ok := strings.Cut(address, "://")
	switch {
	case !ok || rest == "":
		bad("", "%q is not like tcp://host:port", address)
	case scheme == "tcp":
		// A template's port may be '$port'.
		host, port, err := net.SplitHostPort(rest)
		if err != nil || strings.Trim(port, "0123456789") != "" && !strings.Contains(port, "$") {
			bad("", "%q is not like tcp://host:port", address)
		} else if host == "*" && !e.Bind {
			bad("", "%q is where an engine binds; name the engine's address instead of *", address)
		}
	case scheme != "ipc" && scheme != "http" && scheme != "https":
		bad("", "scheme %q is not tcp, ipc or http, and the endpoint is not 'push:'", scheme)
	}
}

// isHostPort reports whether an address has both.
func isHostPort(address string) bool {
	host, port, err := net.SplitHostPort(address)
	return err == nil && host != "" && port != ""
}

// listener is an address that Kvlane or Envoy listens on.
type listener struct {
	path, address string
	required      bool
	unix          bool // may be a Unix socket
	random        bool // port 0 is allowed: the actual port is in the log
	envoy         bool // Envoy listens, which does not resolve names
}

func (c *Config) listeners() []listener {
	all := []listener{
		{"listen.address", c.Listen.Address, true, true, false, false},
		{"listen.events", c.Listen.Events, false, false, false, false},
		{"listen.health", c.Listen.Health, false, false, false, false},
		{"admin.address", c.Admin.Address, true, false, true, false},
		{"envoy.ingress", c.Envoy.Ingress, true, false, false, true},
		{"envoy.admin", c.Envoy.Admin, true, false, false, true},
		{"envoy.prefill", c.Envoy.Prefill, false, true, false, true},
	}
	if c.Fleet.Mode == FleetEmbedded {
		all = append(all, listener{"fleet.embedded.listen", c.Fleet.Embedded.Listen, true, false, true, false})
	}
	return all
}

// socket is the path of a Unix socket.
func (l *listener) socket() (path string, ok bool) {
	path, ok = strings.CutPrefix(l.address, "unix:")
	return path, ok && l.unix
}

func (l *listener) validate(others []listener, bad report) {
	if path, ok := l.socket(); ok {
		if path == "" {
			bad(l.path, "unix: needs a path")
		} else if len(path) > 107 {
			bad(l.path, "path of %d bytes: a Unix socket's path holds 107", len(path))
		}
		return
	}
	host, port, err := net.SplitHostPort(l.address)
	if err != nil {
		want := "host:port"
		if l.unix {
			want += " or unix:/path"
		}
		bad(l.path, "%q is not %s", l.address, want)
		return
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > maxPort {
		bad(l.path, "%q: port must be 0 to %d", l.address, maxPort)
	}
	if l.envoy && host != "" && net.ParseIP(host) == nil {
		bad(l.path, "%q: Envoy listens on an IP address, not on a name (all of them: 0.0.0.0 or [::])", l.address)
	}
	if port == "0" {
		if !l.random {
			bad(l.path, "%q: port 0 means any port, which nothing could connect to", l.address)
		}
		return
	}
	for _, o := range others {
		if otherHost, otherPort, err := net.SplitHostPort(o.address); err == nil && otherPort == port && sameHost(host, otherHost) {
			bad(l.path, "%q is taken by %s (%q)", l.address, o.path, o.address)
			return
		}
	}
}

// relative reports whether the path of a socket depends on the working directory; a leading
// '@' means an abstract socket.
func relative(path string) bool { return !filepath.IsAbs(path) && !strings.HasPrefix(path, "@") }

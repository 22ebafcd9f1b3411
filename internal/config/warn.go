package config

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// validateSockets checks that the folders of sockets exist. Containers and packages create the default socket's folder,
// so it is only checked if live. Folders may be mounted where Kvlane runs, so missing ones go to missing.
func (c *Config) validateSockets(live bool, bad, missing, note report) {
	for _, l := range c.listeners() {
		path, ok := l.socket()
		if !ok || strings.HasPrefix(path, "@") || !live && (relative(path) || l.address == Default().Listen.Address) {
			continue
		}
		folder := filepath.Dir(path)
		if info, err := os.Stat(folder); errors.Is(err, fs.ErrNotExist) {
			missing(l.path, "there is no folder %s here: make it before Kvlane starts", folder)
		} else if err == nil && !info.IsDir() {
			bad(l.path, "%s is a file: name a socket in a folder", folder)
		} else if live && !l.envoy {
			if conn, err := net.Dial("unix", path); err == nil { // in use, which validateFree reports
				_ = conn.Close()
				continue
			}
			switch probe, err := os.CreateTemp(folder, ".kvlane-*"); {
			case errors.Is(err, fs.ErrPermission):
				note(l.path, "user %d, which runs this check, cannot create files in %s: the user that runs Kvlane must be able to", os.Getuid(), folder)
			case err != nil:
				bad(l.path, "nothing can be created there: %v: the folder must belong to the user that runs Kvlane", err)
			default:
				_ = errors.Join(probe.Close(), os.Remove(probe.Name()))
			}
		}
	}
}

// validateFiles is validateSockets, and reads certificates, tokens and kubeconfigs.
func (c *Config) validateFiles(live bool, bad, missing, note report) {
	c.validateSockets(live, bad, missing, note)
	look := func(path, file string, err error) {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			missing(path, "there is no file %s here: Kvlane needs it where it runs", file)
		case err != nil:
			bad(path, "%s: %v: name a file in PEM format", file, err)
		}
	}
	if l := &c.Listen; l.CertFile != "" {
		certificate, certErr := ReadFile(l.CertFile)
		look("listen.cert_file", l.CertFile, certErr)
		key, keyErr := ReadFile(l.KeyFile)
		look("listen.key_file", l.KeyFile, keyErr)
		if certErr == nil && keyErr == nil {
			pair, err := tls.X509KeyPair(certificate, key)
			switch {
			case err == nil && outOfDate(pair.Leaf, time.Now()) != "":
				note("listen.cert_file", "%s %s: an Envoy that verifies it goes on without Kvlane", l.CertFile, outOfDate(pair.Leaf, time.Now()))
			case err != nil && strings.HasSuffix(err.Error(), "does not match public key"):
				bad("listen.key_file", "%s is not the key of the certificate %s", l.KeyFile, l.CertFile)
			default:
				look("listen.cert_file", l.CertFile, err)
			}
		}
	}
	pods, in, out := cmp.Or(c.Workers.Kubernetes, &Kubernetes{}), FleetEmbed{}, FleetExtern{}
	switch c.Fleet.Mode {
	case FleetEmbedded:
		in = c.Fleet.Embedded
	case FleetExternal:
		out = c.Fleet.External
	}
	for path, file := range map[string]string{"admin.token_file": c.Admin.TokenFile, "workers.kubernetes.kubeconfig": pods.Kubeconfig,
		"index.key_file": c.Index.KeyFile, "fleet.embedded.secret_file": in.SecretFile, "fleet.external.password_file": out.PasswordFile,
		"fleet.external.token_file": out.TokenFile, "fleet.embedded.tls.cert_file": in.TLS.CertFile, "fleet.embedded.tls.key_file": in.TLS.KeyFile} {
		if _, err := ReadFile(file); file != "" && err != nil && !errors.Is(err, fs.ErrNotExist) {
			bad(path, "%v: name a file that can be read", err)
		} else if file != "" {
			look(path, file, err)
		}
	}
	for path, file := range map[string]string{"index.peers.ca_file": c.Index.Peers.CAFile, "listen.client_ca_file": c.Listen.ClientCA, "fleet.embedded.tls.ca_file": in.TLS.CAFile} {
		if _, err := Authorities(file); file != "" {
			look(path, file, err)
		}
	}
}

// outOfDate returns why a certificate is not valid now, "" if it is.
func outOfDate(c *x509.Certificate, now time.Time) string {
	switch {
	case now.After(c.NotAfter):
		return "expired on " + c.NotAfter.UTC().Format(time.RFC3339)
	case now.Before(c.NotBefore):
		return "is not valid before " + c.NotBefore.UTC().Format(time.RFC3339)
	}
	return ""
}

// Outdated lists the files that were replaced by unloadable content or by a certificate that is not valid now.
func (l *Listen) Outdated() (list []string) {
	const kept = "is replaced by what cannot be loaded, the last good one is used"
	if l.CertFile != "" {
		if pair, err := KeyPair(l.CertFile, l.KeyFile); err != nil {
			list = append(list, fmt.Sprintf("listen.cert_file with its key %s: %v", kept, err))
		} else if why := outOfDate(pair.Leaf, time.Now()); why != "" {
			list = append(list, fmt.Sprintf("listen.cert_file %s: an Envoy that verifies it goes on without Kvlane", why))
		}
	}
	if _, err := Authorities(l.ClientCA); l.ClientCA != "" && err != nil {
		list = append(list, fmt.Sprintf("listen.client_ca_file %s: %v", kept, err))
	}
	return list
}

// validateFree reports addresses that are not free. Those of Envoy, which may be running already, and of a running
// Kvlane are only warnings. running is as in Inspect.
func (c *Config) validateFree(running func(Admin) ([]byte, bool), bad, note report) {
	other, with, closed := Default(), "another configuration (GET /debug/config)", false
	described := sync.OnceValue(func() *decoder {
		var text []byte
		text, closed = running(c.Admin)
		if mine, err := c.Effective(); err == nil && bytes.Equal(mine, text) {
			with = "this configuration"
		}
		d, err := decodeFile("", text, &other)
		if err != nil {
			return &decoder{}
		}
		return d
	})
	for _, l := range c.listeners() {
		if l.address == "" {
			continue
		}
		why := "another process listens there"
		if path, ok := l.socket(); ok {
			conn, err := net.Dial("unix", path)
			if err != nil {
				continue
			}
			_ = conn.Close()
		} else {
			lis, err := net.Listen("tcp", l.address)
			if err == nil {
				_ = lis.Close()
				continue
			}
			why = err.Error()
		}
		switch _, known := described().at[l.path]; {
		case l.envoy:
			note(l.path, "cannot listen there: %s: this is as it should be if Envoy runs already", why)
		case known && slices.Contains(other.listeners(), l):
			note(l.path, "%q is in use by a running Kvlane with %s", l.address, with)
		case closed:
			note(l.path, "%q is in use: Kvlane seems to run already, since %s loads tokenizers or asks for the token of admin.token_file, which check does not send", l.address, c.Admin.Address)
		default:
			bad(l.path, "cannot listen there: %s: stop the other program, or take another address", why)
		}
	}
}

// Unstartable returns everything that keeps Kvlane from listening on this machine now: addresses in use,
// folders of sockets and files of certificates that are missing or broken.
func (c *Config) Unstartable() (found ProblemsError) {
	bad := func(path, format string, args ...any) {
		if path == "admin.address" || strings.HasPrefix(path, "listen.") || strings.HasPrefix(path, "fleet.") { // without others it starts
			found = append(found, Problem{Path: path, Message: fmt.Sprintf(format, args...)})
		}
	}
	c.validateFree(func(Admin) ([]byte, bool) { return nil, false }, bad, bad)
	c.validateFiles(true, bad, bad, func(path, format string, args ...any) {
		if path != "listen.cert_file" { // Kvlane starts with an expired one
			bad(path, format, args...)
		}
	})
	return found
}

// machine has /proc and /sys; tests replace it.
var machine = os.DirFS("/")

// memoryLimit returns the lowest of the machine's memory and the limits of this process's cgroups, in bytes, with its
// file; "" if none is known. Either version of cgroups may be mounted. In a container the paths in /proc may be the
// host's; the limit is then at the root.
func memoryLimit(machine fs.FS) (limit int64, file string) {
	all, _ := fs.ReadFile(machine, "proc/meminfo")
	if n, _ := fmt.Sscanf(string(all), "MemTotal: %d kB", &limit); n == 1 {
		limit, file = limit<<10, "/proc/meminfo"
	}
	groups, _ := fs.ReadFile(machine, "proc/self/cgroup") // empty without cgroups
	for line := range strings.Lines(string(groups)) {
		group := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(group) < 3 {
			continue
		}
		mount, name := "sys/fs/cgroup", "memory.max"
		if group[1] != "" { // the first version
			mount, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
			if !slices.Contains(strings.Split(group[1], ","), "memory") {
				continue
			}
		}
		for at := path.Clean("/" + group[2]); ; at = path.Dir(at) {
			text, _ := fs.ReadFile(machine, path.Join(mount, at, name))
			if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && (file == "" || n < limit) { // or "max"
				limit, file = n, "/"+path.Join(mount, at, name)
			}
			if at == "/" {
				break
			}
		}
	}
	return limit, file
}

// warn reports settings that are valid but probably a mistake. listed are the workers of workers.file.
func (c *Config) warn(listed []Worker, d *decoder) {
	w, t, note := &c.Workers, &c.Tenants, d.note
	note.each([]wrong{
		{len(w.Static) == 0 && w.File == "" && len(w.DNS) == 0 && w.Kubernetes == nil, "workers", "there are none: every request is answered 503"},
		{c.Quiet > c.Drain, "drain_quiet", fmt.Sprintf("%s is longer than drain (%s), which ends first: make it shorter", c.Quiet.Std(), c.Drain.Std())},
		{c.Explain.Header, "explain.header", "tells every client what others have asked, to a block of tokens: keep it to tests"},
		{t.SaltHeader != "" && t.Required && !c.FailsClosed(), "tenants", "while Kvlane is down or late requests pass without a salt: leave out envoy.fail_closed: false, and let your gateway fail closed"},
	})
	for _, l := range c.listeners() {
		if path, ok := l.socket(); ok && relative(path) {
			note(l.path, "%q depends on the folder that Kvlane and Envoy are started in: write the whole path", l.address)
		}
	}
	limit, of := debug.SetMemoryLimit(-1), "GOMEMLIMIT"
	if own, file := memoryLimit(machine); file != "" && own < limit {
		limit, of = own, file
	}
	if int64(c.Index.MaxBytes) > limit {
		note("index.max_bytes", "%d bytes are more than the process can have (%s, %d bytes): make it smaller, or raise the limit", c.Index.MaxBytes, of, limit)
	}
	c.warnFlow(note.under("flow"))
	c.warnUnused(func(path string) bool { return d.at[path] != place{} }, note)
	c.warnSLO(note)
	c.warnWorkers(listed, note)
	c.warnDisagg(c.sites(listed), note)
}

func (c *Config) warnWorkers(listed []Worker, note report) {
	known, engines := map[string]bool{}, map[string]string{}
	for i := range c.Models {
		m := &c.Models[i]
		for _, name := range m.names() {
			known[name], engines[name] = true, m.Engine
		}
		if m.Tokenizer == "" && m.Check.Renderer == "" {
			note(item("models", i), "has no tokenizer: %q is routed by load", m.Name)
		} else if m.Check.Disabled && m.Tokenizer != "" {
			note(item("models", i)+".check.disabled", "the ids of %q are never compared with an engine's: differences are not noticed", m.Name)
		}
	}
	owners := map[string]string{}
	for _, w := range c.sites(listed) {
		for i, name := range w.Models {
			if len(known) > 0 && !known[name] {
				note(item(w.path+".models", i), "no models[] entry is called %q: its requests are routed by load", name)
			} else if known[name] && engines[name] != w.Engine {
				note(item(w.path+".models", i), "%q has models[].engine %s, the worker engine %s: ids are made as for another engine; write the same engine", name, engines[name], w.Engine)
			}
		}
		events, trtllm := w.Events.Endpoint, w.Engine == "trtllm"
		note.under(w.path).each([]wrong{
			{trtllm && w.Ranks > 1 && w.RankBy == "header" && c.Disagg.Connector == "", "ranks",
				"TensorRT-LLM takes a rank only with requests that are split (disagg.connector), and chooses itself otherwise: write rank_by: none"},
			{!trtllm && strings.HasPrefix(events, "http"), "events.endpoint",
				fmt.Sprintf("%q is polled as TensorRT-LLM's events are, and the engine is %s: write tcp://", events, w.Engine)},
			{w.Address != "" && events == "tcp://"+w.Address, "events.endpoint",
				fmt.Sprintf("%q is the engine's HTTP port: name that of its KV events, such as 5557", events)},
			{w.Events.Replay != "" && events == "", "events.replay", "is not used without endpoint: name the endpoint of the events"},
		})
		if first, taken := owners[w.Name]; taken {
			note(w.path+".name", "%q is the name of %s, which is used instead", w.Name, first)
		} else if w.Name != "" {
			owners[w.Name] = w.path
		}
	}
}

// warnUnused reports keys that have no effect because of others. given tells which paths are in the file.
func (c *Config) warnUnused(given func(path string) bool, note report) {
	f, r, t, plain, pods := &c.Flow, &c.Routing, &c.Tenants, Default(), cmp.Or(c.Workers.Kubernetes, &Kubernetes{})
	const unnamed = "have no effect: no request can name one without routing.trust_objectives"
	trusted, limits := r.Trusted || r.TrustedNames, &r.Policy.Limits
	limited := limits.MaxActive+limits.MaxQueue > 0 || limits.MaxKVUsage > 0
	note.each([]wrong{
		{f.Requests == 0 && fmt.Sprint(*f) != fmt.Sprint(plain.Flow), "flow", "has no effect: without max_requests there is no queue"},
		{r.Wait.Requests == 0 && r.Wait != plain.Routing.Wait, "routing.wait.timeout", "has no effect without max_requests"},
		{limits.ShedAt != plain.Routing.Policy.Limits.ShedAt && !limited, "routing.policy.limits.shed_at", "has no effect without max_active, max_queue or max_kv_usage"},
		{!trusted && len(pods.Objectives) > 0, "workers.kubernetes.objectives", unnamed},
		{!trusted && len(r.Objectives) > 0, "routing.objectives", unnamed},
		{r.TrustedNames && len(r.Objectives)+len(pods.Objectives) == 0, "routing.trust_objectives", "has no effect: there are no objectives (routing.objectives, workers.kubernetes.objectives)"},
		{t.TrustIngress && t.Name() == "", "tenants.trust_ingress", "has no effect without header or salt_header"},
		{given("tenants.required") && t.SaltHeader == "", "tenants.required", "has no effect without salt_header"},
	})
	if f.Requests > 0 {
		c.warnUnusedFlow(trusted, note.under("flow"))
	}
}

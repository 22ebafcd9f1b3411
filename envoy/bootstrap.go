// Package envoy generates Envoy's bootstrap for the standalone shape, and serves the
// workers' endpoints over xDS.
package envoy

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/steering"
)

// Cluster is the name of the workers' cluster in the bootstrap and in the XDS server.
const Cluster = "model_servers"

// PrefillHeader has the pick of a prefill leg for the prefill listener, which turns it into
// metadata and removes it.
const PrefillHeader = steering.PrefillPick

// Modes of the request and response bodies, as Envoy spells them.
const (
	BodyNone       = "NONE"
	BodyBuffered   = "BUFFERED"
	BodyStreamed   = "STREAMED"
	BodyFullDuplex = "FULL_DUPLEX_STREAMED"
)

// Options are the parameters of a bootstrap. Addresses are "host:port", "[v6]:port" or
// "unix:/path"; a path that starts with @ is an abstract socket.
type Options struct {
	NodeID string
	// Ingress is where clients connect, Admin is Envoy's own admin listener, Kvlane is
	// the socket of ext_proc, ADS and access log.
	Ingress, Admin, Kvlane string
	// Replicas are the addresses of all replicas of Kvlane, names allowed, in place of Kvlane;
	// empty if there is one.
	Replicas []string
	// Conversations are the headers with a conversation's id, in order. The first one that a
	// request has selects its replica; a request without any is spread by its id.
	Conversations []string
	// CertFile and KeyFile are Envoy's client certificate for Kvlane, CAFile and ServerName what
	// Kvlane's must be signed by and name; "" means plaintext.
	CertFile, KeyFile, CAFile, ServerName string
	// Prefill is the listener for prefill legs; "" leaves it out.
	Prefill string
	// MaxBody is the largest request body in bytes; more is answered 413.
	MaxBody int64
	// MessageTimeout bounds the time for which Kvlane may hold a request after asking for
	// more time; StallTimeout is how long Envoy waits for a Kvlane that does not answer.
	MessageTimeout, StallTimeout time.Duration
	// RequestTimeout bounds the time from a request's first byte until its body has arrived
	// and Kvlane has decided.
	RequestTimeout time.Duration
	// MaxHeap is the size in bytes of Envoy's heap near which it sheds load.
	MaxHeap int64
	// ConnectionAge closes clients' connections of that age, after the running answer; 0
	// never does.
	ConnectionAge time.Duration
	// UpstreamIdle closes idle connections to engines.
	UpstreamIdle time.Duration
	// FailClosed answers 503 if Kvlane made no pick, instead of choosing the least busy
	// worker.
	FailClosed bool
	// FirstToken adds the observing filter, AccessLog the gRPC access log.
	FirstToken, AccessLog bool
	// Paths are the paths that clients reach, "*" at the end for all below; other paths are answered
	// 404. DefaultPaths stands for InferencePaths. Empty: every path of the engines.
	Paths []string
	// Strip are further headers that are removed from every client request.
	Strip []string
	// RequestBody and ResponseBody are processing modes; "" means BUFFERED and NONE.
	RequestBody, ResponseBody string
	// ModeOverride lets Kvlane request the response bodies that it changes.
	ModeOverride bool
}

// Defaults returns the options of the standalone shape.
func Defaults() Options {
	return Options{
		NodeID:         "kvlane",
		Ingress:        "127.0.0.1:8080",
		Admin:          "127.0.0.1:9901",
		MaxBody:        32 << 20,
		MessageTimeout: 300 * time.Second,
		StallTimeout:   2 * time.Second,
		RequestTimeout: time.Minute,
		MaxHeap:        1536 << 20,
		ConnectionAge:  time.Minute,
		UpstreamIdle:   4 * time.Second,
		Paths:          []string{DefaultPaths},
		RequestBody:    BodyBuffered,
		ResponseBody:   BodyNone,
	}
}

// DefaultPaths stands for InferencePaths in Options.Paths.
const DefaultPaths = "default"

// InferencePaths returns the paths with which clients generate, embed, rank and count: those of the OpenAI, Anthropic and Cohere
// APIs, and of vLLM and SGLang. The other paths of engines change or show their state.
func InferencePaths() []string {
	return []string{
		"/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/completions/render", "/v1/responses", "/v1/responses/*",
		"/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/models", "/v1/models/*",
		"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/realtime",
		"/generate", "/inference/v1/generate", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
		"/pooling", "/classify", "/v1/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v2/embed",
	}
}

// pathPattern returns the regular expression of paths, "" if it would match every path.
func pathPattern(paths []string) string {
	var all []string
	for _, p := range paths {
		if p == DefaultPaths {
			all = append(all, InferencePaths()...)
		} else {
			all = append(all, p)
		}
	}
	for i, p := range all {
		if p == "/*" {
			return ""
		}
		if below, ok := strings.CutSuffix(p, "*"); ok {
			all[i] = regexp.QuoteMeta(below) + ".*"
		} else {
			all[i] = regexp.QuoteMeta(p)
		}
	}
	return strings.Join(all, "|")
}

// StripHeaders are removed from every client request before any filter reads it.
func StripHeaders() []string { return steering.AtEnvoy() }

//go:embed bootstrap.yaml.tmpl
var bootstrapText string

// Bootstrap returns the YAML of a bootstrap.
func Bootstrap(o Options) ([]byte, error) {
	o.RequestBody, o.ResponseBody = cmp.Or(o.RequestBody, BodyBuffered), cmp.Or(o.ResponseBody, BodyNone)
	if o.MaxBody <= 0 || o.MaxBody > 1<<32-1 {
		return nil, fmt.Errorf("largest body of %d bytes: Envoy takes 1 to %d", o.MaxBody, uint32(1<<32-1))
	}
	if o.NodeID == "" {
		return nil, errors.New("node id is empty")
	}
	values, err := o.values()
	if err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	text, err := render(bootstrapText, values)
	if err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	return []byte(text), nil
}

// values are the template's variables, as YAML text.
func (o *Options) values() (vars, error) {
	duplex := o.RequestBody == BodyFullDuplex
	var removals []string
	for _, h := range append(StripHeaders(), o.Strip...) {
		removals = append(removals, "{remove: "+h+"}")
	}
	v := vars{
		"NodeID":         o.NodeID,
		"MaxBody":        strconv.FormatInt(o.MaxBody, 10),
		"MessageTimeout": seconds(o.MessageTimeout),
		"StallTimeout":   seconds(min(o.StallTimeout, o.MessageTimeout)),
		"RequestTimeout": seconds(o.RequestTimeout),
		"MaxHeap":        strconv.FormatInt(o.MaxHeap, 10),
		"UpstreamIdle":   seconds(o.UpstreamIdle),
		"ConnectionAge":  "",
		"FirstToken":     o.FirstToken,
		"AccessLog":      o.AccessLog,
		"CertFile":       o.CertFile,
		"KeyFile":        o.KeyFile,
		"CAFile":         o.CAFile,
		"ServerName":     o.ServerName,
		"RequestBody":    o.RequestBody,
		"ResponseBody":   o.ResponseBody,
		"ModeOverride":   o.ModeOverride,
		"Paths":          pathPattern(o.Paths),
		"StripHeaders":   strings.Join(removals, ", "),
		// With a retry policy behind a full-duplex filter Envoy 1.40 sends a body that ends
		// with trailers twice.
		"Retries":      !duplex,
		"Prefill":      "",
		"Replicas":     len(o.Replicas) > 0,
		"HashReplicas": len(o.Replicas) > 0,
	}
	conversations := make([]vars, 0, len(o.Conversations))
	for _, h := range o.Conversations {
		conversations = append(conversations, vars{"Key": h})
	}
	v["Conversations"] = conversations
	if o.ConnectionAge != 0 {
		v["ConnectionAge"] = seconds(o.ConnectionAge)
	}
	clusters := []vars{{"Name": Cluster, "FailClosed": o.FailClosed}}
	if o.Prefill != "" {
		// A prefill leg without a usable pick must fail: at any other worker its result
		// would be useless.
		clusters = append(clusters, vars{"Name": "prefill_servers", "FailClosed": true})
	}
	v["Clusters"] = clusters
	for _, a := range []struct{ name, address string }{{"Admin", o.Admin}, {"Ingress", o.Ingress}, {"Prefill", o.Prefill}} {
		if a.name == "Prefill" && a.address == "" {
			continue
		}
		text, err := addressYAML(a.address)
		if err != nil {
			return nil, fmt.Errorf("%s %w", strings.ToLower(a.name), err)
		}
		v[a.name] = text
	}
	kvlanes := o.Replicas
	if len(kvlanes) == 0 {
		kvlanes = []string{o.Kvlane}
	}
	endpoints := make([]string, 0, len(kvlanes))
	byName := false
	for _, a := range kvlanes {
		text, err := addressYAML(a)
		if err != nil {
			return nil, fmt.Errorf("kvlane %w", err)
		}
		endpoints = append(endpoints, "{endpoint: {address: "+text+"}}")
		if host, _, err := net.SplitHostPort(a); err == nil && len(o.Replicas) > 0 && net.ParseIP(host) == nil {
			byName = true
		}
	}
	v["Kvlane"], v["ByName"] = strings.Join(endpoints, ", "), byName
	return v, nil
}

func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + "s" }

func addressYAML(s string) (string, error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		return fmt.Sprintf("{pipe: {path: %q}}", path), nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return "", fmt.Errorf("address %q: %w", s, err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return "", fmt.Errorf("address %q: port: %w", s, err)
	}
	return fmt.Sprintf("{socket_address: {address: %q, port_value: %d}}", cmp.Or(host, "0.0.0.0"), n), nil
}

// Package envoy generates Envoy's bootstrap for the standalone shape, and serves the workers' endpoints over xDS.
package envoy

import (
	"cmp"
	_ "embed"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/steering"
)

// Cluster is the name of the workers' cluster in the bootstrap and in the XDS server.
const Cluster = "model_servers"

// Modes of the request and response bodies, as Envoy spells them.
const (
	BodyNone       = "NONE"
	BodyBuffered   = "BUFFERED"
	BodyStreamed   = "STREAMED"
	BodyFullDuplex = "FULL_DUPLEX_STREAMED"
)

// DefaultPaths represents InferencePaths in envoy.paths.
const DefaultPaths = "default"

// InferencePaths returns the paths with which clients generate, embed, rank and count: those of the OpenAI, Anthropic
// and Cohere APIs, and of vLLM and SGLang. Other paths of engines change or reveal their state.
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

// Bootstrap returns the YAML of the bootstrap of a valid configuration.
func Bootstrap(c *config.Config) ([]byte, error) {
	text, err := render(bootstrapText, values(c))
	if err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	return []byte(text), nil
}

// values are the template's variables, as YAML text.
func values(c *config.Config) vars {
	e := &c.Envoy
	var removals []string
	for _, h := range append(StripHeaders(), c.Tenants.Stripped()...) {
		removals = append(removals, "{remove: "+h+"}")
	}
	requestTimeout := e.UploadTimeout
	if c.Disagg.Connector != "" || c.Waits() { // Envoy's timer runs until Kvlane has decided
		requestTimeout += e.MessageTimeout
	}
	v := vars{
		"MaxBody":        strconv.FormatInt(int64(c.Limits.MaxBody), 10),
		"MessageTimeout": seconds(e.MessageTimeout),
		"StallTimeout":   seconds(min(e.StallTimeout, e.MessageTimeout)),
		"RequestTimeout": seconds(requestTimeout),
		"MaxHeap":        strconv.FormatInt(int64(e.MaxHeap), 10),
		"ConnectionAge":  "",
		"FirstToken":     e.FirstToken,
		"AccessLog":      e.AccessLog,
		"CertFile":       e.CertFile,
		"KeyFile":        e.KeyFile,
		"CAFile":         e.CAFile,
		"ServerName":     e.ServerName,
		"RequestBody":    e.RequestBody,
		"ResponseBody":   e.ResponseBody,
		"ModeOverride":   c.Disagg.Usage == config.UsageOfPrefill,
		"Paths":          pathPattern(e.Paths),
		"StripHeaders":   strings.Join(removals, ", "),
		// With a retry policy behind a full-duplex filter Envoy 1.40 sends a body that ends with trailers twice.
		"Retries":      e.RequestBody != BodyFullDuplex,
		"Admin":        addressYAML(e.Admin),
		"Ingress":      addressYAML(e.Ingress),
		"Prefill":      addressYAML(e.Prefill),
		"Replicas":     len(e.Replicas) > 0,
		"HashReplicas": len(e.Replicas) > 0,
	}
	conversations := make([]vars, 0, len(c.Routing.Headers))
	for _, h := range c.Routing.Headers {
		conversations = append(conversations, vars{"Key": h})
	}
	v["Conversations"] = conversations
	if e.ConnectionAge != 0 {
		v["ConnectionAge"] = seconds(e.ConnectionAge)
	}
	clusters := []vars{{"Name": Cluster, "FailClosed": c.FailsClosed()}}
	if e.Prefill != "" {
		// A prefill leg without a usable pick must fail: at any other worker its result would be useless.
		clusters = append(clusters, vars{"Name": "prefill_servers", "FailClosed": true})
	}
	v["Clusters"] = clusters
	kvlanes := e.Replicas
	if len(kvlanes) == 0 {
		kvlanes = []string{c.Listen.Address}
	}
	endpoints := make([]string, 0, len(kvlanes))
	for _, a := range kvlanes {
		endpoints = append(endpoints, "{endpoint: {address: "+addressYAML(a)+"}}")
	}
	v["Kvlane"] = strings.Join(endpoints, ", ")
	v["ByName"] = slices.ContainsFunc(e.Replicas, func(a string) bool {
		host, _, _ := net.SplitHostPort(a)
		return net.ParseIP(host) == nil
	})
	return v
}

func seconds(d config.Duration) string {
	return strconv.FormatFloat(d.Std().Seconds(), 'f', -1, 64) + "s"
}

// addressYAML returns the address of a listener or a replica, which config has checked; "" for "".
func addressYAML(s string) string {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		return fmt.Sprintf("{pipe: {path: %q}}", path)
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return ""
	}
	n, _ := strconv.Atoi(port)
	return fmt.Sprintf("{socket_address: {address: %q, port_value: %d}}", cmp.Or(host, "0.0.0.0"), n)
}

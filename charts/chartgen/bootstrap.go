package main

import (
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/envoy"
)

// replacements are the parts that Helm must render itself, because package envoy passes
// them to the template as finished text.
var replacements = []struct{ old, with string }{
	{"{{.Admin}}", `{{include "kvlane.envoyAddress" .Admin}}`},
	{"{{.Ingress}}", `{{include "kvlane.envoyAddress" .Ingress}}`},
	{"{{.Prefill}}", `{{include "kvlane.envoyAddress" .Prefill}}`},
	{"{{.Kvlane}}", `{{include "kvlane.envoyAddress" .Kvlane}}`},
	{"{{.StripHeaders}}", "{{range $i, $h := .StripHeaders}}{{if $i}}, {{end}}{remove: {{$h}}}{{end}}"},
	{"    type: STATIC\n    connect_timeout: 1s\n", replicas}, // of cluster kvlane: other pods are found by name
	{"    load_assignment: {cluster_name: kvlane,", hashed},
	{"service_name: liveness", "service_name: {{if .Replicas}}readiness{{else}}liveness{{end}}"},
	{"              grpc_service: {envoy_grpc: {cluster_name: kvlane}}\n", "              grpc_service: {envoy_grpc: {cluster_name: kvlane}{{if .HashReplicas}}, initial_metadata: [{key: x-kvlane-request, value: \"%REQ(X-REQUEST-ID)%\"}]{{end}}}\n"},
	{"  clusters:\n  - name: kvlane\n", readiness},
}

// Only for Kvlane in other pods than Envoy. A replica that shuts down fails the health
// check immediately and gets no more requests, long before DNS drops it.
const (
	replicas = `    type: {{.KvlaneType}}
    connect_timeout: 1s
{{- if .Replicas}}
    dns_refresh_rate: 1s                          # a name with the address of every replica that is ready
    dns_failure_refresh_rate: {base_interval: 1s, max_interval: 2s}
    load_balancing_policy:
      policies:
{{- if .HashReplicas}}
      - typed_extension_config:                   # both streams of a request go to the same replica
          name: envoy.load_balancing_policies.maglev
          typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.maglev.v3.Maglev}
{{- else}}
      - typed_extension_config:
          name: envoy.load_balancing_policies.least_request
          typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest}
{{- end}}
{{- end}}
`
	hashed = `{{- if .HashReplicas}}
        hash_policy: [{header: {header_name: x-kvlane-request}}]
{{- end}}
    load_assignment: {cluster_name: kvlane,`
	readiness = `{{- if .Readiness}}
  - name: readiness                               # of an Envoy that has no endpoints yet the others' work shall not be
    address: {{include "kvlane.envoyAddress" .Readiness}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: readiness
          http_filters:
          - name: readiness
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.health_check.v3.HealthCheck
              pass_through_mode: false
              headers: [{name: ":path", string_match: {exact: /ready}}]
              cluster_min_healthy_percentages: {model_servers: {value: 1}}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config: {}
{{- end}}
  clusters:
  - name: kvlane
`
)

// bootstrapHelper defines "kvlane.bootstrap", whose argument has the keys of envoy.Options
// and the lists that package envoy derives.
func bootstrapHelper(text string) ([]byte, error) {
	for _, r := range replacements {
		if !strings.Contains(text, r.old) {
			return nil, fmt.Errorf("bootstrap.yaml.tmpl has no %q any more", r.old)
		}
		text = strings.ReplaceAll(text, r.old, r.with)
	}
	var b strings.Builder
	b.WriteString("{{- /* Made by charts/chartgen from envoy/bootstrap.yaml.tmpl; do not edit. */ -}}\n")
	b.WriteString("{{- define \"kvlane.stripHeaders\" -}}\n")
	for _, h := range envoy.StripHeaders() {
		fmt.Fprintf(&b, "- %s\n", h)
	}
	b.WriteString("{{- end }}\n")
	fmt.Fprintf(&b, "{{- define \"kvlane.upstreamIdle\" }}%ds{{ end }}\n", int(envoy.Defaults().UpstreamIdle.Seconds()))
	fmt.Fprintf(&b, "{{- define \"kvlane.nodeID\" }}%s{{ end }}\n", envoy.Defaults().NodeID)
	fmt.Fprintf(&b, "{{- define \"kvlane.bootstrap\" -}}\n%s{{- end }}\n", text)
	return []byte(b.String()), nil
}

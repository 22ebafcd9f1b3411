package chartgen

import (
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/config"
)

// replacements are the parts that Helm must render itself, because package envoy passes
// them to the template as finished text.
var replacements = []struct{ old, with string }{
	{"{{.Admin}}", `{{include "kvlane.envoyAddress" .Admin}}`},
	{"{{.Ingress}}", `{{include "kvlane.envoyAddress" .Ingress}}`},
	{"{{.Prefill}}", `{{include "kvlane.envoyAddress" .Prefill}}`},
	{"{{.Kvlane}}", `{endpoint: {address: {{include "kvlane.envoyAddress" .Kvlane}}}}`},
	{"{{.StripHeaders}}", "{{range $i, $h := .StripHeaders}}{{if $i}}, {{end}}{remove: {{$h}}}{{end}}"},
	{"  clusters:\n  - name: kvlane\n", readiness},
}

// readiness is only for Kvlane in other pods than Envoy.
const readiness = `{{- if .Readiness}}
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
{{- if .Metrics}}
  - name: metrics                                 # of the admin page nothing else
    address: {{include "kvlane.envoyAddress" .Metrics}}
    ignore_global_conn_limit: true
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: metrics
          http_filters: [{name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
          route_config: {virtual_hosts: [{name: metrics, domains: ["*"], routes: [
            {match: {path: /stats/prometheus, headers: [{name: ":method", string_match: {exact: GET}}]}, route: {cluster: admin}}]}]}
{{- end}}
  clusters:
{{- if .Metrics}}
  - {name: admin, load_assignment: {cluster_name: admin, endpoints: [{lb_endpoints: [{endpoint: {address: {{include "kvlane.envoyAddress" .Admin}}}}]}]}}
{{- end}}
  - name: kvlane
`

// bootstrapHelper defines "kvlane.bootstrap", whose argument has the keys of the
// template and the lists that package envoy derives.
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
	b.WriteString("{{- define \"kvlane.inferencePaths\" -}}\n")
	for _, p := range envoy.InferencePaths() {
		fmt.Fprintf(&b, "- %s\n", p)
	}
	b.WriteString("{{- end }}\n")
	b.WriteString("{{- define \"kvlane.conversationHeaders\" -}}\n")
	for _, h := range config.Default().Routing.Headers {
		fmt.Fprintf(&b, "- %s\n", h)
	}
	b.WriteString("{{- end }}\n")
	fmt.Fprintf(&b, "{{- define \"kvlane.bootstrap\" -}}\n%s{{- end }}\n", text)
	return []byte(b.String()), nil
}

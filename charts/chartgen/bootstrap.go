package main

import (
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/envoy"
)

// replacements are what Helm has to make by itself of the values that package envoy
// gives the template as text.
var replacements = []struct{ old, with string }{
	{"{{.Admin}}", `{{include "kvlane.envoyAddress" .Admin}}`},
	{"{{.Ingress}}", `{{include "kvlane.envoyAddress" .Ingress}}`},
	{"{{.Prefill}}", `{{include "kvlane.envoyAddress" .Prefill}}`},
	{"{{.Kvlane}}", `{{include "kvlane.envoyAddress" .Kvlane}}`},
	{"{{.StripHeaders}}", "{{range $i, $h := .StripHeaders}}{{if $i}}, {{end}}{remove: {{$h}}}{{end}}"},
	{"    type: STATIC\n", "    type: {{.KvlaneType}}\n"}, // of cluster kvlane: another pod is found by name
}

// bootstrapHelper defines "kvlane.bootstrap", whose argument has the keys of
// envoy.Options and the lists that package envoy derives.
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

package main

import (
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/envoy"
)

// replacements turn the template of package envoy into one that Helm can execute:
// its own functions become includes and values that are text already.
var replacements = []struct{ old, with string }{
	{"{{address .Admin}}", `{{include "kvlane.envoyAddress" .Admin}}`},
	{"{{address .Ingress}}", `{{include "kvlane.envoyAddress" .Ingress}}`},
	{"{{address .Prefill}}", `{{include "kvlane.envoyAddress" .Prefill}}`},
	{"{{address .Kvlane}}", `{{include "kvlane.envoyAddress" .Kvlane}}`},
	{"{{seconds .MessageTimeout}}", "{{.MessageTimeout}}"},
	{"{{seconds .ConnectionAge}}", "{{.ConnectionAge}}"},
	{"{{seconds $.UpstreamIdle}}", "{{$.UpstreamIdle}}"},
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
	for _, function := range []string{"{{address ", "{{seconds "} {
		if strings.Contains(text, function) {
			return nil, fmt.Errorf("bootstrap.yaml.tmpl uses %s...}} where Helm has nothing for it", function)
		}
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

package envoy

import (
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/kvlane/kvlane/internal/config"
)

// TestRenderIsTextTemplate compares the bootstraps of every combination of options
// with what text/template makes of the same template and values.
func TestRenderIsTextTemplate(t *testing.T) {
	theirs := template.Must(template.New("bootstrap").Option("missingkey=error").Parse(bootstrapText))
	distinct := map[string]bool{}
	for bits := range 1 << 8 {
		on := func(i int) bool { return bits>>i&1 == 1 }
		o := defaults()
		e := &o.Envoy
		o.Listen.Address = "127.0.0.1:9002"
		e.FailClosed, e.FirstToken, e.AccessLog = new(on(0)), on(1), on(2)
		if on(3) {
			o.Disagg.Usage = config.UsageOfPrefill
		}
		if on(4) {
			e.Prefill, o.Listen.Address = "unix:@prefill", `unix:/run/a "b"`
		}
		if on(5) {
			e.RequestBody, e.ResponseBody = BodyFullDuplex, BodyFullDuplex
		}
		if on(6) {
			e.ConnectionAge, e.UploadTimeout = 0, config.Duration(1500*time.Millisecond)
		}
		if on(7) {
			e.Replicas, o.Routing.Headers = []string{"kvlane:9002", "[::1]:9002"}, []string{"x-session-id", "x-other"}
		}
		ours, err := Bootstrap(o)
		if err != nil {
			t.Fatalf("%+v: %v", o, err)
		}
		var want strings.Builder
		if err := theirs.Execute(&want, values(o)); err != nil {
			t.Fatalf("%+v: %v", o, err)
		}
		if string(ours) != want.String() {
			t.Errorf("%+v: got\n%s\nwant\n%s", o, ours, want.String())
		}
		distinct[string(ours)] = true
	}
	if len(distinct) != 1<<8 {
		t.Errorf("%d bootstraps of %d combinations: an option has no effect", len(distinct), 1<<8)
	}
}

// Constructs for which text/template differs from render are errors of render.
func TestRenderRefuses(t *testing.T) {
	values := vars{"Text": "x", "Number": 1, "List": []vars{{"Name": "a"}}}
	for _, text := range []string{
		"{{.None}}", "{{$.None}}", "{{.Number}}", "{{.List}}", "{{if .None}}{{end}}", "{{if .List}}{{end}}", "{{range .Text}}{{end}}",
		"{{range .List}}{{else}}{{end}}", "{{range .List}}{{.Text}}{{end}}", "{{.Text.More}}", "{{.}}", "{{$x := .Text}}", "{{(.Text)}}",
		"{{with .Text}}{{end}}", `{{template "x"}}`, "{{1}}", "{{len .Text}}", "{{if .Text}}", "{{break}}",
	} {
		if out, err := render(text, values); err == nil {
			t.Errorf("%s gives %q", text, out)
		}
	}
	for text, want := range map[string]string{
		"{{- range .List }} {{.Name}}{{$.Text}}{{- end}}": " ax",
		"{{if .Text}}1{{else if .None}}2{{end}}":          "1",
		"{{/* nothing */}}":                               "",
	} {
		if out, err := render(text, values); err != nil || out != want {
			t.Errorf("%s gives %q, %v; want %q", text, out, err, want)
		}
	}
}

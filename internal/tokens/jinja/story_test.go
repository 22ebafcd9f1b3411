package jinja

import (
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestErrorStories shows the message that a client gets when a template rejects a request: the
// file contains a template, variables and the result.
func TestErrorStories(t *testing.T) {
	vars := new(Dict)
	var tpl *Template
	datadriven.RunTest(t, "testdata/stories/errors.txt", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "template":
			var err error
			if tpl, err = Compile(d.Input); err != nil {
				return err.Error() + "\n"
			}
			return "ok\n"
		case "render":
			v, err := ParseJSON([]byte(d.Input))
			if err != nil {
				return err.Error() + "\n"
			}
			vars, _ = v.AsDict()
			out, err := tpl.Render(nil, vars, Env{Now: time.Time{}})
			if err != nil {
				return err.Error() + "\n"
			}
			return string(out) + "\n"
		default:
			t.Fatalf("unknown command %q", d.Cmd)
			return ""
		}
	})
}

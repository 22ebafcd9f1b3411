package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

const referenceIntro = `<!-- Written by 'make generate' from the commands' help. -->

# Commands

` + "`kvlane help`" + ` lists the commands, ` + "`kvlane help COMMAND`" + ` prints what is below. Exit codes: 0 for success, 1 for a
failure (an invalid configuration, a difference), 2 for wrong arguments.

`

// The page has the help of every command.
func TestReferenceOfCommands(t *testing.T) {
	t.Setenv("ENVOY", "") // a default of demo
	var page strings.Builder
	page.WriteString(referenceIntro)
	for _, c := range commands() {
		code, out, errs := kvlane("", append(strings.Fields(c.name), "-h")...)
		if code != 0 || errs != "" || !strings.Contains(out, "kvlane "+c.name) {
			t.Errorf("kvlane %s -h: got code %d, %q, %q, want the help on the standard output", c.name, code, out, errs)
		}
		fmt.Fprintf(&page, "## %s\n\n```\n%s\n```\n\n", c.name, strings.TrimSpace(strings.ReplaceAll(out, "\t", "  ")))
	}
	const file = "../../docs/reference/cli.md"
	text := strings.TrimSuffix(page.String(), "\n")
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != text {
		t.Errorf("docs/reference/cli.md is not current: run 'make generate' (%v)", err)
	}
}

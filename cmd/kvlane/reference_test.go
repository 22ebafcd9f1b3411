package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
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

// Flags that pages name and that other programs have.
var foreignFlags = strings.Fields(`
	chat-template enable-auto-tool-choice exclude-tools-when-tool-choice-none disable-hybrid-kv-cache-manager disaggregation-mode
	enable-metrics enable-multimodal enable-prefix-caching enable-prompt-embeds
	enable-scale-out kv-events-config kv-transfer-config max-logprobs media-io-kwargs mm-hasher-algorithm mm-processor-kwargs
	prefix-cache-retention-interval prefix-caching-hash-algo reasoning-parser speculative-config tokenizer-mode tool-call-parser
	trust-request-chat-template trust-request-mm-kwargs
	concurrency config-path disable-hot-restart
	all-containers create-namespace current dry-run for from-literal namespace repo server-side set version
	build build-arg platform tag
	bundle certificate-identity-regexp certificate-oidc-issuer enable-feature ignore-missing zap-`) // engines, Envoy, kubectl and Helm, Docker, others

var (
	fenced     = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	inCode     = regexp.MustCompile("`[^`]+`")
	invocation = regexp.MustCompile(`(?:^|[^\w./-])kvlane ([a-z][a-z-]*)([^\n|;&` + "`" + `]*)`)
	longFlag   = regexp.MustCompile(`(?:^|[^\w-])--([a-z][a-z0-9_-]*)`)
)

// wrongCommands returns the commands and flags of a page's code that the binary does not have, and how many it names. Where the
// command is not known, any command's flag fits, and those of other programs.
func wrongCommands(page, text string) (wrong []string, seen int) {
	root := rootCommand(streams{in: strings.NewReader(""), out: io.Discard, err: io.Discard})
	has := func(c *cobra.Command, name string) bool { return name == "help" || c.Flags().Lookup(name) != nil }
	known := func(name string) bool {
		return slices.Contains(foreignFlags, name) || slices.ContainsFunc(commands(), func(c command) bool {
			sub, _, err := root.Find(strings.Fields(c.name))
			return err == nil && has(sub, name)
		})
	}
	text = strings.ReplaceAll(text, "\\\n", " ")
	code := []string{text}
	if strings.HasSuffix(page, ".md") {
		code = append(fenced.FindAllString(text, -1), inCode.FindAllString(fenced.ReplaceAllString(text, ""), -1)...)
	}
	for _, c := range code {
		for _, m := range invocation.FindAllStringSubmatch(c, -1) {
			args, _, _ := strings.Cut(m[2], " #")
			if seen++; strings.HasPrefix(args, "/") || m[1] == "help" { // helm install kvlane charts/kvlane
				continue
			}
			sub, _, err := root.Find(append([]string{m[1]}, strings.Fields(args)...))
			if err != nil || sub == root {
				wrong = append(wrong, "kvlane "+m[1])
				continue
			}
			for _, f := range longFlag.FindAllStringSubmatch(args, -1) {
				if seen++; !has(sub, f[1]) {
					wrong = append(wrong, sub.CommandPath()+" --"+f[1])
				}
			}
		}
		for _, f := range longFlag.FindAllStringSubmatch(c, -1) {
			if seen++; !known(f[1]) {
				wrong = append(wrong, "--"+f[1])
			}
		}
	}
	return wrong, seen
}

// Commands and flags that pages, examples and the chart name are the binary's.
func TestCommandsInPages(t *testing.T) {
	all := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/reference/*.md", "docs/examples/*/*", "charts/kvlane/*.*",
		"charts/kvlane/templates/*", "envoy/manifests/*/*"} {
		files, err := filepath.Glob("../../" + pattern)
		if err != nil || len(files) == 0 {
			t.Fatal(pattern, err)
		}
		for _, file := range files {
			if base := filepath.Base(file); base == "CHANGELOG.md" || base == "lab-notes.md" {
				continue // what was, and what was tried
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			wrong, seen := wrongCommands(file, string(text))
			all += seen
			for _, w := range wrong {
				t.Errorf("%s names %s, which there is not", file, w)
			}
		}
	}
	if t.Logf("%d commands and flags", all); all < 200 {
		t.Errorf("got %d commands and flags in all pages, want at least 200: the forms above fit no more", all)
	}
	planted := "`kvlane chek` `kvlane check --life x.yaml` --not-in-code `--follow` `--folow` `kvlane events tail --replay x`\n`kvlane events tail --cost`\n" +
		"```\nkvlane explain --last --follow | grep --out\nvllm serve --enable-metrics --enable-metric\n```\n"
	wrong, _ := wrongCommands("planted.md", planted)
	want := []string{"kvlane explain --follow", "--enable-metric", "kvlane chek", "kvlane check --life", "--life", "--folow", "kvlane events tail --cost", "--cost"}
	slices.Sort(wrong)
	if slices.Sort(want); !slices.Equal(wrong, want) {
		t.Errorf("got %q wrong, want %q", wrong, want)
	}
}

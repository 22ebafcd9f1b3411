package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	stdio "io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
)

func runCheck(ctx context.Context, io streams, args []string) error {
	f := flags("check")
	file := f.String("config", "", "configuration `file`, the same as the argument")
	strict := f.Bool("strict", false, "warnings are errors")
	live := f.Bool("live", false, "Kvlane is to run on this machine now: missing files and addresses in use are errors, workers that do not answer are warnings, and tokenizers are downloaded")
	output := f.String("output", "text", "`format`: text, json or github (annotations of a workflow)")
	if err := parse(io, f, args, 1); err != nil {
		return err
	}
	if *file = cmp.Or(*file, f.Arg(0)); *file == "" {
		return usageError{"needs a FILE, or - for the standard input"}
	}
	show := map[string]func(streams, string, []finding){"text": findingsAsText, "json": findingsAsJSON, "github": findingsForGitHub}[*output]
	if show == nil {
		return usageError{fmt.Sprintf("--output %q is not one of text, json, github", *output)}
	}
	text, err := config.ReadFile(*file)
	if *file == "-" {
		*file = "standard input"
		text, err = stdio.ReadAll(io.in)
	}
	if err != nil {
		return err
	}
	stop := during(io.err, "checking "+*file)
	defer stop()
	var running func(config.Admin) ([]byte, bool)
	if *live {
		running = func(a config.Admin) ([]byte, bool) { return effectiveConfig(ctx, a) }
	}
	c, warnings, err := config.Inspect(*file, text, running)
	problems, read := errors.AsType[config.ProblemsError](err)
	if err != nil && !read {
		return err
	}
	if c != nil {
		broken, notExact := checkParts(ctx, c, *live)
		problems = append(problems, broken.At(*file, text)...)
		if *live && c.Workers.Health.Every > 0 {
			notExact = append(notExact, silentWorkers(ctx, &c.Workers)...)
		}
		warnings = append(warnings, notExact.At(*file, text)...)
	}
	stop()
	var found []finding
	if *strict {
		problems, warnings = append(warnings, problems...), nil
	}
	for _, w := range warnings {
		found = append(found, finding{"warning", w})
	}
	for _, p := range problems {
		found = append(found, finding{"error", p})
	}
	show(io, *file, found)
	if n := len(problems); n > 0 {
		return fmt.Errorf("%s is not valid: %s", *file, plural(n, "problem"))
	}
	if *output == "text" {
		noted := ""
		if len(warnings) > 0 {
			noted = ", " + plural(len(warnings), "warning")
		}
		fmt.Fprintf(io.out, "%s: valid%s; %s, %s, policy %s\n", *file, noted, plural(len(c.Models), "model"), plural(len(c.Workers.Static), "static worker"), c.Routing.Preset)
	}
	return nil
}

// silentWorkers returns the workers of the configuration and of workers.file that fail a health check, as serve makes it. They are
// warnings, since engines may start after Kvlane.
func silentWorkers(ctx context.Context, c *config.Workers) config.ProblemsError {
	text, _ := config.ReadFile(c.File) // Inspect reports what is wrong with the file
	listed, _ := config.ParseWorkers(c.File, text)
	all := slices.Concat(c.Static, listed)
	found, checks := make(config.ProblemsError, len(all)), sync.WaitGroup{}
	for i := range all {
		checks.Go(func() {
			if err := workers.Health(ctx, all[i].Address, c.Health.Timeout.Std()); err != nil {
				found[i] = config.Problem{Path: "workers.file", Message: fmt.Sprintf("worker %s is not ready (%v): start it, or correct its address; it gets no requests", all[i].Name, err)}
			}
			if i < len(c.Static) {
				found[i].Path = fmt.Sprintf("workers.static[%d].address", i)
			}
		})
	}
	checks.Wait()
	return slices.DeleteFunc(found, func(p config.Problem) bool { return p.Message == "" })
}

// effectiveConfig returns the configuration of the Kvlane that serves an admin port, nil if none answers. closed
// reports that it is loading tokenizers or requires the token of admin.token_file, which is not sent to unknown
// programs.
func effectiveConfig(ctx context.Context, a config.Admin) (text []byte, closed bool) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	body, err := adminClient{&a.Address, new(string), stdio.Discard}.get(ctx, "/debug/config", "application/yaml")
	if err != nil {
		return nil, strings.HasPrefix(err.Error(), needsToken) || strings.HasPrefix(err.Error(), stillLoads)
	}
	defer body.Close()
	text, _ = stdio.ReadAll(stdio.LimitReader(body, 16<<20))
	return text, false
}

// finding is a problem as check reports it.
type finding struct {
	Severity string `json:"severity"` // error or warning
	config.Problem
}

// plural returns a number with a noun, which gets an s unless the number is 1.
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func findingsAsText(io streams, _ string, found []finding) {
	for _, f := range found {
		fmt.Fprintf(io.err, "%s: %s\n", f.Severity, f.Problem)
	}
}

func findingsAsJSON(io streams, file string, found []finding) {
	e := json.NewEncoder(io.out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	_ = e.Encode(struct { //nolint:errchkjson // the reader left
		File     string    `json:"file"`
		Valid    bool      `json:"valid"`
		Problems []finding `json:"problems"`
	}{file, !slices.ContainsFunc(found, func(f finding) bool { return f.Severity == "error" }), append([]finding{}, found...)}) // a list, never null
}

// findingsForGitHub writes workflow commands, which annotate lines of a pull request.
func findingsForGitHub(io streams, _ string, found []finding) {
	value := strings.NewReplacer("%", "%25", "\r", "%0D", "\n", "%0A")
	property := strings.NewReplacer("%", "%25", "\r", "%0D", "\n", "%0A", ":", "%3A", ",", "%2C")
	for _, f := range found {
		fmt.Fprintf(io.out, "::%s file=%s,line=%d,col=%d,title=%s::%s\n", f.Severity, property.Replace(f.File),
			max(f.Line, 1), max(f.Column, 1), property.Replace(f.Path), value.Replace(f.Message))
	}
}

func runConfig(_ context.Context, io streams, args []string) error {
	f := flags("config")
	f.Bool("effective", true, "print the configuration with all defaults, presets and variables filled in; secrets are hidden")
	return printFrom(io, f, args, (*config.Config).Effective)
}

func runEnvoyConfig(_ context.Context, io streams, args []string) error {
	return printFrom(io, flags("envoy-config"), args, envoy.Bootstrap)
}

// printFrom prints what of returns for the configuration file that is named, or for the defaults.
func printFrom(io streams, f *flag.FlagSet, args []string, of func(*config.Config) ([]byte, error)) error {
	file := f.String("config", "", "configuration `file`, the same as the argument; without it the defaults")
	if err := parse(io, f, args, 1); err != nil {
		return err
	}
	c := new(config.Default())
	if name := cmp.Or(*file, f.Arg(0)); name != "" {
		var err error
		if c, _, err = config.Load(name); err != nil {
			return err
		}
	}
	text, err := of(c)
	if err == nil {
		_, err = io.out.Write(text)
	}
	return err
}

func runSchema(_ context.Context, io streams, args []string) error {
	if err := parse(io, flags("schema"), args, 0); err != nil {
		return err
	}
	_, err := io.out.Write(config.Schema())
	return err
}

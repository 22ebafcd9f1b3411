// Command kvlane routes LLM requests by KV cache, behind an Envoy.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	stdio "io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
)

// version is set by the linker.
var version = "unknown"

// streams are a command's input and output.
type streams struct {
	in       stdio.Reader
	out, err stdio.Writer
}

// command is a subcommand of the binary.
type command struct {
	name, args, summary string
	run                 func(ctx context.Context, io streams, args []string) error
}

// commands is a function because help lists it.
func commands() []command {
	return []command{
		{"serve", "--config FILE", "serve Envoy", runServe},
		{"demo", "[--check]", "bring up Envoy, Kvlane and simulated engines", runDemo},
		{"engine-sim", "[flags]", "run a simulated engine", runEngineSim},
		{"check", "FILE|-", "validate a configuration and explain every problem", runCheck},
		{"config", "[FILE]", "print a configuration with all defaults", runConfig},
		{"envoy-config", "[--config FILE]", "print the bootstrap of the standalone Envoy", runEnvoyConfig},
		{"tokenize", "--tokenizer DIR", "texts to token ids, JSON lines in and out", runTokenize},
		{"render", "--tokenizer DIR | --template FILE", "request bodies to prompts and ids, JSON lines in and out", runRender},
		{"tokens-check", "--tokenizer DIR --engine URL", "compare with a live engine", runTokensCheck},
		{"events", "tail|decode", "show KV events", runEvents},
		{"status", "", "show workers, caches and totals; exit with 1 if Kvlane is not ready", runStatus},
		{"healthcheck", "[--url URL]", "exit with 0 if a URL answers 200, else with 1 and the reason in one line", runHealthcheck},
		{"top", "", "show the busiest ranks again and again", runTop},
		{"decisions", "[--follow]", "list the last decisions, or follow them", runDecisions},
		{"record", "[--out FILE]", "write live traffic as a trace for kvlane replay", runRecord},
		{"explain", "REQUEST-ID|--last", "show how a request was decided", runExplain},
		{"replay", "--trace FILE", "compare policies on a trace or a generated workload", runReplay},
		{"schema", "", "print the JSON schema of the configuration", runSchema},
		{"version", "", "print the version", runVersion},
	}
}

// usageError leads to exit code 2.
type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, streams{os.Stdin, os.Stdout, os.Stderr}, os.Args[1:])
	stop()
	os.Exit(code)
}

func run(ctx context.Context, io streams, args []string) int {
	if len(args) > 1 && args[0] == "help" {
		args = append(slices.Clone(args[1:]), "-h")
	}
	if len(args) == 0 || slices.Contains([]string{"help", "-h", "--help"}, args[0]) {
		help(io.out)
		return 0
	}
	if args[0] == "--version" {
		args[0] = "version"
	}
	all := commands()
	i := slices.IndexFunc(all, func(c command) bool { return c.name == args[0] })
	if i < 0 {
		fmt.Fprintf(io.err, "kvlane: no command %q; `kvlane help` lists them\n", args[0])
		return 2
	}
	err := all[i].run(ctx, io, args[1:])
	var usage usageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(io.err, "kvlane %s: %v\n", args[0], err)
		return 2
	default:
		fmt.Fprintf(io.err, "kvlane %s: %v\n", args[0], err)
		return 1
	}
}

func help(w stdio.Writer) {
	fmt.Fprintln(w, "Kvlane routes LLM requests by KV cache, behind an Envoy.\n\nUsage: kvlane COMMAND [flags]   (kvlane COMMAND -h shows its flags)")
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range commands() {
		fmt.Fprintf(tw, "  %s %s\t%s\n", c.name, c.args, c.summary)
	}
	_ = tw.Flush()
}

// flags returns the flag set of a command. parse reports its errors and prints its help.
func flags(name string) *flag.FlagSet {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(stdio.Discard)
	return f
}

// parse parses flags; rest is the number of arguments that may follow them. Asked for help,
// it prints it and returns flag.ErrHelp.
func parse(io streams, f *flag.FlagSet, args []string, rest int) error {
	err := f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		helpOf(io.out, f)
		return err
	case err != nil:
		return usageError{fmt.Sprintf("%v (kvlane %s -h shows the flags)", err, f.Name())}
	case f.NArg() > rest:
		return usageError{"unexpected argument " + strings.Join(f.Args()[rest:], " ")}
	}
	return nil
}

// helpOf prints the help of a command.
func helpOf(w stdio.Writer, f *flag.FlagSet) {
	verb, _ := strings.CutPrefix(f.Name(), "events ")
	text := eventsUsage[verb]
	for _, c := range commands() {
		if c.name == f.Name() {
			text = fmt.Sprintf("Usage: kvlane %s %s\n\n%s.\n", c.name, c.args, strings.ToUpper(c.summary[:1])+c.summary[1:])
		}
	}
	var b strings.Builder
	f.SetOutput(&b)
	f.PrintDefaults()
	if b.Len() > 0 {
		text += "\nFlags:\n" + strings.ReplaceAll("\n"+b.String(), "\n  -", "\n  --")[1:]
	}
	fmt.Fprint(w, text)
}

func runVersion(_ context.Context, io streams, args []string) error {
	f := flags("version")
	asJSON := f.Bool("json", false, "print a JSON object")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(io.out).Encode(map[string]string{"version": version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH})
	}
	fmt.Fprintf(io.out, "kvlane %s %s %s/%s\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return nil
}

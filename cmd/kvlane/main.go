// Command kvlane routes LLM requests by KV cache, behind an Envoy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
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
	in       io.Reader
	out, err io.Writer
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
		{"explain", "REQUEST-ID", "show how a request was decided", runExplain},
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
	if len(args) == 0 || args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
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

func help(w io.Writer) {
	fmt.Fprintln(w, "Kvlane routes LLM requests by KV cache, behind an Envoy.\n\nUsage: kvlane COMMAND [flags]   (kvlane COMMAND -h shows its flags)")
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range commands() {
		fmt.Fprintf(tw, "  %s %s\t%s\n", c.name, c.args, c.summary)
	}
	_ = tw.Flush()
}

// flags returns a flag set that reports errors as usageError.
func flags(io streams, name string) *flag.FlagSet {
	f := flag.NewFlagSet("kvlane "+name, flag.ContinueOnError)
	f.SetOutput(io.err)
	return f
}

// parse parses flags; rest is the number of arguments that may follow them.
func parse(f *flag.FlagSet, args []string, rest int) error {
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return usageError{err.Error()}
	}
	if f.NArg() > rest {
		return usageError{"unexpected argument " + strings.Join(f.Args()[rest:], " ")}
	}
	return nil
}

func runVersion(_ context.Context, io streams, args []string) error {
	if err := parse(flags(io, "version"), args, 0); err != nil {
		return err
	}
	fmt.Fprintf(io.out, "kvlane %s %s %s/%s\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return nil
}

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
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
)

// version is set by the linker.
var version = "unknown"

// streams are a command's input and output.
type streams struct {
	in       stdio.Reader
	out, err stdio.Writer
	// command is the command that runs. If declaring is set, parse adds the flags to it and ends the run.
	command   *cobra.Command
	declaring bool
}

// command is a subcommand of the binary.
type command struct {
	name, args, summary string
	run                 func(ctx context.Context, io streams, args []string) error
	examples            string // a line each
}

// commands is a function because tests list it.
func commands() []command {
	return []command{
		{"serve", "FILE", "serve Envoy", runServe,
			"serve kvlane.yaml\nserve --pool-name vllm-qwen3 --grpc-port 9002"},
		{"demo", "[--check]", "bring up Envoy, Kvlane and simulated engines", runDemo,
			"demo --envoy /usr/bin/envoy\ndemo --pd --ingress 127.0.0.1:8081"},
		{"engine-sim", "[flags]", "run a simulated engine", runEngineSim,
			"engine-sim --model qwen3 --ranks 2"},
		{"check", "FILE|-", "validate a configuration and explain every problem", runCheck,
			"check kvlane.yaml\ncheck --strict --live kvlane.yaml\ncheck --output github kvlane.yaml"},
		{"config", "[FILE]", "print a configuration with all defaults", runConfig,
			"config\nconfig --effective kvlane.yaml"},
		{"envoy-config", "[FILE]", "print the bootstrap of the standalone Envoy", runEnvoyConfig,
			"envoy-config kvlane.yaml > envoy.yaml"},
		{"tokenize", "--tokenizer DIR", "texts to token ids, JSON lines in and out", runTokenize,
			`tokenize --tokenizer builtin:qwen3 <<< '{"text": "Hello"}'`},
		{"render", "--tokenizer DIR | --template FILE", "request bodies to prompts and ids, JSON lines in and out", runRender,
			"render --tokenizer builtin:qwen3 --tokens < requests.jsonl"},
		{"tokens-check", "--tokenizer DIR --engine URL", "compare with a live engine", runTokensCheck,
			"tokens-check --tokenizer /models/qwen3 --engine http://127.0.0.1:8000"},
		{"events tail", "ENDPOINT", "show an engine's KV events as they come", runTail,
			"events tail tcp://10.0.0.5:5557 --replay tcp://10.0.0.5:5558\nevents tail --engine trtllm http://10.0.0.5:8000"},
		{"status", "", "show workers, caches and totals; exit with 1 if Kvlane is not ready", runStatus,
			"status\nstatus --admin 10.0.0.9:9090 --json"},
		{"healthcheck", "[--url URL]", "exit with 0 if a URL answers 200, else with 1 and the reason in one line", runHealthcheck,
			"healthcheck\nhealthcheck --wait 30s"},
		{"top", "", "show the busiest ranks again and again", runTop,
			"top --every 1s"},
		{"decisions", "[--follow]", "list the last decisions, or follow them", runDecisions,
			"decisions --follow\ndecisions --n 100 --json"},
		{"record", "[--out FILE]", "write live traffic as a trace for kvlane replay", runRecord,
			"record --out trace.jsonl --duration 10m"},
		{"explain", "REQUEST-ID|--last", "show how a request was decided", runExplain,
			"explain --last\nexplain --last --json\nexplain --rerun decision.json"},
		{"replay", "--trace FILE", "compare policies on a trace or a generated workload", runReplay,
			"replay --trace trace.jsonl --load 2.5"},
		{"schema", "", "print the JSON schema of the configuration", runSchema,
			"schema > kvlane.schema.json"},
		{"version", "", "print the version", runVersion,
			"version --json"},
	}
}

// usageError leads to exit code 2.
type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

// failure is an error of a command that had valid arguments.
type failure struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process, unless it comes together with the first, as from a terminal and a parent process.
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	code := run(ctx, streams{in: os.Stdin, out: os.Stdout, err: os.Stderr}, os.Args[1:])
	stop()
	os.Exit(code)
}

// errInterrupted is the error of a command that a signal ended.
var errInterrupted = errors.New("interrupted")

// input is a command's input until its context ends, so that a signal ends a command that waits for input. On a
// terminal it explains how to end the input.
type input struct {
	ctx   context.Context //nolint:containedctx // a Reader takes none
	from  stdio.Reader
	hints stdio.Writer
	begun bool
}

func (in *input) Read(p []byte) (n int, err error) {
	if !in.begun && observe.Terminal(in.from) {
		fmt.Fprintln(in.hints, "reading from the terminal: Ctrl-D ends the input")
	}
	in.begun = true
	type part struct {
		bytes []byte
		err   error
	}
	read := make(chan part, 1)
	go func() { // nothing can interrupt a blocked read, so it is left behind when the command ends
		text := make([]byte, len(p))
		n, err := in.from.Read(text)
		read <- part{text[:n], err}
	}()
	select {
	case got := <-read:
		return copy(p, got.bytes), got.err
	case <-in.ctx.Done():
		return 0, errInterrupted
	}
}

func run(ctx context.Context, io streams, args []string) int {
	args = append([]string{}, args...) // cobra takes nil for the process's arguments
	switch {
	case len(args) > 1 && args[0] == "help":
		args = append(args[1:], "--help")
	case len(args) == 1 && (args[0] == "--version" || args[0] == "-version"):
		args[0] = "version"
	case len(args) == 1 && args[0] == "-help":
		args[0] = "--help"
	}
	io.in = &input{ctx: ctx, from: io.in, hints: io.err}
	root := rootCommand(io)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	_, failed := errors.AsType[failure](err)
	hint := ""
	if unknown := unknownFlag.FindStringSubmatch(err.Error()); unknown != nil && !failed {
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
		if near := config.Nearest(unknown[1], known); near != "" {
			hint = "; did you mean --" + near + "?"
		}
	} else if cmd == root && !strings.Contains(err.Error(), "Did you mean") {
		hint = " (kvlane help lists the commands)"
	}
	fmt.Fprintf(io.err, "%s: %s%s\n", cmd.CommandPath(), strings.TrimSpace(err.Error()), hint)
	if failed {
		return 1
	}
	return 2
}

// unknownFlag finds the name in the errors of pflag, and of replay's own flags.
var unknownFlag = regexp.MustCompile(`^(?:unknown flag:|no flag|unknown shorthand flag: '.' in) -+([\w-]+)`)

// unsorted lists commands in their own order. It is a setting of the package cobra, and tests run commands concurrently.
var unsorted = sync.OnceFunc(func() { cobra.EnableCommandSorting = false })

// rootCommand returns the tree of all commands. Each parses its own flags; its flag set lists them for help and man pages.
func rootCommand(io streams) *cobra.Command {
	unsorted()
	root := &cobra.Command{
		Use: "kvlane", Long: "Kvlane routes LLM requests by KV cache, behind an Envoy.",
		SilenceErrors: true, SilenceUsage: true,
	}
	root.SetOut(io.out)
	root.SetErr(io.err)
	parent := func(c *cobra.Command, needs string) {
		c.RunE = func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				needs = fmt.Sprintf("%s, not %q", needs, args[0])
			}
			return usageError{"needs " + needs}
		}
		c.Args = cobra.ArbitraryArgs
	}
	events := &cobra.Command{Use: "events", Short: "show KV events"}
	parent(events, "tail ENDPOINT")
	for _, c := range commands() {
		under, name, more := root, c.name, ""
		if verb, ok := strings.CutPrefix(name, "events "); ok {
			under, name, more = events, verb, tailHelp
			root.AddCommand(events)
		}
		sub := &cobra.Command{
			Use: strings.TrimSpace(name + " " + c.args), Short: c.summary,
			Long:    strings.ToUpper(c.summary[:1]) + c.summary[1:] + "." + more,
			Example: "  kvlane " + strings.ReplaceAll(c.examples, "\n", "\n  kvlane "), DisableFlagParsing: true,
		}
		sub.RunE = func(cmd *cobra.Command, args []string) error {
			io.command = cmd
			err := c.run(cmd.Context(), io, args)
			if _, usage := errors.AsType[usageError](err); usage || err == nil {
				return err
			}
			if errors.Is(err, flag.ErrHelp) {
				return nil
			}
			return failure{err}
		}
		under.AddCommand(sub)
		_ = c.run(context.Background(), streams{command: sub, declaring: true}, nil) // adds its flags
	}
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			parent(c, "bash, zsh, fish or powershell")
		}
	}
	return root
}

// flags returns the flag set of a command. parse reports its errors and prints its help.
func flags(name string) *flag.FlagSet {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(stdio.Discard)
	return f
}

// parse parses flags, which may precede and follow arguments; rest is the largest number of arguments, which f.Arg
// returns. Asked for help, it prints it and returns flag.ErrHelp.
func parse(io streams, f *flag.FlagSet, args []string, rest int) error {
	if io.declaring {
		f.VisitAll(func(one *flag.Flag) {
			p := pflag.PFlagFromGoFlag(one)
			if p.Value.Type() == "boolFunc" { // which help would show as a type
				p.Value = boolValue{p.Value}
			}
			io.command.Flags().AddFlag(p)
		})
		return flag.ErrHelp
	}
	p := pflag.NewFlagSet(f.Name(), pflag.ContinueOnError)
	p.AddGoFlagSet(f)
	p.Usage = func() {}
	err := p.Parse(args)
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return errors.Join(io.command.Help(), flag.ErrHelp)
	case err != nil:
		return usageError{fmt.Sprintf("%s (kvlane %s --help shows the flags)", strings.Replace(err.Error(), "parse error", "want a number, or a duration like 30s", 1), f.Name())}
	case p.NArg() > rest, p.NArg() > 0 && p.Changed("config"): // of two files one would be left out silently
		return usageError{"unexpected argument " + strings.Join(p.Args()[min(rest, p.NArg()-1):], " ")}
	}
	return f.Parse(append([]string{"--"}, p.Args()...))
}

// boolValue is shown as a flag without a value.
type boolValue struct{ pflag.Value }

func (boolValue) Type() string { return "bool" }

// during writes to w every two seconds what the caller is doing, until the returned function is called.
func during(w stdio.Writer, what string) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		began, tick := time.Now(), time.NewTicker(2*time.Second)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case now := <-tick.C:
				fmt.Fprintf(w, "%s (%s)\n", what, now.Sub(began).Round(time.Second))
			}
		}
	}()
	return sync.OnceFunc(func() { close(done); <-ended })
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

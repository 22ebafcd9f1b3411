package main

import (
	"context"
	"fmt"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/config"
)

func loadConfig(file string) (c *config.Config, warnings []config.Problem, err error) {
	if file == "" {
		return nil, nil, usageError{"needs --config FILE"}
	}
	return config.Load(file)
}

func runCheck(_ context.Context, io streams, args []string) error {
	f := flags(io, "check")
	file := f.String("config", "", "configuration `file`")
	strict := f.Bool("strict", false, "warnings are errors")
	if err := parse(f, args, 0); err != nil {
		return err
	}
	if *file == "" {
		return usageError{"needs --config FILE"}
	}
	c, warnings, err := config.Inspect(*file)
	if err != nil {
		return err
	}
	warn := func(problem string) { fmt.Fprintf(io.err, "warning: %s\n", problem) }
	for _, w := range warnings {
		warn(fmt.Sprint(w))
	}
	broken, notExact := checkParts(c, *strict)
	for _, p := range notExact {
		warn(config.Place(*file, config.ProblemsError{p}).Error())
	}
	if len(broken) > 0 {
		return config.Place(*file, broken)
	}
	if *strict && len(warnings) > 0 {
		return fmt.Errorf("%s: %d warnings", *file, len(warnings))
	}
	fmt.Fprintf(io.out, "%s: valid; %d models, %d static workers, policy %s\n", *file, len(c.Models), len(c.Workers.Static), c.Routing.Preset)
	return nil
}

func runEnvoyConfig(_ context.Context, io streams, args []string) error {
	f := flags(io, "envoy-config")
	file := f.String("config", "", "configuration `file` (default: the built-in defaults)")
	if err := parse(f, args, 0); err != nil {
		return err
	}
	def := config.Default()
	c := &def
	if *file != "" {
		var err error
		if c, _, err = config.Load(*file); err != nil {
			return err
		}
	}
	text, err := envoy.Bootstrap(envoyOptions(c))
	if err != nil {
		return err
	}
	_, err = io.out.Write(text)
	return err
}

// envoyOptions returns the bootstrap options of a configuration.
func envoyOptions(c *config.Config) envoy.Options {
	o := envoy.Defaults()
	o.Ingress, o.Admin, o.Kvlane = c.Envoy.Ingress, c.Envoy.Admin, c.Listen.Address
	o.Prefill = c.Envoy.Prefill
	o.MaxBody = int64(c.Limits.MaxBody)
	o.MessageTimeout, o.StallTimeout = c.Envoy.MessageTimeout.Std(), c.Envoy.StallTimeout.Std()
	o.RequestTimeout = c.Envoy.UploadTimeout.Std()
	if c.Disagg.Connector != "" || c.Routing.Wait.Requests > 0 {
		o.RequestTimeout += o.MessageTimeout
	}
	o.MaxHeap = int64(c.Envoy.MaxHeap)
	o.ConnectionAge = c.Envoy.ConnectionAge.Std()
	o.FailClosed, o.FirstToken, o.AccessLog = c.Envoy.FailClosed, c.Envoy.FirstToken, c.Envoy.AccessLog
	o.RequestBody, o.ResponseBody = c.Envoy.RequestBody, c.Envoy.ResponseBody
	o.ModeOverride = c.Disagg.Usage == config.UsageOfPrefill
	return o
}

func runSchema(_ context.Context, io streams, args []string) error {
	if err := parse(flags(io, "schema"), args, 0); err != nil {
		return err
	}
	_, err := io.out.Write(config.Schema())
	return err
}

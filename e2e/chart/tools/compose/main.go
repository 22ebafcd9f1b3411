// Command compose reads a compose file with the code of Docker's plugin and prints it as `docker compose config` does, as JSON.
// With --prometheus it reads a configuration with Prometheus' own code, as `promtool check config` does, and prints nothing.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/config"
	_ "github.com/prometheus/prometheus/discovery/dns" // dns_sd_configs
)

func main() {
	if err := check(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func check(args []string) error {
	if len(args) == 2 && args[0] == "--prometheus" {
		c, err := config.LoadFile(args[1], false, promslog.NewNopLogger())
		if err == nil {
			_, err = c.GetScrapeConfigs()
		}
		return err
	}
	options, err := cli.NewProjectOptions(args, cli.WithOsEnv, cli.WithDotEnv)
	if err != nil {
		return err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return err
	}
	text, err := project.MarshalJSON()
	if err == nil {
		_, err = os.Stdout.Write(text)
	}
	return err
}

package config

import (
	"time"

	"github.com/kvlane/kvlane/routing"
)

// SLO is the latency targets of requests.
type SLO struct {
	TTFT  Duration `yaml:"ttft" jsonschema_description:"Target for the time to the first token of requests whose model has none (models[].slo.ttft) and that do not carry one (x-slo-ttft-ms); 0s: none."`
	Unmet string   `yaml:"unmet" jsonschema:"enum=route,enum=queue,enum=refuse" jsonschema_description:"What is done with a request whose target no worker is predicted to meet: route it like any other, queue it until its worker has no other prompt to compute (needs flow.max_requests), or refuse it (429 with Retry-After)."`
}

// ModelSLO is the targets of a model.
type ModelSLO struct {
	TTFT Duration `yaml:"ttft" jsonschema_description:"Target for the time to the first token of requests that do not carry one; 0s: that of slo.ttft."`
}

// MaxTTFT is the largest allowed target for the time to the first token.
const MaxTTFT = time.Hour

// TTFT returns the target of a model's requests, 0 for none.
func (c *Config) TTFT(model string) time.Duration {
	for i := range c.Models {
		if m := &c.Models[i]; m.Name == model && m.SLO.TTFT > 0 {
			return m.SLO.TTFT.Std()
		}
	}
	return c.SLO.TTFT.Std()
}

func (c *Config) validateSLO(bad report) {
	check := func(path string, d Duration) {
		if d.Std() > MaxTTFT {
			bad(path, "%s is more than %s", d.Std(), MaxTTFT)
		}
	}
	check("slo.ttft", c.SLO.TTFT)
	for i := range c.Models {
		check(item("models", i)+".slo.ttft", c.Models[i].SLO.TTFT)
	}
	if c.SLO.Unmet == string(routing.UnmetQueue) && c.Flow.Requests == 0 {
		bad("slo.unmet", "queue needs a queue: set flow.max_requests")
	}
}

// warnSLO reports targets for which no prediction is possible.
func (c *Config) warnSLO(note report) {
	wanted := c.SLO.TTFT > 0 || c.SLO.Unmet != string(routing.UnmetRoute)
	for i := range c.Models {
		wanted = wanted || c.Models[i].SLO.TTFT > 0
	}
	if wanted && !c.Envoy.FirstToken {
		note("slo", "no first token is seen, so none is predicted: set envoy.first_token: true")
	}
}

package config

import (
	"slices"
	"strconv"
)

// warn reports what is valid and hardly meant.
func (c *Config) warn(note report) {
	w := &c.Workers
	if len(w.Static) == 0 && w.File == "" && len(w.DNS) == 0 && w.Kubernetes == nil {
		note("workers", "there are none: every request is answered 503")
	}
	known := map[string]bool{}
	for i := range c.Models {
		for _, name := range slices.Concat([]string{c.Models[i].Name}, c.Models[i].Aliases, c.Models[i].Adapters) {
			known[name] = true
		}
	}
	for i := range c.Models {
		if m := &c.Models[i]; m.Check.Disabled && m.Tokenizer != "" {
			note("models["+strconv.Itoa(i)+"].check.disabled", "the ids of %q are never compared with an engine's: if they differ, nothing will say so", m.Name)
		}
	}
	owners := map[string]string{}
	look := func(path string, l *Worker) {
		for i, name := range l.Models {
			if len(known) > 0 && !known[name] {
				note(path+".models["+strconv.Itoa(i)+"]", "no models[] entry is called %q: its requests are routed by load", name)
			}
		}
		if l.Engine == "trtllm" && l.Ranks > 1 && l.RankBy == "header" && c.Disagg.Connector == "" {
			note(path+".ranks", "TensorRT-LLM takes a rank only of requests that are split (disagg.connector): the engine chooses; rank_by: none says so")
		}
		if l.Name == "" {
			return
		}
		if first, taken := owners[l.Name]; taken {
			note(path+".name", "%q is %s already, which counts", l.Name, first)
		} else {
			owners[l.Name] = path
		}
	}
	for i := range w.Static {
		look("workers.static["+strconv.Itoa(i)+"]", &w.Static[i])
	}
	for i := range c.listed {
		look("workers.file["+strconv.Itoa(i)+"]", &c.listed[i])
	}
	for i := range w.DNS {
		look("workers.dns["+strconv.Itoa(i)+"].worker", &w.DNS[i].Worker)
	}
	c.warnDisagg(note)
}

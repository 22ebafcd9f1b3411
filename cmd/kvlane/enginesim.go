package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/tokens/models"
)

func runEngineSim(ctx context.Context, io streams, args []string) error {
	f := flags("engine-sim")
	var opts enginesim.Options
	opts.BindFlags(f)
	tokenizer := f.String("tokenizer", models.Builtin+"qwen3", "`folder` with tokenizer.json and tokenizer_config.json, or hf:Org/Model@revision")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	files, err := openTokenizer(ctx, io, *tokenizer)
	if err != nil {
		return err
	}
	loaded := during(io.err, "loading tokenizer "+*tokenizer)
	opts.Tokenizer, err = enginesim.LoadTokenizer(files)
	loaded()
	if err != nil {
		return err
	}
	e, err := enginesim.Start(ctx, opts)
	if wrong, ok := errors.AsType[enginesim.OptionsError](err); ok {
		return usageError{wrong.Error()}
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(io.out, "simulated %s serves %s at %s\nstatistics and faults at http://%s/sim/stats and /sim/faults\n", cmp.Or(string(opts.Engine), "vllm"), opts.Model, e.URL(), e.SideAddr())
	for r := range opts.Ranks {
		fmt.Fprintf(io.out, "rank %d: API %s, events %s, replay %s\n", r, e.AddrOf(r), cmp.Or(e.EventsEndpoint(r), "none"), cmp.Or(e.ReplayEndpoint(r), "none"))
	}
	<-ctx.Done()
	e.Close()
	return nil
}

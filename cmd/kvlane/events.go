package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// tailHelp follows the summary of `events tail`.
const tailHelp = `

Prints a JSON object a line until Ctrl-C. ENDPOINT is a ZMQ endpoint, such as tcp://10.0.0.5:5557, or the http://
address from which TensorRT-LLM's events are polled. Connections made and missed are told on stderr too.`

func runTail(ctx context.Context, io streams, args []string) error {
	f := flags("events tail")
	engine := f.String("engine", "vllm", "`dialect`: vllm, sglang, trtllm")
	replay := f.String("replay", "", "replay `endpoint`, to see past events and fill gaps")
	bind := f.Bool("bind", false, "wait at the endpoint for the engine to connect")
	topic := f.String("topic", "", "ZMQ `topic`")
	if err := parse(io, f, args, 1); err != nil {
		return err
	}
	endpoint := f.Arg(0)
	if endpoint == "" {
		return usageError{"needs one endpoint"}
	}
	if !slices.Contains([]feed.Engine{feed.VLLM, feed.SGLang, feed.TRTLLM}, feed.Engine(*engine)) {
		return usageError{fmt.Sprintf("--engine %q is not one of vllm, sglang, trtllm", *engine)}
	}
	src := feed.Source{Worker: endpoint, Engine: feed.Engine(*engine), Rank: kvindex.NoRank, RankFromBatch: true, Bind: *bind, Topic: *topic, Replay: *replay}
	if strings.HasPrefix(endpoint, "http://") || strings.HasPrefix(endpoint, "https://") {
		src.PollURL = endpoint
	} else {
		src.Endpoint = endpoint
	}
	return feed.Tail(ctx, src, io.out, io.err)
}

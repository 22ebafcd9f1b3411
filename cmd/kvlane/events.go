package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

func runEvents(ctx context.Context, io streams, args []string) error {
	if len(args) == 0 || args[0] != "tail" && args[0] != "decode" {
		return usageError{"needs tail ENDPOINT or decode FILE"}
	}
	verb := args[0]
	f := flags(io, "events "+verb)
	engine := f.String("engine", "vllm", "`dialect`: vllm, sglang, trtllm")
	replay := f.String("replay", "", "replay `endpoint`, to see past events and fill gaps (tail)")
	bind := f.Bool("bind", false, "wait at the endpoint for the engine to connect (tail)")
	topic := f.String("topic", "", "ZMQ `topic` (tail)")
	subject, err := parseSubject(f, args[1:])
	if err != nil {
		return err
	}
	if subject == "" {
		return usageError{"needs one endpoint (tail) or file (decode)"}
	}
	switch feed.Engine(*engine) {
	case feed.VLLM, feed.SGLang, feed.TRTLLM:
	default:
		return usageError{fmt.Sprintf("--engine %q is not one of vllm, sglang, trtllm", *engine)}
	}
	if verb == "tail" {
		src := feed.Source{Worker: subject, Engine: feed.Engine(*engine), Rank: kvindex.NoRank, RankFromBatch: true, Bind: *bind, Topic: *topic, Replay: *replay}
		if len(subject) > 4 && subject[:4] == "http" {
			src.PollURL = subject
		} else {
			src.Endpoint = subject
		}
		return feed.Tail(ctx, src, io.out)
	}
	in := io.in
	if subject != "-" {
		file, err := os.Open(subject)
		if err != nil {
			return err
		}
		defer file.Close()
		in = file
	}
	return feed.DecodeFrames(feed.Engine(*engine), in, io.out)
}

// parseSubject reads flags around one argument: a request id, a file or an endpoint
// may stand before the flags or after them. It is "" if there is none.
func parseSubject(f *flag.FlagSet, args []string) (string, error) {
	if len(args) == 0 || args[0] == "" || args[0][0] == '-' && args[0] != "-" {
		err := parse(f, args, 1)
		return f.Arg(0), err
	}
	return args[0], parse(f, args[1:], 0)
}

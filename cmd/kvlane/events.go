package main

import (
	"context"
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
	topic := f.String("topic", "", "ZMQ `topic` (tail)")
	// The endpoint or file may stand before the flags or after them.
	subject, rest := "", args[1:]
	if len(rest) > 0 && rest[0] != "" && rest[0][0] != '-' {
		subject, rest = rest[0], rest[1:]
	}
	if err := parse(f, rest, 1); err != nil {
		return err
	}
	if f.NArg() == 1 && subject == "" {
		subject = f.Arg(0)
	}
	if subject == "" || f.NArg() == 1 && subject != f.Arg(0) {
		return usageError{"needs one endpoint (tail) or file (decode)"}
	}
	if verb == "tail" {
		src := feed.Source{Worker: subject, Engine: feed.Engine(*engine), Rank: kvindex.NoRank, RankFromBatch: true, Topic: *topic, Replay: *replay}
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

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// eventsHelp follows the summaries of the verbs.
var eventsHelp = map[string]string{
	"tail": `

Prints a JSON object a line until Ctrl-C. ENDPOINT is a ZMQ endpoint, such as tcp://10.0.0.5:5557, or the http://
address from which TensorRT-LLM's events are polled. Connections made and missed are told on stderr too.`,
	"decode": `

Prints recorded frames as tail prints live ones. FILE has a JSON object for each ZMQ message, a line each:

  {"topic":"", "seq":0, "payload_hex":"93cb41d9000000000000919192b0416c6c426c6f636b73436c6561726564c000"}

topic (may be missing), seq (the 8 bytes of the second frame as a number) and payload_hex (the third frame, msgpack, in
hexadecimal) are the message's frames; other keys are ignored, so times and names may be added.`,
}

func runEvents(ctx context.Context, io streams, verb string, args []string) error {
	f := flags("events " + verb)
	engine := f.String("engine", "vllm", "`dialect`: vllm, sglang, trtllm")
	var replay, topic string
	var bind bool
	if verb == "tail" {
		f.StringVar(&replay, "replay", "", "replay `endpoint`, to see past events and fill gaps")
		f.BoolVar(&bind, "bind", false, "wait at the endpoint for the engine to connect")
		f.StringVar(&topic, "topic", "", "ZMQ `topic`")
	}
	if err := parse(io, f, args, 1); err != nil {
		return err
	}
	subject := f.Arg(0)
	if subject == "" {
		return usageError{"needs one endpoint (tail) or file (decode)"}
	}
	if !slices.Contains([]feed.Engine{feed.VLLM, feed.SGLang, feed.TRTLLM}, feed.Engine(*engine)) {
		return usageError{fmt.Sprintf("--engine %q is not one of vllm, sglang, trtllm", *engine)}
	}
	if verb == "tail" {
		src := feed.Source{Worker: subject, Engine: feed.Engine(*engine), Rank: kvindex.NoRank, RankFromBatch: true, Bind: bind, Topic: topic, Replay: replay}
		if strings.HasPrefix(subject, "http://") || strings.HasPrefix(subject, "https://") {
			src.PollURL = subject
		} else {
			src.Endpoint = subject
		}
		return feed.Tail(ctx, src, io.out, io.err)
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

package main

import (
	"context"

	"github.com/kvlane/kvlane/internal/lab/replay"
)

func runReplay(_ context.Context, io streams, args []string) error {
	return replay.Command(args, io.out, io.err)
}

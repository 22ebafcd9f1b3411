package main

import (
	"context"
	"errors"

	"github.com/kvlane/kvlane/internal/lab/replay"
)

func runReplay(_ context.Context, io streams, args []string) error {
	if io.declaring {
		return parse(io, replay.Flags(), nil, 0)
	}
	err := replay.Command(args, io.out, io.err)
	if wrong, ok := errors.AsType[replay.UsageError](err); ok {
		return usageError{wrong.Error()}
	}
	return err
}

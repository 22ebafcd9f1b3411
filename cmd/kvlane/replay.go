package main

import (
	"context"
	"errors"

	"github.com/kvlane/kvlane/internal/lab/replay"
)

func runReplay(ctx context.Context, io streams, args []string) error {
	if io.declaring {
		return parse(io, replay.Flags(), nil, 0)
	}
	done := make(chan error, 1)
	go func() { done <- replay.Command(args, io.out, io.err) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done(): // a run takes no context: it ends with the process
		return errInterrupted
	}
	if wrong, ok := errors.AsType[replay.UsageError](err); ok {
		return usageError{wrong.Error()}
	}
	return err
}

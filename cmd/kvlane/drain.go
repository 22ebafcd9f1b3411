package main

import (
	"context"
	"time"

	"google.golang.org/grpc"
)

// lastStreams bounds the wait for streams that arrived at the end of a drain: they are decided and
// closed in milliseconds. It is less than the 10 s by which grace periods exceed `drain`.
const lastStreams = 3 * time.Second

// leave closes a server's port, tells its clients to reconnect elsewhere, and gives open streams up to bound to end. An
// immediate stop would cut requests that have just arrived; Envoy answers one with 500 if it has begun to send the body
// in full duplex.
func leave(g *grpc.Server, bound time.Duration) {
	late := time.AfterFunc(bound, g.Stop)
	defer late.Stop()
	g.GracefulStop()
}

// drain serves the streams that have arrived, for at most the given time, and accepts no further ones.
func (s *service) drain(bound time.Duration) {
	s.log.Info().Dur("drain_ms", bound).Msg("draining")
	s.draining.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	s.server.Drain(ctx)
	cancel()
	s.decider.Drain()
	leave(s.grpc, lastStreams)
}

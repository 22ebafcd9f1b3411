package main

import (
	"context"
	"time"

	"google.golang.org/grpc"
)

// lastStreams bounds the wait for streams that arrived at the end of a drain: they are decided and
// closed in milliseconds. It is less than the 10 s by which grace periods exceed `drain`.
const lastStreams = 3 * time.Second

// leave closes a server's port, tells its clients to go elsewhere, and gives open streams
// up to bound to end. An immediate stop would cut requests that have just arrived, and Envoy
// answers 500 to one whose body it has begun to send in full duplex.
func leave(g *grpc.Server, bound time.Duration) {
	late := time.AfterFunc(bound, g.Stop)
	defer late.Stop()
	g.GracefulStop()
}

// drain serves what has arrived, for at most the given time, and accepts no further streams.
func (s *service) drain(bound time.Duration) {
	s.log.Info().Dur("drain_ms", bound).Msg("draining")
	s.draining.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	s.server.Drain(ctx)
	cancel()
	s.decider.Drain()
	leave(s.grpc, lastStreams)
}

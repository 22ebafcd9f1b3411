package main

import (
	"time"

	"google.golang.org/grpc"
)

// lastStreams is for streams that came while a drain ended: they are decided and
// let go in milliseconds. It is within the 10 s by which grace periods exceed
// `drain`.
const lastStreams = 3 * time.Second

// leave closes a server's port and tells its clients to go elsewhere, and gives
// streams that are open so long to end. A stop without it would cut a request that
// came just then, which Envoy answers 500 where it has begun to send a body in full
// duplex.
func leave(g *grpc.Server, bound time.Duration) {
	left := make(chan struct{})
	go func() {
		defer close(left)
		g.GracefulStop()
	}()
	select {
	case <-left:
	case <-time.After(bound):
		g.Stop()
		<-left
	}
}

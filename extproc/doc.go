// Package extproc speaks Envoy's external processing protocol (ext_proc) for a
// [Handler], which decides what happens to a request and never sees the
// protocol.
//
// Envoy opens one gRPC stream per HTTP request. An exchange is the state machine
// of such a stream: messages go in, answers come out, and what may be answered
// when depends on the body modes that the first message states. Every request
// body mode is served:
//
//	NONE, STREAMED               decided on the headers; the body passes by
//	STREAMED, sent eagerly       the headers answer is held until the body's end
//	BUFFERED, BUFFERED_PARTIAL   decided and mutated in the answer to the body
//	FULL_DUPLEX_STREAMED, GRPC   held until the end, then echoed from the same bytes
//
// Messages are read by a codec of our own that decodes what is needed and keeps
// body bytes as references into gRPC's receive buffers. The body is copied once,
// when it has to be handed to the Handler in one piece and did not arrive so.
//
// A decided request is followed by its [Ticket]. An [EditTicket] may change the
// response body on its way to the client, and is the only one for which a body is
// asked for. [Decision].Abort answers a request whose worker says nothing.
//
//	lis, _ := extproc.Listen(ctx, "unix:/run/kvlane/extproc.sock", nil)
//	opts := extproc.Options{BodyLimit: 16 << 20}
//	srv := extproc.NewServer(opts, handler)
//	g := grpc.NewServer(extproc.GRPCOptions(opts)...)
//	srv.Register(g)
//	go g.Serve(lis)
//	...
//	srv.Drain(ctx) // lets running answers go on without us
//	g.Stop()
//
// Field numbers are those of envoy/service/ext_proc/v3/external_processor.proto.
package extproc

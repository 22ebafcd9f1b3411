// Package extproc implements the server side of Envoy's external processing protocol (ext_proc)
// for a [Handler], which decides what happens to a request and never sees the protocol.
//
// Envoy opens one gRPC stream per HTTP request. An exchange is the state machine of such a
// stream: it consumes messages and produces answers. Which answers are allowed, and when,
// depends on the body modes that the first message states. Every request body mode is supported:
//
//	NONE, STREAMED               decided on the headers; the body passes by
//	STREAMED, sent eagerly       the headers answer is held until the body's end
//	BUFFERED, BUFFERED_PARTIAL   decided and mutated in the answer to the body
//	FULL_DUPLEX_STREAMED, GRPC   held until the end, then echoed from the same bytes
//
// Messages are read by a custom codec that decodes only the fields in use and keeps body bytes
// as references into gRPC's receive buffers. The body is copied at most once, when it has to be
// passed to the Handler in one piece but arrived in several.
//
// A decided request is followed by its [Ticket]. An [EditTicket] may change the response body on
// its way to the client; the response body is requested from Envoy only for such tickets.
// [Decision].Abort answers a request whose worker does not respond.
//
//	lis, _ := extproc.Listen(ctx, "unix:/run/kvlane/extproc.sock", nil)
//	opts := extproc.Options{BodyLimit: 32 << 20}
//	srv := extproc.NewServer(opts, handler)
//	g := grpc.NewServer(extproc.GRPCOptions(opts)...)
//	srv.Register(g)
//	go g.Serve(lis)
//	...
//	srv.Drain(ctx) // running responses continue without the server
//	g.Stop()
//
// The exported names follow the module's version: until version 1 a minor version may change them, which CHANGELOG.md
// records.
//
// Field numbers are those of envoy/service/ext_proc/v3/external_processor.proto.
package extproc

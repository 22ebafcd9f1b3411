package extproc

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"
)

// DefaultBodyLimit is the largest request body that is taken in if Options does
// not say otherwise, in bytes.
const DefaultBodyLimit = 16 << 20

// DefaultLateTickets is how many ended requests wait for their outcome.
const DefaultLateTickets = 4096

// DefaultControlHeaders are the request headers of the endpoint picker protocol, which
// a client must not set. Servers that have more of them say so in Options.
var DefaultControlHeaders = []string{pickKey, subsetKey}

// Options configure a Server. The zero value is complete.
type Options struct {
	// BodyLimit is the largest body, in bytes, in the modes that make us hold it;
	// a larger one is answered with 413. 0 means DefaultBodyLimit.
	BodyLimit int
	// TooLarge builds that answer; nil means an OpenAI-shaped error.
	TooLarge func(limit int) *Reject
	// MaxBodies and MaxBodyBytes bound the bodies that all streams hold together: their
	// number, and the memory that they take. A body beyond is answered with 503. 0: no bound.
	MaxBodies    int
	MaxBodyBytes int64
	// MaxStreams bounds the streams of one connection; 0: no bound. See GRPCOptions.
	MaxStreams uint32
	// ControlHeaders are taken off every request, unless the decision sets them; nil
	// means DefaultControlHeaders. A trailing * stands for any ending.
	ControlHeaders []string
	// RequestID gives the id that a request goes on with: it is called with the
	// client's, the values of a repeated header joined by commas, "" if there is none.
	// The id replaces the client's whatever becomes of the decision, unless the
	// decision sets another one. nil keeps clients' ids.
	RequestID func(client string) string
	// SkipResponseBody asks a data plane that sends us response bodies not to
	// (mode_override, honoured with allow_mode_override), and to send trailers
	// instead, which mark the end.
	SkipResponseBody bool
	// ExtendTimeout, if positive, is asked for as message timeout when Decide takes
	// longer than ExtendAfter and says that it may (Request.Hold). Envoy bounds it by
	// max_message_timeout. Not in FULL_DUPLEX_STREAMED, which has no message timeout.
	ExtendTimeout time.Duration
	// ExtendAfter is 100 ms if 0: Envoy's own timeout is 200 ms by default.
	ExtendAfter time.Duration
	// LateTickets bounds the memory for outcomes: so many ended requests wait for
	// their access log entry. 0 means DefaultLateTickets; below 0 none waits, as suits a
	// data plane that sends no access log: a first token seen late is of an unknown
	// request then.
	LateTickets int
	// DrainQuiet is how long no stream may have been open before Drain returns
	// early; 0 means one second.
	DrainQuiet time.Duration
	// Metrics may be zero.
	Metrics Metrics
	// OnPanic is told of each panic in the handler or a ticket, with the stack of its
	// goroutine, besides FailurePanic; it must be safe for concurrent use. May be nil.
	OnPanic func(value any, stack []byte)
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// withDefaults fills in what was left out.
func (o Options) withDefaults() Options {
	if o.BodyLimit <= 0 {
		o.BodyLimit = DefaultBodyLimit
	}
	if o.TooLarge == nil {
		o.TooLarge = tooLarge
	}
	if o.ControlHeaders == nil {
		o.ControlHeaders = DefaultControlHeaders
	}
	if o.ExtendAfter <= 0 {
		o.ExtendAfter = 100 * time.Millisecond
	}
	if o.LateTickets == 0 {
		o.LateTickets = DefaultLateTickets
	}
	if o.DrainQuiet <= 0 {
		o.DrainQuiet = time.Second
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	o.Metrics = o.Metrics.withDefaults()
	return o
}

// Sizes for GRPCOptions.
const (
	messageSlack = 4 << 20 // a message may exceed the body limit and still get our 413
	streamWindow = 4 << 20
	connWindow   = 32 << 20
	socketBuffer = 128 << 10
	workers      = 32
)

// minPing is well below the second between the pings of the bootstrap's Envoy: grpc
// closes a connection on which a few of them came early by their jitter.
const minPing = 100 * time.Millisecond

// GRPCOptions are the options that a gRPC server for Options should have: our
// codec, a message size above the body limit, windows that do not stall an
// upload, and no quarrel with Envoy's keepalive pings.
func GRPCOptions(o Options) []grpc.ServerOption {
	o = o.withDefaults()
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(Codec()),
		grpc.MaxRecvMsgSize(o.BodyLimit + messageSlack),
		grpc.MaxConcurrentStreams(o.MaxStreams),
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connWindow),
		grpc.ReadBufferSize(socketBuffer),
		grpc.WriteBufferSize(socketBuffer),
		experimental.BufferPool(buffers),
		grpc.NumStreamWorkers(workers),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPing, PermitWithoutStream: true}),
	}
}

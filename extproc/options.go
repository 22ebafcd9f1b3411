package extproc

import (
	"cmp"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"
)

// DefaultBodyLimit is the largest request body accepted if Options does not set a limit, in bytes.
const DefaultBodyLimit = 32 << 20

// DefaultLateTickets is the default of Options.LateTickets.
const DefaultLateTickets = 4096

// DefaultControlHeaders are the request headers of the endpoint picker protocol, which a client
// must not set. Servers with further ones set Options.ControlHeaders.
var DefaultControlHeaders = []string{pickKey, subsetKey}

// Options configure a Server. The zero value is ready to use.
type Options struct {
	// Name and a "_" begin the response code details of the server's own rejections. An access log entry with such details
	// is one of a rejection, also of the handler's that begin so. "" means "extproc".
	Name string
	// BodyLimit is the largest body in bytes in the modes that make the server hold it; a larger
	// one is answered with 413. 0 means DefaultBodyLimit.
	BodyLimit int
	// MaxBodies and MaxBodyBytes limit the number and the memory of the bodies that all streams hold together; 0 means
	// unlimited. Bodies count from the headers of their requests. At a limit unfinished ones that arrive for more than 2 s
	// (0.25 s at MaxBodies) are answered with 503, or else the new one.
	MaxBodies    int
	MaxBodyBytes int64
	// MaxPerAddress limits the open requests of one client, by the attribute source.address (IPv6 by /56); further ones are
	// answered with 429. 0 means unlimited, as are requests without the attribute and streams that begin with another message.
	MaxPerAddress int
	// MaxStreams limits the concurrent streams of one connection; 0 means unlimited. See GRPCOptions.
	MaxStreams uint32
	// ControlHeaders are removed from every request, unless the decision sets them; nil means
	// DefaultControlHeaders. A trailing * matches any suffix.
	ControlHeaders []string
	// RequestID returns the id to use for a request, given the client's: "" if there is none,
	// and the values of a repeated header joined by commas. The id replaces the client's even if
	// the request is not routed, unless the decision sets another one. nil keeps clients' ids.
	RequestID func(client string) string
	// SkipResponseBody asks a data plane that would send response bodies not to (mode_override,
	// honoured with allow_mode_override), and to send trailers instead, which mark the end.
	SkipResponseBody bool
	// ExtendTimeout, if positive, is the message timeout to ask Envoy for when Decide takes longer than ExtendAfter
	// while it holds the request (Request.Hold). Envoy limits it to max_message_timeout. FULL_DUPLEX_STREAMED has no
	// message timeout, so it is not used there.
	ExtendTimeout time.Duration
	// ExtendAfter defaults to 100 ms; Envoy's own timeout is 200 ms by default.
	ExtendAfter time.Duration
	// LateTickets limits the ended requests that are kept until their access log entry arrives. 0 means
	// DefaultLateTickets. A negative value keeps none, as suits a data plane without access log; a late first token
	// then counts as FailureUnknownRequest.
	LateTickets int
	// Drain returns early once no stream has been open for DrainQuiet; 0 means one second.
	DrainQuiet time.Duration
	// Metrics may be the zero value.
	Metrics Metrics
	// OnPanic is called for each panic in the handler or a ticket, with the stack of its
	// goroutine, in addition to FailurePanic. It must be safe for concurrent use. May be nil.
	OnPanic func(value any, stack []byte)
	// PanicReject answers a request whose Decide panicked. nil lets it pass without a decision,
	// unchanged but for ControlHeaders and RequestID.
	PanicReject *Reject
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// withDefaults replaces zero values by defaults.
func (o Options) withDefaults() Options {
	o.Name = cmp.Or(o.Name, "extproc")
	o.BodyLimit = cmp.Or(max(o.BodyLimit, 0), DefaultBodyLimit)
	o.DrainQuiet = cmp.Or(max(o.DrainQuiet, 0), time.Second)
	o.ExtendAfter = cmp.Or(max(o.ExtendAfter, 0), 100*time.Millisecond)
	o.LateTickets = cmp.Or(o.LateTickets, DefaultLateTickets)
	if o.ControlHeaders == nil {
		o.ControlHeaders = DefaultControlHeaders
	}
	if o.OnPanic == nil {
		o.OnPanic = func(any, []byte) {}
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	o.Metrics = o.Metrics.withDefaults()
	return o
}

// Sizes for GRPCOptions. A message may exceed BodyLimit by messageSlack before it is refused unread. maxOther bounds the messages
// of services other than ext_proc, and maxParts the number of their parts (see parts); maxUnary bounds the messages of unary calls,
// such as a health check. Flow control admits streamWindow bytes of a stream that is not being read, and more only while a message
// is read.
const (
	messageSlack, maxOther, maxUnary = 4 << 20, 16 << 20, 64 << 10
	maxParts, maxDepth               = 1 << 17, 100
	socketBuffer, maxHeaderList      = 128 << 10, 64 << 10
	streamWindow, connWindow         = 256 << 10, 32 << 20
)

// minPing is well below the 0.3 s between the pings of the bootstrap's Envoy: gRPC closes a connection on which several
// pings arrive early because of jitter. handshakeTimeout ends connections that send nothing, as each holds buffers.
const minPing, handshakeTimeout = 100 * time.Millisecond, 10 * time.Second

// idleTimeout ends connections without streams. Envoy, which is told so first, opens another one for its next stream.
var idleTimeout = 5 * time.Minute // shorter in tests

// GRPCOptions returns the options that a gRPC server for o needs: this package's codec, bounded messages, no
// compression, flow control windows that do not stall an upload, and tolerance for Envoy's keepalive pings.
func GRPCOptions(o Options) []grpc.ServerOption {
	o = o.withDefaults()
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(Codec()),
		grpc.StreamInterceptor(boundOthers),
		grpc.MaxRecvMsgSize(maxUnary), grpc.MaxHeaderListSize(maxHeaderList),
		grpc.MaxConcurrentStreams(o.MaxStreams),
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connWindow),
		grpc.ReadBufferSize(socketBuffer), grpc.WriteBufferSize(socketBuffer),
		experimental.BufferPool(buffers), grpc.ConnectionTimeout(handshakeTimeout),
		grpc.NumStreamWorkers(32),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idleTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPing, PermitWithoutStream: true}),
	}
}

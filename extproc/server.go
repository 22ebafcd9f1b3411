package extproc

import (
	"context"
	"encoding/binary"
	"sync"
	"time"

	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Server serves ext_proc, Envoy's access log and gRPC health. It is safe for concurrent use.
type Server struct {
	opts     Options
	handler  Handler
	controls controls
	tracker  *tracker
	bodies   bodies
	clients  addresses
	health   *health.Server

	drainOnce sync.Once
	drain     chan struct{} // closed when draining has started and no decision waits

	mu             sync.Mutex
	serving, alive bool
	open, waits    int // streams, and those whose decision waits
	draining       bool
	opened         int // streams ever opened, to see that none came during a pause
	change         chan struct{}
}

// serviceName is the ext_proc service, also used as a name in health checks.
const serviceName = "envoy.service.ext_proc.v3.ExternalProcessor"

// readyNames are the health services that report readiness; the last one is for older probes.
// livenessName reports that the process is alive.
var readyNames = []string{"", "readiness", serviceName, "inference-extension"}

const livenessName = "liveness"

// NewServer returns a server that health checks report as not serving until SetServing(true).
func NewServer(o Options, h Handler) *Server {
	o = o.withDefaults()
	s := &Server{
		opts:     o,
		handler:  h,
		controls: newControls(o.ControlHeaders),
		tracker:  newTracker(o.LateTickets, o.Metrics.Failure),
		bodies:   bodies{maxBytes: o.MaxBodyBytes, large: largeBody, maxCount: o.MaxBodies, patience: 2 * time.Second},
		clients:  addresses{open: map[address]int64{}},
		health:   health.NewServer(),
		drain:    make(chan struct{}),
		change:   make(chan struct{}, 1),
	}
	s.SetPerAddress(o.MaxPerAddress)
	s.SetAlive(true)
	return s
}

var processDesc = grpc.ServiceDesc{
	ServiceName: serviceName,
	HandlerType: (*any)(nil),
	Streams: []grpc.StreamDesc{{
		StreamName:    "Process",
		ServerStreams: true,
		ClientStreams: true,
		Handler:       func(srv any, stream grpc.ServerStream) error { return srv.(*Server).process(stream) },
	}},
	Metadata: "envoy/service/ext_proc/v3/external_processor.proto",
}

// Register registers ext_proc, the access log service and health on g, which must have been
// created with GRPCOptions, or at least with Codec.
func (s *Server) Register(g *grpc.Server) {
	g.RegisterService(&processDesc, s)
	alsv3.RegisterAccessLogServiceServer(g, &accessLog{srv: s})
	s.RegisterHealth(g)
}

// RegisterHealth registers only the health service on g: an additional port for probes that should not reach ext_proc.
func (s *Server) RegisterHealth(g grpc.ServiceRegistrar) {
	grpc_health_v1.RegisterHealthServer(g, s.health)
}

// SetServing sets whether health checks report readiness.
func (s *Server) SetServing(ok bool) { s.report(&s.serving, ok) }

// SetAlive sets whether health checks report liveness; a new server is alive. A server that is not alive is not ready.
func (s *Server) SetAlive(ok bool) { s.report(&s.alive, ok) }

func (s *Server) report(flag *bool, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*flag = ok
	status := map[bool]grpc_health_v1.HealthCheckResponse_ServingStatus{true: grpc_health_v1.HealthCheckResponse_SERVING, false: grpc_health_v1.HealthCheckResponse_NOT_SERVING}
	s.health.SetServingStatus(livenessName, status[s.alive])
	for _, n := range readyNames {
		s.health.SetServingStatus(n, status[s.alive && s.serving])
	}
}

// process serves one stream. The request is decided in the calling goroutine; the response is followed in a goroutine
// of its own, so that a drain can return from here while that goroutine waits for a message.
func (s *Server) process(stream grpc.ServerStream) (err error) {
	s.count(1, 0)
	defer s.count(-1, 0)
	x := &exchange{
		ctx:  stream.Context(),
		srv:  s,
		send: func(a *answer) error { return stream.SendMsg(a) },
	}
	defer func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.close()
		if status.Code(err) != codes.Internal { // anything but garbage ends the stream without an error
			err = nil
		}
	}()
	m := &message{first: true, addressed: s.clients.most.Load() > 0}
	for open := true; open; {
		if open, err = x.next(s.receive(stream, m, &x.held), m); err != nil {
			return err
		}
		if err = s.await(x); err != nil {
			return err
		}
	}
	if x.over {
		return nil
	}
	done := make(chan error, 1)
	go func() { done <- s.follow(x, stream, m) }()
	abort, drain := x.abort, s.drain
	for leave := false; !leave; {
		select {
		case err = <-done:
			return err
		case r := <-abort:
			abort = nil
			x.mu.Lock()
			leave = x.giveUp(r)
			x.mu.Unlock()
		case <-drain:
			drain = nil
			x.mu.Lock()
			leave = x.mayLeave()
			if leave {
				x.close()
			}
			x.mu.Unlock()
		}
	}
	return nil
}

// await returns when the decision has been made.
func (s *Server) await(x *exchange) (err error) {
	if x.pending.Wait == nil {
		return nil
	}
	s.count(0, 1)
	defer s.count(0, -1)
	for err == nil && x.pending.Wait != nil {
		select {
		case <-x.pending.Ready:
		case <-x.ctx.Done():
		}
		err = x.resume()
	}
	return err
}

// follow handles messages until the stream ends or a drain leaves it.
func (s *Server) follow(x *exchange, stream grpc.ServerStream, m *message) error {
	for held := int64(0); ; {
		err := s.receive(stream, m, &held)
		x.mu.Lock()
		if err == nil && !x.closed {
			err = x.handle(m)
		}
		m.free()
		over := err != nil || x.over || x.closed
		x.mu.Unlock()
		if over {
			return err
		}
	}
}

// errTooLong and errNoRoom are the errors of messages that were refused before they were received.
var (
	errTooLong = status.Error(codes.ResourceExhausted, "message is too long")
	errNoRoom  = status.Error(codes.ResourceExhausted, "no room for a message")
)

// receive reads the next message of an exchange. held is the number of bytes that the exchange holds in s.bodies.
// Neither the end of the client's side nor an error shows whether the request succeeded.
func (s *Server) receive(stream grpc.ServerStream, m *message, held *int64) error {
	data, err := read(stream, m.prefix[:], int64(s.opts.BodyLimit)+messageSlack, &s.bodies, held)
	if err != nil {
		return err
	}
	defer data.Free()
	if err = m.decode(data); err != nil {
		s.opts.Metrics.Failure(FailureProtocol)
		return status.Error(codes.Internal, err.Error())
	}
	return nil
}

// read returns the next message, which the caller frees. Unlike stream.RecvMsg it leaves the stream open if a message is too long,
// so that it can be answered. A message longer than streamWindow takes its bytes from room, in addition to *held, until it is received.
func read(stream grpc.ServerStream, prefix []byte, most int64, room *bodies, held *int64) (mem.BufferSlice, error) {
	in := grpc.ServerTransportStreamFromContext(stream.Context()).(interface { // not in gRPC's API, but all its streams have them
		ReadMessageHeader(header []byte) error
		Read(n int) (mem.BufferSlice, error)
	})
	if err := in.ReadMessageHeader(prefix); err != nil {
		return nil, err
	}
	n := int64(binary.BigEndian.Uint32(prefix[1:]))
	switch {
	case prefix[0] != 0: // flow control would count a thousandth of it
		return nil, status.Error(codes.Internal, "compressed messages are not taken")
	case n > most:
		return nil, errTooLong
	case n > streamWindow:
		if !room.grow(held, n+n/4) {
			return nil, errNoRoom
		}
		defer room.shrink(held, n+n/4)
	}
	return in.Read(int(n))
}

// others bounds the bytes of messages of other services than ext_proc until they are decoded, on all ports. Decoded,
// they take up to eight times as much: decoded bounds those above maxUnary until they are handled.
var (
	others  = bodies{maxBytes: 9 * maxOther}
	decoded = semaphore.NewWeighted(maxOther)
)

// boundOthers is the interceptor that applies these bounds to those services. Unary calls need no long messages.
func boundOthers(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	o := &other{ServerStream: stream, most: maxUnary}
	if info.IsClientStream {
		o.most = maxOther
	}
	defer o.hold(0, true)
	return handler(srv, o)
}

type other struct {
	grpc.ServerStream

	most int64

	mu     sync.Mutex
	weight int64 // in decoded, of the message that is being handled
	over   bool  // the handler has returned
}

// hold replaces the weight; over is set in the last call.
func (o *other) hold(n int64, over bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	decoded.Release(o.weight)
	if o.over = o.over || over; o.over {
		decoded.Release(n)
		n = 0
	}
	o.weight = n
}

// RecvMsg implements grpc.ServerStream. The previous message is handled when it is called, or when the handler returns.
func (o *other) RecvMsg(m any) error {
	o.hold(0, false)
	var prefix [5]byte
	var held int64
	data, err := read(o.ServerStream, prefix[:], o.most, &others, &held)
	if err != nil {
		return err
	}
	defer data.Free()
	if n := int64(data.Len()); n > maxUnary {
		others.replace(&held, n)
		defer others.replace(&held, 0)
		if err := decoded.Acquire(o.Context(), n); err != nil {
			return status.FromContextError(err).Err()
		}
		o.hold(n, false)
		if parts(data.Materialize(), m.(proto.Message).ProtoReflect().Descriptor(), maxParts, maxDepth) > maxParts {
			return status.Error(codes.ResourceExhausted, "message has too many parts")
		}
	}
	return Codec().Unmarshal(data, m)
}

func (s *Server) count(open, waits int) {
	s.mu.Lock()
	s.open += open
	s.opened += max(open, 0)
	if s.waits += waits; s.waits == 0 && s.draining {
		s.drainOnce.Do(func() { close(s.drain) })
	}
	s.mu.Unlock()
	select {
	case s.change <- struct{}{}:
	default:
	}
}

// Drain reports not serving, closes all streams whose request is decided so that running responses continue without the
// server, and keeps serving new streams. It returns when ctx ends, or when no stream has been open for
// Options.DrainQuiet. Streams with a response in FULL_DUPLEX_STREAMED cannot be closed early and run to their end. While
// decisions wait, also after ctx, none is closed: each would be the end of a request for the handler, which would give
// its place to one that waits, close that one too, and so give places to all.
func (s *Server) Drain(ctx context.Context) {
	s.SetServing(false)
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.count(0, 0)
	for ctx.Err() == nil {
		open, before := s.counts()
		if open > 0 {
			select {
			case <-ctx.Done():
			case <-s.change:
			}
			continue
		}
		t := time.NewTimer(s.opts.DrainQuiet)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
		if open, now := s.counts(); open == 0 && now == before {
			return
		}
	}
}

func (s *Server) counts() (open, opened int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open, s.opened
}

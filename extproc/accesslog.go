package extproc

import (
	"errors"
	"io"
	"net"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// accessLog is the server of Envoy's access log service. It passes each entry to the ticket of its request.
type accessLog struct {
	alsv3.UnimplementedAccessLogServiceServer
	srv *Server
}

// StreamAccessLogs implements the access log service.
func (a *accessLog) StreamAccessLogs(stream alsv3.AccessLogService_StreamAccessLogsServer) error {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return stream.SendAndClose(&alsv3.StreamAccessLogsResponse{})
		case err != nil:
			return status.Error(codes.Canceled, "access log ended")
		}
		for _, e := range m.GetHttpLogs().GetLogEntry() {
			a.entry(e)
		}
	}
}

func (a *accessLog) entry(e *accesslogv3.HTTPAccessLogEntry) {
	id, kind := e.GetRequest().GetRequestId(), e.GetCommonProperties().GetAccessLogType()
	if id == "" || kind != accesslogv3.AccessLogType_NotSet && kind != accesslogv3.AccessLogType_DownstreamEnd {
		return // periodic entries, for example, come before the end of the request
	}
	o := outcomeOf(e)
	f := a.srv.tracker.find(a.srv.tracker.hash(id), o.Upstream != "") // others Envoy may have ended before it asked anyone
	// A refusal before an upstream was chosen does not count: the flight may belong to another request with the same id.
	refused := o.Upstream == "" && (o.Status/100 == 4 || strings.HasPrefix(o.Details, a.srv.opts.Name+"_"))
	if f != nil && !refused && f.setOutcome(o) {
		a.srv.tracker.remove(f)
	}
}

// outcomeOf reads an access log entry.
func outcomeOf(e *accesslogv3.HTTPAccessLogEntry) Outcome {
	c := e.GetCommonProperties()
	return Outcome{
		Status:            int(e.GetResponse().GetResponseCode().GetValue()),
		Flags:             flagNames(c.GetResponseFlags()),
		Details:           clip(e.GetResponse().GetResponseCodeDetails()),
		Upstream:          clip(addressText(c.GetUpstreamRemoteAddress())),
		BytesReceived:     e.GetRequest().GetRequestBodyBytes(),
		BytesSent:         e.GetResponse().GetResponseBodyBytes(),
		FirstUpstreamByte: c.GetTimeToFirstUpstreamRxByte().AsDuration(),
		LastUpstreamByte:  c.GetTimeToLastUpstreamRxByte().AsDuration(),
		Duration:          c.GetDuration().AsDuration(),
	}
}

// clip bounds a text that is kept with its decision.
func clip(s string) string {
	if len(s) > 1024 {
		return strings.Clone(s[:1024])
	}
	return s
}

// flagNames lists the response flags that are set by their names in the API.
func flagNames(f *accesslogv3.ResponseFlags) []string {
	var names []string
	f.ProtoReflect().Range(func(fd protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		names = append(names, string(fd.Name()))
		return true
	})
	return names
}

func addressText(a *corev3.Address) string {
	s := a.GetSocketAddress()
	if s == nil {
		return a.GetPipe().GetPath()
	}
	return net.JoinHostPort(s.GetAddress(), strconv.FormatUint(uint64(s.GetPortValue()), 10))
}

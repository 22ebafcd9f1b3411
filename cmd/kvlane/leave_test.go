package main

import (
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"
)

// held serves streams that answer when the test lets them.
func held(t *testing.T) (g *grpc.Server, open func() grpc.ClientStream, begun chan struct{}, answer chan struct{}) {
	t.Helper()
	begun, answer = make(chan struct{}, 1), make(chan struct{})
	g = grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		begun <- struct{}{}
		select {
		case <-answer:
			return stream.SendMsg(&emptypb.Empty{})
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return g, func() grpc.ClientStream {
		s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/a/b")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}, begun, answer
}

func TestAStreamThatCameAtTheEndIsServed(t *testing.T) {
	g, open, begun, answer := held(t)
	s := open()
	<-begun
	left := make(chan struct{})
	go func() { leave(g, time.Minute); close(left) }()
	close(answer)
	if err := s.RecvMsg(&emptypb.Empty{}); err != nil {
		t.Errorf("it was cut: %v", err)
	}
	<-left
}

func TestLeavingDoesNotWaitForEver(t *testing.T) {
	g, open, begun, _ := held(t)
	s := open()
	<-begun
	leave(g, time.Millisecond)
	if err := s.RecvMsg(&emptypb.Empty{}); err == nil {
		t.Error("a stream outlived the server")
	}
}

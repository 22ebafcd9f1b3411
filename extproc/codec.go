package extproc

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec used for all other messages
	"google.golang.org/grpc/mem"
)

// Codec returns the codec for a gRPC server of this package (grpc.ForceServerCodecV2). It sends the encoded answers of
// ext_proc as they are and uses the ordinary protobuf codec for all other messages.
func Codec() encoding.CodecV2 { return codec{encoding.GetCodecV2("proto")} }

type codec struct{ encoding.CodecV2 }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if a, ok := v.(*answer); ok {
		return a.bufs, nil
	}
	return c.CodecV2.Marshal(v)
}

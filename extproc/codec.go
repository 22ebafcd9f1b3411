package extproc

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that we fall back to
	"google.golang.org/grpc/mem"
)

// Codec returns the codec that a gRPC server of ours is forced to
// (grpc.ForceServerCodecV2): the messages of ext_proc are read and written
// lazily, all others go through ordinary protobuf.
func Codec() encoding.CodecV2 { return codec{encoding.GetCodecV2("proto")} }

type codec struct{ encoding.CodecV2 }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if a, ok := v.(*answer); ok {
		return a.bufs, nil
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(*message); ok {
		return m.decode(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

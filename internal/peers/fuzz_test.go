package peers

import (
	"bytes"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/rs/zerolog"

	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// answers is a stream of recorded answers of a peer.
type answers struct {
	grpc.ClientStream

	in *bytes.Reader
}

func (a answers) Recv() (*kvlanev1.FetchResponse, error) {
	r := &kvlanev1.FetchResponse{}
	if err := (protodelim.UnmarshalOptions{MaxSize: 1 << 20}).UnmarshalFrom(a.in, r); err != nil {
		return nil, err
	}
	return r, nil
}

// FuzzFetch reads any answers of a peer that does not know the secret: none of it is content.
func FuzzFetch(f *testing.F) {
	record := func(messages ...proto.Message) []byte {
		var b bytes.Buffer
		for _, m := range messages {
			if _, err := protodelim.MarshalTo(&b, m); err != nil {
				f.Fatal(err)
			}
		}
		return b.Bytes()
	}
	header := func(format uint32, size uint64) proto.Message {
		return &kvlanev1.FetchResponse{Message: &kvlanev1.FetchResponse_Header{Header: &kvlanev1.SnapshotHeader{Format: format, Bytes: size}}}
	}
	chunk := func(n int) proto.Message {
		return &kvlanev1.FetchResponse{Message: &kvlanev1.FetchResponse_Chunk{Chunk: bytes.Repeat([]byte("c"), n)}}
	}
	f.Add(record(header(Format, 30), chunk(10), chunk(0), chunk(20)))
	f.Add(record(header(Format, 1<<63)))
	f.Add(record(header(2, 0), chunk(1)))
	f.Add(record(chunk(1)))
	f.Add(record(header(Format, 30), chunk(nonceSize), chunk(20)))
	f.Add(record(header(Format, 0), header(Format, 0), chunk(2000)))
	f.Fuzz(func(t *testing.T, raw []byte) {
		const most = 1000
		c := &content{stream: answers{in: bytes.NewReader(raw)}, silence: time.Hour, timer: time.AfterFunc(time.Hour, func() {}), most: most}
		defer c.timer.Stop()
		if err := c.header([]byte("secret"), newNonce()); err != nil {
			return
		}
		if got, _ := io.ReadAll(c); len(got) > 0 {
			t.Fatalf("got %d bytes of content, want none", len(got))
		}
	})
}

// FuzzFetchRequest: no request without the proof of the key is served.
func FuzzFetchRequest(f *testing.F) {
	for _, r := range []*kvlanev1.FetchRequest{
		{}, {Formats: []uint32{Format}, BlockSize: 16, KeyProof: proof([]byte("secret"), make([]byte, nonceSize))}, {Formats: []uint32{9, Format}, BlockSize: 1 << 31, KeyProof: proof([]byte("secret"), make([]byte, nonceSize))}, {KeyProof: []byte("other")},
	} {
		raw, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := &kvlanev1.FetchRequest{}
		if proto.Unmarshal(raw, r) != nil {
			return
		}
		s := NewServer(Content{Secret: []byte("secret"), BlockSize: 16}, zerolog.Nop())
		s.SetReady()
		if _, err := s.check(r); err == nil && (proven([]byte("secret"), r.GetKeyProof()) == nil || r.GetBlockSize() != 16) {
			t.Fatalf("got %v served, want the proof of the key and the block size", r)
		}
	})
}

package peers

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvlane/kvlane/internal/observe"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// Format is the content format that this version writes and reads: sealed pieces, after the server's nonce. Format 1
// was plaintext, requested with a constant proof.
const Format = 2

// orOlder is the end of a refusal; older servers leave it out.
const orOlder = "or a replica of an older version"

const (
	// pieceSize is the size in bytes of the content in one message.
	pieceSize = 256 << 10
	// maxFormats bounds the formats that an error names.
	maxFormats = 8
	// maxTransfers bounds concurrent transfers.
	maxTransfers = 2
	// transferTimeout bounds one transfer, so that a peer that does not read ends it.
	transferTimeout = 5 * time.Minute
)

// Content is an index that can be copied.
type Content struct {
	// Secret is shared by all replicas with the same key of the block hash.
	Secret []byte
	// BlockSize is the index's, in tokens.
	BlockSize int
	// Dump writes one consistent copy.
	Dump func(io.Writer) error
}

// Server serves copies of the index. It implements kvlanev1.SnapshotsServer and is safe for concurrent use.
type Server struct {
	kvlanev1.UnimplementedSnapshotsServer
	content   Content
	log       zerolog.Logger
	refusals  zerolog.Logger // sampled: anyone may cause them
	transfers chan struct{}
	within    time.Duration // of one transfer
	ready     atomic.Bool

	sent, failed, refused, bytes atomic.Int64
}

// NewServer returns a server that answers Unavailable until SetReady.
func NewServer(c Content, log zerolog.Logger) *Server {
	refusals := log.Sample(&zerolog.BurstSampler{Burst: 1, Period: time.Second})
	return &Server{content: c, log: log, refusals: refusals, transfers: make(chan struct{}, maxTransfers), within: transferTimeout}
}

// SetReady allows copies. Call it when the index is worth copying.
func (s *Server) SetReady() { s.ready.Store(true) }

// Fetch implements kvlanev1.SnapshotsServer.
func (s *Server) Fetch(req *kvlanev1.FetchRequest, stream kvlanev1.Snapshots_FetchServer) error {
	asked, err := s.check(req)
	if err != nil {
		s.refused.Add(1)
		s.refusals.Warn().Err(err).Msg("index not sent to a peer")
		return err
	}
	select {
	case s.transfers <- struct{}{}:
	default:
		s.refused.Add(1)
		return status.Error(codes.ResourceExhausted, "other replicas are being served")
	}
	done := make(chan error, 1)
	go func() {
		err := s.transfer(stream, asked)
		<-s.transfers
		done <- err
	}()
	late := time.NewTimer(s.within)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C: // returning ends the stream, and with it a Send that waits
		return status.Errorf(codes.DeadlineExceeded, "the copy took longer than %s", s.within)
	}
}

// transfer sends a copy and counts it.
func (s *Server) transfer(stream kvlanev1.Snapshots_FetchServer, asked []byte) error {
	n, err := s.send(stream, asked)
	s.bytes.Add(n)
	if err != nil {
		s.failed.Add(1)
		s.log.Warn().Err(err).Int64("bytes", n).Msg("index not sent to a peer")
		return err
	}
	s.sent.Add(1)
	s.log.Info().Int64("bytes", n).Msg("index sent to a peer")
	return nil
}

// check returns the nonce of a request that may be served.
func (s *Server) check(req *kvlanev1.FetchRequest) (asked []byte, err error) {
	formats := req.GetFormats()
	asked = proven(s.content.Secret, req.GetKeyProof())
	switch {
	case asked == nil: // first: the other errors answer holders of the secret only
		return nil, status.Error(codes.PermissionDenied, "another key of the block hash (index.key), "+orOlder)
	case !slices.Contains(formats, Format):
		return nil, status.Errorf(codes.FailedPrecondition, "format %d here, %v there: replicas of other versions do not copy the index", Format, formats[:min(len(formats), maxFormats)])
	case int(req.GetBlockSize()) != s.content.BlockSize:
		return nil, status.Errorf(codes.FailedPrecondition, "index blocks of %d tokens here, %d there", s.content.BlockSize, req.GetBlockSize())
	case !s.ready.Load():
		return nil, status.Error(codes.Unavailable, "this replica is not ready itself")
	}
	return asked, nil
}

// send copies the index to a file and sends the file to the peer.
func (s *Server) send(stream kvlanev1.Snapshots_FetchServer, asked []byte) (sent int64, err error) {
	file, err := os.CreateTemp("", "kvlane-index-*")
	if err != nil {
		return 0, status.Error(codes.Unavailable, fmt.Sprintf("no room for a copy: %v", err))
	}
	defer file.Close()
	_ = os.Remove(file.Name()) // only the open file remains
	if err := s.content.Dump(file); err != nil {
		return 0, status.Error(codes.Unavailable, err.Error())
	}
	size, err := file.Seek(0, io.SeekCurrent)
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		return 0, status.Error(codes.Internal, err.Error())
	}
	header := &kvlanev1.SnapshotHeader{Format: Format, Bytes: uint64(size)}
	if err := stream.Send(&kvlanev1.FetchResponse{Message: &kvlanev1.FetchResponse_Header{Header: header}}); err != nil {
		return 0, err
	}
	answered := newNonce()
	if err := stream.Send(&kvlanev1.FetchResponse{Message: &kvlanev1.FetchResponse_Chunk{Chunk: answered}}); err != nil {
		return 0, err
	}
	sealed := newSeal(s.content.Secret, asked, answered)
	piece := make([]byte, min(pieceSize, max(size, 1)))
	for {
		n, err := file.Read(piece)
		if errors.Is(err, io.EOF) {
			return sent, nil
		}
		if err != nil {
			return sent, status.Error(codes.Internal, err.Error())
		}
		if err := stream.Send(&kvlanev1.FetchResponse{Message: &kvlanev1.FetchResponse_Chunk{Chunk: sealed.close(piece[:n])}}); err != nil {
			return sent, err
		}
		sent += int64(n)
	}
}

// Collect emits the server's counters.
func (s *Server) Collect(emit observe.Emit) {
	for _, c := range []struct {
		outcome string
		n       *atomic.Int64
	}{{"sent", &s.sent}, {"failed", &s.failed}, {"refused", &s.refused}} {
		emit("snapshots_served_total", "Copies of the index asked for by peers, by outcome (sent, failed, refused).", float64(c.n.Load()), "outcome", c.outcome)
	}
	emit("snapshot_sent_bytes_total", "Bytes of the index sent to peers.", float64(s.bytes.Load()))
}

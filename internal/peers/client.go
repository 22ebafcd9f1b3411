package peers

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

// Want describes the copy that a starting replica asks for.
type Want struct {
	Peers config.Peers
	// CertFile and KeyFile are the certificate that peers get if they ask for one; "" for none.
	CertFile, KeyFile string
	// Secret is shared by all replicas with the same key of the block hash.
	Secret []byte
	// BlockSize is the index's, in tokens; MaxBytes bounds the copy's size.
	BlockSize int
	MaxBytes  int64
	Log       zerolog.Logger
}

// ErrNone is returned when no peer sent a copy that could be loaded.
var ErrNone = errors.New("no peer has an index for us")

var (
	errSlow  = errors.New("the peer is silent")
	errLarge = errors.New("the peer's index is larger than index.max_bytes")
)

// Fetch calls load with the content of the first peer that has one, and again with another peer's if load fails. It is
// bounded by the configured timeout; a silent peer gets a quarter of it. The error is ErrNone, with each peer's reason,
// or that of ctx.
func Fetch(ctx context.Context, w *Want, load func(io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, w.Peers.Timeout.Std())
	defer cancel()
	creds, err := credential(w)
	if err != nil {
		return err
	}
	reasons := []error{ErrNone}
	for _, a := range resolve(ctx, w) {
		if ctx.Err() != nil {
			reasons = append(reasons, context.Cause(ctx))
			break
		}
		err := fetchFrom(ctx, w, a, creds, load)
		if err == nil {
			w.Log.Info().Str("peer", a.dial).Msg("index taken from a peer")
			return nil
		}
		reasons = append(reasons, fmt.Errorf("%s: %w", a.dial, err))
	}
	return errors.Join(reasons...)
}

// address is a peer: its address, and the host that its certificate must name.
type address struct{ dial, host string }

// resolve returns the peers' addresses in random order, so that replicas that start
// concurrently do not all ask the same peer.
func resolve(ctx context.Context, w *Want) []address {
	ctx, cancel := context.WithTimeout(ctx, w.Peers.Timeout.Std()/4)
	defer cancel()
	var all []address
	for _, a := range w.Peers.Addresses {
		host, port, err := net.SplitHostPort(a)
		if err != nil {
			continue // validated with the configuration
		}
		ips, err := net.DefaultResolver.LookupHost(ctx, host)
		if err != nil {
			w.Log.Warn().Err(err).Str("peer", a).Msg("peer not found")
			continue
		}
		for _, ip := range ips {
			all = append(all, address{net.JoinHostPort(ip, port), host})
		}
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// credential returns a function from the dialed host to its transport credentials.
func credential(w *Want) (func(host string) credentials.TransportCredentials, error) {
	p := &w.Peers
	if p.CAFile == "" {
		return func(string) credentials.TransportCredentials { return insecure.NewCredentials() }, nil
	}
	pool, err := config.Authorities(p.CAFile)
	if err != nil {
		return nil, fmt.Errorf("index.peers.ca_file: %w", err)
	}
	var own []tls.Certificate
	if w.CertFile != "" {
		cert, err := config.KeyPair(w.CertFile, w.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("listen.cert_file: %w", err)
		}
		own = []tls.Certificate{cert}
	}
	return func(host string) credentials.TransportCredentials {
		return credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: cmp.Or(p.Name, host), Certificates: own, MinVersion: tls.VersionTLS12})
	}, nil
}

func fetchFrom(ctx context.Context, w *Want, a address, creds func(string) credentials.TransportCredentials, load func(io.Reader) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, err := grpc.NewClient("passthrough:///"+a.dial, grpc.WithTransportCredentials(creds(a.host)), grpc.WithNoProxy())
	if err != nil {
		return err
	}
	defer conn.Close()
	silence := w.Peers.Timeout.Std() / 4
	c := &content{silence: silence, timer: time.AfterFunc(silence, func() { cancel(errSlow) }), most: w.MaxBytes}
	defer c.timer.Stop()
	asked := newNonce()
	c.stream, err = kvlanev1.NewSnapshotsClient(conn).Fetch(ctx, &kvlanev1.FetchRequest{Formats: []uint32{Format}, BlockSize: uint32(w.BlockSize), KeyProof: proof(w.Secret, asked)})
	if err == nil {
		err = c.header(w.Secret, asked)
	}
	if status.Code(err) == codes.PermissionDenied && !strings.HasSuffix(err.Error(), orOlder) {
		err = fmt.Errorf("%w, %s", err, orOlder)
	}
	if err = observe.Certificate(err, "index.peers.ca_file or server_name, the peer's listen.cert_file"); err == nil {
		err = load(c)
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}

// content is an io.Reader over a snapshot stream; it fails when no chunk arrives within silence.
type content struct {
	stream  kvlanev1.Snapshots_FetchClient
	sealed  *seal
	silence time.Duration
	timer   *time.Timer
	piece   []byte
	read    int64
	most    int64
}

// header reads the header of the content: its format and size, and the peer's nonce.
func (c *content) header(secret, asked []byte) error {
	m, err := c.stream.Recv()
	if err != nil {
		return err
	}
	h := m.GetHeader()
	switch {
	case h == nil:
		return errors.New("an answer without a header")
	case h.GetFormat() != Format:
		return fmt.Errorf("format %d, want %d", h.GetFormat(), Format)
	case h.GetBytes() > uint64(c.most):
		return errLarge
	}
	if m, err = c.stream.Recv(); err != nil {
		return err
	}
	if len(m.GetChunk()) != nonceSize {
		return errForged
	}
	c.sealed = newSeal(secret, asked, m.GetChunk())
	return nil
}

// Read implements io.Reader.
func (c *content) Read(b []byte) (int, error) {
	for len(c.piece) == 0 {
		c.timer.Reset(c.silence)
		m, err := c.stream.Recv()
		if err != nil {
			return 0, err // io.EOF at the end
		}
		if c.piece, err = c.sealed.open(m.GetChunk()); err != nil {
			return 0, err
		}
		if c.read += int64(len(c.piece)); c.read > c.most {
			return 0, errLarge
		}
	}
	n := copy(b, c.piece)
	c.piece = c.piece[n:]
	return n, nil
}

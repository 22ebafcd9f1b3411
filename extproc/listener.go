package extproc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync"
)

// tlsRecord is the first byte of a TLS handshake; HTTP/2 starts with 'P'.
const tlsRecord = 0x16

// Listen listens on "host:port" or "unix:/path". A stale socket file, one without a listener, is
// replaced. If cfg is not nil, connections may be TLS or plaintext: the first byte decides.
func Listen(ctx context.Context, addr string, cfg *tls.Config) (net.Listener, error) {
	network := "tcp"
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", path
		if err := removeStale(ctx, path); err != nil {
			return nil, err
		}
	}
	var lc net.ListenConfig
	lis, err := lc.Listen(ctx, network, addr)
	if err != nil {
		return nil, err // it names the address
	}
	if cfg == nil {
		return lis, nil
	}
	return SniffTLS(lis, cfg), nil
}

// removeStale removes a socket file without a listener.
func removeStale(ctx context.Context, path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at socket: %w", err)
	}
	if st.Mode()&fs.ModeSocket == 0 {
		return fmt.Errorf("listen on %s: file exists and is not a socket", path)
	}
	var d net.Dialer
	if conn, err := d.DialContext(ctx, "unix", path); err == nil {
		_ = conn.Close()
		return fmt.Errorf("listen on %s: another process listens there", path)
	}
	return os.Remove(path)
}

var errPlaintext = errors.New("plaintext where a client certificate is required")

// SniffTLS makes a listener serve TLS and plaintext on one port, or TLS alone if cfg requires
// client certificates. It inspects the first byte at the first use of a connection, never in
// Accept, so that a silent client does not block other connections.
func SniffTLS(lis net.Listener, cfg *tls.Config) net.Listener { return &sniffListener{lis, cfg} }

type sniffListener struct {
	net.Listener
	cfg *tls.Config
}

// Accept implements net.Listener.
func (l *sniffListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &sniffConn{Conn: c, cfg: l.cfg}, nil
}

// sniffConn becomes TLS or plaintext at its first Read or Write. A server that writes first
// waits for the client's first byte, which both protocols send.
type sniffConn struct {
	net.Conn // deadlines, addresses and Close do not depend on the protocol
	cfg      *tls.Config

	once sync.Once
	rw   net.Conn // set by once
	err  error
}

func (c *sniffConn) look() error {
	c.once.Do(func() {
		p := &peekedConn{Conn: c.Conn}
		if _, c.err = p.Conn.Read(p.first[:]); c.err != nil {
			return
		}
		p.pending = true
		switch {
		case p.first[0] == tlsRecord:
			c.rw = tls.Server(p, c.cfg)
		case c.cfg != nil && c.cfg.ClientAuth == tls.RequireAndVerifyClientCert:
			c.err = errPlaintext
		default:
			c.rw = p
		}
	})
	return c.err
}

// Read implements net.Conn.
func (c *sniffConn) Read(b []byte) (int, error) {
	if err := c.look(); err != nil {
		return 0, err
	}
	return c.rw.Read(b)
}

// Write implements net.Conn.
func (c *sniffConn) Write(b []byte) (int, error) {
	if err := c.look(); err != nil {
		return 0, err
	}
	return c.rw.Write(b)
}

// peekedConn returns its first byte again. Reads come from one goroutine at a time.
type peekedConn struct {
	net.Conn
	first   [1]byte
	pending bool
}

// Read implements net.Conn.
func (c *peekedConn) Read(b []byte) (int, error) {
	if !c.pending {
		return c.Conn.Read(b)
	}
	if len(b) == 0 {
		return 0, nil
	}
	c.pending = false
	b[0] = c.first[0]
	return 1, nil
}

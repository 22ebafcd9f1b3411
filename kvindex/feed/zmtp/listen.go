package zmtp

import (
	"fmt"
	"net"
)

// Listener is the bound side, for engines that connect to us.
type Listener struct {
	l   net.Listener
	opt Options
}

// Listen binds an endpoint ("tcp://*:5557" or "ipc://path").
func Listen(endpoint string, opt Options) (*Listener, error) {
	netw, addr, err := network(endpoint)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen(netw, addr) //nolint:noctx // binding does not wait
	if err != nil {
		return nil, fmt.Errorf("zmtp: %w", err)
	}
	return &Listener{l: l, opt: opt}, nil
}

// Addr is where the listener is bound.
func (l *Listener) Addr() net.Addr { return l.l.Addr() }

// Accept waits for a connection. The handshake is left to the caller
// (NewConn), so that a peer that does not speak holds nobody up.
func (l *Listener) Accept() (net.Conn, error) { return l.l.Accept() }

// Options are those that Listen was called with.
func (l *Listener) Options() Options { return l.opt }

// Close stops listening; connections live on.
func (l *Listener) Close() error { return l.l.Close() }

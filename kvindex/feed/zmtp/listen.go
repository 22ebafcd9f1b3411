package zmtp

import (
	"fmt"
	"net"
)

// Listener accepts connections of engines that connect to this process.
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

// Addr returns the listener's address.
func (l *Listener) Addr() net.Addr { return l.l.Addr() }

// Accept waits for a connection. The caller performs the handshake (NewConn), so that a silent
// peer does not block others.
func (l *Listener) Accept() (net.Conn, error) { return l.l.Accept() }

// Options returns the options that Listen was called with.
func (l *Listener) Options() Options { return l.opt }

// Close stops listening; open connections stay open.
func (l *Listener) Close() error { return l.l.Close() }

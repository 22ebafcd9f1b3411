package disagg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"
)

// Limits for answers of a prefill worker, in bytes.
const (
	maxAnswer = 64 << 20 // a context answer contains the prompt's ids
	maxPage   = 1 << 20
	maxRefuse = 1 << 20
	maxHead   = 64 << 10
)

// idle is below the keep-alive of engines (5 s), so that no leg uses a connection that the engine is closing.
const idle = 4 * time.Second

// Outcome is the result of a leg, as a metric label.
type Outcome string

const (
	// OK: the answer is complete.
	OK Outcome = "ok"
	// Ended: the prefill answer is the whole answer.
	Ended Outcome = "final"
	// Unreachable: no connection, or Envoy reports that there is none.
	Unreachable Outcome = "unreachable"
	// TimedOut: no answer within disagg.timeout.
	TimedOut Outcome = "timeout"
	// Died: the connection broke before the answer was complete.
	Died Outcome = "died"
	// Failed: the worker answered with a status that is the worker's fault.
	Failed Outcome = "failed"
	// Refused: the worker answered with a status that is the client's fault.
	Refused Outcome = "refused"
	// NoRoom: the bodies or the answers of all legs are above their bound; not the worker's fault.
	NoRoom Outcome = "no_room"
	// Incomplete: the answer has no transfer parameters.
	Incomplete Outcome = "no_parameters"
	// Unusable: the leg could not be built.
	Unusable Outcome = "unusable"
	// Cancelled: the request ended before its leg.
	Cancelled Outcome = "cancelled"
)

// FailureError is a leg that did not succeed.
type FailureError struct {
	Outcome Outcome
	// Status, Body and Header are the worker's answer, 0 and nil if there was none.
	Status int
	Body   []byte
	Header http.Header
	Err    error
	// Unsent reports that the worker did not get the leg, so it computed nothing.
	Unsent bool
}

// Error returns outcome and cause.
func (e *FailureError) Error() string {
	if e.Status != 0 {
		return fmt.Sprintf("%s: status %d", e.Outcome, e.Status)
	}
	return fmt.Sprintf("%s: %v", e.Outcome, e.Err)
}

// Unwrap returns the cause.
func (e *FailureError) Unwrap() error { return e.Err }

// AsFailure returns err as a *FailureError. Other errors get the outcome Incomplete if they wrap
// ErrNoParameters, else Unusable.
func AsFailure(err error) *FailureError {
	if f, ok := errors.AsType[*FailureError](err); ok {
		return f
	}
	if errors.Is(err, ErrNoParameters) {
		return &FailureError{Outcome: Incomplete, Err: err}
	}
	return &FailureError{Outcome: Unusable, Err: err}
}

// Sender sends prefill legs, through Envoy's prefill listener or directly to the workers. It is
// safe for concurrent use.
type Sender struct {
	pickHeader      string // "" without a listener
	through, direct http.Client
}

// NewSender returns a sender that uses a listener ("host:port" or "unix:/path") which reads the worker's address from
// the header pickHeader; with an empty listener legs go directly to the worker.
func NewSender(listener, pickHeader string) *Sender {
	s := &Sender{direct: clientWith((&net.Dialer{Timeout: time.Second}).DialContext)}
	s.through = s.direct
	if listener != "" {
		network, address := "tcp", listener
		if path, ok := strings.CutPrefix(listener, "unix:"); ok {
			network, address = "unix", path
		}
		s.pickHeader = pickHeader
		s.through = clientWith(func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		})
	}
	return s
}

func clientWith(dial func(ctx context.Context, network, address string) (net.Conn, error)) http.Client {
	noRedirect := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse } // it is an engine's answer
	return http.Client{CheckRedirect: noRedirect, Transport: &http.Transport{
		DialContext: dial, DisableCompression: true, MaxResponseHeaderBytes: maxHead, MaxIdleConnsPerHost: 256, IdleConnTimeout: idle, WriteBufferSize: 64 << 10, ReadBufferSize: 64 << 10,
	}}
}

// Close closes idle connections.
func (s *Sender) Close() {
	s.through.CloseIdleConnections()
	s.direct.CloseIdleConnections()
}

// sending is the request of a leg.
type sending struct {
	address, path string
	header        http.Header
	body          []byte
}

// Send posts a leg to a worker and returns the body of its answer, charged to c. If seen is not nil, the body is only
// passed to it. ctx limits the duration. The error is a *FailureError.
func (s *Sender) Send(ctx context.Context, l *sending, c *charge, seen io.Writer) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, prefillURL+l.path, bytes.NewReader(l.body))
	if err != nil {
		return nil, &FailureError{Outcome: Unusable, Err: withoutURL(err)}
	}
	req.Header = l.header
	return s.ask(req, l.address, true, maxAnswer, c, seen)
}

// prefillURL is the URL of all requests to the listener: Envoy does not route them by host, and with one host for all
// workers they share connections.
const prefillURL = "http://prefill"

// ask sends a request for prefillURL to an address, with listener through Envoy's listener if there is one. It returns
// the body of the answer, at most limit bytes. If seen is not nil, an answer with status 200 is only passed to it.
func (s *Sender) ask(req *http.Request, address string, listener bool, limit int64, c *charge, seen io.Writer) ([]byte, error) {
	client, ctx := &s.through, req.Context()
	if req.Host = address; listener && s.pickHeader != "" {
		req.Header.Set(s.pickHeader, address)
	} else {
		client, req.URL.Host = &s.direct, address
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, &FailureError{Outcome: outcomeOfError(ctx, err), Err: withoutURL(err)}
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		limit, seen = maxRefuse, nil
	}
	raw, n, err := read(io.LimitReader(resp.Body, limit+1), c, seen)
	switch {
	case errors.Is(err, errNoRoom) && resp.StatusCode == http.StatusOK:
		return nil, &FailureError{Outcome: NoRoom, Err: err}
	case errors.Is(err, errNoRoom):
		raw = nil // the status says enough
	case err != nil:
		return nil, &FailureError{Outcome: outcomeOfError(ctx, fmt.Errorf("%w: %w", io.ErrUnexpectedEOF, err)), Err: err}
	case resp.StatusCode == http.StatusOK && n > limit:
		return nil, &FailureError{Outcome: Failed, Err: fmt.Errorf("answer over %d bytes", limit)}
	case resp.StatusCode == http.StatusOK:
		return raw, nil
	}
	return nil, &FailureError{Outcome: outcomeOf(resp.StatusCode), Status: resp.StatusCode, Body: raw, Header: resp.Header}
}

// read reads all of src, charged to c, or into seen if that is not nil. It returns the length.
func read(src io.Reader, c *charge, seen io.Writer) (raw []byte, n int64, err error) {
	if seen != nil {
		n, err = io.Copy(seen, src)
		return nil, n, err
	}
	raw, err = io.ReadAll(c.of(src))
	return raw, int64(len(raw)), err
}

// withoutURL returns an error of net/http without the URL, whose query may contain a key.
func withoutURL(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

// outcomeOf returns the outcome for a status other than 200. 408 is not the client's fault.
func outcomeOf(status int) Outcome {
	switch {
	case status == http.StatusServiceUnavailable || status == http.StatusBadGateway || status == http.StatusGatewayTimeout:
		return Unreachable
	case status/100 == 4 && status != http.StatusRequestTimeout:
		return Refused
	default:
		return Failed
	}
}

// outcomeOfError returns the outcome of a leg whose connection failed.
func outcomeOfError(ctx context.Context, err error) Outcome {
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return TimedOut
	case ctx.Err() != nil:
		return Cancelled
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return Died
	default:
		return Unreachable
	}
}

// Get fetches a page of at most maxPage bytes from a worker, with api through the listener. A 4xx status is the
// worker's failure, because the request does not come from a client.
func (s *Sender) Get(ctx context.Context, address, path string, api bool) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, prefillURL+path, http.NoBody)
	if err != nil {
		return nil, &FailureError{Outcome: Unusable, Err: err}
	}
	free := charge{room: new(Room)} // not charged: at most one page of a worker
	raw, err := s.ask(req, address, api, maxPage, &free, nil)
	if f, ok := errors.AsType[*FailureError](err); ok && f.Outcome == Refused {
		return nil, &FailureError{Outcome: Failed, Status: f.Status}
	}
	return raw, err
}

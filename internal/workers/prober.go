package workers

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// prober runs one worker's health checks over a connection that it keeps. At two checks per second and worker
// net/http's client would cost twice as much CPU, because its two goroutines per connection wake for each request. Not
// safe for concurrent use.
type prober struct {
	timeout time.Duration

	address string // the address of conn
	conn    net.Conn
	head    *io.LimitedReader // of conn; bounds the head of an answer
	read    *bufio.Reader     // of head
	cache   EngineCache       // of the last metrics page
	// unbind ends the watch that closes conn when the context ends.
	unbind func() bool
}

// Health checks a worker once, as a Registry does.
func Health(ctx context.Context, address string, timeout time.Duration) error {
	p := &prober{timeout: timeout}
	defer p.close()
	return p.health(ctx, address)
}

// health sends GET /health, which all three engines support.
func (p *prober) health(ctx context.Context, address string) error {
	return p.get(ctx, address, "/health", func(*http.Response) error { return nil })
}

// pages pools the buffers of metrics pages.
var pages = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// loads reads the engine's /metrics.
func (p *prober) loads(ctx context.Context, address, engine string) (loads []RankLoad, err error) {
	page, _ := pages.Get().(*bytes.Buffer)
	defer pages.Put(page)
	page.Reset()
	err = p.get(ctx, address, "/metrics", func(resp *http.Response) error {
		if _, err := page.ReadFrom(io.LimitReader(resp.Body, maxPage)); err != nil {
			return fmt.Errorf("GET /metrics: %w", err)
		}
		loads, p.cache = parseLoads(page.Bytes(), engine), parseCache(page.Bytes())
		p.cache.FirstRank, p.cache.Ranks = span(loads)
		return nil
	})
	if none, ok := errors.AsType[statusError](err); ok {
		p.cache = EngineCache{NoLoad: none.Error()}
	}
	return loads, err
}

// statusError is an answer with a status other than 2xx.
type statusError struct {
	path string
	code int
}

func (e statusError) Error() string { return fmt.Sprintf("GET %s: status %d", e.path, e.code) }

// maxHead bounds the bytes of an answer's head, maxRest those that are read only to keep the connection.
const maxHead, maxRest = 64 << 10, 64 << 10

// get requests a path and calls use with the answer if its status is 2xx.
func (p *prober) get(ctx context.Context, address, path string, use func(*http.Response) error) error {
	if p.address != address {
		p.close()
	}
	kept := p.conn != nil
	resp, err := p.ask(ctx, address, path)
	if err != nil && kept && ctx.Err() == nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		resp, err = p.ask(ctx, address, path) // the worker may have closed the kept connection
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		err = statusError{path, resp.StatusCode}
	} else {
		err = use(resp)
	}
	if n, rest := io.CopyN(io.Discard, resp.Body, maxRest); n == maxRest || !errors.Is(rest, io.EOF) || resp.Close {
		p.close()
	}
	return err
}

// ask sends a request and reads the head of the answer. It closes the connection on an error.
func (p *prober) ask(ctx context.Context, address, path string) (_ *http.Response, err error) {
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.conn == nil {
		dialer := net.Dialer{Timeout: p.timeout}
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		p.address, p.conn, p.head = address, conn, &io.LimitedReader{R: conn}
		p.read = bufio.NewReader(p.head)
		p.unbind = context.AfterFunc(ctx, func() { _ = conn.Close() })
	}
	if err := p.conn.SetDeadline(time.Now().Add(p.timeout)); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(p.conn, "GET "+path+" HTTP/1.1\r\nHost: "+address+"\r\nUser-Agent: kvlane\r\n\r\n"); err != nil {
		return nil, fmt.Errorf("GET %s: %w", path, err)
	}
	p.head.N = maxHead
	resp, err := http.ReadResponse(p.read, nil)
	if err != nil {
		return nil, fmt.Errorf("GET %s: %w", path, err)
	}
	p.head.N = math.MaxInt64 // readers of bodies have their own bounds
	return resp, nil
}

// close drops the connection, if there is one.
func (p *prober) close() {
	if p.conn != nil {
		p.unbind()
		_ = p.conn.Close()
	}
	p.address, p.conn, p.head, p.read, p.unbind = "", nil, nil, nil, nil
}

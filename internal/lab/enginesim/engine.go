package enginesim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Engine is a running engine. Its methods are safe for concurrent use.
type Engine struct {
	opts   Options
	id     string // engine id of block transfers, new with every start
	ranks  []*rank
	apis   []*apiServer
	sides  []*apiServer // one, or one for each rank
	side   *apiServer   // the first
	boot   *apiServer   // the server at which the legs of SGLang and Mooncake meet
	faults faultBox
	stats  stats
	held   holdings
	stored storedResponses
	// received is what LMCache senders pushed to this engine.
	received SharedStore
	turn     atomic.Uint64 // round robin of requests that name no rank
	created  time.Time

	ctx      context.Context
	cancel   context.CancelFunc
	loops    sync.WaitGroup
	handlers sync.WaitGroup
	close    sync.Once

	faultMu sync.Mutex // serialises SetFaults

	handlerMu sync.Mutex
	closed    bool
}

// Start opens the sockets of an engine and runs it until ctx ends or Close is called.
func Start(ctx context.Context, opts Options) (*Engine, error) {
	if err := opts.complete(); err != nil {
		return nil, OptionsError{fmt.Errorf("engine options: %w", err)}
	}
	e := &Engine{opts: opts, id: randomHex(8), created: time.Now()}
	e.ctx, e.cancel = context.WithCancel(ctx)
	e.faults.set(opts.Faults)
	e.held = holdings{eng: e, items: map[string]*held{}, used: map[string]bool{}, changed: make(chan struct{})}
	if err := e.open(); err != nil {
		e.Close()
		return nil, err
	}
	if opts.CoupledRanks {
		e.loops.Go(func() { e.run(e.ranks) })
	} else {
		for _, r := range e.ranks {
			e.loops.Go(func() { e.run([]*rank{r}) })
		}
	}
	stop := context.AfterFunc(ctx, e.Close)
	e.loops.Go(func() {
		<-e.ctx.Done()
		stop()
	})
	return e, nil
}

func (e *Engine) open() error {
	o := &e.opts
	common := make(chan struct{}, 1)
	for i := range o.Ranks {
		if err := e.ctx.Err(); err != nil { // stopped before it started
			return err
		}
		r := &rank{eng: e, local: i, wake: make(chan struct{}, 1)}
		if o.CoupledRanks {
			r.wake = common
		}
		r.newPool()
		enc := encoding{engine: o.Engine, arrays: o.ArrayEvents, bytes: o.RawHashes && o.Engine == VLLM, blockSize: o.BlockSize}
		pub, err := openPublisher(e.ctx, o, r.global(), enc, &e.faults)
		if err != nil {
			return err
		}
		r.pub = pub
		e.ranks = append(e.ranks, r)
		if o.Engine == TRTLLM {
			r.trt = e.trtEvents()
		}
	}
	e.announceStart()
	_, port, err := net.SplitHostPort(o.SideAddr)
	if err != nil {
		return fmt.Errorf("side listener: %w", err)
	}
	// With NIXL's push each rank has its own side listener, if their ports were chosen.
	if e.sides, err = e.openRanks(o.SideAddr, o.Connector == "nixl-push" && o.Ranks > 1 && port != "0", e.sideMux); err != nil {
		return fmt.Errorf("side listener: %w", err)
	}
	e.side = e.sides[0]
	if (o.Engine == SGLang || o.Connector == "mooncake") && o.Role != Decode {
		if e.boot, err = openAPI(e, o.Bootstrap, e.bootstrapMux()); err != nil {
			return fmt.Errorf("bootstrap listener: %w", err)
		}
	}
	if e.apis, err = e.openRanks(o.Listen, o.PortPerRank, e.apiMux); err != nil {
		return fmt.Errorf("api listener: %w", err)
	}
	return nil
}

// openRanks opens one listener for all ranks or, if each is set, one for each at the address's port + rank.
func (e *Engine) openRanks(listen string, each bool, mux func(only int) http.Handler) ([]*apiServer, error) {
	if !each {
		all, err := openAPI(e, listen, mux(-1))
		return []*apiServer{all}, err
	}
	var servers []*apiServer
	for i := range e.opts.Ranks {
		_, address, err := zmtpAddress("tcp://"+listen, i)
		if err != nil {
			return servers, err
		}
		one, err := openAPI(e, address, mux(i))
		if err != nil {
			return servers, fmt.Errorf("of rank %d: %w", i, err)
		}
		servers = append(servers, one)
	}
	return servers, nil
}

// announceStart: SGLang's first batch clears the cache, TensorRT-LLM's first event creates it; vLLM sends nothing.
func (e *Engine) announceStart() {
	for _, r := range e.ranks {
		r.mu.Lock()
		switch e.opts.Engine {
		case SGLang:
			r.events = append(r.events, kvEvent{kind: allCleared})
			r.publish()
		case TRTLLM:
			r.trt.created(r.local)
		}
		r.mu.Unlock()
	}
}

// run steps ranks together until the engine closes.
func (e *Engine) run(ranks []*rank) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for e.ctx.Err() == nil {
		var took time.Duration
		any := false
		for _, r := range ranks {
			if l, work := r.schedule(); work {
				any = true
				took = max(took, e.opts.Time.step(l))
			}
		}
		switch {
		case !any:
			select {
			case <-e.ctx.Done():
			case <-ranks[0].wake:
			}
			continue
		case took > 0:
			timer.Reset(took)
			select {
			case <-e.ctx.Done():
			case <-timer.C:
			}
		}
		for _, r := range ranks {
			r.advance()
		}
	}
}

// Close ends the engine: running answers are cut, and all sockets are closed when it returns.
func (e *Engine) Close() {
	e.close.Do(func() {
		e.cancel()
		for _, a := range slices.Concat(e.apis, e.sides, []*apiServer{e.boot}) {
			if a != nil {
				a.shut()
			}
		}
		e.handlerMu.Lock()
		e.closed = true
		e.handlerMu.Unlock()
		e.abortAll()
		e.handlers.Wait()
		e.held.clear()
		for _, r := range e.ranks {
			r.pub.close()
		}
	})
	e.loops.Wait()
}

// enter registers a request, unless the engine is closing.
func (e *Engine) enter() bool {
	e.handlerMu.Lock()
	defer e.handlerMu.Unlock()
	if e.closed {
		return false
	}
	e.handlers.Add(1)
	return true
}

func (e *Engine) abortAll() {
	for _, r := range e.ranks {
		r.mu.Lock()
		for _, s := range slices.Concat(r.running, r.waiting) {
			s.keep = false
			r.finish(s, "abort")
		}
		r.mu.Unlock()
	}
}

// Addr is the host:port of the API; with PortPerRank use AddrOf.
func (e *Engine) Addr() string { return e.apis[0].addr }

// AddrOf is the host:port of the API that serves a rank.
func (e *Engine) AddrOf(rank int) string { return e.apis[min(rank, len(e.apis)-1)].addr }

// URL is the base URL of the API.
func (e *Engine) URL() string { return "http://" + e.Addr() }

// EngineID is the name of the engine in block transfers; rank r of several is called EngineID_dp<r>.
func (e *Engine) EngineID() string { return e.id }

// SideAddr is the host:port for block transfers and /sim.
func (e *Engine) SideAddr() string { return e.side.addr }

// BootstrapAddr is the host:port of the bootstrap server of SGLang and Mooncake, empty where there is none.
func (e *Engine) BootstrapAddr() string {
	if e.boot == nil {
		return ""
	}
	return e.boot.addr
}

// EventsEndpoint and ReplayEndpoint are the bound ZMQ endpoints of a rank, empty where there are none.
func (e *Engine) EventsEndpoint(rank int) string { return endpoint(e.ranks[rank].pub.pub) }

// ReplayEndpoint is the bound replay endpoint of a rank.
func (e *Engine) ReplayEndpoint(rank int) string { return endpoint(e.ranks[rank].pub.replay) }

// Subscribers is the number of connections that listen to the events of a rank.
func (e *Engine) Subscribers(rank int) int { return e.ranks[rank].pub.subscribers() }

// SetFaults replaces the faults.
func (e *Engine) SetFaults(f Faults) error {
	e.faultMu.Lock()
	defer e.faultMu.Unlock()
	was := e.faults.get()
	e.faults.set(f)
	if was.Refuse == f.Refuse {
		return nil
	}
	var errs []error
	for _, a := range e.apis {
		if f.Refuse {
			a.shut()
		} else {
			errs = append(errs, a.open())
		}
	}
	return errors.Join(errs...)
}

// Restart simulates a crash and a new start: running answers are cut, the cache is empty,
// sequences begin at 0, and all event connections are cut.
func (e *Engine) Restart() {
	e.abortAll()
	e.held.clear()
	e.stored.Clear()
	for _, r := range e.ranks {
		r.mu.Lock()
		r.events, r.removed, r.resets = nil, nil, 0
		r.newPool()
		if r.trt != nil {
			r.trt.restart(r.local)
		}
		r.mu.Unlock()
		r.pub.restart()
	}
	e.announceStart()
}

// Disconnect cuts all event and replay connections.
func (e *Engine) Disconnect() {
	for _, r := range e.ranks {
		r.pub.disconnect()
	}
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

// apiServer is an HTTP listener that can be shut and opened again on the same port.
type apiServer struct {
	eng     *Engine
	handler http.Handler
	addr    string

	mu     sync.Mutex
	server *http.Server
	wg     sync.WaitGroup
}

func openAPI(e *Engine, addr string, h http.Handler) (*apiServer, error) {
	a := &apiServer{eng: e, addr: strings.Replace(addr, "*", "", 1), handler: h}
	return a, a.open()
}

func (a *apiServer) open() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.server != nil {
		return nil
	}
	if err := a.eng.ctx.Err(); err != nil {
		return err
	}
	l, err := net.Listen("tcp", a.addr)
	if err != nil {
		return err
	}
	a.addr = l.Addr().String()
	s := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !a.eng.enter() {
				panic(http.ErrAbortHandler)
			}
			defer a.eng.handlers.Done()
			a.handler.ServeHTTP(w, r)
		}),
		BaseContext:       func(net.Listener) context.Context { return a.eng.ctx },
		ReadHeaderTimeout: time.Minute,
	}
	a.server = s
	a.wg.Go(func() { _ = s.Serve(l) })
	return nil
}

func (a *apiServer) shut() {
	a.mu.Lock()
	s := a.server
	a.server = nil
	a.mu.Unlock()
	if s != nil {
		_ = s.Close()
	}
	a.wg.Wait()
}

package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"
	"google.golang.org/grpc"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/decide"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/peers"
	"github.com/kvlane/kvlane/internal/replicas"
	"github.com/kvlane/kvlane/internal/steering"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/internal/workers/kube"
	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

// warmUp bounds how long readiness waits for the feeds' first synchronisation. firstLook bounds how long the socket for
// Envoy stays closed at startup while workers do not answer their first check.
const warmUp, firstLook = 10 * time.Second, time.Second

// serveFlags are the arguments of serve.
type serveFlags struct {
	file, listen, admin string
	pool                *poolFlags
}

// load reads the configuration, with the values that flags override.
func (a *serveFlags) load() (*config.Config, []config.Problem, error) {
	c, warnings, err := a.pool.load(a.file)
	if err != nil {
		return nil, nil, err
	}
	c.Listen.Address = cmp.Or(a.listen, c.Listen.Address)
	c.Admin.Address = cmp.Or(a.admin, c.Admin.Address)
	return c, warnings, nil
}

func runServe(ctx context.Context, io streams, args []string) error {
	f := flags("serve")
	a := serveFlags{pool: kubernetesFlags(f)}
	f.StringVar(&a.file, "config", "", "configuration `file`, the same as the argument")
	f.StringVar(&a.listen, "listen", "", "`address` instead of listen.address")
	f.StringVar(&a.admin, "admin", "", "`address` instead of admin.address")
	if err := parse(io, f, args, 1); err != nil {
		return err
	}
	a.file = cmp.Or(a.file, f.Arg(0))
	text, _ := config.ReadFile(a.file) // load reports the error
	watch := config.WatchFile(a.file, text)
	c, warnings, err := a.load()
	if err != nil {
		return err
	}
	log, err := observe.Logger(io.err, "trace") // setLogLevel filters
	if err != nil {
		return err
	}
	setLogLevel(c.Log.Level)
	for _, w := range warnings {
		log.Warn().Msg(w.String())
	}
	for _, text := range a.pool.ignored {
		log.Warn().Msg(text)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectPercent)
	}
	hangUp := make(chan os.Signal, 1)
	signal.Notify(hangUp, syscall.SIGHUP) // by default it ends the process
	defer signal.Stop(hangUp)
	s, err := startService(ctx, c, log, a.pool.wrap)
	if err != nil {
		return config.Place(a.file, err)
	}
	log.Info().Str("version", version).Str("listen", c.Listen.Address).Str("admin", s.admin.Addr().String()).Msg("serving")
	dropFilePages()
	kept := make(chan error, 2)
	go func() { kept <- s.keepCurrent(ctx, &a, watch, hangUp) }()
	context.AfterFunc(ctx, func() { time.AfterFunc(5*time.Second, func() { kept <- nil }) }) // a disk that hangs is not waited for
	if err = <-kept; err == nil {
		s.drain(c.Drain.Std())
	}
	s.close()
	log.Info().Msg("stopped")
	return err
}

// service is a running Kvlane.
type service struct {
	decider  *decide.Decider
	registry *workers.Registry
	kube     *kubernetes // nil without Kubernetes
	draining atomic.Bool
	open     atomic.Bool                   // the socket for Envoy
	hung     atomic.Bool                   // see watchLocks
	unknown  atomic.Int64                  // when Envoy last sent a request without the address that a limit needs, in Unix seconds; 0: never
	warm     atomic.Bool                   // a peer's index was copied, or there is none to copy; started does not change afterwards
	peers    *peers.Server                 // nil without peers
	replicas atomic.Pointer[replicas.Node] // nil if this replica routes alone, or begins
	server   *extproc.Server
	grpc     *grpc.Server
	events   *grpc.Server // nil without a port of its own
	probe    *grpc.Server
	http     *http.Server
	debug    atomic.Pointer[http.ServeMux] // nil until models are loaded
	loading  loading
	admin    net.Listener
	config   atomic.Pointer[config.Config]
	rejected atomic.Pointer[error] // why the last reload failed, nil if it did not
	waits    bool                  // the last reload failed because a hub did not answer; only keepCurrent uses it
	// generation counts the applied configurations, including the first.
	generation atomic.Int64
	metrics    *observe.Metrics
	tracer     *observe.Tracer
	log        zerolog.Logger
	models     []*fleet.Model // those of the decider
	started    time.Time
	failed     chan error
	stop       context.CancelFunc
	wg         sync.WaitGroup
}

// startService opens the sockets and starts all parts; close ends them. around, if not nil, wraps the request handler.
func startService(ctx context.Context, c *config.Config, log zerolog.Logger, around func(*service, extproc.Handler) extproc.Handler) (_ *service, err error) {
	if found := c.Unstartable(); len(found) > 0 { // before tokenizers are loaded, which can take minutes
		return nil, found
	}
	metrics := observe.New(version)
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	s := &service{log: log, metrics: metrics, failed: make(chan error, 4), stop: stop}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	s.config.Store(c)
	s.generation.Store(1)
	if err := s.openAdmin(c); err != nil {
		return nil, err
	}
	if s.models, err = loadModels(ctx, c, nil, &s.loading, metrics, log); err != nil {
		return nil, err
	}
	s.started = time.Now()
	debug.FreeOSMemory() // memory used to read the tokenizers' files
	metrics.Collect(func(emit observe.Emit) {
		emit("config_generation", "Configurations taken since the start, the first included.", float64(s.generation.Load()))
		emit("config_rejected", "1 while the configuration on disk is rejected and an earlier one runs.", observe.Gauge(s.rejected.Load() != nil))
	})
	if s.tracer, err = observe.NewTracer(ctx, version, log); err != nil {
		return nil, err
	}
	xds := envoy.NewXDS()
	s.decider, err = decide.New(decide.Options{
		Config: c, Models: s.models, Metrics: metrics, Tracer: s.tracer, Log: log,
		OnEndpoints: func(serve, prefill []string) {
			if err := xds.Set(envoy.Endpoints{Serve: serve, Spare: prefill}); err != nil {
				log.Error().Err(err).Msg("endpoints left out of Envoy's list")
			}
		},
		OnSuspect: func(worker string) { s.registry.Suspect(worker) },
	})
	if err != nil {
		return nil, err
	}
	s.registry = workers.New(workers.Options{
		Health: c.Workers.Health, Scrape: c.Workers.Scrape.Std(), Log: log,
		OnChange: s.decider.Fleet().SetWorkers, OnLoad: s.decider.Fleet().Load,
		OnCache: s.decider.Fleet().EngineCache,
		OnCheck: func(worker, outcome string) { metrics.Checks.WithLabelValues(worker, outcome).Inc() },
	})
	var handler extproc.Handler = s.decider
	if c.Workers.Kubernetes != nil {
		if s.kube, err = newKubernetes(c, log); err != nil {
			return nil, err
		}
		handler = s.kube.gate(handler, metrics)
		metrics.Collect(s.kube.collect)
	}
	if around != nil {
		handler = around(s, handler)
	}
	if err := s.openPages(c, handler, metrics); err != nil {
		return nil, err
	}
	if c.Fleet.Mode != config.FleetOff {
		node, err := replicas.Start(ctx, replicas.Options{
			Config: &c.Fleet, Settings: replicas.Settings(&c.Index), Update: s.decider.Update, Log: log, Delay: metrics.ReplicasDelay,
			Limit: func(l net.Listener) net.Listener { return limitAdmin(l, log) },
		})
		if err != nil {
			return nil, err
		}
		s.replicas.Store(node)
		metrics.Collect(node.Collect)
		s.debug.Load().Handle("GET /debug/replicas", readable(c.Admin.TokenFile, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { observe.WriteJSON(w, node.State()) })))
	}
	s.copyIndex(ctx, c)
	s.registry.Static(c.Workers.Static)
	if c.Workers.File != "" {
		if err := s.registry.File(c.Workers.File); err != nil {
			return nil, err
		}
	}
	for _, d := range c.Workers.DNS {
		s.registry.DNS(d)
	}
	s.firstLook(ctx)
	if err := s.listen(background, c, xds); err != nil {
		return nil, err
	}
	if s.kube != nil {
		s.kube.start(s.registry.Set, s.decider.SetObjectives)
	}
	s.wg.Go(func() { s.becomeReady(background) })
	s.wg.Go(func() { s.decider.KeepAwake(background) })
	s.wg.Go(func() { s.watchLocks(background, time.Second) })
	return s, nil
}

// firstLook waits until the workers known at the start have been checked once. Until then Envoy finds no socket and
// routes without Kvlane, which is better than refusing requests because no worker has been checked yet.
func (s *service) firstLook(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstLook)
	defer cancel()
	for !s.registry.Settled() && ctx.Err() == nil {
		time.Sleep(5 * time.Millisecond)
	}
}

// openAdmin opens the admin port. Until openPages it only reports which tokenizers are being loaded.
func (s *service) openAdmin(c *config.Config) (err error) {
	if s.admin, err = net.Listen("tcp", c.Admin.Address); err != nil {
		return err
	}
	s.http = newAdminServer(http.HandlerFunc(s.pages))
	s.serve("admin", func() error { return s.http.Serve(limitAdmin(s.admin, s.log)) })
	return nil
}

// pages serves the admin port.
func (s *service) pages(w http.ResponseWriter, r *http.Request) {
	if pages := s.debug.Load(); pages != nil {
		pages.ServeHTTP(w, r)
	} else { // to /healthz, too: startup probes and the systemd unit wait for the tokenizers
		http.Error(w, stillLoads, http.StatusServiceUnavailable)
		observe.WriteWarnings(w, s.loading.warnings())
	}
}

// openPages creates the servers and opens what works from the start: probes, metrics and debug pages.
func (s *service) openPages(c *config.Config, handler extproc.Handler, metrics *observe.Metrics) error {
	opts := extProcOptions(c, metrics)
	opts.OnPanic = func(value any, stack []byte) {
		s.log.Error().Str("panic", fmt.Sprint(value)).Bytes("stack", stack).Msg("panic while handling a request")
	}
	count := opts.Metrics.Failure
	opts.Metrics.Failure = func(f extproc.Failure) {
		count(f)
		if f == extproc.FailureNoAddress && s.unknown.Swap(time.Now().Unix()) == 0 {
			s.log.Warn().Msg(noAddress)
		}
	}
	opts.PanicReject = s.decider.PanicReject()
	s.server = extproc.NewServer(opts, handler)
	metrics.Collect(func(emit observe.Emit) {
		count, bytes := s.server.InFlight()
		emit("bodies_in_flight", "Request bodies that are held.", float64(count))
		emit("bodies_in_flight_bytes", "Memory of the request bodies that are held.", float64(bytes))
	})
	s.grpc = grpc.NewServer(extproc.GRPCOptions(opts)...)
	s.server.Register(s.grpc)
	events := s.grpc
	if c.Listen.Events != "" {
		s.events = grpc.NewServer(extproc.GRPCOptions(opts)...)
		events = s.events
	}
	kvlanev1.RegisterKVEventsServer(events, s.decider.Fleet().Push())
	if len(c.Index.Peers.Addresses) > 0 {
		s.peers = peers.NewServer(peers.Content{Secret: s.decider.Fleet().CopySecret(), BlockSize: c.Index.BlockSize, Dump: s.decider.Fleet().DumpIndex}, s.log)
		metrics.Collect(s.peers.Collect)
		kvlanev1.RegisterSnapshotsServer(s.grpc, s.peers)
	}
	if c.Listen.Health != "" {
		probe, err := net.Listen("tcp", c.Listen.Health)
		if err != nil {
			return fmt.Errorf("%w (listen.health in the configuration)", err)
		}
		s.probe = newProbe()
		s.server.RegisterHealth(s.probe)
		s.serve("health", func() error { return s.probe.Serve(limitAdmin(probe, s.log)) })
	}
	s.debug.Store(s.adminMux(c.Admin.TokenFile, metrics))
	return nil
}

const noAddress = "limits.requests_per_address does not bound requests whose client's IP address Envoy does not send (no Unix socket has one): add source.address to request_attributes of its ext_proc filter, as the current bootstrap and manifests do"

// copyIndex copies a peer's index before anything else uses ours. Until then Envoy finds no socket.
func (s *service) copyIndex(ctx context.Context, c *config.Config) {
	if s.peers != nil {
		err := peers.Fetch(ctx, &peers.Want{
			Peers: c.Index.Peers, CertFile: c.Listen.CertFile, KeyFile: c.Listen.KeyFile, Secret: s.decider.Fleet().CopySecret(), BlockSize: c.Index.BlockSize, MaxBytes: int64(c.Index.MaxBytes), Log: s.log,
		}, s.decider.Fleet().LoadIndex)
		if err != nil {
			s.log.Warn().Err(err).Msg("the index starts empty")
		}
		s.started = time.Now()
	}
	s.warm.Store(true)
}

func extProcOptions(c *config.Config, metrics *observe.Metrics) extproc.Options {
	opts := extproc.Options{
		Name: "kvlane", BodyLimit: int(c.Limits.MaxBody), MaxBodies: c.Limits.Bodies.Count, MaxBodyBytes: int64(c.Limits.Bodies.Bytes), MaxPerAddress: c.Limits.PerAddress, MaxStreams: uint32(c.Limits.MaxStreams),
		DrainQuiet: c.Quiet.Std(), Metrics: protocolMetrics(metrics), SkipResponseBody: c.Envoy.ResponseBody == envoy.BodyNone,
		ControlHeaders: append(steering.AtKvlane(), c.Tenants.Headers()...), RequestID: disagg.RequestIDs(c.Disagg.Connector, c.Disagg.Trust),
	}
	if !c.Envoy.AccessLog {
		opts.LateTickets = -1 // outcomes are never reported
	}
	// This is well before Envoy continues without Kvlane, and late enough that few requests need it.
	opts.ExtendTimeout, opts.ExtendAfter = c.Envoy.MessageTimeout.Std(), c.Envoy.StallTimeout.Std()/4
	return opts
}

// listen opens the sockets for Envoy, relays and peers.
func (s *service) listen(ctx context.Context, c *config.Config, xds *envoy.XDS) error {
	secure, err := extproc.TLSConfig(c.Listen.CertFile, c.Listen.KeyFile, "kvlane")
	if err != nil {
		return err
	}
	if c.Listen.MinTLS == "VersionTLS13" {
		secure.MinVersion = tls.VersionTLS13
	}
	if c.Listen.ClientCA != "" {
		if err := extproc.RequireClients(secure, c.Listen.ClientCA); err != nil {
			return err
		}
	}
	if s.events != nil {
		lis, err := extproc.Listen(ctx, c.Listen.Events, secure)
		if err != nil {
			return fmt.Errorf("%w (listen.events in the configuration)", err)
		}
		s.serve("events", func() error { return s.events.Serve(limitHosts(lis, maxRequestsOf, s.log)) })
	}
	lis, err := extproc.Listen(ctx, c.Listen.Address, secure)
	if err != nil {
		return fmt.Errorf("%w (listen.address in the configuration, or --listen)", err)
	}
	xds.Register(ctx, s.grpc)
	s.serve("ext_proc", func() error { return s.grpc.Serve(limitHosts(lis, maxRequestsOf, s.log)) })
	s.open.Store(true)
	return nil
}

func (s *service) serve(name string, run func() error) {
	s.wg.Go(func() {
		if err := run(); err != nil && !errors.Is(err, grpc.ErrServerStopped) && !errors.Is(err, http.ErrServerClosed) {
			s.failed <- fmt.Errorf("%s: %w", name, err)
		}
	})
}

// adminMux serves everything on the admin port.
func (s *service) adminMux(tokenFile string, metrics *observe.Metrics) *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, EnableOpenMetrics: true}))
	state := func(w http.ResponseWriter, why string) {
		if why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
		} else {
			fmt.Fprintln(w, "ok")
		}
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { state(w, s.notAlive()) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		state(w, s.notReady())
		observe.WriteWarnings(w, s.warnings())
	})
	mux.Handle("GET /debug/config", readable(tokenFile, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		text, err := s.config.Load().Effective()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(text)
	})))
	pages := s.decider.Pages()
	pages.Status, pages.Warnings = s.status, s.warnings
	debug := pages.Handler()
	mux.Handle("GET /debug/", readable(tokenFile, debug))
	mux.Handle("POST /debug/", guarded(tokenFile, debug))
	mux.Handle("GET /", observe.Page())
	mux.Handle("GET /debug/pprof/", guarded(tokenFile, profiles()))
	return mux
}

// status returns the data of /debug/status.
func (s *service) status() observe.Status {
	st := s.decider.Status()
	st.Version, st.NotReady, st.Warnings = version, s.notReady(), observe.OfNoWorker(s.warnings())
	if node := s.replicas.Load(); node != nil {
		st.Replicas = node.State()
	}
	return st
}

// warnings returns the warnings about Kvlane itself, followed by those about models and workers.
func (s *service) warnings() (list []observe.Warning) {
	if err := s.rejected.Load(); err != nil {
		list = append(list, observe.Warning{Reason: "config_rejected", Text: "the configuration on disk is rejected, the running one stays: " + observe.ClipTo((*err).Error(), observe.MaxText)})
	}
	for _, why := range s.config.Load().Listen.Outdated() {
		list = append(list, observe.Warning{Reason: "certificate", Text: why})
	}
	token := s.config.Load().Admin.TokenFile
	if _, err := config.ReadFile(token); token != "" && err != nil {
		list = append(list, observe.Warning{Reason: "no_token", Text: "requests that need the token of admin.token_file are refused: " + err.Error()})
	}
	if time.Since(time.Unix(s.unknown.Load(), 0)) < 10*time.Minute && s.config.Load().Limits.PerAddress > 0 {
		list = append(list, observe.Warning{Reason: "no_address", Text: noAddress})
	}
	for _, why := range s.registry.Stuck() {
		list = append(list, observe.Warning{Reason: "workers_unknown", Text: observe.ClipTo(why, observe.MaxText)})
	}
	for _, pool := range s.kube.list((*kube.Source).Missing) {
		list = append(list, observe.Warning{Reason: "no_pool", Text: fmt.Sprintf("there is no InferencePool %s: requests for it are answered 503", pool)})
	}
	for _, why := range s.kube.list((*kube.Source).Failing) {
		list = append(list, observe.Warning{Reason: "not_watched", Text: observe.ClipTo(why, observe.MaxText)})
	}
	return append(append(append(list, s.replicas.Load().Warnings()...), s.loading.warnings()...), s.decider.Fleet().Warnings()...)
}

// notReady returns what readiness waits for, "" if nothing. It waits in this order: a peer's index was loaded or
// abandoned and the socket for Envoy is open; every pool was looked up, at least one exists, and the pods of existing
// pools are known, without a time limit; then, for at most warmUp, every worker was checked once and every feed caught
// up.
func (s *service) notReady() string {
	if why := s.notAlive(); why != "" {
		return why
	}
	if !s.warm.Load() {
		return "the index is being taken from a peer"
	}
	if node := s.replicas.Load(); node != nil {
		if why := node.Waiting(); why != "" {
			return why
		}
	}
	since := s.started
	switch {
	case s.draining.Load():
		return "draining"
	case !s.open.Load():
		return "the socket for Envoy is not open yet"
	case s.kube != nil:
		var why string
		if since, why = s.kube.waiting(); why != "" {
			return why
		}
	}
	if time.Since(since) > warmUp {
		return ""
	}
	if s.kube != nil {
		if why := s.kube.source.Load().Asking(); why != "" {
			return why
		}
	}
	if !s.registry.Settled() {
		return "workers are being checked"
	}
	return s.decider.Fleet().Syncing()
}

// hungAfter is how many ticks of watchLocks a decision may wait for a lock before the process counts as hung. Locks are held for
// microseconds. A process that was stopped and continues has not waited.
const hungAfter = 5

// watchLocks takes the router's lock and looks up a block at every tick. If that hangs, health checks fail, so that Envoy
// routes without Kvlane and Kubernetes restarts it.
func (s *service) watchLocks(ctx context.Context, every time.Duration) {
	var matches kvindex.Matches
	passed := make(chan bool, 1)
	passed <- true
	tick := time.NewTicker(every)
	defer tick.Stop()
	for missed := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		select {
		case <-passed:
			missed = 0
			go func() {
				s.decider.Update(func(*routing.Router, time.Duration) {})
				s.decider.Fleet().Index().Match([]kvindex.Hash{1}, &matches)
				passed <- true
			}()
		default:
			missed++
		}
		if hung := missed >= hungAfter; s.hung.Swap(hung) != hung {
			s.server.SetAlive(!hung)
			text := map[bool]string{true: "decisions wait for a lock, health checks fail: take /debug/pprof/goroutine?debug=2 before the restart", false: "decisions have the lock again"}
			s.log.Error().Msg(text[hung])
		}
	}
}

// notAlive returns why the process should be restarted, "" if it should not.
func (s *service) notAlive() string {
	if s.hung.Load() {
		return "decisions have waited for a lock for seconds"
	}
	return ""
}

// becomeReady sets the gRPC health status when the service becomes ready.
func (s *service) becomeReady(ctx context.Context) {
	for ; s.notReady() != ""; time.Sleep(20 * time.Millisecond) {
		if ctx.Err() != nil {
			return
		}
	}
	s.decider.Fleet().ForgetUnclaimed()
	if s.peers != nil {
		s.peers.SetReady()
	}
	s.server.SetServing(true)
	for _, w := range s.warnings() {
		if w.Reason == "no_pool" || w.Reason == "no_workers" { // others are logged where they are found
			s.log.Warn().Str("reason", w.Reason).Msg("ready, but " + w.Text)
		}
	}
	s.log.Info().Dur("after_ms", time.Since(s.started)).Msg("ready")
}

// close stops everything that startService started.
func (s *service) close() {
	s.stop()
	for _, g := range []*grpc.Server{s.grpc, s.events, s.probe} {
		if g != nil {
			g.Stop()
		}
	}
	if s.http != nil {
		_ = s.http.Close()
	}
	if s.kube != nil {
		s.kube.close()
	}
	if node := s.replicas.Load(); node != nil {
		node.Close()
	}
	if s.registry != nil {
		s.registry.Close()
	}
	if s.decider != nil {
		s.decider.Close()
	}
	s.wg.Wait()
	s.tracer.Close()
}

// protocolMetrics connects ext_proc's hooks with the metrics. Series used by every request are looked up once.
func protocolMetrics(m *observe.Metrics) extproc.Metrics {
	var streams [extproc.NumModes]prometheus.Gauge
	var answers [extproc.NumModes]func() prometheus.Observer // histograms only for the modes in use
	for mode := range extproc.NumModes {
		streams[mode] = m.ExtProcStreams.WithLabelValues(mode.String())
		answers[mode] = sync.OnceValue(func() prometheus.Observer { return m.ExtProcAnswers.WithLabelValues(mode.String()) })
	}
	var messages [extproc.NumKinds]prometheus.Counter
	for kind := range extproc.NumKinds {
		messages[kind] = m.ExtProcMessages.WithLabelValues(kind.String())
	}
	failures := map[extproc.Failure]prometheus.Counter{}
	for _, f := range extproc.Failures() {
		failures[f] = m.LateFirstTokens // of short answers: alerts fire on the other failures
		if f != extproc.FailureLateFirstToken {
			failures[f] = m.ExtProcFailures.WithLabelValues(string(f))
		}
	}
	return extproc.Metrics{
		Opened:   func(mode extproc.Mode) { streams[mode].Inc() },
		Closed:   func(mode extproc.Mode) { streams[mode].Dec() },
		Message:  func(k extproc.Kind) { messages[k].Inc() },
		Failure:  func(f extproc.Failure) { failures[f].Inc() },
		Answered: func(mode extproc.Mode, d time.Duration) { answers[mode]().Observe(d.Seconds()) },
	}
}

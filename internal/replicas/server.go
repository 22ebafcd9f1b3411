package replicas

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
)

const (
	// resolveEvery is how often the names of routes are resolved.
	resolveEvery = 5 * time.Second
	// probeEvery is how often addresses without a route are dialled. NATS itself does so every 1 to 2 s,
	// which would delay the agreement of replicas that were cut off.
	probeEvery, probeTimeout = 250 * time.Millisecond, 250 * time.Millisecond
	// pingEvery is the interval of pings between processes; two without an answer end a connection, so that a partition
	// is noticed long before TCP's retransmissions end. Connections within a process get no pings, which would only end
	// those of a process that waits for a processor.
	pingEvery    = time.Second
	routeUser    = "kvlane" // the user name of routes
	oneSecret    = "give all replicas the same secret in fleet.embedded.secret_file"
	oneAuthority = "give all replicas certificates of the CA in fleet.embedded.tls.ca_file"
	externalCA   = "fleet.external.tls.ca_file, the certificate of the NATS server"
)

// natsServer is the NATS server of mode embedded. Its only client is this process.
type natsServer struct {
	*server.Server
	config   *config.FleetEmbed
	secret   string
	password string // the in-process client's
	opts     *server.Options
	log      zerolog.Logger
	others   atomic.Int32 // the addresses that routes name, without this replica's own
	// routes is the number of routes at the last probe. reached holds the addresses that accepted a connection since a
	// route last ended.
	routes  int
	reached map[string]bool
	refused atomic.Value // text of the last error that NATS logged, "" once all routes exist
	front   net.Listener
	passing sync.WaitGroup // of front and its connections
	remote  sync.Map       // their addresses by those under which NATS knows them
}

func startServer(ctx context.Context, fleet *config.Fleet, id, secret string, limit func(net.Listener) net.Listener, log zerolog.Logger) (*natsServer, error) {
	e := &fleet.Embedded
	host, portText, err := net.SplitHostPort(e.Listen)
	if err != nil {
		return nil, fmt.Errorf("fleet.embedded.listen: %w", err)
	}
	port, _ := strconv.Atoi(portText) // validated
	s := &natsServer{config: e, secret: secret, password: rand.Text(), log: log, reached: map[string]bool{}}
	s.opts = &server.Options{
		// A server without a port for clients would not open the one for routes. This one is on loopback, and nothing but
		// this process knows its password. NATS would close the connection of Options.Username whenever routes change.
		ServerName: id, Host: "127.0.0.1", Port: server.RANDOM_PORT, Users: []*server.User{{Username: id, Password: s.password}}, NoSigs: true, NoSystemAccount: true,
		MaxPayload: maxPayload,
		Cluster: server.ClusterOpts{
			Name: fleet.Name, Host: host, Port: cmp.Or(port, server.RANDOM_PORT), NoAdvertise: true, PoolSize: -1, PingInterval: pingEvery, MaxPingsOut: 2,
			// A replica that reads slowly is disconnected, because NATS would buffer what it has not read without bound.
			Compression: server.CompressionOpts{Mode: server.CompressionOff}, WriteTimeout: server.WriteTimeoutPolicyClose,
		},
	}
	if secret != "" {
		s.opts.Cluster.Username, s.opts.Cluster.Password, s.opts.Cluster.AuthTimeout = routeUser, routePassword(secret), 2
	}
	if !e.TLS.Empty() {
		if s.opts.Cluster.TLSConfig, err = routeTLS(e.TLS); err != nil {
			return nil, err
		}
		s.opts.Cluster.TLSTimeout = 2
	}
	s.opts.Routes = s.resolve(ctx)
	if s.front, err = (&net.ListenConfig{}).Listen(ctx, "tcp", e.Listen); err != nil {
		return nil, fmt.Errorf("fleet.embedded.listen: %w", err)
	}
	if s.Server, err = server.NewServer(s.inner()); err != nil {
		_ = s.front.Close()
		return nil, fmt.Errorf("fleet.embedded: %w", err)
	}
	nats := newNATSLog(log, &s.refused)
	nats.remote = &s.remote
	s.SetLoggerV2(nats, false, false, false)
	s.Start()
	if !s.ReadyForConnections(5 * time.Second) {
		s.stop()
		return nil, errors.New("fleet.embedded: the NATS server does not start")
	}
	s.passing.Go(func() { s.accept(limit(s.front)) })
	return s, nil
}

func (s *natsServer) stop() {
	_ = s.front.Close()
	s.Shutdown()
	s.WaitForShutdown()
	s.passing.Wait()
}

// inner is opts for NATS itself, which listens on loopback behind accept.
func (s *natsServer) inner() *server.Options {
	o := s.opts.Clone()
	o.Cluster.Host, o.Cluster.Port = "127.0.0.1", server.RANDOM_PORT
	return o
}

// accept forwards connections to NATS, which does not bound the unauthenticated ones.
func (s *natsServer) accept(lis net.Listener) {
	for {
		c, err := lis.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil { // out of descriptors
			time.Sleep(probeTimeout)
			continue
		}
		s.passing.Go(func() {
			defer c.Close()
			in, err := net.DialTimeout("tcp", s.ClusterAddr().String(), probeTimeout)
			if err != nil {
				return
			}
			defer in.Close()
			s.remote.Store(in.LocalAddr().String(), c.RemoteAddr().String())
			defer s.remote.Delete(in.LocalAddr().String())
			s.passing.Go(func() {
				pass(in, c)
				_ = in.(*net.TCPConn).CloseWrite() // the place is taken until NATS has ended its side, too
			})
			pass(c, in)
		})
	}
}

// pass copies until one end is closed or does not read for as long as NATS would wait.
func pass(to, from net.Conn) {
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		if err == nil {
			err = to.SetWriteDeadline(time.Now().Add(server.DEFAULT_FLUSH_DEADLINE))
		}
		if err == nil {
			_, err = to.Write(buffer[:n])
		}
		if err != nil {
			return
		}
	}
}

// resolve returns the routes as URLs. Names that cannot be resolved are left out.
func (s *natsServer) resolve(ctx context.Context) []*url.URL {
	ctx, cancel := context.WithTimeout(ctx, resolveEvery/2)
	defer cancel()
	var all []string
	others := int32(0)
	for _, r := range s.config.Routes {
		host, port, err := net.SplitHostPort(r)
		if err != nil {
			continue // validated
		}
		ips, err := net.DefaultResolver.LookupHost(ctx, host)
		if err != nil {
			s.log.Debug().Err(err).Str("route", r).Msg("replicas: name not found")
			others++ // the name may resolve later: readiness waits for a route or sync_timeout
			continue
		}
		for _, ip := range ips {
			all = append(all, net.JoinHostPort(ip, port))
		}
	}
	slices.Sort(all)
	all = slices.Compact(all)
	var routes []*url.URL
	for _, a := range all[:min(len(all), maxPeers)] {
		if s.own(a) {
			continue
		}
		others++
		u := &url.URL{Scheme: "nats-route", Host: a}
		if s.secret != "" {
			u.User = url.UserPassword(routeUser, routePassword(s.secret))
		}
		routes = append(routes, u)
	}
	s.others.Store(others)
	return routes
}

// own reports whether an address is this replica's.
func (s *natsServer) own(address string) bool {
	host, port, _ := net.SplitHostPort(address)
	ip := net.ParseIP(s.opts.Cluster.Host)
	switch {
	case port != strconv.Itoa(s.opts.Cluster.Port):
		return false
	case host == s.opts.Cluster.Host:
		return true
	case s.opts.Cluster.Host != "" && (ip == nil || !ip.IsUnspecified()):
		return false
	}
	addresses, err := net.InterfaceAddrs()
	return err == nil && slices.ContainsFunc(addresses, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && n.IP.Equal(net.ParseIP(host))
	})
}

// follow updates the routes when their names resolve to other addresses, and probes routes, until ctx ends.
func (s *natsServer) follow(ctx context.Context) {
	tick, probe := time.NewTicker(resolveEvery), time.NewTicker(probeEvery)
	defer tick.Stop()
	defer probe.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-probe.C:
			s.probe(ctx)
		case <-tick.C:
			routes := s.resolve(ctx) // none if the resolver fails for a moment
			if len(routes) > 0 && !slices.EqualFunc(routes, s.opts.Routes, func(a, b *url.URL) bool { return a.Host == b.Host }) {
				s.connectTo(routes)
			}
		}
	}
}

func (s *natsServer) connectTo(routes []*url.URL) {
	s.opts.Routes = routes
	if err := s.ReloadOptions(s.inner()); err != nil {
		s.log.Warn().Err(err).Msg("replicas: routes not changed")
	}
}

// probe makes NATS connect to an address as soon as it accepts connections. It does so once per address
// until a route ends.
func (s *natsServer) probe(ctx context.Context) {
	routes := s.NumRoutes()
	if was := s.routes; routes < was || routes >= int(s.others.Load()) {
		clear(s.reached)
	}
	if s.routes = routes; routes >= int(s.others.Load()) {
		s.refused.Store("")
		return
	}
	var dials sync.WaitGroup // concurrent: addresses that are dead must not delay those that are there
	all, accepts := s.opts.Routes, make([]bool, len(s.opts.Routes))
	dialer := net.Dialer{Timeout: probeTimeout}
	for i, u := range all {
		if !s.reached[u.Host] {
			dials.Go(func() {
				if conn, err := dialer.DialContext(ctx, "tcp", u.Host); err == nil {
					accepts[i] = conn.Close() == nil
				}
			})
		}
	}
	dials.Wait()
	var others []*url.URL // without those that are found
	for i, u := range all {
		s.reached[u.Host] = s.reached[u.Host] || accepts[i]
		if !accepts[i] || s.connected(u.Host) {
			others = append(others, u)
		}
	}
	if slices.Contains(accepts, true) {
		s.connectTo(others)
		s.connectTo(all)
	}
}

// connected reports whether there is a route that this replica opened to an address.
func (s *natsServer) connected(address string) bool {
	z, err := s.Routez(nil)
	return err == nil && slices.ContainsFunc(z.Routes, func(r *server.RouteInfo) bool {
		return r.DidSolicit && net.JoinHostPort(r.IP, strconv.Itoa(r.Port)) == address
	})
}

// natsLog forwards the NATS server's log. Notices and warnings become debug lines: they are about routine events such as
// a closed route, and Node logs the replicas that come and go.
type natsLog struct {
	log      zerolog.Logger
	last     *atomic.Value // text of the last error
	warnings zerolog.Level // of NATS' warnings: those of a store are about files that cannot be read
	remote   *sync.Map     // as natsServer's; nil for a store
}

// advised maps messages to advice for the side that connects, and for the other one.
var advised = strings.NewReplacer("Authorization Violation", "Authorization Violation: "+oneSecret, "authentication error", "authentication error: "+oneSecret,
	"x509: ", oneAuthority+": x509: ")

// newNATSLog limits the rate of warnings, because any process that can connect to the port can cause them.
func newNATSLog(log zerolog.Logger, last *atomic.Value) natsLog {
	return natsLog{log.Sample(zerolog.LevelSampler{WarnSampler: &zerolog.BurstSampler{Burst: 5, Period: 10 * time.Second}}), last, zerolog.DebugLevel, nil}
}

func (l natsLog) Noticef(format string, v ...any) {
	for i := range v {
		if u, ok := v[i].(*url.URL); ok { // of a removed route, with its password
			v[i] = u.Redacted()
		}
	}
	l.log.Debug().Msgf("nats: "+format, v...)
}
func (l natsLog) Warnf(format string, v ...any) { // some quote a file
	l.log.WithLevel(l.warnings).Msg(observe.ClipTo("nats: "+fmt.Sprintf(format, v...), observe.MaxText))
}
func (l natsLog) Errorf(format string, v ...any) {
	text := advised.Replace(fmt.Sprintf(format, v...))
	if local, rest, ok := strings.Cut(text, " - "); ok && l.remote != nil {
		if address, ok := l.remote.Load(local); ok {
			text = address.(string) + " - " + rest
		}
	}
	l.last.Store(text)
	l.log.Warn().Msg("nats: " + text)
}
func (l natsLog) Fatalf(format string, v ...any) { l.log.Error().Msgf("nats: "+format, v...) }
func (l natsLog) Debugf(string, ...any)          {}
func (l natsLog) Tracef(string, ...any)          {}

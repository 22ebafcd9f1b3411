package replicas

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

const (
	maxPayload = 1 << 20
	tickEvery  = 100 * time.Millisecond
	// helloEvery is how often a starting replica asks the others to answer.
	helloEvery = 200 * time.Millisecond
	maxAhead   = 2 * time.Second // of another replica's clock, without a warning
)

// Options of a Node.
type Options struct {
	Config   *config.Fleet
	Settings uint32 // result of the function Settings; 0: not compared with other replicas
	// Update runs a change of the router under the lock that guards it.
	Update func(change func(r *routing.Router, now time.Duration))
	Log    zerolog.Logger
	// Delay is called with the seconds from a change at another replica to its effect here.
	Delay interface{ Observe(seconds float64) }
	// Limit bounds the connections of other replicas; with nil they are not bounded.
	Limit func(net.Listener) net.Listener
}

// Node is this replica in the fleet: it runs a Core on a NATS connection. Sending and
// receiving never wait under the router's lock.
type Node struct {
	id     string
	o      Options
	core   *Core // guarded by the router's lock
	server *natsServer
	store  *store // nil without fleet.persist
	seal   *seal
	conn   *nats.Conn
	log    zerolog.Logger
	gather *time.Timer // fires Gather after the first unsent change
	// answers are requested states. A separate goroutine sends them, so that changes do not wait for them.
	answers chan Out
	stop    context.CancelFunc
	wg      sync.WaitGroup
	storing sync.WaitGroup // of the store's goroutine
	started time.Time
	ready   atomic.Bool
	// since is when the oldest change to be sent was made, in ns of the wall clock; 0 for none.
	since atomic.Int64
	// unsent counts messages that NATS did not accept, bytes the bytes of the others.
	unsent, bytes atomic.Uint64
	// malformed counts messages that could not be decoded. It is atomic because they are dropped without taking the lock.
	malformed atomic.Uint64

	known  map[string]bool // replicas at the last call of look
	routes int             // at the last call of found
}

// Start connects this replica. If NATS is not there yet, it waits in the background.
func Start(ctx context.Context, o Options) (*Node, error) {
	n := &Node{id: newID(o.Config.Replica), o: o, gather: time.NewTimer(time.Hour), answers: make(chan Out, maxPeers), started: time.Now(), known: map[string]bool{}}
	if o.Limit == nil {
		n.o.Limit = func(l net.Listener) net.Listener { return l }
	}
	n.log = o.Log.With().Str("replica", n.id).Logger()
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.stop = stop
	options, err := n.options()
	if err == nil && o.Config.Mode == config.FleetEmbedded {
		var secret string
		if secret, err = o.Config.Embedded.Secret(); err == nil {
			n.seal, err = newSeal(secret)
		}
		if err == nil {
			n.server, err = startServer(ctx, o.Config, n.id, secret, n.o.Limit, n.log)
		}
		if err == nil {
			options = append(options, nats.InProcessServer(n.server.Server), nats.UserInfo(n.id, n.server.password))
		}
	}
	if err != nil {
		stop()
		return nil, err
	}
	if n.conn, err = nats.Connect(o.Config.External.URL, options...); err != nil {
		n.Close()
		return nil, fmt.Errorf("fleet: %w", err)
	}
	o.Update(func(r *routing.Router, now time.Duration) {
		n.core = New(n.id, r, now, n.wake)
		// With a clock that starts at 0, the bindings of a replica that starts without a connection would be earlier
		// than all others. Below 16,000 events per second clocks stay behind the wall clock.
		n.core.wall = time.Duration(max(time.Now().UnixNano(), 0))
		n.core.settings = o.Settings
		n.core.clock = uint64(n.core.wall.Milliseconds()) << 4
		if o.Config.Persist.Enabled {
			n.store = &store{fleet: o.Config, log: n.log}
			n.core.saving = saving{after: o.Config.Persist.TTL.Std() / 2, all: n.server != nil}
		}
		r.Share(n.core)
	})
	// nats.DefaultSubPendingBytesLimit bounds the messages that wait to be handled. Others are dropped and requested
	// again.
	for _, subject := range []string{n.changes("*"), n.requests(n.id), n.parts(n.id)} {
		if _, err = n.conn.Subscribe(subject, n.receive); err != nil {
			n.Close()
			return nil, fmt.Errorf("fleet: %w", err)
		}
	}
	if n.store != nil {
		n.storing.Go(func() { n.persist(background) })
	}
	n.wg.Go(func() { n.send(background) })
	n.wg.Go(func() { n.answer(background) })
	if n.server != nil {
		n.wg.Go(func() { n.server.follow(background) })
	}
	return n, nil
}

// newID makes an id that differs at each start.
func newID(name string) string {
	if name == "" {
		name, _ = os.Hostname()
	}
	name = regexp.MustCompile("[^a-zA-Z0-9_-]").ReplaceAllString(name, "-")
	return name[:min(len(name), 63)] + "-" + strings.ToLower(rand.Text()[:10])
}

// Settings hashes what has to be the same on all replicas. It has 16 bits only, too few to confirm a guess of the key.
func Settings(i *config.Index) uint32 {
	secret, _ := i.Secret() // was read before
	sum := derive(secret, fmt.Sprint("settings ", i.BlockSize))
	return 1<<16 | uint32(sum[0])<<8 | uint32(sum[1])
}

func (n *Node) changes(id string) string  { return n.o.Config.Name + ".v1.changes." + id }
func (n *Node) requests(id string) string { return n.o.Config.Name + ".v1.state." + id }
func (n *Node) parts(id string) string    { return n.o.Config.Name + ".v1.parts." + id }

func (n *Node) options() ([]nats.Option, error) {
	e := &n.o.Config.External
	options := []nats.Option{
		nats.Name("kvlane " + n.id), nats.NoEcho(), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 100*time.Millisecond), nats.Timeout(time.Second),
		// Credentials may be accepted later; without this, two refusals close the connection permanently.
		nats.IgnoreAuthErrorAbort(),
		// Messages that cannot be sent now are useless later, because the others request the whole state.
		nats.ReconnectBufSize(-1),
		// A server that hangs must not block send and Close for the default of a minute.
		nats.FlusherTimeout(1500 * time.Millisecond),
		nats.ConnectHandler(func(*nats.Conn) { n.connected() }), nats.ReconnectHandler(func(*nats.Conn) { n.connected() }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				n.log.Warn().Err(err).Msg("replicas: NATS connection lost, routing alone")
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { n.log.Debug().Err(err).Msg("replicas: NATS") }),
	}
	if n.o.Config.Mode != config.FleetExternal {
		return options, nil
	}
	options = append(options, nats.PingInterval(pingEvery), nats.MaxPingsOutstanding(2))
	_, unread := e.Password()
	token, err := e.Token()
	if err = cmp.Or(unread, err); err != nil {
		return nil, err
	}
	// Files are read again for each connection. If one cannot be read, the connection is refused.
	switch {
	case e.CredentialsFile != "":
		options = append(options, nats.UserCredentials(e.CredentialsFile))
	case e.User != "":
		options = append(options, nats.UserInfoHandler(func() (user, password string) {
			password, _ = e.Password()
			return e.User, password
		}))
	case token != "":
		options = append(options, nats.TokenHandler(func() string {
			token, _ := e.Token()
			return token
		}))
	}
	if e.TLS.CAFile != "" {
		options = append(options, nats.RootCAs(e.TLS.CAFile))
	}
	if e.TLS.CertFile != "" {
		options = append(options, nats.ClientCert(e.TLS.CertFile, e.TLS.KeyFile))
	}
	return options, nil
}

func (n *Node) connected() {
	n.log.Info().Msg("replicas: connected to NATS")
	n.wake()
}

// wake sends the changes within Gather. It is called under the router's lock.
func (n *Node) wake() {
	if n.since.CompareAndSwap(0, time.Now().UnixNano()) {
		n.gather.Reset(Gather)
	}
}

// receive handles a message of another replica. It runs once at a time for each subject.
func (n *Node) receive(msg *nats.Msg) {
	if len(msg.Data) == 0 {
		return // NATS' notice that the replica of a request is not there
	}
	var m *kvlanev1.ReplicaMessage
	data, err := n.seal.open(msg.Subject, msg.Data)
	if err == nil {
		m, err = Parse(data)
	}
	if err != nil {
		n.malformed.Add(1)
		return
	}
	reply := msg.Reply
	if reply != n.parts(m.GetReplica()) {
		reply = "" // an answer goes only to its asker
	}
	delay := time.Duration(time.Now().UnixNano() - m.GetSent())
	n.o.Update(func(_ *routing.Router, now time.Duration) {
		n.core.Receive(now, m, reply)
		if p := n.core.peers[m.GetReplica()]; p != nil && m.GetSent() != 0 {
			p.ahead = max(-delay, 0)
		}
	})
	for more := m.GetStatePart() != nil; more; { // decisions have the lock between
		n.o.Update(func(_ *routing.Router, now time.Duration) { more = n.core.Continue(now) })
	}
	if m.GetSent() != 0 && n.o.Delay != nil {
		n.o.Delay.Observe(max(delay, 0).Seconds())
	}
}

// send sends the Core's messages and calls its Tick, until ctx ends.
func (n *Node) send(ctx context.Context) {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	defer n.gather.Stop()
	var hello time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.gather.C:
			n.flush(func(time.Duration) {})
		case <-tick.C:
			found := n.found()
			n.flush(func(now time.Duration) {
				n.core.Tick(now)
				if found && !n.ready.Load() {
					n.core.Reachable(now)
				}
				if found || !n.ready.Load() && time.Since(hello) >= helloEvery {
					hello = time.Now()
					n.core.Hello()
				}
			})
			n.look()
		}
	}
}

// found reports whether there are more routes, or a new connection to NATS, since the last call.
func (n *Node) found() bool {
	was := n.routes
	if n.routes = int(observe.Gauge(n.conn.IsConnected())); n.server != nil {
		n.routes = n.server.NumRoutes()
	}
	return n.routes > was
}

// flush runs do and sends the Core's messages.
func (n *Node) flush(do func(now time.Duration)) {
	var out []Out
	since := n.since.Swap(0)
	n.o.Update(func(_ *routing.Router, now time.Duration) {
		do(now)
		out = n.core.Take()
	})
	for i := range out {
		n.publish(&out[i], since)
	}
}

func (n *Node) publish(o *Out, since int64) {
	switch {
	case o.Build != nil:
		select {
		case n.answers <- *o:
		default: // the replica will request it again
		}
	case o.To != "":
		n.put(n.requests(o.To), n.parts(n.id), o.Message)
	default:
		if hasChanges(o.Message) {
			o.Message.Sent = since
		}
		n.put(n.changes(n.id), "", o.Message)
	}
}

// answer writes and sends the states that others asked for.
func (n *Node) answer(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case o := <-n.answers:
			for m := range o.Build(func(do func()) { n.o.Update(func(*routing.Router, time.Duration) { do() }) }) {
				if ctx.Err() != nil {
					return
				}
				n.put(o.Reply, "", m)
			}
		}
	}
}

func (n *Node) put(subject, reply string, m *kvlanev1.ReplicaMessage) {
	data, err := proto.Marshal(m)
	if err == nil {
		data = n.seal.close(subject, data)
		err = n.conn.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: data})
	}
	if err != nil {
		n.unsent.Add(1)
		return
	}
	n.bytes.Add(uint64(len(data)))
}

// look logs the replicas that joined and left, and sets ready when the start is complete.
func (n *Node) look() {
	s := n.State()
	known := map[string]bool{}
	for _, p := range s.Peers {
		known[p.ID] = true
		if !n.known[p.ID] {
			n.log.Info().Str("other", p.ID).Msg("replicas: found")
		}
	}
	for _, p := range s.gone {
		switch {
		case !n.known[p.ID]:
		case p.Silent == 0:
			n.log.Info().Str("other", p.ID).Int("left", len(known)).Msg("replicas: one has taken leave")
		default:
			n.log.Warn().Str("other", p.ID).Int("left", len(known)).Float64("silent_seconds", p.Silent).Msg("replicas: gone, its bookings are dropped")
		}
	}
	n.known = known
	if n.ready.Load() {
		return
	}
	switch after := time.Since(n.started); {
	case s.Connected && s.Synced && !n.expects() && (n.store == nil || n.store.tried.Load()):
		n.log.Info().Int("replicas", len(known)+1).Dur("after_ms", after).Msg("replicas: in step")
	case after > n.o.Config.SyncTimeout.Std():
		n.log.Warn().Int("replicas", len(known)+1).Dur("after_ms", after).Msg("replicas: fleet.sync_timeout has passed: ready without the state of all others")
	default:
		return
	}
	n.ready.Store(true)
}

// expects reports whether other replicas may exist that could not be reached at the last call of found.
func (n *Node) expects() bool {
	return n.routes == 0 && (n.server == nil || n.server.others.Load() > 0)
}

// Waiting returns what readiness waits for, "" if nothing. It is bounded by fleet.sync_timeout.
func (n *Node) Waiting() string {
	if n.ready.Load() {
		return ""
	}
	return "the state of the other replicas has not arrived"
}

// Close says goodbye to the others and disconnects.
func (n *Node) Close() {
	n.stop()
	n.wg.Wait()
	if n.core != nil {
		n.o.Update(func(r *routing.Router, _ time.Duration) { r.Share(nil) })
		n.flush(func(time.Duration) { n.core.Bye() })
		_ = n.conn.FlushTimeout(time.Second)
	}
	n.storing.Wait() // the last write may take seconds
	if n.conn != nil {
		n.conn.Close()
	}
	if n.server != nil {
		n.server.stop()
	}
}

// State is what a debug page shows of the fleet.
type State struct {
	Replica string `json:"replica"`
	Mode    string `json:"mode"`
	// Connected reports whether NATS takes messages; Synced that no state is outstanding.
	Connected     bool        `json:"connected"`
	Synced        bool        `json:"synced"`
	Ready         bool        `json:"ready"`
	Seq           uint64      `json:"seq"`
	Bookings      uint64      `json:"bookings"`
	Conversations int         `json:"conversations"`
	Peers         []PeerState `json:"replicas"`
	gone          []PeerState // of the last minutes
	Stats         Stats       `json:"counts"`
	Unsent        uint64      `json:"unsent"`
	SentBytes     uint64      `json:"sent_bytes"`
}

// PeerState is another replica.
type PeerState struct {
	ID       string  `json:"id"`
	Synced   bool    `json:"synced"`
	Seq      uint64  `json:"seq"`
	Bookings uint64  `json:"bookings"`
	Unknown  int     `json:"unknown_targets"`
	Silent   float64 `json:"silent_seconds"`
	// OtherSettings reports a different index.key or index.block_size; Ahead is how far its clock is ahead, 0 if it is
	// behind.
	OtherSettings bool    `json:"other_settings"`
	Ahead         float64 `json:"clock_ahead_seconds"`
}

// State returns the present state.
func (n *Node) State() State {
	var s State
	n.o.Update(func(_ *routing.Router, now time.Duration) { s = n.core.State(now) })
	s.Mode, s.Ready, s.Connected = n.o.Config.Mode, n.ready.Load(), n.conn.IsConnected()
	s.Unsent, s.SentBytes = n.unsent.Load(), n.bytes.Load()
	s.Stats.Malformed += n.malformed.Load()
	return s
}

// Warnings returns why this replica shares less than is configured, at most one for each reason, in their order.
func (n *Node) Warnings() (list []observe.Warning) {
	if n == nil {
		return nil
	}
	s, texts := n.State(), map[string]string{}
	for _, p := range s.Peers {
		if p.Ahead > maxAhead.Seconds() {
			texts["clocks_differ"] = fmt.Sprintf("the clock of %s is %.1f s ahead of this one's: synchronize the clocks of both machines", p.ID, p.Ahead)
		}
		if p.OtherSettings {
			texts["other_settings"] = p.ID + " has another index.key or index.block_size, so conversations are not shared with it: give all replicas the same"
		}
	}
	if _, err := n.options(); err != nil {
		texts["files_unread"] = fmt.Sprintf("%v: the next connection to NATS will be refused", err)
	}
	if t := n.o.Config.Embedded.TLS; n.server != nil && !t.Empty() {
		if _, err := routeTLS(t); err != nil {
			texts["files_unread"] = fmt.Sprintf("%v: the last good files are used", err)
		}
	}
	if n.store != nil && n.store.tried.Load() && !n.store.works.Load() {
		texts["not_stored"] = fmt.Sprint("bindings of conversations are not stored (fleet.persist): ", n.store.why.Load())
	}
	if !s.Connected {
		texts["replicas_apart"] = fmt.Sprint("no connection to NATS, routing alone: ", observe.Certificate(cmp.Or(n.conn.LastError(), nats.ErrDisconnected), externalCA))
	} else if n.server != nil && len(s.Peers) < int(n.server.others.Load()) {
		why, _ := n.server.refused.Load().(string)
		if why == "" && s.Stats.Malformed > 0 {
			why = "messages cannot be read: " + oneSecret
		}
		texts["replicas_apart"] = fmt.Sprintf("%d of %d others are known: %s", len(s.Peers), n.server.others.Load(), cmp.Or(why, "the rest has not answered"))
	}
	for _, reason := range slices.Sorted(maps.Keys(texts)) {
		list = append(list, observe.Warning{Reason: reason, Text: observe.ClipTo("replicas: "+texts[reason], observe.MaxText)})
	}
	return list
}

// Collect emits the metrics.
func (n *Node) Collect(emit observe.Emit) {
	emit.Warnings(n.Warnings())
	s := n.State()
	emit("replicas", "Replicas of the fleet that this one shares with, itself included.", float64(len(s.Peers)+1))
	emit("replicas_connected", "1 if this replica is connected to NATS.", observe.Gauge(s.Connected))
	emit("replicas_sent_total", "Messages sent to other replicas.", float64(s.Stats.Sent-min(s.Unsent, s.Stats.Sent)))
	emit("replicas_sent_bytes_total", "Bytes of messages sent to other replicas.", float64(s.SentBytes))
	emit("replicas_unsent_total", "Messages that NATS did not take.", float64(s.Unsent))
	emit("replicas_received_total", "Messages received from other replicas.", float64(s.Stats.Received))
	type reasons map[string]uint64
	for reason, count := range (reasons{"new": s.Stats.New, "gap": s.Stats.Gaps, "error": s.Stats.Errors, "stopped": s.Stats.Stopped}) {
		emit("replicas_resyncs_total", "Whole states asked of other replicas, by reason: new, gap (lost messages), error (ledgers that differed), stopped (no answer).",
			float64(count), "reason", reason)
	}
	for reason, count := range (reasons{"malformed": s.Stats.Malformed, "refused": s.Stats.Refused, "duplicate": s.Stats.Duplicates, "unknown_target": s.Stats.Unknown, "overflow": s.Stats.Overflows}) {
		emit("replicas_ignored_total", "Messages or parts of them that had no effect, by reason.", float64(count), "reason", reason)
	}
	if n.store != nil {
		emit("replicas_store_works", "1 if bindings of conversations are stored (fleet.persist).", observe.Gauge(n.store.works.Load()))
		emit("replicas_stored_total", "Bindings of conversations that were stored.", float64(n.store.saved.Load()))
		emit("replicas_store_errors_total", "Bindings of conversations that could not be stored.", float64(n.store.failed.Load()))
	}
	emit("replicas_dropped_total", "Replicas dropped because they were silent.", float64(s.Stats.Dropped))
	emit("replicas_dropped_bookings_total", "Bookings of replicas that were silent or left.", float64(s.Stats.DroppedBookings))
	emit("replicas_conflicts_total", "Conversations that two replicas bound at the same time; the earlier binding was kept.", float64(s.Stats.Conflicts))
}

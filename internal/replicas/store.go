package replicas

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/internal/config"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

const (
	saveEvery    = time.Second
	saveTimeout  = 5 * time.Second
	restoreLimit = 30 * time.Second
	// reopenAfter is the first wait after a failure to open a store. It doubles up to reopenMax.
	reopenAfter, reopenMax = 250 * time.Millisecond, 30 * time.Second
	// saveBatch is how many bindings are written or restored under one hold of the lock.
	saveBatch = 256
	// maxUnsaved bounds the bindings that wait to be written. One beyond it is written at its next use.
	maxUnsaved = 1 << 17
	maxFolders = 256
	// maxFails is how many writes may fail in a row before the store is opened again.
	maxFails = 3
)

// saving is a Core's queue of bindings for the store.
type saving struct {
	// after is the age from which a stored binding is written again when its conversation is used; 0 if nothing is stored.
	after time.Duration
	// all reports that the others' bindings are stored too, not only this replica's.
	all   bool
	queue []unsaved
}

// unsaved is a binding to be written.
type unsaved struct {
	leg int
	key routing.Key
}

// save queues a binding if the stored one differs or is older than saving.after.
func (c *Core) save(leg int, b *binding, changed bool) {
	if c.saving.after == 0 || b.queued || !changed && b.saved != 0 && c.ticked-b.saved < c.saving.after {
		return
	}
	if len(c.saving.queue) >= maxUnsaved {
		b.saved = 0
		return
	}
	b.queued = true
	c.saving.queue = append(c.saving.queue, unsaved{leg, b.key})
}

// takeUnsaved returns copies of bindings to be written, by leg.
func (c *Core) takeUnsaved() (list [numLegs][]binding) {
	n := min(len(c.saving.queue), saveBatch)
	for _, u := range c.saving.queue[:n] {
		if b := c.legs[u.leg].find(u.key); b != nil {
			b.queued, b.saved = false, max(c.ticked, 1)
			list[u.leg] = append(list[u.leg], *b)
		}
	}
	if c.saving.queue = c.saving.queue[n:]; len(c.saving.queue) == 0 {
		c.saving.queue = nil
	}
	return list
}

// saveAll queues the bindings that are not stored, or all bindings if lost is set. Above maxUnsaved it takes the most
// recently used ones.
func (c *Core) saveAll(lost bool) {
	for leg, t := range c.legs {
		for i := t.slab[0].older; i != 0; i = t.slab[i].older {
			b := &t.slab[i]
			if lost {
				b.saved = 0
			}
			if b.saved == 0 {
				c.save(leg, b, false)
			}
		}
	}
	slices.Reverse(c.saving.queue)
}

// restore merges stored bindings.
func (c *Core) restore(now time.Duration, messages []*kvlanev1.ReplicaMessage) {
	kept := c.saving
	c.saving.after = 0
	for _, m := range messages {
		if !c.plausible(now, m) {
			continue
		}
		for _, v := range m.GetConversations() {
			c.join(m, v)
		}
	}
	c.saving = kept
}

// saveAgain queues bindings that could not be written.
func (c *Core) saveAgain(messages []*kvlanev1.ReplicaMessage) {
	for _, m := range messages {
		v := m.GetConversations()[0]
		if b := c.legs[v.GetLeg()].find(routing.Key{Hi: v.GetHi(), Lo: v.GetLo()}); b != nil {
			b.saved = 0
			c.save(int(v.GetLeg()), b, false)
		}
	}
}

// store keeps bindings in a key-value bucket of JetStream, so that they survive a restart of all replicas. With mode
// embedded each replica has all of them in a NATS server of its own, without ports or cluster: JetStream in the
// replicas' cluster would need a majority.
type store struct {
	fleet  *config.Fleet
	log    zerolog.Logger
	js     jetstream.JetStream
	kv     jetstream.KeyValue
	server *server.Server
	conn   *nats.Conn // to server
	lock   *os.File
	// created is the creation time of the bucket that was opened last, zero for none. lost reports that a
	// new bucket has replaced an earlier one. fails counts failed writes in a row.
	created time.Time
	lost    bool
	fails   int

	// tried reports whether there was an attempt to open or write, works whether the last one succeeded.
	works, tried  atomic.Bool
	why           atomic.Value // text of the last attempt's error
	saved, failed atomic.Uint64
}

func (s *store) open(ctx context.Context, conn *nats.Conn) (err error) {
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.fleet.Mode == config.FleetEmbedded {
		if conn, err = s.serve(); err != nil {
			return err
		}
	} else if !conn.IsConnected() {
		return nats.ErrNoServers
	}
	if s.js, err = jetstream.New(conn, jetstream.WithPublishAsyncTimeout(saveTimeout)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	p := &s.fleet.Persist
	s.kv, err = s.js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{
		Bucket: s.fleet.Name + "-conversations", TTL: p.TTL.Std(), MaxBytes: int64(p.MaxBytes), Storage: jetstream.FileStorage,
	})
	if err != nil {
		return err
	}
	stream, err := s.js.Stream(ctx, "KV_"+s.kv.Bucket())
	if err != nil {
		return err
	}
	info := stream.CachedInfo()
	// A full bucket drops its oldest entries. KeyValueConfig has no such option: its buckets refuse new entries.
	info.Config.Discard = jetstream.DiscardOld
	if _, err = s.js.UpdateStream(ctx, info.Config); err != nil {
		return err
	}
	s.lost = s.lost || !s.created.IsZero() && !info.Created.Equal(s.created)
	s.created = info.Created
	return nil
}

// serve starts the server on a folder that no other replica uses.
func (s *store) serve() (*nats.Conn, error) {
	folder, err := s.claim()
	if err != nil {
		return nil, err
	}
	if s.server, err = server.NewServer(&server.Options{ServerName: "store", DontListen: true, NoSigs: true, MaxPayload: maxPayload}); err != nil {
		return nil, err
	}
	s.server.SetLoggerV2(natsLog{s.log, new(atomic.Value), zerolog.WarnLevel, nil}, false, false, false)
	s.server.Start()
	// JetStream trusts its summary and counts up to each number in it: a damaged one took all memory. Without a summary
	// it reads the files and skips damaged parts.
	_ = os.Remove(filepath.Join(folder, "jetstream", "$G", "streams", "KV_"+s.fleet.Name+"-conversations", "msgs", "index.db"))
	// 16 MiB more than the bucket holds, for JetStream's own records.
	limit := int64(s.fleet.Persist.MaxBytes) + 16<<20
	if err := s.server.EnableJetStream(&server.JetStreamConfig{StoreDir: folder, MaxMemory: 1 << 20, MaxStore: limit}); err != nil {
		return nil, fmt.Errorf("folder %s: %w", folder, err)
	}
	s.conn, err = nats.Connect("", nats.InProcessServer(s.server), nats.MaxReconnects(-1))
	return s.conn, err
}

// claim locks a subfolder. Replicas may share the folder of fleet.persist, and their names
// differ at each start: the subfolder that was written last has the newest bindings.
func (s *store) claim() (string, error) {
	root := s.fleet.Persist.Folder
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", err
	}
	names, used := make([]string, maxFolders), map[string]time.Time{}
	for i := range names {
		names[i] = filepath.Join(root, strconv.Itoa(i))
		if info, err := os.Stat(names[i] + ".lock"); err == nil {
			used[names[i]] = info.ModTime()
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return used[b].Compare(used[a]) })
	for _, name := range names {
		lock, err := os.OpenFile(name+".lock", os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return "", err
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			s.lock = lock
			return name, nil
		}
		_ = lock.Close()
	}
	return "", errors.New("folder " + root + ": all subfolders are in use")
}

func (s *store) close() {
	s.conn.Close()
	if s.server != nil {
		s.server.Shutdown()
		s.server.WaitForShutdown()
	}
	_ = s.lock.Close() // of nil, too
	s.js, s.kv, s.conn, s.server, s.lock = nil, nil, nil, nil, nil
}

// report logs whether the store works, once per change.
func (s *store) report(err error) {
	s.why.Store(fmt.Sprint(err))
	works, was := err == nil, s.works.Swap(err == nil)
	switch {
	case s.tried.Swap(true) && was == works:
	case works:
		s.log.Info().Msg("replicas: bindings of conversations are stored")
	default:
		s.log.Warn().Err(err).Msg("replicas: bindings of conversations are not stored and would not survive the end of all replicas")
	}
}

// persist restores the stored bindings and then writes the changed ones.
func (n *Node) persist(ctx context.Context) {
	defer n.store.close()
	wait := reopenAfter
	for {
		var err error
		if n.store.kv != nil {
			switch err = n.save(ctx); {
			case n.store.fails == 0:
				wait = reopenAfter
			case err != nil && n.store.fails >= maxFails:
				n.store.close()
			}
		} else {
			err = n.reopen(ctx)
		}
		if ctx.Err() == nil && (err != nil || n.store.fails == 0) {
			n.store.report(err)
		}
		pause := saveEvery
		if n.store.kv == nil {
			pause, wait = wait, min(2*wait, reopenMax)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			if n.store.kv != nil {
				last, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTimeout)
				_ = n.save(last)
				cancel()
			}
			return
		}
	}
}

// reopen opens the store and reads it. If a store was open before, bindings that this one lacks are stored again.
func (n *Node) reopen(ctx context.Context) error {
	s := n.store
	again := !s.created.IsZero()
	err := s.open(ctx, n.conn)
	if err == nil {
		err = n.restore(ctx)
	}
	if err != nil {
		s.close()
		return err
	}
	if again {
		n.o.Update(func(*routing.Router, time.Duration) { n.core.saveAll(s.lost) })
	}
	s.lost = false
	return nil
}

// restore reads all bindings that are stored.
func (n *Node) restore(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, restoreLimit)
	defer cancel()
	w, err := n.store.kv.WatchAll(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return err
	}
	defer func() {
		_ = w.Stop()
		for range w.Updates() { // until it is closed: its sender might wait for ever otherwise
		}
	}()
	batch, count := []*kvlanev1.ReplicaMessage(nil), 0
	for {
		var e jetstream.KeyValueEntry
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e = <-w.Updates():
		}
		if e != nil {
			m, err := Parse(e.Value())
			if err != nil {
				n.malformed.Add(1)
				continue
			}
			batch, count = append(batch, m), count+1
		}
		if e == nil || len(batch) == saveBatch {
			n.o.Update(func(_ *routing.Router, now time.Duration) { n.core.restore(now, batch) })
			batch = batch[:0]
		}
		if e == nil {
			n.log.Info().Int("conversations", count).Msg("replicas: stored bindings read")
			return nil
		}
	}
}

// save writes the bindings that have changed.
func (n *Node) save(ctx context.Context) error {
	for {
		var list [numLegs][]binding
		n.o.Update(func(*routing.Router, time.Duration) { list = n.core.takeUnsaved() })
		var messages []*kvlanev1.ReplicaMessage
		for leg := range list {
			for i := range list[leg] {
				b := &list[leg][i]
				w := writer{m: &kvlanev1.ReplicaMessage{Version: formatVersion, Replica: n.id, Clock: b.time}}
				w.conversation(leg, b)
				messages = append(messages, w.m)
			}
		}
		if len(messages) == 0 {
			return nil
		}
		if err := n.store.write(ctx, messages); err != nil {
			n.store.fails++
			n.store.failed.Add(uint64(len(messages)))
			n.o.Update(func(*routing.Router, time.Duration) { n.core.saveAgain(messages) })
			return err
		}
		n.store.fails = 0
		n.store.saved.Add(uint64(len(messages)))
	}
}

// write returns the first error; the other bindings may have been written.
func (s *store) write(ctx context.Context, messages []*kvlanev1.ReplicaMessage) (err error) {
	if s.lock != nil {
		now := time.Now()
		_ = os.Chtimes(s.lock.Name(), now, now) // see claim
	}
	acks := make([]jetstream.PubAckFuture, 0, len(messages))
	for _, m := range messages {
		v := m.GetConversations()[0]
		var data []byte
		if data, err = proto.Marshal(m); err != nil {
			break
		}
		subject := fmt.Sprintf("$KV.%s.%d.%016x%016x", s.kv.Bucket(), v.GetLeg(), v.GetHi(), v.GetLo())
		var ack jetstream.PubAckFuture
		if ack, err = s.js.PublishMsgAsync(&nats.Msg{Subject: subject, Data: data}); err != nil {
			break
		}
		acks = append(acks, ack)
	}
	for _, ack := range acks {
		select {
		case <-ack.Ok():
		case failed := <-ack.Err():
			err = failed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

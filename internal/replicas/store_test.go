package replicas

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/internal/config"
)

// A damaged number in the files of a store costs the bindings behind it, not the memory and the end of the process.
func TestADamagedStoreIsReadInPart(t *testing.T) {
	defer goleak.VerifyNone(t)
	folder := t.TempDir()
	const count = 20
	first := stored(t, folder, 1)[0]
	homes(first, count)
	eventually(t, "stored bindings", func() bool { return first.store.saved.Load() >= count })
	first.Close()
	messages := filepath.Join(folder, "0", "jetstream", "$G", "streams", "KV_kvlane-conversations", "msgs")
	if _, err := os.Stat(filepath.Join(messages, "index.db")); err != nil {
		t.Fatalf("the end of the first replica left no summary: %v", err)
	}
	file := filepath.Join(messages, "1.blk")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	entry := 0
	for range count / 2 { // each begins with its length, whose highest bit reports headers, and its number
		entry += int(binary.LittleEndian.Uint32(text[entry:]) &^ (1 << 31))
	}
	text[entry+4+7] = 1
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	second := stored(t, folder, 1)[0]
	eventually(t, "bindings before the damage", func() bool { return second.State().Conversations == count/2 && second.store.works.Load() })
	second.Close()
}

// endless is a bucket whose watcher, as that of nats.go, ends only between two entries, which wait until they are read.
type endless struct{ jetstream.KeyValue }

type endlessWatcher struct {
	jetstream.KeyWatcher
	updates chan jetstream.KeyValueEntry
	stopped chan struct{}
}

type noEntry struct{ jetstream.KeyValueEntry }

func (noEntry) Value() []byte { return []byte("not a message") }

func (w *endlessWatcher) Updates() <-chan jetstream.KeyValueEntry { return w.updates }

func (w *endlessWatcher) Stop() error {
	close(w.stopped)
	return nil
}

func (endless) WatchAll(context.Context, ...jetstream.WatchOpt) (jetstream.KeyWatcher, error) {
	w := &endlessWatcher{updates: make(chan jetstream.KeyValueEntry), stopped: make(chan struct{})}
	go func() {
		defer close(w.updates)
		for {
			w.updates <- noEntry{}
			select {
			case <-w.stopped:
				return
			default:
			}
		}
	}()
	return w, nil
}

// TestAReadThatIsCutOffLeavesNothing: the time for reading the stored bindings is over while more of them wait to be read.
func TestAReadThatIsCutOffLeavesNothing(t *testing.T) {
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	n := &Node{store: &store{kv: endless{}}}
	if err := n.restore(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want canceled", err)
	}
}

// stored starts replicas on addresses that store what they bind in a folder that they share.
func stored(t testing.TB, folder string, count int) []*member {
	t.Helper()
	members := cluster(t, freePorts(t, count), func(f *config.Fleet) {
		f.Persist.Enabled, f.Persist.Folder = true, folder
	})
	for _, m := range members {
		eventually(t, "replica that is ready", func() bool { return m.Waiting() == "" && len(m.State().Peers) == count-1 })
	}
	return members
}

func homes(m *member, conversations int) (list []int) {
	for i := range conversations {
		list = append(list, int(m.pick(fmt.Sprint("c", i)).Decode))
	}
	return list
}

// Conversations stay at their targets when all replicas end.
func TestBindingsSurviveARestartOfAllReplicas(t *testing.T) {
	defer goleak.VerifyNone(t)
	folder := t.TempDir()
	const count = 20
	first := stored(t, folder, 2)
	want := homes(first[0], count)
	for _, m := range first {
		eventually(t, "stored bindings at both", func() bool { return m.store.saved.Load() >= count })
		if !m.store.works.Load() {
			t.Error("got a store that does not work, want one that does")
		}
	}
	for _, m := range first {
		m.Close()
	}
	second := stored(t, folder, 2)
	for i, m := range second {
		eventually(t, "bindings of before", func() bool { return m.State().Conversations == count })
		if got := homes(m, count); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("replica %d after the restart: got targets %v, want %v", i, got, want)
		}
	}
	for _, m := range second {
		m.Close()
	}
	// Without the store they are bound anew.
	third := stored(t, t.TempDir(), 1)
	if got := third[0].State().Conversations; got != 0 {
		t.Errorf("with another folder: got %d conversations, want 0", got)
	}
	third[0].Close()
}

// What is in the folder may be broken, or no folder at all: the start goes on, the log says so.
func TestABrokenStoreStopsNothing(t *testing.T) {
	defer goleak.VerifyNone(t)
	folder := t.TempDir()
	m := stored(t, folder, 1)[0]
	homes(m, 50)
	eventually(t, "stored bindings", func() bool { return m.store.saved.Load() >= 50 })
	m.Close()
	broken := 0
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && !strings.HasSuffix(path, ".lock") {
			broken++
			err = os.WriteFile(path, []byte(strings.Repeat("no store ", 100)), 0o600)
		}
		return err
	})
	if err != nil || broken == 0 {
		t.Fatalf("got %d files, %v, want some", broken, err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, folder := range map[string]string{"garbage": folder, "a file": file} {
		f := defaultFleet(config.FleetEmbedded)
		f.Embedded.Listen = freePorts(t, 1)[0]
		f.Persist.Enabled, f.Persist.Folder = true, folder
		m := &member{t: t, router: newRouter(t, 4), start: time.Now()}
		var text strings.Builder // read after Close
		m.Node = must(Start(t.Context(), Options{Config: &f, Update: m.update, Log: zerolog.New(zerolog.SyncWriter(&text))}))
		eventually(t, "readiness", func() bool { return m.Waiting() == "" })
		m.pick("c")
		if name == "a file" { // what cannot be read of a store is left out
			eventually(t, "warning of the store", func() bool { return strings.Contains(warningOf(m, "not_stored"), folder) })
		}
		m.Close()
		if !strings.Contains(text.String(), `"level":"warn"`) || !strings.Contains(text.String(), folder) {
			t.Errorf("%s: got the log\n%swant a warning that names %s", name, text.String(), folder)
		}
	}
}

// A bucket that is full drops what was written first: made-up ids keep no others out.
func TestAStoreThatIsFull(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := startServerWith(t, &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, Username: "u", Password: "p", JetStream: true, StoreDir: t.TempDir()})
	f := external(t, s.Addr().(*net.TCPAddr).Port)
	f.Persist.Enabled, f.Persist.MaxBytes = true, 4096
	m := startMember(t, &f, nil)
	eventually(t, "readiness", func() bool { return m.Waiting() == "" })
	homes(m, 200)
	eventually(t, "stored bindings", func() bool { return m.store.saved.Load() >= 200 })
	want := m.pick("last").Decode
	eventually(t, "stored binding in a full bucket", func() bool { return m.store.saved.Load() >= 201 })
	if got := m.store.failed.Load(); got > 0 || !m.store.works.Load() {
		t.Errorf("got %d bindings that were not stored, want 0", got)
	}
	m.Close()
	m = startMember(t, &f, nil)
	eventually(t, "readiness", func() bool { return m.Waiting() == "" })
	if got := m.State().Conversations; got == 0 || got > 40 {
		t.Errorf("after a restart: got %d conversations, want what fits in 4096 bytes", got)
	}
	before := m.State().Conversations
	if got := m.pick("last").Decode; got != want || m.State().Conversations != before {
		t.Errorf("after a restart: got target %d and %d conversations, want %d and %d", got, m.State().Conversations, want, before)
	}
	m.Close()
	s.Shutdown()
	s.WaitForShutdown()
}

// A bucket that is deleted is created again, with all bindings.
func TestABucketThatIsDeletedIsCreatedAgain(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := startServerWith(t, &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, Username: "u", Password: "p", JetStream: true, StoreDir: t.TempDir()})
	f := external(t, s.Addr().(*net.TCPAddr).Port)
	f.Persist.Enabled = true
	m := startMember(t, &f, nil)
	eventually(t, "readiness", func() bool { return m.Waiting() == "" })
	const count = 20
	homes(m, count)
	eventually(t, "stored bindings", func() bool { return m.store.saved.Load() >= count })
	conn := must(nats.Connect(s.ClientURL(), nats.UserInfo("u", "p")))
	js := must(jetstream.New(conn))
	if err := js.DeleteKeyValue(t.Context(), f.Name+"-conversations"); err != nil {
		t.Fatal(err)
	}
	n := count
	eventually(t, "stored bindings in a new bucket", func() bool {
		m.pick(fmt.Sprint("c", n)) // to be stored
		n++
		kv, err := js.KeyValue(t.Context(), f.Name+"-conversations")
		if err != nil {
			return false
		}
		keys, err := kv.Keys(t.Context())
		return err == nil && len(keys) >= n-1 && m.store.works.Load()
	})
	conn.Close()
	m.Close()
	s.Shutdown()
	s.WaitForShutdown()
}

// An external NATS restarts, then all replicas do.
func TestAnExternalServerThatRestartsKeepsBindings(t *testing.T) {
	defer goleak.VerifyNone(t)
	folder := t.TempDir()
	serve := func(port int) *server.Server {
		return startServerWith(t, &server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true, Username: "u", Password: "p", JetStream: true, StoreDir: folder})
	}
	s := serve(server.RANDOM_PORT)
	port := s.Addr().(*net.TCPAddr).Port
	start := func(name string) *member {
		f := external(t, port)
		f.Name, f.Persist.Enabled = name, true
		m := startMember(t, &f, nil)
		eventually(t, "readiness", func() bool { return m.Waiting() == "" })
		return m
	}
	a, b := start("one"), start("one")
	eventually(t, "pair", func() bool { return len(a.State().Peers) == 1 && len(b.State().Peers) == 1 })
	want := homes(a, 20)
	eventually(t, "stored bindings", func() bool { return a.store.saved.Load() >= 20 })
	s.Shutdown()
	s.WaitForShutdown()
	eventually(t, "loss of the connection", func() bool { return !a.State().Connected })
	want = append(want, int(a.pick("c20").Decode)) // is stored later
	eventually(t, "failed write", func() bool { return !a.store.works.Load() })
	s = serve(port)
	eventually(t, "binding stored after the restart", func() bool { return a.store.works.Load() && a.store.saved.Load() >= 21 })
	a.Close()
	b.Close()
	s.Shutdown()
	s.WaitForShutdown()
	s = serve(port)
	again, other := start("one"), start("two")
	if got := again.State().Conversations; got != len(want) {
		t.Errorf("after a restart of all: got %d conversations, want %d", got, len(want))
	}
	if got := homes(again, len(want)); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("after a restart of all: got targets %v, want %v", got, want)
	}
	if got := other.State().Conversations; got != 0 {
		t.Errorf("another fleet: got %d conversations, want 0", got)
	}
	again.Close()
	other.Close()
	s.Shutdown()
	s.WaitForShutdown()
}

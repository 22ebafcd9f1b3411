package feed_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"runtime"
	"testing"

	zmq "github.com/go-zeromq/zmq4"

	"github.com/kvlane/kvlane/kvindex/feed"
)

// An engine that seems to restart with each batch makes the feed run one replay at a time.
func TestAStormOfRestartsRunsOneReplay(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // a replay endpoint that accepts and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	pub := freePort(t)
	engine := zmq.NewPub(t.Context())
	defer engine.Close()
	if err := engine.Listen(pub); err != nil {
		t.Fatal(err)
	}
	f, err := feed.Start(t.Context(), vllmSource(pub, "tcp://"+silent.Addr().String()), newRecorder())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, "connection", func() bool { return f.Status().Connects == 1 })
	most := 0
	stacks := make([]byte, 16<<20)
	const storm = 2000
	stamp := 0.0
	eventually(t, "restarts", func() bool {
		for range 100 {
			stamp++
			_ = engine.SendMulti(zmq.NewMsgFrom([]byte("kv"), binary.BigEndian.AppendUint64(nil, 5), storedBatch(t, 5, stamp)))
		}
		most = max(most, bytes.Count(stacks[:runtime.Stack(stacks, true)], []byte("feed.(*Feed).runReplay(")))
		return f.Status().Counts.Restarts > storm
	})
	if most > 1 {
		t.Errorf("got %d replays at a time in a storm of restarts, want at most 1", most)
	}
}

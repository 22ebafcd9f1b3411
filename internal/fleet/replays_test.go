package fleet

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// zmqSockets listens at the ports of that many ranks, and returns the endpoint of the first. The sockets publish and replay
// nothing, or the payload without end.
func zmqSockets(t *testing.T, typ string, ranks int, payload []byte) string {
	t.Helper()
	first, err := enginesim.FreePorts(ranks)
	if err != nil {
		t.Fatal(err)
	}
	for port := first; port < first+ranks; port++ {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		serveZMQ(l, typ, payload)
	}
	return fmt.Sprint("tcp://127.0.0.1:", first)
}

func serveZMQ(l net.Listener, typ string, payload []byte) {
	greeting := make([]byte, 64)
	copy(greeting, "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL")
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00" + string(rune(len(typ))) + typ
	hello := slices.Concat(greeting, []byte{4, byte(len(ready))}, []byte(ready))
	empty := append(append([]byte{1, 0, 1, 8}, bytes.Repeat([]byte{0xff}, 8)...), 0, 0) // the end of a replay
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = c.Write(hello)
				if typ == "ROUTER" && payload == nil {
					_, _ = c.Write(empty)
				}
				go func() {
					for seq := uint64(0); payload != nil; seq++ {
						header := append(binary.BigEndian.AppendUint64([]byte{1, 0, 1, 8}, seq), 2)
						header = binary.BigEndian.AppendUint64(header, uint64(len(payload)))
						message := net.Buffers{header, payload} // a joined copy of each would be half of the heap that tests measure
						if _, err := message.WriteTo(c); err != nil {
							return
						}
						time.Sleep(10 * time.Millisecond)
					}
				}()
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
}

var noEvents = []byte{0x92, 0, 0x90}

// A worker whose replays never end delays no replay of another.
func TestReplaysOfAWorkerDelayNoOther(t *testing.T) {
	const ranks = 2 * maxReplays
	slow := worker("slow", ranks)
	slow.Events.Endpoint, slow.Events.Replay = zmqSockets(t, "PUB", ranks, nil), zmqSockets(t, "ROUTER", ranks, noEvents)
	f := newFleet(t, "", slow)
	state := func(worker string) (states []feed.State) {
		for _, s := range f.FeedStatus() {
			for _, target := range s.Targets {
				if target.Target.Worker == worker && s.Counts.Replays > 0 {
					states = append(states, target.State)
				}
			}
		}
		return states
	}
	for len(state("slow")) < ranks { // the test's timeout ends it
		time.Sleep(5 * time.Millisecond)
	}
	good := worker("good", 1)
	good.Events.Endpoint, good.Events.Replay = zmqSockets(t, "PUB", 1, nil), zmqSockets(t, "ROUTER", 1, nil)
	f.SetWorkers([]workers.Worker{slow, good})
	for end := time.Now().Add(10 * time.Second); len(state("good")) == 0 || state("good")[0] != feed.Live; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("got the states %v after 10 s, want live", state("good"))
		}
	}
}

//go:build linux

package replicas

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvlane/kvlane/internal/config"
)

const processNATS = "KVLANE_TEST_NATS"

// TestNATSProcess is the process of a NATS server that another test starts.
func TestNATSProcess(t *testing.T) {
	address := os.Getenv(processNATS)
	if address == "" {
		t.Skip("is started by other tests")
	}
	host, port, _ := net.SplitHostPort(address)
	s := startServerWith(t, &server.Options{Host: host, Port: must(strconv.Atoi(port)), NoSigs: true, NoLog: true})
	_, _ = io.Copy(io.Discard, os.Stdin)
	s.Shutdown()
	s.WaitForShutdown()
}

// An external NATS server takes no more bytes while requests are decided as fast as they can be: a decision takes no longer than
// before, what waits is bounded, and the replicas agree soon once it goes on. Times are counted by the replicas.
func TestExternalServerTakesNoBytes(t *testing.T) {
	f := defaultFleet(config.FleetExternal)
	f.External.URL = "nats://" + freePorts(t, 1)[0]
	nats := exec.Command(os.Args[0], "-test.run=^TestNATSProcess$")
	nats.Env = append(os.Environ(), processNATS+"="+strings.TrimPrefix(f.External.URL, "nats://"))
	nats.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	end := must(nats.StdinPipe())
	if err := nats.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nats.Process.Signal(syscall.SIGCONT); _ = end.Close(); _ = nats.Wait() })
	signal := func(s syscall.Signal) {
		if err := nats.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	replicas := []*process{startProcess(t, &f), startProcess(t, &f)}
	agree := func(live int) func() bool {
		return func() bool {
			a, b := replicas[0].say("state"), replicas[1].say("state")
			return len(a.State.Peers) == 1 && len(b.State.Peers) == 1 && a.State.Synced && b.State.Synced && a.Live == live && b.Live == live && a.Bound == b.Bound
		}
	}
	eventually(t, "two replicas that know each other", agree(0))
	const conversations = 20_000
	for i, p := range replicas {
		p.say(fmt.Sprintf("pick before%d -1", i))
		p.say(fmt.Sprint("fill ", conversations))
	}
	eventually(t, "agreement before", agree(2))

	var began [2]answer
	for i, p := range replicas {
		began[i] = p.say("state")
	}
	signal(syscall.SIGSTOP)
	fills, picks, most, longest := 0, 0, [2]uint64{}, [2]int64{}
	for ticks := began[0].Ticks; ticks < began[0].Ticks+40; fills++ {
		for i, p := range replicas {
			if fills%20 == 0 {
				p.say(fmt.Sprintf("pick during%d-%d -1", i, fills))
				picks++
			}
			a := p.say(fmt.Sprint("fill ", conversations))
			most[i] = max(most[i], a.Heap)
			longest[i] = max(longest[i], a.Longest)
			if i == 0 {
				ticks = a.Ticks
			}
		}
	}
	// NATS' client waits 15 for a write; on a busy machine a decision of one of the two took as long.
	if min(longest[0], longest[1]) > 10 {
		t.Errorf("got decisions of %v tenths of a second, want none that waits for NATS", longest)
	}
	for i, p := range replicas {
		var a answer
		eventually(t, "replica that is alone", func() bool {
			a = p.say("state")
			return a.Metrics["replicas_connected"] == 0 && a.Metrics["replicas"] == 1
		})
		t.Logf("replica %d: %d decisions, at most %d KiB in memory, before %d KiB; %v", i, fills*conversations, most[i]>>10, began[i].Heap>>10, a.Metrics)
		if most[i] > began[i].Heap+16<<20 {
			t.Errorf("replica %d: got %d KiB in memory, before %d KiB, want at most 16 MiB more", i, most[i]>>10, began[i].Heap>>10)
		}
		if a.Metrics["replicas_unsent_total"] == 0 {
			t.Errorf("replica %d: got the metrics %v, want unsent messages", i, a.Metrics)
		}
		for _, want := range []string{"NATS connection lost, routing alone", "replicas: gone, its bookings are dropped"} {
			if log := string(must(os.ReadFile(p.log))); !strings.Contains(log, want) {
				t.Errorf("replica %d: got the log\n%swant it to say %q", i, log, want)
			}
		}
	}
	signal(syscall.SIGCONT)
	goesOn := replicas[0].say("state").Ticks
	eventually(t, "agreement after", agree(2+picks))
	took := replicas[0].say("state").Ticks - goesOn
	t.Logf("agreed after %d tenths of a second", took)
	if took > 100 { // about 10 on an idle machine, 26 on a busy one
		t.Errorf("got agreement after %d tenths of a second, want at most 100", took)
	}
}

//go:build linux

package replicas

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/routing"
)

// answer is what a replica in a process of its own prints after each command.
type answer struct {
	Target int // of the last pick
	Live   int
	// Ticks counts tenths of a second that the process had: where the machine is busy, they
	// last longer. Longest is the most of them that a pick of the last command took.
	Ticks, Longest int64
	Heap           uint64 // live, in bytes
	// Bound is a hash of all conversations with their targets.
	Bound   uint64
	State   State
	Metrics map[string]float64
}

const processFleet = "KVLANE_TEST_FLEET"

// TestReplicaProcess is the process of a replica that another test starts.
func TestReplicaProcess(t *testing.T) {
	text := os.Getenv(processFleet)
	if text == "" {
		t.Skip("is started by other tests")
	}
	var f config.Fleet
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		t.Fatal(err)
	}
	f.Embedded.SecretFile = secretFile(t, "secret")
	m := &member{t: t, router: newRouterOf(t, 4, routing.DefaultConfig().MaxConversations), start: time.Now()}
	m.Node = must(Start(t.Context(), Options{Config: &f, Update: m.update, Log: zerolog.New(os.Stderr).Level(zerolog.InfoLevel)}))
	defer m.Close()
	var ticks atomic.Int64
	go func() {
		for range time.Tick(100 * time.Millisecond) {
			ticks.Add(1)
		}
	}()
	var own []routing.ReservationID
	target, longest := -1, int64(0)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		word := strings.Fields(in.Text())
		switch word[0] {
		case "pick": // CONVERSATION SLOT
			slot := must(strconv.Atoi(word[2]))
			q := &routing.Query{ID: word[1], Conversation: word[1], PromptTokens: 100}
			if slot >= 0 {
				q.Pin = &routing.Pin{Worker: targetName(slot), Rank: int32(slot % 2)}
			}
			m.update(func(r *routing.Router, now time.Duration) {
				plan := must(r.Pick(now, q, nil, nil))
				own, target = append(own, plan.Reservation), int(plan.Decode)
			})
		case "fill": // COUNT
			for i := range must(strconv.Atoi(word[1])) {
				q := &routing.Query{ID: "c", Conversation: fmt.Sprint("c", i), PromptTokens: 100, Pin: &routing.Pin{Worker: targetName(i % 4), Rank: int32(i % 2)}}
				began := ticks.Load()
				m.update(func(r *routing.Router, now time.Duration) { r.Release(now, must(r.Pick(now, q, nil, nil)).Reservation) })
				longest = max(longest, ticks.Load()-began)
			}
		case "end":
			m.update(func(r *routing.Router, now time.Duration) {
				for _, id := range own {
					r.Release(now, id)
				}
				own = nil
			})
		}
		a := answer{Target: target, Live: m.live(), Ticks: ticks.Load(), Longest: longest, Heap: liveHeap(), Metrics: map[string]float64{}}
		if longest = 0; word[0] != "fill" { // a metric waits for NATS' client while that writes
			a.State = m.State()
			m.Collect(func(name, _ string, value float64, _ ...string) { a.Metrics[name] += value })
		}
		m.update(func(r *routing.Router, _ time.Duration) {
			for key := range m.core.legs[0].byKey {
				at, _ := r.Bound(0, key)
				a.Bound += hashTarget(mix(key.Hi^key.Lo), at)
			}
		})
		fmt.Println(string(must(json.Marshal(a))))
	}
}

func liveHeap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func targetName(slot int) string { return target(slot).Worker }

// process is a replica in a process of its own.
type process struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Scanner
	log string
	cmd *exec.Cmd
}

// startProcess starts a replica; before is the beginning of its command line.
func startProcess(t *testing.T, f *config.Fleet, before ...string) *process {
	t.Helper()
	line := append(before, os.Args[0], "-test.run=^TestReplicaProcess$")
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Env = append(os.Environ(), processFleet+"="+string(must(json.Marshal(f))))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log := must(os.Create(t.TempDir() + "/log"))
	cmd.Stderr = log
	in, out := must(cmd.StdinPipe()), bufio.NewScanner(must(cmd.StdoutPipe()))
	out.Buffer(nil, 1<<20)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait(); _ = log.Close() })
	return &process{t, in, out, log.Name(), cmd}
}

func (p *process) say(command string) (a answer) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, command); err != nil {
		p.t.Fatal(err)
	}
	if !p.out.Scan() {
		p.t.Fatalf("got no answer to %q: %v\n%s", command, p.out.Err(), must(os.ReadFile(p.log)))
	}
	if err := json.Unmarshal(p.out.Bytes(), &a); err != nil {
		p.t.Fatalf("got %s: %v", p.out.Bytes(), err)
	}
	return a
}

func ip(t *testing.T, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v, %s", args, err, out)
	}
}

// The network between a replica and two others is cut for 10 s and healed. Each goes on deciding
// and logs which others are gone; then all agree within 2 s. Times are counted by the replicas.
func TestReplicasThatAreCutOff(t *testing.T) {
	hub := fmt.Sprint("kvlane", os.Getpid(), "hub")
	if out, err := exec.Command("ip", "netns", "add", hub).CombinedOutput(); err != nil {
		t.Skipf("no network namespaces here: %v, %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", hub).Run() })
	if out, err := exec.Command("ip", "-n", hub, "link", "add", "br0", "type", "bridge").CombinedOutput(); err != nil {
		t.Skipf("no bridges here: %v, %s", err, out)
	}
	ip(t, "-n "+hub+" link set br0 up")
	var replicas [3]*process
	for i := range replicas {
		ns := fmt.Sprint("kvlane", os.Getpid(), "n", i)
		ip(t, "netns add "+ns)
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", ns).Run() })
		ip(t, fmt.Sprintf("-n %s link add h%d type veth peer name eth0 netns %s", hub, i, ns))
		ip(t, fmt.Sprintf("-n %s link set h%d master br0 up", hub, i))
		ip(t, fmt.Sprintf("-n %s addr add 10.77.0.%d/24 dev eth0", ns, i+1))
		ip(t, "-n "+ns+" link set eth0 up")
		ip(t, "-n "+ns+" link set lo up")
		f := defaultFleet(config.FleetEmbedded)
		f.Embedded.Listen = fmt.Sprintf("10.77.0.%d:6222", i+1)
		f.Embedded.Routes = []string{"10.77.0.1:6222", "10.77.0.2:6222", "10.77.0.3:6222"}
		replicas[i] = startProcess(t, &f, "ip", "netns", "exec", ns)
	}
	agree := func(live int) func() bool {
		return func() bool {
			bound := replicas[0].say("state").Bound
			for _, p := range replicas {
				a := p.say("state")
				if len(a.State.Peers) != 2 || !a.State.Synced || a.Live != live || a.Bound != bound {
					return false
				}
			}
			return true
		}
	}
	eventually(t, "three replicas that know each other", agree(0))
	for i, p := range replicas {
		p.say(fmt.Sprintf("pick before%d -1", i))
	}
	eventually(t, "agreement before the cut", agree(3))

	ip(t, "-n "+hub+" link set h0 nomaster")
	start, made, refused := replicas[1].say("state"), 3, 0
	for n := 0; replicas[1].say("state").Ticks < start.Ticks+100; n++ {
		for i, p := range replicas {
			if n == 40 { // both sides bind the same conversation, elsewhere
				p.say(fmt.Sprintf("pick split %d", min(i, 1)))
				made++
			}
			before := p.say("state").Live
			if p.say(fmt.Sprintf("pick during%d -1", n%5)).Live <= before {
				refused++
			}
			made++
		}
		time.Sleep(100 * time.Millisecond)
	}
	if refused > 3 { // a drop of others' bookings may come between the two commands
		t.Errorf("got %d picks without a booking while cut off, want a decision each", refused)
	}
	for i, want := range []float64{1, 2, 2} {
		a := replicas[i].say("state")
		if got := a.Metrics["replicas"]; got != want {
			t.Errorf("replica %d while cut off: got %v replicas by the metric, want %v", i, got, want)
		}
		if log := string(must(os.ReadFile(replicas[i].log))); !strings.Contains(log, "replicas: gone, its bookings are dropped") {
			t.Errorf("replica %d while cut off: got the log\n%swant it to say that another is gone", i, log)
		}
	}

	ip(t, "-n "+hub+" link set h0 master br0")
	healed, began := replicas[1].say("state").Ticks, time.Now()
	eventually(t, "agreement after the cut", agree(made))
	took := replicas[1].say("state").Ticks - healed
	t.Logf("agreed after %d tenths of a second, %v by this process's clock", took, time.Since(began))
	if took > 20 {
		t.Errorf("got agreement after %d tenths of a second, want at most 20", took)
	}
	for _, p := range replicas {
		p.say("end")
	}
	eventually(t, "empty ledgers", agree(0))
}

// All replicas are killed at the same time. What they stored has the binding of each conversation.
func TestBindingsSurviveTheKillOfAllReplicas(t *testing.T) {
	const count = 100_000
	addresses, folder := freePorts(t, 2), t.TempDir()
	start := func(folder string) (list [2]*process) {
		for i := range list {
			f := defaultFleet(config.FleetEmbedded)
			f.Embedded.Listen, f.Embedded.Routes = addresses[i], addresses
			f.Persist.Enabled, f.Persist.Folder = true, folder
			list[i] = startProcess(t, &f)
		}
		for i, p := range list {
			eventually(t, fmt.Sprintf("replica %d that knows the other", i), func() bool {
				s := p.say("state").State
				return s.Ready && len(s.Peers) == 1
			})
		}
		return list
	}
	kill := func(list [2]*process) {
		for _, p := range list {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
	}
	first := start(folder)
	want := first[0].say(fmt.Sprint("fill ", count)).Bound
	for i, p := range first {
		within(t, 5*time.Minute, fmt.Sprintf("stored bindings at replica %d", i), func() bool { return p.say("state").Metrics["replicas_stored_total"] >= count })
	}
	kill(first)
	began := time.Now()
	second := start(folder)
	for i, p := range second {
		within(t, 5*time.Minute, fmt.Sprintf("bindings of before at replica %d", i), func() bool { return p.say("state").State.Conversations == count })
		if got := p.say("state").Bound; got != want {
			t.Errorf("replica %d: got bindings with the hash %x, want %x", i, got, want)
		}
		if got := p.say("pick c7 -1").Target; got != 3 {
			t.Errorf("replica %d: got target %d for the next turn, want 3 as before", i, got)
		}
	}
	t.Logf("two replicas started and restored %d bindings in %v", count, time.Since(began))
	kill(second)
	third := start(t.TempDir())
	if got := third[0].say("state").State.Conversations; got != 0 {
		t.Errorf("with an empty folder: got %d conversations, want 0", got)
	}
}

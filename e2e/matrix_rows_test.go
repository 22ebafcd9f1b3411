package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// faultShapes are the beds that rows share.
var faultShapes = []struct {
	name, title, what string
	bed               func(t *testing.T) *bed
}{
	{"standalone", "Standalone", "Request bodies BUFFERED, response bodies not sent to Kvlane. Three engines of two ranks.\nUploads of at most 10 s.", func(t *testing.T) *bed {
		return faultBed(t, shape{envoy: ", upload_timeout: 10s"})
	}},
	{"sidecar", "Sidecar", "As standalone, with the first tokens observed, connections of at most 20 s, and uploads of at most 6 s.", func(t *testing.T) *bed {
		return faultBed(t, shape{envoy: ", first_token: true, connection_age: 20s, alternates: true, upload_timeout: 6s"})
	}},
	{"gateway", "Gateway (full duplex)", "Both bodies FULL_DUPLEX_STREAMED, as with an InferencePool. Uploads of at most 10 s.", func(t *testing.T) *bed {
		return faultBed(t, shape{envoy: ", request_body: FULL_DUPLEX_STREAMED, response_body: FULL_DUPLEX_STREAMED, upload_timeout: 10s"})
	}},
	{"TLS", "TLS", "As standalone, with TLS between Envoy and Kvlane.", func(t *testing.T) *bed {
		return faultBed(t, shape{bootstrap: func(boot string) string {
			const at = "- name: kvlane\n    type: STATIC\n"
			if !strings.Contains(boot, at) {
				t.Fatalf("got a bootstrap without %q", at)
			}
			return strings.Replace(boot, at, at+`    transport_socket: {name: tls, typed_config: {"@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext, common_tls_context: {alpn_protocols: [h2]}}}`+"\n", 1)
		}})
	}},
	{"replicas", "Two replicas", "Envoy asks two Kvlanes that share what they book. Request bodies BUFFERED. Eight engines.\nMemory and loads are those of the one that the fault spares.", func(t *testing.T) *bed {
		r := newReplicaSet(t, 2)
		r.replicas, r.idle = r, r.goroutines()
		return r.bed
	}},
	{"nixl", "Prefill and decode: nixl", "One leg after the other; three prefill engines, two decode engines. Prompts of 64 tokens and more are split.", func(t *testing.T) *bed {
		return faultPools(t, "nixl")
	}},
	{"mooncake", "Prefill and decode: mooncake", "The same with legs that run concurrently.", func(t *testing.T) *bed {
		return faultPools(t, "mooncake")
	}},
}

// faultBed has two engines in this process, the second behind a proxy, and one of its own
// process.
func faultBed(t *testing.T, s shape) *bed {
	t.Helper()
	s.engines, s.ranks, s.replay, s.stall, s.decide, s.engine = 2, 2, true, stallTimeout.String(), "250ms", slow(2*time.Millisecond)
	p := newProcess(t, s.ranks, "")
	p.start(t)
	var m *between
	s.addressOf = func(i int, e *enginesim.Engine) (address string) {
		if i == 0 {
			return e.Addr()
		}
		m, address = newBetween(t, e)
		return address
	}
	s.config = p.line
	b := newBed(t, s)
	b.process, b.between = p, m
	return b
}

func faultPools(t *testing.T, connector string) *bed {
	t.Helper()
	for _, p := range pairs() {
		if p.connector != connector {
			continue
		}
		port, err := enginesim.FreePorts(1)
		if err != nil {
			t.Fatal(err)
		}
		keys, args := ", engine: vllm, role: prefill", []string{"--role", "prefill", "--connector", connector, "--kv-lease", "3s"}
		if connector == "mooncake" {
			keys += fmt.Sprintf(", disagg: {bootstrap_port: %d}", port)
			args = append(args, "--bootstrap", fmt.Sprintf("127.0.0.1:%d", port))
		}
		process := newProcess(t, 2, keys, args...)
		process.start(t)
		p.rules = "mode: threshold, threshold: 64, whole_prompt: true"
		p.shape = shape{stall: stallTimeout.String(), decide: "250ms", config: process.line, engine: slow(2 * time.Millisecond), replay: true}
		b := faultsBed(t, p)
		b.process = process
		b.legsAreCut = connector == "mooncake"
		return b
	}
	t.Fatalf("no connector %s", connector)
	return nil
}

func (p *process) start(t *testing.T) {
	t.Helper()
	cmd := exec.Command(kvlaneBinary, p.args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	p.pid, p.done = cmd.Process.Pid, done
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if resp, err := http.Get("http://" + p.side + "/sim/faults"); err == nil {
			resp.Body.Close()
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the engine's process never answers")
		}
	}
}

// set sets the faults of the engine.
func (p *process) set(t *testing.T, f enginesim.Faults) {
	t.Helper()
	body, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post("http://"+p.side+"/sim/faults", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}

// faults is the matrix.
func faults() []fault {
	const (
		begun    = "answers that have begun, or whose prompt the engine has received, are not repeated elsewhere; one for each client"
		accepted = "Envoy held these requests"
		stop     = 4 * stallTimeout
	)
	engine := func(f enginesim.Faults, d time.Duration, which ...int) func(p *stage) {
		return func(p *stage) {
			p.fault(f, which...)
			p.lasts(d, 2*loadClients)
			p.over()
			p.fault(enginesim.Faults{}, which...)
		}
	}
	all := []fault{}
	add := func(shape string, quick bool, f fault) {
		f.shape, f.quick = shape, quick
		all = append(all, f)
	}

	// Clients.
	leaves := func(part float64, wait time.Duration, answer bool) func(p *stage) {
		return func(p *stage) { p.note = fmt.Sprintf("%d clients left", p.leavers(2*time.Second, part, wait, answer)) }
	}
	for _, shape := range []string{"standalone", "gateway"} {
		add(shape, shape == "gateway", fault{name: "client leaves during its upload", made: "half of a body, then the connection is closed", play: leaves(0.5, 5*time.Millisecond, false)})
		add(shape, shape == "gateway", fault{name: "client leaves while Kvlane decides", made: "closed immediately after the body", play: leaves(1, 0, false)})
		add(shape, false, fault{name: "client leaves before the first token", shows: "kvlane_envoy_flags_total", made: "closed 5 ms after the body", play: leaves(1, 5*time.Millisecond, false)})
		add(shape, true, fault{name: "client leaves during its answer", shows: "kvlane_envoy_flags_total", made: "closed after the first bytes of the answer", play: leaves(1, 0, true)})
	}
	for _, shape := range []string{"standalone", "sidecar", "gateway"} {
		add(shape, false, fault{name: "slow upload", made: "8 clients send a byte every 200 ms; they get 408 after `envoy.upload_timeout`", play: slowUploads})
	}
	for _, shape := range []string{"standalone", "gateway"} {
		add(shape, false, fault{name: "slow reader", made: "16 clients do not read streams of 4,000 tokens for 6 s, then leave", play: slowReaders})
		made, memory := "sent concurrently, each answered 200, or 503 with Retry-After above `limits.bodies_in_flight`", 192
		if shape == "gateway" { // bodies arrive in parts, all of them at the same time
			made, memory = made+" (512 MiB, which bounds the memory: Kvlane holds all of them)", 512
		}
		add(shape, false, fault{name: "20 bodies of 16 MB", made: made, stall: stop, memory: memory, play: largeBodies})
	}
	add("standalone", false, fault{name: "10,000 streams", made: "concurrent streams over HTTP/2, held until all have begun; then all of them end", stall: time.Minute, normal: 15 * time.Second, memory: 256, heap: 256, play: manyStreams})

	// Engines.
	killed := fault{name: "engine killed", made: "SIGKILL; started again after 2 s", failed: loadClients, why: begun, play: func(p *stage) {
		p.process.signal(p.t, syscall.SIGKILL)
		p.lasts(2*time.Second, 2*loadClients)
		p.over()
		p.process.start(p.t)
	}}
	add("standalone", true, killed)
	add("gateway", false, killed)
	for _, shape := range []string{"standalone", "gateway"} {
		add(shape, shape == "standalone", fault{name: "engine stopped", made: "SIGSTOP for 8 s", stall: stop, play: func(p *stage) {
			p.process.signal(p.t, syscall.SIGSTOP)
			p.lasts(stop, 0)
			p.over()
			p.process.signal(p.t, syscall.SIGCONT)
		}})
	}
	add("standalone", true, fault{name: "engine does not answer", made: "generation gets no answer, health checks do, until one of its ranks is suspect and 5 s more", stall: 8 * time.Second, play: noAnswers})
	add("standalone", false, fault{name: "engine restarted in place", made: "SIGKILL, started immediately on the same ports", failed: loadClients, why: begun, play: func(p *stage) {
		p.process.signal(p.t, syscall.SIGKILL)
		p.over()
		p.process.start(p.t)
	}})
	add("standalone", false, fault{name: "engine slow", made: "each answer begins 1 s later, for 4 s", stall: time.Second, play: engine(enginesim.Faults{AnswerDelayMS: 1000}, 4*time.Second, 0)})
	const flaps = 6
	add("standalone", true, fault{name: "engine flapping", shows: "kvlane_envoy_flags_total", made: "refuses connections and cuts the existing ones, six times for 300 ms", failed: flaps * loadClients, why: begun + " and time", play: func(p *stage) {
		for range flaps {
			p.fault(enginesim.Faults{Refuse: true}, 0)
			p.lasts(300*time.Millisecond, 0)
			p.over()
			p.fault(enginesim.Faults{}, 0)
			p.lasts(300*time.Millisecond, 0)
		}
	}})
	const (
		// Answers that were sent before and are good end a row of failures, at most one of each client for a rank.
		judged  = 2*5 + 5*loadClients
		suspect = "an engine that fails quickly looks idle; its ranks are suspect after five failures in a row; those of requests that were sent before count too"
	)
	add("standalone", false, fault{name: "engine answers garbage", shows: "kvlane_envoy_flags_total", made: "`220 mail ready` instead of HTTP, for 3 s", failed: judged, why: suspect, normal: retried, play: func(p *stage) {
		spoil := func(c net.Conn) { fmt.Fprint(c, "220 mail ready\r\n\r\n") }
		p.between.spoil.Store(&spoil)
		p.lasts(3*time.Second, 2*loadClients)
		p.over()
		p.between.spoil.Store(nil)
	}})
	add("standalone", false, fault{name: "engine answers 500", made: "to every request, for 3 s", failed: judged, why: suspect, normal: retried, play: engine(enginesim.Faults{FailStatus: 500, FailCount: -1}, 3*time.Second, 0)})
	for _, shape := range []string{"standalone", "gateway"} {
		add(shape, false, fault{name: "engine dies during answers", shows: "kvlane_envoy_flags_total", made: "each connection is cut after three tokens, for 3 s", failed: judged, why: suspect, normal: retried, play: engine(enginesim.Faults{DieAfterTokens: 3}, 3*time.Second, 0)})
	}

	// Events.
	add("standalone", false, fault{name: "events late", made: "by 2 s, for 4 s", play: engine(enginesim.Faults{EventDelayMS: 2000}, 4*time.Second, 0, 1)})
	add("standalone", true, fault{name: "events lost", shows: "kvlane_feed_gaps_total", made: "40 batches of each engine, which it still has", play: engine(enginesim.Faults{DropBatches: 40}, 2*time.Second, 0, 1)})
	add("standalone", true, fault{name: "events lost for good", shows: "kvlane_feed_gaps_total", made: "40 batches of each engine, which it no longer has", play: engine(enginesim.Faults{DropBatches: 40, ForgetDropped: true}, 2*time.Second, 0, 1)})
	add("standalone", true, fault{name: "events doubled", shows: "kvlane_feed_duplicate_batches_total", made: "each batch is sent twice, for 3 s", play: engine(enginesim.Faults{RepeatBatches: 1}, 3*time.Second, 0, 1)})
	add("standalone", true, fault{name: "events garbage", shows: "kvlane_feed_dropped_events_total", made: "batches of random bytes, for 3 s", play: engine(enginesim.Faults{GarbageBatches: true}, 3*time.Second, 0, 1)})
	add("standalone", false, fault{name: "events flood", shows: "kvlane_feed_duplicate_batches_total", made: "each batch is sent 2,000 times; another client stores 128 blocks with every request, for 4 s", memory: 96, play: floodEvents})
	add("standalone", false, fault{name: "events silent", made: "none are sent for 4 s", play: engine(enginesim.Faults{StopEvents: true}, 4*time.Second, 0, 1)})

	// Prefill engines, in each phase of a leg.
	for _, shape := range []string{"nixl", "mooncake"} {
		own, why := 0, ""
		wait, waits := time.Duration(0), ""
		dies, reason := loadClients, "answers of the other leg's engine that wait for the dead engine's blocks end with an error; one for each client"
		if shape == "mooncake" {
			// The decode leg is Envoy's: when its prefill leg has failed nothing can end it but the engine.
			wait, waits = 10*time.Second, "; a decode engine whose prefill leg is lost after its answer, or with Kvlane, waits its own 10 s"
			own, why = 4*loadClients, "where legs run concurrently a leg that fails after its head start fails the request"
		}
		add(shape, shape == "mooncake", fault{name: "prefill engine refuses", shows: "kvlane_prefill_legs_total", made: "refuses connections and cuts running legs, for 2 s", failed: own, why: why, play: engine(enginesim.Faults{Refuse: true}, 2*time.Second, 0)})
		add(shape, false, fault{name: "prefill engine dies before it has answered", shows: "kvlane_prefill_legs_total", made: "each connection is cut before the answer, for 3 s", failed: own, why: why, normal: retried, play: engine(enginesim.Faults{DieAfterTokens: 1}, 3*time.Second, 0)})
		add(shape, false, fault{name: "prefill engine answers 500", shows: "kvlane_prefill_legs_total", made: "for 3 s", failed: own, why: why, normal: retried, play: engine(enginesim.Faults{FailStatus: 500, FailCount: -1}, 3*time.Second, 0)})
		add(shape, false, fault{name: "prefill engine does not answer", shows: "kvlane_prefill_legs_total", made: "legs get no answer for 4 s; `disagg.timeout` is 3 s", failed: own, why: why, stall: 6 * time.Second, normal: retried, play: engine(enginesim.Faults{AnswerDelayMS: forever}, 4*time.Second, 0)})
		add(shape, shape == "nixl", fault{name: "prefill engine killed in any phase", made: "SIGKILL at load, before, during and after legs; started again after 2 s" + waits, failed: dies, why: reason, stall: 3*time.Second + wait, play: killed.play})
		add(shape, false, fault{name: "prefill engine stopped in any phase", made: "SIGSTOP for 8 s; it keeps blocks for 3 s, so those that decode engines ask for meanwhile are gone afterwards" + waits, failed: max(own, dies), why: cmp.Or(why, reason), stall: stop + wait, normal: retried, play: func(p *stage) {
			p.process.signal(p.t, syscall.SIGSTOP)
			p.lasts(stop, 0)
			p.over()
			p.process.signal(p.t, syscall.SIGCONT)
		}})
		add(shape, false, fault{name: "decode engine refuses", made: "refuses connections and cuts running answers, for 2 s", failed: 2 * loadClients, why: begun + ", or whose blocks were sent to it", play: engine(enginesim.Faults{Refuse: true}, 2*time.Second, 2)})
		add(shape, shape == "nixl", fault{name: "client leaves during its legs", made: "closed 5 ms after the body, and after the first bytes of the answer", play: func(p *stage) {
			n := p.leavers(time.Second, 1, 5*time.Millisecond, false) + p.leavers(time.Second, 1, 0, true)
			p.note = fmt.Sprintf("%d clients left", n)
		}})
		add(shape, false, fault{name: "Kvlane killed during legs", made: "SIGKILL; started again after 2 s" + waits, failed: own, why: why, stall: wait, play: func(p *stage) {
			p.stopKvlane(syscall.SIGKILL)
			p.lasts(2*time.Second, 2*loadClients)
			p.over()
			p.startKvlane()
		}})
	}

	// Kvlane.
	for _, shape := range []string{"standalone", "sidecar", "gateway"} {
		failed, why := 0, ""
		if shape == "gateway" {
			// Two health checks, one every 0.2 s; a client tries again after 20 ms. Twice that on a busy machine.
			failed = loadClients * (1 + 2*400/20)
			why = "Envoy cannot continue without Kvlane once it has sent a part of a body: requests are answered 500 until two health checks have failed (0.2 to 0.4 s), and running answers are cut"
		}
		add(shape, shape != "sidecar", fault{name: "Kvlane killed", made: "SIGKILL; started again after 2 s", failed: failed, why: why, play: func(p *stage) {
			p.stopKvlane(syscall.SIGKILL)
			p.lasts(2*time.Second, 2*loadClients)
			p.over()
			p.startKvlane()
		}})
		if shape == "gateway" {
			failed = 2 * loadClients // on a busy machine the health check may come late
			why = "answers that pass through Kvlane and still run at the end of `drain` are cut, one for each client"
		}
		add(shape, shape == "standalone", fault{name: "Kvlane replaced", made: "SIGTERM, `drain` 2 s; another one is started after it has stopped", failed: failed, why: why, play: func(p *stage) {
			p.stopKvlane(syscall.SIGTERM)
			p.over()
			p.startKvlane()
		}})
		if shape == "gateway" {
			why = "Envoy keeps no copy of a body that it has sent to Kvlane: requests that Kvlane holds are answered 500, and running answers are cut, one for each client"
		}
		add(shape, shape != "sidecar", fault{name: "Kvlane stopped", made: "SIGSTOP for 8 s; `envoy.stall_timeout` is 2 s", failed: failed, why: why, stall: stallTimeout, slack: stallSlack, play: func(p *stage) {
			p.signal(syscall.SIGSTOP)
			p.lasts(stop, 2*loadClients)
			p.over()
			p.signal(syscall.SIGCONT)
		}})
	}
	other := func(p *stage, s syscall.Signal) {
		p.t.Helper()
		if err := p.replicas.cmds[1].Process.Signal(s); err != nil {
			p.t.Fatal(err)
		}
	}
	neither := func(b *bed) { b.replicas.noneBooked(0, 1) }
	add("replicas", false, fault{name: "one of two replicas killed", made: "SIGKILL; started again after 2 s", clear: neither, play: func(p *stage) {
		other(p, syscall.SIGKILL)
		_ = p.replicas.cmds[1].Wait()
		p.lasts(2*time.Second, 2*loadClients)
		p.over()
		p.replicas.start(1)
	}})
	add("replicas", false, fault{name: "one of two replicas stopped", made: "SIGSTOP for 8 s; `envoy.stall_timeout` is 2 s", stall: stallTimeout, slack: stallSlack, clear: neither, play: func(p *stage) {
		other(p, syscall.SIGSTOP)
		p.lasts(stop, 2*loadClients)
		p.over()
		other(p, syscall.SIGCONT)
	}})
	add("standalone", true, fault{name: "Kvlane out of descriptors", made: "RLIMIT_NOFILE at what is open; feeds are cut and 20 connections opened meanwhile, for 3 s", play: noDescriptors})
	add("standalone", false, fault{name: "Kvlane out of memory", made: "RLIMIT_DATA at what is mapped, and bodies of 15 MB until the process has ended; started again", stall: stop, memory: 192, play: noMemory})
	add("standalone", false, fault{name: "Kvlane out of memory in a cgroup", made: "8 MiB more than it uses in a memory cgroup, and bodies of 15 MB until the kernel has killed the process; started again with 512 MiB", skip: needsCgroups, stall: stop, memory: 192,
		setup: restarted((*bed).confine), clear: restarted(func(b *bed) { b.wrap, b.cgroup = nil, "" }), play: noMemory})
	add("standalone", false, fault{name: "disk full", made: "Kvlane's log is `/dev/full`; with these settings it writes no other file", setup: restarted(func(b *bed) { b.stderr = "/dev/full" }), clear: restarted(func(b *bed) { b.stderr = "" }), play: func(p *stage) { p.load.more(20*loadClients, true) }})
	add("standalone", true, fault{name: "configuration broken", made: "`kvlane.yaml` is garbage: `check` and `serve` refuse it; the running process gets SIGHUP", play: brokenConfig})
	var listed, named string
	add("standalone", false, fault{name: "worker list broken", made: "the watched file is cut in half, then empty, then gone, for 1 s each",
		setup: restarted(func(b *bed) { listed = b.listWorkers() }), clear: restarted(func(b *bed) { b.write("kvlane.yaml", listed) }), play: brokenList})
	add("standalone", false, fault{name: "DNS gone", made: "a worker's name leaves the hosts file, and DNS servers do not answer, for about 7 s", skip: needsRoot,
		setup: restarted(func(b *bed) { named = b.nameWorker() }), clear: restarted(func(b *bed) { b.write("kvlane.yaml", named); b.wrap = nil }), play: func(p *stage) {
			p.write("hosts", "127.0.0.1 localhost\n")
			p.until("the name is not resolved", func() bool { return strings.Contains(p.read("kvlane.log"), "name not resolved") })
			p.lasts(time.Second, 2*loadClients)
			p.over()
			p.write("hosts", "127.0.0.1 localhost engines.test\n")
		}})
	add("TLS", true, fault{name: "certificate rotated", made: "the files are replaced by a new certificate, then by garbage, then by a third one", setup: restarted(func(b *bed) {
		b.certify()
		b.write("kvlane.yaml", strings.Replace(b.read("kvlane.yaml"), `k.sock"}`, fmt.Sprintf(`k.sock", cert_file: %q, key_file: %q}`, b.file("cert.pem"), b.file("key.pem")), 1))
	}), play: rotated})
	var nats natsFault
	add("standalone", false, fault{name: "NATS lost", made: "two replicas share bookings through a NATS server, which is away until both have dropped the other, and 2 s more",
		setup: nats.setup, clear: nats.clear, play: nats.play})
	add("standalone", false, fault{name: "secret wrong", made: "a replica with another `index.key` asks for a copy of the index", play: wrongSecret})

	// Envoy.
	for _, shape := range []string{"standalone", "gateway"} {
		add(shape, true, fault{name: "Envoy killed", made: "SIGKILL, started again; clients whose connection is refused try again", failed: loadClients, why: accepted, play: func(p *stage) {
			if err := syscall.Kill(p.envoy.PID(), syscall.SIGKILL); err != nil {
				p.t.Fatal(err)
			}
			<-p.envoy.Done()
			p.over()
			p.startEnvoy()
		}})
	}
	add("sidecar", true, fault{name: "Envoy hot-restarted", made: "a second Envoy with the next restart epoch takes the listeners over; the first drains for 2 s. `kvlane demo` starts Envoy without hot restart",
		setup: func(b *bed) { b.epoch(0) }, play: func(p *stage) {
			old := p.epochs[0]
			p.epoch(1)
			select {
			case <-old:
			case <-time.After(time.Minute):
				p.t.Error("the first Envoy does not end")
			}
		}, clear: func(b *bed) { b.epochs = nil }})
	return all
}

// restarted makes a change while Kvlane is stopped.
func restarted(change func(b *bed)) func(b *bed) {
	return func(b *bed) {
		b.t.Helper()
		b.stopKvlane(syscall.SIGTERM)
		change(b)
		b.startKvlane()
	}
}

func needsRoot() string {
	if _, err := exec.LookPath("unshare"); err != nil || os.Geteuid() != 0 {
		return "needs root and unshare"
	}
	return ""
}

func (p *stage) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.kvlane.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// leavers lets clients leave for a time; it returns their number.
func (p *stage) leavers(d time.Duration, part float64, wait time.Duration, answer bool) int {
	p.t.Helper()
	var n atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for c := range loadClients {
		wg.Go(func() {
			for i := c; time.Now().Before(end); i++ {
				if err := p.depart(&p.load.prompts[i%len(p.load.prompts)], part, wait, answer); err != nil {
					p.t.Errorf("a client that leaves: %v", err)
					return
				}
				n.Add(1)
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	return int(n.Load())
}

func slowUploads(p *stage) {
	var wg sync.WaitGroup
	for c := range loadClients {
		wg.Go(func() {
			body := p.remember(chatBody(message{"user", fmt.Sprint("slow upload ", c)}))
			conn, err := net.Dial("tcp", p.ingress)
			if err != nil {
				p.t.Error(err)
				return
			}
			defer conn.Close()
			fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", len(body))
			go func() {
				for i := range body {
					if _, err := conn.Write(body[i : i+1]); err != nil {
						return
					}
					time.Sleep(200 * time.Millisecond)
				}
			}()
			_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
			answer := make([]byte, 64)
			n, err := conn.Read(answer)
			if !bytes.HasPrefix(answer[:n], []byte("HTTP/1.1 408")) {
				p.t.Errorf("got %q, %v, want status 408", answer[:n], err)
			}
		})
	}
	wg.Wait()
}

func slowReaders(p *stage) {
	var wg sync.WaitGroup
	for c := range 2 * loadClients {
		wg.Go(func() {
			conn, err := net.Dial("tcp", p.ingress)
			if err != nil {
				p.t.Error(err)
				return
			}
			defer conn.Close()
			if tcp, ok := conn.(*net.TCPConn); ok {
				_ = tcp.SetReadBuffer(4 << 10)
			}
			body := p.remember(fmt.Appendf(nil, `{"model":"demo","stream":true,"max_tokens":4000,"ignore_eos":true,"prompt":"slow reader %d"}`, c))
			fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			time.Sleep(6 * time.Second)
		})
	}
	wg.Wait()
}

func largeBodies(p *stage) {
	const size = 16<<20 - 1024
	padding := bytes.Repeat([]byte("0123456789abcde "), size/16)
	counts := map[int]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for c := range 20 {
		wg.Go(func() {
			body := p.remember(fmt.Appendf(nil, `{"model":"demo","max_tokens":4,"prompt":"large %d","ignored":"%s"}`, c, padding))
			r, _, err := exchange(p.load.http, "http://"+p.ingress+"/v1/completions", body)
			mu.Lock()
			defer mu.Unlock()
			counts[r.status]++
			if err != nil || r.status != http.StatusOK && (r.status != http.StatusServiceUnavailable || r.header.Get("Retry-After") == "") {
				p.t.Errorf("got status %d, %v, want 200, or 503 with Retry-After: %.200s", r.status, err, r.body)
			}
		})
	}
	wg.Wait()
	p.note = fmt.Sprintf("%d were answered 200, %d 503", counts[http.StatusOK], counts[http.StatusServiceUnavailable])
}

func manyStreams(p *stage) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		p.t.Fatal(err)
	}
	const wanted = 10_000
	if need := uint64(2*wanted + 1000); limit.Max < need { // root and CAP_SYS_RESOURCE may raise the hard limit
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: need, Max: need}); err == nil {
			limit.Max = need
		}
	}
	p.pools = 16                                 // Envoy opens one for about 1,000 streams, and keeps it
	streams := min(wanted, int(limit.Max)/2-500) // the engines' connections are in this process
	short := ""
	if streams < wanted {
		short = fmt.Sprintf(" (no more with an RLIMIT_NOFILE of %d, which cannot be raised: %d need %d)", limit.Max, wanted, 2*wanted+1000)
		p.t.Logf("only %d streams%s", streams, short)
	}
	if streams < wanted*9/10 {
		p.t.Fatalf("got room for %d streams%s: raise the hard limit (ulimit -Hn)", streams, short)
	}
	held := enginesim.Faults{HoldAfterTokens: 1}
	p.faults(held)
	p.process.set(p.t, held)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	h2 := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	defer h2.CloseIdleConnections()
	var begun, cut atomic.Int64
	var wg sync.WaitGroup
	body := p.remember([]byte(`{"model":"demo","stream":true,"max_tokens":4,"ignore_eos":true,"prompt":"one of many"}`))
	turn := make(chan struct{}, 64)
	for range streams {
		wg.Go(func() {
			turn <- struct{}{}
			resp, err := h2.Post("http://"+p.ingress+"/v1/completions", "application/json", bytes.NewReader(body))
			<-turn
			if err != nil {
				p.t.Error(err)
				return
			}
			defer resp.Body.Close()
			begun.Add(1)
			text, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != http.StatusOK || !bytes.Contains(text, []byte("[DONE]")) {
				cut.Add(1)
				p.t.Logf("not whole: status %d, %v, %d bytes that end in %q", resp.StatusCode, err, len(text), text[max(0, len(text)-200):])
			}
		})
	}
	p.until("all streams have begun", func() bool { return begun.Load() == int64(streams) || p.t.Failed() })
	p.note = fmt.Sprintf("%d streams%s, Kvlane's memory meanwhile %d MiB", streams, short, resident(p.t, p.kvlane.Process.Pid)>>20)
	p.over()
	p.faults(enginesim.Faults{})
	p.process.set(p.t, enginesim.Faults{})
	wg.Wait()
	if n := cut.Load(); n > 0 {
		p.t.Errorf("got %d streams that are not whole, want none", n)
	}
}

// noAnswers lets the first engine hang, and counts what it is sent once Kvlane suspects it: a rank may be tried with one request.
func noAnswers(p *stage) {
	const own = `worker="e0"`
	p.fault(enginesim.Faults{AnswerDelayMS: forever}, 0)
	clients, served := loadClients, p.load.now().Served
	p.until("one of its ranks is suspect", func() bool {
		// The clients may all wait for this engine before it is suspect, and it is judged when further requests are served.
		time.Sleep(200 * time.Millisecond)
		was := served
		if served = p.load.now().Served; served == was {
			p.load.client(clients)
			clients++
		}
		return p.metric("kvlane_suspect_target", own) > 0
	})
	p.lasts(2*time.Second, loadClients) // the others are then, too, if they got a request
	sent, all := p.metric("kvlane_picks_total", own), p.metric("kvlane_picks_total")
	p.lasts(3*time.Second, 2*loadClients)
	if n := p.metric("kvlane_worker_ready", own); n != 1 {
		p.t.Errorf("got %v ready workers of the name, want 1: its health checks are answered", n)
	}
	sent, all = p.metric("kvlane_picks_total", own)-sent, p.metric("kvlane_picks_total")-all
	p.over()
	p.fault(enginesim.Faults{}, 0)
	p.note = fmt.Sprintf("%.0f of %.0f requests were sent to it after that", sent, all)
	p.t.Logf("%d further clients began, as all before waited", clients-loadClients)
	if sent > float64(p.shape.ranks) {
		p.t.Errorf("got %.0f of %.0f requests sent to a suspect engine, want at most one for each rank", sent, all)
	}
}

func floodEvents(p *stage) {
	p.fault(enginesim.Faults{RepeatBatches: 2000}, 0)
	ids := make([]int, 2048)
	end := time.Now().Add(4 * time.Second)
	before := p.metric("kvlane_feed_blocks_total")
	for n := 0; time.Now().Before(end); n++ {
		for i := range ids {
			ids[i] = 1000 + (i*7+n*13+n)%50_000
		}
		body, err := json.Marshal(map[string]any{"model": modelName, "prompt": ids, "max_tokens": 1})
		if err != nil {
			p.t.Fatal(err)
		}
		resp, err := http.Post(p.engines[1].URL()+"/v1/completions", "application/json", bytes.NewReader(p.remember(body)))
		if err != nil {
			p.t.Fatal(err)
		}
		resp.Body.Close()
	}
	p.over()
	p.fault(enginesim.Faults{}, 0)
	p.note = fmt.Sprintf("%.0f blocks in events", p.metric("kvlane_feed_blocks_total")-before)
}

// restrict sets a limit of Kvlane's process, and returns what it was.
func (p *stage) restrict(resource int, limit uint64) (was uint64) {
	p.t.Helper()
	var old unix.Rlimit
	if err := unix.Prlimit(p.kvlane.Process.Pid, resource, nil, &old); err != nil {
		p.t.Fatal(err)
	}
	if err := unix.Prlimit(p.kvlane.Process.Pid, resource, &unix.Rlimit{Cur: limit, Max: old.Max}, nil); err != nil {
		p.t.Fatal(err)
	}
	return old.Cur
}

func noDescriptors(p *stage) {
	was := p.restrict(unix.RLIMIT_NOFILE, uint64(descriptors(p.t, p.kvlane.Process.Pid)))
	for _, e := range p.engines {
		e.Disconnect()
	}
	for range 20 {
		conn, err := net.Dial("unix", p.file("k.sock"))
		if err != nil {
			p.t.Error(err)
			continue
		}
		defer conn.Close()
	}
	p.lasts(3*time.Second, 2*loadClients)
	p.over()
	p.restrict(unix.RLIMIT_NOFILE, was)
}

// memoryCgroup is the folder of memory cgroups, and the file of a cgroup's limit.
func memoryCgroup() (root, limit string) {
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err == nil {
		return "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	}
	return "/sys/fs/cgroup", "memory.max"
}

func needsCgroups() string {
	root, limit := memoryCgroup()
	dir, err := os.MkdirTemp(root, "kvlane-")
	if err == nil {
		defer os.Remove(dir)
		_, err = os.Stat(filepath.Join(dir, limit))
	}
	if err != nil {
		return "needs root and memory cgroups"
	}
	return ""
}

// confine lets Kvlane run in a memory cgroup of its own.
func (b *bed) confine() {
	b.t.Helper()
	root, _ := memoryCgroup()
	dir, err := os.MkdirTemp(root, "kvlane-")
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = os.Remove(dir) })
	b.cgroup = dir
	b.wrap = []string{"sh", "-c", fmt.Sprintf(`echo $$ > %s/cgroup.procs && exec "$0" "$@"`, dir)}
}

// noMemory lets Kvlane end for lack of memory: in its cgroup, or at what it has mapped.
func noMemory(p *stage) {
	if p.cgroup == "" {
		p.limitData()
	} else {
		p.limitMemory(p.memoryUsed() + 8<<20)
	}
	body := p.remember(fmt.Appendf(nil, `{"model":"demo","max_tokens":4,"prompt":"large","ignored":"%s"}`, bytes.Repeat([]byte("0123456789abcde "), 15<<16)))
	ended := make(chan struct{})
	var wg sync.WaitGroup
	for range loadClients {
		wg.Go(func() {
			for {
				select {
				case <-ended:
					return
				default:
					_, _, _ = exchange(p.load.http, "http://"+p.ingress+"/v1/completions", body)
				}
			}
		})
	}
	select {
	case err := <-p.exited:
		p.note = fmt.Sprintf("Kvlane ended: %v", err)
	case <-time.After(time.Minute):
		p.t.Error("got a Kvlane that survives, want it to end for lack of memory")
		p.stopKvlane(syscall.SIGKILL)
	}
	close(ended)
	wg.Wait()
	p.lasts(0, 2*loadClients)
	p.over()
	if p.cgroup != "" {
		p.limitMemory(512 << 20)
	}
	p.startKvlane()
}

// limitMemory sets the limit of Kvlane's cgroup.
func (b *bed) limitMemory(bytes int64) {
	b.t.Helper()
	_, limit := memoryCgroup()
	if err := os.WriteFile(filepath.Join(b.cgroup, limit), fmt.Append(nil, bytes), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// memoryUsed is what Kvlane's cgroup uses, in bytes.
func (b *bed) memoryUsed() (n int64) {
	b.t.Helper()
	_, limit := memoryCgroup()
	name := map[string]string{"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}[limit]
	text, err := os.ReadFile(filepath.Join(b.cgroup, name))
	if err == nil {
		_, err = fmt.Sscan(string(text), &n)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// limitData bounds the data of Kvlane's process at what is mapped.
func (p *stage) limitData() {
	p.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.kvlane.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	_, data, _ := strings.Cut(string(text), "VmData:")
	var kib uint64
	if _, err := fmt.Sscan(data, &kib); err != nil {
		p.t.Fatal(err)
	}
	p.restrict(unix.RLIMIT_DATA, kib<<10)
}

func brokenConfig(p *stage) {
	good := p.read("kvlane.yaml")
	p.write("kvlane.yaml", good[:len(good)/2]+"{garbage")
	for _, command := range []string{"check", "serve"} {
		ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
		out, err := exec.CommandContext(ctx, kvlaneBinary, command, "--config", p.file("kvlane.yaml")).CombinedOutput()
		if cancel(); err == nil || ctx.Err() != context.Canceled || !strings.Contains(string(out), "kvlane.yaml") {
			p.t.Errorf("%s: got %v, want an error with the file's name: %s", command, err, out)
		}
	}
	rejected := func() float64 { return p.metric("kvlane_config_reloads_total", `result="rejected"`) }
	before := rejected()
	p.signal(syscall.SIGHUP)
	p.until("the running process rejects the configuration", func() bool { return rejected() > before })
	p.lasts(0, 4*loadClients)
	p.over()
	p.write("kvlane.yaml", good)
}

// listWorkers moves the list of workers into a watched file, and returns the configuration
// as it was.
func (b *bed) listWorkers() string {
	b.t.Helper()
	was := b.read("kvlane.yaml")
	head, list, _ := strings.Cut(was, "  static:\n")
	b.write("workers.yaml", strings.ReplaceAll(list, "  - {name", "- {name"))
	b.write("kvlane.yaml", head+"  file: "+b.file("workers.yaml")+"\n")
	return was
}

func brokenList(p *stage) {
	good := p.read("workers.yaml")
	for _, text := range []string{good[:len(good)/2], ""} {
		p.write("workers.yaml", text)
		p.lasts(time.Second, 2*loadClients)
	}
	if err := os.Remove(p.file("workers.yaml")); err != nil {
		p.t.Fatal(err)
	}
	p.lasts(time.Second, 2*loadClients)
	if n := p.metric("kvlane_worker_ready"); n != 3 {
		p.t.Errorf("got %v workers, want 3", n)
	}
	p.over()
	p.write("workers.yaml", good)
}

// nameWorker lets the name of a worker be resolved by files of its own, and returns the
// configuration as it was.
func (b *bed) nameWorker() string {
	b.t.Helper()
	was := b.read("kvlane.yaml")
	line := b.process.line
	address := strings.SplitN(line, `"`, 3)[1]
	settings := strings.Replace(line[strings.Index(line, "{"):], fmt.Sprintf("address: %q, ", address), "", 1)
	settings = strings.ReplaceAll(strings.TrimSpace(settings), "tcp://127.0.0.1", "tcp://$ip")
	_, port, _ := strings.Cut(address, ":")
	b.write("kvlane.yaml", strings.Replace(was, line, fmt.Sprintf("  dns:\n  - {name: engines.test, port: %s, every: 200ms, worker: %s}\n", port, settings), 1))
	b.write("hosts", "127.0.0.1 localhost engines.test\n")
	b.write("resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
	b.wrap = []string{"unshare", "-m", "sh", "-c", fmt.Sprintf(`mount --bind %s /etc/hosts && mount --bind %s /etc/resolv.conf && exec "$0" "$@"`, b.file("hosts"), b.file("resolv.conf"))}
	return was
}

// certify writes a new certificate and its key, and returns it.
func (b *bed) certify() []byte {
	b.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"kvlane"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		b.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		b.t.Fatal(err)
	}
	b.write("key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
	b.write("cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	return der
}

func rotated(p *stage) {
	serves := func(want []byte) {
		p.t.Helper()
		conn, err := tls.Dial("unix", p.file("k.sock"), &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}})
		if err != nil {
			p.t.Fatal(err)
		}
		defer conn.Close()
		if got := conn.ConnectionState().PeerCertificates[0].Raw; !bytes.Equal(got, want) {
			p.t.Error("got another certificate, want the last good one")
		}
	}
	second := p.certify()
	serves(second)
	p.lasts(0, 2*loadClients)
	p.write("cert.pem", "garbage")
	serves(second)
	p.lasts(0, 2*loadClients)
	serves(p.certify())
}

func wrongSecret(p *stage) {
	first := freeAddress(p.t)
	p.replica("first", first, freeAddress(p.t))
	text := strings.Replace(p.read("first.yaml"), "key: shared", "key: wrong", 1)
	at := strings.Index(text, "addresses: [")
	p.write("wrong.yaml", text[:at]+fmt.Sprintf("addresses: [%q]", first)+text[at+strings.Index(text[at:], "]")+1:])
	admin := freeAddress(p.t)
	log, err := os.Create(p.file("wrong.log"))
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	wrong := exec.Command(kvlaneBinary, "serve", "--config", p.file("wrong.yaml"), "--listen", freeAddress(p.t), "--admin", admin)
	wrong.Stderr = log
	wrong.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := wrong.Start(); err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = wrong.Process.Kill(); _ = wrong.Wait() }()
	p.until("the replica with another key serves", func() bool {
		resp, err := http.Get("http://" + admin + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if text := p.read("wrong.log"); !strings.Contains(text, "the index starts empty") {
		p.t.Errorf("got a log without a word on the empty start: %s", text)
	}
}

// natsFault is the server that two replicas share bookings through.
type natsFault struct {
	server *server.Server
	port   int
	other  *bed // the second replica: only its admin address
	plain  string
}

func (n *natsFault) start(b *bed) {
	b.t.Helper()
	var err error
	if n.server, err = server.NewServer(&server.Options{Host: "127.0.0.1", Port: n.port, NoSigs: true, NoLog: true}); err != nil {
		b.t.Fatal(err)
	}
	n.server.Start()
	if !n.server.ReadyForConnections(time.Minute) {
		b.t.Fatal("got no NATS server, want one")
	}
}

func (n *natsFault) stop() {
	n.server.Shutdown()
	n.server.WaitForShutdown()
}

func (n *natsFault) setup(b *bed) {
	b.t.Helper()
	var err error
	if n.port, err = enginesim.FreePorts(1); err != nil {
		b.t.Fatal(err)
	}
	n.start(b)
	n.plain = b.read("kvlane.yaml")
	b.write("kvlane.yaml", n.plain+fmt.Sprintf("index: {key: shared}\nfleet: {mode: external, external: {url: \"nats://127.0.0.1:%d\"}}\n", n.port))
	restarted(func(*bed) {})(b)
	own := b.read("kvlane.yaml")
	b.write("kvlane.yaml", strings.Replace(own, "index: {key: shared}\n", "", 1)) // replica has it too
	n.other = &bed{t: b.t, admin: b.replica("other", freeAddress(b.t), freeAddress(b.t))}
	b.write("kvlane.yaml", own)
	n.replicas(b, 2)
}

// replicas waits until both replicas see count of them.
func (n *natsFault) replicas(b *bed, count float64) {
	b.t.Helper()
	b.until(fmt.Sprintf("the replicas see %v", count), func() bool {
		return b.metric("kvlane_replicas") == count && n.other.metric("kvlane_replicas") == count
	})
}

func (n *natsFault) play(p *stage) {
	p.until("the other replica knows bookings", func() bool { return n.other.metric("kvlane_reservations") > 0 })
	n.stop()
	n.replicas(p.bed, 1)
	p.lasts(2*time.Second, 2*loadClients)
	p.over()
	n.start(p.bed)
	n.replicas(p.bed, 2)
}

func (n *natsFault) clear(b *bed) {
	b.t.Helper()
	b.until("the other replica has no booking", func() bool { return n.other.metric("kvlane_reservations") == 0 })
	restarted(func(b *bed) { b.write("kvlane.yaml", n.plain) })(b)
	n.stop()
}

// epoch starts an Envoy that can be hot-restarted, or the next one, and waits until it is
// ready. The bed's Envoy ends before the first.
func (b *bed) epoch(n int) {
	b.t.Helper()
	if n == 0 {
		b.envoy.Stop()
	}
	log, err := os.OpenFile(b.file("envoy.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		b.t.Fatal(err)
	}
	defer log.Close()
	_, port, _ := strings.Cut(b.envoyAdmin, ":")
	cmd := exec.Command(envoyBinary, "-c", b.file("envoy.yaml"), "--base-id", port, "--restart-epoch", fmt.Sprint(n),
		"--drain-time-s", "2", "--parent-shutdown-time-s", "3", "--concurrency", "2", "-l", "warning")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	b.epochs = append(b.epochs, done)
	b.t.Cleanup(func() { _ = cmd.Process.Kill(); <-done })
	b.until("the Envoy of this epoch is ready", func() bool {
		resp, err := http.Get("http://" + b.envoyAdmin + "/server_info")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		var info struct {
			State   string `json:"state"`
			Options struct {
				Epoch int `json:"restart_epoch"`
			} `json:"command_line_options"`
		}
		return json.NewDecoder(resp.Body).Decode(&info) == nil && info.State == "LIVE" && info.Options.Epoch == n
	})
}

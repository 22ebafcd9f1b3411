package simulate

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// mutants are bugs that the simulation must find: old is replaced by new in a file of the product. Those that are quick
// are planted in `make test` too, the others in `make simulate`.
var mutants = []struct {
	name, file, old, new string
	test                 string
	quick                bool
}{
	{
		"a stale id releases another booking", "routing/ledger.go",
		"reservation{serial: l.slab[i].serial + 1}", "reservation{serial: l.slab[i].serial}", "TestCore", false,
	},
	{
		"the first token books again", "routing/ledger.go",
		"r.apply(res, -1)\n\tres.Phase = next", "res.Phase = next", "TestCore", true,
	},
	{
		"bookings of a removed target load the next one in its slot", "routing/target.go",
		"*t = target{gen: t.gen + 1}", "*t = target{gen: t.gen}", "TestCore", false,
	},
	{
		"a replica that leaves keeps its bookings", "internal/replicas/peer.go",
		"range slices.Sorted(maps.Keys(p.ledger)) {", "range slices.Sorted(maps.Keys(p.incoming)) {", "TestReplicas", false,
	},
	{
		"remote bookings do not expire", "routing/remote.go",
		"if res.remote.expires > now {", "if res.remote.expires > 0 {", "TestCore", false,
	},
	{
		"failing targets stay suspect", "routing/suspect.go",
		"t.health.Failures, t.health.Blamed = 0, party{}", "_ = t", "TestCore", false,
	},
	{
		"targets whose answers broke off stay suspect", "routing/suspect.go",
		"t.health.Broken = 0", "_ = t", "TestCore", false,
	},
	{
		"a turn that overflows takes its conversation along", "routing/sticky.go",
		"d.out.keepBinding = true", "d.out.keepBinding = false", "TestCore", false,
	},
	{
		"the record of a decision forgets the order of shared blocks", "routing/state.go",
		"c.arrange(node)", "_ = node", "TestCore", false,
	},
	{
		"the queue loses waiters that stay", "routing/queue.go",
		"default:\n\t\t\tclosed = l", "default:\n\t\t\tq.remove(w)\n\t\t\tclosed = l", "TestCore", false,
	},
	{
		"a gap is forgotten", "kvindex/feed/machine.go",
		"m.enter(Gap, Lost)\n\t\tm.lose(seq - m.next)", "m.enter(Gap, Lost)", "TestCore", true,
	},
	{
		"a snapshot continues with any engine", "kvindex/feed/machine.go",
		"case seq == last && m.isRecent(seq, payload):", "case seq == last:", "TestCore", false,
	},
	{
		"a replay does not verify the engine", "kvindex/feed/machine.go",
		"if m.verifying = m.started; m.started {\n\t\tfrom = m.next - 1", "if m.started {\n\t\tfrom = m.next", "TestCore", false,
	},
	{
		"a batch that was replayed is applied again when it arrives", "kvindex/feed/machine.go",
		"if m.cfg.Replay || m.isRecent(seq, payload) {\n\t\t\tm.counts.Duplicates++",
		"if m.cfg.Replay || m.isRecent(seq, payload) {\n\t\t\tm.apply(seq, payload)", "TestCore", false,
	},
	{
		"credit stays after its target was removed", "kvindex/index.go",
		"dropping = true\n\tfor x.clearStep(s) {", "dropping = true\n\tfor false {", "TestCore", false,
	},
	{
		"credit of a refused prompt stays", "kvindex/speculate.go",
		"x.unclaim(number, taken)", "_ = taken", "TestCore", false,
	},
	{
		"freed capacity is not given to those who wait", "internal/decide/pick.go",
		"change(d.router, now)\n\td.placeWaiting(now, false)", "change(d.router, now)", "TestRequests", true,
	},
	{
		"a request whose client left the queue stays in it", "internal/decide/wait.go",
		"if d.waiting.queue.Remove(q.id) {\n\t\tdelete(d.waiting.byID, q.id)\n", "if _, in := d.waiting.byID[q.id]; in {\n", "TestRequests", false,
	},
	{
		"a place for a client that is gone stays booked", "internal/decide/pick.go",
		"if ctx.Err() != nil { // placed at the moment its client disconnected\n\t\tw.release(&p.plan)", "if ctx.Err() != nil {", "TestRequests", false,
	},
	{
		"a failed answer is not released", "internal/decide/ticket.go",
		"\t\tr.Release(now, t.reservation)\n",
		"\t\tif t.entry.Succeeded() {\n\t\t\tr.Release(now, t.reservation)\n\t\t}\n", "TestRequests", false,
	},
	{
		"a replica does not see that messages of another are missing", "internal/replicas/peer.go",
		"case m.GetSeq() == p.seq+1:", "case m.GetSeq() > p.seq:", "TestReplicas", false,
	},
	{
		"a replica that is silent stays", "internal/replicas/core.go",
		"case now-p.heard > silence &&", "case now-p.heard > rememberFor &&", "TestReplicas", false,
	},
	{
		"the binding that arrives last wins", "internal/replicas/peer.go",
		"case got.before(b.version):", "case got != b.version:", "TestReplicas", false,
	},
	{
		"a state does not end the bookings that it lacks", "internal/replicas/peer.go",
		"if _, ok := p.incoming[id]; !ok {", "if _, ok := p.incoming[id]; !ok && id == 0 {", "TestReplicas", false,
	},
	{
		"a message that an attacker recorded counts as new", "internal/replicas/peer.go",
		"case r != nil, p.number != 0 && m.GetNumber() <= p.number:", "case r != nil:", "TestReplicas", false,
	},
	{
		"an answer that stopped is not requested again", "internal/replicas/core.go",
		"case p.request != 0 && now-p.asked > askAgain:", "case p.request != 0 && now-p.asked > rememberFor:", "TestReplicas", false,
	},
	{
		"bookings for a worker that comes later are forgotten", "internal/replicas/core.go",
		"func (c *Core) Added(kvindex.Target) { c.retry = true }", "func (c *Core) Added(kvindex.Target) {}", "TestReplicas", false,
	},
}

// TestMutants plants bugs in the product and expects the simulation to find each. It fails too if the line to change is
// no longer there.
func TestMutants(t *testing.T) {
	if raceDetector {
		t.Skip("the simulation has one goroutine: the race detector finds nothing in it")
	}
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range mutants {
		source, err := os.ReadFile(filepath.Join(root, m.file))
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(source), m.old); n != 1 { // of all of them, whether planted now or not
			t.Errorf("%s: got %q %d times in %s, want it once: plant the bug where its code is now", m.name, m.old, n, m.file)
			continue
		}
		if !m.quick && os.Getenv("MUTANTS") != "all" {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			file, folder := filepath.Join(root, m.file), t.TempDir()
			changed, overlay, binary := filepath.Join(folder, "changed.go"), filepath.Join(folder, "overlay.json"), filepath.Join(folder, "simulate.test")
			list, err := json.Marshal(map[string]map[string]string{"Replace": {file: changed}})
			if err != nil {
				t.Fatal(err)
			}
			for name, content := range map[string]string{changed: strings.Replace(string(source), m.old, m.new, 1), overlay: string(list)} {
				if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			build := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", overlay, "-o", binary, ".")
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("the mutant does not build: %v\n%s", err, out)
			}
			run := exec.CommandContext(t.Context(), binary, "-test.run", "^"+m.test+"$")
			shrinks := i == 1
			run.Env = append(os.Environ(), "SEED=", "SEEDS=2000", "SHRINK=0")
			if shrinks {
				run.Env = append(run.Env, "SHRINK=500")
			}
			out, err := run.CombinedOutput()
			found := regexp.MustCompile(`seed (\d+) breaks the law (".*?"):.*\n.*\((\d+) operations\)`).FindSubmatch(out)
			if err == nil || found == nil {
				t.Fatalf("got no broken law in 2000 seeds, want one:\n%s", out)
			}
			t.Logf("seed %s breaks the law %s", found[1], found[2])
			if n, _ := strconv.Atoi(string(found[3])); shrinks && n > 10 {
				t.Errorf("got a history of %d operations after shrinking, want at most 10:\n%s", n, out)
			}
		})
	}
}

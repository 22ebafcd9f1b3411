//go:build linux

package k8s

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// converse plays conversations until stop is called, which returns the targets of each and
// what failed. Their turns arrive at any replica: their ids are in the body, where Envoy does
// not see them.
func converse(ctx context.Context, chat string, conversations int) (stop func() (targets []map[string]int, failures []string)) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var failures []string
	targets := make([]map[string]int, conversations)
	for i := range conversations {
		targets[i] = map[string]int{}
		wg.Go(func() {
			for turn := 0; ctx.Err() == nil; turn++ {
				body := chatBody("demo", essay(fmt.Sprint("conversation ", i), 30)+fmt.Sprint(turn), false)
				body = append([]byte(fmt.Sprintf(`{"session_id": "talk-%d", `, i)), body[1:]...)
				r, err := post(context.WithoutCancel(ctx), chat, body)
				mu.Lock()
				if err != nil || r.status != http.StatusOK {
					failures = append(failures, fmt.Sprintf("%s conversation %d: %d %.200s %v", time.Now().Format("15:04:05.000"), i, r.status, r.body, err))
				} else if r.target != "" { // without one, the replica died or drained before the answer began
					targets[i][r.target]++
				}
				mu.Unlock()
			}
		})
	}
	return func() ([]map[string]int, []string) {
		cancel()
		wg.Wait()
		return targets, failures
	}
}

// dropped lists how long replicas had been silent when this one dropped them, in seconds, and when it wrote that.
func (s *sandbox) dropped(t *testing.T) (silent []float64, at time.Time) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dir, "kvlane.log"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var entry struct {
			Time   time.Time `json:"time"`
			Silent float64   `json:"silent_seconds"`
		}
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Silent > 0 {
			silent, at = append(silent, entry.Silent), entry.Time
		}
	}
	return silent, at
}

// replicasShare installs replicas that route as one, and replaces, scales and kills them under load. No request
// fails, no conversation is bound anew, and what is gone is forgotten.
func replicasShare(t *testing.T, c *cluster) {
	r := &release{c: c, in: "chart-fleet", values: append(slices.Clone(ownEnvoy), "mode=standalone", "config.routing.preset=session")}
	c.namespace(t, r.in)
	c.ready(t, r.in, "llm", 2)
	r.put(t, "install")
	secret := func() string {
		return c.kubectl(t, "", "-n", r.in, "get", "secret", "kvlane-fleet", "-o", "jsonpath={.data}")
	}
	made := secret()
	chat := c.service(t, r.in, "kvlane") + "/v1/chat/completions"
	routed(t, chat)
	// share waits until n replicas know of n; the dead one is not asked.
	var dead *sandbox
	share := func(n int) {
		t.Helper()
		eventually(t, reasonable, fmt.Sprintf("%d replicas that share", n), func() error {
			alive := 0
			for _, s := range c.node.pickers(r.in) {
				if s == dead {
					continue
				}
				known, connected := s.metric(t, "kvlane_replicas"), s.metric(t, "kvlane_replicas_connected")
				if known != float64(n) || connected != 1 {
					return fmt.Errorf("%s knows %v, connected: %v", s.pod.Metadata.Name, known, connected)
				}
				alive++
			}
			if alive != n {
				return fmt.Errorf("%d are alive", alive)
			}
			return nil
		})
	}
	scale := func(n int) {
		t.Helper()
		c.kubectl(t, "", "-n", r.in, "scale", "deployment/kvlane", fmt.Sprint("--replicas=", n))
		c.ready(t, r.in, "kvlane", n)
		r.settled(t)
		share(n)
	}
	share(2)
	stop := converse(t.Context(), chat, 6)
	c.kubectl(t, "", "-n", r.in, "rollout", "restart", "deployment/kvlane")
	c.ready(t, r.in, "kvlane", 2)
	r.settled(t)
	share(2)
	scale(1)
	scale(3)
	// One dies without a word, and is listed on: the others forget it, Envoy asks them.
	dead = c.node.pickers(r.in)[0]
	dead.freeze()
	dead.kill()
	killed := time.Now()
	share(2)
	// By the clocks of the others, which a machine that stalls makes wait too: the bound of 3 s is tested in internal/replicas.
	for _, s := range c.node.pickers(r.in) {
		if s == dead {
			continue
		}
		silent, at := s.dropped(t)
		if len(silent) == 0 || slices.Max(silent) > 10 {
			t.Errorf("%s: got replicas dropped after %v seconds, want the killed one, after at most 10", s.pod.Metadata.Name, silent)
		}
		t.Logf("%s: dropped the killed one %s after the kill, after %v s of silence", s.pod.Metadata.Name, at.Sub(killed).Round(time.Millisecond), silent)
	}
	c.kubectl(t, "", "-n", r.in, "delete", "pod", dead.pod.Metadata.Name, "--wait=false")
	r.settled(t)
	c.ready(t, r.in, "kvlane", 3)
	share(3) // the deployment may count the dead one as ready until its place is taken
	scale(2)
	targets, failures := stop()
	if len(failures) > 0 {
		t.Errorf("%d requests failed, e.g. %q", len(failures), failures[:min(len(failures), 8)])
	}
	for i, at := range targets {
		t.Logf("conversation %d: %v", i, at)
		if len(at) != 1 {
			t.Errorf("conversation %d was answered by %v, want one target", i, at)
		}
	}
	c.nothingBooked(t, r.in)
	r.put(t, "upgrade", "config.log.level=debug")
	if after := secret(); after != made {
		t.Error("an upgrade made another secret")
	}
	share(2)
	r.end(t)
}

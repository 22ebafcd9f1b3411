package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// member is a replica of Kvlane, a process of its own that may be killed.
type member struct {
	file, admin string
	cmd         *exec.Cmd
	done        chan struct{} // closed when the process has ended
}

// startMembers starts n replicas, whose ext_proc, fleet and admin ports are free ones.
func (d *demo) startMembers(n int, yaml func(listen, admin, more string) string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	port, err := enginesim.FreePorts(3 * n)
	if err != nil {
		return err
	}
	var extProc, fleet []string
	for i := range n {
		extProc = append(extProc, fmt.Sprintf(`"127.0.0.1:%d"`, port+i))
		fleet = append(fleet, fmt.Sprintf(`"127.0.0.1:%d"`, port+n+i))
	}
	for i := range n {
		m := &member{file: filepath.Join(d.dir, fmt.Sprintf("kvlane-%d.yaml", i+1)), admin: fmt.Sprintf("127.0.0.1:%d", port+2*n+i), done: make(chan struct{})}
		more := fmt.Sprintf("limits: {decision_timeout: 10s}\nrouting: {preset: session}\nindex: {key: demo}\nfleet: {mode: embedded, name: demo, replica: kvlane-%d, embedded: {listen: %s, routes: [%s]}}\n", i+1, fleet[i], strings.Join(fleet, ", "))
		text := yaml(strings.Trim(extProc[i], `"`), m.admin, more)
		text = strings.Replace(text, "\nenvoy: {", "\nenvoy: {stall_timeout: 20s, replicas: ["+strings.Join(extProc, ", ")+"], ", 1)
		if err := os.WriteFile(m.file, []byte(text), 0o600); err != nil {
			return err
		}
		log, err := os.Create(strings.TrimSuffix(m.file, ".yaml") + ".log")
		if err != nil {
			return err
		}
		m.cmd = exec.Command(self, "serve", "--config", m.file)
		m.cmd.Stderr = log
		// As for Envoy: Ctrl-C reaches only this process, and the kernel kills them if it dies.
		m.cmd.SysProcAttr = envoy.Child()
		err = m.cmd.Start()
		log.Close()
		if err != nil {
			return err
		}
		d.members = append(d.members, m)
		go func() {
			_ = m.cmd.Wait()
			close(m.done)
		}()
	}
	return nil
}

// kill ends a replica without a shutdown.
func (m *member) kill() {
	_ = m.cmd.Process.Kill()
	<-m.done
}

// notReady returns the reason for which a replica is not ready, "" if it is.
func (m *member) notReady() string {
	select {
	case <-m.done:
		return "it has ended; its log is " + strings.TrimSuffix(m.file, ".yaml") + ".log"
	default:
	}
	if _, err := health(context.Background(), "http://"+m.admin+"/readyz", 3*time.Second); err != nil {
		return err.Error()
	}
	return ""
}

// welcomeFleet prints how to kill replicas.
func (d *demo) welcomeFleet(self string) {
	w := d.io.out
	fmt.Fprint(w, `
Send turns of a conversation in another terminal; each is 200, and from one rank, whichever replicas are alive:

while sleep 0.3; do curl -s -o /dev/null -w '%{http_code} %header{x-kvlane-target}\n' http://`, d.config.Envoy.Ingress, `/v1/chat/completions \
  -H 'content-type: application/json' -H 'x-session-id: me' -d '{"model": "`, demoModel, `", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}'; done

Kill replicas meanwhile, one by one, and start them again:
`)
	for i, m := range d.members {
		fmt.Fprintf(w, "  %d  kill -9 %-7d  %s serve --config %s &   (admin http://%s)\n", i+1, m.cmd.Process.Pid, self, m.file, m.admin)
	}
	fmt.Fprintln(w, "\nThe page, top and explain above show replica 1; --admin names another one's port. Stop what you have started yourself.")
}

// checkFleet plays conversations while all replicas but one are killed, one after the other.
// No request may fail, and no conversation may change its rank.
func (d *demo) checkFleet(ctx context.Context) error {
	const conversations = 9
	var mu sync.Mutex
	ranks := map[int]map[string]int{} // turns by rank, of each conversation
	unrouted, turns := 0, 0
	var failed error
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	for n := range conversations {
		ranks[n] = map[string]int{}
		wg.Go(func() {
			messages := []map[string]string{{"role": "user", "content": fmt.Sprintf("Reader %d. %s", n, demoSystem)}}
			for ctx.Err() == nil {
				t, err := d.chat(ctx, messages, fmt.Sprint("reader-", n))
				if ctx.Err() != nil {
					return
				}
				mu.Lock()
				turns++
				switch {
				case errors.Is(err, errNotRouted):
					unrouted++
				case err != nil:
					failed = errors.Join(failed, fmt.Errorf("conversation %d: %w", n+1, err))
				default:
					ranks[n][t.Target]++
				}
				mu.Unlock()
				if len(messages) < 9 && err == nil {
					messages = append(messages, map[string]string{"role": "assistant", "content": t.Text}, map[string]string{"role": "user", "content": "And then?"})
				}
			}
		})
	}
	// since returns once every conversation has had that number of further turns.
	since := func(more int) error {
		count := func(n int) (sum int) {
			mu.Lock()
			defer mu.Unlock()
			for _, c := range ranks[n] {
				sum += c
			}
			return sum
		}
		for n := range conversations {
			for want := count(n) + more; count(n) < want; time.Sleep(10 * time.Millisecond) {
				if ctx.Err() != nil {
					return fmt.Errorf("conversation %d is not answered any more: %w", n+1, context.Cause(ctx))
				}
			}
		}
		return nil
	}
	err := since(3)
	for i, m := range d.members[1:] {
		if err == nil {
			m.kill()
			mu.Lock()
			fmt.Fprintf(d.io.out, "replica %d is killed, %d requests so far\n", i+2, turns)
			mu.Unlock()
			err = since(3)
		}
	}
	stop()
	wg.Wait()
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	for n := range conversations {
		if len(ranks[n]) != 1 {
			return fmt.Errorf("conversation %d changed its rank: %v", n+1, ranks[n])
		}
	}
	fmt.Fprintf(d.io.out, "demo check passed: %d requests in %d conversations, none failed and each conversation stayed on its rank while %d of %d replicas were killed; "+
		"%d answers have no headers of Kvlane, as their replica died before they began\n", turns, conversations, len(d.members)-1, len(d.members), unrouted)
	return nil
}

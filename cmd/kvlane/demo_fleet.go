package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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

// startMembers starts the replicas, whose ext_proc, fleet and admin ports are free ones.
func (d *demo) startMembers() error {
	n := d.replicas
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
		text := d.yaml(strings.Trim(extProc[i], `"`), m.admin) + more
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

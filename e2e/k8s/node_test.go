//go:build linux

package k8s

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const nodeName = "node-1"

// node is kubelet, scheduler, kube-proxy, load balancer and DNS in one: it looks at
// all pods and Services many times a second and makes real what it sees.
type node struct {
	c      *cluster
	client *api
	kvlane string
	envoy  string
	ctx    context.Context
	wg     sync.WaitGroup
	host   int // our own network namespace

	// headerOnly has endpoint pickers of conformance tests be ones that set no
	// metadata: the negative control.
	headerOnly atomic.Bool

	mu      sync.Mutex
	running map[string]*sandbox // by UID
	next    int
	names   map[string][]string // addresses of Services

	proxied map[string]*clusterService // by address; the node's own goroutine's
}

// sandbox is a pod that runs.
type sandbox struct {
	n     *node
	pod   pod
	dir   string
	ip    string
	ns    string
	fd    int
	stops []func()
	procs []*exec.Cmd
	dead  map[*exec.Cmd]chan struct{}
	// preStop is how many seconds a process is left alone before it is told to stop.
	preStop map[*exec.Cmd]int
	going   bool
	// frozen pods keep the status that they have.
	frozen atomic.Bool
}

func startNode(t *testing.T, c *cluster) *node {
	n := &node{c: c, client: c.client, kvlane: os.Getenv("KVLANE_BIN"), running: map[string]*sandbox{}, proxied: map[string]*clusterService{}}
	var err error
	if n.envoy, err = filepath.EvalSymlinks(os.Getenv("ENVOY")); err != nil {
		t.Fatal(err)
	}
	if n.host, err = unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	n.ctx = ctx
	t.Cleanup(func() { stop(); n.wg.Wait() })
	n.serveDNS(t)
	// The EndpointSlice controller skips pods of a node that does not exist.
	c.applyText(t, `{apiVersion: v1, kind: Node, metadata: {name: `+nodeName+`}}`)
	n.wg.Go(func() {
		for ctx.Err() == nil {
			if err := n.look(ctx); err != nil && ctx.Err() == nil {
				n.logf("%v", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	return n
}

// logf writes to the node's own log.
func (n *node) logf(format string, args ...any) {
	f, err := os.OpenFile(filepath.Join(n.c.dir, "node.log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	fmt.Fprintf(f, time.Now().Format("15:04:05.000 ")+format+"\n", args...)
}

func (n *node) look(ctx context.Context) error {
	var pods items[pod]
	if err := n.client.read(ctx, "/api/v1/pods", &pods); err != nil {
		return err
	}
	seen := map[string]bool{}
	for i := range pods.Items {
		p := &pods.Items[i]
		seen[p.Metadata.UID] = true
		n.mu.Lock()
		s := n.running[p.Metadata.UID]
		n.mu.Unlock()
		switch {
		case p.Metadata.DeletionTimestamp != nil:
			n.end(s, p)
		case p.Spec.NodeName == "":
			n.bind(ctx, p)
		case s == nil && p.Status.PodIP == "":
			s = &sandbox{n: n, pod: *p}
			n.mu.Lock()
			n.next++
			s.ip = fmt.Sprintf("10.77.%d.%d", 1+n.next/250, 1+n.next%250)
			s.ns = fmt.Sprintf("p%d", n.next)
			n.running[p.Metadata.UID] = s
			n.mu.Unlock()
			n.wg.Go(func() {
				if err := s.start(); err != nil {
					n.logf("pod %s/%s: %v", p.Metadata.Namespace, p.Metadata.Name, err)
				}
				s.watch()
			})
		}
	}
	n.mu.Lock()
	var gone []*sandbox
	for uid, s := range n.running {
		if !seen[uid] && !s.going {
			gone = append(gone, s)
		}
	}
	n.mu.Unlock()
	for _, s := range gone {
		n.end(s, nil)
	}
	return n.services(ctx, pods.Items)
}

func (n *node) bind(ctx context.Context, p *pod) {
	body := fmt.Sprintf(`{"apiVersion":"v1","kind":"Binding","metadata":{"name":%q},"target":{"kind":"Node","name":%q}}`, p.Metadata.Name, nodeName)
	if err := n.client.send(ctx, http.MethodPost, podPath(p)+"/binding", "application/json", []byte(body), nil); err != nil {
		n.logf("bind %s: %v", p.Metadata.Name, err)
	}
}

func podPath(p *pod) string {
	return "/api/v1/namespaces/" + p.Metadata.Namespace + "/pods/" + p.Metadata.Name
}

// end stops a pod as a kubelet does: SIGTERM, the grace period, SIGKILL, and only
// then the object goes.
func (n *node) end(s *sandbox, p *pod) {
	n.mu.Lock()
	if s != nil && s.going {
		n.mu.Unlock()
		return
	}
	if s == nil {
		s = &sandbox{n: n, pod: *p}
		n.running[p.Metadata.UID] = s
	}
	s.going = true
	n.mu.Unlock()
	grace := 30 * time.Second
	if p != nil && p.Spec.TerminationGracePeriodSeconds != nil {
		grace = time.Duration(*p.Spec.TerminationGracePeriodSeconds) * time.Second
	}
	if p == nil {
		grace = 0
	}
	n.wg.Go(func() {
		s.stop(grace)
		if p != nil {
			_ = n.client.send(context.Background(), http.MethodDelete, podPath(p), "application/json", []byte(`{"gracePeriodSeconds":0}`), nil)
		}
		n.mu.Lock()
		delete(n.running, s.pod.Metadata.UID)
		n.mu.Unlock()
	})
}

// inside runs f in the pod's network namespace. What f starts or opens stays
// there.
func (s *sandbox) inside(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Setns(s.fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter namespace: %w", err)
	}
	err := f()
	if back := unix.Setns(s.n.host, unix.CLONE_NEWNET); back != nil {
		panic(back) // this thread would continue in the wrong network
	}
	return err
}

func (s *sandbox) start() error {
	s.dead, s.preStop = map[*exec.Cmd]chan struct{}{}, map[*exec.Cmd]int{}
	s.dir = filepath.Join(s.n.c.dir, s.pod.Metadata.Name+"-"+s.ns)
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	if err := s.network(); err != nil {
		return err
	}
	if err := s.volumes(); err != nil {
		return err
	}
	for _, list := range [][]container{s.pod.Spec.InitContainers, s.pod.Spec.Containers} {
		for i := range list {
			if err := s.run(&list[i]); err != nil {
				return fmt.Errorf("container %s: %w", list[i].Name, err)
			}
		}
	}
	return nil
}

// network makes the pod's network namespace, with its address, and the way there.
func (s *sandbox) network() error {
	for _, args := range []string{
		"netns add " + s.ns,
		"link add v" + s.ns + " type veth peer name eth0 netns " + s.ns,
		"link set v" + s.ns + " up",
		"route add " + s.ip + "/32 dev v" + s.ns,
		"-n " + s.ns + " link set lo up",
		"-n " + s.ns + " addr add " + s.ip + "/32 dev eth0",
		"-n " + s.ns + " link set eth0 up",
		"-n " + s.ns + " route add default dev eth0",
	} {
		if err := ip(args); err != nil {
			return err
		}
	}
	for file, value := range map[string]string{"conf/v" + s.ns + "/proxy_arp": "1", "neigh/v" + s.ns + "/proxy_delay": "0"} { // the delay is 0.8 s
		if err := os.WriteFile("/proc/sys/net/ipv4/"+file, []byte(value), 0o600); err != nil {
			return err
		}
	}
	var err error
	s.fd, err = unix.Open("/run/netns/"+s.ns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	return err
}

// watch reports the pod's status until it goes: Ready follows the probes.
func (s *sandbox) watch() {
	last := ""
	for s.n.ctx.Err() == nil {
		s.n.mu.Lock()
		going := s.going
		s.n.mu.Unlock()
		if going {
			return
		}
		why := ""
		for i := range s.pod.Spec.Containers {
			c := &s.pod.Spec.Containers[i]
			err := s.probe(c)
			if err == nil && c.Name == istioProxy {
				err = s.configured()
			}
			if err != nil {
				why = c.Name + ": " + err.Error()
			}
		}
		phase := s.phase()
		if state := fmt.Sprint(why == "", phase); state != last && !s.frozen.Load() {
			if err := s.report(why, phase); err != nil {
				s.n.logf("status of %s: %v", s.pod.Metadata.Name, err)
			} else {
				last = state
				s.n.logf("pod %s/%s at %s: ready %v %s", s.pod.Metadata.Namespace, s.pod.Metadata.Name, s.ip, why == "", why)
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// phase is Running, or how a pod ended whose containers are not started again.
func (s *sandbox) phase() string {
	if s.pod.Spec.RestartPolicy != "Never" || len(s.procs) < len(s.pod.Spec.Containers) {
		return "Running"
	}
	phase := "Succeeded"
	for _, p := range s.procs {
		select {
		case <-s.dead[p]:
			if !p.ProcessState.Success() {
				phase = "Failed"
			}
		default:
			return "Running"
		}
	}
	return phase
}

func (s *sandbox) report(why, phase string) error {
	ready := "True"
	if why != "" || phase != "Running" {
		ready = "False"
	}
	now := time.Now().UTC().Format(time.RFC3339)
	var conditions, statuses []map[string]any
	for _, c := range []struct{ kind, status string }{{"PodScheduled", "True"}, {"Initialized", "True"}, {"ContainersReady", ready}, {"Ready", ready}} {
		conditions = append(conditions, map[string]any{"type": c.kind, "status": c.status, "lastTransitionTime": now, "message": why})
	}
	for _, c := range s.pod.Spec.Containers {
		statuses = append(statuses, map[string]any{"name": c.Name, "image": c.Image, "imageID": c.Image, "ready": why == "", "restartCount": 0,
			"started": true, "state": map[string]any{"running": map[string]any{"startedAt": now}}})
	}
	body, err := json.Marshal(map[string]any{"status": map[string]any{
		"phase": phase, "podIP": s.ip, "podIPs": []any{map[string]any{"ip": s.ip}}, "hostIP": hostIP, "startTime": now,
		"conditions": conditions, "containerStatuses": statuses,
	}})
	if err != nil {
		return err
	}
	return s.n.client.send(s.n.ctx, http.MethodPatch, podPath(&s.pod)+"/status", "application/strategic-merge-patch+json", body, nil)
}

// probe does a readiness probe.
func (s *sandbox) probe(c *container) error {
	ctx, cancel := context.WithTimeout(s.n.ctx, 2*time.Second)
	defer cancel()
	p := c.ReadinessProbe
	switch {
	case p == nil || imageName(c) == shutdownManager:
		return nil
	case p.HTTPGet != nil:
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.address(c, p.HTTPGet.Port)+p.HTTPGet.Path, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode/100 != 2 {
			return fmt.Errorf("status %d", resp.StatusCode)
		}
		return nil
	case p.GRPC != nil:
		conn, err := grpc.NewClient(net.JoinHostPort(s.ip, fmt.Sprint(p.GRPC.Port)), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		defer conn.Close()
		r, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: p.GRPC.Service})
		if err != nil {
			return err
		}
		if r.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
			return errors.New(r.GetStatus().String())
		}
		return nil
	case p.TCPSocket != nil:
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.address(c, p.TCPSocket.Port))
		if err != nil {
			return err
		}
		return conn.Close()
	}
	return nil
}

// istioProxy is the container that Istio's agent would run in. The agent answers
// the probe once Envoy has its configuration.
const istioProxy = "istio-proxy"

func (s *sandbox) configured() error {
	req, err := http.NewRequestWithContext(s.n.ctx, http.MethodGet, "http://"+s.ip+":15000/stats?filter=update_success$", http.NoBody)
	if err != nil {
		return err
	}
	r, err := do(req)
	if err != nil {
		return err
	}
	for _, stat := range []string{"cluster_manager.cds", "listener_manager.lds"} {
		if !regexp.MustCompile(`(?m)^` + stat + `\.update_success: [1-9]`).Match(r.body) {
			return errors.New("no " + stat + " yet")
		}
	}
	return nil
}

// address is the pod's, with a port that is a number or a name.
func (s *sandbox) address(c *container, port any) string {
	return net.JoinHostPort(s.ip, c.port(port))
}

// stop ends all containers, each after its preStop sleep.
func (s *sandbox) stop(grace time.Duration) {
	var wg sync.WaitGroup
	end := time.Now().Add(grace)
	for _, p := range s.procs {
		wg.Go(func() {
			sleep := min(time.Duration(s.preStop[p])*time.Second, grace)
			select {
			case <-s.dead[p]:
			case <-time.After(sleep):
			}
			_ = p.Process.Signal(syscall.SIGTERM)
			select {
			case <-s.dead[p]:
			case <-time.After(time.Until(end)):
				_ = p.Process.Kill()
				<-s.dead[p]
			}
		})
	}
	wg.Wait()
	for _, f := range s.stops {
		f()
	}
	if s.fd != 0 {
		_ = unix.Close(s.fd)
		if err := ip("netns del " + s.ns); err != nil {
			s.n.logf("%v", err)
		}
	}
}

// freeze keeps the pod's status as it is, whatever its probes say.
func (s *sandbox) freeze() { s.frozen.Store(true) }

// kill ends a container's processes without a word, as a crash does. The pod
// stays as it is: refusing.
func (s *sandbox) kill() {
	for _, p := range s.procs {
		_ = p.Process.Kill()
		<-s.dead[p]
	}
}

// sandboxes are the running pods of a label.
func (n *node) sandboxes(namespace string, labels map[string]string) []*sandbox {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []*sandbox
	for _, s := range n.running {
		if s.pod.Metadata.Namespace == namespace && selects(labels, s.pod.Metadata.Labels) && !s.going {
			out = append(out, s)
		}
	}
	return out
}

// leaving returns an error that names a pod of a namespace that is being stopped, nil if
// there is none.
func (n *node) leaving(namespace string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.running {
		if s.going && s.pod.Metadata.Namespace == namespace {
			return fmt.Errorf("pod %s is being stopped", s.pod.Metadata.Name)
		}
	}
	return nil
}

// pickers are the running pods of a namespace in which Kvlane serves.
func (n *node) pickers(namespace string) []*sandbox {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []*sandbox
	for _, s := range n.running {
		for i := range s.pod.Spec.Containers {
			c := &s.pod.Spec.Containers[i]
			if s.pod.Metadata.Namespace == namespace && !s.going && c.Name == "kvlane" {
				out = append(out, s)
			}
		}
	}
	slices.SortFunc(out, func(a, b *sandbox) int { return strings.Compare(a.ip, b.ip) })
	return out
}

// volumes makes what volumes hold.
func (s *sandbox) volumes() error {
	for _, v := range s.pod.Spec.Volumes {
		dir := filepath.Join(s.dir, "volumes", v.Name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		switch {
		case v.EmptyDir != nil:
			if err := os.Chmod(dir, 0o777); err != nil {
				return err
			}
		case v.Secret != nil:
			var m struct {
				Data map[string][]byte `json:"data"`
			}
			if err := s.n.client.read(s.n.ctx, "/api/v1/namespaces/"+s.pod.Metadata.Namespace+"/secrets/"+v.Secret.SecretName, &m); err != nil && (!v.Secret.Optional || !apierrors.IsNotFound(err)) {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
			for k, text := range m.Data {
				if err := os.WriteFile(filepath.Join(dir, k), text, 0o644); err != nil {
					return err
				}
			}
		case v.ConfigMap != nil:
			var m struct {
				Data map[string]string `json:"data"`
			}
			if err := s.n.client.read(s.n.ctx, "/api/v1/namespaces/"+s.pod.Metadata.Namespace+"/configmaps/"+v.ConfigMap.Name, &m); err != nil && (!v.ConfigMap.Optional || !apierrors.IsNotFound(err)) {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
			names := map[string]string{}
			for k := range m.Data {
				names[k] = k
			}
			if len(v.ConfigMap.Items) > 0 {
				names = map[string]string{}
				for _, i := range v.ConfigMap.Items {
					names[i.Key] = i.Path
				}
			}
			for k, path := range names {
				if err := os.WriteFile(filepath.Join(dir, path), []byte(m.Data[k]), 0o644); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// account writes the files of the pod's service account into root.
func (s *sandbox) account(root string) error {
	if a := s.pod.Spec.AutomountServiceAccountToken; a != nil && !*a {
		return nil
	}
	name := s.pod.Spec.ServiceAccountName
	if name == "" {
		name = "default"
	}
	var answer struct {
		Status struct {
			Token string `json:"token"`
		} `json:"status"`
	}
	path := "/api/v1/namespaces/" + s.pod.Metadata.Namespace + "/serviceaccounts/" + name + "/token"
	if err := s.n.client.send(s.n.ctx, http.MethodPost, path, "application/json", []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{}}`), &answer); err != nil {
		return fmt.Errorf("token of %s: %w", name, err)
	}
	dir := filepath.Join(root, "var/run/secrets/kubernetes.io/serviceaccount")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for file, text := range map[string]string{"token": answer.Status.Token, "namespace": s.pod.Metadata.Namespace, "ca.crt": string(s.n.c.ca)} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// spawn starts a process in the pod's network, in root if that is not "".
func (s *sandbox) spawn(c *container, root string, env []string, argv ...string) error {
	log, err := os.Create(filepath.Join(s.dir, c.Name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	if err := log.Chmod(0o666); err != nil { // Envoy opens /dev/stdout anew, as another user
		return err
	}
	cmd := &exec.Cmd{Path: argv[0], Args: argv, Env: env, Stdout: log, Stderr: log, Dir: "/"}
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if root != "" {
		uid := uint32(65532)
		for _, sc := range []security{s.pod.Spec.SecurityContext, c.SecurityContext} {
			if sc.RunAsUser != nil {
				uid = *sc.RunAsUser
			}
		}
		cmd.SysProcAttr.Chroot = root
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	if err := s.inside(cmd.Start); err != nil {
		return err
	}
	dead := make(chan struct{})
	s.procs = append(s.procs, cmd)
	s.dead[cmd] = dead
	s.preStop[cmd] = c.Lifecycle.PreStop.Sleep.Seconds
	go func() {
		err := cmd.Wait()
		s.n.logf("pod %s container %s ended: %v", s.pod.Metadata.Name, c.Name, err)
		close(dead)
	}()
	return nil
}

// environment is the container's.
func (s *sandbox) environment(c *container) []string {
	env := []string{"PATH=/usr/bin:/bin", "KUBERNETES_SERVICE_HOST=" + hostIP, "KUBERNETES_SERVICE_PORT=" + apiPort}
	fields := map[string]string{"metadata.name": s.pod.Metadata.Name, "metadata.namespace": s.pod.Metadata.Namespace, "status.podIP": s.ip, "spec.nodeName": nodeName, "spec.serviceAccountName": s.pod.Spec.ServiceAccountName, "metadata.uid": s.pod.Metadata.UID}
	for _, e := range c.Env {
		v := e.Value
		if f := e.ValueFrom.FieldRef.FieldPath; f != "" {
			v = fields[f]
		}
		env = append(env, e.Name+"="+v)
	}
	return env
}

// expand replaces $(NAME) in arguments, as a kubelet does.
func expand(args, env []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		for _, e := range env {
			k, v, _ := strings.Cut(e, "=")
			a = strings.ReplaceAll(a, "$("+k+")", v)
		}
		out[i] = a
	}
	return out
}

//go:build linux

package k8s

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	hostIP  = "10.77.0.1" // of the control plane; pods have 10.77.1.x
	apiPort = "6443"

	// reasonable is for what takes seconds; it only ends a broken test.
	reasonable = 2 * time.Minute
)

// cluster is a control plane.
type cluster struct {
	dir, bin   string
	kubeconfig string
	ca         []byte
	client     *api
	node       *node

	processes map[string]*exec.Cmd // of the control plane, by program
}

// ip runs iproute2.
func ip(args string) error {
	out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", args, err, out)
	}
	return nil
}

// process starts a program that lives as long as the test process; its output
// goes to a file.
func (c *cluster) process(t *testing.T, env []string, name string, args ...string) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(c.dir, name+".log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(c.bin, name), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, c.dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.processes[name] = cmd
}

// stop kills a program of the control plane.
func (c *cluster) stop(t *testing.T, name string) {
	t.Helper()
	if err := c.processes[name].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.processes[name].Wait()
}

// startAPIServer starts the API server, and waits until it is ready.
func (c *cluster) startAPIServer(t *testing.T) {
	t.Helper()
	c.process(t, nil, "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--bind-address="+hostIP, "--secure-port="+apiPort, "--advertise-address="+hostIP, "--cert-dir="+c.dir,
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+filepath.Join(c.dir, "sa.pub"), "--service-account-signing-key-file="+filepath.Join(c.dir, "sa.key"),
		"--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC", "--token-auth-file="+filepath.Join(c.dir, "tokens.csv"), "--allow-privileged=true")
	eventually(t, 3*time.Minute, "API server", func() error { return c.client.send(t.Context(), http.MethodGet, "/readyz", "", nil, nil) })
}

// newCluster starts etcd, the API server, the controller manager and a node.
func newCluster(t *testing.T) *cluster {
	c := &cluster{dir: logDir(t), bin: os.Getenv(binVar), processes: map[string]*exec.Cmd{}}
	c.kubeconfig = filepath.Join(c.dir, "kubeconfig")
	c.writeAccess(t)
	c.process(t, nil, "etcd", "--data-dir", filepath.Join(c.dir, "etcd"), "--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380", "--initial-cluster", "default=http://127.0.0.1:2380", "--unsafe-no-fsync")
	var err error
	if c.client, err = newAPI(c.kubeconfig); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.client.http.CloseIdleConnections)
	c.startAPIServer(t)
	if c.ca, err = os.ReadFile(filepath.Join(c.dir, "apiserver.crt")); err != nil {
		t.Fatal(err)
	}
	// Three controllers expect a kubelet's heartbeats and are left out.
	c.process(t, nil, "kube-controller-manager", "--kubeconfig="+c.kubeconfig, "--authentication-kubeconfig="+c.kubeconfig, "--authorization-kubeconfig="+c.kubeconfig, "--bind-address=127.0.0.1",
		"--service-account-private-key-file="+filepath.Join(c.dir, "sa.key"), "--use-service-account-credentials=true", "--leader-elect=false",
		"--controllers=*,-node-lifecycle-controller,-pod-garbage-collector-controller,-taint-eviction-controller", "--concurrent-deployment-syncs=10")
	c.node = startNode(t, c)
	return c
}

// images is a file with the names of the images that the node has.
func (c *cluster) images() string { return filepath.Join(c.dir, "images") }

// logDir is a folder that outlives a failed run.
func logDir(t *testing.T) string {
	dir := filepath.Join(os.Getenv(insideOf), t.Name())
	for _, d := range []string{os.Getenv(insideOf), dir} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(filepath.Join(dir, "node.log"))
			t.Logf("the node's last words:\n%s", text[max(0, len(text)-4000):])
		}
	})
	return dir
}

func (c *cluster) writeAccess(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"sa.key":     string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
		"sa.pub":     string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})),
		"tokens.csv": `test,admin,uid,"system:masters"` + "\n",
		"kubeconfig": `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {token: test}}],
clusters: [{name: c, cluster: {server: "https://` + hostIP + ":" + apiPort + `", insecure-skip-tls-verify: true}}]}`,
	} {
		if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// kubectl runs it and returns its output.
func (c *cluster) kubectl(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	out, err := c.run(t.Context(), stdin, "kubectl", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// run runs a tool against the API server.
func (c *cluster) run(ctx context.Context, stdin, tool string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, tool), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig, "HOME="+c.dir)
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", tool, strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

func (c *cluster) apply(t *testing.T, args ...string) {
	t.Helper()
	c.kubectl(t, "", append([]string{"apply", "--server-side", "--force-conflicts"}, args...)...)
}

func (c *cluster) applyText(t *testing.T, text string) {
	t.Helper()
	c.kubectl(t, text, "apply", "--server-side", "--force-conflicts", "-f", "-")
}

// moduleDir is where a Go module is that a tool's go.mod pins.
func moduleDir(t *testing.T, tool, name string) string {
	t.Helper()
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", name)
	cmd.Dir = filepath.Join("tools", tool)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("module %s: %v", name, err)
	}
	return strings.TrimSpace(string(out))
}

// eventually tries until ok returns nil; the bound only ends a broken test.
func eventually(t *testing.T, bound time.Duration, what string, ok func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(bound); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err = ok(); err == nil {
			return
		}
	}
	t.Fatalf("%s: not within %s: %v", what, bound, err)
}

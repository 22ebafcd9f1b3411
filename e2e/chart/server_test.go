package chart

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// A real API server judges every example: validation, CEL rules of the CRDs, and
// the "restricted" Pod Security Standard. Its binaries are those of `make
// test-k8s`; they take minutes to build, so without them this test is left out.
func TestServer(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		if _, err := os.Stat(tool(name)); err != nil {
			t.Skipf("%s is not there: `make test-k8s` builds it", name)
		}
	}
	kubectl := server(t)
	apply := func(what string, args ...string) {
		t.Helper()
		if out, err := kubectl(append([]string{"apply", "--server-side"}, args...)...); err != nil || strings.Contains(out, "Warning") {
			t.Errorf("%s: %v\n%s", what, err, out)
		}
	}
	apply("CRDs", "-f", tools+"/schemas/crds")
	if out, err := kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, ns := range []string{"llm", "models", "gateways"} {
		apply(ns, "-f", write(t, "ns.yaml", fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {pod-security.kubernetes.io/warn: restricted, pod-security.kubernetes.io/enforce: restricted}}}", ns)))
	}
	// The controller that makes it is not running; the pod of `helm test` has it.
	apply("service account", "-f", write(t, "sa.yaml", "{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: llm}}"))
	for _, file := range examples(t) {
		rendered, err := render("--values", file)
		if err != nil {
			t.Fatal(err)
		}
		apply(file, "--dry-run=server", "-f", write(t, "rendered.yaml", rendered))
	}
	for shape := range shapes {
		rendered, err := render(shaped(shape)...)
		if err != nil {
			t.Fatal(err)
		}
		apply("shape "+shape, "--dry-run=server", "-f", write(t, "rendered.yaml", rendered))
	}
}

// server starts etcd and an API server on free ports of the loopback and returns
// kubectl for it, with output and warnings together.
func server(t *testing.T) func(args ...string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	client, peer, api := "http://"+free(t), "http://"+free(t), free(t)
	launch(t, tool("etcd"), "--data-dir", dir+"/etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer, "--unsafe-no-fsync", "--log-level", "error")
	key := filepath.Join(dir, "sa.key")
	if _, err := run(nil, "openssl", "genrsa", "-out", key, "2048"); err != nil {
		t.Fatal(err)
	}
	launch(t, tool("kube-apiserver"), "--etcd-servers", client, "--bind-address", "127.0.0.1", "--advertise-address", "10.77.0.1", "--secure-port", port(api),
		"--cert-dir", dir, "--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", key,
		"--service-account-signing-key-file", key, "--service-cluster-ip-range", "10.96.0.0/16", "--authorization-mode", "RBAC",
		"--token-auth-file", write(t, "tokens.csv", `test-token,admin,uid,"system:masters"`+"\n"))
	kubectl := func(args ...string) (string, error) {
		cmd := exec.Command(tool("kubectl"), append([]string{"--server", "https://" + api, "--insecure-skip-tls-verify", "--token", "test-token",
			"--kubeconfig", "/dev/null", "--cache-dir", filepath.Join(dir, "cache")}, args...)...)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	var err error
	for range 900 {
		if _, err = kubectl("get", "--raw", "/readyz"); err == nil {
			return kubectl
		}
		time.Sleep(200 * time.Millisecond)
	}
	t.Fatalf("the API server is not ready: %v", err)
	return nil
}

// free returns an address of the loopback that is this process's own.
func free(t *testing.T) string {
	t.Helper()
	n, err := enginesim.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	return "127.0.0.1:" + strconv.Itoa(n)
}

//go:build linux

package k8s

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/textproto"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// page is a page of docs: its shell commands, block by block.
type page struct {
	name   string
	blocks []string
}

var fenced = regexp.MustCompile("(?s)\n```sh\n(.*?)```\n")

func readPage(t *testing.T, name string) page {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	p := page{name: name}
	for _, m := range fenced.FindAllStringSubmatch(string(text), -1) {
		p.blocks = append(p.blocks, m[1])
	}
	return p
}

// block is the only one that holds a text.
func (p page) block(t *testing.T, holds string) string {
	t.Helper()
	var found []string
	for _, b := range p.blocks {
		if strings.Contains(b, holds) {
			found = append(found, b)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%s has %d blocks with %q", p.name, len(found), holds)
	}
	return found[0]
}

// replaced is a text with parts that cannot be had here replaced; each has to be
// there.
func replaced(t *testing.T, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i+1 < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("no %q in\n%s", pairs[i], text)
		}
		text = strings.ReplaceAll(text, pairs[i], pairs[i+1])
	}
	return text
}

// shell runs commands as somebody does who copies them: in the project's folder,
// with kubectl and helm set to a namespace.
func (c *cluster) shell(t *testing.T, in, commands string) string {
	t.Helper()
	out, err := c.tryShell(t, in, commands)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, commands, out)
	}
	return out
}

func (c *cluster) tryShell(t *testing.T, in, commands string) (string, error) {
	t.Helper()
	config, err := os.ReadFile(c.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(c.dir, "kubeconfig-"+in)
	if err := os.WriteFile(file, []byte(replaced(t, string(config), "context: {cluster: c, user: u}", "context: {cluster: c, user: u, namespace: "+in+"}")), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	cmd.Dir = filepath.Join("..", "..")
	bin, err := filepath.Abs(c.bin)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "KUBECONFIG="+file, "HOME="+c.dir, "NO_PROXY=*", "no_proxy=*")
	var out, bad bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &bad
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%w\n%s", err, bad.String())
	}
	return out.String(), nil
}

// follow does what a page says, from engines to a cache hit: its blocks about the
// engines and about Kvlane, then its curl until the answer comes from a cache.
func (c *cluster) follow(t *testing.T, in string, engines, kvlane, curl string) {
	t.Helper()
	c.applyText(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+in+"}}")
	defer func() {
		_, _ = c.run(context.WithoutCancel(t.Context()), "", "kubectl", "delete", "namespace", in, "--wait=false")
	}()
	c.shell(t, in, engines)
	// What the commands leave in variables is used by those that follow.
	variables := filepath.Join(c.dir, "variables-"+in)
	c.shell(t, in, kvlane+"\necho \"GATEWAY=${GATEWAY:-}\" >"+variables+"\n")
	var last reply
	eventually(t, 90*time.Second, "an answer from the cache", func() error {
		out, err := c.tryShell(t, in, ". "+variables+"\n"+curl)
		if err != nil {
			return err
		}
		// curl shows the header as it came and the body decoded.
		head, body, _ := strings.Cut(out, "\r\n\r\n")
		status, lines, _ := strings.Cut(head, "\r\n")
		header, err := textproto.NewReader(bufio.NewReader(strings.NewReader(lines + "\r\n\r\n"))).ReadMIMEHeader()
		if err != nil || len(strings.Fields(status)) < 2 {
			return fmt.Errorf("%q: %w", head, err)
		}
		before := last
		last = reply{0, header.Get("X-Kvlane-Target"), header.Get("X-Kvlane-Matched-Tokens"), []byte(body)}
		switch {
		case strings.Fields(status)[1] != "200" || last.target == "":
			return fmt.Errorf("%s", out)
		case last.matched == "0" || before.target == "":
			return errors.New("not in the cache yet")
		case last.target != before.target:
			return fmt.Errorf("%s, before %s", last.target, before.target)
		}
		return nil
	})
	if got := fmt.Sprint(cached(t, last)); got != last.matched {
		t.Errorf("%s tokens are said to match, %s were cached", last.matched, got)
	}
	t.Logf("%s: %s tokens from the cache of %s", in, last.matched, last.target)
}

// byHelm is a page's `helm install`, followed by a wait for what it makes.
func (p page) byHelm(t *testing.T) string {
	t.Helper()
	return p.block(t, "helm install") + "kubectl wait --for=condition=Available --timeout=2m deployment/kvlane\n"
}

// gatewayAlone makes the Gateway of a manifest without its route, and waits for it
// after what comes between.
func gatewayAlone(file, between string) string {
	return "kubectl apply --server-side -f " + file + "\nkubectl delete httproute/llm\n" + between + `
kubectl wait --for=condition=Programmed --timeout=2m gateway/llm
GATEWAY=$(kubectl get gateway llm -o jsonpath='{.status.addresses[0].value}')`
}

const (
	enginesBlock = "simulated.yaml"
	curlBlock    = "curl "
)

// docs follows the pages for Istio and for the sidecar.
func docs(t *testing.T, c *cluster) {
	istio, sidecar := readPage(t, "kubernetes-istio.md"), readPage(t, "kubernetes-sidecar.md")
	t.Run("istio", func(t *testing.T) {
		c.follow(t, "docs-istio", istio.block(t, enginesBlock), istio.block(t, "pool.yaml"), istio.block(t, curlBlock))
	})
	t.Run("envoyfilter", func(t *testing.T) {
		c.follow(t, "docs-filter", istio.block(t, enginesBlock), istio.block(t, "envoyfilter.yaml")+`
kubectl wait --for=condition=Available --timeout=2m deployment/kvlane
kubectl wait --for=condition=Programmed --timeout=2m gateway/llm
GATEWAY=$(kubectl get gateway llm -o jsonpath='{.status.addresses[0].value}')`, istio.block(t, curlBlock))
	})
	const clusterIP = "GATEWAY=$(kubectl get service kvlane -o jsonpath='{.spec.clusterIP}')"
	t.Run("sidecar", func(t *testing.T) {
		// Forwarding is a kubelet's work; the Service's own address serves here.
		c.follow(t, "docs-sidecar", sidecar.block(t, enginesBlock),
			replaced(t, sidecar.block(t, "port-forward"), "kubectl port-forward service/kvlane 8080:80 &", clusterIP),
			replaced(t, sidecar.block(t, curlBlock), "127.0.0.1:8080", "$GATEWAY"))
	})
	t.Run("istio by helm", func(t *testing.T) {
		c.follow(t, "docs-helm", istio.block(t, enginesBlock), gatewayAlone("envoy/manifests/istio/gateway.yaml", istio.byHelm(t)), istio.block(t, curlBlock))
	})
	t.Run("sidecar by helm", func(t *testing.T) {
		c.follow(t, "docs-sidecar-helm", sidecar.block(t, enginesBlock), sidecar.byHelm(t)+clusterIP,
			replaced(t, sidecar.block(t, curlBlock), "127.0.0.1:8080", "$GATEWAY"))
	})
}

//go:build linux

package k8s

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// substitution is what runs in place of a command on a page that cannot run here: there is
// no container engine, no registry, and no downloads except Go modules.
type substitution struct {
	page, here string // literally; $WALK is the walk's name, upper-case names are variables of the shell
	why        string
}

// substitutions are all of them, for all pages. What is not named here runs as it
// stands on the page.
var substitutions = []substitution{
	{"kind create cluster\n", "true\n", "the cluster is there: etcd, API server, controller manager and a node that is played"},
	{"docker build --tag ghcr.io/kvlane/kvlane:0.1.0 --build-arg VERSION=0.1.0 .\n", "true\n", "no container engine; the chart's tests run the Dockerfile's steps"},
	{"kind load docker-image ghcr.io/kvlane/kvlane:0.1.0\n", "echo ghcr.io/kvlane/kvlane:0.1.0 >>$IMAGES\n", "the node runs Kvlane's containers only with images named so, and never pulls"},
	{"https://github.com/kubernetes-sigs/gateway-api/releases/download/v1.6.1/standard-install.yaml", "$GATEWAY_API/config/crd/standard", "the same files from the Go module"},
	{"https://github.com/kubernetes-sigs/gateway-api-inference-extension/releases/download/v1.6.0/manifests.yaml", "$EXTENSION/config/crd/bases", "the same files from the Go module"},
	{"base --repo https://istio-release.storage.googleapis.com/charts --version 1.31.1", "$ISTIO/manifests/charts/base", "the chart from the Go module"},
	{
		"istiod --repo https://istio-release.storage.googleapis.com/charts --version 1.31.1",
		"$ISTIO/manifests/charts/istio-control/istio-discovery --set meshConfig.enableAutoMtls=false --set telemetry.enabled=false --set pilot.env.PILOT_ENABLE_METADATA_EXCHANGE=false --set pilot.env.PILOT_ENABLE_ALPN_FILTER=false",
		"the chart from the Go module; gateways are stock Envoys, which know neither Istio's own filters nor have an agent for mTLS",
	},
	{"helm install eg oci://docker.io/envoyproxy/gateway-helm --version v1.9.1 -n envoy-gateway-system --create-namespace --wait\n", "true\n", "the bed has started Envoy Gateway's binary with its resource definitions"},
	{"NAMESPACE=llm\n", "NAMESPACE=$WALK\n", "several walks share a cluster"},
	{"kubectl port-forward service/kvlane 8080:80 &\nGATEWAY=127.0.0.1:8080\n", "GATEWAY=$(kubectl get service kvlane -o jsonpath='{.spec.clusterIP}')\n", "forwarding is a kubelet's work; the Service's own address serves"},
}

// substituted is a page's text with its substitutions.
func substituted(text, walk string) string {
	for _, s := range substitutions {
		text = strings.ReplaceAll(text, s.page, strings.ReplaceAll(s.here, "$WALK", walk))
	}
	return text
}

// walk is a way through a page, from an empty namespace to a cache hit, after the
// page's sections about the cluster.
type walk struct {
	name, page string
	sections   []string
}

const (
	istioPage, sidecarPage, gatewayPage = "kubernetes-istio.md", "kubernetes-sidecar.md", "kubernetes-envoy-gateway.md"

	engines, byManifest, byHelm, byFilter, request = "The engines", "Kvlane", "Kvlane by Helm", "Without InferencePool", "A request, and the cache hit"
)

// clusterSections are followed once, when a cluster begins.
var clusterSections = []string{"The cluster", "The image"}

var walks = []walk{
	{"docs-istio", istioPage, []string{engines, byManifest, request}},
	{"docs-istio-helm", istioPage, []string{engines, byHelm, request}},
	{"docs-istio-filter", istioPage, []string{engines, byFilter, request}},
	{"docs-sidecar", sidecarPage, []string{engines, byManifest, request}},
	{"docs-sidecar-helm", sidecarPage, []string{engines, byHelm, request}},
	{"docs-eg", gatewayPage, []string{engines, byManifest, request}},
	{"docs-eg-helm", gatewayPage, []string{engines, byHelm, request}},
}

// page is a page of docs: its shell commands by section.
type page struct {
	name, text string
	blocks     map[string][]string
}

var (
	heading = regexp.MustCompile(`(?m)^###? (.+)$`)
	fenced  = regexp.MustCompile("(?s)\n```sh\n(.*?)```\n")
)

func readPage(t *testing.T, name string) page {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	p := page{name: name, text: string(text), blocks: map[string][]string{}}
	at := heading.FindAllStringSubmatchIndex(p.text, -1)
	for i, h := range at {
		end := len(p.text)
		if i+1 < len(at) {
			end = at[i+1][0]
		}
		for _, m := range fenced.FindAllStringSubmatch(p.text[h[1]:end], -1) {
			title := p.text[h[2]:h[3]]
			p.blocks[title] = append(p.blocks[title], m[1])
		}
	}
	return p
}

// commands are the blocks of sections, in order.
func (p page) commands(t *testing.T, sections ...string) (blocks []string) {
	t.Helper()
	for _, s := range sections {
		if len(p.blocks[s]) == 0 {
			t.Fatalf("%s has no commands under %q", p.name, s)
		}
		blocks = append(blocks, p.blocks[s]...)
	}
	return blocks
}

// TestPagesAreFollowedWhole checks that pages, walks and substitutions are consistent:
// every command is run, every substitution matches a command, and the versions are those
// that the tests run.
func TestPagesAreFollowedWhole(t *testing.T) {
	var all strings.Builder
	for _, name := range []string{istioPage, sidecarPage, gatewayPage} {
		p := readPage(t, name)
		all.WriteString(p.text)
		walked := map[string]bool{}
		for _, s := range clusterSections {
			walked[s] = true
		}
		for _, w := range walks {
			for _, s := range w.sections {
				walked[s] = walked[s] || w.page == name
			}
		}
		for title, blocks := range p.blocks {
			for _, b := range blocks {
				if !walked[title] && !strings.HasPrefix(b, "# Not run by the tests") {
					t.Errorf("%s: nobody follows what stands under %q:\n%s", name, title, b)
				}
			}
		}
	}
	text := all.String()
	for _, s := range substitutions {
		if !strings.Contains(text, s.page) {
			t.Errorf("on no page: %q", s.page)
		}
	}
	for _, pin := range []struct{ file, pinned, said string }{
		{"tools/conformance/go.mod", `sigs.k8s.io/gateway-api v(\S+)`, "/gateway-api/releases/download/v%s/"},
		{"tools/conformance/go.mod", `sigs.k8s.io/gateway-api-inference-extension v(\S+)`, "/gateway-api-inference-extension/releases/download/v%s/"},
		{"tools/istio/go.mod", `istio.io/api v(\S+)`, "istiod --repo https://istio-release.storage.googleapis.com/charts --version %s "},
		{"build.sh", `ENVOY_GATEWAY=v(\S+)`, "gateway-helm --version v%s "},
		{"../../charts/kvlane/Chart.yaml", `(?m)^appVersion: (\S+)`, "kind load docker-image ghcr.io/kvlane/kvlane:%s\n"},
	} {
		file, err := os.ReadFile(pin.file)
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(pin.pinned).FindSubmatch(file)
		if m == nil {
			t.Fatalf("%s: no %s", pin.file, pin.pinned)
		}
		if want := fmt.Sprintf(pin.said, m[1]); !strings.Contains(text, want) {
			t.Errorf("no page says %q, as %s does", want, pin.file)
		}
	}
}

// shell runs commands as a user who copies them: in the project's folder, with kubectl and
// helm set to the walk's own context.
func (c *cluster) shell(t *testing.T, walk, commands string) (string, error) {
	t.Helper()
	file := filepath.Join(c.dir, "kubeconfig-"+walk)
	if _, err := os.Stat(file); err != nil {
		config, err := os.ReadFile(c.kubeconfig)
		if err == nil {
			err = os.WriteFile(file, config, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	bin, err := filepath.Abs(c.bin)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", substituted(commands, walk))
	cmd.Dir = filepath.Join("..", "..")
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "KUBECONFIG="+file, "HOME="+c.dir, "NO_PROXY=*", "no_proxy=*", "IMAGES="+c.images(),
		"GATEWAY_API="+moduleDir(t, "conformance", "sigs.k8s.io/gateway-api"),
		"EXTENSION="+moduleDir(t, "conformance", "sigs.k8s.io/gateway-api-inference-extension"),
		"ISTIO="+moduleDir(t, "istio", "istio.io/istio"))
	var out, bad bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &bad
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%w\n%s", err, bad.String())
	}
	return out.String(), nil
}

// begin does what a page says about the cluster and the image.
func (c *cluster) begin(t *testing.T, name string) {
	t.Helper()
	for _, s := range substitutions {
		t.Logf("in place of %q: %q, because %s", s.page, s.here, s.why)
	}
	for _, block := range readPage(t, name).commands(t, clusterSections...) {
		if out, err := c.shell(t, "begin", block); err != nil {
			t.Fatalf("%v\n%s\n%s", err, block, out)
		}
	}
}

// docs follows the walks through a page.
func docs(t *testing.T, c *cluster, pages ...string) {
	for _, w := range walks {
		if slices.Contains(pages, w.page) {
			concurrent(t, w.name, func(t *testing.T) { c.follow(t, w) })
		}
	}
}

// follow does what a page says, in one shell, and then sends its request until the
// answer comes from a cache.
func (c *cluster) follow(t *testing.T, w walk) {
	t.Helper()
	defer func() {
		_, _ = c.run(context.WithoutCancel(t.Context()), "", "kubectl", "delete", "namespace", w.name, "--wait=false")
	}()
	blocks := readPage(t, w.page).commands(t, w.sections...)
	curl := blocks[len(blocks)-1]
	variables := filepath.Join(c.dir, "variables-"+w.name)
	commands := strings.Join(blocks[:len(blocks)-1], "\n")
	if out, err := c.shell(t, w.name, commands+"\ndeclare -p GATEWAY >"+variables+"\n"); err != nil {
		t.Fatalf("%v\n%s\n%s", err, substituted(commands, w.name), out)
	}
	tokens, sent := 0, 0
	eventually(t, 90*time.Second, "an answer from the cache", func() error {
		sent++
		out, err := c.shell(t, w.name, ". "+variables+"\n"+curl)
		if err != nil {
			return err
		}
		// curl shows the header as it came and the body decoded.
		head, body, _ := strings.Cut(out, "\r\n\r\n")
		if status := strings.Fields(head); len(status) < 2 || status[1] != "200" {
			return fmt.Errorf("%s", out)
		}
		if lower := strings.ToLower(head); strings.Contains(lower, "x-kvlane-") {
			return fmt.Errorf("got %s, want no header that tells of other clients' prompts", head)
		}
		if tokens = cached(t, reply{body: []byte(body)}); tokens == 0 {
			return errors.New("not in the cache yet")
		}
		return nil
	})
	t.Logf("%d tokens from the cache, at request %d", tokens, sent)
}

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

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// weighted fails on istiod 1.31 whatever the picker: it gives the route with two
// weighted pools the picker of the last one.
const weighted = "GatewayWeightedAcrossTwoInferencePools"

// conformant are the tests that pass, and followsRouting the one that a picker must
// not pass that sets no metadata. docs/kubernetes.md lists them too.
const followsRouting = "GatewayFollowingEPPRouting"

var conformant = []string{
	"EppUnAvailableFailOpen",
	"GatewayDestinationEndpointServed",
	followsRouting,
	"GatewayFollowingEPPRoutingWithDataParallelism",
	"HTTPRouteInvalidInferencePoolRef",
	"HTTPRouteMultipleGatewaysDifferentPools",
	"HTTPRouteMultipleRulesDifferentPools",
	"InferencePoolAccepted",
	"InferencePoolAppProtocol",
	"InferencePoolHTTPRoutePortValidation",
	"InferencePoolInvalidEPPService",
	"InferencePoolMissingEPPRef",
	"InferencePoolResolvedRefsCondition",
}

// output is what a program writes. It calls enough once it holds text several times. The buffer is not embedded: io.Copy
// would find its ReadFrom, and pass Write by.
type output struct {
	all    bytes.Buffer
	text   string
	enough func()
}

const several = 5

func (o *output) Write(p []byte) (int, error) {
	n, err := o.all.Write(p)
	if o.text != "" && bytes.Count(o.all.Bytes(), []byte(o.text)) >= several {
		o.enough()
	}
	return n, err
}

func TestAProgramEndsWhenItHasSaidEnough(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	said := &output{text: "again", enough: cancel}
	cmd := exec.CommandContext(ctx, "sh", "-c", "for i in 1 2 3 4 5; do echo again; done; exec sleep 60")
	cmd.Stdout = said
	if err := cmd.Run(); err == nil || ctx.Err() == nil {
		t.Errorf("got %v after %q, want a program that is killed: it had said enough", err, said.all.String())
	}
}

// suite runs the conformance tests until their end, or until they have said enough several times, and returns those that
// passed and failed, and the output.
func (c *cluster) suite(t *testing.T, name, enough string, flags ...string) (passed, failed []string, log string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 9*time.Minute) // it only ends a broken test
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "conformance.test"), append([]string{"-test.v", "-test.timeout", "8m", "-gateway-class", "istio"}, flags...)...)
	cmd.Dir = moduleDir(t, "conformance", "sigs.k8s.io/gateway-api-inference-extension/conformance")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig)
	began := time.Now()
	said := &output{text: enough, enough: cancel}
	cmd.Stdout, cmd.Stderr = said, said
	err := cmd.Run()
	out := said.all.Bytes()
	if err := os.WriteFile(filepath.Join(c.dir, name+".log"), out, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^ +--- (PASS|FAIL): TestConformance/([A-Za-z0-9]+) `).FindAllStringSubmatch(string(out), -1) {
		if m[1] == "PASS" {
			passed = append(passed, m[2])
		} else {
			failed = append(failed, m[2])
		}
	}
	t.Logf("%s: %d passed, %d failed in %s", name, len(passed), len(failed), time.Since(began).Round(time.Second))
	if len(passed)+len(failed) == 0 && ctx.Err() == nil {
		t.Fatalf("no test ran: %v; end of its log\n%s", err, out[max(0, len(out)-3000):])
	}
	return passed, failed, string(out)
}

// conformance runs the InferencePool conformance tests with Kvlane as picker, and
// once with a picker that they must not let pass.
func conformance(t *testing.T, c *cluster) {
	report := filepath.Join(c.dir, "conformance-istio.yaml")
	passed, failed, _ := c.suite(t, "conformance", "", "-skip-tests", weighted, "-report-output", report, "-organization", "istio", "-project", "istio",
		"-url", "https://istio.io", "-version", istioVersion(t), "-contact", "https://github.com/kvlane/kvlane")
	for _, name := range passed {
		t.Logf("passed: %s", name)
	}
	slices.Sort(passed)
	if len(failed) > 0 || !slices.Equal(passed, conformant) {
		t.Errorf("passed: %q\n want: %q\nfailed: %q", passed, conformant, failed)
	}
	keepReport(t, report)
	c.node.headerOnly.Store(true)
	defer c.node.headerOnly.Store(false)
	for _, namespace := range []string{"inference-conformance-app-backend", "inference-conformance-infra"} {
		eventually(t, reasonable, "the end of namespace "+namespace, func() error {
			err := c.client.read(t.Context(), "/api/v1/namespaces/"+namespace, nil)
			if apierrors.IsNotFound(err) {
				return nil
			}
			if err == nil {
				err = errors.New("it is still there")
			}
			return err
		})
	}
	// The test itself would retry for minutes; it is enough that it sees the wrong pods
	// repeatedly.
	const wrong = "expected pod name to start with"
	passed, _, log := c.suite(t, "negative-control", wrong, "-run-test", followsRouting)
	if slices.Contains(passed, followsRouting) {
		t.Error("the tests let a picker pass that sets no metadata: they prove nothing")
	}
	if !strings.Contains(log, "TestConformance/"+followsRouting) {
		t.Errorf("%s did not run", followsRouting)
	}
	if n := strings.Count(log, wrong); n < several {
		t.Errorf("the wrong pod answered %d times only; end of the log\n%s", n, log[max(0, len(log)-3000):])
	}
}

// istioVersion is the version of istiod that the tests run.
func istioVersion(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("tools/istio/go.mod")
	m := regexp.MustCompile(`istio.io/istio v(\S+)`).FindSubmatch(text)
	if err != nil || m == nil {
		t.Fatalf("no version of istio.io/istio: %v", err)
	}
	return string(m[1])
}

// keepReport checks the report that the tests wrote, a file as the Inference Extension collects them, and copies it
// into the folder that KVLANE_REPORTS names, in the layout of conformance/reports of the extension.
func keepReport(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Errorf("no conformance report: %v", err)
		return
	}
	for _, want := range []string{"kind: ConformanceReport", fmt.Sprintf("Passed: %d\n", len(conformant)), "Failed: 0\n", "name: Gateway"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("got the conformance report\n%s\nwant %q in it", text, want)
		}
	}
	// The names of the folder and of the file are made of what the report says.
	field := func(name string) string {
		m := regexp.MustCompile(`(?m)^[ -]*` + name + `: (\S+)$`).FindSubmatch(text)
		if m == nil {
			t.Errorf("the conformance report has no %s:\n%s", name, text)
			return name
		}
		return string(m[1])
	}
	extension, version, mode := field("GatewayAPIInferenceExtensionVersion"), field("version"), field("mode")
	if version != istioVersion(t) || !strings.HasPrefix(extension, "v") {
		t.Errorf("got a report of istiod %s and the extension %s, want %s and a version", version, extension, istioVersion(t))
	}
	name := version + "-" + mode + "-gateway-report.yaml"
	if to := os.Getenv("KVLANE_REPORTS"); to != "" {
		folder := filepath.Join(to, extension, "gateway", "istio")
		readme := fmt.Sprintf(reportReadme, extension, version, mode, name, weighted, version[strings.LastIndex(version, "-")+1:])
		err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(filepath.Join(folder, name), text, 0o644), os.WriteFile(filepath.Join(folder, "README.md"), []byte(readme), 0o644))
		if err != nil {
			t.Error(err)
		}
	}
}

// reportReadme has the sections that the Inference Extension asks for with reports.
const reportReadme = `# Istio with Kvlane as endpoint picker

istiod and a stock Envoy; the endpoint picker is Kvlane (https://github.com/kvlane/kvlane).

## Table of Contents

| Extension Version Tested | Profile Tested | Implementation Version | Mode | Report |
|---|---|---|---|---|
| %[1]s | Gateway | [%[2]s](https://github.com/istio/istio/commit/%[6]s) | %[3]s | [%[2]s Gateway report](./%[4]s) |

The test %[5]s is left out: it fails on this istiod whatever the picker.
So the result is "partial", and the report is not one that the extension collects.

## Reproduce

In a checkout of Kvlane, on Linux as root:

    make test-k8s

The files are in out/conformance/reports.
`

//go:build linux

package k8s

import (
	"context"
	"errors"
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

// suite runs the conformance tests, bounded by bound, and returns those that passed and
// failed, and the output.
func (c *cluster) suite(t *testing.T, name string, bound time.Duration, flags ...string) (passed, failed []string, log string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "conformance.test"), append([]string{"-test.v", "-test.timeout", "8m", "-gateway-class", "istio"}, flags...)...)
	cmd.Dir = moduleDir(t, "conformance", "sigs.k8s.io/gateway-api-inference-extension/conformance")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig)
	began := time.Now()
	out, err := cmd.CombinedOutput()
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
	passed, failed, _ := c.suite(t, "conformance", 4*time.Minute, "-skip-tests", weighted)
	for _, name := range passed {
		t.Logf("passed: %s", name)
	}
	slices.Sort(passed)
	if len(failed) > 0 || !slices.Equal(passed, conformant) {
		t.Errorf("passed: %q\n want: %q\nfailed: %q", passed, conformant, failed)
	}
	c.node.headerOnly.Store(true)
	defer c.node.headerOnly.Store(false)
	for _, namespace := range []string{"inference-conformance-app-backend", "inference-conformance-infra"} {
		eventually(t, time.Minute, "the end of namespace "+namespace, func() error {
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
	const wrong, bound = "expected pod name to start with", 45 * time.Second
	passed, _, log := c.suite(t, "negative-control", bound, "-run-test", followsRouting)
	if slices.Contains(passed, followsRouting) {
		t.Error("the tests let a picker pass that sets no metadata: they prove nothing")
	}
	if !strings.Contains(log, "TestConformance/"+followsRouting) {
		t.Errorf("%s did not run", followsRouting)
	}
	if n := strings.Count(log, wrong); n < 5 {
		t.Errorf("the wrong pod answered %d times only; end of the log\n%s", n, log[max(0, len(log)-3000):])
	}
}

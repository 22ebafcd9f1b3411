//go:build linux

package k8s

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

var chartDir = filepath.Join("..", "..", "charts", "kvlane")

// chart installs Kvlane as operators do: with Helm, which waits for readiness,
// and through an upgrade, a rollback and the end.
func chart(t *testing.T, c *cluster) {
	const in = "chart"
	c.namespace(t, in)
	c.applyText(t, `{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: llm, namespace: chart}, spec: {gatewayClassName: istio, listeners: [{name: http, port: 80, protocol: HTTP}]}}`)
	helm := func(args ...string) {
		t.Helper()
		began := time.Now()
		if _, err := c.run(t.Context(), "", "helm", append(args, "-n", in, "--wait", "--timeout", "90s")...); err != nil {
			t.Fatal(err)
		}
		t.Logf("helm %s: %s", args[0], time.Since(began).Round(100*time.Millisecond))
	}
	helm("install", "kvlane", chartDir, "-f", "testdata/values.yaml")
	c.ready(t, in, "llm", 2)
	chat := c.gateway(t, in, "llm") + "/v1/chat/completions"
	routed(t, chat)
	followsPicks(t, chat)
	steady(t, chat, func() {
		helm("upgrade", "kvlane", chartDir, "-f", "testdata/values.yaml", "--set", "replicas=3", "--set", "config.log.level=debug")
		c.ready(t, in, "kvlane", 3)
		helm("rollback", "kvlane", "1")
		time.Sleep(time.Second)
	})
	helm("uninstall", "kvlane")
	eventually(t, 40*time.Second, "nothing left of the chart", func() error {
		if out := c.kubectl(t, "", "get", "all,cm,sa,role,rolebinding,pdb,networkpolicy,inferencepool,httproute", "-n", in, "-l", "app.kubernetes.io/instance=kvlane", "-o", "name"); out != "" {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
}

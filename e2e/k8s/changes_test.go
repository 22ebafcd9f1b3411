//go:build linux

package k8s

import (
	"fmt"
	"testing"
	"time"
)

// replaces makes all pods of a Deployment of two anew under load.
func replaces(t *testing.T, c *cluster, name, chat string) {
	steady(t, chat, func() {
		c.kubectl(t, "", "rollout", "restart", "deployment/"+name)
		c.ready(t, ns, name, 2)
		time.Sleep(time.Second)
	})
}

// scalesEngines adds engines and takes them away under load.
func scalesEngines(t *testing.T, c *cluster, chat string) {
	steady(t, chat, func() {
		for _, n := range []int{4, 2} {
			c.kubectl(t, "", "scale", "deployment/llm", fmt.Sprint("--replicas=", n))
			c.ready(t, ns, "llm", n)
			time.Sleep(time.Second)
		}
	})
}

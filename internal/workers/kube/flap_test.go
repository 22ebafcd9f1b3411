package kube

import (
	"fmt"
	"testing"

	"github.com/rs/zerolog"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
)

// Of many pods only those that changed are described again, and those that are gone are forgotten.
func TestOnlyChangedPodsAreDescribed(t *testing.T) {
	const pods = 1000
	k := config.Kubernetes{Ports: []int{8000}}
	k.Worker = config.DefaultKubernetes().Worker
	var list []workers.Entry
	s := &Source{opts: Options{Kubernetes: &k, Log: zerolog.Nop(), Set: func(_ string, all []workers.Entry) { list = all }}, ctx: t.Context()}
	p := s.newPool("")
	for i := range pods {
		pod := &Pod{}
		pod.ObjectMeta = metav1.ObjectMeta{Name: fmt.Sprintf("w-%04d", i), UID: types.UID(fmt.Sprint("u", i)), Labels: map[string]string{"app": "llm"}}
		pod.Status.PodIP = fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)
		p.pods = append(p.pods, pod)
	}
	p.publish()
	if got := testing.AllocsPerRun(5, p.publish); got > pods/2 {
		t.Errorf("got %v allocations for %d pods without a change, want few", got, pods)
	}
	changed := *p.pods[7]
	changed.Labels = map[string]string{"llm-d.ai/role": "prefill"}
	p.pods[7] = &changed
	p.publish()
	prefill := 0
	for i := range list {
		if list[i].Role == "prefill" {
			prefill++
		}
	}
	if len(list) != pods || prefill != 1 {
		t.Errorf("got %d workers, %d of them for prefill, want %d and 1", len(list), prefill, pods)
	}
	p.pods = p.pods[:3]
	p.publish()
	if len(p.known) != 3 || len(list) != 3 {
		t.Errorf("got %d pods known and %d workers, want 3", len(p.known), len(list))
	}
}

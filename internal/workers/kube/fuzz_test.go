package kube

import (
	"encoding/json"
	"net"
	"net/url"
	"reflect"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
)

// FuzzPod reads any pod: what becomes a worker is valid, at the pod's own address, and so are its events.
func FuzzPod(f *testing.F) {
	for _, pod := range []string{
		podText("u1", "10.0.0.1", "True", ""),
		`{"metadata":{"name":"a","annotations":{"kvlane.dev/events":"tcp://$ip:5557","kvlane.dev/replay":"tcp://$ip:5558","kvlane.dev/ranks":"4","kvlane.dev/rank-by":"header"}},"status":{"podIP":"::1"}}`,
		`{"metadata":{"name":"a","annotations":{"kvlane.dev/events":"tcp://10.9.9.9:1","kvlane.dev/speed":"NaN","kvlane.dev/ranks":"99999999999999999999"},"labels":{"llm-d.ai/role":"decode"}},"status":{"podIP":"10.0.0.1"}}`,
		`{"metadata":{"name":"a","labels":{"llm-d.ai/engine-type":"sglang","kvlane.dev/bootstrap-port":"70000"},"annotations":{"kvlane.dev/receiver-init-ports":"1,2,x","kvlane.dev/models":"a,,b"}},"status":{"podIP":"10.0.0.1"}}`,
		`{"metadata":{"name":"a","annotations":{"kvlane.dev/role":"encode"}},"status":{"phase":"Failed","podIP":"fe80::1%25eth0"}}`,
		`{"metadata":{"name":"a","annotations":{"kvlane.dev/start-rank":"-1","kvlane.dev/ranks":"2147483647","kvlane.dev/events":"tcp://10.0.0.1:65535"}},"status":{"podIP":"10.0.0.1"}}`,
	} {
		for i := range 3 {
			f.Add([]byte(pod), i, i == 1, "")
			f.Add([]byte(pod), i, i == 1, `{"Engine":"sglang","Ranks":2,"StartRank":1,"BlockSize":16,"BootstrapPort":8998,"Models":["m"],"Events":{"Endpoint":"tcp://10.0.0.1:5557","Replay":"tcp://10.0.0.2:1"}}`)
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte, i int, rankPerPort bool, answer string) {
		var p Pod
		if json.Unmarshal(raw, &p) != nil || i < 0 || i > 64 {
			return
		}
		if c := p.DeepCopyObject(); !reflect.DeepEqual(c, &p) {
			t.Fatalf("got another copy %+v of %+v", c, &p)
		}
		_, _ = p.Status.unready(), p.Status.over()
		k := config.Kubernetes{RankPerPort: rankPerPort, Worker: config.DefaultKubernetes().Worker}
		var facts *workers.Facts
		if answer != "" {
			facts = &workers.Facts{}
			_ = json.Unmarshal([]byte(answer), facts)
		}
		before, _ := json.Marshal(&p)
		w, left, err := describe(&k, &p, 8000, i, facts)
		again, leftAgain, errAgain := describe(&k, &p, 8000, i, facts)
		if !reflect.DeepEqual(w, again) || text(left) != text(leftAgain) || text(err) != text(errAgain) {
			t.Fatalf("got %+v (%v, %v), then %+v (%v, %v)", w, left, err, again, leftAgain, errAgain)
		}
		if after, _ := json.Marshal(&p); string(after) != string(before) {
			t.Fatalf("got a changed pod %s, want %s", after, before)
		}
		if err != nil {
			return
		}
		if wrong := w.Problems(); len(wrong) > 0 {
			t.Fatalf("%s: got %+v with %v, want a valid worker", raw, w, wrong)
		}
		if want := net.JoinHostPort(p.Status.PodIP, "8000"); w.Address != want {
			t.Fatalf("got address %q, want %q", w.Address, want)
		}
		for _, e := range []string{w.Events.Endpoint, w.Events.Replay} {
			if e == "" || e == config.PushEndpoint {
				continue
			}
			if u, err := url.Parse(e); err != nil || u.Hostname() != p.Status.PodIP {
				t.Fatalf("%s: got events at %q, want those of %s", raw, e, p.Status.PodIP)
			}
		}
	})
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// FuzzPool reads any InferencePool.
func FuzzPool(f *testing.F) {
	f.Add([]byte(poolText), []byte(podText("u1", "10.0.0.1", "True", "")))
	f.Add([]byte(`{"spec":{"targetPorts":[{"number":-1},{"number":70000},{"number":8000},{"number":8000}],"selector":{"matchLabels":{"":"","a b":"\n"}}}}`), []byte(podText("", "::1", "True", "")))
	f.Add([]byte(`{"spec":{"targetPorts":null,"endpointPickerRef":{"port":{"number":1e3}}}}`), []byte(`{"status":{"podIP":"not an address"}}`))
	f.Fuzz(func(t *testing.T, raw, podRaw []byte) {
		var spec Pool
		var pod Pod
		if json.Unmarshal(raw, &spec) != nil || json.Unmarshal(podRaw, &pod) != nil || len(spec.Spec.TargetPorts) > 100 {
			return
		}
		if c := spec.DeepCopyObject(); !reflect.DeepEqual(c, &spec) {
			t.Fatalf("got another copy %+v of %+v", c, &spec)
		}
		l := &taken{}
		k := config.Kubernetes{Worker: config.DefaultKubernetes().Worker}
		s := &Source{opts: Options{Kubernetes: &k, Set: l.set}, namespace: "ns", ctx: t.Context()}
		p := s.newPool("p")
		p.spec, p.listed, p.synced, p.pods = &spec, true, true, []*Pod{&pod}
		p.publish()
		list := l.last["kubernetes:ns/p"]
		if len(list) > len(spec.Spec.TargetPorts) {
			t.Fatalf("got %d workers of one pod with %d ports", len(list), len(spec.Spec.TargetPorts))
		}
		for i := range list {
			if wrong := list[i].Problems(); len(wrong) > 0 || !strings.HasPrefix(list[i].Address, strings.TrimSuffix(net.JoinHostPort(pod.Status.PodIP, ""), ":")) {
				t.Fatalf("got worker %+v with %v, want a valid one at %s", list[i], wrong, pod.Status.PodIP)
			}
		}
		s.Pools()
		s.Waiting()
	})
}

package kube

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// The list of pods under failures of the API server. client-go is responsible for lists and
// watches as such; these tests cover what Kvlane's workers need of it.

// seen is the last known list of pods.
type seen struct {
	mu  sync.Mutex
	all map[string]*Pod
}

func (k *seen) names() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(k.all)), " ")
}

func (k *seen) until(t *testing.T, want string) {
	t.Helper()
	waitFor(t, func() bool { return k.names() == want })
}

// followPods follows the pods of the fake server until the test ends.
func followPods(t *testing.T, c *Client) *seen {
	t.Helper()
	k := &seen{}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		follow(ctx, collection{from: c.of[podVersion], resource: "pods", namespace: "ns", labels: "app=llm", failed: func(error) {}}, func(all []*Pod) {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.all = map[string]*Pod{}
			for _, p := range all {
				k.all[p.Name] = p
			}
		})
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return k
}

func TestPodsAreListedByAnyServer(t *testing.T) {
	for name, old := range map[string]bool{"by a watch": false, "in pages": true} {
		t.Run(name, func(t *testing.T) {
			api, c := newAPIServer(t)
			api.old = old
			for _, n := range []string{"a", "b", "c", "d", "e"} {
				api.put(podsPath, n, podText("u"+n, "10.0.0.1", "True", `, "managedFields": [{"manager": "kubelet"}]`))
			}
			k := followPods(t, c)
			k.until(t, "a b c d e")
			k.mu.Lock()
			defer k.mu.Unlock()
			if p := k.all["e"]; p.UID != "ue" || p.Status.PodIP != "10.0.0.1" || p.Status.unready() != "" || p.ManagedFields != nil {
				t.Errorf("pod %+v", p)
			}
		})
	}
}

func TestAnEmptyListIsAListToo(t *testing.T) {
	_, c := newAPIServer(t)
	k := followPods(t, c)
	waitFor(t, func() bool { k.mu.Lock(); defer k.mu.Unlock(); return k.all != nil })
	k.until(t, "")
}

func TestAVersionThatTheServerDoesNotKnowIsListedAnew(t *testing.T) {
	for name, lose := range map[string]func(api *apiServer){
		"too old, in the stream": func(api *apiServer) { api.forget() },
		"too old, by status":     func(api *apiServer) { api.set(func() { api.byStatus = true }); api.forget() },
		// Without a new list the watch would wait until versions reach that number again.
		"newer than the server's, in the stream": func(api *apiServer) { api.restore() },
		"newer than the server's, by status":     func(api *apiServer) { api.set(func() { api.byStatus = true }); api.restore() },
	} {
		t.Run(name, func(t *testing.T) {
			api, c := newAPIServer(t)
			for _, n := range []string{"a", "b", "c", "d"} {
				api.put(podsPath, n, podText("u"+n, "10.0.0.1", "True", ""))
			}
			k := followPods(t, c)
			k.until(t, "a b c d")
			api.setDown(true)
			api.cutWatches()
			api.remove(podsPath, "b")
			api.put(podsPath, "e", podText("ue", "10.0.0.2", "True", ""))
			lose(api)
			api.setDown(false)
			k.until(t, "a c d e")
		})
	}
}

func TestDeletionTakesAwayWhatWasThereAndAMissedOneToo(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", ""))
	k := followPods(t, c)
	k.until(t, "a b")
	// Its labels were changed at the same time: the event has the last state, which the
	// selector does not match.
	api.put(podsPath, "a", strings.Replace(podText("u1", "10.0.0.1", "True", ""), `"llm"`, `"off"`, 1))
	k.until(t, "b")
	api.remove(podsPath, "a")
	// Deleted and created again, with another UID, while no watch was open.
	api.setDown(true)
	api.cutWatches()
	api.remove(podsPath, "b")
	api.put(podsPath, "b", podText("u3", "10.0.0.3", "True", ""))
	api.setDown(false)
	waitFor(t, func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return len(k.all) == 1 && k.all["b"].UID == "u3"
	})
}

// After a busy answer the request is repeated at the time that the server names.
func TestABusyServerIsAskedAgain(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	api.busy = 2
	followPods(t, c).until(t, "a")
}

func TestKubeconfigs(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), []byte("PEM"), 0o600); err != nil {
		t.Fatal(err)
	}
	const whole = `{apiVersion: v1, kind: Config, current-context: b, contexts: [{name: a, context: {cluster: x, user: v}}, {name: b, context: {cluster: c, user: u, namespace: ns}}],
clusters: [{name: c, cluster: {server: "https://h:1", certificate-authority: ca.pem}}], users: [{name: u, user: {tokenFile: ca.pem}}]}`
	file := filepath.Join(dir, "config")
	read := func(text string) (Access, error) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return Kubeconfig(file)
	}
	got, err := read(whole)
	if err != nil {
		t.Fatal(err)
	}
	pem := filepath.Join(dir, "ca.pem")
	if c := got.Config; c.Host != "https://h:1" || c.CAFile != pem || c.BearerTokenFile != pem || got.Namespace != "ns" {
		t.Errorf("access %+v", got)
	}
	for name, bad := range map[string]string{
		"no context": strings.Replace(whole, "current-context: b", "current-context: z", 1),
		"no cluster": strings.Replace(whole, "[{name: c, cluster", "[{name: d, cluster", 1),
		"no file":    strings.Replace(whole, "ca.pem", "none.pem", 1),
		"not YAML":   "{",
		"empty":      "",
	} {
		if a, err := read(bad); err == nil || !strings.Contains(err.Error(), "kubeconfig "+file) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
	if _, err := Kubeconfig(filepath.Join(dir, "none")); err == nil {
		t.Error("a missing file is accepted")
	}
}

func TestOutsideOfAPodThereIsNoAccess(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := InCluster(); err == nil || !strings.Contains(err.Error(), "name a kubeconfig") {
		t.Error(err)
	}
}

// A service account's token is renewed while the pod runs, so its file is read again.
func TestTheTokenIsTakenFromItsFile(t *testing.T) {
	api, _ := newAPIServer(t)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("two\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	api.accepted = "two"
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	c, err := NewClient(Access{Config: &rest.Config{Host: api.URL, BearerToken: "one", BearerTokenFile: file, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	followPods(t, c).until(t, "a")
}

package kube

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"math/big"
	"net"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// taken is the last list of each source.
type taken struct {
	mu   sync.Mutex
	last map[string][]workers.Entry
	sets int
}

func (l *taken) set(source string, list []workers.Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last == nil {
		l.last = map[string][]workers.Entry{}
	}
	l.last[source] = list
	l.sets++
}

// until waits for a source to list workers that read as wanted: "name address", then
// whatever is unusual.
func (l *taken) until(t *testing.T, source string, want ...string) {
	t.Helper()
	var got []string
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		l.mu.Lock()
		list, known := l.last[source]
		got = got[:0]
		for i := range list {
			got = append(got, line(&list[i]))
		}
		l.mu.Unlock()
		slices.Sort(got)
		if known && slices.Equal(got, want) {
			return
		}
	}
	t.Fatalf("%s lists\n  %s\nnot\n  %s", source, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
}

func line(e *workers.Entry) string {
	s := e.Name + " " + e.Address + " " + e.Identity
	if e.Role != "both" {
		s += " " + e.Role
	}
	if e.Ranks > 0 {
		s += fmt.Sprintf(" rank %d by %s", e.StartRank, e.RankBy)
	}
	if e.Events.Endpoint != "" {
		s += " " + e.Events.Endpoint
	}
	if e.Draining {
		s += " draining"
	}
	if e.Unready != "" {
		s += " unready"
	}
	return s
}

func start(t *testing.T, c *Client, k config.Kubernetes, o Options) (*Source, *taken) {
	l := &taken{}
	k.Worker = config.DefaultKubernetes().Worker
	o.Client, o.Kubernetes, o.Set, o.Log = c, &k, l.set, zerolog.Nop()
	s := Start(t.Context(), o)
	t.Cleanup(s.Close)
	return s, l
}

const poolText = `{"spec": {"selector": {"matchLabels": {"app": "llm"}}, "targetPorts": [{"number": 8000}], "endpointPickerRef": {"name": "epp", "port": {"number": 9002}}}}`

func podText(uid, ip, ready, more string) string {
	return fmt.Sprintf(`{"metadata": {"uid": %q, "labels": {"app": "llm"}%s}, "status": {"podIP": %q, "phase": "Running", "conditions": [{"type": "Ready", "status": %q}]}}`, uid, more, ip, ready)
}

func TestPodsOfAPoolComeSickenDrainAndGo(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", ""))
	api.put(podsPath, "c", podText("u3", "10.0.0.3", "False", ""))
	api.put(podsPath, "pending", podText("u4", "", "False", ""))
	api.put(podsPath, "other", `{"metadata": {"uid": "u9", "labels": {"app": "db"}}, "status": {"podIP": "10.0.0.9"}}`)
	s, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{})
	waitFor(t, func() bool { return s.Waiting() == "there is no InferencePool ns/llm" })
	api.put(poolsPath, "llm", poolText)
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1", "b:8000 10.0.0.2:8000 u2", "c:8000 10.0.0.3:8000 u3 unready")
	if why := s.Waiting(); why != "" {
		t.Errorf("still waiting: %s", why)
	}
	api.put(podsPath, "c", podText("u3", "10.0.0.3", "True", ""))
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", `, "deletionTimestamp": "2026-01-01T00:00:00Z"`))
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1 draining", "b:8000 10.0.0.2:8000 u2", "c:8000 10.0.0.3:8000 u3")
	// The last ready pods stay in service until another one is ready.
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", `, "deletionTimestamp": "2026-01-01T00:00:00Z"`))
	api.put(podsPath, "c", podText("u3", "10.0.0.3", "False", ""))
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1", "b:8000 10.0.0.2:8000 u2", "c:8000 10.0.0.3:8000 u3 unready")
	api.put(podsPath, "c", podText("u3", "10.0.0.3", "True", ""))
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1 draining", "b:8000 10.0.0.2:8000 u2 draining", "c:8000 10.0.0.3:8000 u3")
	api.remove(podsPath, "a")
	api.put(podsPath, "b", `{"metadata": {"uid": "u2", "labels": {"app": "llm-off"}}, "status": {"podIP": "10.0.0.2"}}`)
	l.until(t, "kubernetes:ns/llm", "c:8000 10.0.0.3:8000 u3")
	if got, want := s.Pools(), []workers.Pool{{Namespace: "ns", Name: "llm", Service: "epp", Port: 9002, Endpoints: []string{"10.0.0.3:8000"}}}; !reflect.DeepEqual(got, want) {
		t.Errorf("pools %+v", got)
	}
	api.put(poolsPath, "llm", strings.Replace(poolText, `"llm"`, `"db"`, 1))
	l.until(t, "kubernetes:ns/llm", "other:8000 10.0.0.9:8000 u9 unready")
	api.remove(poolsPath, "llm")
	l.until(t, "kubernetes:ns/llm")
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never")
		}
	}
}

func TestAReusedAddressBelongsToTheNewcomer(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", poolText)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", `, "creationTimestamp": "2026-01-01T00:00:00Z"`))
	_, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{})
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1")
	// Another pod, and then a new incarnation of the same pod.
	api.put(podsPath, "b", podText("u2", "10.0.0.1", "True", `, "creationTimestamp": "2026-01-02T00:00:00Z"`))
	l.until(t, "kubernetes:ns/llm", "b:8000 10.0.0.1:8000 u2")
	api.put(podsPath, "b", strings.Replace(podText("u2", "10.0.0.1", "False", ""), "Running", "Failed", 1))
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1")
	api.remove(podsPath, "b")
	api.put(podsPath, "b", podText("u3", "10.0.0.2", "True", ""))
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1", "b:8000 10.0.0.2:8000 u3")
}

func TestWorkersStayWhileTheAPIServerIsAwayAndChangesAreCaughtUpWith(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", poolText)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "True", ""))
	_, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{})
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1", "b:8000 10.0.0.2:8000 u2")
	api.setDown(true)
	api.cutWatches()
	api.remove(podsPath, "a")
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1", "b:8000 10.0.0.2:8000 u2")
	api.setDown(false)
	l.until(t, "kubernetes:ns/llm", "b:8000 10.0.0.2:8000 u2")
	// History is dropped while no watch is open: a new list reveals what was deleted.
	api.mu.Lock()
	before := api.lists
	api.mu.Unlock()
	api.setDown(true)
	api.cutWatches()
	api.remove(podsPath, "b")
	api.put(podsPath, "c", podText("u3", "10.0.0.3", "True", ""))
	api.forget()
	api.setDown(false)
	l.until(t, "kubernetes:ns/llm", "c:8000 10.0.0.3:8000 u3")
	api.mu.Lock()
	defer api.mu.Unlock()
	if api.lists == before {
		t.Error("a forgotten history was not listed again")
	}
	if slices.ContainsFunc(api.tokens, func(s string) bool { return s != "Bearer t" }) {
		t.Errorf("tokens %q", api.tokens)
	}
}

func TestSeveralPoolsPortsAndRanks(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "one", strings.Replace(poolText, `{"number": 8000}`, `{"number": 8000}, {"number": 9100}`, 1))
	api.put(poolsPath, "two", strings.Replace(poolText, `"llm"`, `"db"`, 1))
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", `, "annotations": {"kvlane.dev/events": "tcp://$ip:5557"}`))
	api.put(podsPath, "d", `{"metadata": {"uid": "u2", "labels": {"app": "db", "llm-d.ai/role": "prefill"}}, "status": {"podIP": "fd00::1", "conditions": [{"type": "Ready", "status": "True"}]}}`)
	_, l := start(t, c, config.Kubernetes{Pools: []string{"one", "two"}, RankPerPort: true}, Options{})
	l.until(t, "kubernetes:ns/one", "a:8000 10.0.0.1:8000 u1 rank 0 by port tcp://10.0.0.1:5557", "a:9100 10.0.0.1:9100 u1 rank 1 by port tcp://10.0.0.1:5558")
	l.until(t, "kubernetes:ns/two", "d:8000 [fd00::1]:8000 u2 prefill rank 0 by port")
}

// A pool that was never created, or was deleted, does not delay readiness.
func TestAPoolThatDoesNotExistIsNotWaitedFor(t *testing.T) {
	api, c := newAPIServer(t)
	s, l := start(t, c, config.Kubernetes{Pools: []string{"ghost", "llm"}}, Options{})
	waitFor(t, func() bool { return len(s.Missing()) == 2 })
	if why := s.Waiting(); why != "there is no InferencePool ns/ghost" {
		t.Errorf("without any pool: waiting for %q", why)
	}
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	api.put(poolsPath, "llm", poolText)
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1")
	if why, missing := s.Waiting(), s.Missing(); why != "" || !slices.Equal(missing, []string{"ns/ghost"}) {
		t.Errorf("waiting for %q, missing %q", why, missing)
	}
	api.put(poolsPath, "ghost", strings.Replace(poolText, `"llm"`, `"db"`, 1))
	waitFor(t, func() bool { return len(s.Missing()) == 0 && s.Waiting() == "" })
	api.remove(poolsPath, "ghost")
	waitFor(t, func() bool { return slices.Equal(s.Missing(), []string{"ns/ghost"}) && s.Waiting() == "" })
}

// If a pool could not be looked up it is unknown whether it exists, so readiness waits.
func TestAPoolThatWasNotLookedForIsWaitedFor(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", poolText)
	api.set(func() { api.deaf = "ghost" })
	s, _ := start(t, c, config.Kubernetes{Pools: []string{"llm", "ghost"}}, Options{})
	waitFor(t, func() bool { return s.Waiting() == "InferencePool ns/ghost is not known yet" })
	api.set(func() { api.deaf = "" })
	waitFor(t, func() bool { return s.Waiting() == "" })
}

// A role that lacks a kind or a verb is said with what is refused, until it is allowed; what is allowed goes on meanwhile.
func TestWhatTheAPIServerRefusesIsSaid(t *testing.T) {
	for forbidden, waits := range map[string]string{podsPath: "pods of ns/llm are not known yet", "watch " + podsPath: "", poolsPath: "InferencePool ns/llm is not known yet"} {
		t.Run(forbidden, func(t *testing.T) {
			api, c := newAPIServer(t)
			api.forbidden = forbidden
			api.put(poolsPath, "llm", `{"spec": {"selector": {"matchLabels": {"app": "llm"}}, "targetPorts": [{"number": 8000}]}}`)
			api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
			s, _ := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{})
			of := "pods of ns/llm: "
			if forbidden == poolsPath {
				of = "InferencePool ns/llm: "
			}
			waitFor(t, func() bool { return len(s.Failing()) > 0 && s.Waiting() == waits })
			if got := s.Failing(); len(got) != 1 || !strings.HasPrefix(got[0], of) || !strings.Contains(got[0], `User "kvlane" cannot list resource "pods": let Kvlane's service account get, list and watch it`) {
				t.Errorf("got %q, want what is forbidden, with advice", got)
			}
			if forbidden == podsPath { // of a pool that is gone no pods are missed
				api.remove(poolsPath, "llm")
				waitFor(t, func() bool { return s.Failing() == nil })
				api.put(poolsPath, "llm", `{"spec": {"selector": {"matchLabels": {"app": "llm"}}, "targetPorts": [{"number": 8000}]}}`)
				waitFor(t, func() bool { return len(s.Failing()) > 0 })
			}
			api.set(func() { api.forbidden = "" })
			waitFor(t, func() bool { return s.Failing() == nil && s.Waiting() == "" })
		})
	}
}

// An API server whose certificate cannot be verified is told with what to correct.
func TestCertificatesOfTheAPIServerAreAdvised(t *testing.T) {
	api, _ := newAPIServer(t)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: api.Certificate().Raw})
	expired := httptest.NewUnstartedServer(api)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(-time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	expired.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}
	expired.Config.ErrorLog = stdlog.New(io.Discard, "", 0)
	api.Config.ErrorLog = expired.Config.ErrorLog
	expired.StartTLS()
	defer expired.Close()
	past := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, c := range map[string]struct {
		host string
		of   rest.TLSClientConfig
		want string
	}{
		"another authority": {api.URL, rest.TLSClientConfig{CAData: past}, "x509: certificate signed by unknown authority"},
		"another name":      {api.URL, rest.TLSClientConfig{CAData: authority, ServerName: "elsewhere"}, "x509: certificate is valid for example.com, *.example.com, not elsewhere"},
		"expired":           {expired.URL, rest.TLSClientConfig{CAData: past}, "x509: certificate has expired or is not yet valid"},
		"right":             {api.URL, rest.TLSClientConfig{CAData: authority}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			client, err := NewClient(Access{Config: &rest.Config{Host: c.host, BearerToken: "t", TLSClientConfig: c.of}, Namespace: "ns"})
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			s, _ := start(t, client, config.Kubernetes{Selector: map[string]string{"app": "llm"}, Ports: []int{8000}}, Options{})
			waitFor(t, func() bool { return len(s.Failing()) > 0 || s.Waiting() == "" })
			text := strings.Join(s.Failing(), "\n")
			if !strings.Contains(text, c.want) || strings.Contains(text, ": correct the certificate authority or the server's name") != (c.want != "") {
				t.Errorf("got %q, want %q, with advice", text, c.want)
			}
		})
	}
}

// An API server that is gone while pods are watched is said as well; what was listed stays.
func TestAnAPIServerThatIsGoneIsSaid(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", `{"spec": {"selector": {"matchLabels": {"app": "llm"}}, "targetPorts": [{"number": 8000}]}}`)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	s, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{})
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1")
	address := api.Listener.Addr().String()
	api.Listener.Close()
	api.CloseClientConnections()
	waitFor(t, func() bool {
		failing := s.Failing()
		return len(failing) == 2 && strings.Contains(failing[0], "connection refused: it is tried again") && strings.Contains(failing[1], "connection refused: it is tried again")
	})
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1")
	again := httptest.NewUnstartedServer(api)
	again.Listener.Close()
	var err error
	if again.Listener, err = net.Listen("tcp", address); err != nil {
		t.Skip("another process took the address: ", err)
	}
	again.EnableHTTP2 = true
	again.StartTLS()
	t.Cleanup(func() { api.cutWatches(); again.Close() })
	waitFor(t, func() bool { return s.Failing() == nil })
}

// A server that has no lists by watches is asked for a list, without a warning.
func TestAnOldAPIServerIsNotWarnedOf(t *testing.T) {
	api, c := newAPIServer(t)
	api.old = true
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	var log strings.Builder
	k := config.Kubernetes{Selector: map[string]string{"app": "llm"}, Ports: []int{8000}, Worker: config.DefaultKubernetes().Worker}
	l := &taken{}
	s := Start(t.Context(), Options{Client: c, Kubernetes: &k, Set: l.set, Log: zerolog.New(zerolog.SyncWriter(&log))})
	l.until(t, "kubernetes:ns/selector", "a:8000 10.0.0.1:8000 u1")
	s.Close()
	if strings.Contains(log.String(), "list or watch ended") {
		t.Errorf("got a warning:\n%s", &log)
	}
}

// Requests and readiness do not wait while a list is passed on, which takes seconds with thousands of new pods, and requests
// do not wait for the source's lock at all.
func TestNobodyWaitsForALongList(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	k := config.Kubernetes{Selector: map[string]string{"app": "llm"}, Ports: []int{8000}, Worker: config.DefaultKubernetes().Worker}
	entered, leave := make(chan struct{}), make(chan struct{})
	s := Start(t.Context(), Options{Client: c, Kubernetes: &k, Log: zerolog.Nop(), Set: func(string, []workers.Entry) {
		close(entered)
		<-leave
	}})
	defer s.Close()
	defer close(leave)
	<-entered
	done := make(chan []string, 1)
	go func() {
		_, _ = s.Missing(), s.Failing()
		s.mu.Lock()
		defer s.mu.Unlock()
		done <- s.Pools()[0].Endpoints
	}()
	select {
	case got := <-done:
		if !slices.Equal(got, []string{"10.0.0.1:8000"}) {
			t.Errorf("got the endpoints %q, want those of the list", got)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the pools are not known while a list is passed on")
	}
}

// One reason is logged once, however often it is met, and again after it was gone.
func TestAReasonIsLoggedOnce(t *testing.T) {
	var log strings.Builder
	s := &Source{opts: Options{Log: zerolog.New(&log)}, failing: map[string]string{}}
	for _, err := range []error{errors.New("refused"), errors.New("refused"), errors.New("reset"), nil, errors.New("reset"), nil} {
		s.failed("pods")(err)
	}
	if got := strings.Count(log.String(), "list or watch ended"); got != 3 || s.Failing() != nil {
		t.Errorf("got %d lines and %q, want 3 and nothing:\n%s", got, s.Failing(), &log)
	}
}

func TestASelectorNeedsNoPool(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	s, l := start(t, c, config.Kubernetes{Selector: map[string]string{"app": "llm"}, Ports: []int{8000}}, Options{})
	l.until(t, "kubernetes:ns/selector", "a:8000 10.0.0.1:8000 u1")
	if s.Waiting() != "" {
		t.Error(s.Waiting())
	}
}

func TestALabelSelectorTakesSets(t *testing.T) {
	api, c := newAPIServer(t)
	for ip, app := range map[string]string{"10.0.0.1": "llm", "10.0.0.2": "chat", "10.0.0.3": "other"} {
		api.put(podsPath, app, strings.Replace(podText("u", ip, "True", ""), `"llm"`, `"`+app+`"`, 1))
	}
	_, l := start(t, c, config.Kubernetes{LabelSelector: "app in (llm, chat)", Ports: []int{8000}}, Options{})
	l.until(t, "kubernetes:ns/selector", "chat:8000 10.0.0.2:8000 u", "llm:8000 10.0.0.1:8000 u")
	_, l = start(t, c, config.Kubernetes{LabelSelector: "app in (llm, chat)", Selector: map[string]string{"app": "chat"}, Ports: []int{8000}}, Options{})
	l.until(t, "kubernetes:ns/selector", "chat:8000 10.0.0.2:8000 u")
}

func TestAnEngineIsHeardBeforeItGetsRequests(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", poolText)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	api.put(podsPath, "b", podText("u2", "10.0.0.2", "False", ""))
	speak := make(chan struct{})
	ask := func(ctx context.Context, address string) (workers.Facts, error) {
		select {
		case <-speak:
			return workers.Facts{Engine: "sglang", Ranks: 2, Events: config.Events{Endpoint: "tcp://" + address}}, nil
		case <-ctx.Done():
			return workers.Facts{}, ctx.Err()
		}
	}
	s, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{Ask: ask})
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1 unready", "b:8000 10.0.0.2:8000 u2 unready")
	if why := s.Asking(); !strings.Contains(why, "pod a ") {
		t.Errorf("asking: %q", why)
	}
	close(speak)
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1 rank 0 by header tcp://10.0.0.1:8000", "b:8000 10.0.0.2:8000 u2 rank 0 by header tcp://10.0.0.2:8000 unready")
	if why := s.Asking(); why != "" {
		t.Errorf("asking: %q", why)
	}
}

// The list of a pool is not made again for each of its engines that answers.
func TestAnswersAreCombined(t *testing.T) {
	api, c := newAPIServer(t)
	const pods = 300
	var want []string
	for i := range pods {
		name, ip := fmt.Sprintf("p%03d", i), fmt.Sprintf("10.0.%d.%d", i/250, 1+i%250)
		api.put(podsPath, name, podText("u"+name, ip, "True", ""))
		want = append(want, fmt.Sprintf("%s:8000 %s:8000 u%s", name, ip, name))
	}
	speak := make(chan struct{})
	ask := func(context.Context, string) (workers.Facts, error) { <-speak; return workers.Facts{}, nil }
	_, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{Ask: ask})
	api.put(poolsPath, "llm", poolText)
	waitFor(t, func() bool { l.mu.Lock(); defer l.mu.Unlock(); return len(l.last["kubernetes:ns/llm"]) == pods })
	l.mu.Lock()
	before := l.sets
	close(speak)                       // all answer
	time.Sleep(100 * time.Millisecond) // while the list is being used
	l.mu.Unlock()
	l.until(t, "kubernetes:ns/llm", want...)
	time.Sleep(500 * time.Millisecond) // further lists
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.sets - before; n > 10 {
		t.Errorf("got %d lists for %d answers, want them combined", n, pods)
	}
}

func TestAnEngineThatDoesNotAnswerIsAskedAgain(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", poolText)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", ""))
	var mu sync.Mutex
	asked := 0
	ask := func(context.Context, string) (workers.Facts, error) {
		mu.Lock()
		defer mu.Unlock()
		if asked++; asked < 2 {
			return workers.Facts{}, errors.New("still loading")
		}
		return workers.Facts{}, nil
	}
	_, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{Ask: ask})
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1")
}

func TestDescribe(t *testing.T) {
	template := config.DefaultKubernetes().Worker
	template.Events = config.Events{Endpoint: "tcp://$ip:5557", Replay: "tcp://$ip:6557"}
	base := func(change func(w *config.Worker)) config.Worker {
		w := template
		w.Name, w.Address = "p:8001", "10.0.0.1:8001"
		w.Events = config.Events{Endpoint: "tcp://10.0.0.1:5558", Replay: "tcp://10.0.0.1:6558"}
		change(&w)
		return w
	}
	for _, c := range []struct {
		name                string
		labels, annotations map[string]string
		keys                []string
		facts               *workers.Facts
		want                config.Worker
		err                 string
	}{
		{name: "the template", want: base(func(*config.Worker) {})},
		{name: "dynamo's labels", labels: map[string]string{"nvidia.com/dynamo-component-type": "worker", "nvidia.com/dynamo-sub-component-type": "decode"},
			want: base(func(w *config.Worker) { w.Role = "decode" })},
		{name: "dynamo's frontend", labels: map[string]string{"nvidia.com/dynamo-component-type": "frontend"}, err: "not a worker"},
		{name: "llm-d's labels", labels: map[string]string{"llm-d.ai/role": "prefill-decode", "llm-d.ai/engine-type": "sglang", "topology.kubernetes.io/zone": "z1"},
			want: base(func(w *config.Worker) { w.Engine, w.Labels = "sglang", map[string]string{"zone": "z1"} })},
		{name: "ours wins", labels: map[string]string{"llm-d.ai/role": "prefill", "kvlane.dev/role": "decode"},
			want: base(func(w *config.Worker) { w.Role = "decode" })},
		{name: "other keys", labels: map[string]string{"llm-d.ai/role": "prefill", "part": "decode"}, keys: []string{"part"},
			want: base(func(w *config.Worker) { w.Role = "decode" })},
		{name: "annotations", annotations: map[string]string{
			"kvlane.dev/models": "a, b", "kvlane.dev/ranks": "4", "kvlane.dev/start-rank": "08", "kvlane.dev/block-size": "32", "kvlane.dev/speed": "1.5",
			"kvlane.dev/events": "http://$ip:$port", "kvlane.dev/replay": "", "kvlane.dev/topic": "kv", "kvlane.dev/bootstrap-port": "8998", "kvlane.dev/rank-by": "none",
		}, want: base(func(w *config.Worker) {
			w.Models, w.Ranks, w.StartRank, w.BlockSize, w.Speed, w.RankBy = []string{"a", "b"}, 4, 8, 32, 1.5, "none"
			w.Events = config.Events{Endpoint: "http://10.0.0.1:8001", Topic: "kv"}
			w.Disagg.BootstrapPort = 8998
		})},
		{name: "what connectors need", annotations: map[string]string{
			"kvlane.dev/receiver-host": "$ip", "kvlane.dev/receiver-init-ports": "07300, 7301", "kvlane.dev/receiver-alloc-ports": "7400,7401", "kvlane.dev/receiver-query-port": "7500",
			"kvlane.dev/zmq": "$ip:14579", "kvlane.dev/engine-id": "kv-$pod", "kvlane.dev/side-channel-host": "$ip", "kvlane.dev/side-channel-port": "5601",
		}, want: base(func(w *config.Worker) {
			w.Disagg = config.WorkerDisagg{ReceiverHost: "10.0.0.1", InitPorts: []int{7300, 7301}, AllocPorts: []int{7400, 7401}, QueryPort: 7500,
				ZMQ: "10.0.0.1:14579", EngineID: "kv-p", SideHost: "10.0.0.1", SidePort: 5601}
		})},
		{name: "what connectors cannot use", annotations: map[string]string{"kvlane.dev/zmq": "10.0.0.1", "kvlane.dev/receiver-init-ports": "1,x"},
			want: base(func(*config.Worker) {}), err: "\"10.0.0.1\" is not ip:port"},
		{name: "what cannot be read is left out", annotations: map[string]string{"kvlane.dev/ranks": "four", "kvlane.dev/speed": "0", "kvlane.dev/engine": "x", "kvlane.dev/role": "boss", "kvlane.dev/topic": "t"},
			want: base(func(w *config.Worker) { w.Events.Topic = "t" }), err: "role \"boss\" is not known"},
		{name: "the engine fills in what is open", facts: &workers.Facts{Engine: "sglang", Ranks: 2, BlockSize: 64, Models: []string{"m"}, Events: config.Events{Endpoint: "tcp://10.0.0.1:7000"}},
			want: base(func(w *config.Worker) { w.Engine, w.Ranks, w.BlockSize, w.Models = "sglang", 2, 64, []string{"m"} })},
		{name: "annotations win over the engine", annotations: map[string]string{"kvlane.dev/ranks": "3", "kvlane.dev/engine": "vllm"}, facts: &workers.Facts{Engine: "sglang", Ranks: 2},
			want: base(func(w *config.Worker) { w.Ranks = 3 })},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Labels: c.labels, Annotations: c.annotations}}
			p.Status.PodIP = "10.0.0.1"
			got, left, notWorker := describe(&config.Kubernetes{Worker: template, RoleLabels: c.keys}, p, 8001, 1, c.facts)
			err := errors.Join(left, notWorker)
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if !errors.Is(err, errNotWorker) && !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}

// Whatever a pod or an engine reports, the result is a worker that the configuration could
// have described, or none: the rest of Kvlane relies on it.
func TestNobodyDescribesWhatAConfigurationCouldNot(t *testing.T) {
	plain := config.DefaultKubernetes().Worker
	feeds := plain
	feeds.Events = config.Events{Endpoint: "tcp://$ip:5557", Replay: "tcp://$ip:6557"}
	late := plain
	late.Events.Endpoint = "tcp://$ip:65530"
	const host = "10.0.0.1"
	pod := func(hints string) *Pod {
		p := &Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{}}}
		p.Status.PodIP = host
		for hint := range strings.FieldsSeq(hints) {
			key, value, _ := strings.Cut(hint, "=")
			p.Annotations[Prefix+key] = value
		}
		return p
	}
	for _, c := range []struct {
		hints    string
		template config.Worker
		facts    workers.Facts
		port     int // 0: 8000
		perPort  bool
		want     string // "ranks start by events replay"
		left     []string
	}{
		{hints: "ranks=60000 rank-by=port", template: plain, want: "0 0 header", left: []string{"kvlane.dev/rank-by, kvlane.dev/ranks left out: ranks: 60000 must be at most 1024"}},
		{hints: "ranks=1000 rank-by=port", template: plain, port: 65000, want: "0 0 header", left: []string{"ranks: rank 999 would be at port 65999: ports end at 65535"}},
		{hints: "rank-by=port", template: plain, want: "0 0 header", left: []string{"kvlane.dev/rank-by left out: rank_by: port needs ranks"}},
		{hints: "start-rank=4", template: plain, want: "0 0 header", left: []string{"kvlane.dev/start-rank left out: start_rank: needs ranks"}},
		{hints: "start-rank=70000 ranks=2", template: plain, want: "0 0 header", left: []string{"start_rank: 70000 must be at most 65535"}},
		{hints: "ranks=-1", template: plain, want: "0 0 header", left: []string{"ranks: -1 must be at least 0"}},
		{hints: "ranks=4 start-rank=8", template: plain, want: "4 8 header"},
		{hints: "ranks=4", template: plain, perPort: true, want: "1 1 port", left: []string{"kvlane.dev/ranks: not with rank_per_port"}},
		{hints: "ranks=16", template: late, want: "0 0 header tcp://10.0.0.1:65531", left: []string{"kvlane.dev/ranks left out: events.endpoint: rank 15 would be at port 65546"}},
		{hints: "events=garbage", template: plain, want: "0 0 header", left: []string{`kvlane.dev/events left out: events.endpoint: "garbage" is not like tcp://$ip:port`}},
		{hints: "events=garbage replay=tcp://$ip:7000", template: feeds, want: "0 0 header tcp://10.0.0.1:5558 tcp://10.0.0.1:6558", left: []string{"kvlane.dev/events, kvlane.dev/replay left out"}},
		{hints: "events=ipc:///etc/passwd", template: feeds, want: "0 0 header tcp://10.0.0.1:5558 tcp://10.0.0.1:6558", left: []string{"kvlane.dev/events left out"}},
		{hints: "events=http://169.254.169.254", template: plain, want: "0 0 header", left: []string{"is not at the pod's own address: a pod speaks for itself only"}},
		{hints: "events=http://$ip@169.254.169.254/", template: plain, want: "0 0 header", left: []string{"is not at the pod's own address"}},
		{hints: "events=tcp://10.0.0.2:5557", template: plain, want: "0 0 header", left: []string{"is not at the pod's own address"}},
		{hints: "events=tcp://$ip:5557x", template: plain, want: "0 0 header", left: []string{"kvlane.dev/events left out"}},
		{hints: "events=tcp://$ip:70000", template: plain, want: "0 0 header", left: []string{"port must be 1 to 65535"}},
		{hints: "replay=tcp://10.0.0.2:1", template: feeds, want: "0 0 header tcp://10.0.0.1:5558 tcp://10.0.0.1:6558", left: []string{"kvlane.dev/replay left out"}},
		{hints: "events=push:", template: plain, want: "0 0 header push:"},
		{hints: "events=https://$ip:$port/x", template: plain, want: "0 0 header https://10.0.0.1:8000/x"},
		{hints: "bootstrap-port=65536", template: plain, want: "0 0 header", left: []string{"kvlane.dev/bootstrap-port left out: disagg.bootstrap_port: 65536 must be at most 65535"}},
		{hints: "zmq=10.9.9.9:14579", template: plain, want: "0 0 header", left: []string{"kvlane.dev/zmq left out", "is not the pod's own address"}},
		{hints: "side-channel-host=169.254.169.254", template: plain, want: "0 0 header", left: []string{"kvlane.dev/side-channel-host left out"}},
		{hints: "receiver-host=other.svc", template: plain, want: "0 0 header", left: []string{"kvlane.dev/receiver-host left out"}},
		{hints: "receiver-host=$ip side-channel-host=$ip zmq=$ip:14579", template: plain, want: "0 0 header"},
		{hints: "zmq=$ip:99999 receiver-init-ports=1,70000 side-channel-port=-1", template: plain, want: "0 0 header", left: []string{"kvlane.dev/zmq left out", "kvlane.dev/receiver-init-ports left out", "kvlane.dev/side-channel-port left out"}},
		{hints: "speed=Inf", template: plain, want: "0 0 header", left: []string{"kvlane.dev/speed left out: speed: +Inf must be at most 1000000"}},
		{hints: "speed=NaN block-size=-4", template: plain, want: "0 0 header", left: []string{"kvlane.dev/speed", "kvlane.dev/block-size left out"}},
		{facts: workers.Facts{Ranks: 5000}, template: plain, want: "0 0 header", left: []string{"what the engine says is left out: ranks: 5000 must be at most 1024"}},
		{facts: workers.Facts{Ranks: 2, Events: config.Events{Endpoint: "tcp://10.0.0.2:5557"}}, template: plain, want: "2 0 header", left: []string{"what the engine says is left out: events.endpoint"}},
		{facts: workers.Facts{BlockSize: -1, BootstrapPort: 1 << 20}, template: plain, want: "0 0 header", left: []string{"block_size", "disagg.bootstrap_port"}},
		{facts: workers.Facts{Ranks: 16}, template: late, want: "0 0 header tcp://10.0.0.1:65531", left: []string{"what the engine says is left out: events.endpoint"}},
		{hints: "ranks=2", facts: workers.Facts{Ranks: 5000, StartRank: 9}, template: plain, want: "2 9 header"},
		{hints: "models=" + names(2048), template: plain, want: "0 0 header"},
		{hints: "models=" + names(2049), template: plain, want: "0 0 header", left: []string{"kvlane.dev/models: has 4097 bytes, want at most 4096"}},
		{hints: "topic=" + strings.Repeat("t", 5000), template: plain, want: "0 0 header", left: []string{"kvlane.dev/topic: has 5000 bytes"}},
		{hints: "ranks=32 models=" + names(2048), template: plain, want: "32 0 header"},
		{hints: "ranks=33 models=" + names(2048), template: plain, want: "33 0 header", left: []string{"kvlane.dev/models left out: models: 2048 models on 33 ranks: at most 65536 together"}},
		{hints: "ranks=1024", facts: workers.Facts{Models: strings.Split(names(65), ",")}, template: plain, want: "1024 0 header", left: []string{"what the engine says is left out: models: 65 models on 1024 ranks"}},
	} {
		if c.port == 0 {
			c.port = 8000
		}
		w, left, err := describe(&config.Kubernetes{Worker: c.template, RankPerPort: c.perPort}, pod(c.hints), c.port, 1, &c.facts)
		if err != nil {
			t.Errorf("%s %+v: left out whole: %v", c.hints, c.facts, err)
			continue
		}
		got := strings.TrimSpace(fmt.Sprintf("%d %d %s %s %s", w.Ranks, w.StartRank, w.RankBy, w.Events.Endpoint, w.Events.Replay))
		if got != c.want {
			t.Errorf("%s %+v: %q, want %q", c.hints, c.facts, got, c.want)
		}
		if (left == nil) != (len(c.left) == 0) {
			t.Errorf("%s %+v: left out %v, want %q", c.hints, c.facts, left, c.left)
		}
		for _, want := range c.left {
			if left == nil || !strings.Contains(left.Error(), want) {
				t.Errorf("%s %+v: left out %v, want %q", c.hints, c.facts, left, want)
			}
		}
		if problems := w.Problems(); len(problems) > 0 {
			t.Errorf("%s %+v: %v", c.hints, c.facts, problems)
		}
	}
	// Hosts that the operator lists may be named, others may not.
	w, left, err := describe(&config.Kubernetes{Worker: plain, ConnectorHosts: []string{"10.9.9.9", "side.svc"}},
		pod("zmq=10.9.9.9:14579 side-channel-host=side.svc receiver-host=other.svc"), 8000, 1, &workers.Facts{})
	if err != nil || w.Disagg.ZMQ != "10.9.9.9:14579" || w.Disagg.SideHost != "side.svc" || w.Disagg.ReceiverHost != "" || left == nil || !strings.Contains(left.Error(), "kvlane.dev/receiver-host left out") {
		t.Errorf("with connector_hosts: got %+v, left out %v, %v, want the listed hosts and no other", w.Disagg, left, err)
	}
	// Errors in the API server's own data make the pod no worker, whatever the hints.
	p := pod("")
	p.Status.PodIP = "nowhere"
	if _, _, err := describe(&config.Kubernetes{Worker: plain}, p, 8000, 0, nil); err == nil || !strings.Contains(err.Error(), "is not ip:port") {
		t.Errorf("a pod without an IP address: %v", err)
	}
	if _, _, err := describe(&config.Kubernetes{Worker: plain}, pod(""), 65536, 0, nil); err == nil {
		t.Error("a port beyond the last")
	}
}

// names is a list of n models of one letter.
func names(n int) string { return strings.TrimSuffix(strings.Repeat("a,", n), ",") }

// What a pod's author or a controller writes is clipped before it is logged, or shown as the reason of a worker.
func TestLongTextsOfPodsAreClipped(t *testing.T) {
	var lines strings.Builder
	k := config.Kubernetes{Ports: []int{8000}, Worker: config.DefaultKubernetes().Worker}
	l := &taken{}
	s := &Source{opts: Options{Kubernetes: &k, Set: l.set, Log: zerolog.New(&lines)}, namespace: "ns", ctx: t.Context()}
	p := s.newPool("")
	long := strings.Repeat("9", 250<<10)
	var pod Pod
	text := strings.Replace(podText("u1", "10.0.0.1", "False", ""), `"False"`, `"False", "message": "`+long+`"`, 1)
	if err := json.Unmarshal([]byte(text), &pod); err != nil {
		t.Fatal(err)
	}
	pod.Annotations = map[string]string{Prefix + "role": long, Prefix + "ranks": long}
	p.pods, p.synced = []*Pod{&pod}, true
	p.publish()
	if n := lines.Len(); n == 0 || n > 2000 {
		t.Errorf("got %d bytes in the log, want at most 2000: %.300s", n, lines.String())
	}
	list := l.last["kubernetes:ns/selector"]
	if len(list) != 1 || !strings.HasPrefix(list[0].Unready, "pod not ready: 99") || len(list[0].Unready) > 1100 {
		t.Errorf("got %d workers, the first not ready because of %.100v, want a reason of at most 1100 bytes", len(list), list)
	}
}

func TestAPodThatCannotBeAWorkerLeavesTheOthers(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", poolText)
	api.put(podsPath, "a", podText("u1", "10.0.0.1", "True", `, "annotations": {"kvlane.dev/ranks": "60000", "kvlane.dev/rank-by": "port"}`))
	api.put(podsPath, "b", podText("u2", "10.0.0.2.x", "True", ""))
	api.put(podsPath, "c", podText("u3", "10.0.0.3", "True", ""))
	_, l := start(t, c, config.Kubernetes{Pools: []string{"llm"}}, Options{})
	l.until(t, "kubernetes:ns/llm", "a:8000 10.0.0.1:8000 u1", "c:8000 10.0.0.3:8000 u3")
}

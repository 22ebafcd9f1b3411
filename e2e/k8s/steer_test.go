//go:build linux

package k8s

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/envoy"
)

const markHeader = "x-mark" // names a request at its engine

// steering are all headers by which a client could choose where its request goes.
func steering(endpoint, rank, mark string) []string {
	header := []string{markHeader, mark}
	for _, name := range envoy.StripHeaders() {
		switch {
		case strings.HasPrefix(name, "x-envoy-"): // which Kvlane alone cannot take off
		case strings.HasSuffix(name, "-rank"):
			header = append(header, name, rank)
		default:
			header = append(header, name, endpoint)
		}
	}
	return header
}

// arrived is a request as its engine saw it.
type arrived struct {
	pod     string
	Headers map[string]string `json:"headers"` // lower-case names
	Pinned  bool              `json:"pinned"`  // the request named its rank
}

// arrived finds a request at the engines of a namespace.
func (c *cluster) arrived(t *testing.T, in, mark string) arrived {
	t.Helper()
	for _, s := range c.node.sandboxes(in, map[string]string{"app": "llm"}) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.ip+":8000/sim/stats", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r, err := do(req)
		if err != nil {
			t.Fatal(err)
		}
		var page struct {
			Requests []arrived `json:"requests"`
		}
		if err := json.Unmarshal(r.body, &page); err != nil {
			t.Fatal(err)
		}
		for _, a := range page.Requests {
			if a.Headers[markHeader] == mark {
				a.pod = s.pod.Metadata.Name
				return a
			}
		}
	}
	t.Fatalf("no engine saw the request %s", mark)
	return arrived{}
}

// steersNot tries to choose the endpoint and the rank as a client: the request goes
// where it would go without, and no such header reaches the engine but those that
// Kvlane sets itself.
func steersNot(t *testing.T, c *cluster, in, chat string) {
	t.Helper()
	kvlanes := []string{"x-gateway-destination-endpoint", "x-data-parallel-rank"}
	pods := c.node.sandboxes(in, map[string]string{"app": "llm"})
	text := essay(t.Name()+" steering "+time.Now().Format(time.StampNano), 200)
	first := c.ask(t, in, chat, chatBody("demo", text, false))
	for _, s := range pods {
		for _, rank := range []string{"0", "1"} {
			mark := fmt.Sprint(t.Name(), s.ip, rank, time.Now().UnixNano())
			r, err := post(t.Context(), chat, chatBody("demo", text, false), steering(s.ip+":8000", rank, mark)...)
			if err != nil || r.status != http.StatusOK || r.target != first.target || fmt.Sprint(cached(t, r)) != r.matched {
				t.Errorf("steered to %s rank %s: target %q (was %q), %d cached, %s expected, %v", s.ip, rank, r.target, first.target, cached(t, r), r.matched, err)
			}
			at := c.arrived(t, in, mark)
			for _, name := range envoy.StripHeaders() {
				if value, ok := at.Headers[name]; ok && !slices.Contains(kvlanes, name) {
					t.Errorf("the client's %s: %s reached the engine", name, value)
				}
			}
			if got, want := at.Headers["x-data-parallel-rank"], first.target[strings.LastIndexByte(first.target, '/')+1:]; got != want {
				t.Errorf("the client's rank is %s; the engine of %s was told %q", rank, first.target, got)
			}
		}
	}
}

// failsOpen kills Kvlane: requests go to workers that Envoy chooses, and headers with which
// clients try to choose are not forwarded to engines. Kvlane's dead pods stay listed.
func failsOpen(t *testing.T, c *cluster, in, chat string) {
	t.Helper()
	for _, s := range c.node.pickers(in) {
		s.freeze()
		s.kill()
	}
	// Where a policy that fails open came just now, Envoy has it a moment later.
	eventually(t, reasonable, "an answer without Kvlane", func() error {
		r, err := post(t.Context(), chat, chatBody("demo", "hello", false))
		if err == nil && (r.status != http.StatusOK || r.target != "") {
			err = fmt.Errorf("%d %q %s", r.status, r.target, r.body)
		}
		return err
	})
	endpoint := c.node.sandboxes(in, map[string]string{"app": "llm"})[0].ip + ":8000"
	served := map[string]int{}
	eventually(t, reasonable, "answers from more than the endpoint that the client names", func() error {
		mark := fmt.Sprint(t.Name(), time.Now().UnixNano())
		r, err := post(t.Context(), chat, chatBody("demo", "hello", false), steering(endpoint, "1", mark)...)
		if err != nil || r.status != http.StatusOK {
			t.Errorf("without Kvlane: %d %s %v", r.status, r.body, err)
		}
		at := c.arrived(t, in, mark)
		served[at.pod]++
		for _, name := range envoy.StripHeaders() {
			if value, ok := at.Headers[name]; ok {
				t.Errorf("without Kvlane the client's %s: %s reached the engine", name, value)
			}
		}
		switch {
		case at.Pinned:
			t.Error("without Kvlane the client chose the rank")
		case len(served) < 2 && !t.Failed():
			return errors.New(fmt.Sprint(served))
		}
		return nil
	})
}

// neverByHeader names an endpoint to a gateway of an InferencePool that has no picker:
// others serve as well.
func neverByHeader(t *testing.T, c *cluster, url string) {
	t.Helper()
	endpoint := c.node.sandboxes(ns, map[string]string{"app": "echo"})[0].ip + ":3000"
	served := map[string]int{}
	eventually(t, reasonable, "answers from more than the endpoint that the client names", func() error {
		r, err := post(t.Context(), url, []byte("{}"), steering(endpoint, "1", "none")...)
		if err != nil || r.status != http.StatusOK {
			return fmt.Errorf("%d %w", r.status, err)
		}
		var got struct{ Pod string }
		if err := json.Unmarshal(r.body, &got); err != nil {
			return err
		}
		served[got.Pod]++
		if len(served) < 2 {
			return errors.New(fmt.Sprint(served))
		}
		return nil
	})
}

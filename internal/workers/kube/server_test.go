package kube

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// apiServer is the part of an API server that followers use: two collections
// with versions, selectors, watches that can be cut, and history that can be
// forgotten.
type apiServer struct {
	*httptest.Server

	mu      sync.Mutex
	version int
	objects map[string]stored // by collection and name
	log     []event
	oldest  int // versions below are forgotten
	change  chan struct{}
	cut     chan struct{}
	lists   int
	down    bool
	tokens  []string
}

type stored struct {
	collection, name string
	labels           map[string]string
	object           map[string]any
}

type event struct {
	version int
	kind    string
	before  map[string]string // labels
	stored
}

const (
	podsPath  = "/api/v1/namespaces/ns/pods"
	poolsPath = "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools"
)

func newAPIServer(t *testing.T) (*apiServer, *Client) {
	s := &apiServer{objects: map[string]stored{}, change: make(chan struct{}), cut: make(chan struct{})}
	s.Server = httptest.NewTLSServer(s)
	t.Cleanup(func() { s.cutWatches(); s.Close() })
	c, err := NewClient(Access{Server: s.URL, Insecure: true, Token: "t", Namespace: "ns"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return s, c
}

// put adds or changes an object; text is JSON without metadata's name.
func (s *apiServer) put(collection, name, text string) {
	var o map[string]any
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		panic(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	meta, _ := o["metadata"].(map[string]any)
	if meta == nil {
		meta = map[string]any{}
		o["metadata"] = meta
	}
	meta["name"] = name
	labels := map[string]string{}
	if l, ok := meta["labels"].(map[string]any); ok {
		for k, v := range l {
			labels[k] = v.(string)
		}
	}
	key := collection + "/" + name
	old, exists := s.objects[key]
	kind := "ADDED"
	if exists {
		kind = "MODIFIED"
	}
	s.record(kind, old.labels, stored{collection, name, labels, o})
}

func (s *apiServer) remove(collection, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := collection + "/" + name
	s.record("DELETED", s.objects[key].labels, s.objects[key])
	delete(s.objects, key)
}

func (s *apiServer) record(kind string, before map[string]string, o stored) {
	s.version++
	fresh, meta := maps.Clone(o.object), maps.Clone(o.object["metadata"].(map[string]any))
	meta["resourceVersion"] = strconv.Itoa(s.version)
	fresh["metadata"] = meta
	o.object = fresh
	s.objects[o.collection+"/"+o.name] = o
	s.log = append(s.log, event{s.version, kind, before, o})
	close(s.change)
	s.change = make(chan struct{})
}

// cutWatches ends all watches, as a restart of the API server does.
func (s *apiServer) cutWatches() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.cut)
	s.cut = make(chan struct{})
}

// forget drops the history: watches from before are too old.
func (s *apiServer) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version += 10
	s.oldest = s.version
}

func (s *apiServer) setDown(down bool) {
	s.mu.Lock()
	s.down = down
	s.mu.Unlock()
}

// ServeHTTP implements http.Handler.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.tokens = append(s.tokens, r.Header.Get("Authorization"))
	down := s.down
	s.mu.Unlock()
	if down {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	if r.URL.Query().Get("watch") == "true" {
		s.watch(w, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists++
	var items []map[string]any
	for _, o := range s.objects {
		if o.collection == r.URL.Path && selected(r, o.name, o.labels) {
			items = append(items, o.object)
		}
	}
	slices.SortFunc(items, func(a, b map[string]any) int { return strings.Compare(nameOf(a), nameOf(b)) })
	// Pages of two, so that every test pages.
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	to, next := min(from+2, len(items)), ""
	if to < len(items) {
		next = strconv.Itoa(to)
	}
	send(w, map[string]any{
		"metadata": map[string]any{"resourceVersion": strconv.Itoa(s.version), "continue": next}, "items": items[from:to],
	})
}

// send writes an object that was JSON before, or is made of strings.
func send(w http.ResponseWriter, o any) {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	_, _ = w.Write(append(text, '\n'))
}

func nameOf(o map[string]any) string { return o["metadata"].(map[string]any)["name"].(string) }

func selected(r *http.Request, name string, labels map[string]string) bool {
	if f := r.URL.Query().Get("fieldSelector"); f != "" && f != "metadata.name="+name {
		return false
	}
	for part := range strings.SplitSeq(r.URL.Query().Get("labelSelector"), ",") {
		if k, v, ok := strings.Cut(part, "="); ok && labels[k] != v {
			return false
		}
	}
	return true
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request) {
	since, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	s.mu.Lock()
	cut := s.cut
	if since < s.oldest {
		s.mu.Unlock()
		// The API server may say so in the stream as well as by status; this is the stream.
		fmt.Fprintln(w, `{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old resource version"}}`)
		return
	}
	s.mu.Unlock()
	send(w, map[string]any{"type": "BOOKMARK", "object": map[string]any{"metadata": map[string]any{"resourceVersion": strconv.Itoa(since)}}})
	for {
		s.mu.Lock()
		change := s.change
		for _, e := range s.log {
			if e.version <= since || e.collection != r.URL.Path {
				continue
			}
			is, was := selected(r, e.name, e.labels), e.before != nil && selected(r, e.name, e.before)
			kind := e.kind
			switch {
			case !is && !was:
				continue
			case !is || kind == "DELETED":
				kind = "DELETED"
			case !was:
				kind = "ADDED"
			}
			send(w, map[string]any{"type": kind, "object": e.object})
		}
		since = s.version
		s.mu.Unlock()
		w.(http.Flusher).Flush()
		select {
		case <-change:
		case <-cut:
			return
		case <-r.Context().Done():
			return
		}
	}
}

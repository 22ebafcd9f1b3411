package kube

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
)

// apiServer implements the part of an API server that informers use: two collections with
// versions, selectors, lists by watches or in pages, watches that can be cut, and history
// that can be dropped.
type apiServer struct {
	*httptest.Server

	mu      sync.Mutex
	version int
	objects map[string]stored // by collection and name
	log     []event
	oldest  int // versions below were dropped
	change  chan struct{}
	cut     chan struct{}
	lists   int
	down    bool
	tokens  []string
	// accepted is the only accepted token, if set.
	accepted string
	// busy is the number of requests still to be answered with "retry in a second".
	busy int
	// old: the server does not support lists by watches, like many before Kubernetes 1.32.
	old bool
	// deaf is the name of an object for which it sends no answer.
	deaf string
	// forbidden is a collection of which nothing is allowed, with "watch " before it: no watch.
	forbidden string
	// byStatus: an invalid version of a watch is reported by HTTP status, not in the
	// stream.
	byStatus bool
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

	objectivesPath    = "/apis/llm-d.ai/v1alpha2/namespaces/ns/inferenceobjectives"
	oldObjectivesPath = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/ns/inferenceobjectives"
)

func newAPIServer(t *testing.T) (*apiServer, *Client) {
	s := &apiServer{objects: map[string]stored{}, change: make(chan struct{}), cut: make(chan struct{})}
	s.Server = httptest.NewUnstartedServer(s)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(func() { s.cutWatches(); s.Close() })
	c, err := NewClient(Access{Config: s.config(), Namespace: "ns"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return s, c
}

// config returns an access to s.
func (s *apiServer) config() *rest.Config {
	return &rest.Config{Host: s.URL, BearerToken: "t", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

// kinds are the API version and kind of each collection's objects.
var kinds = map[string][2]string{
	podsPath: {"v1", "Pod"}, poolsPath: {"inference.networking.k8s.io/v1", "InferencePool"},
	objectivesPath: {"llm-d.ai/v1alpha2", "InferenceObjective"}, oldObjectivesPath: {"inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"},
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
	fresh["apiVersion"], fresh["kind"] = kinds[o.collection][0], kinds[o.collection][1]
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

// forget drops the history: watches from earlier versions are too old.
func (s *apiServer) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version += 10
	s.oldest = s.version
}

// restore goes back to an earlier version, like a store that is restored from a backup, but
// keeps the objects.
func (s *apiServer) restore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version, s.oldest, s.log = 1, 0, nil
}

// listed is the bookmark that follows the initial objects of a watch.
func listed(collection string, version int) map[string]any {
	return map[string]any{"type": "BOOKMARK", "object": map[string]any{"apiVersion": kinds[collection][0], "kind": kinds[collection][1], "metadata": map[string]any{
		"resourceVersion": strconv.Itoa(version), "annotations": map[string]any{metav1.InitialEventsAnnotationKey: "true"},
	}}}
}

// set changes a field under the lock.
func (s *apiServer) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *apiServer) setDown(down bool) {
	s.mu.Lock()
	s.down = down
	s.mu.Unlock()
}

// ServeHTTP implements http.Handler.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	s.mu.Lock()
	s.tokens = append(s.tokens, r.Header.Get("Authorization"))
	down, refused, busy := s.down || s.deaf != "" && r.URL.Query().Get("fieldSelector") == "metadata.name="+s.deaf, s.accepted != "" && r.Header.Get("Authorization") != "Bearer "+s.accepted, s.busy > 0
	if busy {
		s.busy--
	}
	only := strings.TrimPrefix(s.forbidden, "watch ")
	forbidden := r.URL.Path == only && (only == s.forbidden || r.URL.Query().Get("watch") == "true")
	s.mu.Unlock()
	switch {
	case down:
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	case forbidden:
		w.WriteHeader(http.StatusForbidden)
		send(w, status(http.StatusForbidden))
		return
	case refused:
		w.WriteHeader(http.StatusUnauthorized)
		return
	case busy:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	if r.URL.Query().Get("watch") == "true" {
		s.watch(w, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.URL.Query().Get("continue") == "" {
		s.lists++
	}
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
		"apiVersion": kinds[r.URL.Path][0], "kind": kinds[r.URL.Path][1] + "List",
		"metadata": map[string]any{"resourceVersion": strconv.Itoa(s.version), "continue": next}, "items": items[from:to],
	})
}

// send writes an object that was JSON before, or consists of strings.
func send(w http.ResponseWriter, o any) {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	_, _ = w.Write(append(text, '\n'))
}

func nameOf(o map[string]any) string { return o["metadata"].(map[string]any)["name"].(string) }

func selected(r *http.Request, name string, of map[string]string) bool {
	if f := r.URL.Query().Get("fieldSelector"); f != "" && f != "metadata.name="+name {
		return false
	}
	s, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	return err == nil && s.Matches(labels.Set(of))
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request) {
	since, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	initial := r.URL.Query().Get("sendInitialEvents") == "true"
	s.mu.Lock()
	cut := s.cut
	if initial && s.old {
		w.WriteHeader(http.StatusUnprocessableEntity)
		send(w, status(http.StatusUnprocessableEntity))
		s.mu.Unlock()
		return
	}
	if why := s.unknown(since, initial); why != 0 {
		if s.byStatus {
			w.WriteHeader(why)
			send(w, status(why))
		} else {
			send(w, map[string]any{"type": "ERROR", "object": status(why)})
		}
		s.mu.Unlock()
		return
	}
	if initial {
		s.lists++
		for _, o := range s.objects {
			if o.collection == r.URL.Path && selected(r, o.name, o.labels) {
				send(w, map[string]any{"type": "ADDED", "object": o.object})
			}
		}
		since = s.version
		send(w, listed(r.URL.Path, since))
	}
	s.mu.Unlock()
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

// unknown returns the status for a version that cannot be watched from, 0 if it can.
func (s *apiServer) unknown(version int, initial bool) int {
	switch {
	case version < s.oldest && !initial:
		return http.StatusGone
	case version > s.version:
		return http.StatusGatewayTimeout
	}
	return 0
}

// status is an API server's Status object for a code.
func status(code int) map[string]any {
	said := map[int]metav1.Status{
		http.StatusGone:                {Reason: metav1.StatusReasonExpired, Message: "too old resource version"},
		http.StatusForbidden:           {Reason: metav1.StatusReasonForbidden, Message: `pods is forbidden: User "kvlane" cannot list resource "pods"`},
		http.StatusUnprocessableEntity: {Reason: metav1.StatusReasonInvalid, Message: "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"},
		http.StatusGatewayTimeout: {Reason: metav1.StatusReasonTimeout, Message: "Too large resource version",
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}}}},
	}[code]
	text, err := json.Marshal(&said)
	if err != nil {
		panic(err)
	}
	var o map[string]any
	if err := json.Unmarshal(text, &o); err != nil {
		panic(err)
	}
	o["apiVersion"], o["kind"], o["status"], o["code"] = "v1", "Status", metav1.StatusFailure, code
	return o
}

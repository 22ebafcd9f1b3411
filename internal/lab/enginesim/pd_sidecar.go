package enginesim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"
)

// sidecarHeader names the prefill engine to the sidecar.
const sidecarHeader = "X-Prefiller-Host-Port"

// Sidecar does beside a decode engine what llm-d's routing sidecar does: a request that names a prefill engine in
// x-prefiller-host-port is sent there first, with NIXL's parameters, and its answer's parameters go to the decode engine with
// the client's request. It is safe for concurrent use.
type Sidecar struct {
	listener net.Listener
	server   *http.Server
	decode   *httputil.ReverseProxy
	prefill  map[string]bool
	client   *http.Client

	mu     sync.Mutex
	counts map[string]int
}

// StartSidecar serves on a port of 127.0.0.1 for the engine at decode ("host:port"). Only the engines in prefill may be
// named, as with llm-d's allow list.
func StartSidecar(decode string, prefill ...string) (*Sidecar, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	s := &Sidecar{listener: l, prefill: map[string]bool{}, counts: map[string]int{}, client: &http.Client{Transport: &http.Transport{}},
		decode: httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: decode})}
	s.decode.FlushInterval = -1
	s.decode.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, err error) {
		http.Error(w, err.Error(), http.StatusBadGateway)
	}
	for _, p := range prefill {
		s.prefill[p] = true
	}
	s.server = &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = s.server.Serve(l) }() // ends with Close
	return s, nil
}

// Addr is where it listens.
func (s *Sidecar) Addr() string { return s.listener.Addr().String() }

// Close ends it at once.
func (s *Sidecar) Close() {
	_ = s.server.Close()
	s.client.CloseIdleConnections()
}

// Counts is how many requests it split, passed and refused, by these words and what was wrong.
func (s *Sidecar) Counts() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

func (s *Sidecar) count(what string) {
	s.mu.Lock()
	s.counts[what]++
	s.mu.Unlock()
}

func (s *Sidecar) violation(w http.ResponseWriter, status int, text string) {
	s.count("violation: " + text)
	http.Error(w, text, status)
}

// ServeHTTP implements http.Handler.
func (s *Sidecar) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	names := r.Header.Values(sidecarHeader)
	switch {
	case len(names) == 0 || r.Method != http.MethodPost:
		if r.Method == http.MethodPost {
			s.count("passed")
		}
		s.decode.ServeHTTP(w, r)
		return
	case len(names) > 1 || !s.prefill[names[0]]:
		s.violation(w, http.StatusForbidden, "no prefill engine: "+strings.Join(names, ", "))
		return
	case r.Header.Get("X-Request-Id") == "":
		s.violation(w, http.StatusBadRequest, "no X-Request-Id")
		return
	}
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	var body map[string]json.RawMessage
	if err := json.Unmarshal(raw, &body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.Header.Del(sidecarHeader)
	params, ok := s.first(w, r, names[0], body)
	if !ok {
		return
	}
	if params != nil {
		body["kv_transfer_params"] = params
		if raw, err = json.Marshal(body); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	s.count("split")
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(raw)), int64(len(raw))
	s.decode.ServeHTTP(w, r)
}

// first runs the prefill leg and returns its parameters, nil if the engine gave none. What it refuses is passed on; ok is
// false then.
func (s *Sidecar) first(w http.ResponseWriter, r *http.Request, prefill string, body map[string]json.RawMessage) (params json.RawMessage, ok bool) {
	leg := maps.Clone(body)
	leg["kv_transfer_params"] = json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)
	leg["stream"] = json.RawMessage("false")
	delete(leg, "stream_options")
	delete(leg, "min_tokens")
	for name, always := range map[string]bool{"max_tokens": r.URL.Path != "/v1/responses", "max_completion_tokens": false, "max_output_tokens": r.URL.Path == "/v1/responses"} {
		if _, given := leg[name]; given || always {
			leg[name] = json.RawMessage("1")
		}
	}
	raw, err := json.Marshal(leg)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return nil, false
	}
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, "http://"+prefill+r.URL.RequestURI(), bytes.NewReader(raw))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return nil, false
	}
	req.Header = r.Header.Clone()
	req.Header.Del("Content-Length")
	resp, err := s.client.Do(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return nil, false
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return nil, false
	}
	if resp.StatusCode != http.StatusOK {
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.WriteHeader(resp.StatusCode)
		_, _ = w.Write(answer)
		return nil, false
	}
	var got struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(answer, &got); err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return nil, false
	}
	if string(got.Params) == "null" {
		got.Params = nil
	}
	return got.Params, true
}

package e2e

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

// sidecar plays llm-d's routing sidecar of a decode engine: a request that names a prefill
// engine in x-prefiller-host-port is sent there first, with NIXL's parameters; the
// parameters of that answer go to the decode engine with the client's request. It is safe
// for concurrent use.
type sidecar struct {
	listener net.Listener
	server   *http.Server
	decode   *httputil.ReverseProxy
	prefill  map[string]bool
	client   *http.Client

	mu     sync.Mutex
	counts map[string]int
}

// startSidecar serves on a port of 127.0.0.1 for the engine at decode ("host:port"). Only the engines in prefill may be
// named, as with llm-d's allow list.
func startSidecar(decode string, prefill ...string) (*sidecar, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	s := &sidecar{listener: l, prefill: map[string]bool{}, counts: map[string]int{}, client: &http.Client{Transport: &http.Transport{}},
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

// Addr is the listener's host:port.
func (s *sidecar) Addr() string { return s.listener.Addr().String() }

// Close stops the sidecar and cuts its connections.
func (s *sidecar) Close() {
	_ = s.server.Close()
	s.client.CloseIdleConnections()
}

// Counts returns the number of requests it split, passed and refused, by these words, with
// the reason.
func (s *sidecar) Counts() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

func (s *sidecar) count(what string) {
	s.mu.Lock()
	s.counts[what]++
	s.mu.Unlock()
}

func (s *sidecar) violation(w http.ResponseWriter, status int, text string) {
	s.count("violation: " + text)
	http.Error(w, text, status)
}

// ServeHTTP implements http.Handler.
func (s *sidecar) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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
	refusal, err := s.split(r, names[0])
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadGateway)
	case refusal != nil:
		w.Header().Set("Content-Type", refusal.Header.Get("Content-Type"))
		w.WriteHeader(refusal.StatusCode)
		_, _ = io.Copy(w, refusal.Body)
		_ = refusal.Body.Close()
	default:
		s.count("split")
		s.decode.ServeHTTP(w, r)
	}
}

// split runs the prefill leg and adds the parameters of its answer, if any, to the request.
// An answer other than 200 is returned; the caller closes its body.
func (s *sidecar) split(r *http.Request, prefill string) (refusal *http.Response, err error) {
	var body map[string]json.RawMessage
	raw, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(raw, &body)
	}
	if err != nil {
		return nil, err
	}
	r.Header.Del(sidecarHeader)
	resp, err := s.first(r, prefill, body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	defer resp.Body.Close()
	var got struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		return nil, err
	}
	if len(got.Params) > 0 && string(got.Params) != "null" {
		body["kv_transfer_params"] = got.Params
		if raw, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(raw)), int64(len(raw))
	return nil, nil
}

// first sends the prefill leg.
func (s *sidecar) first(r *http.Request, prefill string, body map[string]json.RawMessage) (*http.Response, error) {
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
		return nil, err
	}
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, "http://"+prefill+r.URL.RequestURI(), bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	req.Header = r.Header.Clone()
	req.Header.Del("Content-Length")
	return s.client.Do(req)
}

package workers

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/config"
)

// Facts is what an engine reports about itself. Zero fields were not reported.
type Facts struct {
	Engine           string
	Models           []string
	Ranks, StartRank int
	BlockSize        int
	Events           config.Events
	BootstrapPort    int
	// NoPrefixCache reports SGLang's --disable-radix-cache.
	NoPrefixCache bool
}

// Fill sets those fields of a worker that are unset, except that the engine kind is always the reported one.
func (f *Facts) Fill(w *config.Worker) {
	w.Engine = cmp.Or(f.Engine, w.Engine)
	if len(w.Models) == 0 {
		w.Models = f.Models
	}
	if w.Ranks == 0 && f.Ranks > 1 {
		w.Ranks, w.StartRank = f.Ranks, f.StartRank
	}
	w.BlockSize = cmp.Or(w.BlockSize, f.BlockSize)
	if w.Events.Endpoint == "" {
		w.Events = f.Events
	}
	w.Disagg.BootstrapPort = cmp.Or(w.Disagg.BootstrapPort, f.BootstrapPort)
}

// Asker asks engines for facts about themselves. It is safe for concurrent use.
type Asker struct{ client *http.Client }

// NewAsker returns an asker; timeout bounds each answer.
func NewAsker(timeout time.Duration) *Asker { return &Asker{newClient(timeout)} }

// Close drops idle connections.
func (a *Asker) Close() { a.client.CloseIdleConnections() }

// maxFacts bounds an answer in bytes: a /server_info repeats every option of the engine.
const maxFacts = 4 << 20

// Ask collects what the engine at address reports. It returns an error if the engine cannot be reached, but not if it
// answers without supporting any of the queries: Facts is zero then.
//
// The queries: GET /v1/models (all three), GET /kv_event_sources (vLLM), GET /server_info
// (SGLang with kv_events, TensorRT-LLM), GET /get_server_info (SGLang that has no other).
func (a *Asker) Ask(ctx context.Context, address string) (Facts, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return Facts{}, err
	}
	var f Facts
	for _, q := range []struct {
		path string
		read func(f *Facts, body []byte, host string) error
	}{
		{"/v1/models", readModels},
		{"/kv_event_sources", readEventSources},
		{"/server_info", readServerInfo},
		{"/get_server_info", readServerInfo},
	} {
		if q.path == "/get_server_info" && (f.Engine != "sglang" || f.BlockSize > 0) {
			continue
		}
		body, err := a.question(ctx, "http://"+address+q.path)
		if err != nil {
			return Facts{}, err
		}
		if body == nil {
			continue
		}
		next := f
		if e := &next.Events; q.read(&next, body, host) == nil && max(len(e.Endpoint), len(e.Replay), len(e.Topic)) <= maxListed { // else another server
			f = next
		}
	}
	return f, nil
}

// ErrNoModels is returned by Models if the answer is not that of an engine.
var ErrNoModels = errors.New("GET /v1/models: no list of models")

// Listed is an entry of an engine's list of models. Raw fields are as the engine wrote them.
type Listed struct {
	ID          string          `json:"id"`
	Object      string          `json:"object"`
	Created     json.RawMessage `json:"created,omitempty"`
	OwnedBy     string          `json:"owned_by"`
	Root        json.RawMessage `json:"root,omitempty"`
	Parent      json.RawMessage `json:"parent,omitempty"`
	MaxModelLen json.RawMessage `json:"max_model_len,omitempty"`
}

// maxListed bounds a field of a Listed or of Facts.Events in bytes, maxModels the models of an engine that count.
const maxListed, maxModels = 1024, 1024

func (l *Listed) clip() {
	l.Object = "model"
	for _, f := range []*json.RawMessage{&l.Created, &l.Root, &l.Parent, &l.MaxModelLen} {
		if len(*f) > maxListed {
			*f = nil
		}
	}
	l.OwnedBy = l.OwnedBy[:min(len(l.OwnedBy), maxListed)]
}

// Context is the context length in tokens, 0 if it is not reported.
func (l *Listed) Context() int {
	n, _ := strconv.Atoi(string(l.MaxModelLen))
	return max(0, n)
}

// Engine is the kind of the engine, "" if it is not reported.
func (l *Listed) Engine() string { return owners[l.OwnedBy] }

// Base is the value of the engine's --model, "" if it is not reported or for an adapter.
func (l *Listed) Base() (root string) {
	if l.Parent == nil || string(l.Parent) == "null" {
		_ = json.Unmarshal(l.Root, &root) // "" if there is none
	}
	return root
}

// Models returns what the engine at a URL lists in GET /v1/models, adapters included: the first maxModels.
func (a *Asker) Models(ctx context.Context, url string) ([]Listed, error) {
	body, err := a.question(ctx, strings.TrimRight(url, "/")+"/v1/models")
	if err != nil {
		return nil, err
	}
	if body == nil {
		return nil, ErrNoModels
	}
	list, err := listOf(body)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoModels, err)
	}
	return list, nil
}

// question fetches a page of an engine. It returns nil and no error if the engine does not have the page.
func (a *Asker) question(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxFacts))
	switch {
	case err != nil:
		return nil, fmt.Errorf("GET %s: %w", url, err)
	case resp.StatusCode >= http.StatusInternalServerError:
		return nil, fmt.Errorf("GET %s: status %d", url, resp.StatusCode)
	case resp.StatusCode != http.StatusOK:
		return nil, nil
	}
	return body, nil
}

var errOther = errors.New("not the answer of an engine")

// owners maps owned_by in /v1/models to the engine's name.
var owners = map[string]string{"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}

// listOf reads a list of models. It leaves out models whose name is longer than maxListed bytes.
func listOf(body []byte) (list []Listed, err error) {
	var said struct {
		Data json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &said); err != nil || len(said.Data) == 0 {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(said.Data))
	if t, err := dec.Token(); err != nil || t != json.Delim('[') {
		return nil, errOther
	}
	for dec.More() && len(list) < maxModels {
		var l Listed
		if err := dec.Decode(&l); err != nil {
			return nil, err
		}
		switch l.clip(); {
		case l.ID == "":
			return nil, errOther
		case len(l.ID) <= maxListed:
			list = append(list, l)
		}
	}
	return list, nil
}

func readModels(f *Facts, body []byte, _ string) error {
	list, err := listOf(body)
	if err != nil {
		return err
	}
	for _, m := range list {
		f.Models = append(f.Models, m.ID)
		f.Engine = cmp.Or(f.Engine, m.Engine())
	}
	return nil
}

// readEventSources reads vLLM's map of rank to publisher; its ports are already those of the ranks.
func readEventSources(f *Facts, body []byte, host string) error {
	var said map[string]struct {
		Enabled  *bool   `json:"enable_kv_cache_events"`
		Endpoint string  `json:"endpoint"`
		Replay   *string `json:"replay_endpoint"`
		Topic    string  `json:"topic"`
	}
	if err := json.Unmarshal(body, &said); err != nil {
		return err
	}
	ranks := make([]int, 0, len(said))
	for key, s := range said {
		n, err := strconv.Atoi(key)
		if err != nil || n < 0 || s.Enabled == nil {
			return errOther
		}
		ranks = append(ranks, n)
	}
	if len(ranks) == 0 {
		return errOther
	}
	slices.Sort(ranks)
	f.Engine = "vllm"
	f.Ranks, f.StartRank = len(ranks), ranks[0]
	lowest := said[strconv.Itoa(ranks[0])]
	if !*lowest.Enabled || lowest.Endpoint == "" {
		return nil
	}
	f.Events = config.Events{Endpoint: reach(lowest.Endpoint, host), Topic: lowest.Topic}
	if lowest.Replay != nil {
		f.Events.Replay = reach(*lowest.Replay, host)
	}
	return nil
}

// readServerInfo reads the pages of SGLang and of TensorRT-LLM.
func readServerInfo(f *Facts, body []byte, host string) error {
	var said struct {
		PageSize      int `json:"page_size"`
		DPSize        int `json:"dp_size"`
		BootstrapPort int `json:"disaggregation_bootstrap_port"`
		TokensPerPage int `json:"tokens_per_block"`

		NoRadixCache bool `json:"disable_radix_cache"`

		Events *struct {
			Publisher string `json:"publisher"`
			Host      string `json:"endpoint_host"`
			Port      int    `json:"endpoint_port_base"`
			Replay    int    `json:"replay_endpoint_port_base"`
			Topic     string `json:"topic"`
			BlockSize int    `json:"block_size"`
		} `json:"kv_events"`
	}
	if err := json.Unmarshal(body, &said); err != nil {
		return err
	}
	switch {
	case said.TokensPerPage > 0:
		// A request cannot name an attention rank. Events are polled, which drains them, and only the configuration can
		// promise that there is no other poller.
		f.Engine, f.BlockSize = "trtllm", said.TokensPerPage
		return nil
	case said.PageSize <= 0 || said.DPSize <= 0 || said.BootstrapPort < 0:
		return errOther
	}
	f.Engine, f.Ranks, f.BlockSize, f.BootstrapPort = "sglang", said.DPSize, said.PageSize, said.BootstrapPort
	f.NoPrefixCache = said.NoRadixCache
	if e := said.Events; e != nil && e.Publisher == "zmq" && e.Port > 0 {
		f.Events = config.Events{Endpoint: reach(tcp(e.Host, e.Port), host), Topic: e.Topic}
		if e.Replay > 0 {
			f.Events.Replay = reach(tcp(e.Host, e.Replay), host)
		}
	}
	return nil
}

func tcp(host string, port int) string { return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port)) }

// reach converts an endpoint that an engine binds into one that can be dialled: wildcard
// addresses and the engine's loopback become its host. It returns "" for anything but tcp.
func reach(endpoint, host string) string {
	u, err := url.Parse(strings.Replace(endpoint, "tcp://*", "tcp://0.0.0.0", 1))
	if err != nil || u.Scheme != "tcp" || u.Port() == "" {
		return ""
	}
	if ip := net.ParseIP(u.Hostname()); ip != nil && (ip.IsUnspecified() || ip.IsLoopback()) || u.Hostname() == "localhost" || u.Hostname() == "" {
		return "tcp://" + net.JoinHostPort(host, u.Port())
	}
	return endpoint
}

package enginesim

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// apiMux serves the API of one rank, or of all ranks if only is -1.
func (e *Engine) apiMux(only int) http.Handler {
	m := http.NewServeMux()
	s := &service{e, only}
	m.HandleFunc("POST /v1/completions", s.serve(body.Completions))
	m.HandleFunc("POST /v1/chat/completions", s.serve(body.Chat))
	if e.opts.Engine != TRTLLM {
		m.HandleFunc("POST /v1/messages", s.serve(body.Messages))
		m.HandleFunc("POST /v1/messages/count_tokens", s.countTokens)
		m.HandleFunc("POST /v1/embeddings", s.embeddings)
		m.HandleFunc("POST /v1/responses", s.serve(body.Responses))
		m.HandleFunc("GET /v1/responses/{id}", s.storedResponse)
		m.HandleFunc("POST /v1/responses/{id}/cancel", s.storedResponse)
	}
	m.HandleFunc("GET /v1/models", s.models)
	m.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	m.HandleFunc("GET /metrics", s.metrics)
	switch e.opts.Engine {
	case VLLM:
		m.HandleFunc("POST /tokenize", s.tokenize)
		m.HandleFunc("POST /inference/v1/generate", s.serve(body.VLLMGenerate))
		m.HandleFunc("GET /kv_event_sources", s.eventSources)
		m.HandleFunc("POST /reset_prefix_cache", func(w http.ResponseWriter, r *http.Request) {
			writeJSON(w, http.StatusOK, object{"success": reset(s.visible(), r.URL.Query().Get("reset_running_requests") == "true")})
		})
	case SGLang:
		m.HandleFunc("POST /v1/tokenize", s.tokenize)
		m.HandleFunc("POST /tokenize", s.tokenize)
		m.HandleFunc("POST /generate", s.serve(body.Generate))
		m.HandleFunc("PUT /generate", s.serve(body.Generate))
		m.HandleFunc("GET /server_info", s.sglangServerInfo)
		m.HandleFunc("POST /flush_cache", s.flushCache)
	case TRTLLM:
		m.HandleFunc("GET /server_info", s.trtServerInfo)
		m.HandleFunc("POST /kv_cache_events", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, s.ranks[0].trt.drain()) })
	}
	e.adminRoutes(m)
	m.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusNotFound, object{"detail": "Not Found"})
	})
	return m
}

// sideMux serves what is not part of the engine's own API: block transfers, of one rank or of all of them when only is -1, and
// administration.
func (e *Engine) sideMux(only int) http.Handler {
	m := http.NewServeMux()
	e.transferRoutes(m, only)
	e.adminRoutes(m)
	return m
}

// adminRoutes are the endpoints that real engines do not have.
func (e *Engine) adminRoutes(m *http.ServeMux) {
	m.HandleFunc("GET /sim/stats", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, e.Stats()) })
	m.HandleFunc("GET /sim/faults", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, e.faults.get()) })
	m.HandleFunc("POST /sim/faults", func(w http.ResponseWriter, r *http.Request) {
		var f Faults
		d := json.NewDecoder(r.Body)
		d.DisallowUnknownFields()
		if err := d.Decode(&f); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		answer := func() { writeJSON(w, http.StatusOK, f) }
		if !f.Refuse {
			if err := e.SetFaults(f); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			answer()
			return
		}
		// The listener that carries this answer may be about to close.
		answer()
		if flush, ok := w.(http.Flusher); ok {
			flush.Flush()
		}
		go func() { _ = e.SetFaults(f) }()
	})
	m.HandleFunc("POST /sim/restart", func(w http.ResponseWriter, _ *http.Request) { e.Restart(); writeJSON(w, http.StatusOK, true) })
	m.HandleFunc("POST /sim/disconnect", func(w http.ResponseWriter, _ *http.Request) { e.Disconnect(); writeJSON(w, http.StatusOK, true) })
	m.HandleFunc("POST /sim/reset", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, reset(e.ranks, false))
	})
}

// service is the API as seen through one listener.
type service struct {
	*Engine
	only int // the rank behind the listener, -1 for all
}

func (s *service) visible() []*rank {
	if s.only >= 0 {
		return s.ranks[s.only : s.only+1]
	}
	return s.ranks
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// A failure means that the client has disconnected.
	_ = json.NewEncoder(w).Encode(v) //nolint:errchkjson // answers are made of plain values
}

// writeError answers in the engine's shape.
func (s *service) writeError(w http.ResponseWriter, err error) {
	e := asAPIError(err)
	body := object{"message": e.message, "type": e.kind, "param": orNil(e.param), "code": e.status}
	if s.opts.Engine == VLLM {
		writeJSON(w, e.status, object{"error": body})
		return
	}
	body["object"] = "error"
	writeJSON(w, e.status, body)
}

func (s *service) models(w http.ResponseWriter, _ *http.Request) {
	type card struct {
		ID      string  `json:"id"`
		Object  string  `json:"object"`
		Created int64   `json:"created"`
		OwnedBy string  `json:"owned_by"`
		Root    string  `json:"root"`
		Parent  *string `json:"parent"`
		MaxLen  *int    `json:"max_model_len"`
	}
	owner := string(s.opts.Engine)
	data := []card{{s.opts.Model, "model", s.created.Unix(), owner, s.opts.Model, nil, &s.opts.MaxModelLen}}
	for _, name := range s.opts.LoRA {
		data = append(data, card{name, "model", s.created.Unix(), owner, name, &s.opts.Model, nil})
	}
	writeJSON(w, http.StatusOK, object{"object": "list", "data": data})
}

// eventSources is vLLM's discovery of event streams: hosts as configured, ports as bound.
func (s *service) eventSources(w http.ResponseWriter, _ *http.Request) {
	out := object{}
	for _, r := range s.visible() {
		ev := s.asConfigured(s.opts.EventsEndpoint, endpoint(r.pub.pub))
		var replay any
		if r.pub.replay != nil {
			replay = s.asConfigured(s.opts.ReplayEndpoint, endpoint(r.pub.replay))
		}
		out[strconv.Itoa(r.global())] = object{
			"enable_kv_cache_events": s.opts.EventsEndpoint != "", "publisher": "zmq", "endpoint": ev, "replay_endpoint": replay,
			"buffer_steps": s.opts.ReplaySteps, "hwm": 100000, "max_queue_size": 100000, "topic": s.opts.EventsTopic,
		}
	}
	writeJSON(w, http.StatusOK, out)
}

// asConfigured keeps a wildcard host of the configuration, with the port that was bound.
func (s *service) asConfigured(configured, bound string) string {
	if strings.HasPrefix(configured, "tcp://*:") {
		return "tcp://*" + bound[strings.LastIndexByte(bound, ':'):]
	}
	return bound
}

// reset clears every idle rank even when it fails for a busy one.
func reset(ranks []*rank, force bool) bool {
	ok := true
	for _, r := range ranks {
		ok = r.reset(force) && ok
		r.poke()
	}
	return ok
}

func (s *service) readBody(r *http.Request) ([]byte, *requestBody, error) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil, badRequest("body: " + err.Error())
	}
	body, err := parseBody(raw)
	return raw, body, err
}

func (s *service) tokenize(w http.ResponseWriter, r *http.Request) {
	raw, _, err := s.readBody(r)
	var ids []uint32
	if err == nil {
		ids, err = s.opts.Tokenizer.prompt(s.opts.Engine, body.Tokenize, raw)
	}
	if err != nil {
		s.writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, object{"count": len(ids), "max_model_len": s.opts.MaxModelLen, "tokens": append([]uint32{}, ids...)})
}

// countTokens is Anthropic's count_tokens.
func (s *service) countTokens(w http.ResponseWriter, r *http.Request) {
	raw, _, err := s.readBody(r)
	var ids []uint32
	if err == nil {
		ids, err = s.opts.Tokenizer.prompt(s.opts.Engine, body.Messages, placeholders(raw))
	}
	if err != nil {
		s.writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, object{"input_tokens": len(ids)})
}

// embeddingSize is the length of the vectors that embeddings answers.
const embeddingSize = 8

// embeddings answers vectors that are hashes of the tokens. It takes no time and leaves no blocks in the cache.
func (s *service) embeddings(w http.ResponseWriter, r *http.Request) {
	raw, b, err := s.readBody(r)
	var in struct {
		Input  json.RawMessage `json:"input"`
		Format string          `json:"encoding_format"`
	}
	var prompts [][]uint32
	if err == nil {
		if err = json.Unmarshal(raw, &in); err == nil {
			prompts, err = s.opts.Tokenizer.prompts(s.opts.Engine, body.Embeddings, raw, in.Input, true)
		}
	}
	if err != nil {
		s.writeError(w, err)
		return
	}
	data, total := []any{}, 0
	for i, ids := range prompts {
		total += len(ids)
		hash := sha256.Sum256(fmt.Append(nil, ids))
		vector := make([]float32, embeddingSize)
		for j := range vector {
			vector[j] = float32(hash[j])/128 - 1
		}
		var value any = vector
		if in.Format == "base64" {
			packed, _ := binary.Append(nil, binary.LittleEndian, vector) // numbers have a size
			value = base64.StdEncoding.EncodeToString(packed)
		}
		data = append(data, object{"object": "embedding", "index": i, "embedding": value})
	}
	writeJSON(w, http.StatusOK, object{
		"id": "embd-" + randomHex(16), "object": "list", "model": (&call{service: s, body: b}).modelName(), "data": data,
		"usage": object{"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0},
	})
}

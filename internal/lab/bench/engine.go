package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/kvindex"
)

const (
	modelName = "demo"
	blockSize = 16
	// engineBlocks is the capacity of a KV cache: a million tokens.
	engineBlocks = 62500
	batchBlocks  = 512
)

// engine answers immediately and publishes its KV cache in vLLM's events. It is as cheap as possible: it takes ids and
// hashes from Kvlane's own packages, keeps no blocks and generates no text. The simulated engines of the tests would
// take most of the CPU time.
type engine struct {
	address, events string

	model  *shape.Model
	hasher *kvindex.Hasher
	http   *http.Server
	pub    zmq4.Socket // nil without events

	mu     sync.Mutex
	seq    uint64
	cached map[kvindex.Hash]int // how many times: like vLLM, it stores what follows a lost block again
	order  []kvindex.Hash       // oldest first, as a ring once it is full
	oldest int
}

// prompts is the cache of all engines.
var prompts = conv.New(64 << 20)

// startEngine serves on a free port; with m it caches and publishes events.
func startEngine(ctx context.Context, m *shape.Model) (*engine, error) {
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	e := &engine{address: lis.Addr().String(), model: m, hasher: kvindex.NewHasher(kvindex.Key{1}), cached: map[kvindex.Hash]int{}}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "\n") })
	mux.HandleFunc("POST /v1/chat/completions", e.answer)
	mux.HandleFunc("POST /v1/completions", stream)
	e.http = &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	if m != nil {
		e.pub = zmq4.NewPub(ctx)
		if err := e.pub.Listen("tcp://127.0.0.1:0"); err != nil {
			return nil, err
		}
		e.events = "tcp://" + e.pub.Addr().String()
	}
	go func() { _ = e.http.Serve(lis) }()
	return e, nil
}

func (e *engine) close() {
	_ = e.http.Close()
	if e.pub != nil {
		_ = e.pub.Close()
	}
}

func (e *engine) answer(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = e.cache(body)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}`)
}

// stream answers with one flushed piece of 300 bytes per requested token.
func stream(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Tokens int `json:"max_tokens"`
	}
	if err := json.NewDecoder(r.Body).Decode(&ask); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	piece := "data: " + strings.Repeat("x", 292) + "\n\n"
	for range ask.Tokens {
		_, _ = io.WriteString(w, piece)
		_ = http.NewResponseController(w).Flush()
	}
}

// cache stores the prompt's blocks and publishes the new ones.
func (e *engine) cache(raw []byte) error {
	if e.model == nil {
		return nil
	}
	req, err := body.Parse(body.Chat, raw)
	if err != nil {
		return err
	}
	res, err := e.model.PromptInto(context.Background(), nil, prompts.Turn(req), shape.VLLM)
	if err != nil {
		return err
	}
	hashes := e.hasher.AppendHashes(nil, e.hasher.Seed(modelName, "", ""), res.IDs, blockSize)
	e.mu.Lock()
	defer e.mu.Unlock()
	known := 0
	for known < len(hashes) && e.cached[hashes[known]] > 0 {
		known++
	}
	var gone []kvindex.Hash
	for _, h := range hashes[known:] {
		e.cached[h]++
		if len(e.order) < engineBlocks {
			e.order = append(e.order, h)
			continue
		}
		old := e.order[e.oldest]
		if e.cached[old]--; e.cached[old] == 0 {
			delete(e.cached, old)
		}
		gone = append(gone, old)
		e.order[e.oldest] = h
		e.oldest = (e.oldest + 1) % engineBlocks
	}
	if len(gone) > 0 {
		if err := e.tell([]any{"BlockRemoved", gone, "GPU"}); err != nil {
			return err
		}
	}
	for known < len(hashes) {
		n := min(len(hashes)-known, batchBlocks)
		var parent any
		if known > 0 {
			parent = hashes[known-1]
		}
		if err := e.tell([]any{"BlockStored", hashes[known : known+n], parent, res.IDs[known*blockSize : (known+n)*blockSize], blockSize, nil, "GPU"}); err != nil {
			return err
		}
		known += n
	}
	return nil
}

// tell publishes one event as a batch, in vLLM's array encoding.
func (e *engine) tell(event []any) error {
	payload, err := msgpack.Marshal([]any{float64(time.Now().UnixMicro()) / 1e6, []any{event}})
	if err != nil {
		return err
	}
	seq := binary.BigEndian.AppendUint64(nil, e.seq)
	e.seq++
	return e.pub.SendMulti(zmq4.NewMsgFrom([]byte("kv-events"), seq, payload))
}

type engines []*engine

func startEngines(ctx context.Context, m *shape.Model, n int) (engines, error) {
	var out engines
	for range n {
		e, err := startEngine(ctx, m)
		if err != nil {
			out.close()
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

func (e engines) close() {
	for _, x := range e {
		x.close()
	}
}

func (e engines) addresses() string {
	list := make([]string, 0, len(e))
	for _, x := range e {
		list = append(list, x.address)
	}
	return strings.Join(list, ",")
}

package shape

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// ErrBreakerOpen is returned while the circuit breaker of a remote renderer is open.
var ErrBreakerOpen = errors.New("remote renderer: breaker open")

// Remote obtains ids from vLLM's render endpoints (vllm serve --enable-scale-out, or vllm launch render), for models
// that Kvlane cannot tokenize. It is safe for concurrent use.
type Remote struct {
	url     string
	timeout time.Duration
	onCall  func(err error)
	calls   chan struct{} // a semaphore of all with this url

	mu     sync.Mutex
	failed int
	until  time.Time
}

// breakerFailures is the number of consecutive calls without an answer that open the breaker, breakerPause the time
// until the next trial call. maxCalls bounds the concurrent calls to one URL: each may hold a few times maxAnswer.
const (
	breakerFailures = 5
	breakerPause    = 10 * time.Second
	maxCalls        = 16
)

var semaphores sync.Map // by URL; models may have the same

// NewRemote returns a Remote whose calls last at most for timeout (0: 5 s), the wait for their turn included. onCall gets
// the error of every call, including ErrBreakerOpen. It must not block.
func NewRemote(url string, timeout time.Duration, onCall func(err error)) *Remote {
	url = strings.TrimRight(url, "/")
	calls, _ := semaphores.LoadOrStore(url, make(chan struct{}, maxCalls))
	return &Remote{url: url, timeout: cmp.Or(max(timeout, 0), answerIn), onCall: onCall, calls: calls.(chan struct{})} //nolint:forcetypeassert // only these are stored
}

var renderPaths = map[body.API]string{
	body.Chat:        "/v1/chat/completions/render",
	body.Completions: "/v1/completions/render",
	body.Responses:   "/v1/responses/render",
	body.Messages:    "/v1/messages/render",
}

// Prompt requests the ids of req; of a batch, those of the first prompt. The error is a *Refusal for a 4xx response.
func (r *Remote) Prompt(ctx context.Context, req *body.Request) (Result, error) {
	path, ok := renderPaths[req.API]
	if !ok {
		return Result{}, ErrNoOracle
	}
	res, err := Result{}, ErrBreakerOpen
	within, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	waits := len(r.calls) == maxCalls
	select {
	case r.calls <- struct{}{}:
		defer func() { <-r.calls }()
		if r.allow() {
			res, err = r.call(within, path, req)
			// Neither an error response nor a call that its wait has cut short counts against the renderer.
			if answered := !errors.Is(err, errNoAnswer) || ctx.Err() != nil; answered || !waits {
				r.done(answered)
			}
		}
	case <-within.Done():
		err = fmt.Errorf("remote renderer: %d calls run: %w", maxCalls, within.Err())
	}
	r.onCall(err)
	return res, err
}

func (r *Remote) call(ctx context.Context, path string, req *body.Request) (Result, error) {
	raw, err := body.Apply(make([]byte, 0, len(req.Body)+32), req.Body, body.Set([]byte("false"), "return_mm_kwargs"))
	if err != nil {
		return Result{}, err
	}
	answer, err := post(ctx, r.timeout, r.url+path, raw)
	if err != nil {
		return Result{}, err
	}
	ids, n, err := renderedIDs(answer)
	return Result{IDs: ids, Prompts: n}, err
}

// renderedIDs reads token_ids of one GenerateRequest, or of the first in a list. n is their number.
func renderedIDs(answer []byte) (ids []uint32, n int, err error) {
	var list body.Request
	raw := append(append([]byte(`{"input":`), answer...), '}')
	if err := list.Parse(body.Embeddings, raw); err != nil {
		return nil, 0, err
	}
	first := list.Prompt.Of(raw)
	n = 1
	if list.Count > 0 && len(list.Elements) > 0 {
		first, n = list.Elements[0].Of(raw), list.Count
	}
	ids, err = body.AppendIDs(nil, body.Member(first, "token_ids"))
	return ids, n, err
}

// allow reports whether the renderer may be called; after the pause one call at a time may try.
func (r *Remote) allow() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if r.failed >= breakerFailures {
		if now.Before(r.until) {
			return false
		}
		r.until = now.Add(breakerPause)
	}
	return true
}

func (r *Remote) done(ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ok {
		r.failed = 0
		return
	}
	if r.failed++; r.failed >= breakerFailures {
		r.until = time.Now().Add(breakerPause)
	}
}

package shape

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// ErrNoOracle is returned if an engine has no endpoint that returns the ids of such a request.
var ErrNoOracle = errors.New("the engine has no endpoint that returns the ids of this request")

// Oracle queries an engine for the ids of a prompt. It is safe for concurrent use.
type Oracle struct {
	Engine Engine
	URL    string // such as http://10.0.0.7:8000
	// Timeout bounds one query. 0: 5 s.
	Timeout time.Duration
}

// maxAnswer is the most bytes of an engine's response, maxMessage those of its error message, answerIn the default timeout.
const maxAnswer, maxMessage, answerIn = 16 << 20, 300, 5 * time.Second

// toEngine follows no redirects and uses no proxy of the environment: a prompt is sent to the engine only.
var toEngine = http.Client{Transport: &http.Transport{IdleConnTimeout: time.Minute}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

// IDs queries the engine's tokenizing endpoint for the ids of req. asked is the request that was sent, which may have
// fewer fields: compute our ids from that one. The error is a *Refusal for a 4xx response.
func (o *Oracle) IDs(ctx context.Context, req *body.Request) (ids []uint32, asked *body.Request, err error) {
	if rendered(req.API) {
		ids, err = o.renderedIDs(ctx, req)
		return ids, req, err
	}
	path, raw, err := o.question(req)
	if err != nil {
		return nil, nil, err
	}
	if asked, err = body.Parse(body.Tokenize, raw); err != nil {
		return nil, nil, err
	}
	answer, err := post(ctx, o.Timeout, strings.TrimRight(o.URL, "/")+path, raw)
	if err != nil {
		return nil, asked, err
	}
	tokens := body.Member(answer, "tokens")
	if len(tokens) > 1 && tokens[0] == '[' && bytes.HasPrefix(bytes.TrimLeft(tokens[1:], " \n\t\r"), []byte{'['}) {
		return nil, asked, fmt.Errorf("%s answered with a batch", path)
	}
	ids, err = body.AppendIDs(nil, tokens)
	if err != nil {
		return nil, asked, fmt.Errorf("%s: %w", path, err)
	}
	return ids, asked, nil
}

// rendered reports whether an API's ids come from a render endpoint, which accepts the whole request.
func rendered(api body.API) bool { return api == body.Messages || api == body.Responses }

// renderedIDs queries vLLM's render endpoint of the API, which the engine only has with --enable-scale-out.
func (o *Oracle) renderedIDs(ctx context.Context, req *body.Request) ([]uint32, error) {
	if !o.Engine.profile().renders {
		return nil, ErrNoOracle
	}
	path := renderPaths[req.API]
	answer, err := post(ctx, o.Timeout, strings.TrimRight(o.URL, "/")+path, req.Body)
	if errors.Is(err, errNoEndpoint) {
		return nil, ErrNoOracle
	}
	if err != nil {
		return nil, err
	}
	ids, _, err := renderedIDs(answer)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return ids, nil
}

// errNoEndpoint is wrapped by errors for the statuses 401, 403, 404 and 501, errNoAnswer by errors of calls that got no complete answer.
var errNoEndpoint, errNoAnswer = errors.New("no such endpoint"), errors.New("no answer")

func (o *Oracle) question(req *body.Request) (path string, data []byte, err error) {
	engine := o.Engine.profile()
	if engine.tokenizePath == "" {
		return "", nil, ErrNoOracle
	}
	if req.Form != body.FormMessages && req.Form != body.FormText || req.API != body.Chat && req.API != body.Completions &&
		req.API != body.Tokenize {
		return "", nil, ErrNoOracle
	}
	data = append(data, '{')
	for _, f := range engine.tokenizeFields {
		raw := req.Raw(f)
		if raw == nil {
			continue
		}
		if len(data) > 1 {
			data = append(data, ',')
		}
		data = fmt.Appendf(data, `"%s":%s`, f, raw)
	}
	return engine.tokenizePath, append(data, '}'), nil
}

// post sends a JSON body and reads the JSON response. A 4xx status is returned as a *Refusal with the engine's message.
func post(ctx context.Context, timeout time.Duration, url string, raw []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(max(timeout, 0), answerIn))
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := toEngine.Do(r)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errNoAnswer, err)
	case len(answer) > maxAnswer:
		return nil, fmt.Errorf("%s: answer of more than %d bytes", url, maxAnswer)
	case resp.StatusCode == http.StatusOK:
		if err := body.Valid(answer); err != nil {
			return nil, fmt.Errorf("%s: %w", url, err)
		}
		return answer, nil
	case slices.Contains([]int{http.StatusUnauthorized, http.StatusNotFound, http.StatusForbidden, http.StatusNotImplemented}, resp.StatusCode):
		return nil, fmt.Errorf("%s: status %d: %s: %w", url, resp.StatusCode, messageOf(answer), errNoEndpoint)
	case resp.StatusCode >= 400 && resp.StatusCode < 500:
		return nil, &Refusal{Status: resp.StatusCode, Reason: messageOf(answer)}
	default:
		return nil, fmt.Errorf("%s: status %d: %s", url, resp.StatusCode, messageOf(answer))
	}
}

// messageOf returns the message of an error response, or the start of the response.
func messageOf(answer []byte) string {
	var e struct {
		Message string `json:"message"`
		Error   struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	text := string(answer[:min(len(answer), maxMessage)])
	if json.Unmarshal(answer, &e) == nil {
		text = cmp.Or(e.Error.Message+e.Message, text)
	}
	return strings.Clone(text[:min(len(text), maxMessage)])
}

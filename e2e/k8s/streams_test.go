//go:build linux

package k8s

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"
)

// streams wants the pieces of an answer while the answer is still made.
func streams(t *testing.T, c *cluster, in, chat string) {
	t.Helper()
	if err := c.streamed(t, t.Context(), in, chat); err != nil {
		t.Error(err)
	}
}

// streamed pauses every engine's answer after its third token, and resumes it only when the
// client has got the tokens so far: a hop that buffers until the end waits until ctx ends.
func (c *cluster) streamed(t *testing.T, ctx context.Context, in, chat string) error {
	t.Helper()
	const held, tokens = 3, 8 // of chatBody
	c.fault(t, in, fmt.Sprintf(`{"hold_after_tokens": %d}`, held))
	defer c.fault(t, in, `{}`)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, chat, bytes.NewReader(chatBody("demo", "Tell me more.", true)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("no answer while its engine holds it: %w", err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	if err := pieces(lines, 1+held); err != nil { // the first names the role
		return fmt.Errorf("of an answer that is held behind %d tokens: %w", held, err)
	}
	c.fault(t, in, `{}`)
	if err := remaining(lines, tokens-held); err != nil {
		return fmt.Errorf("when it goes on: %w", err)
	}
	return nil
}

// buffers is a filter that keeps an answer back until its end.
const buffers = `{apiVersion: networking.istio.io/v1alpha3, kind: EnvoyFilter, metadata: {name: buffers}, spec: {workloadSelector: {labels: {gateway.networking.k8s.io/gateway-name: llm}},
configPatches: [{applyTo: HTTP_FILTER, match: {context: GATEWAY, listener: {filterChain: {filter: {name: envoy.filters.network.http_connection_manager, subFilter: {name: envoy.filters.http.router}}}}},
patch: {operation: INSERT_BEFORE, value: {name: buffers, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua,
default_source_code: {inline_string: "function envoy_on_response(h) h:body() end"}}}}}]}}`

// buffered is the negative control of streams, which fails behind a filter that
// buffers answers.
func buffered(t *testing.T, c *cluster, in, chat string) {
	soon := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		client.CloseIdleConnections() // those that are open keep the filters that they began with
		return c.streamed(t, ctx, in, chat)
	}
	c.applyText(t, buffers)
	eventually(t, reasonable, "an answer that is kept back", func() error {
		err := soon()
		switch {
		case err == nil:
			return errors.New("its pieces came")
		case !errors.Is(err, context.DeadlineExceeded):
			return err
		}
		return nil
	})
	c.kubectl(t, "", "delete", "envoyfilter/buffers")
	eventually(t, reasonable, "pieces of an answer", soon)
}

// fault sets the faults of all simulated engines of a namespace.
func (c *cluster) fault(t *testing.T, in, faults string) {
	t.Helper()
	engines := c.node.sandboxes(in, map[string]string{"app": "llm"})
	if len(engines) == 0 {
		t.Fatalf("no engines in %s", in)
	}
	for _, s := range engines {
		r, err := post(t.Context(), "http://"+s.ip+":8000/sim/faults", []byte(faults))
		if err != nil || r.status != http.StatusOK {
			t.Errorf("faults of %s: %d %s %v", s.pod.Metadata.Name, r.status, r.body, err)
		}
	}
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// row is a load: the size of the prompts, in tokens or bytes, and the number of connections.
type row struct {
	name          string
	tokens, bytes int
	connections   int
}

func tokens(n int) row {
	return row{name: fmt.Sprintf("%dk tokens", n/1000), tokens: n, connections: 16}
}

// size is a prompt's length in bytes of this text.
func (r *row) size(t *text) int {
	if r.tokens > 0 {
		return int(float64(r.tokens) * t.perToken)
	}
	return r.bytes
}

// result is the cost of a load.
type result struct {
	requests, errors int64
	server, envoy    time.Duration // processor time
}

func (r *result) add(o *result) {
	r.requests += o.requests
	r.errors += o.errors
	r.server += o.server
	r.envoy += o.envoy
}

func (r *result) perRequest(d time.Duration) float64 {
	return float64(d.Microseconds()) / 1000 / float64(max(r.requests, 1))
}

// read sends all of a text through once, so that the measured prompts consist of text that
// has been seen, like most text of real prompts.
func (b *bed) read(ctx context.Context, t *text) error {
	const piece = 100_000
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	for at := 0; at+piece <= len(t.whole); at += piece {
		body, err := json.Marshal(map[string]any{"model": modelName, "max_tokens": 1,
			"messages": []map[string]string{{"role": "user", "content": strings.ToValidUTF8(t.whole[at:at+piece], "")}}})
		if err != nil {
			return err
		}
		if err := post(ctx, client, "http://"+b.ingress+"/v1/chat/completions", body); err != nil {
			return err
		}
	}
	return nil
}

// run loads the bed for a time with chats.
func (b *bed) run(ctx context.Context, r row, t *text, length time.Duration) (*result, error) {
	size := r.size(t)
	return b.load(ctx, r.connections, "/v1/chat/completions", length, func(n int) ([]byte, error) { return t.chat(size, n) })
}

// load sends requests over a number of connections for a time, after a shorter warm-up.
func (b *bed) load(ctx context.Context, connections int, path string, length time.Duration, body func(n int) ([]byte, error)) (*result, error) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: connections}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	var done, failed atomic.Int64
	load := func(length time.Duration) {
		started := time.Now()
		var wg sync.WaitGroup
		for range connections {
			wg.Go(func() {
				for time.Since(started) < length && ctx.Err() == nil {
					text, err := body(int(b.next.Add(1)))
					if err == nil {
						err = post(ctx, client, "http://"+b.ingress+path, text)
					}
					if err != nil {
						failed.Add(1)
						continue
					}
					done.Add(1)
				}
			})
		}
		wg.Wait()
	}
	load(length / 3)
	done.Store(0)
	failed.Store(0)
	before, err := b.used()
	if err != nil {
		return nil, err
	}
	load(length)
	after, err := b.used()
	if err != nil {
		return nil, err
	}
	return &result{requests: done.Load(), errors: failed.Load(), server: after[0] - before[0], envoy: after[1] - before[1]}, ctx.Err()
}

func post(ctx context.Context, client *http.Client, url string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}

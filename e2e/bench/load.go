package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// bytesPerToken is about what a token of the bench's text takes under Qwen3.
const bytesPerToken = 3.6

// row is a load: prompts of so many bytes over so many connections.
type row struct {
	name        string
	bytes       int
	connections int
}

func tokens(n int) row {
	return row{fmt.Sprintf("%dk tokens", n/1000), int(float64(n) * bytesPerToken), 16}
}

// corpus is text to make prompts of: Go's own library, prose in comments and code.
func corpus(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOROOT: %w", err)
	}
	var b strings.Builder
	for _, dir := range []string{"net/http", "net", "go/types", "runtime", "crypto/*", "encoding/*"} {
		files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(root)), "src", dir, "*.go"))
		if err != nil {
			return "", err
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				return "", err
			}
			b.WriteString(strings.ToValidUTF8(string(text), ""))
		}
	}
	if b.Len() < 2<<20 {
		return "", fmt.Errorf("only %d bytes of Go's library found", b.Len())
	}
	return b.String(), nil
}

// chat is the n-th prompt of a row: half a system prompt that all share, half text
// from another place each time.
func chat(text string, size, n int) ([]byte, error) {
	start := (n*104729 + 1<<20) % (len(text) - size)
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	return json.Marshal(map[string]any{
		"model": modelName, "max_tokens": 1,
		"messages": []message{
			{"system", strings.ToValidUTF8(text[:size/2], "")},
			{"user", fmt.Sprint(n, " ") + strings.ToValidUTF8(text[start:start+size/2], "")},
		},
	})
}

// result is what a load cost.
type result struct {
	requests, errors int64
	took             time.Duration
	server, envoy    time.Duration // processor time
}

func (r *result) perRequest(d time.Duration) float64 {
	return float64(d.Microseconds()) / 1000 / float64(max(r.requests, 1))
}

// read sends all of the text through once, so that what is measured is text that
// has been seen, as most text of real prompts has.
func (b *bed) read(ctx context.Context, text string) error {
	const piece = 100_000
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	for at := 0; at+piece <= len(text); at += piece {
		body, err := json.Marshal(map[string]any{"model": modelName, "max_tokens": 1,
			"messages": []map[string]string{{"role": "user", "content": strings.ToValidUTF8(text[at:at+piece], "")}}})
		if err != nil {
			return err
		}
		if err := post(ctx, client, "http://"+b.ingress+"/v1/chat/completions", body); err != nil {
			return err
		}
	}
	return nil
}

// run loads the bed for a time, after a little of the same to warm up.
func (b *bed) run(ctx context.Context, r row, text string, length time.Duration) (*result, error) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: r.connections}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	var next, done, failed atomic.Int64
	load := func(length time.Duration) time.Duration {
		started := time.Now()
		var wg sync.WaitGroup
		for range r.connections {
			wg.Go(func() {
				for time.Since(started) < length && ctx.Err() == nil {
					body, err := chat(text, r.bytes, int(next.Add(1)))
					if err == nil {
						err = post(ctx, client, "http://"+b.ingress+"/v1/chat/completions", body)
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
		return time.Since(started)
	}
	load(length / 3)
	done.Store(0)
	failed.Store(0)
	before, err := b.used()
	if err != nil {
		return nil, err
	}
	took := load(length)
	after, err := b.used()
	if err != nil {
		return nil, err
	}
	return &result{requests: done.Load(), errors: failed.Load(), took: took, server: after[0] - before[0], envoy: after[1] - before[1]}, ctx.Err()
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

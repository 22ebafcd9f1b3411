package engines

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

var qwen3, _ = filepath.Abs("../../internal/tokens/models/qwen3")

// bed is Kvlane and the real Envoy in front of a real engine.
type bed struct {
	*engine

	dir, binary, ingress, admin string
}

func newBed(t *testing.T, k *kind) *bed {
	t.Helper()
	e := startEngine(t, k)
	return newFront(t, e, e.yaml(), "", "")
}

// newFront puts Kvlane and Envoy in front of workers; ask and the like talk to e. inEnvoy goes into the section envoy,
// more behind all.
func newFront(t *testing.T, e *engine, workers, inEnvoy, more string) *bed {
	t.Helper()
	b, k := &bed{engine: e}, e.kind
	dir, err := os.MkdirTemp("", "kvl") // a Unix socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b.dir, b.binary = dir, filepath.Join(dir, "kvlane")
	if out, err := exec.Command("go", "build", "-tags", "grpcnotrace", "-o", b.binary, "../../cmd/kvlane").CombinedOutput(); err != nil {
		t.Fatalf("build kvlane: %v\n%s", err, out)
	}
	proxy, err := envoy.Find(os.Getenv("ENVOY"))
	if err != nil {
		t.Fatal(err)
	}
	b.ingress, b.admin = freeAddress(t), freeAddress(t)
	envoyAdmin := freeAddress(t)
	file, boot := filepath.Join(dir, "kvlane.yaml"), filepath.Join(dir, "envoy.yaml")
	text := fmt.Sprintf(`listen: {address: "unix:%s/k.sock"}
admin: {address: "%s"}
limits: {decision_timeout: 10s}
envoy: {ingress: "%s", admin: "%s", response_body: STREAMED%s}
explain: {header: true}
index: {block_size: %d}
models:
- {name: %s, tokenizer: "%s", engine: %s, tool_parser: true, max_model_len: %d, check: {every: 1, retry: 1s}%s}
workers:
  # SGLang's /health computes a token, which takes a tiny CPU seconds when it is busy.
  health: {every: 5s, timeout: 30s}
  static:
%s%s`, dir, b.admin, b.ingress, envoyAdmin, inEnvoy, k.block, modelName, k.tokenizer(), k.name, k.contextLength(), k.options, workers, more)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	bootstrap, err := exec.Command(b.binary, "envoy-config", "--config", file).Output()
	if err != nil {
		t.Fatalf("envoy-config: %v\n%s", err, text)
	}
	if err := os.WriteFile(boot, bootstrap, 0o600); err != nil {
		t.Fatal(err)
	}
	b.serve(dir, file)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	process, err := envoy.Run(ctx, proxy, dir, boot, envoyAdmin, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(process.Stop)
	return b
}

// serve runs `kvlane serve` and waits until it is ready.
func (b *bed) serve(dir, file string) {
	b.t.Helper()
	log, err := os.Create(filepath.Join(dir, "kvlane.log"))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = log.Close() })
	cmd := exec.Command(b.binary, "serve", "--config", file)
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if b.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			b.t.Logf("kvlane's log ends:\n%s", text[max(0, len(text)-3000):])
		}
	})
	b.until("kvlane is ready", func() bool {
		resp, err := http.Get("http://" + b.admin + "/readyz")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

func freeAddress(t *testing.T) string {
	t.Helper()
	port, err := enginesim.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}

func (b *bed) until(what string, ok func() bool) {
	b.t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	b.t.Fatalf("never: %s", what)
}

// metric sums the samples of one of Kvlane's metrics.
func (b *bed) metric(name string) float64 {
	b.t.Helper()
	resp, err := http.Get("http://" + b.admin + "/metrics")
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	sum := 0.0
	for _, m := range regexp.MustCompile(`(?m)^`+name+`(?:\{.*\})? (\S+)$`).FindAllStringSubmatch(string(text), -1) {
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			b.t.Fatal(err)
		}
		sum += v
	}
	return sum
}

// settle waits until the engine's events have come: until none comes for a while.
func (b *bed) settle() {
	b.t.Helper()
	seen := -1.0
	b.until("events settle", func() bool {
		time.Sleep(150 * time.Millisecond)
		now := b.metric("kvlane_feed_events_total")
		same := now == seen
		seen = now
		return same
	})
}

// answer is what came back through Envoy.
type answer struct {
	rank            int
	matched, cached int
	prompt          int
	ids             []uint32
	made            []int // the answer's ids, if asked for
	text            string
}

// tokenCounts are the words of completions, responses and messages for the same.
type tokenCounts struct {
	Prompt  int `json:"prompt_tokens"`
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
	Input        int `json:"input_tokens"`
	InputDetails struct {
		Cached int `json:"cached_tokens"`
	} `json:"input_tokens_details"`
	Read    int `json:"cache_read_input_tokens"`
	Cached  int `json:"cached_tokens"`
	Created int `json:"cache_creation_input_tokens"`
}

// post sends a request through Envoy and wants 200.
func (b *bed) post(path string, body map[string]any) answer {
	b.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		b.t.Fatal(err)
	}
	req, err := http.NewRequest(http.MethodPost, "http://"+b.ingress+path, bytes.NewReader(raw))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := b.client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		b.t.Fatalf("%s: %d %s", path, resp.StatusCode, text)
	}
	var got struct {
		PromptIDs []uint32 `json:"prompt_token_ids"`
		Choices   []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
			Text      string   `json:"text"`
			PromptIDs []uint32 `json:"prompt_token_ids"`
			IDs       []int    `json:"token_ids"`
		} `json:"choices"`
		Usage tokenCounts `json:"usage"`
		Meta  tokenCounts `json:"meta_info"`
		// SGLang's generate counts them here.
	}
	if err := json.Unmarshal(text, &got); err != nil {
		b.t.Fatalf("%s: %v\n%s", path, err, text)
	}
	a := answer{ids: got.PromptIDs}
	u := got.Usage
	a.prompt = u.Prompt + u.Input + u.Read + u.Created + got.Meta.Prompt
	a.cached = u.Details.Cached + u.InputDetails.Cached + u.Read + got.Meta.Cached
	if len(got.Choices) > 0 {
		a.text, a.made = got.Choices[0].Message.Content+got.Choices[0].Text, got.Choices[0].IDs
		if len(a.ids) == 0 {
			a.ids = got.Choices[0].PromptIDs
		}
	}
	a.matched = number(b.t, resp.Header.Get("X-Kvlane-Matched-Tokens"))
	target := resp.Header.Get("X-Kvlane-Target")
	a.rank = number(b.t, target[strings.LastIndexByte(target, '/')+1:])
	return a
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("a header of Kvlane's is missing or wrong: %v", err)
	}
	return n
}

// run gives lines to a command of the binary and returns the lines that come back.
func (b *bed) run(lines [][]byte, args ...string) [][]byte {
	b.t.Helper()
	cmd := exec.Command(b.binary, args...)
	cmd.Stdin = bytes.NewReader(append(bytes.Join(lines, []byte("\n")), '\n'))
	out, err := cmd.Output()
	exit, isExit := errors.AsType[*exec.ExitError](err)
	switch {
	case err == nil, isExit && bytes.Contains(exit.Stderr, []byte("lines were answered with an error")):
	case isExit:
		b.t.Fatalf("kvlane %v: %v\n%s", args, err, exit.Stderr)
	default:
		b.t.Fatalf("kvlane %v: %v", args, err)
	}
	got := bytes.Split(bytes.TrimSuffix(out, []byte("\n")), []byte("\n"))
	if len(got) != len(lines) && len(lines) > 0 {
		b.t.Fatalf("kvlane %v: %d lines for %d", args, len(got), len(lines))
	}
	return got
}

package engines

import (
	"bytes"
	"cmp"
	"encoding/json"
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

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// installed names the folder of install.sh.
const installed = "KVLANE_ENGINES"

// startTimeout bounds the start of an engine, which is some 40 s of CPU in six processes.
const startTimeout = 15 * time.Minute

const (
	modelName = "tiny"
	ranks     = 2
	contextOf = 1024
)

// kind is what differs between the engines.
type kind struct {
	name  string
	block int
	// blocks of a rank: few, so that the tests can fill them.
	blocks int
	// context is the longest prompt with its answer, 0 for contextOf.
	context int
	// load is the counter of prompt tokens of a rank, rank its label.
	load, rank string
	// reset empties the caches.
	reset string
	// tokenize is the path that answers a chat request with ids.
	tokenize string
	// connector is vLLM's --kv-transfer-config. An engine with one has one rank.
	connector string
	// model is the kind of tiny model of serve.py, "" for qwen3. files are its tokenizer, "" for qwen3's.
	model, files string
	// folder has the files that Kvlane reads, "" for the engine's own.
	folder string
	// tools is the parser of calls, "" for that of serve.py, "none" for none.
	tools string
	// further are arguments of the engine, with which it has one rank.
	further []string
	// options are those of the model in Kvlane's configuration.
	options string
}

func (k *kind) ranks() int {
	if k.connector != "" || k.model != "" || k.further != nil {
		return 1
	}
	return ranks
}

func (k *kind) contextLength() int { return cmp.Or(k.context, contextOf) }

// tokenizer is the folder of Kvlane's files of the model.
func (k *kind) tokenizer() string {
	switch {
	case k.folder != "":
		return k.folder
	case k.model == "":
		return "builtin:qwen3"
	}
	return filepath.Join(os.Getenv(installed), "models", filepath.Base(cmp.Or(k.files, qwen3))+"-"+k.model)
}

var (
	vllm = &kind{name: "vllm", block: 32, blocks: 64, load: "vllm:prompt_tokens_total", rank: "engine",
		reset: "/reset_prefix_cache", tokenize: "/tokenize"}
	sglang = &kind{name: "sglang", block: 16, blocks: 96, load: "sglang:prefill_effective_tokens_total", rank: "dp_rank",
		reset: "/flush_cache", tokenize: "/v1/tokenize"}
)

// engine is a running real engine.
type engine struct {
	*kind

	t              *testing.T
	address        string
	events, replay int // ports of rank 0
	client         *http.Client
	began          time.Time
	process        *os.Process
	exited         chan struct{}
}

// startEngine starts an engine and waits until it serves. It is skipped if the engine is not installed.
func startEngine(t *testing.T, k *kind) *engine {
	t.Helper()
	e := launch(t, k)
	e.serves()
	return e
}

// launch starts an engine. It is skipped if the engine is not installed.
func launch(t *testing.T, k *kind) *engine {
	t.Helper()
	folder := os.Getenv(installed)
	if folder == "" {
		t.Skipf("%s does not name the folder with the real engines: run make e2e-%s", installed, k.name)
	}
	python := filepath.Join(folder, k.name, "bin", "python")
	if _, err := os.Stat(python); err != nil {
		t.Skipf("%s is not installed: run make e2e-%s (%v)", k.name, k.name, err)
	}
	n := k.ranks()
	port, err := enginesim.FreePorts(2 + 2*n)
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{kind: k, t: t, address: fmt.Sprintf("127.0.0.1:%d", port), events: port + 1, replay: port + 1 + n,
		client: &http.Client{Timeout: time.Minute}, exited: make(chan struct{})}
	t.Cleanup(e.client.CloseIdleConnections)
	log, err := os.Create(filepath.Join(t.TempDir(), k.name+".log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	cmd := exec.Command(python, "serve.py", k.name, "--tokenizer", cmp.Or(k.files, qwen3), "--work", filepath.Join(folder, "models"),
		"--port", strconv.Itoa(port), "--events", strconv.Itoa(e.events), "--replay", strconv.Itoa(e.replay),
		"--ranks", strconv.Itoa(n), "--blocks", strconv.Itoa(k.blocks), "--context", strconv.Itoa(k.contextLength()))
	if k.connector != "" {
		cmd.Args = append(cmd.Args, "--connector", k.connector, "--side", strconv.Itoa(port+1+2*n))
	}
	if k.model != "" {
		cmd.Args = append(cmd.Args, "--model", k.model)
	}
	if k.tools == "none" {
		cmd.Args = append(cmd.Args, "--no-tools")
	} else if k.tools != "" {
		cmd.Args = append(cmd.Args, "--tools", k.tools)
	}
	if k.further != nil {
		cmd.Args = append(append(cmd.Args, "--"), k.further...)
	}
	cmd.Stdout, cmd.Stderr = log, log
	// The engine starts many processes. In a process group of their own, one signal ends them all.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	e.began = time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	e.process = cmd.Process
	go func() { _ = cmd.Wait(); close(e.exited) }()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		select {
		case <-e.exited:
		case <-time.After(20 * time.Second):
		}
		e.kill()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s's log ends:\n%s", k.name, text[max(0, len(text)-3000):])
		}
	})
	return e
}

// kill ends the engine's processes immediately.
func (e *engine) kill() {
	_ = syscall.Kill(-e.process.Pid, syscall.SIGKILL)
	<-e.exited
}

// serves waits until the engine does.
func (e *engine) serves() {
	e.t.Helper()
	for deadline := time.Now().Add(startTimeout); ; time.Sleep(500 * time.Millisecond) {
		if status, _ := e.ask(http.MethodGet, "/health", nil); status == http.StatusOK {
			break
		}
		select {
		case <-e.exited:
			e.t.Fatalf("%s ended before it served", e.name)
		default:
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("%s does not serve after %v", e.name, startTimeout)
		}
	}
	e.t.Logf("%s serves after %.0f s", e.name, time.Since(e.began).Seconds())
}

// ask talks to the engine itself. The status is 0 if it does not answer.
func (e *engine) ask(method, path string, body []byte, headers ...string) (status int, answer []byte) {
	e.t.Helper()
	req, err := http.NewRequest(method, "http://"+e.address+path, bytes.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return 0, nil
	}
	defer resp.Body.Close()
	if answer, err = io.ReadAll(resp.Body); err != nil {
		return 0, nil
	}
	return resp.StatusCode, answer
}

// ids are what the engine itself makes of a request, nil and the status if it refuses.
func (e *engine) ids(path string, body []byte) ([]uint32, int) {
	e.t.Helper()
	status, answer := e.ask(http.MethodPost, path, body)
	if status != http.StatusOK {
		return nil, status
	}
	var got struct {
		Tokens   []uint32 `json:"tokens"`
		TokenIDs []uint32 `json:"token_ids"`
	}
	// Completions render to a list of prompts.
	answer = bytes.TrimSpace(answer)
	if list, ok := bytes.CutPrefix(answer, []byte("[")); ok {
		answer = bytes.TrimSuffix(list, []byte("]"))
	}
	if err := json.Unmarshal(answer, &got); err != nil {
		e.t.Fatalf("%s answered %s: %v", path, answer, err)
	}
	return append(got.Tokens, got.TokenIDs...), status
}

// clear empties the engine's caches, which SGLang refuses until it has finished with its last answer.
func (e *engine) clear() {
	e.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		status, answer := e.ask(http.MethodPost, e.reset, nil)
		if status == http.StatusOK {
			return
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("%s: %d %s", e.reset, status, answer)
		}
	}
}

// work is how many prompt tokens a rank has seen.
func (e *engine) work(rank int) float64 {
	e.t.Helper()
	_, answer := e.ask(http.MethodGet, "/metrics", nil)
	line := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(e.load) + `\{[^}]*\b` + e.rank + `="` + strconv.Itoa(rank) + `"[^}]*\} (\S+)`)
	sum := 0.0
	for _, m := range line.FindAllStringSubmatch(string(answer), -1) {
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			e.t.Fatal(err)
		}
		sum += v
	}
	return sum
}

// yaml is the engine's entry in Kvlane's list of workers.
func (e *engine) yaml() string {
	return strings.Join([]string{
		"  - name: " + e.name,
		"    engine: " + e.name,
		fmt.Sprintf("    address: %q", e.address),
		fmt.Sprintf("    ranks: %d", e.ranks()),
		"    models: [" + modelName + "]",
		fmt.Sprintf("    events: {endpoint: \"tcp://127.0.0.1:%d\", replay: \"tcp://127.0.0.1:%d\"}", e.events, e.replay),
	}, "\n") + "\n"
}

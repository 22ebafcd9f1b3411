// Package e2e tests the whole request path: the real Envoy binary, the kvlane binary as its
// own process, real sockets, the real ZMQ wire format. Only the GPU is simulated.
package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

var (
	kvlaneBinary string
	envoyBinary  string
	tokenizer    *enginesim.Tokenizer
)

// Loading a tokenizer is most of what Kvlane does in a test, and the race detector makes it ten times
// slower. These packages run with the detector in their own tests; the Makefile has the same flags.
const (
	unracedBPE   = "-gcflags=github.com/kvlane/kvlane/internal/tokens/bpe=-race=false"
	unracedBody  = "-gcflags=github.com/kvlane/kvlane/internal/tokens/body=-race=false"
	unracedFlate = "-gcflags=compress/flate=-race=false"
)

const (
	modelName  = "demo"
	modelFiles = "../internal/tokens/models/qwen3"
)

// natsProcess names the address on which the process serves NATS instead of running tests.
const natsProcess = "KVLANE_TEST_NATS"

func TestMain(m *testing.M) {
	if address := os.Getenv(natsProcess); address != "" {
		serveNATS(address)
		return
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func serveNATS(address string) {
	host, port, _ := net.SplitHostPort(address)
	o := server.Options{Host: host, NoSigs: true, NoLog: true}
	o.Port, _ = strconv.Atoi(port)
	s, err := server.NewServer(&o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	s.Start()
	s.WaitForShutdown()
}

func run(m *testing.M) (int, error) {
	var err error
	if envoyBinary, err = envoy.Find(os.Getenv("ENVOY")); err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "kvlane-e2e-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	kvlaneBinary = filepath.Join(dir, "kvlane")
	build := exec.Command("go", "build", "-tags", "grpcnotrace", "-o", kvlaneBinary, "../cmd/kvlane") // as `make build` does
	if raceEnabled {
		build.Args = slices.Insert(build.Args, 2, "-race", unracedBPE, unracedBody, unracedFlate)
	}
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build kvlane: %w\n%s", err, out)
	}
	if tokenizer, err = enginesim.LoadTokenizer(os.DirFS(modelFiles)); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// shape is the configuration of a test bed.
type shape struct {
	engines   int
	ranks     int
	replay    bool
	perPort   bool   // one API port per rank
	rankFree  bool   // the engine chooses the rank
	config    string // further sections of kvlane.yaml
	listen    string // its section listen; default a Unix socket
	envoy     string // further keys of its section envoy
	routing   string // further keys of routing, in newPools
	decide    string // limits.decision_timeout; default 10s, so that a busy machine changes no decision
	stall     string // envoy.stall_timeout; default 20s, so that Kvlane does not count as hanging on a busy machine
	worker    string // further keys of each worker
	model     string // further keys of the model; "-" leaves models out
	tokenizer string // its folder; default the builtin Qwen3
	check     string // its section check; default short intervals
	engine    func(i int, o *enginesim.Options)
	workerOf  func(i int, e *enginesim.Engine) string // further keys of worker i
	addressOf func(i int, e *enginesim.Engine) string // the address of worker i, instead of its engine's
	models    func(i int) string                      // of worker i; default the one model
	events    func(e *enginesim.Engine) string        // its event endpoint, instead of its ZMQ endpoints
	noCheck   bool                                    // do not look for leaks at the end
	bootstrap func(text string) string                // edits Envoy's bootstrap
	otherwise bool                                    // engines may get bodies other than send's: of other clients, or edited on purpose
	maxBodyMB int
}

// bed is an Envoy, a Kvlane and engines, started and ready.
type bed struct {
	t          *testing.T
	shape      shape
	dir        string
	ingress    string
	admin      string
	envoyAdmin string
	engines    []*enginesim.Engine
	kvlane     *exec.Cmd
	exited     chan error
	envoy      *envoy.Process
	client     *http.Client
	idle       map[string]int // Kvlane's goroutines by kind when it was idle
	process    *process       // an engine of its own process; nil if there is none
	replicas   *replicaSet    // the bed is the first of these; nil if it is alone
	// legsAreCut: faults end prefill legs whose decode legs run on, and then ask for blocks that are computed nowhere.
	legsAreCut bool
	pools      int             // connections that Envoy may have opened to Kvlane in addition to perConnection
	between    *between        // in front of the second engine, if set
	epochs     []chan struct{} // closed when an Envoy that is hot-restarted ends
	wrap       []string        // a command that runs Kvlane's
	cgroup     string          // the folder of Kvlane's memory cgroup, if it has one
	stderr     string          // where Kvlane logs; default kvlane.log
	older      bool            // Kvlane is of another version than docs/reference/metrics.md

	mu    sync.Mutex
	sent  map[string]bool // hashes of the bodies that clients sent
	asked int             // the number of requests sent, all of which must have distinct bodies
	loads int             // the number of loads played
}

func newBed(t *testing.T, s shape) *bed {
	t.Helper()
	if s.engines == 0 {
		s.engines = 2
	}
	if s.ranks == 0 {
		s.ranks = 2
	}
	if s.maxBodyMB == 0 {
		s.maxBodyMB = 16
	}
	dir, err := os.MkdirTemp("", "kvl") // a Unix socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b := &bed{t: t, shape: s, dir: dir, sent: map[string]bool{}}
	b.client = &http.Client{Timeout: 10 * time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	t.Cleanup(b.client.CloseIdleConnections)
	b.ingress, b.admin = freeAddress(t), freeAddress(t)
	b.envoyAdmin = freeAddress(t)
	workers := ""
	for i := range s.engines {
		workers += b.startEngine(i)
	}
	if s.tokenizer == "" {
		s.tokenizer = "builtin:qwen3"
	}
	if s.check == "" {
		s.check = "retry: 1s"
	}
	if !s.otherwise {
		s.model += ", hand_ids: false" // long prompts come as they were sent, too
	}
	model := fmt.Sprintf("models:\n- {name: %s, tokenizer: %q, check: {%s}%s}\n", modelName, s.tokenizer, s.check, s.model)
	if strings.HasPrefix(s.model, "-") {
		model = ""
	}
	if s.stall == "" {
		s.stall = "20s"
	}
	if s.listen == "" {
		s.listen = fmt.Sprintf("address: %q", "unix:"+dir+"/k.sock")
	}
	text := fmt.Sprintf(`listen: {%s}
admin: {address: "%s"}
envoy: {ingress: "%s", admin: "%s", access_log: true, stall_timeout: %s%s}
explain: {header: true}
limits: {max_body: %dMiB, decision_timeout: %s}
log: {decisions: true}
drain: 2s
%sworkers:
  health: {every: 200ms}
  static:
%s%s`, s.listen, b.admin, b.ingress, b.envoyAdmin, s.stall, s.envoy, s.maxBodyMB, cmp.Or(s.decide, "10s"), model, workers, s.config)
	if err := os.WriteFile(b.file("kvlane.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	boot, err := exec.Command(kvlaneBinary, "envoy-config", "--config", b.file("kvlane.yaml")).Output()
	if err != nil {
		t.Fatalf("envoy-config: %v\n%s\n%s", err, stderr(err), text)
	}
	if s.bootstrap != nil {
		boot = []byte(s.bootstrap(string(boot)))
	}
	if err := os.WriteFile(b.file("envoy.yaml"), boot, 0o600); err != nil {
		t.Fatal(err)
	}
	b.startKvlane()
	t.Cleanup(func() { b.stopKvlane(syscall.SIGKILL) })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if b.envoy, err = envoy.Run(ctx, envoyBinary, dir, b.file("envoy.yaml"), b.envoyAdmin, 2); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.envoy.Stop() })
	t.Cleanup(func() {
		b.noRaces()
		if t.Failed() {
			for _, f := range []string{"kvlane.log", "envoy.log"} {
				text, _ := os.ReadFile(b.file(f))
				t.Logf("%s ends:\n%s", f, text[max(0, len(text)-4000):])
			}
		}
	})
	if !s.noCheck {
		t.Cleanup(b.quiet)
	}
	return b
}

func stderr(err error) string {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(exit.Stderr)
	}
	return ""
}

func (b *bed) file(name string) string { return filepath.Join(b.dir, name) }

// startEngine starts engine i and returns its entry in the list of workers.
func (b *bed) startEngine(i int) string {
	b.t.Helper()
	ranks := b.shape.ranks
	ports, err := enginesim.FreePorts(3 * ranks) // events, replay, API: reserved, so that an engine can restart on them
	if err != nil {
		b.t.Fatal(err)
	}
	o := enginesim.Options{Model: modelName, Ranks: ranks, Tokenizer: tokenizer, PortPerRank: b.shape.perPort,
		Listen:         fmt.Sprintf("127.0.0.1:%d", ports+2*ranks),
		EventsEndpoint: fmt.Sprintf("tcp://127.0.0.1:%d", ports), BlockSize: 16, Blocks: 16384}
	replay := ""
	if b.shape.replay {
		o.ReplayEndpoint = fmt.Sprintf("tcp://127.0.0.1:%d", ports+ranks)
		replay = fmt.Sprintf(", replay: %q", o.ReplayEndpoint)
	}
	if b.shape.engine != nil {
		b.shape.engine(i, &o)
	}
	e, err := enginesim.Start(context.Background(), o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(e.Close)
	b.engines = append(b.engines, e)
	rankBy := "header"
	switch {
	case b.shape.perPort:
		rankBy = "port"
	case b.shape.rankFree:
		rankBy = "none"
	}
	more := b.shape.worker
	if b.shape.workerOf != nil {
		more += b.shape.workerOf(i, e)
	}
	models := modelName
	if b.shape.models != nil {
		models = b.shape.models(i)
	}
	events := o.EventsEndpoint
	if b.shape.events != nil {
		events = b.shape.events(e)
	}
	address := e.Addr()
	if b.shape.addressOf != nil {
		address = b.shape.addressOf(i, e)
	}
	return fmt.Sprintf("  - {name: e%d, address: %q, ranks: %d, rank_by: %s, models: [%s], events: {endpoint: %q%s}%s}\n",
		i, address, ranks, rankBy, models, events, replay, more)
}

// startKvlane runs `kvlane serve` and waits until it is ready.
func (b *bed) startKvlane() {
	b.t.Helper()
	log, err := os.OpenFile(cmp.Or(b.stderr, b.file("kvlane.log")), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		b.t.Fatal(err)
	}
	defer log.Close()
	args := append(slices.Clone(b.wrap), kvlaneBinary, "serve", "--config", b.file("kvlane.yaml"))
	b.kvlane = exec.Command(args[0], args[1:]...)
	b.kvlane.Stderr = log
	b.kvlane.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := b.kvlane.Start(); err != nil {
		b.t.Fatal(err)
	}
	exited := make(chan error, 1)
	cmd := b.kvlane
	go func() { exited <- cmd.Wait() }()
	b.exited = exited
	b.until("kvlane is ready", func() bool {
		resp, err := http.Get("http://" + b.admin + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if b.envoy != nil { // its health check may not have seen Kvlane yet
		b.until("Envoy asks kvlane", func() bool {
			resp, err := http.Get("http://" + b.envoyAdmin + "/clusters")
			if err != nil {
				return false
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			return err == nil && regexp.MustCompile(`(?m)^kvlane::.*::health_flags::healthy$`).Match(text)
		})
	}
	b.until("its goroutines have begun", func() bool { // before, they are all of one kind
		b.idle = b.goroutines()
		return !slices.ContainsFunc(slices.Collect(maps.Keys(b.idle)), func(kind string) bool { return strings.HasPrefix(kind, "sync.") })
	})
}

// noRaces looks for reports of the race detector in the logs: a process that is killed does not tell by its exit code.
func (b *bed) noRaces() {
	b.t.Helper()
	logs, err := filepath.Glob(b.file("*.log"))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err != nil {
			b.t.Fatal(err)
		}
		if at := bytes.Index(text, []byte("WARNING: DATA RACE")); at >= 0 {
			b.t.Errorf("%s: %.4000s", filepath.Base(log), text[at:])
		}
	}
}

// stopKvlane sends a signal to the process and waits for its end.
func (b *bed) stopKvlane(sig syscall.Signal) {
	if b.kvlane == nil {
		return
	}
	_ = b.kvlane.Process.Signal(sig)
	select {
	case <-b.exited:
	case <-time.After(2 * time.Minute):
		_ = b.kvlane.Process.Kill()
		b.t.Error("kvlane did not stop")
	}
	b.kvlane = nil
}

func (b *bed) until(what string, ok func() bool) {
	b.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	b.t.Fatalf("never: %s", what)
}

// metric sums the samples of a metric whose labels include all of the given pairs
// (`worker="e0"`); 0 if there are none. All metrics on the page must be in the docs.
func (b *bed) metric(name string, labels ...string) float64 {
	b.t.Helper()
	resp, err := http.Get("http://" + b.admin + "/metrics")
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	sum := 0.0
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
next:
	for lines.Scan() {
		b.described(lines.Text())
		rest, ok := strings.CutPrefix(lines.Text(), name)
		if !ok || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(rest, l) {
				continue next
			}
		}
		v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			b.t.Fatal(err)
		}
		sum += v
	}
	return sum
}

// reply is an answer with the parts that the tests check.
type reply struct {
	status  int
	header  http.Header
	body    []byte
	target  string
	matched int
	answer  struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
			Text string `json:"text"`
		} `json:"choices"`
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
		Error struct {
			Message string `json:"message"`
			Type    string `json:"type"`
		} `json:"error"`
	}
}

func (r *reply) text() string {
	if len(r.answer.Choices) == 0 {
		return ""
	}
	return r.answer.Choices[0].Message.Content
}

// send posts a body through Envoy. Headers come in pairs.
func (b *bed) send(path string, body []byte, headers ...string) (*reply, error) {
	b.remember(body)
	req, err := http.NewRequest(http.MethodPost, "http://"+b.ingress+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return b.do(req)
}

// do sends a request and reads its answer.
func (b *bed) do(req *http.Request) (*reply, error) {
	resp, err := b.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	r := &reply{status: resp.StatusCode, header: resp.Header, target: resp.Header.Get("X-Kvlane-Target"), matched: -1}
	if r.body, err = io.ReadAll(resp.Body); err != nil {
		return r, err
	}
	if n, err := strconv.Atoi(resp.Header.Get("X-Kvlane-Matched-Tokens")); err == nil {
		r.matched = n
	}
	_ = json.Unmarshal(r.body, &r.answer)
	return r, nil
}

func (b *bed) post(path string, body []byte, headers ...string) *reply {
	b.t.Helper()
	r, err := b.send(path, body, headers...)
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// message is one chat message.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

func chatBody(messages ...message) []byte {
	body, err := json.Marshal(map[string]any{"model": modelName, "max_tokens": 8, "messages": messages})
	if err != nil {
		panic(err)
	}
	return body
}

// chat sends messages and requires an answer.
func (b *bed) chat(messages ...message) *reply {
	b.t.Helper()
	r := b.post("/v1/chat/completions", chatBody(messages...))
	if r.status != http.StatusOK {
		b.t.Fatalf("status %d: %s", r.status, r.body)
	}
	return r
}

// seen returns the engine's record of a request.
func (b *bed) seen(requestID string) (worker string, rec enginesim.RequestRecord, ok bool) {
	for i, e := range b.engines {
		for _, r := range e.Stats().Requests {
			if r.RequestID == requestID {
				return "e" + strconv.Itoa(i), r, true
			}
		}
	}
	return "", enginesim.RequestRecord{}, false
}

func sha(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:])
}

// intact checks that a request's body reached its engine byte by byte.
func (b *bed) intact(r *reply, body []byte) enginesim.RequestRecord {
	b.t.Helper()
	_, rec, ok := b.seen(r.header.Get("X-Request-Id"))
	if !ok {
		b.t.Fatalf("no engine saw request %s", r.header.Get("X-Request-Id"))
	}
	if rec.BodySHA256 != sha(body) || rec.BodyBytes != len(body) {
		b.t.Errorf("the engine saw %d bytes %s, the client sent %d bytes %s", rec.BodyBytes, rec.BodySHA256, len(body), sha(body))
	}
	return rec
}

func freeAddress(t *testing.T) string {
	t.Helper()
	port, err := enginesim.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	return "127.0.0.1:" + strconv.Itoa(port)
}

// prose makes about n tokens of text, different for each seed.
func prose(seed string, n int) string {
	words := strings.Fields("the harbour lay quiet under a pale sky while gulls turned above empty boats and nobody spoke of the night before")
	var b strings.Builder
	state := uint64(14695981039346656037)
	for _, c := range []byte(seed) {
		state = (state ^ uint64(c)) * 1099511628211
	}
	for range n {
		state = state*6364136223846793005 + 1442695040888963407
		b.WriteString(words[state>>33%uint64(len(words))])
		b.WriteByte(' ')
	}
	return b.String()
}

func (b *bed) write(name, text string) {
	b.t.Helper()
	if err := os.WriteFile(b.file(name), []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) read(name string) string {
	b.t.Helper()
	text, err := os.ReadFile(b.file(name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

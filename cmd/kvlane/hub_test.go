package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	stdlog "log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/hub"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/media"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

const hubCommit = "0123456789abcdef0123456789abcdef01234567"

// hubOf serves files as Org/Model, and answers status instead where that is not 0. It sets the environment.
func hubOf(t *testing.T, files map[string][]byte) (status *atomic.Int32, requests *atomic.Int32) {
	t.Helper()
	status, requests = new(atomic.Int32), new(atomic.Int32)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		code := int(status.Load())
		if code < 0 { // the next one is answered
			code = -code
			status.Store(0)
		}
		if strings.HasPrefix(r.URL.Path, "/api/models/Org/Away/") {
			code = 503
		}
		if code != 0 {
			w.WriteHeader(code)
			return
		}
		if strings.HasPrefix(r.URL.Path, "/api/models/Org/Model/revision/") {
			list := []map[string]string{}
			for name := range files {
				list = append(list, map[string]string{"rfilename": name})
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"sha": hubCommit, "siblings": list})
			return
		}
		text, ok := files[strings.TrimPrefix(r.URL.Path, "/Org/Model/resolve/"+hubCommit+"/")]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = w.Write(text)
	}))
	t.Cleanup(server.Close)
	for name, value := range map[string]string{
		"HF_ENDPOINT": server.URL, "HF_HOME": t.TempDir(), "HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "", "HF_TOKEN_PATH": "", "HF_HUB_OFFLINE": "",
	} {
		t.Setenv(name, value)
	}
	return status, requests
}

func qwen3(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		t.Fatal(err)
	}
	f, err := files.Open("tokenizer.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	settings, err := fs.ReadFile(files, "tokenizer_config.json")
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{"tokenizer.json": text, "tokenizer_config.json": settings}
}

func TestTokenizerOfAModelHub(t *testing.T) {
	status, requests := hubOf(t, qwen3(t))
	dir := t.TempDir()
	file := filepath.Join(dir, "kvlane.yaml")
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	admin := free.Addr().String()
	_ = free.Close()
	check := func(more string, flags ...string) (int, string) {
		t.Helper()
		if err := os.WriteFile(file, []byte("models: [{name: m, tokenizer: \"hf:Org/Model\""+more+"}]\nworkers: {static: [{address: \"10.0.0.1:8000\"}]}\nlisten: {address: \"unix:"+dir+"/k.sock\"}\nadmin: {address: \""+admin+"\"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		code, _, errs := kvlane("", append([]string{"check", file}, flags...)...)
		return code, errs
	}
	if code, errs := check(""); code != 0 || !strings.Contains(errs, "--live downloads it") || requests.Load() != 0 {
		t.Errorf("check: got code %d, %d requests, %s, want a warning and no request", code, requests.Load(), errs)
	}
	status.Store(404)
	if code, errs := check("", "--live"); code != 1 || !strings.Contains(errs, "models[0].tokenizer") || !strings.Contains(errs, "no such model or revision") {
		t.Errorf("check --live, 404: got code %d, %s, want an error that says so", code, errs)
	}
	status.Store(0)
	code, errs := check("", "--live")
	_, lock, _ := strings.Cut(errs, "tokenizer_lock: ")
	lock, _, _ = strings.Cut(lock, "\n")
	if code != 0 || !strings.HasPrefix(lock, "sha256:") || !strings.Contains(errs, "hf:Org/Model@"+hubCommit) {
		t.Fatalf("check --live: got code %d, %s, want the commit and the lock to write", code, errs)
	}
	if code, errs := check(", tokenizer_lock: \"" + lock + "\""); code != 0 || strings.Contains(errs, "tokenizer") {
		t.Errorf("check with the lock: got code %d, %s, want no word on the tokenizer", code, errs)
	}
	other := "sha256:" + strings.Repeat("0", 64)
	if code, errs := check(", tokenizer_lock: \"" + other + "\""); code != 1 || !strings.Contains(errs, other) || !strings.Contains(errs, lock) {
		t.Errorf("check with another lock: got code %d, %s, want an error with both", code, errs)
	}

	_, want, _ := kvlane(`{"text": "Hello, world"}`, "tokenize", "--tokenizer", "builtin:qwen3")
	if code, got, errs := kvlane(`{"text": "Hello, world"}`, "tokenize", "--tokenizer", "hf:Org/Model"); code != 0 || got != want || want == "" {
		t.Errorf("tokenize: got code %d, %q, %s, want %q", code, got, errs, want)
	}
	status.Store(500)
	if code, errs := check(", tokenizer_lock: \""+lock+"\"", "--live"); code != 0 || !strings.Contains(errs, "500") {
		t.Errorf("check --live, hub down: got code %d, %s, want a warning", code, errs)
	}
	t.Setenv("HF_HUB_OFFLINE", "1")
	t.Setenv("HF_HOME", t.TempDir())
	if code, _, errs := kvlane("", "tokenize", "--tokenizer", "hf:Org/Model"); code != 1 || !strings.Contains(errs, "HF_HUB_OFFLINE") {
		t.Errorf("tokenize, offline: got code %d, %s, want an error that names HF_HUB_OFFLINE", code, errs)
	}
}

func TestServeAwaitsTheModelHub(t *testing.T) {
	status, requests := hubOf(t, qwen3(t))
	var log logged
	load := func(ctx context.Context, lock string) (bool, error) {
		c := config.Default()
		c.Models = []config.Model{{Name: "m", Tokenizer: "hf:Org/Model", TokenizerLock: lock, Engine: "vllm"}}
		list, err := loadModels(ctx, &c, nil, &loading{}, observe.New("test"), zerolog.New(&log))
		return err == nil && list[0].Tokens != nil, err
	}
	// The remedy is in the log.
	stopped, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	status.Store(503)
	if loaded, err := load(stopped, ""); loaded || err != nil || !strings.Contains(log.String(), "(HF_ENDPOINT) reachable, or copy the files to ") {
		t.Errorf("503: got tokenizer %v, %v, log %s, want the remedy", loaded, err, log.String())
	}
	requests.Store(0)
	// What the hub refuses leaves the model routed by load.
	status.Store(401)
	if loaded, err := load(t.Context(), ""); loaded || err != nil || !strings.Contains(log.String(), "HF_TOKEN") || !strings.Contains(log.String(), "this model is routed by load") {
		t.Errorf("401: got tokenizer %v, %v, log %s, want none and the reason", loaded, err, log.String())
	}
	if got := requests.Load(); got != 1 {
		t.Errorf("401: got %d requests, want 1: another would be answered the same", got)
	}
	// A stop during the wait ends it.
	status.Store(503)
	ctx, stop := context.WithCancel(t.Context())
	requests.Store(0)
	go func() {
		for requests.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		stop()
	}()
	if _, err := load(ctx, ""); err == nil {
		t.Error("stopped: got no error, want one")
	}
	// One failure is mended by the next attempt.
	status.Store(-503)
	if loaded, err := load(t.Context(), ""); !loaded || err != nil || !strings.Contains(log.String(), "retry_in") || !strings.Contains(log.String(), "the tokenizer's revision can move") {
		t.Errorf("503, then 200: got tokenizer %v, %v, log %s, want it after a warning", loaded, err, log.String())
	}
	// A hub that is down later does not matter.
	status.Store(503)
	if loaded, err := load(t.Context(), ""); !loaded || err != nil || !strings.Contains(log.String(), "the last one downloaded") {
		t.Errorf("503 after a download: got tokenizer %v, %v, log %s, want the old files and a warning", loaded, err, log.String())
	}
	if loaded, err := load(t.Context(), "sha256:"+strings.Repeat("0", 64)); loaded || err != nil {
		t.Errorf("another lock: got tokenizer %v, %v, want none", loaded, err)
	}
}

// A model whose tokenizer the hub refuses is named where other warnings are, with the remedy.
func TestARefusedTokenizerIsAWarning(t *testing.T) {
	status, _ := hubOf(t, qwen3(t))
	ready := func(tokenizer string) (readyz, metrics string) {
		t.Helper()
		_, admin, _ := started(t, "models: [{name: m"+tokenizer+"}]\n")
		until(t, admin+"/readyz", func(status int, _ string) bool { return status == http.StatusOK })
		_, readyz = page(t, admin+"/readyz")
		_, metrics = page(t, admin+"/metrics")
		code, terminal, errs := kvlane("", "status", "--admin", admin)
		if _, warning, _ := strings.Cut(readyz, "ok\n"); code != 0 || errs != "" || !strings.HasSuffix(terminal, warning) {
			t.Errorf("status: got code %d, %s%s, want %q at its end", code, terminal, errs, warning)
		}
		return strings.Replace(readyz, noWorkers, "", 1), metrics
	}
	const series, refused = `kvlane_worker_warnings{reason="no_tokenizer",worker=""} 1`, `kvlane_worker_warnings{reason="tokenizer_refused",worker=""} 1`
	const fromHub = ", tokenizer: \"hf:Org/Model\""
	if readyz, metrics := ready(fromHub); readyz != "ok\n" || strings.Contains(metrics, series) || strings.Contains(metrics, refused) {
		t.Errorf("got %q, want no warning and no series", readyz)
	}
	status.Store(404)
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	if readyz, metrics := ready(""); readyz != "ok\nwarning: model m is routed by load: it has no models[].tokenizer\n" || !strings.Contains(metrics, series) {
		t.Errorf("without a tokenizer: got %q, want a warning and its series", readyz)
	}
	readyz, metrics := ready(fromHub)
	for _, want := range []string{"ok\nwarning: model m is routed by load: hf:Org/Model@main: model hub: ", "no such model or revision; it is read again when Kvlane starts or its keys change\n"} {
		if !strings.Contains(readyz, want) {
			t.Errorf("got %q, want %q", readyz, want)
		}
	}
	if !strings.Contains(metrics, refused) || strings.Contains(metrics, series) {
		t.Errorf("got no %s or %s, want the first only", refused, series)
	}
	readyz, metrics = ready(fromHub + `, check: {renderer: "http://127.0.0.1:1"}`)
	if !strings.HasPrefix(readyz, "ok\nwarning: check.renderer computes all ids of model m: hf:Org/Model@main: ") || strings.Contains(readyz, "by load") || !strings.Contains(metrics, refused) {
		t.Errorf("with a renderer: got %q, want that it computes the ids", readyz)
	}
}

// recorder records the names that are opened.
type recorder struct {
	fs.FS
	opened map[string][]byte
}

func (r recorder) Open(name string) (fs.File, error) {
	if name != "." && path.Ext(name) != ".gz" {
		r.opened[name] = []byte("{}")
	}
	return r.FS.Open(name)
}

func TestHubHasWhatTheLoaderReads(t *testing.T) {
	r := recorder{fstest.MapFS{"config.json": {Data: []byte(`{"architectures": ["Qwen2_5_VLForConditionalGeneration"]}`)}}, map[string][]byte{}}
	if _, err := shape.Load(r, shape.Options{}); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("got %v, want no tokenizer", err)
	}
	_, _ = media.Load(r, func(string) (uint32, bool) { return 0, false })
	if len(r.opened) < 12 || r.opened["preprocessor_config.json"] == nil {
		t.Fatalf("the loader opened %d files, want all that it knows", len(r.opened))
	}
	delete(r.opened, "additional_chat_templates") // a folder
	delete(r.opened, "tokenizer.json")            // makes others superfluous
	hubOf(t, r.opened)
	files, err := openTokenizer(t.Context(), streams{err: io.Discard}, hub.Prefix+"Org/Model")
	if err != nil {
		t.Fatal(err)
	}
	for name := range r.opened {
		if _, err := fs.ReadFile(files, name); err != nil {
			t.Errorf("%s: got %v, want it downloaded", name, err)
		}
	}
}

// What to do fits the reason: a cache that cannot be written, or a hub that does not answer.
func TestAdviceForAModelHub(t *testing.T) {
	status, _ := hubOf(t, qwen3(t))
	cache := hub.FromEnvironment()
	cache.Folder = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(cache.Folder, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const writable, reachable = "(HF_HUB_CACHE) writable", "(HF_ENDPOINT) reachable"
	if _, err := openHub(t.Context(), cache, "hf:Org/Model"); err == nil || !strings.Contains(err.Error(), writable) || strings.Contains(err.Error(), reachable) {
		t.Errorf("got %v, want advice for the folder", err)
	}
	status.Store(503)
	cache.Folder = t.TempDir()
	if _, err := openHub(t.Context(), cache, "hf:Org/Model"); err == nil || strings.Contains(err.Error(), writable) || !strings.Contains(err.Error(), reachable) {
		t.Errorf("got %v, want advice for the hub", err)
	}
}

// SIGTERM ends the wait for a hub, also while a file of its cache folder cannot be read.
func TestTheWaitForAHubEndsWithTheProcess(t *testing.T) {
	refs := filepath.Join(t.TempDir(), "models--Org--Model", "refs")
	if err := os.MkdirAll(refs, 0o700); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(refs, "main")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	cache := hub.Cache{Folder: filepath.Dir(filepath.Dir(refs)), Endpoint: "http://127.0.0.1:1", Offline: true}
	ctx, cancel := context.WithCancel(t.Context())
	defer time.AfterFunc(10*time.Millisecond, cancel).Stop()
	if _, err := openHub(ctx, cache, "hf:Org/Model"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the end of the context", err)
	}
	if err := os.WriteFile(fifo, nil, 0o600); err != nil { // lets the reader go
		t.Fatal(err)
	}
}

// A hub whose certificate cannot be verified is said with what to correct, also where an earlier download is taken instead.
func TestCertificateOfAModelHubIsAdvised(t *testing.T) {
	hubOf(t, qwen3(t))
	cache := hub.FromEnvironment()
	certified := httptest.NewUnstartedServer(http.NotFoundHandler())
	certified.Config.ErrorLog = stdlog.New(io.Discard, "", 0)
	certified.StartTLS()
	defer certified.Close()
	advice := "x509: certificate signed by unknown authority: correct SSL_CERT_FILE (certificate authorities), the certificate of " + certified.URL + ", or a clock"
	unknown := cache
	unknown.Endpoint = certified.URL
	if _, err := openHub(t.Context(), unknown, "hf:Org/Model"); err == nil || !strings.Contains(err.Error(), advice) || !hubAway(err) {
		t.Errorf("got %v, want advice for the certificate, of a hub that may answer later", err)
	}
	if _, err := openHub(t.Context(), cache, "hf:Org/Away"); err == nil || strings.Contains(err.Error(), ": correct ") {
		t.Errorf("got %v, want an error of a hub without such advice", err)
	}
	if s, err := openHub(t.Context(), cache, "hf:Org/Model"); err != nil || s.Stale != nil {
		t.Fatalf("got %v, want the files", err)
	}
	if s, err := openHub(t.Context(), unknown, "hf:Org/Model"); err != nil || s.Stale == nil || !strings.Contains(s.Stale.Error(), advice) {
		t.Errorf("got %v, %v, want the files of before and the advice", s, err)
	}
}

// A hub that was away is asked again, at the start and after a change of the file, without a signal or another change; one that
// refuses is not.
func TestServeAsksAHubAgain(t *testing.T) {
	defer zerolog.SetGlobalLevel(zerolog.GlobalLevel())
	defer func(patience, first, last time.Duration) { hubPatience, retryFirst, retryLast = patience, first, last }(hubPatience, retryFirst, retryLast)
	hubPatience, retryFirst, retryLast = 2*time.Second, 10*time.Millisecond, 40*time.Millisecond
	for name, later := range map[string]int32{"answers later": 0, "refuses later": 404} {
		t.Run(name, func(t *testing.T) { asksAgain(t, false, later) })
		t.Run("for a changed file, "+name, func(t *testing.T) { asksAgain(t, true, later) })
	}
	t.Run("for others", asksForOthers)
}

// A change that waits for one model does not keep others from being asked for.
func asksForOthers(t *testing.T) {
	status, _ := hubOf(t, qwen3(t))
	status.Store(503)
	const text, rejected, byLoad = "models: [{name: m, tokenizer: \"hf:Org/Model\"}, {name: n}]\n", "the configuration on disk is rejected", "model m is routed by load"
	s := served(t, text)
	s.write(strings.Replace(text, "{name: n", "{name: n, tokenizer: \"hf:Org/Away\"", 1))
	ready := "http://" + s.admin + "/readyz"
	until(t, ready, func(_ int, body string) bool {
		return strings.Contains(body, rejected) && strings.Contains(body, byLoad)
	})
	status.Store(0)
	until(t, ready, func(_ int, body string) bool {
		return strings.Contains(body, rejected) && !strings.Contains(body, byLoad)
	})
}

// asksAgain asks a hub that is away, and later answers with a status (0: 200), from the start or from a change of the file.
func asksAgain(t *testing.T, changed bool, later int32) {
	status, requests := hubOf(t, qwen3(t))
	status.Store(503)
	const fromHub, waits = ", tokenizer: \"hf:Org/Model\"", "the hub is asked again, at least every 40ms"
	text := "models: [{name: m" + fromHub + "}]\n"
	first, before := text, "model m is routed by load: "
	if changed {
		first, before = strings.Replace(text, fromHub, "", 1), "the configuration on disk is rejected, the running one stays: "
	}
	s := served(t, first)
	ready := "http://" + s.admin + "/readyz"
	s.write(text)
	until(t, ready, func(_ int, body string) bool { return strings.Contains(body, before) && strings.Contains(body, waits) })
	status.Store(later)
	until(t, ready, func(_ int, body string) bool {
		return !strings.Contains(body, "asked again") && (body == "ok\n"+noWorkers) == (later == 0)
	})

	asked := requests.Load()
	time.Sleep(5 * retryLast)
	if now := requests.Load(); now != asked {
		t.Errorf("got %d more requests to a hub that has answered, want none", now-asked)
	}
}

// While a hub is away at the start, the admin port says which model waits for what, and nothing answers 200: startup probes wait.
func TestTheAdminPortSaysWhatIsBeingLoaded(t *testing.T) {
	status, _ := hubOf(t, qwen3(t))
	status.Store(503)
	s := servedUntil(t, "models: [{name: m, tokenizer: \"hf:Org/Model\"}]\n", "loading tokenizer")
	admin := "http://" + s.admin
	until(t, admin+"/readyz", func(code int, body string) bool {
		return code == http.StatusServiceUnavailable && strings.HasPrefix(body, "tokenizers are being loaded\nwarning: model m: the model hub did not answer: hf:Org/Model@main: ") &&
			strings.Contains(body, "503 Service Unavailable: make http://127.0.0.1:") && strings.Contains(body, "; it is asked again within ")
	})
	if code, body := page(t, admin+"/healthz"); code != http.StatusServiceUnavailable {
		t.Errorf("/healthz: got %d %s, want 503", code, body)
	}
	if code, out, errs := kvlane("", "status", "--admin", admin); code != 1 || out != "" || !strings.Contains(errs, "model m: the model hub did not answer") {
		t.Errorf("status: got code %d, %s%s, want what is waited for", code, out, errs)
	}
	status.Store(0)
	until(t, admin+"/readyz", func(code int, body string) bool { return code == http.StatusOK && body == "ok\n"+noWorkers })
}

// Package page tests the admin port's page in a headless Chromium: `make test-page`.
package page

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

const screenshot = "../../docs/page.png"

// browse opens a tab. Errors of the page's scripts and refused resources fail the test.
func browse(t *testing.T) context.Context {
	t.Helper()
	binary := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil && binary == "" {
			binary = path
		}
	}
	if binary == "" {
		t.Skip("there is no Chromium on this machine: make test-page installs Debian's")
	}
	opts := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(binary), chromedp.NoSandbox, chromedp.WindowSize(1280, 800),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.WSURLReadTimeout(time.Minute))
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, opts...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	chromedp.ListenTarget(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			t.Errorf("got an exception of the page's script: %s", e.ExceptionDetails.Error())
		case *runtime.EventConsoleAPICalled:
			t.Errorf("got %v on the console, want nothing", e.Args)
		case *page.EventJavascriptDialogOpening:
			t.Errorf("got a dialog: a name was run as a script: %s", e.Message)
		}
	})
	return ctx
}

func run(t *testing.T, ctx context.Context, actions ...chromedp.Action) {
	t.Helper()
	if err := chromedp.Run(ctx, actions...); err != nil {
		t.Fatal(err)
	}
}

func eval[T any](t *testing.T, ctx context.Context, script string) (out T) {
	t.Helper()
	run(t, ctx, chromedp.Evaluate(script, &out))
	return out
}

// until waits for a condition of the page.
func until(t *testing.T, ctx context.Context, what, script string) {
	t.Helper()
	if err := chromedp.Run(ctx, chromedp.Poll(script, nil, chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(30*time.Second))); err != nil {
		text := ""
		_ = chromedp.Run(ctx, chromedp.Evaluate("document.body.innerText", &text))
		t.Fatalf("%s: %v; the page has\n%.2000s", what, err, text)
	}
}

func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// demo starts Envoy, Kvlane and simulated engines, and returns the addresses for clients and of
// the admin port.
func demo(t *testing.T) (ingress, admin string) {
	t.Helper()
	binary := os.Getenv("KVLANE_BIN")
	if binary == "" {
		t.Skip("KVLANE_BIN names no binary: make test-page builds it")
	}
	ingress, admin = freeAddress(t), freeAddress(t)
	cmd := exec.Command(binary, "demo", "--pd", "--engines", "6", "--ranks", "4", "--ingress", ingress, "--admin", admin, "--envoy-admin", freeAddress(t))
	out, err := os.Create(t.TempDir() + "/demo.log")
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if text, err := os.ReadFile(out.Name()); err == nil && t.Failed() {
			t.Logf("the demonstration wrote\n%.5000s", text)
		}
	})
	for range 600 {
		if resp, err := http.Get("http://" + admin + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return ingress, admin
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("the demonstration does not become ready")
	return "", ""
}

// chat sends a conversation and waits for the answer.
func chat(t *testing.T, ingress string, user int, turns ...string) {
	t.Helper()
	if err := ask(context.Background(), ingress, user, 8, turns...); err != nil {
		t.Fatal(err)
	}
}

func ask(ctx context.Context, ingress string, user, tokens int, turns ...string) error {
	messages := []map[string]string{{"role": "system", "content": strings.Repeat(fmt.Sprintf("You are librarian %d and know all books. ", user), 20)}}
	for i, turn := range turns {
		messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": turn})
	}
	text, _ := json.Marshal(map[string]any{"model": "demo", "max_tokens": tokens, "messages": messages})
	var last error
	for range 100 { // Envoy may not have its endpoints yet
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+ingress+"/v1/chat/completions", strings.NewReader(string(text)))
		req.Header.Set("content-type", "application/json")
		req.Header.Set("x-session-id", fmt.Sprint("user ", user))
		resp, err := http.DefaultClient.Do(req)
		last = err
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
			last = fmt.Errorf("got %s, want an answer", resp.Status)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		time.Sleep(100 * time.Millisecond)
	}
	return last
}

func TestThePageShowsAnInstallation(t *testing.T) {
	ctx := browse(t)
	ingress, admin := demo(t)
	run(t, ctx, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "light"}}), chromedp.Navigate("http://"+admin+"/"))
	until(t, ctx, "ranks", `document.querySelectorAll('#grid .cell').length === 24`)
	for user := range 4 {
		chat(t, ingress, user, "Hello")
		chat(t, ingress, user, "Hello", "Good day.", "Which books are about cats?")
	}
	until(t, ctx, "decisions without a reload of the page", `document.querySelectorAll('#rows tr').length === 8`)
	until(t, ctx, "reported cached tokens", `[...document.querySelectorAll('#rows tr')].every((tr) => tr.cells[5].textContent !== '')`)
	predicted := eval[string](t, ctx, `document.querySelector('#rows tr').cells[4].textContent`)
	if predicted == "0" {
		t.Error("got 0 predicted tokens for a second turn, want the first turn's")
	}
	until(t, ctx, "a live rank", `document.querySelectorAll('#grid .cell.ok').length > 0`)
	until(t, ctx, "rate", `document.querySelector('#totals').innerText.includes('prefill legs')`)
	picture(t, ctx, ingress)
	until(t, ctx, "no running request", `[...document.querySelectorAll('#rows tr')].every((tr) => tr.lastChild.textContent !== 'running')`)
	count := eval[int](t, ctx, `document.querySelectorAll('#rows tr').length`)

	run(t, ctx, chromedp.Focus("#rows tr:last-child button"), chromedp.KeyEvent("\r"))
	until(t, ctx, "a cost table", `document.querySelector('#detail').open && document.querySelectorAll('#detail tr.chosen').length > 0`)
	if text := eval[string](t, ctx, `document.querySelector('#detail').innerText`); !strings.Contains(text, "Prefill target") || !strings.Contains(text, "cached, reported") {
		t.Errorf("got the details %q, want both cost tables and the reported tokens", text)
	}
	run(t, ctx, chromedp.Click("#detail form button"))
	until(t, ctx, "closed details", `!document.querySelector('#detail').open`)
	run(t, ctx, chromedp.KeyEvent("p"))
	want(t, "paused by a key", eval[string](t, ctx, `document.querySelector('#pause').textContent`), "Resume")
	chat(t, ingress, 9, "Hello")
	run(t, ctx, chromedp.Sleep(time.Second))
	want(t, "rows while paused", eval[int](t, ctx, `document.querySelectorAll('#rows tr').length`), count)
	run(t, ctx, chromedp.KeyEvent("p"))
	until(t, ctx, "rows after the pause", fmt.Sprintf(`document.querySelectorAll('#rows tr').length === %d`, count+1))
}

// picture takes the screenshot of the README while requests run, and writes it if asked to.
func picture(t *testing.T, ctx context.Context, ingress string) {
	t.Helper()
	load, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	for user := range 9 {
		running.Go(func() { _ = ask(load, ingress, user/2, 20_000, "Hello", "Good day.", "Write a novel.") })
	}
	until(t, ctx, "running requests", `[...document.querySelectorAll('#rows tr')].filter((tr) => tr.lastChild.textContent === 'running').length === 9 &&
		[...document.querySelectorAll('#grid .cell')].some((c) => c.textContent > 0)`)
	var png []byte
	run(t, ctx, chromedp.CaptureScreenshot(&png))
	if len(png) < 10_000 || len(png) > 150<<10 {
		t.Errorf("got a screenshot of %d bytes, want 10 to 150 KB", len(png))
	}
	if os.Getenv("SCREENSHOT") != "" {
		if err := os.WriteFile(screenshot, png, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// stub serves the page with invented data.
type stub struct {
	mu        sync.Mutex
	status    map[string]any
	decisions []map[string]any
	token     string
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.token != "" && strings.HasPrefix(r.URL.Path, "/debug/") && r.Header.Get("Authorization") != "Bearer "+s.token {
		http.Error(w, "needs the token", http.StatusUnauthorized)
		return
	}
	switch {
	case r.URL.Path == "/debug/status":
		_ = json.NewEncoder(w).Encode(s.status)
	case r.URL.Path == "/debug/stream":
		for _, d := range s.decisions {
			text, _ := json.Marshal(d)
			fmt.Fprintf(w, "data: %s\n\n", text)
		}
	case strings.HasPrefix(r.URL.Path, "/debug/decisions/"):
		d := s.decisions[0]
		hostile := fmt.Sprint(d["id"])
		_ = json.NewEncoder(w).Encode(map[string]any{
			"id": hostile, "method": hostile, "path": hostile, "model": hostile, "conversation": hostile, "stages": []any{}, "after": map[string]any{},
			"prefill_notes": []string{hostile}, "refusal": hostile,
			"explanation": map[string]any{"decode": hostile, "verdicts": []any{map[string]any{"stage": "cost", "text": hostile}},
				"candidates": []any{map[string]any{"target": hostile, "tiers": []int{1, 0, 0, 0}, "dropped": hostile}}},
		})
	default:
		http.FileServer(http.Dir("../../internal/observe/page")).ServeHTTP(w, r)
	}
}

func (s *stub) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func fleet(workers, ranks int) map[string]any {
	var list []any
	for w := range workers {
		var of []any
		for r := range ranks {
			of = append(of, map[string]any{"rank": fmt.Sprint(r), "kv_usage": float64(w*ranks+r) / float64(workers*ranks), "active": r, "feed": "live",
				"prompt_tokens_total": 100, "matched_tokens_total": 60})
		}
		list = append(list, map[string]any{"name": fmt.Sprintf("w%03d", w), "role": "both", "ready": true, "models": []string{"demo"}, "ranks": of})
	}
	return map[string]any{"version": "v1", "workers": list, "requests_total": 10, "prompt_tokens_total": 100, "matched_tokens_total": 60}
}

func TestThePageIsUsableAtAThousandRanks(t *testing.T) {
	ctx := browse(t)
	s := &stub{status: fleet(125, 8)}
	srv := httptest.NewServer(s)
	defer srv.Close()
	run(t, ctx, chromedp.Navigate(srv.URL))
	until(t, ctx, "ranks", `document.querySelectorAll('#grid .cell').length === 1000`)
	want(t, "cells that the tab key reaches", eval[int](t, ctx, `document.querySelectorAll('#grid .cell[tabindex="0"]').length`), 1)
	label := `document.activeElement.getAttribute('aria-label').split(':')[0]`
	run(t, ctx, chromedp.Focus(`#grid .cell[tabindex="0"]`), chromedp.KeyEvent(arrow("Right")), chromedp.KeyEvent(arrow("Right")))
	want(t, "two to the right", eval[string](t, ctx, label), "w000/2")
	run(t, ctx, chromedp.KeyEvent(arrow("Down")))
	if got := eval[string](t, ctx, label); got == "w000/2" || !strings.HasSuffix(got, "/2") {
		t.Errorf("one down: got %s, want the same rank of a worker below", got)
	}
	run(t, ctx, chromedp.KeyEvent(arrow("End")))
	want(t, "end", eval[string](t, ctx, label), "w124/7")
	run(t, ctx, chromedp.KeyEvent("\r"))
	until(t, ctx, "details", `document.querySelector('#detail').open`)
	run(t, ctx, chromedp.KeyEvent("\u001b"))
	until(t, ctx, "closed details", `!document.querySelector('#detail').open`)

	// An update touches only the cells that have changed.
	run(t, ctx, chromedp.Evaluate(`window.changes = 0; new MutationObserver((list) => { window.changes += list.length; })
		.observe(document.querySelector('#grid'), {subtree: true, childList: true, attributes: true, attributeFilter: ['class', 'title', 'style']}); 0`, nil))
	s.change(func() {
		s.status["workers"].([]any)[7].(map[string]any)["ranks"].([]any)[3].(map[string]any)["feed"] = "gap"
	})
	until(t, ctx, "the change", `document.querySelectorAll('#grid .cell.feed').length === 1`)
	cells := eval[int](t, ctx, `window.cellChanges = window.changes`)
	if cells > 1000 { // a heading of each worker is written with each of few updates
		t.Errorf("got %d changes of the document for one changed rank", cells)
	}
	run(t, ctx, chromedp.Click("#problems"))
	want(t, "ranks with a problem", eval[int](t, ctx, `document.querySelectorAll('#grid .cell:not([hidden])').length`), 1)
	run(t, ctx, chromedp.Click("#problems"), input.DispatchKeyEvent(input.KeyDown).WithKey("/").WithText("/"), chromedp.KeyEvent("w01"))
	want(t, "ranks that fit the filter", eval[int](t, ctx, `document.querySelectorAll('#grid .cell:not([hidden])').length`), 80)

	back := `getComputedStyle(document.body).backgroundColor`
	light := eval[string](t, ctx, back)
	run(t, ctx, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}))
	if dark := eval[string](t, ctx, back); dark == light {
		t.Errorf("got the background %s in dark mode too", dark)
	}
	s.change(func() { s.status["workers"] = s.status["workers"].([]any)[:2] })
	until(t, ctx, "workers that left", `document.querySelectorAll('#grid .cell').length === 16`)
}

func arrow(name string) string {
	return map[string]string{"Right": "\u0303", "Down": "\u0301", "End": "\u0305"}[name]
}

func TestHostileNamesAreText(t *testing.T) {
	const hostile = `"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b id=planted>&amp;` + "\u202e'`${window.hacked=1}"
	ctx := browse(t)
	s := &stub{status: fleet(1, 1)}
	w := s.status["workers"].([]any)[0].(map[string]any)
	for _, key := range []string{"name", "address", "engine", "role", "reason", "tokenizer"} {
		w[key] = hostile
	}
	w["models"], w["warnings"] = []string{hostile}, []string{hostile}
	r := w["ranks"].([]any)[0].(map[string]any)
	r["rank"], r["feed"], r["feed_error"] = hostile, hostile, hostile
	s.status["version"], s.status["not_ready"] = hostile, hostile
	s.status["prefill_legs_total"] = map[string]any{hostile: 1}
	s.status["queue"] = []any{map[string]any{"model": hostile, "requests": 3}}
	s.status["pools"] = []any{map[string]any{"model": hostile, "saturation": 0.5}}
	s.status["replicas"] = map[string]any{"replica": hostile, "replicas": []any{map[string]any{"id": hostile}}}
	s.decisions = []map[string]any{{"id": hostile, "at": "2026-01-02T03:04:05Z", "model": hostile, "target": hostile, "prefill": hostile, "reason": hostile, "prompt_tokens": 1, "matched_tokens": 0}}
	srv := httptest.NewServer(s)
	defer srv.Close()
	run(t, ctx, chromedp.Navigate(srv.URL))
	until(t, ctx, "the rank", `document.querySelectorAll('#grid .cell').length === 1 && document.querySelectorAll('#rows tr').length === 1`)
	if got := eval[string](t, ctx, `document.querySelector('#queue td').textContent`); got != hostile {
		t.Errorf("the model in the queue: got %q, want %q", got, hostile)
	}
	run(t, ctx, chromedp.Click("#grid .cell"))
	until(t, ctx, "details of the rank", `document.querySelector('#detail').open`)
	run(t, ctx, chromedp.KeyEvent("\u001b"), chromedp.Click("#rows button"))
	until(t, ctx, "details of the request", `document.querySelectorAll('#detail tr').length === 2`)
	want(t, "elements made of names", eval[int](t, ctx, `document.querySelectorAll('img, #planted, body script').length`), 0)
	want(t, "scripts run", eval[bool](t, ctx, `window.hacked === undefined`), true)
	want(t, "the name as text", eval[string](t, ctx, `document.querySelector('#rows button').textContent`), hostile)
}

func TestTheTokenIsAskedFor(t *testing.T) {
	ctx := browse(t)
	srv := httptest.NewServer(&stub{status: fleet(1, 2), token: "secret"})
	defer srv.Close()
	run(t, ctx, chromedp.Navigate(srv.URL), chromedp.WaitVisible("#login"))
	want(t, "ranks without the token", eval[int](t, ctx, `document.querySelectorAll('#grid .cell').length`), 0)
	run(t, ctx, chromedp.SendKeys("#token", "secret\r"))
	until(t, ctx, "ranks with the token", `document.querySelectorAll('#grid .cell').length === 2 && document.querySelector('#login').hidden`)
}

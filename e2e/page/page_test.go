// Package page tests the admin port's page in a headless Chromium: `make test-page`.
package page

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
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

// The installation of install: workers, half of which decode, their ranks, requests that a rank takes, and requests that
// may wait.
const (
	engines   = 6
	ranks     = 4
	perRank   = 1
	queueSize = 50
)

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
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute) // on a busy machine the installation alone takes minutes
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
	if err := chromedp.Run(ctx, chromedp.Poll(script, nil, chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(2*time.Minute))); err != nil {
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

// freePorts returns the first of n free ports in a row, below those that the kernel gives to connections: programs that load
// for seconds find them free.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	for range 100 {
		first, free := 20_000+rand.IntN(12_000), 0
		for ; free < n; free++ {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+free))
			if err != nil {
				break
			}
			l.Close()
		}
		if free == n {
			return first
		}
	}
	t.Fatalf("there are no %d free ports in a row", n)
	return 0
}

// install starts Envoy, two replicas of Kvlane with a queue, and simulated engines that
// prefill and decode. It returns the addresses for clients and of both admin ports, and a
// function that kills the second replica.
func install(t *testing.T) (ingress string, admin [2]string, kill func()) {
	t.Helper()
	binary, proxy := os.Getenv("KVLANE_BIN"), os.Getenv("ENVOY")
	if binary == "" || proxy == "" {
		t.Skip("KVLANE_BIN and ENVOY name no programs: make test-page has them")
	}
	dir := t.TempDir()
	start := func(name string, program string, args ...string) func() {
		cmd := exec.Command(program, args...)
		out, err := os.Create(filepath.Join(dir, name+".log"))
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		end := sync.OnceFunc(func() { _ = errors.Join(cmd.Process.Kill(), cmd.Wait(), out.Close()) })
		t.Cleanup(func() {
			end()
			if text, err := os.ReadFile(out.Name()); err == nil && t.Failed() {
				t.Logf("%s wrote\n%s", name, text[max(0, len(text)-3000):])
			}
		})
		return end
	}
	next := freePorts(t, engines*(ranks+1)+9)
	ports := func(n int) int {
		next += n
		return next - n
	}
	address := func() string { return fmt.Sprintf("127.0.0.1:%d", ports(1)) }
	ingress = address()
	workers := ""
	for i := range engines {
		role := []string{"prefill", "decode"}[i%2]
		api, name := address(), fmt.Sprintf("%s-%c", role, 'a'+i/2)
		events := fmt.Sprintf("tcp://127.0.0.1:%d", ports(ranks))
		start(name, binary, "engine-sim", "--model", "demo", "--ranks", strconv.Itoa(ranks), "--role", role, "--listen", api, "--events", events,
			"--step-base", "4ms", "--step-prefill", "60us", "--step-decode", "100us")
		workers += fmt.Sprintf("  - {name: %s, role: %s, address: %q, ranks: %d, events: {endpoint: %q}}\n", name, role, api, ranks, events)
	}
	listen, fleet := [2]string{address(), address()}, [2]string{address(), address()}
	for i := range 2 {
		admin[i] = address()
		text := fmt.Sprintf(`listen: {address: %q}
admin: {address: %q}
envoy: {ingress: %q, admin: %q, first_token: true, response_body: STREAMED, replicas: [%q, %q]}
models: [{name: demo, tokenizer: "builtin:qwen3"}]
workers:
  static:
%sdisagg: {connector: nixl}
routing: {disagg: {mode: threshold, threshold: 64, decode: {limits: {max_active: %d}}}}
flow: {max_requests: %d}
index: {key: demo}
limits: {decision_timeout: 10s}
fleet: {mode: embedded, name: demo, replica: kvlane-%d, embedded: {listen: %q, routes: [%q, %q]}}
`, listen[i], admin[i], ingress, address(), listen[0], listen[1], workers, perRank, queueSize, i+1, fleet[i], fleet[0], fleet[1])
		file := filepath.Join(dir, fmt.Sprintf("kvlane-%d.yaml", i+1))
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		kill = start(fmt.Sprintf("kvlane-%d", i+1), binary, "serve", "--config", file)
	}
	bootstrap, err := exec.Command(binary, "envoy-config", "--config", filepath.Join(dir, "kvlane-1.yaml")).Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "envoy.yaml"), bootstrap, 0o600); err != nil {
		t.Fatal(err)
	}
	start("envoy", proxy, "-c", filepath.Join(dir, "envoy.yaml"), "--concurrency", "1", "--use-dynamic-base-id")
	for _, a := range admin {
		if out, err := exec.Command(binary, "healthcheck", "--url", "http://"+a+"/readyz", "--wait", "2m").CombinedOutput(); err != nil {
			t.Fatalf("the installation does not become ready: %s", out)
		}
	}
	return ingress, admin, kill
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

// status is what an admin port says of the requests; the page must show the same.
type status struct {
	Requests int `json:"requests_total"`
	Waiting  int
	Queue    []struct{ Tokens int }
	Replicas struct {
		Replica  string
		Bookings int                   // its own
		Peers    []struct{ ID string } `json:"replicas"`
	}
}

func statusOf(t *testing.T, admin string) (s status) {
	t.Helper()
	resp, err := http.Get("http://" + admin + "/debug/status")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		t.Fatal(err)
	}
	return s
}

// table is a script that returns the texts of a table's cells, lines separated by ; and cells by |.
func table(section string) string {
	return fmt.Sprintf(`[...document.querySelectorAll('#%s tbody tr')].map((tr) => [...tr.cells].map((td) => td.textContent).join('|')).join(';')`, section)
}

func TestThePageShowsAnInstallation(t *testing.T) {
	ctx := browse(t)
	ingress, admin, kill := install(t)
	run(t, ctx, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "light"}}), chromedp.Navigate("http://"+admin[0]+"/"))
	until(t, ctx, "ranks", fmt.Sprintf(`document.querySelectorAll('#grid .cell').length === %d`, engines*ranks))
	for user := range 4 {
		chat(t, ingress, user, "Hello")
		chat(t, ingress, user, "Hello", "Good day.", "Which books are about cats?")
		chat(t, ingress, user, "Hello", "Good day.", "Which books are about cats?", "These.", "And about dogs?")
	}
	until(t, ctx, "decisions without a reload of the page", fmt.Sprintf(`document.querySelectorAll('#rows tr').length === %d`, statusOf(t, admin[0]).Requests))
	until(t, ctx, "reported cached tokens", `[...document.querySelectorAll('#rows tr')].every((tr) => tr.cells[5].textContent !== '')`)
	if !eval[bool](t, ctx, `[...document.querySelectorAll('#rows tr')].some((tr) => tr.cells[4].textContent !== '0')`) {
		t.Error("got 0 predicted tokens for all turns, want the first turn's for the later ones")
	}
	until(t, ctx, "a live rank", `document.querySelectorAll('#grid .cell.ok').length > 0`)
	until(t, ctx, "rate", `document.querySelector('#totals').innerText.includes('prefill legs')`)
	// On a busy machine one of them may have waited for another, after which the time to drain is known.
	until(t, ctx, "an empty queue", table("queue")+`.startsWith('demo|0|0|0|0 %|')`)
	full(t, ctx, ingress, admin)
	until(t, ctx, "no waiting request", table("queue")+`.startsWith('demo|0|0|0|')`)
	until(t, ctx, "no running request", `[...document.querySelectorAll('#rows tr')].every((tr) => tr.lastChild.textContent !== 'running')`)
	before, count := statusOf(t, admin[0]).Requests, eval[int](t, ctx, `document.querySelectorAll('#rows tr').length`)

	run(t, ctx, chromedp.Focus("#rows tr:last-child button"), chromedp.KeyEvent("\r"))
	until(t, ctx, "a cost table", `document.querySelector('#detail').open && document.querySelectorAll('#detail tr.chosen').length > 0`)
	if text := eval[string](t, ctx, `document.querySelector('#detail').innerText`); !strings.Contains(text, "Prefill target") || !strings.Contains(text, "cached, reported") {
		t.Errorf("got the details %q, want both cost tables and the reported tokens", text)
	}
	run(t, ctx, chromedp.Click("#detail form button"))
	until(t, ctx, "closed details", `!document.querySelector('#detail').open`)
	run(t, ctx, chromedp.KeyEvent("p"))
	want(t, "paused by a key", eval[string](t, ctx, `document.querySelector('#pause').textContent`), "Resume")
	kill() // all that follows is decided by the other one
	for range 3 {
		chat(t, ingress, 9, "Hello")
	}
	until(t, ctx, "one replica of two", table("replicas")+`.split(';').length === 1`)
	want(t, "rows while paused", eval[int](t, ctx, `document.querySelectorAll('#rows tr').length`), count)
	run(t, ctx, chromedp.KeyEvent("p"))
	until(t, ctx, "rows after the pause", fmt.Sprintf(`document.querySelectorAll('#rows tr').length === %d`, count+statusOf(t, admin[0]).Requests-before))
}

// full sends requests until two wait at the replica whose page is open, compares queue and replicas of the page with
// what both replicas say, and takes the picture of the README. The requests have ended when it returns.
func full(t *testing.T, ctx context.Context, ingress string, admin [2]string) {
	t.Helper()
	load, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	sent, room := 0, engines/2*ranks*perRank
	for ; statusOf(t, admin[0]).Waiting < 2; sent++ {
		if sent == room+20 {
			t.Fatalf("%d requests were sent to ranks that take %d, and fewer than two wait here", sent, room)
		}
		running.Go(func() { _ = ask(load, ingress, sent/2, 20_000, "Hello", "Good day.", "Write a novel.") })
		for {
			if a, b := statusOf(t, admin[0]), statusOf(t, admin[1]); a.Waiting+a.Replicas.Bookings+b.Waiting+b.Replicas.Bookings > sent {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	until(t, ctx, "all ranks of decode workers busy", fmt.Sprintf(`[...document.querySelectorAll('#grid .cell')].filter((c) => c.textContent === '%d').length === %d`, perRank, room/perRank))
	here, other := statusOf(t, admin[0]), statusOf(t, admin[1])
	want(t, "requests that run", here.Replicas.Bookings+other.Replicas.Bookings, room)
	want(t, "requests that wait", here.Waiting+other.Waiting, sent-room)
	tokens := here.Queue[0].Tokens
	if tokens < 2 {
		t.Errorf("got %d tokens of two waiting requests, want their uncached ones", tokens)
	}
	until(t, ctx, "two waiting requests in the queue", fmt.Sprintf(`%s.startsWith('demo|0|2|' + number(%d) + '|')`, table("queue"), tokens))
	if peers := here.Replicas.Peers; len(peers) != 1 || !strings.HasPrefix(peers[0].ID, "kvlane-2") || !strings.HasPrefix(here.Replicas.Replica, "kvlane-1") {
		t.Fatalf("got the replicas %+v, want kvlane-1 with kvlane-2", here.Replicas)
	}
	want(t, "the replicas' ids, states and bookings", eval[string](t, ctx, strings.Replace(table("replicas"), "[...tr.cells]", "[...tr.cells].slice(0, 3)", 1)),
		fmt.Sprintf("%s (this one)|shares|%d;%s|shares|%d", here.Replicas.Replica, here.Replicas.Bookings, here.Replicas.Peers[0].ID, other.Replicas.Bookings))
	if tile := eval[string](t, ctx, `document.querySelector('#totals').innerText`); !strings.Contains(tile, fmt.Sprintf("2 of %d", queueSize)) {
		t.Errorf("got the totals %q, want 2 of %d in the queue", tile, queueSize)
	}
	var png []byte
	run(t, ctx, chromedp.EmulateViewport(1280, 1000), chromedp.CaptureScreenshot(&png))
	if len(png) < 10_000 || len(png) > 200<<10 {
		t.Errorf("got a screenshot of %d bytes, want 10 to 200 KB", len(png))
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

// A rank shows its state, the worst of several, with the share of its KV cache and its hit rate; totals and decisions show what
// was predicted and what engines report.
func TestTheStatesOfRanksAreShown(t *testing.T) {
	ctx := browse(t)
	s := &stub{status: fleet(7, 1)}
	of := func(i int) (worker, rank map[string]any) {
		worker = s.status["workers"].([]any)[i].(map[string]any)
		return worker, worker["ranks"].([]any)[0].(map[string]any)
	}
	states := []string{"ok", "feed", "differs", "suspect", "down", "down", "ok"}
	_, gap := of(1)
	gap["feed"] = "gap"
	differs, silent := of(2)
	differs["tokenizer"], silent["feed"] = "differs", "stale"
	suspect, failing := of(3)
	suspect["tokenizer"], failing["suspect"] = "differs", true
	down, gone := of(4)
	down["ready"], gone["suspect"] = false, true
	leaving, _ := of(5)
	leaving["draining"] = true
	_, unknown := of(6)
	delete(unknown, "kv_usage")
	unknown["prompt_tokens_total"], unknown["matched_tokens_total"] = 0, 0
	s.status["predicted_cached_tokens_total"], s.status["observed_cached_tokens_total"] = 1000, 930
	s.decisions = []map[string]any{
		{"id": "known", "at": "2026-01-02T03:04:05Z", "prompt_tokens": 2000, "matched_tokens": 1536, "cached_tokens": 1520, "status": 200, "ended": true},
		{"id": "unknown", "at": "2026-01-02T03:04:06Z", "prompt_tokens": 2000, "matched_tokens": 0, "status": 200, "ended": true},
	}
	srv := httptest.NewServer(s)
	defer srv.Close()
	run(t, ctx, chromedp.Navigate(srv.URL))
	until(t, ctx, "ranks and decisions", `document.querySelectorAll('#grid .cell').length === 7 && document.querySelectorAll('#rows tr').length === 2`)
	for i, state := range states {
		kv := fmt.Sprintf("%.0f", 100*float64(i)/7)
		label, fill := fmt.Sprintf("w%03d/0: %s, KV cache %s %%, 0 running, 60 %% cached", i, state, kv), kv+"%"
		if i == 6 {
			label, fill = "w006/0: ok, KV cache unknown, 0 running, – cached", "0%"
		}
		cell := fmt.Sprintf("document.querySelectorAll('#grid .cell')[%d]", i)
		want(t, "label", eval[string](t, ctx, cell+".getAttribute('aria-label')"), label)
		want(t, label+": class", eval[bool](t, ctx, fmt.Sprintf("%s.classList.contains('%s')", cell, state)), true)
		want(t, label+": fill", eval[string](t, ctx, cell+".style.getPropertyValue('--kv')"), fill)
	}
	want(t, "borders that differ", eval[int](t, ctx, `new Set([...document.querySelectorAll('#grid .cell')].map((c) => getComputedStyle(c).borderTopStyle + getComputedStyle(c).borderTopColor)).size`), 5)
	totals := eval[string](t, ctx, `[...document.querySelectorAll('#totals div')].map((d) => d.innerText.replace(/\s*\n\s*/, ': ')).join('; ')`)
	for _, tile := range []string{"workers ready: 5 of 7", "prompt tokens cached, predicted: 60 %", "reported of predicted: 93 %", "feeds not live: 2"} {
		if !strings.Contains(totals, tile) {
			t.Errorf("got the totals %q, want %q", totals, tile)
		}
	}
	want(t, "prompt, predicted and reported tokens", eval[string](t, ctx, `[...document.querySelectorAll('#rows tr')].map((tr) => [...tr.cells].slice(3, 6).map((td) => td.textContent).join('|')).join(';')`),
		"2,000|0|;2,000|1,536|1,520")
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

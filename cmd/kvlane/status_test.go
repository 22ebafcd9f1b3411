package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// watched is the admin port of an invented fleet, whose token is "secret".
func watched(t *testing.T, s observe.Status) (args []string, log *observe.Decisions) {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	log = observe.NewDecisions(10)
	srv := httptest.NewServer(readable(token, (&observe.Pages{
		Decisions: log, Status: func() observe.Status { return s }, Warnings: func() []observe.Warning { return []observe.Warning{{Worker: "a", Text: "gone"}} },
	}).Handler()))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		srv.CloseClientConnections()
		srv.Close()
	})
	return []string{"--admin", srv.URL, "--token-file", token}, log
}

func decided(log *observe.Decisions, id string, cached int64) {
	began := time.Now()
	e := observe.NewEntry(&extproc.Request{ID: id}, began)
	e.Target, e.PromptTokens, e.Matched = "a/0", 200, 192
	e.Stages = append(e.Stages, observe.StageTime{Stage: "plan", Took: 1234 * time.Microsecond})
	log.Add(e)
	e.SetStatus(200)
	e.SetCached(cached)
	a := observe.New("v").Answer(e, "")
	a.End(began.Add(2 * time.Second))
}

func fleetOf(name string, ranks int) observe.Status {
	half := 0.5
	w := observe.WorkerStatus{WorkerRow: observe.WorkerRow{Name: name, Address: "10.0.0.1:1", Role: "both", Ready: true, Warnings: []string{"no events"}}, Tokenizer: "agrees"}
	for r := range ranks {
		w.Ranks = append(w.Ranks, observe.RankStatus{Rank: fmt.Sprint(r), Active: int64(r), Usage: &half, Feed: "live", PromptTokens: 100, MatchedTokens: 60})
	}
	return observe.Status{Version: "v1", Requests: 5, Reservations: 3, PromptTokens: 200, MatchedTokens: 120, PredictedTokens: 100, ObservedTokens: 99, Workers: []observe.WorkerStatus{w}}
}

func TestStatusInATerminal(t *testing.T) {
	s := fleetOf("a\x1b[2J\nb\t", 2)
	s.Workers[0].Ranks[1].Feed = "gap"
	s.Tenants = []routing.TenantState{{Tenant: "8b1d97bbe7da1b3e", Priority: 2, Weight: 4, Requests: 3, Served: 1000}, {Weight: 1, Requests: 1}}
	args, _ := watched(t, s)
	code, out, errs := kvlane("", append([]string{"status"}, args...)...)
	if code != 0 || errs != "" || !strings.Contains(out, "1 of 1 ready; ranks: 2; requests: 5, 3 running") || !strings.Contains(out, "60% predicted; engines report 99%") {
		t.Errorf("got code %d, %q, %q, want the totals", code, out, errs)
	}
	if !strings.Contains(out, `a\x1b[2J\nb\t`) || !strings.Contains(out, "50%") || !strings.Contains(out, "1 gap, 1 live") || !strings.Contains(out, "warning: worker") {
		t.Errorf("got %q, want the worker's name escaped, its cache, feeds and warning", out)
	}
	if !strings.Contains(out, "tenant: 8b1d97bbe7da1b3e, priority 2, requests: 3, tokens served / weight: 1000, weight: 4\ntenant: -, priority 0, requests: 1,") {
		t.Errorf("got %q, want the tenants that wait", out)
	}
	if code, _, errs := kvlane("", "status", args[0], args[1]); code != 1 || !strings.Contains(errs, "--token-file") {
		t.Errorf("without the token: got code %d, %q, want 1 and the flag's name", code, errs)
	}
	s.NotReady = "workers are being checked"
	args, _ = watched(t, s)
	if code, out, errs := kvlane("", append([]string{"status", "--json"}, args...)...); code != 1 || !strings.Contains(out, `"kv_usage": 0.5`) || !strings.Contains(errs, "not ready: workers") {
		t.Errorf("not ready: got code %d, %q, %q, want 1, JSON and the reason", code, out, errs)
	}
}

func TestTopShowsTheBusiestRanksFirst(t *testing.T) {
	args, _ := watched(t, fleetOf("a", 40))
	code, out, errs := kvlane("", append([]string{"top", "--times", "2", "--every", "100ms", "--n", "2"}, args...)...)
	if code != 0 || errs != "" || strings.Count(out, "a/39") != 2 || strings.Index(out, "a/39") > strings.Index(out, "a/38") || strings.Contains(out, "a/37") || !strings.Contains(out, "38 more") {
		t.Errorf("got code %d, %q, %q, want the two busiest of 40 ranks, twice", code, out, errs)
	}
	if !strings.Contains(out, "requests per second: 0.0") || strings.Contains(out, "\x1b") {
		t.Errorf("got %q, want the rate, and no control characters where the output is no terminal", out)
	}
	if code, _, _ := kvlane("", "top", "--every", "1ms"); code != 2 {
		t.Errorf("a short interval: got code %d, want 2", code)
	}
}

func TestDecisionsInATerminal(t *testing.T) {
	args, log := watched(t, observe.Status{})
	decided(log, "first\x1b", 192)
	decided(log, "second", 7)
	code, out, errs := kvlane("", append([]string{"decisions", "--n", "1"}, args...)...)
	if code != 0 || errs != "" || strings.Contains(out, "first") || !strings.Contains(out, "second") || !strings.Contains(out, "1.2ms         2s  a/0, 200") {
		t.Errorf("got code %d, %q, %q, want the newest decision", code, out, errs)
	}
	if code, out, _ := kvlane("", append([]string{"decisions", "--json"}, args...)...); code != 0 || !strings.Contains(out, `"cached_tokens":192`) {
		t.Errorf("got code %d, %q, want JSON", code, out)
	}
	if code, out, _ := kvlane("", append([]string{"explain", "--last"}, args...)...); code != 0 || !strings.HasPrefix(out, "second") || !strings.HasSuffix(out, "\nwarning: worker a: gone\n") {
		t.Errorf("explain --last: got code %d, %q, want the newest decision and the warnings", code, out)
	}
	for _, which := range []string{"second", "--last"} { // one object, whichever way it was asked for
		var one struct{ ID, Target string }
		code, out, errs := kvlane("", append([]string{"explain", "--json", which}, args...)...)
		if err := json.Unmarshal([]byte(out), &one); code != 0 || err != nil || one.ID != "second" || one.Target != "a/0" || !strings.HasSuffix(out, "\n") {
			t.Errorf("explain --json %s: got code %d, %q, %s, %v, want the decision as one object", which, code, out, errs, err)
		}
	}
	for _, more := range [][]string{{}, {"x", "--last"}, {"--last", "--export"}} {
		if code, _, _ := kvlane("", append(append([]string{"explain"}, more...), args...)...); code != 2 {
			t.Errorf("explain %v: got code %d, want 2", more, code)
		}
	}
	empty, _ := watched(t, observe.Status{})
	for _, flags := range [][]string{{"explain", "--last"}, {"explain", "--last", "--json"}} {
		if code, _, errs := kvlane("", append(flags, empty...)...); code != 1 || !strings.Contains(errs, "explain.keep") {
			t.Errorf("%v: no decision: got code %d, %q, want 1", flags, code, errs)
		}
	}
}

// lines is an output that hands over what is written to it.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

func TestDecisionsAreFollowed(t *testing.T) {
	args, log := watched(t, observe.Status{})
	decided(log, "past", 0)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	out, done := make(lines, 100), make(chan int, 1)
	go func() {
		done <- run(ctx, streams{in: strings.NewReader(""), out: out, err: os.Stderr}, append([]string{"decisions", "--follow"}, args...))
	}()
	for _, want := range []string{"TIME", "past", "later"} {
		if got := <-out; !strings.Contains(got, want) {
			t.Fatalf("got %q, want %q", got, want)
		}
		if want == "past" {
			decided(log, "later", 0)
		}
	}
	stop()
	if code := <-done; code != 0 {
		t.Errorf("after Ctrl-C: got code %d, want 0", code)
	}
}

// A Kvlane that does not answer is waited for, with progress and without the head of a table.
func TestWaitingForAnAnswer(t *testing.T) {
	hung, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	var all sync.WaitGroup // each speaks after two seconds
	for _, command := range []string{"status", "decisions --follow", "explain --last"} {
		all.Go(func() {
			ctx, stop := context.WithCancel(t.Context())
			var out bytes.Buffer
			said, done := make(lines, 10), make(chan int, 1)
			go func() {
				done <- run(ctx, streams{in: strings.NewReader(""), out: &out, err: said}, append(strings.Fields(command), "--admin", hung.Addr().String()))
			}()
			if got := <-said; !strings.HasPrefix(got, "waiting for an answer of "+hung.Addr().String()+" (") {
				t.Errorf("%s: got %q, want progress", command, got)
			}
			stop()
			if <-done; out.Len() > 0 {
				t.Errorf("%s: got %q, want no output before an answer", command, &out)
			}
		})
	}
	all.Wait()
	for address, want := range map[string]string{
		"localhost": "http://localhost:9090", "::1": "http://[::1]:9090", "[::1]": "http://[::1]:9090", "10.0.0.1:80": "http://10.0.0.1:80", "https://kvlane/": "https://kvlane",
	} {
		if got := adminURL(address); got != want {
			t.Errorf("%s: got %s, want %s", address, got, want)
		}
	}
}

// The token goes to the address that was named, and an answer has a bound.
func TestAnswersOfAHostileServer(t *testing.T) {
	var elsewhere atomic.Bool
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Store(true) }))
	defer other.Close()
	s := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer s.Close()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"status", "decisions", "explain --last", "record", "top"} {
		var out, said bytes.Buffer
		if code := run(t.Context(), streams{in: strings.NewReader(""), out: &out, err: &said}, append(strings.Fields(command), "--token-file", token, "--admin", s.URL)); code == 0 {
			t.Errorf("%s: got success of a redirect: %s", command, &out)
		}
	}
	if elsewhere.Load() {
		t.Error("got a question with the token at another address")
	}
}

// What a server or a file says reaches the terminal without control characters: names and ids are those of clients.
func TestExplanationsAreSafeForTerminals(t *testing.T) {
	const evil = "a\x1b[2J\x9b\u009b\u202eb"
	status := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(evil + "\nsecond line"))
	}))
	defer s.Close()
	r, err := routing.New(routing.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	r.SetTarget(0, routing.TargetInfo{Target: kvindex.Target{Worker: evil, Rank: kvindex.NoRank}, Ready: true})
	d, err := r.PickRecorded(0, &routing.Query{ID: evil, PromptTokens: 300}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	export := func(name string) string {
		file := filepath.Join(t.TempDir(), name)
		text, err := json.Marshal(d)
		if err == nil {
			err = os.WriteFile(file, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	same := export("same.json")
	d.Error = evil
	for _, c := range []struct {
		status, code int
		args         []string
	}{
		{200, 0, []string{"explain", "--last", "--admin", s.URL}},
		{200, 0, []string{"explain", "id", "--admin", s.URL}},
		{404, 1, []string{"explain", "id", "--admin", s.URL}},
		{0, 0, []string{"explain", "--rerun", same}},
		{0, 1, []string{"explain", "--rerun", export("other.json")}},
	} {
		status = c.status
		code, out, errs := kvlane("", c.args...)
		if said := out + errs; code != c.code || strings.ContainsAny(said, "\x1b\u009b\u202e") || strings.Contains(said, "\x9b") || !strings.Contains(said, `a\x1b[2J`) {
			t.Errorf("%v, status %d: got code %d, %q, want code %d and %q escaped", c.args, c.status, code, said, c.code, evil)
		}
	}
}

// An exported decision is made again as recorded, and another one is told.
func TestAnExportIsMadeAgain(t *testing.T) {
	r, err := routing.New(routing.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	for slot, name := range []string{"a", "b"} {
		r.SetTarget(kvindex.Slot(slot), routing.TargetInfo{Target: kvindex.Target{Worker: name, Rank: kvindex.NoRank}, Ready: true})
	}
	d, err := r.PickRecorded(0, &routing.Query{ID: "r", Conversation: "c", PromptTokens: 300}, nil, nil)
	if err != nil || d.Plan.Via != routing.ViaFirstTurn {
		t.Fatalf("got %+v, %v, want a first turn", d, err)
	}
	for via, want := range map[routing.Via]int{routing.ViaFirstTurn: 0, routing.ViaSticky: 1} {
		d.Plan.Via = via
		file := filepath.Join(t.TempDir(), "decision.json")
		text, err := json.Marshal(d)
		if err != nil || strings.Contains(string(text), "4294967295") {
			t.Fatalf("got %s, %v, want no number where there is no target", text, err)
		}
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if code, out, errs := kvlane("", "explain", "--rerun", file); code != want {
			t.Errorf("via %q: got code %d, %s%s, want %d for\n%s", via, code, out, errs, want, text)
		}
	}
}

// An exported refusal is made again, with its reasons.
func TestAnExportedRefusal(t *testing.T) {
	cfg := routing.DefaultConfig()
	cfg.Policy.Limits.MaxActive = 1
	r, err := routing.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for slot, name := range []string{"a", "b"} {
		r.SetTarget(kvindex.Slot(slot), routing.TargetInfo{Target: kvindex.Target{Worker: name, Rank: kvindex.NoRank}, Ready: name == "a"})
	}
	if _, err := r.Pick(0, &routing.Query{ID: "first", PromptTokens: 300}, nil, nil); err != nil {
		t.Fatal(err)
	}
	d, err := r.PickRecorded(0, &routing.Query{ID: "refused", PromptTokens: 300}, nil, nil)
	if err == nil || !strings.Contains(d.Error, "1 not_ready, 1 busy_requests;") {
		t.Fatalf("got %+v, %v, want a refusal", d, err)
	}
	text, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "decision.json")
	for reasons, want := range map[string]int{"1 not_ready, 1 busy_requests;": 0, "1 not_ready, 1 busy_queue;": 1} {
		if err := os.WriteFile(file, []byte(strings.Replace(string(text), "1 not_ready, 1 busy_requests;", reasons, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		if code, out, errs := kvlane("", "explain", "--rerun", file); code != want {
			t.Errorf("%s: got code %d, %s%s, want %d", reasons, code, out, errs, want)
		}
	}
}

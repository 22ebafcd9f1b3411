package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/fleet"
)

// serve takes its file over when it changes, whole or not at all.
func TestServeReloads(t *testing.T) {
	defer zerolog.SetGlobalLevel(zerolog.GlobalLevel())
	text := func(level string, miss int, more string) string {
		return fmt.Sprintf("log: {level: %s}\nrouting: {policy: {cost: {miss: %d}}}\n%s", level, miss, more)
	}
	s := served(t, text("info", 5, ""))
	file, admin, log := s.file, s.admin, s.log
	write := func(level string, miss int, more string) { s.write(text(level, miss, more)) }
	until(t, "http://"+admin+"/readyz", func(status int, _ string) bool { return status == http.StatusOK })
	metric := func(line string) func(int, string) bool {
		return func(_ int, body string) bool { return strings.Contains(body, "\n"+line+"\n") }
	}
	shown := func() string {
		_, body := page(t, "http://"+admin+"/debug/config")
		return body
	}
	if body := shown(); !strings.Contains(body, "miss: 5.0\n") {
		t.Fatalf("got %s, want the configuration", body)
	}

	if code, out, errs := kvlane("", "check", "--live", file); code != 0 || strings.Count(errs, "is in use by a running Kvlane with this configuration") != 2 {
		t.Errorf("check --live beside it: got code %d, %s%s, want two warnings of its addresses", code, out, errs)
	}
	now, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	code, _, errs := kvlane(string(now)+"models: [{name: m, tokenizer: /no/such/folder}]\n", "check", "--live", "-")
	if code != 1 || strings.Count(errs, "is in use by a running Kvlane with another configuration") != 2 || !strings.Contains(errs, "models[0].tokenizer: ") {
		t.Errorf("check --live beside it: got code %d, %s, want two warnings and the model's error", code, errs)
	}

	write("debug", 7, "")
	until(t, "http://"+admin+"/metrics", metric("kvlane_config_generation 2"))
	until(t, "http://"+admin+"/metrics", func(int, string) bool { // logged right after it is counted
		return strings.Contains(log.String(), `"keys":["routing.policy.cost.miss","log.level"]`)
	})
	if body := shown(); !strings.Contains(body, "miss: 7.0\n") || zerolog.GlobalLevel() != zerolog.DebugLevel {
		t.Errorf("got %s, want the new weight and level; log:\n%s", body, log)
	}

	write("info", 9, "drain: 1s\n")
	until(t, "http://"+admin+"/metrics", metric(`kvlane_config_reloads_total{result="rejected"} 1`))
	write("info", 9, "drain: soon\n")
	until(t, "http://"+admin+"/metrics", metric(`kvlane_config_reloads_total{result="rejected"} 2`))
	if body := shown(); !strings.Contains(body, "miss: 7.0\n") || zerolog.GlobalLevel() != zerolog.DebugLevel {
		t.Errorf("got %s, want what was taken before", body)
	}
	for _, want := range []string{file + ":5:8: drain: cannot change while Kvlane runs: restart it", file + `:5:8: drain: \"soon\" is not a duration`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("got no %q in the log:\n%s", want, log)
		}
	}

	until(t, "http://"+admin+"/metrics", metric("kvlane_config_rejected 1"))
	const rejected = "warning: the configuration on disk is rejected, the running one stays: "
	if _, body := page(t, "http://"+admin+"/readyz"); !strings.HasPrefix(body, "ok\n"+rejected+file+":5:8: drain: ") {
		t.Errorf("/readyz: got %q, want the reason why the file is rejected", body)
	}
	if code, out, _ := kvlane("", "status", "--admin", admin); code != 0 || !strings.Contains(out, "\n"+rejected+file+":5:8: drain: ") {
		t.Errorf("status: got code %d, %q, want the reason why the file is rejected", code, out)
	}

	for unchanged := 1; unchanged <= 2; unchanged++ {
		write("debug", 7, "# as it runs\n")
		until(t, "http://"+admin+"/metrics", metric(fmt.Sprintf(`kvlane_config_reloads_total{result="unchanged"} %d`, unchanged)))
		until(t, "http://"+admin+"/metrics", metric("kvlane_config_rejected 0"))
		if _, body := page(t, "http://"+admin+"/readyz"); body != "ok\n"+noWorkers {
			t.Errorf("/readyz: got %q, want no warning of what was rejected before", body)
		}
		if unchanged == 1 { // a file that grows too long is not read; later it is as it was
			write("debug", 7, "# as it runs\n#"+strings.Repeat("-", 4<<20))
			until(t, "http://"+admin+"/metrics", metric("kvlane_config_rejected 1"))
			if _, body := page(t, "http://"+admin+"/readyz"); !strings.HasPrefix(body, "ok\n"+rejected+"read configuration: "+file+" has more than 4194304 bytes\n") {
				t.Errorf("/readyz: got %q, want the file that cannot be read", body)
			}
		}
	}
}

// Whatever listens at the admin port gets no token from check --live. One that asks for it as Kvlane does, or loads tokenizers, is taken for Kvlane.
func TestCheckSendsNoToken(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		asks http.Handler
		want string
		code int
	}{
		{http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "who are you?", http.StatusUnauthorized) }), "cannot listen there", 1},
		{guarded(token, http.NotFoundHandler()), "is in use: Kvlane seems to run already", 0},
		{http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "overloaded", http.StatusServiceUnavailable)
		}), "cannot listen there", 1},
		{http.HandlerFunc((&service{}).pages), "is in use: Kvlane seems to run already", 0}, // loads tokenizers
	} {
		asked, sent := 0, ""
		other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked++
			sent += r.Header.Get("Authorization")
			c.asks.ServeHTTP(w, r)
		}))
		defer other.Close()
		text := fmt.Sprintf("listen: {address: \"unix:%s/s\"}\nadmin: {address: %q, token_file: %q}\nworkers: {static: [{address: \"10.0.0.1:8000\"}]}\n", filepath.Dir(token), other.Listener.Addr(), token)
		code, _, errs := kvlane(text, "check", "--live", "-")
		if code != c.code || strings.Count(errs, "admin.address: ") != 1 || !strings.Contains(errs, c.want) || asked != 1 || sent != "" {
			t.Errorf("got code %d, %s, %d requests with the token %q, want %q and one request without", code, errs, asked, sent, c.want)
		}
	}
}

// A FIFO in the place of the configuration stops nothing: it is refused, and the file that comes after it is taken.
func TestServeDoesNotWaitForAFIFO(t *testing.T) {
	s := served(t, "")
	if err := errors.Join(os.Remove(s.file), syscall.Mkfifo(s.file, 0o600)); err != nil {
		t.Fatal(err)
	}
	for !strings.Contains(s.log.String(), s.file+" is not a regular file") {
		time.Sleep(time.Millisecond)
	}
	if err := os.Remove(s.file); err != nil {
		t.Fatal(err)
	}
	s.write("log: {level: warn}\n")
	until(t, "http://"+s.admin+"/metrics", func(_ int, body string) bool {
		return strings.Contains(body, "\nkvlane_config_reloads_total{result=\"taken\"} 1\n")
	})
}

// A changed tokenizer is loaded when the configuration is read again, from a folder or a hub; one that cannot be loaded changes
// nothing, nor does one that is being fetched when Kvlane is told to end.
func TestReloadTakesATokenizer(t *testing.T) {
	status, requests := hubOf(t, qwen3(t))
	status.Store(404)
	dir := t.TempDir()
	file := filepath.Join(dir, "k.yaml")
	parse := func(model string) *config.Config {
		text := []byte("listen: {address: \"unix:" + dir + "/s\"}\nadmin: {address: \"127.0.0.1:0\"}\nmodels: [{name: m, " + model + "}]\n")
		c, err := config.Parse(file, text)
		if err == nil {
			err = os.WriteFile(file, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	var log logged
	s, err := startService(t.Context(), parse(`tokenizer: "hf:Org/Model"`), zerolog.New(&log), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	model := func() *fleet.Model { return s.decider.Fleet().Model("m") }
	if model().Tokens != nil || model().Refused == "" {
		t.Fatal("got a tokenizer that the hub refuses")
	}
	reload := func(ctx context.Context, model string) {
		c := parse(model)
		s.reload(ctx, file, func() (*config.Config, []config.Problem, error) { return c, nil, nil })
	}
	for i, step := range []struct {
		model  string
		status int32
		taken  bool
	}{
		{`tokenizer: "builtin:qwen3"`, 404, true},
		{`tokenizer: "hf:Org/Model"`, 404, false},
		{`tokenizer: "/no/such/folder"`, 0, false},
		{`tokenizer: "hf:Org/Model"`, 0, true},
		{`tokenizer: "hf:Org/Model", tokenizer_lock: "sha256:` + strings.Repeat("0", 64) + `"`, 0, false},
		{`tokenizer: "hf:Org/Model", disagg: {threshold: 9}`, 0, true},
	} {
		before, generation := model(), s.generation.Load()
		status.Store(step.status)
		reload(t.Context(), step.model)
		if taken := s.generation.Load() > generation; taken != step.taken {
			t.Fatalf("step %d: got configuration taken: %v, want %v; log:\n%s", i, taken, step.taken, &log)
		}
		if anew := model() != before; anew != (step.taken && i < 5) || model().Tokens == nil {
			t.Errorf("step %d: got a model loaded anew: %v, with tokenizer %v", i, anew, model().Tokens)
		}
	}
	if want := `"` + file + `:3:`; strings.Count(log.String(), want) != 3 {
		t.Errorf("got log\n%s\nwant three reasons with %q", &log, want)
	}
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	status.Store(503)
	requests.Store(0)
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		for requests.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		stop()
	}()
	before := model()
	reload(ctx, `tokenizer: "hf:Org/Model@`+hubCommit+`"`)
	if ctx.Err() == nil || model() != before {
		t.Error("got another model, want that of before the end")
	}
}

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	stdio "io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/models"
)

const demoModel = "demo"

// demo is a whole installation on this machine.
type demo struct {
	io streams

	tokenizer, ingress, admin, envoyAdmin string
	// pd separates prefill from decode: the first half of the engines are prefill engines.
	pd                      bool
	wanted, ranks, replicas int // engines, ranks of each, replicas of Kvlane

	dir     string
	config  *config.Config
	engines []*enginesim.Engine
	events  []config.Events // of each engine
	// template is the file of the chat template, "" for the tokenizer's own.
	template string
	service  *service
	members  []*member // processes in place of service, if there are several replicas
	envoy    *envoy.Process
}

func runDemo(ctx context.Context, io streams, args []string) error {
	d := &demo{io: io}
	f := flags("demo")
	check := f.Bool("check", false, "play the demonstration once, on free ports, and exit")
	binary := f.String("envoy", os.Getenv("ENVOY"), "envoy `binary`")
	f.StringVar(&d.ingress, "ingress", "127.0.0.1:8080", "`address` of Envoy for clients")
	f.StringVar(&d.admin, "admin", "127.0.0.1:9090", "`address` of Kvlane's metrics and debug pages; with --replicas they get free ones")
	f.StringVar(&d.envoyAdmin, "envoy-admin", "127.0.0.1:9901", "`address` of Envoy's admin listener")
	f.IntVar(&d.wanted, "engines", 0, "number of simulated engines (0: 2, with --pd 4)")
	f.BoolVar(&d.pd, "pd", false, "separate prefill from decode: the first half of the engines computes prompts, the second half answers")
	f.IntVar(&d.ranks, "ranks", 2, "data-parallel ranks of each")
	f.IntVar(&d.replicas, "replicas", 1, "number of replicas of Kvlane that route as one, each a process")
	f.StringVar(&d.tokenizer, "tokenizer", models.Builtin+"qwen3", "`folder` of the tokenizer, or hf:Org/Model@revision; the engines write the chats of Qwen3, DeepSeek-V3, gpt-oss and Mistral, others plainly")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if d.wanted == 0 && d.pd {
		d.wanted = 4
	}
	d.wanted = cmp.Or(d.wanted, 2)
	switch {
	case d.pd && d.wanted < 2:
		return usageError{"--pd needs --engines of at least 2"}
	case d.replicas < 1 || d.replicas > 16 || d.replicas > 1 && d.pd:
		return usageError{"--replicas must be 1 to 16, and 1 with --pd"}
	case d.wanted < 1 || d.wanted > 64 || d.ranks < 1 || d.ranks > 64:
		return usageError{"--engines and --ranks must be 1 to 64"}
	}
	path, err := envoy.Find(*binary)
	if err != nil {
		return err
	}
	defer d.stop()
	if *check {
		if err := freeAddresses(&d.ingress, &d.admin, &d.envoyAdmin); err != nil {
			return err
		}
	}
	if err := errors.Join(envoy.CheckFree(d.ingress, "--ingress"), envoy.CheckFree(d.admin, "--admin"), envoy.CheckFree(d.envoyAdmin, "--envoy-admin")); err != nil {
		return err
	}
	start, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	stop := during(io.err, "starting Envoy, Kvlane and the engines")
	err = d.start(start, path)
	stop()
	if err != nil {
		return err
	}
	if *check {
		return d.check(start)
	}
	d.welcome()
	var broken <-chan error
	if d.service != nil {
		broken = d.service.failed
	}
	select {
	case <-ctx.Done():
		fmt.Fprintln(io.out, "\nstopping")
		return nil
	case err := <-broken:
		return err
	case <-d.envoy.Done():
		return fmt.Errorf("envoy stopped; its log is %s", filepath.Join(d.dir, "envoy.log"))
	}
}

// freeAddresses replaces addresses by currently free ones.
func freeAddresses(addresses ...*string) error {
	port, err := enginesim.FreePorts(len(addresses))
	if err != nil {
		return err
	}
	for i, a := range addresses {
		*a = "127.0.0.1:" + strconv.Itoa(port+i)
	}
	return nil
}

func (d *demo) start(ctx context.Context, binary string) error {
	var err error
	if d.dir, err = os.MkdirTemp("", "kvlane-demo-"); err != nil {
		return err
	}
	files, err := openTokenizer(ctx, d.io, d.tokenizer)
	if err != nil {
		return err
	}
	tok, err := enginesim.LoadTokenizer(files)
	if err != nil {
		return err
	}
	if tok.Plain() {
		d.template = filepath.Join(d.dir, "chat_template.jinja")
		if err := os.WriteFile(d.template, []byte(enginesim.PlainTemplate), 0o600); err != nil {
			return err
		}
	}
	for i := range d.wanted {
		ports, err := enginesim.FreePorts(2 * d.ranks)
		if err != nil {
			return err
		}
		events := config.Events{Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", ports), Replay: fmt.Sprintf("tcp://127.0.0.1:%d", ports+d.ranks)}
		d.events = append(d.events, events)
		e, err := enginesim.Start(context.WithoutCancel(ctx), enginesim.Options{
			Model: demoModel, Ranks: d.ranks, Tokenizer: tok, Role: enginesim.Role(d.role(i)), EventsEndpoint: events.Endpoint, ReplayEndpoint: events.Replay,
			Time: enginesim.TimeModel{A: 4 * time.Millisecond, P: 60 * time.Microsecond, B: 100 * time.Microsecond, Scale: 1},
		})
		if err != nil {
			return err
		}
		d.engines = append(d.engines, e)
	}
	file := filepath.Join(d.dir, "kvlane.yaml")
	if d.replicas > 1 {
		file = filepath.Join(d.dir, "kvlane-1.yaml")
		err = d.startMembers()
	} else {
		err = os.WriteFile(file, []byte(d.yaml("unix:"+d.dir+"/kvlane.sock", d.admin)), 0o600)
	}
	if err != nil {
		return err
	}
	if d.config, _, err = config.Load(file); err != nil {
		return err
	}
	if d.replicas == 1 {
		if err := d.serve(ctx); err != nil {
			return err
		}
	}
	if d.envoy, err = envoy.Start(ctx, binary, d.dir, d.config, 1); err != nil {
		return err
	}
	return d.waitReady(ctx)
}

// serve starts the only Kvlane, in this process.
func (d *demo) serve(ctx context.Context) error {
	logFile, err := os.Create(filepath.Join(d.dir, "kvlane.log"))
	if err != nil {
		return err
	}
	log, err := observe.Logger(logFile, d.config.Log.Level)
	if err != nil {
		return err
	}
	d.service, err = startService(ctx, d.config, log, nil)
	return err
}

// yaml returns the configuration of the demonstration, a small but complete example.
func (d *demo) yaml(listen, admin string) string {
	var b strings.Builder
	prefill := ""
	if d.pd {
		prefill = fmt.Sprintf(`, alternates: true, prefill: "unix:%s/prefill.sock"`, d.dir)
	}
	fmt.Fprintf(&b, `listen: {address: "%s"}
admin: {address: "%s"}
envoy: {ingress: "%s", admin: "%s", first_token: true, response_body: STREAMED, access_log: %t%s}
explain: {header: true}
log: {decisions: true}
models:
- {name: %s, tokenizer: "%s", chat_template: "%s"}
workers:
  static:
`, listen, admin, d.ingress, d.envoyAdmin, strings.HasPrefix(listen, "unix:"), prefill, demoModel, d.tokenizer, d.template)
	for i, e := range d.engines {
		fmt.Fprintf(&b, `  - {name: %s, role: %s, address: "%s", ranks: %d, models: [%s], events: {endpoint: "%s", replay: "%s"}}
`, d.name(i), d.role(i), e.Addr(), d.ranks, demoModel, d.events[i].Endpoint, d.events[i].Replay)
	}
	if d.pd {
		// The prompts of a demonstration are short: split them anyway.
		b.WriteString("disagg: {connector: nixl}\nrouting: {disagg: {mode: threshold, threshold: 64}}\n")
	}
	return b.String()
}

// role returns the role of engine i.
func (d *demo) role(i int) string {
	switch {
	case !d.pd:
		return "both"
	case i < d.wanted/2:
		return "prefill"
	default:
		return "decode"
	}
}

// name returns an engine's name, with its role if engines have different ones.
func (d *demo) name(i int) string {
	role := d.role(i)
	if role == "decode" {
		i -= d.wanted / 2
	}
	return strings.Replace(role, "both", "engine", 1) + "-" + string(rune('a'+i))
}

func (d *demo) waitReady(ctx context.Context) error {
	for {
		why := ""
		if d.service != nil {
			why = d.service.notReady()
		}
		for i, m := range d.members {
			if text := m.notReady(); text != "" {
				why = fmt.Sprintf("replica %d: %s", i+1, text)
			}
		}
		if why == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not ready: %s", why)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (d *demo) stop() {
	if d.envoy != nil {
		d.envoy.Stop()
	}
	if d.service != nil {
		d.service.close()
	}
	for _, m := range d.members {
		m.kill()
	}
	for _, e := range d.engines {
		e.Close()
	}
	if d.dir != "" {
		_ = os.RemoveAll(d.dir)
	}
}

func (d *demo) welcome() {
	c := d.config
	w := d.io.out
	fmt.Fprintf(w, `Envoy listens at http://%s, Kvlane's page, metrics and debug pages are at http://%s/, behind them are:
`, c.Envoy.Ingress, c.Admin.Address)
	for i, e := range d.engines {
		fmt.Fprintf(w, "  %-9s  %s  (simulated vLLM, ranks: %d)\n", d.name(i), e.URL(), c.Workers.Static[i].Ranks)
	}
	self, err := os.Executable()
	if err != nil {
		self = "kvlane"
	}
	what := `Try this twice. The first answer comes from any rank; the second from the rank that cached the first, and
"cached_tokens" in its usage says so. Look at the headers x-kvlane-target and x-kvlane-matched-tokens.`
	if d.pd {
		what = `Try this twice. A prompt with 64 uncached tokens and more is computed by a prefill engine, which the header
x-kvlane-prefill names, and handed to the decode engine that answers. The second time the decode engine has it all.`
	}
	fmt.Fprintf(w, `
%s

curl -is http://%s/v1/chat/completions -H 'content-type: application/json' -H 'x-session-id: me' -d '{"model": "%s", "max_tokens": 16,
  "messages": [{"role": "system", "content": "%s"}, {"role": "user", "content": "Hello"}]}'

Ranks and decisions in a browser:  http://%s/
The same in a terminal:            %s top%s
Why the last request went there:   %[6]s explain --last%[7]s
Envoy's own pages:                 http://%[8]s
Configuration and logs are in %[9]s until Ctrl-C stops everything.
`, what, c.Envoy.Ingress, demoModel, demoSystem, c.Admin.Address, self, adminFlag(c.Admin.Address), c.Envoy.Admin, d.dir)
	if d.members != nil {
		d.welcomeFleet(self)
	}
}

// adminFlag returns the flag that explain needs for an admin port other than the default.
func adminFlag(address string) string {
	if address == config.Default().Admin.Address {
		return ""
	}
	return " --admin " + address
}

const demoSystem = "You are a librarian who answers briefly and names the shelf. You know the catalogue by heart: novels stand on " +
	"the ground floor, maps and atlases on the first, letters and diaries on the second, and what is rarely asked for in the cellar. " +
	"When a reader is in doubt, you ask one question and no more, and you never send anybody away without a book."

// turn is the observed result of a request of the demonstration.
type turn struct {
	Target  string
	Matched int
	Prompt  int
	Cached  int
	Text    string
	// Prefill is the target of the prefill leg, "" if there was none.
	Prefill string
}

// chat sends one turn through Envoy; conversation is its id, or "".
func (d *demo) chat(ctx context.Context, messages []map[string]string, conversation string) (turn, error) {
	body, err := json.Marshal(map[string]any{"model": demoModel, "max_tokens": 16, "messages": messages})
	if err != nil {
		return turn{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+d.config.Envoy.Ingress+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return turn{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	if conversation != "" {
		req.Header.Set("X-Session-Id", conversation)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return turn{}, err
	}
	defer resp.Body.Close()
	text, err := stdio.ReadAll(resp.Body)
	if err != nil {
		return turn{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return turn{}, fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	var answer struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
		Usage struct {
			PromptTokens int `json:"prompt_tokens"`
			Details      struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return turn{}, fmt.Errorf("answer: %w", err)
	}
	if len(answer.Choices) == 0 {
		return turn{}, errors.New("answer without choices")
	}
	matched, err := strconv.Atoi(resp.Header.Get("X-Kvlane-Matched-Tokens"))
	if err != nil {
		return turn{}, fmt.Errorf("header x-kvlane-matched-tokens (was the request routed?): %w", err)
	}
	return turn{resp.Header.Get("X-Kvlane-Target"), matched, answer.Usage.PromptTokens, answer.Usage.Details.Cached,
		answer.Choices[0].Message.Content, resp.Header.Get("X-Kvlane-Prefill")}, nil
}

// play asks the questions in one conversation and returns its turns.
func (d *demo) play(ctx context.Context, name string, questions ...string) ([]turn, error) {
	id := ""
	if d.members != nil { // the id sends all turns to one replica
		id = name
	}
	var messages []map[string]string
	var turns []turn
	for i, question := range questions {
		messages = append(messages, map[string]string{"role": "user", "content": question})
		t, err := d.chat(ctx, messages, id)
		if err != nil {
			return nil, err
		}
		where := t.Target
		if t.Prefill != "" {
			where = "prefilled on " + t.Prefill + ", answered by " + t.Target
		}
		fmt.Fprintf(d.io.out, "%s, turn %d: %s, %d prompt tokens, %d predicted as cached, %d cached by the engine\n", name, i+1, where, t.Prompt, t.Matched, t.Cached)
		turns = append(turns, t)
		messages = append(messages, map[string]string{"role": "assistant", "content": t.Text})
	}
	return turns, nil
}

// checkPD plays three turns: one that is split, one of which the decode engine holds all but a few tokens, and one with
// much new text.
func (d *demo) checkPD(ctx context.Context) error {
	turns, err := d.play(ctx, "conversation 1", strings.Repeat(demoSystem+" ", 3)+"Where are the maps?", "And who drew them?",
		strings.Repeat("Tell me of the oldest one, the largest one and the one that is lost. ", 4))
	if err != nil {
		return err
	}
	switch {
	case turns[0].Prefill == "" || !strings.HasPrefix(turns[0].Target, "decode-"):
		return fmt.Errorf("the first turn was prefilled on %q and answered by %s", turns[0].Prefill, turns[0].Target)
	case turns[1].Prefill != "" || turns[1].Target != turns[0].Target || turns[1].Cached == 0 || turns[1].Cached != turns[1].Matched:
		return fmt.Errorf("the second turn went to %s (prefill %q) and found %d tokens, %d were predicted", turns[1].Target, turns[1].Prefill, turns[1].Cached, turns[1].Matched)
	case turns[2].Prefill != turns[0].Prefill:
		return fmt.Errorf("the third turn was prefilled on %q, the first on %q, which holds its beginning", turns[2].Prefill, turns[0].Prefill)
	}
	fmt.Fprintln(d.io.out, "demo check passed: prompts were computed on the prefill side, and what decode holds was not computed again")
	return nil
}

// check plays two turns of two conversations and compares the usage that the engines report with Kvlane's prediction.
func (d *demo) check(ctx context.Context) error {
	if d.pd {
		return d.checkPD(ctx)
	}
	for n, question := range []string{"Where are the maps?", "Do you have letters of sailors?"} {
		// It is not a system message: some templates put that in front of the last question, so that turns do not share it.
		turns, err := d.play(ctx, fmt.Sprintf("conversation %d", n+1), fmt.Sprintf("Reader %d. %s %s", n, demoSystem, question), "And who wrote them?")
		if err != nil {
			return err
		}
		switch first, second := turns[0], turns[1]; {
		case second.Target != first.Target:
			return fmt.Errorf("the second turn went to %s, the first to %s", second.Target, first.Target)
		case second.Cached == 0:
			return errors.New("the engine had nothing of the second turn in its cache")
		case second.Cached != second.Matched:
			return fmt.Errorf("predicted %d cached tokens, the engine reports %d", second.Matched, second.Cached)
		}
	}
	fmt.Fprintln(d.io.out, "demo check passed: each second turn went to the rank that cached the first")
	return nil
}

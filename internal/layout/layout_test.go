// Package layout holds no code: its tests keep the layout of the repository. They bound the lines of each room, fix which
// package may import which, and count habits of prose.
package layout

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	root   = "../.."
	module = "github.com/kvlane/kvlane/"

	totalLimit = 85080
	totalGoal  = 62000
)

// rooms is every room with the packages at and below its paths. Lines are those of Go files, comments and blank lines included,
// without tests and generated files. A room over its limit fails the test: raise the limit only on purpose, in a commit that says
// why. The goal is where the limit is meant to go; a room over it is only logged.
var rooms = []struct {
	name        string
	limit, goal int
	paths       []string
}{
	// 120 for unfinished bodies, which count from their headers and give up their place: a client could take all of them
	// (extproc/bodies.go).
	// 68 for engines that fragment chains at the cost of all (kvindex).
	// 31 for the room of batches that wait for replays, which took 9 MiB for each rank (kvindex/feed/machine.go).
	// 23 for the states of feeds, which do not wait for events that are applied (kvindex/feed/applier.go).
	// 127 for what prefill legs replace, which must be valid as it is: refused requests filled a prefill engine (disagg/valid.go).
	// 119 for the share of places that a tenant may hold: long answers of one kept the others out (routing/tenants.go).
	// 9 for the bytes of bodies that large ones leave to small ones (extproc/bodies.go).
	// 73 for waits by conversation and tenant: slow requests of one client made half of a fleet suspect (routing/suspect.go).
	// 11 for drains, which gave the places of all that they placed to the next ones, so the whole queue at once (extproc/server.go).
	// 18 for the pace at which waiting requests get places: Retry-After was mostly 1 s (routing/queue.go); 3 of decide.
	// 25 for the list of tenants that wait, which nothing showed (routing/queue.go), with 24, 9 and 3 of decide, observe, rim.
	// 10 for lines that had been joined to fit the limit, and 3 of decide.
	// 4 for the name of the product, which extproc had in its responses and certificate (extproc/options.go).
	// 4 for the tenants that wait most without a list of all (routing/queue.go), requests without an address that a limit needs
	// (extproc), and the bodies of all legs (disagg/runner.go).
	// 2 for legs that were never sent, whose credit is withdrawn (disagg/sender.go), 1 for a copy of names (extproc/certificate.go).
	{"heart", 22918, 18100, []string{"extproc", "routing", "kvindex", "internal/disagg"}},
	// 80 for what the parts of a template cost: a request's template ignored the deadline, or ended the process (jinja/machine.go).
	// 20 for a bound of a folder's templates together (bpe/config.go).
	// 11 for the pace of comparisons, which each connection to an event port started (shape/checker.go).
	// 12 for a bound of pairs that share a place of the merge table: a file could load for hours (bpe/merges.go).
	// 2 for what the words of the hash protect from (bpe/idcache.go).
	// 66 for the URLs of media, which name any host of the engines' network to them (body/media.go); 15 and 25 of other rooms.
	// 19 for the fields that this checks, and for min_tokens above the rest of the context (body/field.go, shape/vllm.go).
	// 54 for n and logprobs of any size, which end an SGLang engine as ids beyond its vocabulary do (shape/sglang_ids.go), with
	// 10 and 9 of fleet and decide for requests whose model or body Kvlane does not know.
	// 5 for answers that only some engines compute: what vLLM ignores took all places of a target (body/request.go).
	// 8 for texts beside numbers in lists of ids, of which SGLang makes ids (shape/sglang_ids.go), and 1 for reference voices (body/media.go).
	// 1 for the cost of answers whose one line has many usage objects (body/usage_edit.go).
	// 8 for numbers as texts, which engines read: they counted as one answer (body/request.go).
	// 7 for top_k and min_tokens above 31 bits, which end an SGLang by its issues (shape/sglang_ids.go).
	// 4 for hashes of media in vLLM's features, which are uuids too (body/request.go).
	// 3 for a table in which a field's place says nothing any more (shape/sglang_ids.go).
	{"tokens", 28712, 22000, []string{"internal/tokens"}},
	// 24 for workers with SGLang of a model with another engine (fleet/model.go), 11 for a bound of the list of models (catalog.go).
	{"fleet", 4776, 3500, []string{"internal/fleet", "internal/workers"}},
	// 9 for the bounds of what the debug pages hold: each slow reader kept 105 MB of a large fleet (observe/pages.go).
	// 1 for the headers that a span kept (observe/trace.go).
	{"observe", 1669, 1300, []string{"internal/observe"}},
	// 6 for requests that vLLM refuses as too long, which are not split (decide/split.go).
	// 8 for the one cause that a refusal names (decide/read.go).
	{"decide", 3309, 1700, []string{"internal/decide"}},
	{"replicas", 2641, 2200, []string{"internal/replicas"}},
	// 23 for settings of flow in policies, and for errors that name the policies and families that there are.
	// 63 for agents and chat as workloads of scenarios, a worker that hangs, and skewed conversations whose engines decode.
	{"lab", 11721, 11700, []string{"internal/lab"}},
	// 37 for warnings of keys without effect, which a new user had set (config/flow.go).
	// 31 for the wait for a model hub, which SIGTERM did not end (cmd/kvlane/hub.go), and for its texts, which filled the log.
	// 36 for a bound of a repository's files together, and for files that killed downloads left (internal/hub/download.go).
	// 10 for the client of the admin port in a file of its own (cmd/kvlane/adminclient.go).
	// 13 for the word that Envoy sends no addresses, without which a bound by address had no effect (cmd/kvlane/serve.go).
	// 1 for an atomic publication of the node of replicas (cmd/kvlane/serve.go).
	{"rim", 9334, 6000, []string{
		"cmd", "internal/config", "internal/gateway", "internal/hub", "internal/peers", "internal/steering", "internal/layout",
		"envoy", "proto", "charts", "e2e",
	}},
}

// mayImport is, for each package of ours, the packages of ours that its non-test files may import. PATH/... is PATH and all below
// it, on both sides; the longest path that fits a package is its rule. Nothing lists cmd, e2e, charts or, but for cmd/kvlane and
// itself, internal/lab.
var mayImport = map[string]string{
	// The heart knows neither configuration nor fleet. internal/disagg is the only one that reads bodies.
	"proto/...":             "",
	"extproc":               "",
	"kvindex":               "",
	"kvindex/feed":          "kvindex kvindex/feed/... proto/...",
	"kvindex/feed/msgpack":  "",
	"kvindex/feed/zmtp":     "",
	"routing":               "kvindex",
	"internal/disagg":       "internal/config internal/steering internal/tokens/body",
	"internal/steering":     "",
	"internal/gateway":      "extproc internal/workers",
	"envoy":                 "internal/config internal/steering",
	"charts/...":            "",
	"internal/config":       "internal/hub routing",
	"internal/hub":          "",
	"internal/layout":       "",
	"e2e/...":               "",
	"internal/peers":        "internal/config internal/observe proto/...",
	"internal/replicas":     "internal/config internal/observe proto/... kvindex routing",
	"internal/workers":      "internal/config",
	"internal/workers/kube": "internal/config internal/observe internal/workers",

	// Tokens import tokens: no fleet, no routing, no index.
	"internal/tokens/body":     "",
	"internal/tokens/conv":     "internal/tokens/body internal/tokens/bpe internal/tokens/freelist internal/tokens/jinja",
	"internal/tokens/encoders": "internal/tokens/bpe internal/tokens/jinja",
	"internal/tokens/freelist": "",
	"internal/tokens/models":   "",
	"internal/tokens/media":    "",
	"internal/tokens/bpe":      "internal/tokens/body",
	"internal/tokens/bpe/...":  "",
	"internal/tokens/jinja":    "",
	"internal/tokens/shape":    "internal/tokens/body internal/tokens/bpe internal/tokens/conv internal/tokens/encoders internal/tokens/jinja internal/tokens/media",

	// The fleet does not know how requests are decided.
	"internal/fleet": "extproc internal/config internal/observe internal/steering internal/tokens/body internal/tokens/conv internal/tokens/shape " +
		"internal/workers/... kvindex/... proto/... routing",
	"internal/observe": "extproc kvindex/... routing",
	"internal/decide": "extproc internal/config internal/disagg internal/fleet internal/observe internal/steering " +
		"internal/tokens/body internal/tokens/conv internal/tokens/shape kvindex routing",

	// The engine simulator is the other side: of Kvlane it knows prompts and their ids.
	"internal/lab/bench":      "envoy internal/tokens/... kvindex",
	"internal/lab/benchindex": "internal/lab/cpu kvindex",
	"internal/lab/cpu":        "",
	"internal/lab/enginesim":  "internal/tokens/body internal/tokens/bpe internal/tokens/shape",
	"internal/lab/replay":     "internal/lab/cpu kvindex routing",
	"internal/lab/simulate":   "",
	"internal/lab/truth":      "",

	"cmd/kvlane": "envoy extproc internal/... kvindex/... proto/... routing",
}

// pure is the packages that compute only: they import neither sockets nor files, processes and logs. What needs them passes readers
// (io, io/fs) and values. A package has its exceptions: imports that it may have, or FILE:IMPORT of one file.
var pure = map[string]string{
	"routing":                  "",
	"kvindex":                  "",
	"kvindex/feed/msgpack":     "",
	"internal/steering":        "",
	"internal/tokens/body":     "net/url", // parses the URLs of media
	"internal/tokens/bpe":      "",
	"internal/tokens/conv":     "",
	"internal/tokens/encoders": "",
	"internal/tokens/freelist": "",
	"internal/tokens/jinja":    "",
	"internal/tokens/media":    "",
	// Protocols write fields, headers and addresses; sender.go alone sends.
	"internal/disagg": "net headers.go:net/http headers.go:net/textproto sender.go:net/http sender.go:net/url sender.go:syscall",
}

// impure matches what a pure package does not import.
var impure = regexp.MustCompile(`^(net|os|log|syscall|plugin)(/|$)|^google\.golang\.org/grpc(/|$)|^github\.com/(rs/zerolog|nats-io)(/|$)`)

// generated is every file with a header "Code generated ... DO NOT EDIT". Such files are not counted, linted or read, so each
// one is named here.
var generated = []string{
	"internal/tokens/bpe/tables.go",
	"proto/kvlane/v1/events.pb.go",
	"proto/kvlane/v1/events_grpc.pb.go",
	"proto/kvlane/v1/replicas.pb.go",
	"proto/kvlane/v1/snapshot.pb.go",
	"proto/kvlane/v1/snapshot_grpc.pb.go",
}

// file is a Go file of the module, tests and generated files included.
type file struct {
	pkg       string // its folder, relative to the module
	name      string
	lines     int
	test      bool
	generated bool
	syntax    *ast.File // imports and comments
}

// repository calls visit for each file of the repository that is neither hidden, nor test data, nor of another module.
func repository(t *testing.T, visit func(path string)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !d.IsDir() {
			visit(path)
			return nil
		}
		if path == root {
			return nil
		}
		if name := d.Name(); name[0] == '.' || name == "testdata" || name == "out" {
			return filepath.SkipDir
		}
		if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
			return filepath.SkipDir
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func goFiles(t *testing.T) []file {
	t.Helper()
	var files []file
	repository(t, func(path string) {
		if !strings.HasSuffix(path, ".go") {
			return
		}
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		syntax, err := parser.ParseFile(token.NewFileSet(), path, content, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.ToSlash(strings.TrimPrefix(path, root+string(filepath.Separator)))
		files = append(files, file{
			pkg: filepath.ToSlash(filepath.Dir(name)), name: name, lines: bytes.Count(content, []byte{'\n'}),
			test: strings.HasSuffix(name, "_test.go"), generated: ast.IsGenerated(syntax), syntax: syntax,
		})
	})
	if len(files) < 100 {
		t.Fatalf("got %d Go files below %s, want the whole repository", len(files), root)
	}
	return files
}

// below reports whether pkg is path or below it.
func below(pkg, path string) bool { return pkg == path || strings.HasPrefix(pkg, path+"/") }

// roomOf returns the name of a package's room, or "".
func roomOf(pkg string) string {
	for _, r := range rooms {
		if slices.ContainsFunc(r.paths, func(path string) bool { return below(pkg, path) }) {
			return r.name
		}
	}
	return ""
}

func TestLinesOfRooms(t *testing.T) {
	lines, total, pkgs := map[string]int{}, 0, map[string]bool{}
	for _, f := range goFiles(t) {
		pkgs[f.pkg] = true
		room := roomOf(f.pkg)
		if room == "" {
			t.Errorf("%s is in no room: add its folder to rooms", f.name)
		}
		if !f.test && !f.generated {
			lines[room] += f.lines
			total += f.lines
		}
	}
	for _, r := range rooms {
		checkLines(t, r.name, lines[r.name], r.limit, r.goal)
		for _, path := range r.paths {
			if !anyBelow(pkgs, path) {
				t.Errorf("room %s lists %s, where no Go file is: remove it", r.name, path)
			}
		}
	}
	checkLines(t, "total", total, totalLimit, totalGoal)
}

func checkLines(t *testing.T, name string, got, limit, goal int) {
	t.Helper()
	switch {
	case got > limit:
		t.Errorf("%s: got %d lines, want at most %d: remove some, or raise its limit in this file on purpose and say why", name, got, limit)
	case got > goal:
		t.Logf("%s: %d lines, limit %d, %d over the goal of %d", name, got, limit, got-goal, goal)
	default:
		t.Logf("%s: %d lines, limit %d", name, got, limit)
	}
}

func anyBelow(pkgs map[string]bool, path string) bool {
	for pkg := range pkgs {
		if below(pkg, path) {
			return true
		}
	}
	return false
}

// rule returns the key of mayImport that holds for a package, or "".
func rule(pkg string) string {
	if _, ok := mayImport[pkg]; ok {
		return pkg
	}
	for path := pkg; ; {
		if _, ok := mayImport[path+"/..."]; ok {
			return path + "/..."
		}
		i := strings.LastIndexByte(path, '/')
		if i < 0 {
			return ""
		}
		path = path[:i]
	}
}

func allows(imports, pkg string) bool {
	for path := range strings.FieldsSeq(imports) {
		if tree, ok := strings.CutSuffix(path, "/..."); path == pkg || ok && below(pkg, tree) {
			return true
		}
	}
	return false
}

func TestImports(t *testing.T) {
	used := map[string]bool{}
	for _, f := range goFiles(t) {
		r := rule(f.pkg)
		used[r] = true
		if r == "" {
			t.Errorf("%s has no rule: add %q and what it may import to mayImport", f.name, f.pkg)
		}
		if f.test {
			continue
		}
		for _, imp := range f.syntax.Imports {
			path, _ := strconv.Unquote(imp.Path.Value)
			if pkg, ours := strings.CutPrefix(path, module); ours && !allows(mayImport[r], pkg) {
				t.Errorf("%s imports %s, but %s may import only [%s]: move what is needed, or change the rule on purpose and say why",
					f.name, pkg, r, mayImport[r])
			}
		}
	}
	for r := range mayImport {
		if !used[r] {
			t.Errorf("the rule of %s fits no package: remove it", r)
		}
	}
}

func TestPureImports(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range goFiles(t) {
		exceptions, ok := pure[f.pkg]
		if !ok || f.test {
			continue
		}
		seen[f.pkg] = true
		for _, imp := range f.syntax.Imports {
			path, _ := strconv.Unquote(imp.Path.Value)
			except := strings.Fields(exceptions)
			if impure.MatchString(path) && !slices.Contains(except, path) && !slices.Contains(except, filepath.Base(f.name)+":"+path) {
				t.Errorf("%s imports %s, but %s only computes: let its caller pass what it needs, or change pure on purpose and say why",
					f.name, path, f.pkg)
			}
		}
	}
	for pkg := range pure {
		if !seen[pkg] {
			t.Errorf("pure lists %s, where no Go file is: remove it", pkg)
		}
	}
}

// Files that are called generated are the ones of the list.
func TestGeneratedFiles(t *testing.T) {
	var got []string
	for _, f := range goFiles(t) {
		if f.generated {
			got = append(got, f.name)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, generated) {
		t.Errorf("got the generated files %q, want %q: a file that a program writes is named in generated, and one written by hand has no such header", got, generated)
	}
}

// TestRoutingIsPure: the core has no clock, I/O, goroutine or global randomness, so that the same state and the same
// request give the same decision.
func TestRoutingIsPure(t *testing.T) {
	core := strings.Fields("bytes cmp container/heap crypto/sha256 encoding/binary encoding/json errors fmt maps math slices sort strconv strings text/tabwriter time")
	clock := strings.Fields("After AfterFunc NewTicker NewTimer Now Since Sleep Tick Until")
	for _, f := range goFiles(t) {
		if f.pkg != "routing" || f.test {
			continue
		}
		for _, imp := range f.syntax.Imports {
			if path, _ := strconv.Unquote(imp.Path.Value); !slices.Contains(core, path) && !strings.HasPrefix(path, module) {
				t.Errorf("%s imports %s: routing gets what it needs from its caller", f.name, path)
			}
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s starts a goroutine", f.name)
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(clock, n.Sel.Name) {
					t.Errorf("%s uses time.%s: the caller passes the time", f.name, n.Sel.Name)
				}
			}
			return true
		})
	}
}

func TestRules(t *testing.T) {
	for _, c := range []struct{ pkg, want string }{
		{"routing", "routing"},
		{"kvindex/feed/zmtp", "kvindex/feed/zmtp"},
		{"internal/tokens/bpe/gen", "internal/tokens/bpe/..."},
		{"internal/tokens/bpes", ""},
		{"proto/kvlane/v1", "proto/..."},
		{"elsewhere", ""},
	} {
		if got := rule(c.pkg); got != c.want {
			t.Errorf("rule(%q): got %q, want %q", c.pkg, got, c.want)
		}
	}
	for _, c := range []struct {
		imports, pkg string
		want         bool
	}{
		{"kvindex routing", "kvindex", true},
		{"kvindex routing", "kvindex/feed", false},
		{"kvindex/...", "kvindex", true},
		{"kvindex/...", "kvindex/feed", true},
		{"kvindex/...", "kvindexes", false},
		{"", "kvindex", false},
	} {
		if got := allows(c.imports, c.pkg); got != c.want {
			t.Errorf("allows(%q, %q): got %v, want %v", c.imports, c.pkg, got, c.want)
		}
	}
}

// Fuzz targets are found by who looks for the parser of something: docs/fuzzing.md lists them all, and no others.
func TestFuzzTargetsAreListed(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "fuzzing.md"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile("`([a-z0-9/]+\\.Fuzz[A-Za-z0-9]+)`").FindAllSubmatch(text, -1) {
		listed[string(m[1])] = true
	}
	for _, f := range goFiles(t) {
		if !f.test {
			continue
		}
		for _, d := range f.syntax.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Recv != nil || !strings.HasPrefix(fn.Name.Name, "Fuzz") {
				continue
			}
			name := f.pkg + "." + fn.Name.Name
			if !listed[name] {
				t.Errorf("%s is not in docs/fuzzing.md: add it to the row of what it parses", name)
			}
			delete(listed, name)
		}
	}
	for name := range listed {
		t.Errorf("docs/fuzzing.md lists %s, which is no fuzz target", name)
	}
}

// Pages prove promises by naming tests: `decide.TestX` is a test of a package whose path ends so, TestX of any, and TestX... is
// the beginning of some.
func TestTestsThatPagesNameExist(t *testing.T) {
	var have []string
	for _, f := range goFiles(t) {
		for _, d := range f.syntax.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && f.test && fn.Recv == nil {
				have = append(have, "/"+f.pkg+"."+fn.Name.Name)
			}
		}
	}
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("got pages %q, %v, want some", pages, err)
	}
	named := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`([a-z0-9/]+)?\.?\b((?:Test|Fuzz|Benchmark)[A-Z]\w*)(\.\.\.)?`).FindAllStringSubmatch(string(text), -1) {
			named++
			if !slices.ContainsFunc(have, func(name string) bool {
				pkg, test, _ := strings.Cut(name, ".")
				return (m[1] == "" || strings.HasSuffix(pkg, "/"+m[1])) && (test == m[2] || m[3] != "" && strings.HasPrefix(test, m[2]))
			}) {
				t.Errorf("%s names the test %s, which does not exist", filepath.Base(page), m[0])
			}
		}
	}
	if named < 200 {
		t.Errorf("got %d names of tests in the pages, want more: does the pattern still fit?", named)
	}
}

// A tag of an action can be moved, a commit cannot: workflows name the commit, and beside it the tag for people and Dependabot.
func TestActionsArePinned(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, ".github/workflows/*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("got workflows %q, %v, want some", files, err)
	}
	uses, pinned := regexp.MustCompile(`(?m)^.*\buses: .*$`), regexp.MustCompile(`uses: [\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range uses.FindAllString(string(text), -1) {
			if !pinned.MatchString(line) {
				t.Errorf("%s: got %q, want a commit and its tag: uses: owner/name@<40 hex digits> # v1.2.3", filepath.Base(f), line)
			}
		}
	}
}

package chart

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

// instruction is a line of a Dockerfile.
type instruction struct{ name, rest string }

// stage is what a FROM begins.
type stage struct {
	from, name   string
	platform     string // of the machine that runs it; "" is the image's
	instructions []instruction
}

// dockerfile reads stages and the global ARGs before them.
func dockerfile(t *testing.T) (stages []stage, globals map[string]string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	globals = map[string]string{}
	joined := regexp.MustCompile(`\\\n\s*`).ReplaceAllString(string(content), "")
	for line := range strings.Lines(joined) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case name == "" || strings.HasPrefix(name, "#"):
		case name == "FROM":
			fields := strings.Fields(rest)
			platform, given := strings.CutPrefix(fields[0], "--platform=")
			if given {
				fields = fields[1:]
			} else {
				platform = ""
			}
			s := stage{from: fields[0], platform: platform}
			if len(fields) == 3 && fields[1] == "AS" {
				s.name = fields[2]
			}
			stages = append(stages, s)
		case len(stages) == 0 && name == "ARG":
			key, value, _ := strings.Cut(rest, "=")
			globals[key] = value
		default:
			last := &stages[len(stages)-1]
			last.instructions = append(last.instructions, instruction{name, rest})
		}
	}
	return stages, globals
}

// context copies what .dockerignore lets through: what a builder would see.
func context(t *testing.T, to string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, ".dockerignore"))
	if err != nil {
		t.Fatal(err)
	}
	var roots, not []string
	lines := bufio.NewScanner(bytes.NewReader(content))
	for lines.Scan() {
		line := lines.Text()
		switch keep, ok := strings.CutPrefix(line, "!"); {
		case ok:
			roots = append(roots, keep)
		case strings.HasPrefix(line, "**/"):
			not = append(not, strings.TrimPrefix(line, "**/"))
		case line == "*", line == "", strings.HasPrefix(line, "#"):
		default:
			t.Fatalf(".dockerignore: %q is more than this test understands", line)
		}
	}
	for _, r := range roots {
		err := filepath.WalkDir(filepath.Join(root, r), func(path string, d os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			left := slices.ContainsFunc(not, func(pattern string) bool {
				match, _ := filepath.Match(pattern, d.Name())
				return match
			})
			switch {
			case left && d.IsDir():
				return filepath.SkipDir
			case left || d.IsDir():
				return nil
			}
			file, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			if err := os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o750); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(to, name), file, 0o600)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

var cacheMount = regexp.MustCompile(`--mount=type=cache,target=\S+\s*`)

// build runs the steps of the build stage in a folder of its own and returns the
// binary. COPY takes what the builder would see, RUN lines run as they stand, but
// with absolute paths moved into the folder. cold, if not "", is in the one line that
// gets an empty build cache.
func build(t *testing.T, s stage, args map[string]string, cold string) string {
	t.Helper()
	dir := t.TempDir()
	seen := filepath.Join(dir, "context")
	context(t, seen)
	if err := os.MkdirAll(filepath.Join(dir, "out"), 0o750); err != nil {
		t.Fatal(err)
	}
	work := dir
	env := os.Environ()
	colds := 0
	for _, i := range s.instructions {
		switch i.name {
		case "ARG":
			key, value, _ := strings.Cut(i.rest, "=")
			if given, ok := args[key]; ok {
				value = given
			}
			env = append(env, key+"="+value)
		case "WORKDIR":
			work = filepath.Join(dir, i.rest)
			if err := os.MkdirAll(work, 0o750); err != nil {
				t.Fatal(err)
			}
		case "COPY":
			fields := strings.Fields(i.rest)
			for _, f := range fields[:len(fields)-1] {
				if _, err := run(nil, "cp", "-r", filepath.Join(seen, f)+map[bool]string{true: "/."}[f == "."], work); err != nil {
					t.Fatal(err)
				}
			}
		case "RUN":
			line := strings.ReplaceAll(cacheMount.ReplaceAllString(i.rest, ""), "/out/", dir+"/out/")
			cmd := exec.Command("bash", "-euc", line)
			cmd.Dir, cmd.Env = work, env
			if cold != "" && strings.Contains(i.rest, cold) {
				cmd.Env = append(slices.Clone(env), "GOCACHE="+filepath.Join(dir, "cache"))
				colds++
			}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("RUN %s: %v\n%s", line, err, out)
			}
		default:
			t.Fatalf("%s in the build stage is more than this test understands", i.name)
		}
	}
	if cold != "" && colds != 1 {
		t.Fatalf("%d lines of the build stage hold %q: one was to compile without a cache", colds, cold)
	}
	return filepath.Join(dir, "out", "kvlane")
}

// The build steps, twice in different folders: a static binary with its version, the same
// bytes each time. The second time all of Kvlane is compiled and linked again, without a
// build cache that could return the first result; the tool that writes the bill comes from
// the cache.
func TestImageBuild(t *testing.T) {
	t.Parallel()
	stages, _ := dockerfile(t)
	args := map[string]string{"TARGETOS": runtime.GOOS, "TARGETARCH": runtime.GOARCH, "VERSION": "v1.2.3-test"}
	first := build(t, stages[0], args, "")
	second := build(t, stages[0], args, "-o /out/kvlane ./cmd/kvlane")
	for _, made := range []string{"", ".cdx.json"} {
		if a, b := digest(t, first+made), digest(t, second+made); a != b {
			t.Errorf("two builds of kvlane%s differ: %x, %x", made, a, b)
		}
	}
	checkBill(t, first+".cdx.json", first, "v1.2.3-test")
	checkStatic(t, first, elf.EM_X86_64, elf.EM_AARCH64)

	out, err := run(nil, first, "version")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out, "kvlane v1.2.3-test "+runtime.Version()+" ") {
		t.Errorf("version is %q", out)
	}
	info, err := buildinfo.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range info.Settings {
		if strings.HasPrefix(s.Key, "vcs") || s.Key == "CGO_ENABLED" && s.Value != "0" || s.Key == "-trimpath" && s.Value != "true" {
			t.Errorf("built with %s=%s", s.Key, s.Value)
		}
	}
	if !slices.Contains(info.Settings, debug.BuildSetting{Key: "-tags", Value: "grpcnotrace"}) {
		t.Error("built without the tag grpcnotrace of `make build`")
	}
	binary, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{filepath.Dir(filepath.Dir(first)), here} {
		if bytes.Contains(binary, []byte(folder)) {
			t.Errorf("the binary holds the path %s of the machine that built it", folder)
		}
	}
}

func TestImageCrossBuild(t *testing.T) {
	t.Parallel()
	stages, _ := dockerfile(t)
	other := map[string]elf.Machine{"amd64": elf.EM_AARCH64, "arm64": elf.EM_X86_64}[runtime.GOARCH]
	arch := map[elf.Machine]string{elf.EM_AARCH64: "arm64", elf.EM_X86_64: "amd64"}[other]
	checkStatic(t, build(t, stages[0], map[string]string{"TARGETOS": "linux", "TARGETARCH": arch}, ""), other)
}

// What cannot be run here is read: the image's own stage.
func TestImageStage(t *testing.T) {
	t.Parallel()
	stages, globals := dockerfile(t)
	if len(stages) != 2 || stages[0].name != "build" {
		t.Fatalf("stages are %+v", stages)
	}
	if stages[0].from != "${GO_IMAGE}" || stages[1].from != "${BASE_IMAGE}" {
		t.Errorf("stages are from %s and %s", stages[0].from, stages[1].from)
	}
	if stages[0].platform != "$BUILDPLATFORM" || stages[1].platform != "" {
		t.Errorf("stages run on %q and %q: the first has to run on the machine that builds, the second is the image's", stages[0].platform, stages[1].platform)
	}
	for _, arg := range []string{"TARGETOS", "TARGETARCH"} {
		if !slices.Contains(stages[0].instructions, instruction{"ARG", arg}) {
			t.Errorf("the build stage has no line \"ARG %s\"; with a default every platform's image would hold the default's binary", arg)
		}
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	language := regexp.MustCompile(`(?m)^go (\d+\.\d+(\.\d+)?)`).FindStringSubmatch(string(mod))[1]
	if pinned := regexp.MustCompile(`^golang:` + regexp.QuoteMeta(language) + `(\.\d+)?-bookworm@sha256:[0-9a-f]{64}$`); !pinned.MatchString(globals["GO_IMAGE"]) {
		t.Errorf("the image builds with %s: not pinned, or not the Go %s of go.mod", globals["GO_IMAGE"], language)
	}
	if base := regexp.MustCompile(`^gcr\.io/distroless/static-[a-z0-9]+:nonroot(@sha256:[0-9a-f]{64})?$`); !base.MatchString(globals["BASE_IMAGE"]) {
		t.Errorf("got base %s, want distroless' static image, without root", globals["BASE_IMAGE"])
	}
	want := map[string]string{
		"USER":       "65532:65532",
		"ENTRYPOINT": `["/usr/local/bin/kvlane"]`,
		"COPY":       "--from=build /out/kvlane /usr/local/bin/kvlane and --from=build /out/kvlane.cdx.json /usr/share/doc/kvlane/kvlane.cdx.json",
		"EXPOSE":     "9002 9003 9090",
	}
	got := map[string][]string{}
	for _, i := range stages[1].instructions {
		got[i.name] = append(got[i.name], i.rest)
		if i.name == "RUN" {
			t.Errorf("RUN %s: there is no shell", i.rest)
		}
	}
	for name, w := range want {
		if g := strings.Join(got[name], " and "); g != w {
			t.Errorf("%s %s, want %s", name, g, w)
		}
	}
}

func digest(t *testing.T, file string) [32]byte {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(content)
}

// checkStatic: no interpreter and no libraries, for one of the machines.
func checkStatic(t *testing.T, file string, machines ...elf.Machine) {
	t.Helper()
	f, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !slices.Contains(machines, f.Machine) {
		t.Errorf("%s is for %s", file, f.Machine)
	}
	if libraries, err := f.ImportedLibraries(); err == nil && len(libraries) > 0 {
		t.Errorf("needs %v", libraries)
	}
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Error("needs an interpreter: it is not static")
	}
}

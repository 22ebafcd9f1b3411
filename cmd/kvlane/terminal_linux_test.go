package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	_ "time/tzdata" // the zone of TestLogOnATerminal

	"golang.org/x/sys/unix"

	"github.com/kvlane/kvlane/internal/observe"
)

// terminal returns both ends of a terminal.
func terminal(t *testing.T) (keyboard, tty *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no terminals here: ", err)
	}
	t.Cleanup(func() { keyboard.Close() })
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	if tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return keyboard, tty
}

// People read the log on a terminal, programs elsewhere. Names of durations have their unit. Times are in UTC wherever the
// process is: a process of its own is elsewhere, because goroutines of libraries read time.Local.
func TestLogOnATerminal(t *testing.T) {
	const elsewhere = "Asia/Kolkata"
	if os.Getenv("TZ") != elsewhere {
		again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		again.Env = append(os.Environ(), "TZ="+elsewhere)
		if out, err := again.CombinedOutput(); err != nil {
			t.Fatalf("got %v, want that it passes there:\n%s", err, out)
		}
		return
	}
	if _, east := time.Now().Zone(); east != 5*3600+1800 {
		t.Fatalf("got a zone %d s east of Greenwich, want another place", east)
	}
	t.Setenv("NO_COLOR", "1")
	keyboard, tty := terminal(t)
	log, err := observe.Logger(tty, "info")
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now().UTC().Truncate(time.Millisecond).Format("15:04:05.000")
	log.Info().Str("name", "a\x1b[2J").Msg("b\x1b[2J\n")
	text := make([]byte, 1000)
	n, err := keyboard.Read(text)
	if want := regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d\d\d INF b\\x1b\[2J\\n name="a\\x1b\[2J"\r\n$`); err != nil || !want.Match(text[:n]) {
		t.Errorf("on a terminal: got %q, %v, want %s", text[:n], err, want)
	}
	if now := time.Now().UTC().Format("15:04:05.000"); began <= now && (string(text[:12]) < began || string(text[:12]) > now) {
		t.Errorf("on a terminal: got the time %s, want it from %s to %s in UTC", text[:12], began, now)
	}
	var lines bytes.Buffer
	if log, err = observe.Logger(&lines, "info"); err != nil {
		t.Fatal(err)
	}
	log.Info().Msg("serving")
	if want := regexp.MustCompile(`^\{"level":"info","time":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\dZ","message":"serving"\}\n$`); !want.Match(lines.Bytes()) {
		t.Errorf("elsewhere: got %q, want %s", &lines, want)
	}
	for _, pattern := range []string{"*.go", "../../extproc/*.go", "../../kvindex/*/*.go", "../../internal/*/*.go", "../../internal/*/*/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: got no files, %v", pattern, err)
		}
		for _, file := range files {
			source, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range regexp.MustCompile(`\bDur\("(\w+)"`).FindAllSubmatch(source, -1) {
				if !bytes.HasSuffix(m[1], []byte("_ms")) { // zerolog writes milliseconds
					t.Errorf("%s: got the field %s for a duration, want it to end with _ms", file, m[1])
				}
			}
		}
	}
}

// A signal ends commands that read or compute; on a terminal they tell how the input ends.
func TestSignalsEndCommands(t *testing.T) {
	_, tty := terminal(t)
	for _, args := range [][]string{{"tokenize", "--tokenizer", "builtin:qwen3"}, {"render", "--tokenizer", "builtin:qwen3"}, {"check", "-"}} {
		ctx, cancel := context.WithCancel(t.Context())
		hints := make(lines, 1000)
		done := make(chan int, 1)
		go func() { done <- run(ctx, streams{in: tty, out: new(bytes.Buffer), err: hints}, args) }()
		first := <-hints
		for strings.HasPrefix(first, "loading tokenizer ") { // progress of a busy machine
			first = <-hints
		}
		cancel()
		if code := <-done; code != 1 {
			t.Errorf("%v: got code %d, want 1", args, code)
		}
		if got := strings.Contains(first, "Ctrl-D ends the input"); !got {
			t.Errorf("%v: got %q, want a hint", args, first)
		}
		said := first
		for len(hints) > 0 {
			said = <-hints
		}
		if !strings.HasSuffix(said, ": interrupted\n") {
			t.Errorf("%v: got %q, want a word of the interruption", args, said)
		}
	}
	if code, out, errs := kvlane("", "tokenize", "--tokenizer", "builtin:qwen3"); code != 0 || out != "" || strings.Contains(errs, "Ctrl-D") {
		t.Errorf("an input that ends: got code %d, %q, %q, want no hint", code, out, errs)
	}
}

// standing is an output whose writer of progress is held up.
type standing struct {
	lines
	release chan struct{}
}

func (s standing) Write(p []byte) (int, error) {
	n, err := s.lines.Write(p)
	if bytes.HasPrefix(p, []byte("1/1 ")) {
		<-s.release
	}
	return n, err
}

func TestSignalsEndReplay(t *testing.T) {
	few := fewRequests(t)
	ctx, cancel := context.WithCancel(t.Context())
	progress, out, done := standing{make(lines, 10), make(chan struct{})}, make(lines, 100), make(chan int, 1)
	go func() {
		done <- run(ctx, streams{in: strings.NewReader(""), out: out, err: progress}, append(strings.Fields("replay --format generated --seeds 1 --policies round-robin --scenario"), few))
	}()
	if got := <-progress.lines; !strings.HasPrefix(got, "1/1 ") {
		t.Fatalf("got %q, want a run to begin", got)
	}
	cancel()
	if code, said := <-done, <-progress.lines; code != 1 || said != "kvlane replay: interrupted\n" {
		t.Errorf("got code %d, %q, want 1 while the run goes on", code, said)
	}
	close(progress.release)
	<-out // in a process it would not have come so far
}

func TestLoadingATokenizerShowsProgress(t *testing.T) {
	for _, command := range []string{"tokenize", "render", "engine-sim"} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			slow := leased(t, filepath.Join(dir, "tokenizer.json"))
			errs, done := make(lines, 100), make(chan int, 1)
			go func() {
				done <- run(t.Context(), streams{in: strings.NewReader(""), out: &bytes.Buffer{}, err: errs}, []string{command, "--tokenizer", dir})
			}()
			select {
			case got := <-errs:
				if want := "loading tokenizer " + dir; !strings.HasPrefix(got, want) {
					t.Errorf("got %q, want %q", got, want)
				}
			case <-time.After(30 * time.Second):
				t.Error("got no word in 30 s of loading, want one every 2 s")
			}
			if _, err := slow.WriteString("{"); errors.Join(err, slow.Close()) != nil {
				t.Fatal(err)
			}
			if code := <-done; code != 1 {
				t.Errorf("got code %d of a tokenizer that is broken, want 1", code)
			}
		})
	}
}

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
)

// What is recorded from the admin port is a trace that replay takes: conversations of two turns with a shared beginning, without
// refused requests and without those from before.
func TestRecordedTrafficCanBeReplayed(t *testing.T) {
	args, log := watched(t, observe.Status{})
	metrics := observe.New("v")
	answer := func(id string, status int, output int64, hashes ...uint64) {
		e := observe.NewEntry(&extproc.Request{ID: id}, time.Now())
		e.Target, e.PromptTokens, e.HashIDs = "a/0", int64(512*len(hashes))+100, hashes
		log.Add(e)
		e.SetStatus(status)
		if output >= 0 {
			e.SetOutput(output)
		}
		a := metrics.Answer(e, "")
		a.End(time.Now())
	}
	answer("past", 200, 1, 9)
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	var errs strings.Builder
	done := make(chan int, 1)
	go func() {
		done <- run(context.Background(), streams{in: strings.NewReader(""), out: os.Stdout, err: &errs}, append([]string{"record", "--n", "40", "--out", file, "--output-length", "77"}, args...))
	}()
	for n := uint64(0); ; n++ { // until enough have been recorded; the first ones may precede the connection
		select {
		case code := <-done:
			text, err := os.ReadFile(file)
			if code != 0 || err != nil || strings.Count(string(text), "\n") != 40 || !strings.Contains(errs.String(), "requests recorded: 40 (") {
				t.Fatalf("got code %d, %q, %v, trace %s, want 40 requests", code, errs.String(), err, text)
			}
			if !strings.Contains(string(text), `"output_length":5,`) || !strings.Contains(string(text), `"output_length":77,`) || strings.Contains(string(text), "[9]") {
				t.Errorf("got %s, want reported and assumed output lengths, and nothing from before", text)
			}
			documented := slices.Sorted(slices.Values(documentedKeys(t)))
			for line := range strings.Lines(string(text)) {
				var keys map[string]json.RawMessage
				if err := json.Unmarshal([]byte(line), &keys); err != nil || !slices.Equal(slices.Sorted(maps.Keys(keys)), documented) {
					t.Fatalf("got %v and the line %s, want the keys %v of docs/replay.md", err, line, documented)
				}
			}
			code, out, problem := kvlane("", "replay", "--trace", file, "--policies", "round-robin,kv-aware", "--arrival-jitter", "never", "--workers", "2", "--ranks", "1", "--seeds", "1")
			if code != 0 || !strings.Contains(out, "kv-aware") {
				t.Errorf("replay: got code %d, %s, %s, want a report", code, out, problem)
			}
			return
		case <-time.After(time.Millisecond):
			answer(fmt.Sprint("first", n), 200, 5, 1, 2, 10*n+3)
			answer(fmt.Sprint("second", n), 200, -1, 1, 2, 10*n+3, 10*n+4)
			answer(fmt.Sprint("refused", n), 503, 5, 1)
		}
	}
}

// documentedKeys are the keys of a line as docs/replay.md lists them.
func documentedKeys(t *testing.T) (keys []string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/replay.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(page), "A line has the keys ")
	list, _, found := strings.Cut(list, ", and no other.")
	if !found {
		t.Fatal("docs/replay.md does not list the keys of a recorded line")
	}
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(list, -1) {
		keys = append(keys, m[1])
	}
	return keys
}

func TestRecordRefusesBadFlags(t *testing.T) {
	for _, bad := range [][]string{{"--n", "0"}, {"--duration", "-1s"}, {"--output-length", "-1"}} {
		if code, _, _ := kvlane("", append([]string{"record"}, bad...)...); code != 2 {
			t.Errorf("%v: got code %d, want 2", bad, code)
		}
	}
}

package page

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
)

// The way of a newcomer, as README and quickstart describe it: the demonstration's own request in a shell, twice, the second
// answer with the cached tokens that the page shows for it, a click on it, and the printed command that explains it.
func TestADemonstrationInTheBrowser(t *testing.T) {
	ctx := browse(t)
	binary, proxy := os.Getenv("KVLANE_BIN"), os.Getenv("ENVOY")
	if binary == "" || proxy == "" {
		t.Skip("KVLANE_BIN and ENVOY name no programs: make test-page has them")
	}
	port := freePorts(t, 3)
	at := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", port+i) }
	demo := exec.Command(binary, "demo", "--envoy", proxy, "--ingress", at(0), "--admin", at(1), "--envoy-admin", at(2))
	out, err := demo.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	demo.Stderr = os.Stderr
	began := time.Now()
	if err := demo.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = demo.Process.Signal(syscall.SIGINT)
		if err := demo.Wait(); err != nil {
			t.Errorf("the demonstration ended with %v, want 0 after Ctrl-C", err)
		}
	})
	var printed strings.Builder
	for lines := bufio.NewScanner(out); !strings.Contains(printed.String(), "until Ctrl-C"); printed.WriteString(lines.Text() + "\n") {
		if !lines.Scan() {
			t.Fatalf("got the output %q, want it to say how it ends", printed.String())
		}
	}
	part := func(what, pattern string) string {
		m := regexp.MustCompile(pattern).FindStringSubmatch(printed.String())
		if m == nil {
			t.Fatalf("got no %s in the output %q", what, printed.String())
		}
		return m[1]
	}
	shell := func(command string) string {
		answer, err := exec.CommandContext(ctx, "sh", "-c", command).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", command, err, answer)
		}
		return strings.ReplaceAll(string(answer), "\r", "")
	}
	page := part("page", `in a browser: +(http://\S+)`)
	request := part("request", `(?s)\n(curl .*?\})'\n`) + "'"
	target := regexp.MustCompile(`(?m)^x-kvlane-target: (.*)$`)
	first, second := shell(request), shell(request)
	want(t, "the first answer's matched tokens", strings.Contains(first, "\nx-kvlane-matched-tokens: 0\n"), true)
	where := target.FindStringSubmatch(second)
	if there := target.FindStringSubmatch(first); there == nil || where == nil || there[1] != where[1] {
		t.Errorf("got the targets %q and %q, want one rank", there, where)
	}
	if !strings.Contains(second, "\nx-kvlane-matched-tokens: 80\n") || !strings.Contains(second, `"cached_tokens":80`) {
		t.Errorf("got the second answer %q, want a cache hit of 80 tokens, predicted and reported", second)
	}
	run(t, ctx, chromedp.Navigate(page))
	until(t, ctx, "both requests", `document.querySelectorAll('#rows tr').length === 2`)
	hit := `[...document.querySelectorAll('#rows tr')].find((tr) => tr.cells[4].textContent === '80' && tr.cells[5].textContent === '80')`
	until(t, ctx, "the cache hit, predicted and reported", hit+` !== undefined`)
	t.Logf("%s from the start of the demonstration to a cache hit on the page", time.Since(began).Round(time.Millisecond))
	run(t, ctx, chromedp.Evaluate(hit+`.querySelector('button').click()`, nil))
	until(t, ctx, "its cost table", `document.querySelector('#detail').open && document.querySelectorAll('#detail tr.chosen').length === 1`)
	if row := eval[string](t, ctx, `document.querySelector('#detail tr.chosen').innerText`); where != nil && !strings.Contains(row, strings.Fields(where[1])[0]) {
		t.Errorf("got the chosen row %q, want the answer's target %s", row, where[1])
	}
	if text := shell(part("command", `Why the last request went there: +(.*)`)); !strings.Contains(text, "80") || !strings.Contains(text, "cost") {
		t.Errorf("got the explanation %q, want its matched tokens and costs", text)
	}
}

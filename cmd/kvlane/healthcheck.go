package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	stdio "io"
	"net/http"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/observe"
)

// runHealthcheck is for container and service managers without a shell or curl: the URL of any component may be asked.
func runHealthcheck(ctx context.Context, io streams, args []string) error {
	f := flags("healthcheck")
	url := f.String("url", "http://127.0.0.1:9090/readyz", "`URL` that answers 200 while all is well; Kvlane's /healthz and /readyz do")
	timeout := f.Duration("timeout", 3*time.Second, "`time` for the answer")
	wait := f.Duration("wait", 0, "ask again for this `time` while the answer is another one")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	stop := during(io.err, "waiting for "+*url)
	defer stop()
	for end := time.Now().Add(*wait); ; time.Sleep(200 * time.Millisecond) {
		line, err := health(ctx, *url, *timeout)
		if err == nil {
			stop()
			fmt.Fprintln(io.out, line)
			return nil
		}
		if _, wrong := errors.AsType[usageError](err); wrong || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
	}
}

// health returns the first line of an answer with status 200.
func health(ctx context.Context, url string, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", usageError{err.Error()}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, _ := stdio.ReadAll(stdio.LimitReader(resp.Body, 4096)) // the status decides
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	line = observe.Printable(cmp.Or(line, resp.Status))
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s answers %d: %s", url, resp.StatusCode, line)
	}
	return line, nil
}

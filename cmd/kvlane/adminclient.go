package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	stdio "io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
)

// adminClient asks the admin port of a running Kvlane.
type adminClient struct {
	address, tokenFile *string
	progress           stdio.Writer
}

func adminFlags(f *flag.FlagSet, progress stdio.Writer) adminClient {
	return adminClient{f.String("admin", "127.0.0.1:9090", "admin `address` of Kvlane"),
		f.String("token-file", "", "`file` with the token of admin.token_file"), progress}
}

// adminURL returns the URL of the admin port from its address or URL.
func adminURL(address string) string {
	if !strings.Contains(address, "://") {
		if _, _, err := net.SplitHostPort(address); err != nil {
			address = net.JoinHostPort(strings.Trim(address, "[]"), "9090")
		}
		address = "http://" + address
	}
	return strings.TrimRight(address, "/")
}

// maxPage bounds the bytes read of a page of the admin port; streams have no bound.
const maxPage = 256 << 20

// adminHTTP follows no redirects: the token is sent only to the address that was named.
var adminHTTP = http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

// get returns the body of an answer with status 200. The caller closes it.
func (c adminClient) get(ctx context.Context, path, accept string) (stdio.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, adminURL(*c.address)+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	if *c.tokenFile != "" {
		token, err := config.ReadFile(*c.tokenFile)
		if err != nil {
			return nil, err
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	stop := during(c.progress, "waiting for an answer of "+req.URL.Host)
	resp, err := adminHTTP.Do(req)
	stop()
	if err != nil {
		return nil, fmt.Errorf("%w (is Kvlane running? --admin names its admin address)", err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	text, _ := stdio.ReadAll(stdio.LimitReader(resp.Body, 4096))
	hint := map[int]string{http.StatusUnauthorized: " (--token-file)"}[resp.StatusCode]
	return nil, fmt.Errorf("%s%s", observe.Printable(cmp.Or(strings.TrimSpace(string(text)), resp.Status)), hint)
}

func (c adminClient) status(ctx context.Context) (s observe.Status, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	body, err := c.get(ctx, "/debug/status", "application/json")
	if err != nil {
		return s, err
	}
	defer body.Close()
	return s, json.NewDecoder(stdio.LimitReader(body, maxPage)).Decode(&s)
}

// rows reads the stream of decisions until it ends, ctx ends, or each returns an error. each gets a line and its decision, which is
// nil for a comment; it is called once with nil when the stream is open.
func (c adminClient) rows(ctx context.Context, query string, each func(line string, row *observe.Row) error) error {
	body, err := c.get(ctx, "/debug/stream?"+query, "text/event-stream")
	if err != nil {
		return err
	}
	defer body.Close()
	if err := each("", nil); err != nil {
		return err
	}
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		text, ok := strings.CutPrefix(lines.Text(), "data: ")
		var row *observe.Row
		if ok {
			if err := json.Unmarshal([]byte(text), &row); err != nil {
				return err
			}
		}
		if err := each(text, row); err != nil {
			return err
		}
	}
	return lines.Err()
}

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// prompt is a request of the load, with the text that an engine alone answers it with.
type prompt struct {
	path   string
	body   []byte
	stream bool
	want   string
}

// corpus is what the clients of every load send: conversations with shared beginnings and
// completions of 30 to 400 tokens, streamed or not, and a few bodies of 100 KB.
var corpus = sync.OnceValues(func() ([]prompt, error) {
	e, err := enginesim.Start(context.Background(), enginesim.Options{Model: modelName, Tokenizer: tokenizer, Blocks: 16384})
	if err != nil {
		return nil, err
	}
	defer e.Close()
	var all []prompt
	for i := range 192 {
		p := prompt{path: "/v1/completions", stream: i%2 == 0}
		v := map[string]any{"model": modelName, "stream": p.stream, "max_tokens": 4 + i%29, "ignore_eos": true}
		text := prose(fmt.Sprint("load ", i), 30+i*2)
		if i%3 == 0 {
			p.path = "/v1/chat/completions"
			v["messages"] = []message{{"system", prose(fmt.Sprint("shared ", i%4), 200)}, {"user", text}}
		} else {
			v["prompt"] = text
		}
		if i%64 == 5 {
			v["ignored"] = strings.Repeat("large ", 17_000)
		}
		if p.body, err = json.Marshal(v); err != nil {
			return nil, err
		}
		resp, err := http.Post(e.URL()+p.path, "application/json", bytes.NewReader(p.body))
		if err != nil {
			return nil, err
		}
		answer, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return nil, err
		}
		if p.want = textOf(answer); resp.StatusCode != http.StatusOK || p.want == "" {
			return nil, fmt.Errorf("an engine alone: status %d: %.200s", resp.StatusCode, answer)
		}
		all = append(all, p)
	}
	return all, nil
})

// outcomes are what happened to the requests of a load.
type outcomes struct {
	Served   int            `json:"served"`
	Failed   map[string]int `json:"failed,omitempty"` // by status, or "cut"
	Wrong    int            `json:"wrong"`            // answers that differ from the engine's
	Stall    time.Duration  `json:"stall"`            // the longest time for which a request got no byte
	inFlight int
	decided  int // requests that Kvlane decided
}

func (o *outcomes) failed() int {
	n := 0
	for _, v := range o.Failed {
		n += v
	}
	return n
}

// load is a number of clients that send the corpus without pause, and compare each answer
// with that of an engine alone. A refused connection is tried again, as part of the request.
type load struct {
	b       *bed
	http    *http.Client
	prompts []prompt
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu  sync.Mutex
	out outcomes
}

func (b *bed) load(clients int) *load {
	b.t.Helper()
	prompts, err := corpus()
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{b: b, ctx: ctx, cancel: cancel, prompts: prompts, out: outcomes{Failed: map[string]int{}},
		http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}}}
	for _, p := range prompts {
		b.remember(p.body)
	}
	b.loads++
	for c := range clients {
		l.client(c)
	}
	return l
}

// client lets client c begin.
func (l *load) client(c int) {
	first := 31*c + 53*l.b.loads
	l.wg.Go(func() {
		for n := first; l.ctx.Err() == nil; n++ {
			l.one(&l.prompts[n%len(l.prompts)])
		}
	})
}

// one sends a request and counts its outcome.
func (l *load) one(p *prompt) {
	l.mu.Lock()
	l.out.inFlight++
	l.mu.Unlock()
	r, stall, err := exchange(l.http, "http://"+l.b.ingress+p.path, p.body)
	text := textOf(r.body)
	l.mu.Lock()
	l.out.inFlight--
	l.out.Stall = max(l.out.Stall, stall)
	if r.header.Get("X-Kvlane-Target") != "" {
		l.out.decided++
	}
	failure := ""
	switch {
	case r.status == 0:
		failure = "reset"
	case r.status != http.StatusOK:
		failure = strconv.Itoa(r.status)
	case err != nil, p.stream && !bytes.Contains(r.body, []byte("[DONE]")):
		failure = "cut"
		if !strings.HasPrefix(p.want, text) {
			l.out.Wrong++
		}
	case text != p.want:
		l.out.Wrong++
	default:
		l.out.Served++
	}
	if failure != "" {
		l.out.Failed[failure]++
	}
	l.mu.Unlock()
	if failure != "" {
		// A process that was killed may take longer than the pause to close all of its connections: the next request
		// must not go to one of those that are idle, which would count twice for one client.
		l.http.CloseIdleConnections()
		time.Sleep(20 * time.Millisecond)
	}
}

// exchange sends a body and reads the answer, and measures the longest time without a byte.
func exchange(client *http.Client, url string, body []byte) (r reply, stall time.Duration, err error) {
	last := time.Now()
	heard := func() {
		now := time.Now()
		stall, last = max(stall, now.Sub(last)), now
	}
	var resp *http.Response
	for {
		resp, err = client.Post(url, "application/json", bytes.NewReader(body))
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Since(last) > time.Minute {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	heard()
	if err != nil {
		return r, stall, err
	}
	defer resp.Body.Close()
	r = reply{status: resp.StatusCode, header: resp.Header}
	for buf := make([]byte, 32<<10); ; {
		n, err := resp.Body.Read(buf)
		heard()
		r.body = append(r.body, buf[:n]...)
		if err != nil {
			if err == io.EOF {
				err = nil
			}
			return r, stall, err
		}
	}
}

// now is what has happened so far.
func (l *load) now() outcomes {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.out
	o.Failed = maps.Clone(o.Failed)
	return o
}

// more waits until n further requests have ended well; with Kvlane, until it decided as many.
func (l *load) more(n int, decided bool) {
	l.b.t.Helper()
	before := l.now()
	l.b.until(fmt.Sprintf("%d further requests are served (decided: %v)", n, decided), func() bool {
		o := l.now()
		return o.Served >= before.Served+n && (!decided || o.decided >= before.decided+n)
	})
}

// end lets the running requests end, and starts no others.
func (l *load) end() outcomes {
	l.cancel()
	l.wg.Wait()
	l.http.CloseIdleConnections()
	return l.now()
}

// resident is the resident memory of a process in bytes.
func resident(t testing.TB, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Skip(err)
	}
	var size, pages int64
	if _, err := fmt.Sscan(string(text), &size, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// descriptors is the number of open files of a process.
func descriptors(t testing.TB, pid int) int {
	t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Skip(err)
	}
	return len(files)
}

// depart sends a part of a request (all of it if part is 1), waits, and closes the
// connection after the first bytes of the answer if answer is set.
func (b *bed) depart(p *prompt, part float64, wait time.Duration, answer bool) error {
	conn, err := net.Dial("tcp", b.ingress)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		p.path, len(p.body), p.body[:int(part*float64(len(p.body)))]); err != nil {
		return err
	}
	if answer {
		if _, err := conn.Read(make([]byte, 64)); err != nil {
			return err
		}
	}
	time.Sleep(wait)
	return nil
}

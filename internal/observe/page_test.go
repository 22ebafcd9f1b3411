package observe

import (
	"bufio"
	"encoding/json"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/routing"
)

func TestThePageIsServedWholeAndClosed(t *testing.T) {
	srv := httptest.NewServer(Page())
	defer srv.Close()
	for path, want := range map[string]struct {
		status int
		kind   string
	}{"/": {200, "text/html"}, "/page.js": {200, "text/javascript"}, "/page.css": {200, "text/css"}, "/other": {404, ""}, "/../pages.go": {404, ""}} {
		resp, err := srv.Client().Get(srv.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want.status || !strings.HasPrefix(resp.Header.Get("Content-Type"), want.kind) {
			t.Errorf("%s: got %d %s, want %d %s", path, resp.StatusCode, resp.Header.Get("Content-Type"), want.status, want.kind)
		}
		if got := resp.Header.Get("Content-Security-Policy"); !strings.Contains(got, "default-src 'none'") || strings.Contains(got, "unsafe") {
			t.Errorf("%s: got the policy %q, want one that allows the page's own files only", path, got)
		}
	}
}

// The page has no asset of another place, and no way for a name to become markup or script.
func TestThePageHasNoSinksForMarkup(t *testing.T) {
	unsafe := regexp.MustCompile(`innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|setTimeout\("|srcdoc|DOMParser|createContextualFragment|https?://|\bon[a-z]+="|style="`)
	lines := 0
	err := fs.WalkDir(pageFiles, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(pageFiles, path)
		lines += strings.Count(string(text), "\n")
		if found := unsafe.FindString(string(text)); found != "" {
			t.Errorf("%s: got %q, want none of these", path, found)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if lines > 600 {
		t.Errorf("got a page of %d lines, want at most 600", lines)
	}
}

// rows reads the rows of a stream.
type rows struct {
	t    *testing.T
	scan *bufio.Scanner
}

func (r *rows) next() (row Row) {
	r.t.Helper()
	for r.scan.Scan() {
		if text, ok := strings.CutPrefix(r.scan.Text(), "data: "); ok {
			if err := json.Unmarshal([]byte(text), &row); err != nil {
				r.t.Fatal(err)
			}
			return row
		}
	}
	r.t.Fatalf("the stream has ended: %v", r.scan.Err())
	return row
}

func TestDecisionsAreStreamedAndAgainAtTheirEnd(t *testing.T) {
	log := NewDecisions(100)
	add := func(id string) *Entry {
		e := &Entry{ID: id, At: time.Now(), PromptTokens: 20, Matched: 16, Stages: []StageTime{{"plan", time.Second}, {"leg", time.Hour}}}
		log.Add(e)
		return e
	}
	for i := range 5 {
		add("old" + strconv.Itoa(i)).Rejected = 503
	}
	srv := httptest.NewServer((&Pages{Decisions: log}).Handler())
	defer srv.Close()
	resp, err := srv.Client().Get(srv.URL + "/debug/stream?n=2")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := &rows{t, bufio.NewScanner(resp.Body)}
	for _, want := range []string{"old3", "old4"} {
		if row := r.next(); row.ID != want || row.Status != 503 || !row.Ended || row.Decision != 1 {
			t.Errorf("got %+v, want %s, ended with 503, decided in 1 s", row, want)
		}
	}
	first, second := add("new"), add("\u2028\n<b>")
	if row := r.next(); row.ID != "new" || row.Ended || row.CachedTokens != nil {
		t.Errorf("got %+v, want the new one as it runs", row)
	}
	if row := r.next(); row.ID != second.ID {
		t.Errorf("got %+v, want the id as it is", row)
	}
	first.SetStatus(200)
	first.SetCached(16)
	a := New("v").Answer(first, "demo")
	a.End(first.At.Add(2 * time.Second))
	if row := r.next(); row.ID != "new" || !row.Ended || row.Status != 200 || row.CachedTokens == nil || *row.CachedTokens != 16 || row.Duration != 2 {
		t.Errorf("got %+v, want its end after 2 s with 16 cached tokens", row)
	}
}

func TestStreamsAreBounded(t *testing.T) {
	p := &Pages{Decisions: NewDecisions(10)}
	p.Decisions.Add(&Entry{ID: "a"})
	get := func(query string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		p.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/debug/stream"+query, nil))
		return w
	}
	for _, query := range []string{"?n=-1", "?n=x", "?n=10001"} {
		if w := get(query); w.Code != http.StatusBadRequest {
			t.Errorf("%s: got status %d, want 400", query, w.Code)
		}
	}
	if w := get("?follow=false"); w.Code != http.StatusOK || strings.Count(w.Body.String(), "data: ") != 1 {
		t.Errorf("got %d %q, want the one decision", w.Code, w.Body)
	}
	p.streams.Store(maxStreams)
	if w := get("?follow=false"); w.Code != http.StatusServiceUnavailable {
		t.Errorf("one more stream: got status %d, want 503", w.Code)
	}
}

// slowReader is a reader that takes its answer when it is released.
type slowReader struct {
	*httptest.ResponseRecorder
	arrived, release chan struct{}
}

func (u slowReader) Write(b []byte) (int, error) {
	u.arrived <- struct{}{}
	<-u.release
	return u.ResponseRecorder.Write(b)
}

// An answer is in memory until it is read, so there are a few at a time.
func TestConcurrentAnswersAreBounded(t *testing.T) {
	p := &Pages{Workers: func() []WorkerRow { return []WorkerRow{{Name: "w"}} }}
	get := func(w http.ResponseWriter) {
		p.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/debug/workers", nil))
	}
	arrived, release := make(chan struct{}), make(chan struct{})
	var readers sync.WaitGroup
	for range maxAnswers {
		readers.Go(func() { get(slowReader{httptest.NewRecorder(), arrived, release}) })
		<-arrived
	}
	more := httptest.NewRecorder()
	if get(more); more.Code != http.StatusServiceUnavailable || strings.Contains(more.Body.String(), "w\"") {
		t.Errorf("one more answer: got %d %q, want 503", more.Code, more.Body)
	}
	close(release)
	readers.Wait()
	after := httptest.NewRecorder()
	if get(after); after.Code != http.StatusOK || !strings.Contains(after.Body.String(), `"name": "w"`) {
		t.Errorf("after the others: got %d %q, want the workers", after.Code, after.Body)
	}
}

func TestDecisionsAsText(t *testing.T) {
	p := &Pages{Decisions: NewDecisions(10)}
	p.Decisions.Add(&Entry{ID: "a"})
	p.Decisions.Add(&Entry{ID: "b\x1b[2J", Explanation: &routing.Explanation{Verdicts: []routing.Verdict{{Stage: "cost", Text: "x"}}}})
	r := httptest.NewRequest(http.MethodGet, "/debug/decisions?n=1", nil)
	r.Header.Set("Accept", "text/plain")
	w := httptest.NewRecorder()
	p.Handler().ServeHTTP(w, r)
	if got := w.Body.String(); !strings.HasPrefix(got, `b\x1b[2J`) || !strings.Contains(got, "cost: x") || strings.Contains(got, "\na ") {
		t.Errorf("got %q, want the newest one, printable, with its verdicts", got)
	}
}

func TestSince(t *testing.T) {
	l := NewDecisions(3)
	_, seen := l.Since(0, 10)
	for i := range 5 {
		l.Add(&Entry{ID: strconv.Itoa(i)})
	}
	for _, c := range []struct {
		seen uint64
		n    int
		want string
	}{{seen, 10, "234"}, {seen, 2, "34"}, {3, 10, "34"}, {5, 10, ""}} {
		list, now := l.Since(c.seen, c.n)
		got := ""
		for _, e := range list {
			got += e.ID
		}
		if got != c.want || now != 5 {
			t.Errorf("since %d, at most %d: got %q of %d, want %q of 5", c.seen, c.n, got, now, c.want)
		}
	}
}

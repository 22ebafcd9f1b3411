package observe

import (
	"embed"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
)

// maxRecorded bounds how many decisions are recorded with the router's state.
const maxRecorded = 100

// Pages serves the debug pages:
//
//	GET  /debug/decisions?n=20        the last decisions, newest first; as text with Accept: text/plain
//	GET  /debug/decisions/{id}        one of them; as text with Accept: text/plain
//	GET  /debug/decisions/{id}/export the decision with the state that it was made from
//	POST /debug/record?n=1            record the next n decisions for export
//	GET  /debug/index                 sizes per target and tier, state of each feed
//	GET  /debug/workers               the workers
//	GET  /debug/status                the fleet with loads and totals, for the page and the terminal
//	GET  /debug/stream?n=50           the last decisions and those to come, as server-sent events; with hashes=true for a trace
type Pages struct {
	Decisions *Decisions
	// Record makes the next n decisions be recorded with the router's state.
	Record func(n int)
	// Index and Workers read the state as of now. They are called concurrently.
	Index   func() IndexPage
	Workers func() []WorkerRow
	// Warnings are shown with a decision in readable form; nil means none.
	Warnings func() []Warning
	Status   func() Status

	streams atomic.Int64 // open ones
}

// WorkerRow is a worker on GET /debug/workers.
type WorkerRow struct {
	Name     string   `json:"name"`
	Address  string   `json:"address"`
	Engine   string   `json:"engine"`
	Role     string   `json:"role"`
	Reason   string   `json:"reason,omitempty"`
	Models   []string `json:"models,omitempty"` // the first MaxShown
	More     int      `json:"more_models,omitempty"`
	Ranks    int      `json:"ranks"`
	Ready    bool     `json:"ready"`
	Draining bool     `json:"draining"`
	Warnings []string `json:"warnings,omitempty"`
}

// Warning explains why a worker is not ready, or does not work as configured.
type Warning struct {
	Worker string // "" if it is about a model or Kvlane itself
	Reason string // a metric label
	Text   string
}

func (w Warning) String() string {
	if w.Worker == "" {
		return w.Text
	}
	return "worker " + w.Worker + ": " + w.Text
}

// OfNoWorker returns the texts of the warnings that are about no worker.
func OfNoWorker(list []Warning) (texts []string) {
	for _, w := range list {
		if w.Worker == "" {
			texts = append(texts, w.Text)
		}
	}
	return texts
}

// MaxShown bounds the warnings that are shown together, and the models of a worker. maxAnswers bounds the concurrent answers
// in JSON: each is in memory until its reader has taken it.
const MaxShown, maxAnswers = 20, 8

var unread atomic.Int64 // answers

// WriteWarnings writes the first warnings, one per line.
func WriteWarnings(w io.Writer, list []Warning) {
	for _, warning := range list[:min(len(list), MaxShown)] {
		fmt.Fprintln(w, "warning:", inLine(warning.String()))
	}
	if rest := len(list) - MaxShown; rest > 0 {
		fmt.Fprintf(w, "warning: %d more at /debug/workers\n", rest)
	}
}

// Handler returns the handler of all pages.
func (p *Pages) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/decisions", p.decisions)
	mux.HandleFunc("GET /debug/decisions/{id}", p.of(func(w http.ResponseWriter, r *http.Request, e *Entry) { p.show(w, r, []*Entry{e}, e) }))
	mux.HandleFunc("GET /debug/decisions/{id}/export", p.of(p.export))
	mux.HandleFunc("POST /debug/record", p.record)
	mux.HandleFunc("GET /debug/index", func(w http.ResponseWriter, _ *http.Request) { WriteJSON(w, p.Index()) })
	mux.HandleFunc("GET /debug/workers", func(w http.ResponseWriter, _ *http.Request) { WriteJSON(w, p.Workers()) })
	mux.HandleFunc("GET /debug/status", func(w http.ResponseWriter, _ *http.Request) { WriteJSON(w, p.Status()) })
	mux.HandleFunc("GET /debug/stream", p.stream)
	return mux
}

// WriteJSON answers with v, or with 503.
func WriteJSON(w http.ResponseWriter, v any) {
	defer unread.Add(-1)
	if unread.Add(1) > maxAnswers {
		http.Error(w, "too many pages are being read", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(v) //nolint:errchkjson // the client left
}

// countParam returns the parameter n of a request, or absent without one. If n is not a number from least to most, it
// answers the request with 400 and returns false.
func countParam(w http.ResponseWriter, r *http.Request, absent, least, most int) (n int, ok bool) {
	text := r.URL.Query().Get("n")
	if text == "" {
		return absent, true
	}
	n, err := strconv.Atoi(text)
	if ok = err == nil && n >= least && n <= most; !ok {
		http.Error(w, fmt.Sprintf("n=%q: want %d to %d", text, least, most), http.StatusBadRequest)
	}
	return n, ok
}

func (p *Pages) decisions(w http.ResponseWriter, r *http.Request) {
	n, ok := countParam(w, r, 20, 1, 10000)
	if !ok {
		return
	}
	list := p.Decisions.Last(n)
	p.show(w, r, list, list)
}

// show writes the entries as text, with the current warnings, if the request accepts text, and v as JSON otherwise.
func (p *Pages) show(w http.ResponseWriter, r *http.Request, list []*Entry, v any) {
	if !strings.Contains(r.Header.Get("Accept"), "text/plain") {
		WriteJSON(w, v)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	for i, e := range list {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprint(w, e.Text())
	}
	if len(list) > 0 && p.Warnings != nil {
		WriteWarnings(w, p.Warnings())
	}
}

// of returns a handler that calls serve with the decision that the request's path names, or answers 404.
func (p *Pages) of(serve func(http.ResponseWriter, *http.Request, *Entry)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if e := p.Decisions.Find(r.PathValue("id")); e != nil {
			serve(w, r, e)
			return
		}
		http.Error(w, "no decision with this id among those that are kept (explain.keep)", http.StatusNotFound)
	}
}

func (p *Pages) export(w http.ResponseWriter, _ *http.Request, e *Entry) {
	if e.Recorded == nil {
		http.Error(w, "this decision was not recorded: POST /debug/record before it", http.StatusNotFound)
		return
	}
	WriteJSON(w, e.Recorded)
}

func (p *Pages) record(w http.ResponseWriter, r *http.Request) {
	n, ok := countParam(w, r, 1, 1, maxRecorded)
	if !ok {
		return
	}
	p.Record(n)
	WriteJSON(w, map[string]int{"recording": n})
}

// MarshalJSON writes the entry's current state.
func (e *Entry) MarshalJSON() ([]byte, error) {
	type plain Entry
	e.mu.Lock()
	defer e.mu.Unlock()
	return json.Marshal((*plain)(e))
}

// Text returns the entry in readable form.
func (e *Entry) Text() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var b strings.Builder
	line := func(shown bool, format string, args ...any) {
		if shown {
			fmt.Fprintf(&b, format, args...)
		}
	}
	line(true, "%s %s %s (%s), %d bytes, model %q\n", inLine(e.ID), inLine(e.Method), inLine(e.Path), e.API, e.Bytes, e.Model)
	line(e.Conversation != "", "conversation %s\n", inLine(e.Conversation))
	line(e.Rejected != 0, "rejected with %d: %s %s\n", e.Rejected, e.Reason, inLine(e.Refusal))
	line(e.Rejected == 0, "%d prompt tokens, %d of them matched, to %s at %s via %s\n", e.PromptTokens, e.Matched, e.Target, e.Endpoint, e.Via)
	line(e.Cache != "", "cache: %s\n", e.Cache)
	line(e.Prefill != "", "prefill on %s\n", e.Prefill)
	for _, note := range e.PrefillNotes {
		line(true, "prefill: %s\n", inLine(note))
	}
	line(e.Degraded != "", "degraded: %s %s\n", e.Degraded, inLine(e.Refusal))
	line(e.Assumed != "", "assumed: %s\n", e.Assumed)
	line(e.Priority != 0, "priority %d\n", e.Priority)
	line(e.Tenant != "", "tenant %s\n", inLine(e.Tenant))
	line(e.Waited > 0, "waited  %s for capacity\n", e.Waited)
	for _, s := range e.Stages {
		line(true, "%-7s %s\n", s.Stage, s.Took)
	}
	if e.Explanation != nil {
		b.WriteString(e.Explanation.String())
	}
	for _, s := range e.Shadows {
		line(true, "shadow %s: %s, %d uncached tokens, %d queued there, estimated regret %d tokens\n", s.Policy, s.Target, s.Miss, s.Queue, s.Regret)
	}
	if a := e.After; a.Status != 0 {
		line(true, "answered %d", a.Status)
		line(a.Served != "", " by %s", a.Served)
		if a.Cached != nil {
			line(true, ", %d cached tokens", *a.Cached)
		}
		if a.Ended != nil {
			line(true, ", ended after %s", a.Ended.Sub(e.At))
		}
		b.WriteByte('\n')
	}
	return Printable(b.String())
}

//go:embed page
var pageFiles embed.FS

// pagePolicy lets the page load its own files and talk to its own server, and nothing else.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// Page serves the page for browsers at /. It holds no data: its script reads the debug pages.
func Page() http.Handler {
	files, err := fs.Sub(pageFiles, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	server := http.FileServerFS(files)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", pagePolicy)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Referrer-Policy", "no-referrer")
		w.Header().Set("Cache-Control", "no-cache")
		server.ServeHTTP(w, r)
	})
}

package decide

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// maxRecorded bounds how many decisions are recorded with the router's state.
const maxRecorded = 100

// Debug serves what is known of decisions, index, feeds and workers:
//
//	GET  /debug/decisions?n=20        the last decisions, newest first
//	GET  /debug/decisions/{id}        one of them; as text with Accept: text/plain
//	GET  /debug/decisions/{id}/export the decision with the state that it was made from
//	POST /debug/record?n=1            record the next n decisions for export
//	GET  /debug/index                 sizes per target and tier, state of each feed
//	GET  /debug/workers               the workers
func (d *Decider) Debug() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/decisions", d.debugDecisions)
	mux.HandleFunc("GET /debug/decisions/{id}", d.debugDecision)
	mux.HandleFunc("GET /debug/decisions/{id}/export", d.debugExport)
	mux.HandleFunc("POST /debug/record", d.debugRecord)
	mux.HandleFunc("GET /debug/index", d.debugIndex)
	mux.HandleFunc("GET /debug/workers", d.debugWorkers)
	return mux
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(v) //nolint:errchkjson // the client went away
}

func intParam(r *http.Request, name string, absent, most int) (int, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return absent, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, fmt.Errorf("%s=%q: want 1 to %d", name, text, most)
	}
	return n, nil
}

func (d *Decider) debugDecisions(w http.ResponseWriter, r *http.Request) {
	n, err := intParam(r, "n", 20, 10000)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, d.journal.last(n))
}

func (d *Decider) entry(w http.ResponseWriter, r *http.Request) *Entry {
	e := d.journal.find(r.PathValue("id"))
	if e == nil {
		http.Error(w, "no decision with this id among the last "+strconv.Itoa(len(d.journal.ring)), http.StatusNotFound)
	}
	return e
}

func (d *Decider) debugDecision(w http.ResponseWriter, r *http.Request) {
	e := d.entry(w, r)
	if e == nil {
		return
	}
	if strings.Contains(r.Header.Get("Accept"), "text/plain") {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprint(w, e.Text())
		return
	}
	writeJSON(w, e)
}

func (d *Decider) debugExport(w http.ResponseWriter, r *http.Request) {
	e := d.entry(w, r)
	if e == nil {
		return
	}
	if e.Recorded == nil {
		http.Error(w, "this decision was not recorded: POST /debug/record before it", http.StatusNotFound)
		return
	}
	writeJSON(w, e.Recorded)
}

func (d *Decider) debugRecord(w http.ResponseWriter, r *http.Request) {
	n, err := intParam(r, "n", 1, maxRecorded)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	d.mu.Lock()
	d.record = n
	d.mu.Unlock()
	writeJSON(w, map[string]int{"recording": n})
}

func (d *Decider) debugWorkers(w http.ResponseWriter, _ *http.Request) {
	type row struct {
		Name, Address, Engine, Role, Reason string
		Models                              []string
		Ranks                               int
		Ready, Draining                     bool
	}
	rows := []row{}
	for _, m := range d.fleet.Load().members {
		rows = append(rows, row{m.Name, m.Address, m.Engine, m.Role, m.Reason, m.Models, m.Ranks, m.Ready, m.Draining})
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.Name, b.Name) })
	writeJSON(w, rows)
}

// MarshalJSON writes an entry as it is now.
func (e *Entry) MarshalJSON() ([]byte, error) {
	type plain Entry
	e.mu.Lock()
	defer e.mu.Unlock()
	return json.Marshal((*plain)(e))
}

// Text is an entry for people.
func (e *Entry) Text() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s (%s), %d bytes, model %q\n", e.ID, e.Method, e.Path, e.API, e.Bytes, e.Model)
	if e.Conversation != "" {
		fmt.Fprintf(&b, "conversation %s\n", e.Conversation)
	}
	if e.Rejected != 0 {
		fmt.Fprintf(&b, "rejected with %d: %s %s\n", e.Rejected, e.Reason, e.Refusal)
	} else {
		fmt.Fprintf(&b, "%d prompt tokens, %d of them matched, to %s at %s via %s\n", e.PromptTokens, e.Matched, e.Target, e.Endpoint, e.Via)
	}
	if e.Prefill != "" {
		fmt.Fprintf(&b, "prefill on %s\n", e.Prefill)
	}
	for _, note := range e.PrefillNotes {
		fmt.Fprintf(&b, "prefill: %s\n", note)
	}
	if e.Degraded != "" {
		fmt.Fprintf(&b, "degraded: %s %s\n", e.Degraded, e.Refusal)
	}
	if e.Assumed != "" {
		fmt.Fprintf(&b, "assumed: %s\n", e.Assumed)
	}
	if e.Waited > 0 {
		fmt.Fprintf(&b, "waited  %s for room\n", e.Waited)
	}
	for _, s := range e.Stages {
		fmt.Fprintf(&b, "%-7s %s\n", s.Stage, s.Took)
	}
	if e.Explanation != nil {
		b.WriteString(e.Explanation.String())
	}
	if a := e.After; a.Status != 0 {
		fmt.Fprintf(&b, "answered %d", a.Status)
		if a.Served != "" {
			fmt.Fprintf(&b, " by %s", a.Served)
		}
		if a.Cached != nil {
			fmt.Fprintf(&b, ", %d cached tokens", *a.Cached)
		}
		if a.Ended != nil {
			fmt.Fprintf(&b, ", ended after %s", a.Ended.Sub(e.At))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

package routing

import (
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Report is an engine's load report for one target. It reveals requests that this router did not place.
type Report struct {
	// At is when its measurement began.
	At time.Duration
	// Seq numbers the reports of one source; 0 if they are not numbered.
	Seq uint64
	// Full makes the report replace the last one regardless of its number, as after a restart of the source.
	Full bool
	// Running and Waiting are requests.
	Running, Waiting int64
	// KVUsage is the used part of the KV cache, 0 to 1; negative if unknown.
	KVUsage float64
}

// reported is the last accepted report of a target, joined with the ledger.
type reported struct {
	known    bool
	At       time.Duration `json:"at"`
	Received time.Duration `json:"received"`
	// Foreign and ForeignTokens are the requests and queued tokens on the engine that the ledger did not have when the
	// report came. If a request has ended since the measurement began, only load that the previous report showed counts.
	Foreign       int64   `json:"foreign"`
	ForeignTokens int64   `json:"foreign_tokens"`
	KVUsage       float64 `json:"kv_usage"`
	Running       int64   `json:"running"`
	Waiting       int64   `json:"waiting"`
	Seq           uint64  `json:"seq"`
	// Seen is Foreign by this report alone, Before the ForeignTokens of the last one. Full is set if two consecutive
	// reports show a full KV cache, Nearly if this one does; see Router.saturated.
	Seen   int64 `json:"seen,omitempty"`
	Before int64 `json:"before,omitempty"`
	Nearly bool  `json:"nearly,omitempty"`
	Full   bool  `json:"full,omitempty"`
	// Started exceeds the Numbers of the reservations that the engine has started on, because it reported no waiting
	// requests after they were sent. Without it, requests that are not streamed would count as queued until they end.
	Started uint64 `json:"started,omitempty"`
}

// Report stores a target's report. It returns false, and changes nothing, if the
// report is older than the last one, repeats its number or is for an unknown slot.
func (r *Router) Report(now time.Duration, slot kvindex.Slot, rep Report) bool {
	t := r.at(slot)
	if t == nil {
		return false
	}
	if !t.report.accepts(rep) {
		r.staleReports++
		return false
	}
	t.report.set(now, rep, t.load.Sequences+t.load.Transferring, t.released, r.config.WaitingTokens)
	r.noteStarted(t, rep)
	return true
}

// KVUsage returns the used share of a target's KV cache as last reported, less than 0 if it is not known.
func (r *Router) KVUsage(slot kvindex.Slot) float64 {
	if t := r.at(slot); t != nil && t.report.known {
		return t.report.KVUsage
	}
	return -1
}

// ReportWorker stores a report of a whole worker, whose ranks share one batch or do not report separately. Load that
// the ledger does not explain is spread evenly over its ranks. It returns the number of targets that accepted it.
func (r *Router) ReportWorker(now time.Duration, worker string, rep Report) int {
	entry, ok := r.workers[worker]
	if !ok {
		return 0
	}
	n, active, released := int64(entry.ranks), int64(0), time.Duration(0)
	for _, slot := range r.order {
		if t := &r.targets[slot]; t.worker == entry.number {
			active += t.load.Sequences + t.load.Transferring
			released = max(released, t.released)
		}
	}
	taken := 0
	for _, slot := range r.order {
		t := &r.targets[slot]
		if t.worker != entry.number {
			continue
		}
		if !t.report.accepts(rep) {
			r.staleReports++
			continue
		}
		t.report.set(now, rep, active, released, r.config.WaitingTokens)
		t.report.Foreign = ceilDiv(t.report.Foreign, n)
		t.report.ForeignTokens = ceilDiv(t.report.ForeignTokens, n)
		t.report.Running = ceilDiv(rep.Running, n)
		t.report.Waiting = ceilDiv(rep.Waiting, n)
		r.noteStarted(t, rep)
		taken++
	}
	return taken
}

// noteStarted marks all reservations of a target as started if a report without waiting requests was
// measured more than onItsWay after the last booking.
func (r *Router) noteStarted(t *target, rep Report) {
	if rep.Waiting == 0 && rep.At > t.booked+onItsWay {
		t.report.Started, t.startedTokens = r.bookings+1, t.load.Queue
	}
}

// StaleReports is the number of reports that were not accepted.
func (r *Router) StaleReports() uint64 { return r.staleReports }

func (p *reported) accepts(rep Report) bool {
	if !p.known || rep.Full {
		return true
	}
	if rep.Seq != 0 || p.Seq != 0 {
		return rep.Seq > p.Seq
	}
	return rep.At >= p.At
}

// set stores a report. active is the number of sequences in the ledger, which engines report, released is when the last one ended.
func (p *reported) set(now time.Duration, rep Report, active int64, released time.Duration, waitingTokens int64) {
	old := *p
	*p = reported{known: true, At: rep.At, Received: now, Seq: rep.Seq, Running: rep.Running, Waiting: rep.Waiting, KVUsage: rep.KVUsage}
	p.Seen = max(rep.Running+rep.Waiting-active, 0)
	if p.Foreign = p.Seen; released > rep.At {
		p.Foreign = min(p.Seen, old.Seen)
	}
	p.ForeignTokens = min(p.Foreign, rep.Waiting) * waitingTokens
	p.Started = old.Started
	p.Before = old.ForeignTokens
	p.Nearly = rep.Waiting > 0 && rep.KVUsage >= fullKV
	p.Full = p.Nearly && old.Nearly || old.Full && rep.KVUsage >= roomKV
}

// fresh reports whether the report is not too old.
func (p *reported) fresh(now, ttl time.Duration) bool { return p.known && now-p.At <= ttl }

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

package feed

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Tail follows a source and prints what happens, one JSON object per line, until ctx ends: every
// event as it is applied, every gap, clear, change of state and warning, and with a short delay
// dropped events and failed connections. notes receives messages for people: about a connection
// that cannot be made yet, and each one that is made or lost. Tail returns the first error of out.
func Tail(ctx context.Context, src Source, out, notes io.Writer) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	p := &printSink{enc: json.NewEncoder(out), failed: stop, notes: notes, endpoint: cmp.Or(src.Endpoint, src.PollURL)}
	f, err := Start(ctx, src, p)
	if err != nil {
		return err
	}
	p.notef("waiting for events of %s", p.endpoint)
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for before := (Status{}); ; {
		select {
		case <-look.C:
			now := f.Status()
			p.news(src.Worker, &before, &now)
			before = now
		case <-ctx.Done():
			f.Close()
			return p.err
		}
	}
}

// lookEvery is how often Tail checks for changes that are not reported to sinks.
const lookEvery = 200 * time.Millisecond

// news prints the events dropped between two states of a feed, and why it cannot connect if the reason is new.
func (p *printSink) news(worker string, before, now *Status) {
	dropped := map[Reason]uint64{}
	for why, n := range now.Dropped {
		if n > before.Dropped[why] {
			dropped[why] = n - before.Dropped[why]
		}
	}
	if len(dropped) > 0 {
		p.print(printed{What: "dropped", Target: worker, Dropped: dropped})
	}
	if now.Connects > before.Connects && (before.Connects == 0 || p.lost) {
		p.notef("connected")
		p.lost = false
	}
	if now.Errors > before.Errors && now.Connects == before.Connects && !p.lost {
		p.notef("no connection to %s, trying again until it is there: %s", p.endpoint, now.LastError)
		p.lost = true
	}
	if now.LastError != "" && now.LastError != p.lastError {
		p.lastError = now.LastError
		p.print(printed{What: "error", Target: worker, Detail: now.LastError})
	}
}

// printSink prints calls as JSON lines.
type printSink struct {
	mu     sync.Mutex
	enc    *json.Encoder
	err    error
	failed func()
	// lastError is the last error that news printed.
	lastError string
	notes     io.Writer // for people; nil for none
	lost      bool      // notes received the loss of the connection
	endpoint  string    // for notes
}

// notef writes a line for people. Write errors are ignored.
func (p *printSink) notef(format string, args ...any) {
	if p.notes != nil {
		_, _ = fmt.Fprintf(p.notes, format+"\n", args...)
	}
}

// printed is one printed line. What is stored, removed, cleared (events), clear (the feed
// cleared the target), state, warning, dropped or error.
type printed struct {
	What      string   `json:"what"`
	Target    string   `json:"target"`
	Tier      string   `json:"tier,omitempty"`
	Group     int32    `json:"group,omitempty"`
	Hashes    []uint64 `json:"hashes,omitempty"`
	Parent    *uint64  `json:"parent,omitempty"`
	BlockSize int      `json:"block_size,omitempty"`
	Window    int      `json:"window,omitempty"`
	Tokens    []uint32 `json:"tokens,omitempty"`
	Adapter   string   `json:"adapter,omitempty"`
	Salt      string   `json:"salt,omitempty"`
	Extra     []uint64 `json:"extra,omitempty"`
	State     string   `json:"state,omitempty"`
	Reason    Reason   `json:"reason,omitempty"`
	Detail    string   `json:"detail,omitempty"`
	// Dropped counts the events of a batch that were not applied.
	Dropped map[Reason]uint64 `json:"dropped,omitempty"`
}

var (
	kindNames = [...]string{kvindex.Stored: "stored", kvindex.Removed: "removed", kvindex.Cleared: "cleared"}
	tierNames = [...]string{kvindex.Device: "device", kvindex.Host: "host", kvindex.Disk: "disk", kvindex.External: "external"}
)

func (p *printSink) print(l printed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return
	}
	if p.err = p.enc.Encode(l); p.err != nil {
		p.failed()
	}
}

// Apply prints an event.
func (p *printSink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	l := printed{What: kindNames[ev.Kind], Target: t.String()}
	if ev.Kind != kvindex.Cleared {
		l.Tier, l.Group = tierNames[ev.Tier], ev.Group
		for _, h := range ev.Hashes {
			l.Hashes = append(l.Hashes, uint64(h))
		}
	}
	if ev.Kind == kvindex.Stored {
		if ev.HasParent {
			parent := uint64(ev.Parent)
			l.Parent = &parent
		}
		l.BlockSize, l.Window, l.Tokens, l.Adapter, l.Salt, l.Extra = ev.BlockSize, ev.Window, ev.Tokens, ev.Adapter, ev.Salt, ev.Extra
	}
	p.print(l)
	return nil
}

// Clear prints that a target was cleared.
func (p *printSink) Clear(t kvindex.Target, why Reason) {
	p.print(printed{What: "clear", Target: t.String(), Reason: why})
}

// State prints a change of state.
func (p *printSink) State(t kvindex.Target, s State, why Reason) {
	p.print(printed{What: "state", Target: t.String(), State: s.String(), Reason: why})
}

// Warn prints a warning.
func (p *printSink) Warn(t kvindex.Target, why Reason, detail string) {
	p.print(printed{What: "warning", Target: t.String(), Reason: why, Detail: detail})
}

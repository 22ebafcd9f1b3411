package feed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// maxPollBody limits the answer to one poll, maxPollEvent one event of it, in bytes. An event of a million
// tokens has 60 MB.
const maxPollBody, maxPollEvent = 256 << 20, 64 << 20

// poll empties TensorRT-LLM's event buffer repeatedly. A poll drains the server, so there must
// be only one poller of a worker in the whole installation. Requests that finish trigger another
// poll; any number of triggers during a poll causes one more.
func (f *Feed) poll(ctx context.Context) {
	client := &http.Client{
		// Events must come from the worker's own address.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport:     &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10},
		// Events that are not read by then are lost; the gap in their numbers shows it.
		Timeout: f.src.PollTimeout,
	}
	defer client.CloseIdleConnections()
	timer := time.NewTimer(0)
	defer timer.Stop()
	wait := f.src.ReconnectMin
	for {
		select {
		case <-ctx.Done():
			f.down()
			return
		case <-timer.C:
		case <-f.poke:
		}
		next := f.src.PollInterval
		if err := f.pollOnce(ctx, client); err != nil {
			f.failed(ctx, err)
			f.down()
			// While the server is broken, triggers must not shorten the wait.
			sleep(ctx, jitter(wait))
			wait = min(2*wait, f.src.ReconnectMax)
			next = 0
		} else {
			wait = f.src.ReconnectMin
		}
		timer.Reset(next)
	}
}

// rank returns the applier of a rank's sequence. The caller holds the lock.
func (f *Feed) rank(r int32) *applier {
	if !f.src.RankFromBatch {
		r = f.src.Rank
	}
	a := f.byRank[r]
	if a == nil {
		a = &applier{src: &f.src, dec: NewDecoder(f.src.Engine, f.src.BlockSize), sink: f.main.sink, machine: NewMachine(f.src.Machine), counters: f.counters, mu: f.mu,
			targets: []kvindex.Target{{Worker: f.src.Worker, Rank: r}}}
		f.byRank[r] = a
	}
	return a
}

func (f *Feed) down() {
	f.mu.enter()
	defer f.mu.leave()
	for _, a := range f.byRank {
		a.do(a.machine.Down())
	}
}

func (f *Feed) pollOnce(ctx context.Context, client *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.src.PollURL, http.NoBody)
	if err != nil {
		return fmt.Errorf("poll: %w", err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("poll: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("poll: status %d", resp.StatusCode)
	}
	return f.polled(io.LimitReader(resp.Body, maxPollBody), maxPollEvent)
}

// polled applies the events of one answer, a JSON array, as they arrive. most bounds an event in bytes.
func (f *Feed) polled(body io.Reader, most int64) error {
	event := &io.LimitedReader{R: body, N: most}
	dec := json.NewDecoder(event)
	if t, err := dec.Token(); err != nil || t != json.Delim('[') {
		return errors.New("poll: answer is not a JSON array")
	}
	f.mu.enter()
	f.counters.connects++
	for _, a := range f.byRank {
		a.up()
	}
	f.mu.leave()
	for dec.More() {
		var raw json.RawMessage
		err := dec.Decode(&raw)
		f.mu.enter()
		if err != nil {
			f.counters.dropped[Malformed]++
			f.mu.leave()
			return fmt.Errorf("poll: %w", err)
		}
		f.polledEvent(raw)
		f.mu.leave()
		event.N = most
	}
	return nil
}

// polledEvent applies an event of a polled answer. The caller holds the lock.
func (f *Feed) polledEvent(raw json.RawMessage) {
	var head trtHead
	if err := json.Unmarshal(raw, &head); err != nil {
		f.counters.dropped[Malformed]++
		return
	}
	rank := f.src.Rank
	if head.Rank != nil && *head.Rank >= 0 {
		rank = *head.Rank
		if f.src.RankFromBatch && rank >= maxRanks {
			f.main.wrongRank(rank)
			return
		}
	}
	a := f.rank(rank)
	a.up()
	if head.ID == nil {
		// A bare body has no number, so missing ones cannot be detected.
		a.apply(raw, Cursor{})
		return
	}
	restarts := a.machine.counts.Restarts
	a.do(a.machine.Live(*head.ID, raw))
	if a.machine.counts.Restarts == restarts {
		return
	}
	for _, b := range f.byRank { // the others are of the same engine
		if b != a {
			b.do(b.machine.Restarted())
		}
	}
}

// up reports to a machine that was down that its server answers again.
func (a *applier) up() {
	if a.machine.State() == Stale && !a.machine.warned {
		a.do(a.machine.Up())
	}
}

// trtHead contains the fields of an event that the poller uses.
type trtHead struct {
	ID   *uint64 `json:"event_id"`
	Rank *int32  `json:"attention_dp_rank"`
}

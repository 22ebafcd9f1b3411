package disagg

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// RunnerOptions configure how prefill legs are sent.
type RunnerOptions struct {
	// Proxy and Header make legs go through Envoy, see NewSender.
	Proxy, Header string
	// Timeout bounds one leg.
	Timeout time.Duration
	// Budget bounds the time from a request's arrival until its last leg is cancelled, waiting for
	// capacity included; 0: no bound. It must be less than Envoy's message timeout.
	Budget time.Duration
	// HeadStart is how long Run waits for the failure of a leg that runs concurrently with the
	// decode leg: a worker that refuses connections fails immediately, and then another one can
	// be tried. The decode engine would wait for its blocks meanwhile anyway.
	HeadStart time.Duration
}

// Runner sends prefill legs and waits for their answers. It has no part in routing. It is safe for concurrent use.
type Runner struct {
	RunnerOptions

	Protocol *Protocol
	// Answers bounds the answers that are held until Exchange.End, Bodies the bodies and headers of legs until their answers.
	Answers, Bodies Room

	sender *Sender
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// NewRunner returns a runner for a connector. The caller must call Close.
func NewRunner(connector string, p Options, o RunnerOptions) (*Runner, error) {
	r := &Runner{RunnerOptions: o, sender: NewSender(o.Proxy, o.Header)}
	p.Get = r.sender.Get
	r.ctx, r.cancel = context.WithCancel(context.Background())
	var err error
	r.Protocol, err = New(connector, p)
	return r, err
}

// Close cancels the running legs and waits for them.
func (r *Runner) Close() {
	r.cancel()
	r.wg.Wait()
	r.sender.Close()
}

// Call is one attempt to prefill.
type Call struct {
	// Exchange has both sides and its own Unique (Begin).
	Exchange *Exchange
	// Headers yields the client's headers.
	Headers func(yield func(name, value string))
	Body    []byte
	// Edits are applied after those of the protocol.
	Edits []body.Edit
	// Within limits the duration of the whole attempt.
	Within time.Duration
	// Sent is called immediately before a leg is sent, so not for a protocol without one.
	Sent func()
	// Ended is called when a concurrent leg has ended, with its usage, nil if it failed. Late is called after Ended if
	// the leg failed after Run had returned. Both are called from another goroutine.
	Ended func(usage *Usage)
	Late  func(*FailureError)
}

// Result is a prefill leg that has been answered, or continues while decode runs.
type Result struct {
	// Decode is the leg to the decode engine.
	Decode Leg
	// Answer is the prefill engine's, nil for a concurrent leg.
	Answer *Answer
	// Stop cancels a leg that continues; nil if there is none.
	Stop context.CancelFunc
}

// Run sends the leg to the exchange's prefill side and, unless the protocol runs both legs concurrently, waits for its
// answer. If the prefill answer is the whole answer, the failure has the outcome Ended and wraps a *FinalError.
func (r *Runner) Run(ctx context.Context, c *Call) (Result, *FailureError) {
	res, err := r.run(ctx, c)
	if err == nil {
		return res, nil
	}
	r.Protocol.Failed(&c.Exchange.Prefill)
	if final, ok := errors.AsType[*FinalError](err); ok {
		return Result{}, &FailureError{Outcome: Ended, Err: final}
	}
	return Result{}, AsFailure(err)
}

func (r *Runner) run(ctx context.Context, c *Call) (res Result, err error) {
	x := c.Exchange
	if r.Protocol.NoLeg {
		res.Decode, err = r.Protocol.Decode(x, nil)
		return res, err
	}
	asking, cancel := context.WithTimeout(ctx, c.Within)
	defer cancel()
	leg, err := r.Protocol.Prefill(asking, x)
	if err != nil {
		return res, err
	}
	leg.Edits = append(leg.Edits, c.Edits...)
	if !r.Protocol.AtOnce {
		ctx = asking // where the legs run concurrently, ctx bounds both
	}
	body, err := leg.Body(ctx, x.Request)
	if err != nil && ctx.Err() != nil {
		return res, &FailureError{Outcome: outcomeOfError(ctx, err), Err: err}
	}
	if err != nil {
		return res, err
	}
	if body == nil {
		body = append([]byte(nil), c.Body...)
	}
	// The request's memory must not be used after Run.
	out := &sending{x.Prefill.Address, strings.Clone(cmp.Or(leg.Path, x.Path)), x.LegHeader(&leg, c.Headers), body}
	sent, size := &charge{room: &r.Bodies}, int64(len(body))
	for name, values := range out.header {
		for _, v := range values {
			size += int64(len(name) + len(v))
		}
	}
	if err := sent.take(size); err != nil {
		sent.free()
		return res, &FailureError{Outcome: NoRoom, Err: err, Unsent: true}
	}
	if r.Protocol.AtOnce {
		return r.concurrent(ctx, c, out, sent)
	}
	defer sent.free()
	c.Sent()
	x.charge.room = &r.Answers
	raw, err := r.sender.Send(ctx, out, &x.charge, nil)
	if err != nil {
		return res, err
	}
	if res.Answer, err = ParseAnswer(raw); err != nil {
		return res, err
	}
	res.Decode, err = r.Protocol.Decode(x, res.Answer)
	return res, err
}

// concurrent starts a leg that runs while the decode leg does, and frees sent at its end. Only the usage of its answer is needed.
func (r *Runner) concurrent(ctx context.Context, c *Call, leg *sending, sent *charge) (res Result, err error) {
	if res.Decode, err = r.Protocol.Decode(c.Exchange, nil); err != nil {
		sent.free()
		return res, err
	}
	c.Sent()
	running, stop := context.WithTimeout(r.ctx, r.Timeout)
	early := make(chan error) // read until the head start is over
	over := make(chan struct{})
	ended, late := c.Ended, c.Late // the goroutine must not keep the request alive
	r.wg.Go(func() {
		defer stop()
		defer sent.free()
		seen, charged := body.NewUsageScanner(false), charge{room: &r.Answers}
		defer charged.free()
		_, err := r.sender.Send(running, leg, &charged, seen)
		var usage *Usage
		if err == nil {
			usage = usageOf(seen)
		}
		ended(usage)
		select {
		case early <- err:
			return
		case <-over:
		}
		if err != nil {
			late(AsFailure(err))
		}
	})
	wait := time.NewTimer(r.HeadStart)
	defer wait.Stop()
	select {
	case err := <-early:
		return res, err
	case <-ctx.Done():
		stop()
		close(over)
		return res, &FailureError{Outcome: Cancelled, Err: ctx.Err()}
	case <-wait.C:
		close(over)
		res.Stop = stop
		return res, nil
	}
}

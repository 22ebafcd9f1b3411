package disagg

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// Protocol is one connector. It is safe for concurrent use.
type Protocol struct {
	// Name is the value of disagg.connector.
	Name string
	// NoLeg says that Kvlane sends no prefill leg: something beside the decode engine
	// does.
	NoLeg bool
	// AtOnce says that both legs run at the same time: the prefill answer is read and
	// dropped. Without it the decode leg follows the prefill answer.
	AtOnce bool
	// Always says that a decode engine cannot compute a prompt by itself.
	Always bool
	// Named says that the prefill leg names the decode engine: no other can take its
	// leg.
	Named bool
	// Portable says that a prefill answer serves any decode engine, not only the one
	// that the prefill leg was made for.
	Portable bool

	// addressesInID says that engines read the address of their peer from the request id.
	addressesInID bool
	apis          map[body.API]bool
	// arranged says what a client that is trusted has arranged itself, "" if nothing.
	arranged func(r *body.Request) string
	// single says that a transfer has one consumer: one prompt, one answer.
	single bool
	// refuses says why a request cannot be split beyond that, "" if it can.
	refuses func(r *body.Request, ids []uint32) string
	prefill func(ctx context.Context, p *Protocol, x *Exchange) (Leg, error)
	decode  func(p *Protocol, x *Exchange, a *Answer) (Leg, error)
	// local are the edits of a request that is not split and whose client is trusted.
	local func(r *body.Request) []body.Edit
	// found keeps what workers say of themselves; nil if the protocol asks nothing.
	found *found

	options Options
	last    *atomic.Uint64 // the last number given by snowflake
}

// Options of a Protocol.
type Options struct {
	// Append lets LMCache's decode leg begin behind the prefill engine's token.
	Append bool
	// Trust leaves what a client says of transfers in its request.
	Trust bool
	// Machine differs between replicas; 10 bits of it are used.
	Machine uint64
	// Get reads a small JSON page of a worker, for protocols that ask (Mooncake,
	// TensorRT-LLM generation first). address is what is dialled; api says that it is
	// the worker's API and not a port of its own.
	Get func(ctx context.Context, address, path string, api bool) ([]byte, error)
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// protocols are the connectors by name.
var protocols = map[string]func() *Protocol{
	"nixl":                    nixl,
	"nixl-push":               nixlPush,
	"moriio":                  moriio,
	"moriio-write":            moriioWrite,
	"mooncake":                mooncake,
	"p2p-nccl":                p2pNCCL,
	"sharedstorage":           sharedStorage,
	"lmcache":                 lmcache,
	"sglang":                  sglang,
	"trtllm":                  trtContextFirst,
	"trtllm-generation-first": trtGenerationFirst,
	"sidecar":                 sidecar,
}

// Names are all connectors, sorted.
func Names() []string { return slices.Sorted(maps.Keys(protocols)) }

// New returns a protocol by name.
func New(name string, o Options) (*Protocol, error) {
	make, ok := protocols[name]
	if !ok {
		return nil, fmt.Errorf("no connector %q", name)
	}
	p := make()
	p.Name, p.options, p.last = name, o, new(atomic.Uint64)
	if p.options.Now == nil {
		p.options.Now = time.Now
	}
	if p.found != nil && o.Get == nil {
		return nil, fmt.Errorf("connector %s: nothing to ask workers with", name)
	}
	return p, nil
}

// Refuses says why a request cannot be split, "" if it can be. ids are those of its
// whole prompt, nil if they are not known.
func (p *Protocol) Refuses(r *body.Request, ids []uint32) string {
	switch {
	case !p.apis[r.API]:
		return "not with this API"
	case r.Form == body.FormNone:
		return "no prompt"
	case p.single && r.Choices() > 1:
		return "more than one answer"
	case r.Has(body.FieldPreviousResponseID):
		return "the engine holds its state"
	}
	if p.options.Trust && p.arranged != nil {
		if why := p.arranged(r); why != "" {
			return why
		}
	}
	if p.refuses != nil {
		return p.refuses(r, ids)
	}
	return ""
}

// Impossible says why decode engines cannot serve a request at all, "" if they may:
// it cannot be split, and they compute no prompt by themselves.
func (p *Protocol) Impossible(r *body.Request, ids []uint32) string {
	if !p.Always || !p.apis[r.API] || p.refuses == nil {
		return ""
	}
	return p.refuses(r, ids)
}

// Prefill is the prefill leg. It may ask the prefill worker about itself; what it
// said is kept.
func (p *Protocol) Prefill(ctx context.Context, x *Exchange) (Leg, error) {
	leg, err := p.prefill(ctx, p, x)
	if err != nil {
		return Leg{}, err
	}
	leg.Edits = append(p.clean(x.Request), leg.Edits...)
	if p.AtOnce {
		// The decode leg must be possible before the prefill leg starts.
		if _, err := p.Decode(x, nil); err != nil {
			return Leg{}, err
		}
	}
	return leg, nil
}

// Decode is the decode leg. answer is the prefill leg's, nil with AtOnce. Errors
// are ErrNoParameters, perhaps wrapped, and *FinalError.
func (p *Protocol) Decode(x *Exchange, answer *Answer) (Leg, error) {
	leg, err := p.decode(p, x, answer)
	if err == nil {
		leg.Edits = append(p.clean(x.Request), leg.Edits...)
	}
	return leg, err
}

// Local are the edits of a request that is not split: what a client says of a prefill
// leg must not reach an engine that then waits for one.
func (p *Protocol) Local(r *body.Request) []body.Edit {
	if p.options.Trust && p.local != nil {
		return p.local(r)
	}
	return p.clean(r)
}

// FinalError says that the prefill answer is the whole answer: there is nothing to
// decode.
type FinalError struct {
	// Body is the answer for the client, server-sent events if Stream.
	Body   []byte
	Stream bool
}

// Error makes it an error of Decode.
func (*FinalError) Error() string { return "the prefill answer is final" }

// Answer is a checked prefill answer.
type Answer struct{ raw []byte }

// ParseAnswer checks that an answer is a JSON object.
func ParseAnswer(raw []byte) (*Answer, error) {
	if err := body.Valid(raw); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoParameters, err)
	}
	start := 0
	for raw[start] == ' ' || raw[start] == '\n' || raw[start] == '\r' || raw[start] == '\t' {
		start++
	}
	if raw[start] != '{' {
		return nil, fmt.Errorf("%w: no object", ErrNoParameters)
	}
	return &Answer{raw[start:]}, nil
}

// member is a top-level member of the answer, nil if it is not there.
func (a *Answer) member(name string) []byte { return body.Member(a.raw, name) }

var errNoAnswer = errors.New("the decode leg needs the prefill answer")

// apis makes a set.
func apis(list ...body.API) map[body.API]bool {
	out := map[body.API]bool{}
	for _, a := range list {
		out[a] = true
	}
	return out
}

// snowflake gives a number that no other replica gives: 41 bits of milliseconds, 10
// of the machine, 12 of a counter, as TensorRT-LLM makes them. They grow.
func (p *Protocol) snowflake() uint64 {
	const low = 12
	now := uint64(p.options.Now().UnixMilli()) & (1<<41 - 1)
	for {
		last := p.last.Load()
		next := now << low
		if next <= last {
			next = last + 1
		}
		if p.last.CompareAndSwap(last, next) {
			return next>>low<<22 | (p.options.Machine&(1<<10-1))<<low | next&(1<<low-1)
		}
	}
}

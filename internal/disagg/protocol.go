package disagg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// Protocol is the protocol of one connector. It is safe for concurrent use.
type Protocol struct {
	// Name is the value of disagg.connector.
	Name string
	// NoLeg: the prefill request is sent by a sidecar of the decode engine, not by Kvlane.
	NoLeg bool
	// AtOnce: prefill and decode run concurrently; the decode leg does not need the prefill
	// answer. Otherwise the decode leg follows the prefill answer.
	AtOnce bool
	// Always: a decode engine cannot compute a prompt by itself.
	Always bool
	// Named: the prefill request carries the decode engine's address, so decode cannot be re-targeted.
	Named bool
	// Portable: a prefill answer is valid for any decode engine, not only for the one that the prefill leg was built for.
	Portable bool
	// SendsIDs: the decode leg carries the ids of the whole prompt.
	SendsIDs bool

	// addressesInID: engines read the address of their peer from the request id.
	addressesInID bool
	apis          []body.API
	// arranged returns the parts of the protocol that a trusted client has set up itself, "" if none.
	arranged func(r *body.Request) string
	// single: a transfer has one consumer, so a request may have only one prompt and one choice.
	single bool
	// refuses returns why a request cannot be split beyond the common reasons, "" if it can.
	refuses func(r *body.Request, ids []uint32) string
	// edited returns the edits that only the prefill leg has.
	edited  func(api body.API) [3][]body.Edit
	prefill func(ctx context.Context, p *Protocol, x *Exchange) (Leg, error)
	decode  func(p *Protocol, x *Exchange, a *Answer) (Leg, error)
	// local returns the edits of a trusted client's request that is not split.
	local func(r *body.Request) []body.Edit
	// pages caches what workers publish about themselves; nil if the protocol does not need it.
	pages *lru.Cache[string, workerPage]

	options Options
}

// Options of a Protocol.
type Options struct {
	// Append makes LMCache's decode leg start after the prefill engine's token.
	Append bool
	// Trust keeps the transfer parameters of clients' requests.
	Trust bool
	// Random returns 64 random bits; nil means rand.Uint64.
	Random func() uint64
	// Get fetches a small JSON page from a worker, for protocols that need one (Mooncake, TensorRT-LLM generation
	// first). address is the address to dial; api reports whether it is the worker's API rather than a separate port.
	Get func(ctx context.Context, address, path string, api bool) ([]byte, error)
}

// protocols maps the names of connectors to constructors.
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

// New returns the protocol of a connector. It fails for unknown names.
func New(name string, o Options) (*Protocol, error) {
	make, ok := protocols[name]
	if !ok {
		return nil, fmt.Errorf("no connector %q", name)
	}
	p := make()
	p.Name, p.options = name, o
	if p.options.Random == nil {
		p.options.Random = rand.Uint64
	}
	if p.pages != nil && o.Get == nil {
		return nil, fmt.Errorf("connector %s: nothing to ask workers with", name)
	}
	return p, nil
}

// Refuses returns why a request cannot be split, "" if it can. ids are the token ids of its
// whole prompt, nil if not known.
func (p *Protocol) Refuses(r *body.Request, ids []uint32) string {
	switch {
	case !slices.Contains(p.apis, r.API):
		return "not with this API"
	case r.Form == body.FormNone:
		return "no prompt"
	case p.single && r.Choices(true) > 1:
		return "more than one answer"
	case r.Has(body.FieldPreviousResponseID):
		return "the engine holds its state"
	}
	if p.options.Trust && p.arranged != nil {
		if why := p.arranged(r); why != "" {
			return why
		}
	}
	return p.own(r, ids)
}

// own returns the protocol's own reasons.
func (p *Protocol) own(r *body.Request, ids []uint32) string {
	if p.refuses != nil {
		if why := p.refuses(r, ids); why != "" {
			return why
		}
	}
	if name := p.unclear(r, ids != nil); name != "" {
		return "a value of " + name + " that the engine may refuse"
	}
	return ""
}

// Impossible returns why decode engines cannot serve a request at all, "" if they can: the
// request cannot be split, and the decode engines of this protocol compute no prompts.
func (p *Protocol) Impossible(r *body.Request, ids []uint32) string {
	if !p.Always || !slices.Contains(p.apis, r.API) {
		return ""
	}
	return p.own(r, ids)
}

// Prefill returns the prefill leg. It may fetch a page from the prefill worker; the page is cached.
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

// Decode returns the decode leg. answer is the prefill leg's, nil with AtOnce. The error may be,
// or wrap, ErrNoParameters or a *FinalError.
func (p *Protocol) Decode(x *Exchange, answer *Answer) (Leg, error) {
	leg, err := p.decode(p, x, answer)
	if err == nil {
		leg.Edits = append(p.clean(x.Request), leg.Edits...)
	}
	return leg, err
}

// Local returns the edits of a request that is not split: a client's prefill parameters must not
// reach an engine that would then wait for a prefill leg.
func (p *Protocol) Local(r *body.Request) []body.Edit {
	if p.options.Trust && p.local != nil {
		return p.local(r)
	}
	return p.clean(r)
}

// FinalError means that the prefill answer is the whole answer: there is nothing to decode.
type FinalError struct {
	// Body is the answer for the client, as server-sent events if Stream is set.
	Body   []byte
	Stream bool
}

// Error implements error.
func (*FinalError) Error() string { return "the prefill answer is final" }

// Answer is a checked prefill answer.
type Answer struct{ raw []byte }

// ParseAnswer checks that an answer is a JSON object.
func ParseAnswer(raw []byte) (*Answer, error) {
	if err := body.Valid(raw); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoParameters, err)
	}
	raw = bytes.TrimLeft(raw, " \t\r\n")
	if raw[0] != '{' {
		return nil, fmt.Errorf("%w: no object", ErrNoParameters)
	}
	return &Answer{raw}, nil
}

// member returns a top-level member of the answer, nil if it is missing.
func (a *Answer) member(name string) []byte { return body.Member(a.raw, name) }

var errNoAnswer = errors.New("the decode leg needs the prefill answer")

// transferID returns a number for a request that no other replica chooses: 62 random bits, above the numbers that
// TensorRT-LLM's servers give themselves (below 2^42).
func (p *Protocol) transferID() uint64 { return 1<<62 | p.options.Random()>>2 }

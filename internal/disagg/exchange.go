package disagg

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

// requestIDHeader has the same value on both legs.
const requestIDHeader = "x-request-id"

// NoRank is the Rank of a Side whose worker has no ranks, or whose engine chooses the rank.
const NoRank = -1

// Header is one header; Name is lower case.
type Header struct{ Name, Value string }

// Side is one of the two targets of a request.
type Side struct {
	// Worker is the worker's name. Generation distinguishes successive workers of the same name.
	Worker     string
	Generation uint64
	// Address is "ip:port" of its HTTP API.
	Address string
	// Rank is the rank within the engine, counted from 0, NoRank if unset. Ranks is the number
	// of ranks, 0 if the worker has none.
	Rank, Ranks int
	// ByHeader reports that the header steering.Rank carries the rank.
	ByHeader bool
	// Settings are the worker's disaggregation settings.
	Settings config.WorkerDisagg
}

func (s *Side) host() string {
	host, _, err := net.SplitHostPort(s.Address)
	if err != nil {
		return s.Address
	}
	return host
}

// defaultBootstrapPort is the default of SGLang and Mooncake.
const defaultBootstrapPort = 8998

func (s *Side) bootstrapPort() int { return cmp.Or(s.Settings.BootstrapPort, defaultBootstrapPort) }

// Unique identifies one attempt. Each attempt has its own, because a bootstrap room or a
// transfer id is valid for one pair of legs.
type Unique struct {
	// Text is 32 hexadecimal digits.
	Text string
	// Number is random.
	Number uint64
}

// NewUnique returns a random Unique.
func NewUnique() Unique {
	var raw [24]byte
	_, _ = rand.Read(raw[:]) // never fails
	return Unique{Text: hex.EncodeToString(raw[:16]), Number: binary.BigEndian.Uint64(raw[16:])}
}

// Exchange is one request between two sides. The caller sets the fields and must not change them while a leg is built.
type Exchange struct {
	Request *body.Request
	// Path is the path of the client's request with its query, ID the request id.
	Path, ID string
	// IDs are the token ids of the whole prompt, nil if they are not known.
	IDs []uint32
	// Conversation is the conversation's id, "" if there is none.
	Conversation    string
	Prefill, Decode Side
	Unique          Unique

	transfer uint64 // of the attempt; 0 before number is called
	charge   charge
}

// Begin starts an attempt with a prefill side and discards the state of an earlier one.
func (x *Exchange) Begin(prefill Side, u Unique) {
	x.End()
	x.Prefill, x.Unique, x.transfer = prefill, u, 0
}

// End releases the prefill engine's answer from the runner's Room. Call it when neither the answer nor the failure is
// needed any more.
func (x *Exchange) End() { x.charge.free() }

// number returns the attempt's number, the same on both legs.
func (x *Exchange) number(p *Protocol) uint64 {
	if x.transfer == 0 {
		x.transfer = p.transferID()
	}
	return x.transfer
}

// Leg is the request to an engine, as changes to the client's.
type Leg struct {
	// Path replaces the request's if it is not "".
	Path string
	// Headers replace the client's headers of these names.
	Headers []Header
	// Edits are applied to the body, in order.
	Edits []body.Edit
	// grows estimates how many bytes large edits add to the body.
	grows int
}

// Body returns the request's body with the leg's edits applied, nil without edits. It
// shares no memory with the request. It fails when ctx ends.
func (l *Leg) Body(ctx context.Context, r *body.Request) ([]byte, error) {
	if len(l.Edits) == 0 {
		return nil, nil
	}
	out, err := body.ApplyContext(ctx, make([]byte, 0, len(r.Body)+l.room()), r.Body, l.Edits...)
	if err != nil {
		return nil, fmt.Errorf("edit the body: %w", err)
	}
	return out, nil
}

// room estimates how many bytes the edits add to the body.
func (l *Leg) room() int { return 256 + 64*len(l.Edits) + l.grows }

var (
	// ErrNoParameters means that a prefill answer lacks what the decode leg needs.
	ErrNoParameters = errors.New("the prefill answer has no transfer parameters")
	// errUnusable means that a worker lacks a setting.
	errUnusable = errors.New("worker cannot take part")
)

// unusable returns an error about a side's configuration.
func unusable(s *Side, what string) error {
	return fmt.Errorf("%w: %s names no %s", errUnusable, s.Worker, what)
}

// set and remove build edits; set's value is raw JSON.
func set(raw string, path ...string) body.Edit { return body.Set([]byte(raw), path...) }

func setText(text string, path ...string) body.Edit {
	return body.Set(body.AppendQuoted(nil, text), path...)
}

func setNumber[T int | int64 | uint64](n T, path ...string) body.Edit {
	return body.Set(fmt.Append(nil, n), path...)
}

func remove(path ...string) body.Edit { return body.Delete(path...) }

package disagg

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

// requestIDHeader is the same on both legs.
const requestIDHeader = "x-request-id"

// NoRank says that a Side has no rank, or that its engine chooses.
const NoRank = -1

// Header is one header; Name is lower case.
type Header struct{ Name, Value string }

// Side is one of the two targets of a request.
type Side struct {
	// Worker is the worker's name; Generation differs between two workers that had it
	// one after the other.
	Worker     string
	Generation uint64
	// Address is "ip:port" of its HTTP API.
	Address string
	// Rank is the rank as the engine counts its own from 0, NoRank if unset. Ranks is
	// how many there are, 0 if the worker has none.
	Rank, Ranks int
	// ByHeader says that the rank travels in the header steering.Rank.
	ByHeader bool
	// Settings are the worker's.
	Settings config.WorkerDisagg
}

// String names the side as targets are named.
func (s *Side) String() string {
	if s.Rank == NoRank {
		return s.Worker
	}
	return s.Worker + "/" + strconv.Itoa(s.Rank)
}

func (s *Side) host() string {
	host, _, err := net.SplitHostPort(s.Address)
	if err != nil {
		return s.Address
	}
	return host
}

// defaultBootstrapPort is SGLang's and Mooncake's.
const defaultBootstrapPort = 8998

func (s *Side) bootstrapPort() int {
	if s.Settings.BootstrapPort != 0 {
		return s.Settings.BootstrapPort
	}
	return defaultBootstrapPort
}

// Unique is what makes an exchange differ from every other. Each attempt has its
// own: a room or a transfer id is for one pair of legs.
type Unique struct {
	// Text is 32 hexadecimal digits.
	Text string
	// Number is random.
	Number uint64
}

// NewUnique draws one.
func NewUnique() Unique {
	var raw [24]byte
	_, _ = rand.Read(raw[:]) // never fails
	return Unique{Text: hex.EncodeToString(raw[:16]), Number: binary.BigEndian.Uint64(raw[16:])}
}

// Exchange is one request between two sides. The fields are set by the caller, and
// not changed while a leg is made.
type Exchange struct {
	Request *body.Request
	// Path is the request's, with its query; ID its request id.
	Path, ID string
	// IDs are the token ids of the whole prompt, nil if they are not known.
	IDs []uint32
	// Conversation is the conversation's id, "" if there is none.
	Conversation    string
	Prefill, Decode Side
	Unique          Unique

	flake uint64
}

// Begin starts an attempt with a prefill side: nothing of an earlier one is used
// again.
func (x *Exchange) Begin(prefill Side, u Unique) { x.Prefill, x.Unique, x.flake = prefill, u, 0 }

// number is the attempt's number on both legs.
func (x *Exchange) number(p *Protocol) uint64 {
	if x.flake == 0 {
		x.flake = p.snowflake()
	}
	return x.flake
}

// Leg is what an engine gets: the client's request with changes.
type Leg struct {
	// Path replaces the request's if it is not "".
	Path string
	// Headers are set, in place of the client's.
	Headers []Header
	// Edits are made in the body, in order.
	Edits []body.Edit
	// grows is about how much longer long edits make the body, in bytes.
	grows int
}

// Body is the request's body with the leg's edits; nil if there are none. It shares
// no memory with the request. It gives up when ctx ends.
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

// room is about how much longer edits make a body.
func (l *Leg) room() int { return 256 + 64*len(l.Edits) + l.grows }

var (
	// ErrNoParameters says that a prefill answer lacks what the decode leg needs.
	ErrNoParameters = errors.New("the prefill answer has no transfer parameters")
	// errUnusable says that a worker lacks a setting.
	errUnusable = errors.New("worker cannot take part")
)

// unusable is an error about a side's configuration.
func unusable(s *Side, what string) error {
	return fmt.Errorf("%w: %s names no %s", errUnusable, s.Worker, what)
}

// set and remove are edits with the value written as JSON.
func set(raw string, path ...string) body.Edit { return body.Set([]byte(raw), path...) }

func setText(text string, path ...string) body.Edit {
	return body.Set(quoted(text), path...)
}

func setNumber[T int | int64 | uint64](n T, path ...string) body.Edit {
	return body.Set(fmt.Append(nil, n), path...)
}

func remove(path ...string) body.Edit { return body.Delete(path...) }

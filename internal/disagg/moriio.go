package disagg

import (
	"cmp"
	"context"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// This file contains AMD's MoRIIO. Source of the fields: vLLM's moriio_connector and moriio_common, as of 0.32.

// moriio is the READ mode: NIXL's pull, with a transfer id on both legs.
func moriio() *Protocol {
	return &Protocol{apis: vllmAPIs, single: true, arranged: decodeAlready, edited: vllmEdited,
		prefill: func(ctx context.Context, p *Protocol, x *Exchange) (Leg, error) {
			leg, err := nixlPrefill(ctx, p, x)
			leg.Edits = append(leg.Edits, transferID(x))
			return leg, err
		},
		decode: func(p *Protocol, x *Exchange, a *Answer) (Leg, error) {
			leg, err := nixlDecode(p, x, a)
			if err != nil {
				return Leg{}, err
			}
			leg.Edits = append(leg.Edits, transferID(x))
			s := &x.Prefill.Settings
			for _, f := range []struct {
				name string
				port int
			}{{"remote_handshake_port", s.HandshakePort}, {"remote_notify_port", s.NotifyPort}} {
				if f.port != 0 {
					leg.Edits = append(leg.Edits, setNumber(f.port, kvParams, f.name))
				}
			}
			// Newer engines report the rank that they used.
			if body.Member(a.member(kvParams), "remote_dp_rank") == nil {
				leg.Edits = append(leg.Edits, remoteRank(&x.Prefill)...)
			}
			return leg, nil
		}}
}

// moriioWrite is the WRITE mode: decode sends its block ids to prefill, and prefill writes into
// the blocks. The legs run concurrently, and each carries the address of the other side.
func moriioWrite() *Protocol {
	return &Protocol{AtOnce: true, Named: true, apis: vllmAPIs, single: true, arranged: decodeAlready, edited: vllmEdited,
		prefill: func(_ context.Context, _ *Protocol, x *Exchange) (Leg, error) {
			return Leg{Edits: append(vllmPrefill(x.Request.API), ask(x.Request, askRemoteDecode, toPeer(x, &x.Decode)...)...)}, nil
		},
		decode: func(_ *Protocol, x *Exchange, _ *Answer) (Leg, error) {
			// Without a leader only the ranks of decode's first pod would send their blocks.
			edits := append(toPeer(x, &x.Prefill), set("true", kvParams, "is_request_leader"))
			return Leg{Edits: ask(x.Request, askRemotePrefill, edits...)}, nil
		}}
}

// MoRIIO's default ports.
const (
	defaultHandshakePort = 6301
	defaultNotifyPort    = 61005
)

// toPeer returns the edits that tell one leg of the WRITE mode the address of the other side.
// Engine id and block ids must be present; the engines find out the values themselves.
func toPeer(x *Exchange, s *Side) []body.Edit {
	host := cmp.Or(s.Settings.SideHost, s.host())
	handshake, notify := cmp.Or(s.Settings.HandshakePort, defaultHandshakePort), cmp.Or(s.Settings.NotifyPort, defaultNotifyPort)
	edits := []body.Edit{transferID(x), set("null", kvParams, "remote_engine_id"), set("[]", kvParams, "remote_block_ids"),
		setText(host, kvParams, "remote_host"), setNumber(handshake, kvParams, "remote_handshake_port"), setNumber(notify, kvParams, "remote_notify_port")}
	return append(edits, remoteRank(s)...)
}

func transferID(x *Exchange) body.Edit { return setText("tx"+x.Unique.Text, kvParams, "transfer_id") }

// remoteRank returns the rank of the other side, if it has several.
func remoteRank(s *Side) []body.Edit {
	if s.Ranks <= 1 || s.Rank == NoRank {
		return nil
	}
	return []body.Edit{setNumber(s.Rank, kvParams, "remote_dp_rank"), setNumber(s.Ranks, kvParams, "remote_dp_size")}
}

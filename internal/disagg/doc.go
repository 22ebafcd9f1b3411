// Package disagg implements the prefill/decode protocols of engines: what the prefill leg requests, what its answer
// means, and what the decode leg must then carry. There is one Protocol per connector, built from tables of fields; a
// Sender sends prefill legs over HTTP. Whether a request is split, and which engine prefills, is decided elsewhere.
//
//	p, err := disagg.New("nixl", disagg.Options{})
//	x := &disagg.Exchange{Request: req, Path: path, ID: id, Prefill: a, Decode: b}
//	leg, err := p.Prefill(ctx, x)          // what the prefill engine gets
//	answer, err := sender.Send(ctx, ...)   // with p.AtOnce: in the background
//	leg, err = p.Decode(x, answer)         // what the decode engine gets
//
// Bodies are edited byte-locally: everything that a protocol does not define reaches both
// engines as the client wrote it.
package disagg

// Package disagg knows how two engines share a request: what the prefill leg
// asks, what it answers, and what the decode leg must say then. There is one
// Protocol a connector, made of tables of fields; a Sender carries prefill legs
// over HTTP. Who prefills, and whether anybody does, is decided elsewhere.
//
//	p, err := disagg.New("nixl", disagg.Options{})
//	x := &disagg.Exchange{Request: req, Path: path, ID: id, Prefill: a, Decode: b}
//	leg, err := p.Prefill(ctx, x)          // what the prefill engine gets
//	answer, err := sender.Send(ctx, ...)   // with p.AtOnce: in the background
//	leg, err = p.Decode(x, answer)         // what the decode engine gets
//
// Bodies are edited byte-locally: everything that a protocol does not speak of
// reaches both engines as the client wrote it.
package disagg

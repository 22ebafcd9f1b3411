package disagg

import (
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// addressMarks precede the addresses in a request id of vLLM's P2pNccl and MoRIIO
// connectors: "___prefill_addr_H:P___decode_addr_H:P_<uuid>". The engines search the
// whole id for them.
var addressMarks = [...]string{"prefill_addr_", "decode_addr_"}

// namesAddress reports whether an engine may read an address from a request id.
func namesAddress(id string) bool {
	id = strings.ToLower(id)
	for _, mark := range addressMarks {
		if strings.Contains(id, mark) {
			return true
		}
	}
	return false
}

// RequestIDs returns the rule for the ids of clients' requests: the id that a request
// goes on with, given the client's. An id with an address in it is replaced whatever
// the connector, because engines may run another one than Kvlane knows of; where the
// connector reads addresses from ids every id is. It returns nil if clients are trusted.
func RequestIDs(connector string, trust bool) func(client string) string {
	if trust {
		return nil
	}
	every := false
	if protocol, ok := protocols[connector]; ok {
		every = protocol().addressesInID
	}
	return func(client string) string {
		if every || namesAddress(client) {
			return NewUnique().Text
		}
		return client
	}
}

// CleanID are the edits of a request's body without a connector.
func CleanID(r *body.Request) []body.Edit { return cleanID(r, false) }

// cleanID takes the request id out of the body: vLLM takes it where there is no header,
// and on /v1/responses in any case. Without one it makes its own.
func cleanID(r *body.Request, every bool) []body.Edit {
	if r.Span(body.FieldRequestID).Present() && (every || namesAddress(r.Text(body.FieldRequestID))) {
		return []body.Edit{remove(body.FieldRequestID.String())}
	}
	return nil
}

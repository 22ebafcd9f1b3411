package disagg

import "strings"

// namesAddress reports whether an engine could read an address from a request id: vLLM's P2pNccl
// and MoRIIO connectors search "___prefill_addr_H:P___decode_addr_H:P_<uuid>" anywhere in it.
func namesAddress(id string) bool {
	id = strings.ToLower(id)
	return strings.Contains(id, "prefill_addr_") || strings.Contains(id, "decode_addr_")
}

// RequestIDs returns a function from a client's request id to the id that the request continues
// with. An id that contains an address is replaced whatever the connector, because engines may
// run a connector that Kvlane was not configured for; if the connector reads addresses from ids,
// every id is replaced. RequestIDs returns nil if clients are trusted.
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

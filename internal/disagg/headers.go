package disagg

import (
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/steering"
)

// dropped lists the client's headers that must not be on a prefill leg, in addition to steering headers: framing,
// hop-by-hop headers, and those that would change the answer's encoding.
var dropped = map[string]bool{
	"host": true, "content-length": true, "transfer-encoding": true, "connection": true, "keep-alive": true, "te": true, "trailer": true,
	"upgrade": true, "expect": true, "proxy-connection": true, "proxy-authorization": true, "accept-encoding": true, requestIDHeader: true,
}

// LegHeader returns the header of the prefill leg: the client's headers, yielded by each, with
// the rank of the prefill side, the request id, and the leg's own headers.
func (x *Exchange) LegHeader(leg *Leg, each func(yield func(name, value string))) http.Header {
	h := make(http.Header, 16)
	each(func(name, value string) {
		if !dropped[name] && name != "" && name[0] != ':' && !strings.HasPrefix(name, "x-envoy-") && !steering.Steers(name) {
			key := textproto.CanonicalMIMEHeaderKey(strings.Clone(name))
			h[key] = append(h[key], strings.Clone(value))
		}
	})
	h.Set("Content-Type", "application/json")
	h["User-Agent"] = append([]string{}, h["User-Agent"]...) // an empty list suppresses Go's default
	if x.ID != "" {
		h.Set(requestIDHeader, x.ID)
	}
	if x.Prefill.ByHeader && x.Prefill.Rank != NoRank {
		h.Set(steering.Rank, strconv.Itoa(x.Prefill.Rank))
	}
	for _, s := range leg.Headers {
		h.Set(s.Name, s.Value)
	}
	return h
}

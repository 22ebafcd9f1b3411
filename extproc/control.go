package extproc

import (
	"slices"
	"strconv"
	"strings"
)

// controls is the list of headers that a client must not set.
type controls struct {
	exact    []string
	prefixes []string
}

func newControls(list []string) controls {
	var c controls
	for _, s := range list {
		s = strings.ToLower(s)
		if p, ok := strings.CutSuffix(s, "*"); ok {
			c.prefixes = append(c.prefixes, p)
		} else {
			c.exact = append(c.exact, s)
		}
	}
	return c
}

func (c *controls) match(name string) bool {
	if slices.Contains(c.exact, name) {
		return true
	}
	for _, p := range c.prefixes {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}

// Envoy answers 500 when a mutation brings a request over these (defaults of the
// HTTP connection manager). They do not apply to a request that is over already:
// the limits are raised then.
const (
	maxHeaders     = 100
	maxHeaderTotal = 60 << 10
)

// headerView is what we know of a request's headers while building a mutation.
type headerView struct {
	seen    bool // headers were sent to us
	headers []Header
	// stripped names were taken off in an earlier answer.
	stripped []string
	// requestID replaces the client's request id, "" if that stays.
	requestID string
	total     int // number, pseudo headers included
	bytes     int
}

func (v *headerView) get(name string) (value string, n int) {
	if slices.Contains(v.stripped, name) {
		return "", 0
	}
	for i := range v.headers {
		if v.headers[i].Name == name {
			if n == 0 {
				value = v.headers[i].Value
			}
			n++
		}
	}
	return value, n
}

// strip takes the client's control headers off.
func (c *controls) strip(v *headerView) (m mutation) {
	for i := range v.headers {
		if c.match(v.headers[i].Name) {
			m.drop(v.headers[i].Name)
		}
	}
	v.stripped = m.remove
	if v.requestID != "" {
		m.put(requestIDKey, v.requestID)
	}
	return m
}

// requestMutation turns a decision into header changes. Only changed headers are
// in it. It returns how many of the decision's headers had to be left out.
func (c *controls) requestMutation(v *headerView, d *Decision, pick string) (m mutation, refused int) {
	count, size := v.total, v.bytes
	bounded := count <= maxHeaders && size <= maxHeaderTotal
	set := func(name, value string) bool {
		old, n := v.get(name)
		if n == 1 && old == value {
			return true
		}
		if bounded && n == 0 && !m.sets(name) {
			grown := size + len(name) + len(value)
			if count+1 > maxHeaders || grown > maxHeaderTotal {
				return false
			}
			count, size = count+1, grown
		}
		m.put(name, value)
		return true
	}
	if pick != "" {
		set(pickKey, pick) // the metadata has it too
	}
	if v.requestID != "" && d.requestID("") == "" {
		set(requestIDKey, v.requestID)
	}
	for _, h := range d.Set {
		name, ok := headerName(h.Name)
		if !ok || guarded(name) || !set(name, headerText(h.Value)) {
			refused++
		}
	}
	decided := func(name string) bool {
		if name == pickKey {
			return pick != ""
		}
		for i := range d.Set {
			if strings.EqualFold(d.Set[i].Name, name) {
				return true
			}
		}
		return false
	}
	for i := range v.headers {
		if name := v.headers[i].Name; c.match(name) && !decided(name) && !slices.Contains(v.stripped, name) {
			m.drop(name)
		}
	}
	if !v.seen {
		for _, name := range c.exact {
			if !m.sets(name) {
				m.drop(name)
			}
		}
	}
	for _, r := range d.Remove {
		name, ok := headerName(r)
		if !ok || guarded(name) || name[0] == ':' {
			refused++
			continue
		}
		if _, n := v.get(name); (n > 0 || !v.seen) && !m.sets(name) {
			m.drop(name)
		}
	}
	return m, refused
}

// responseMutation turns a ticket's headers into a mutation.
func responseMutation(hs []Header) (m mutation, refused int) {
	for _, h := range hs {
		name, ok := headerName(h.Name)
		if !ok || guarded(name) || name[0] == ':' {
			refused++
			continue
		}
		m.put(name, h.Value)
	}
	return m, refused
}

// tooLarge is the default answer to a body over the limit.
func tooLarge(limit int) *Reject {
	return &Reject{
		Status: 413,
		Body: []byte(`{"error":{"message":"request body is larger than ` + strconv.Itoa(limit) +
			` bytes","type":"invalid_request_error","param":null,"code":"request_too_large"}}`),
		Details: "kvlane_body_too_large",
	}
}

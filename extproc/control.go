package extproc

import (
	"slices"
	"strings"
)

// controls is the list of request headers that a client must not set.
type controls struct {
	exact, prefixes []string
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
	return slices.Contains(c.exact, name) || slices.ContainsFunc(c.prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// Envoy answers 500 if a mutated request exceeds these limits (defaults of its HTTP connection manager). Envoy measures
// a client's request before adding its own headers, so a request may exceed them by a few headers before any mutation.
// A larger excess shows that Envoy's limits are configured higher. Ours are mostHeaders, as some passes take quadratic
// time, and maxAbout bytes with metadata and attributes, which are kept until the decision.
const (
	mostHeaders      = 1000
	maxAbout         = 512 << 10
	maxHeaders       = 100
	maxHeaderTotal   = 60 << 10
	addedHeaders     = 20
	addedHeaderTotal = 4 << 10
)

// headerView is what is known of a request's headers when a mutation is built.
type headerView struct {
	seen    bool // headers were sent to us
	headers []Header
	// stripped lists the names removed by an earlier answer.
	stripped []string
	// requestID replaces the client's request id; "" keeps it.
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

// fits reports whether Envoy would accept the mutation.
func (v *headerView) fits(m *mutation) bool {
	if m.empty() || v.total > maxHeaders+addedHeaders || v.bytes > maxHeaderTotal+addedHeaderTotal {
		return true
	}
	count, size := v.total, v.bytes
	for i := range m.set {
		count, size = count+1, size+len(m.set[i].Name)+len(m.set[i].Value)
	}
	if count <= maxHeaders && size <= maxHeaderTotal {
		return true
	}
	for i := range v.headers {
		if h := &v.headers[i]; m.sets(h.Name) || slices.Contains(m.remove, h.Name) || slices.Contains(v.stripped, h.Name) {
			count, size = count-1, size-len(h.Name)-len(h.Value)
		}
	}
	if m.sets(":path") {
		count--
	}
	return count <= maxHeaders && size <= maxHeaderTotal
}

// makeRoom drops the pick's header if it does not fit; the metadata carries the pick too. It
// reports whether Envoy would accept the mutation then.
func (v *headerView) makeRoom(m *mutation) bool {
	if v.fits(m) {
		return true
	}
	if _, n := v.get(pickKey); n == 0 {
		m.set = slices.DeleteFunc(m.set, func(h Header) bool { return h.Name == pickKey })
	}
	return v.fits(m)
}

// strip removes the client's control headers.
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

// requestMutation turns a decision into header changes, and contains only headers that change.
// It returns the number of the decision's headers that are not allowed and were left out.
func (c *controls) requestMutation(v *headerView, d *Decision, pick string) (m mutation, refused int) {
	set := func(name, value string) {
		if old, n := v.get(name); n != 1 || old != value {
			m.put(name, value)
		}
	}
	if pick != "" {
		set(pickKey, pick) // the metadata has it too
	}
	if v.requestID != "" && d.requestID("") == "" {
		set(requestIDKey, v.requestID)
	}
	for _, h := range d.Set {
		name, ok := headerName(h.Name)
		if !ok || guarded(name) {
			refused++
			continue
		}
		set(name, headerText(h.Value))
	}
	decided := func(name string) bool {
		if name == pickKey {
			return pick != ""
		}
		return slices.ContainsFunc(d.Set, func(h Header) bool { return strings.EqualFold(h.Name, name) })
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

// problem is a response in OpenAI's format of errors; none of the texts needs escaping.
func (x *exchange) problem(status int, what, kind, code, message string) *Reject {
	return &Reject{Status: status, Details: x.srv.opts.Name + "_" + what,
		Body: []byte(`{"error":{"message":"` + message + `","type":"` + kind + `","param":null,"code":"` + code + `"}}`)}
}

// tooManyHeaders rejects a request to which the headers of its decision cannot be added within Envoy's limits.
func (x *exchange) tooManyHeaders() *Reject {
	return x.problem(431, "too_many_headers", "invalid_request_error", "request_headers_too_large", "the request has too many or too large headers: "+
		"no room is left for those that route it (at most 100 headers and 60 KiB in all); send fewer")
}

// tooMany rejects a request for which there is room again when others have ended.
func (x *exchange) tooMany(status int, what, kind, message string) *Reject {
	r := x.problem(status, what, kind, what, message+"; try again in 1 s")
	r.Headers = []Header{{Name: "retry-after", Value: "1"}}
	return r
}

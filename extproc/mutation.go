package extproc

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// maxHeaderBytes limits a header's name and its value, each (rules of config.core.v3.HeaderValue).
const maxHeaderBytes = 16384

// mutation is a HeaderMutation under construction. Its names are valid and in lower case; its
// values contain no byte that makes Envoy answer 500.
type mutation struct {
	set    []Header
	remove []string
}

func (m *mutation) empty() bool { return len(m.set) == 0 && len(m.remove) == 0 }

// size estimates the encoded size.
func (m *mutation) size() int {
	n := 0
	for i := range m.set {
		n += len(m.set[i].Name) + len(m.set[i].Value) + 16
	}
	for _, r := range m.remove {
		n += len(r) + 4
	}
	return n
}

// put sets a header; the last value for a name wins.
func (m *mutation) put(name, value string) {
	value = headerText(value)
	if i := m.find(name); i >= 0 {
		m.set[i].Value = value
		return
	}
	m.set = append(m.set, Header{name, value})
}

// drop removes a header.
func (m *mutation) drop(name string) {
	if !slices.Contains(m.remove, name) {
		m.remove = append(m.remove, name)
	}
}

func (m *mutation) sets(name string) bool { return m.find(name) >= 0 }

// find returns the index of the header in set, -1 if it is not there.
func (m *mutation) find(name string) int {
	return slices.IndexFunc(m.set, func(h Header) bool { return h.Name == name })
}

func (m *mutation) encode(e *encoder) {
	for _, name := range slices.Backward(m.remove) {
		e.text(2, name)
	}
	for _, h := range slices.Backward(m.set) {
		start := e.size
		e.number(3, 2) // OVERWRITE_IF_EXISTS_OR_ADD: ext_proc's default, but not the field's
		value := e.size
		if h.Value != "" {
			e.text(3, h.Value) // raw_value; Envoy does not read value
		}
		e.text(1, h.Name)
		e.wrap(1, value)
		e.wrap(1, start)
	}
}

// tokenByte marks the bytes allowed in a header name (RFC 9110 token).
var tokenByte = func() (t [256]bool) {
	for _, c := range "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" {
		t[c] = true
	}
	return t
}()

// headerName returns the name in lower case and whether it is a valid name.
func headerName(name string) (string, bool) {
	token := strings.TrimPrefix(name, ":")
	if token == "" || len(name) > maxHeaderBytes {
		return "", false
	}
	for i := range len(token) {
		if !tokenByte[token[i]] {
			return "", false
		}
	}
	return strings.ToLower(name), true
}

// guarded reports whether a handler must not change the header: Envoy ignores or rejects the change, or the header
// concerns framing.
func guarded(name string) bool {
	switch name {
	case "host", "content-length", "connection", "transfer-encoding", "upgrade", "keep-alive", "proxy-connection":
		return true
	case ":path":
		return false
	}
	return name[0] == ':' || strings.HasPrefix(name, "x-envoy-")
}

// headerText replaces bytes that a header value cannot hold with spaces, trims the value, and truncates it if it is too
// long.
func headerText(s string) string {
	s = strings.Trim(s, " \t\r\n")
	if len(s) > maxHeaderBytes {
		s = s[:maxHeaderBytes]
	}
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			b := []byte(s)
			for j := i; j < len(b); j++ {
				if c := b[j]; c < ' ' && c != '\t' || c == 0x7f {
					b[j] = ' '
				}
			}
			return strings.Trim(string(b), " \t")
		}
	}
	return s
}

// detailsWord turns a text into one printable word.
func detailsWord(s string) string {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "_")
	}
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r >= 0x7f {
			return '_'
		}
		return r
	}, s)
}

// endpoint reports whether a pick consists of addresses and commas only.
func endpoint(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
		case c == '.', c == ':', c == ',', c == '[', c == ']', c == '-', c == '_', c == '%':
		default:
			return false
		}
	}
	return s != ""
}

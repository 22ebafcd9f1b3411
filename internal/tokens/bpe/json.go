package bpe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxJSONDepth bounds the nesting of skipped JSON.
const maxJSONDepth = 200

// errJSON is wrapped by every error of scanner.
var errJSON = errors.New("malformed JSON")

// scanner reads JSON in place. It is used only for tokenizer.json, whose maps of 200,000 entries
// make encoding/json too slow.
type scanner struct {
	b  []byte
	at int
}

func (s *scanner) fail(what string) error {
	if s.at >= len(s.b) {
		what = "unexpected end" // of a truncated file
	}
	return fmt.Errorf("%w: %s at byte %d", errJSON, what, s.at)
}

// peek skips white space and returns the next byte, 0 at the end.
func (s *scanner) peek() byte {
	for s.at < len(s.b) {
		switch c := s.b[s.at]; c {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return c
		}
	}
	return 0
}

func (s *scanner) expect(c byte) error {
	if s.peek() != c {
		return s.fail(fmt.Sprintf("want %q", c))
	}
	s.at++
	return nil
}

// next steps over the comma between members; false at the closing byte.
func (s *scanner) next(first bool, closing byte) (bool, error) {
	if s.peek() == closing {
		s.at++
		return false, nil
	}
	if first {
		return true, nil
	}
	return true, s.expect(',')
}

// object calls f for each member with its key; f has to consume the value.
func (s *scanner) object(f func(key []byte) error) error {
	if err := s.expect('{'); err != nil {
		return err
	}
	for first := true; ; first = false {
		more, err := s.next(first, '}')
		if err != nil || !more {
			return err
		}
		key, err := s.str()
		if err != nil {
			return err
		}
		if err := s.expect(':'); err != nil {
			return err
		}
		if err := f(key); err != nil {
			return err
		}
	}
}

// array calls f for each element; f has to consume it.
func (s *scanner) array(f func() error) error {
	if err := s.expect('['); err != nil {
		return err
	}
	for first := true; ; first = false {
		more, err := s.next(first, ']')
		if err != nil || !more {
			return err
		}
		if err := f(); err != nil {
			return err
		}
	}
}

// str reads a string.
func (s *scanner) str() ([]byte, error) {
	if err := s.expect('"'); err != nil {
		return nil, err
	}
	from := s.at
	for s.at < len(s.b) {
		switch c := s.b[s.at]; {
		case c == '"':
			s.at++
			if b := s.b[from : s.at-1]; utf8.Valid(b) {
				return b, nil
			}
			return nil, s.fail("invalid UTF-8")
		case c == '\\':
			return s.escaped(from)
		case c < 0x20:
			return nil, s.fail("control character in string")
		}
		s.at++
	}
	return nil, s.fail("unterminated string")
}

// escaped reads the string at from, which has escapes.
func (s *scanner) escaped(from int) ([]byte, error) {
	s.at = from - 1
	if err := s.skipString(); err != nil {
		return nil, err
	}
	raw := s.b[from-1 : s.at]
	var v string
	if err := json.Unmarshal(raw, &v); err != nil {
		return nil, s.fail(err.Error())
	}
	// encoding/json substitutes U+FFFD where the library rejects the text
	if strings.ContainsRune(v, utf8.RuneError) && !bytes.ContainsRune(raw, utf8.RuneError) && !bytes.Contains(bytes.ToLower(raw), []byte(`\ufffd`)) {
		return nil, s.fail("lone surrogate or invalid UTF-8")
	}
	return []byte(v), nil
}

// uint reads a non-negative integer below limit.
func (s *scanner) uint(limit uint32) (uint32, error) {
	if c := s.peek(); c < '0' || c > '9' {
		return 0, s.fail("want a number")
	}
	var v uint64
	for s.at < len(s.b) && s.b[s.at] >= '0' && s.b[s.at] <= '9' {
		if v = v*10 + uint64(s.b[s.at]-'0'); v >= uint64(limit) {
			return 0, s.fail(fmt.Sprintf("number not below %d", limit))
		}
		s.at++
	}
	return uint32(v), nil
}

// raw skips a value and returns its bytes. Only the nesting is checked.
func (s *scanner) raw() ([]byte, error) {
	s.peek()
	from := s.at
	for depth := 0; ; {
		switch c := s.peek(); {
		case c == '"':
			if err := s.skipString(); err != nil {
				return nil, err
			}
		case c == '{' || c == '[':
			s.at++
			if depth++; depth > maxJSONDepth {
				return nil, s.fail("nested too deeply")
			}
			continue
		case depth > 0 && (c == '}' || c == ']'):
			s.at++
			depth--
		case depth > 0 && (c == ',' || c == ':'):
			s.at++
			continue
		case isScalarByte(c):
			for s.at < len(s.b) && isScalarByte(s.b[s.at]) {
				s.at++
			}
		default:
			return nil, s.fail("want a value")
		}
		if depth == 0 {
			return s.b[from:s.at], nil
		}
	}
}

// skipString skips a string without decoding it.
func (s *scanner) skipString() error {
	for i := s.at + 1; i < len(s.b); i++ {
		switch s.b[i] {
		case '"':
			s.at = i + 1
			return nil
		case '\\':
			i++
		}
	}
	return s.fail("unterminated string")
}

func isScalarByte(c byte) bool {
	return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z' || c == '-' || c == '+' || c == '.'
}

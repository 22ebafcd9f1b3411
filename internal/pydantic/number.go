package pydantic

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/prompt"
)

// precision in bits holds every bound exactly.
const precision = 128

// maxDigits is how many digits pydantic reads of an integer.
const maxDigits = 4300

func (s *Schema) judgeNumber(raw []byte) (verdict, error) {
	fit := verdict{exact: lax}
	if c := raw[0]; c == '-' || c-'0' < 10 || c == 'N' || c == 'I' {
		isInt := !bytes.ContainsAny(raw, ".eENI")
		switch {
		case isInt == (s.kind == integer):
			fit.exact = exact
		case isInt:
			fit.exact = strict
		}
	}
	return fit, s.checkNumber(raw)
}

func (s *Schema) checkNumber(raw []byte) error {
	var v *big.Float
	finite := true
	if s.kind == integer {
		n, err := Int(raw)
		if err != nil {
			return err
		}
		v = new(big.Float).SetPrec(max(precision, uint(n.BitLen()))).SetInt(n)
	} else {
		x, ok := Float(raw)
		if !ok {
			return wrong("Input should be a valid number")
		}
		if finite = !math.IsNaN(x); finite {
			v = new(big.Float).SetPrec(precision).SetFloat64(x)
		}
	}
	for _, b := range [...]struct {
		*bound
		sign int
	}{{s.least, 1}, {s.most, -1}} {
		if b.bound == nil {
			continue
		}
		if !finite {
			return wrong("Input should be a finite number")
		}
		if c := v.Cmp(b.value) * b.sign; c < 0 || c == 0 && b.open {
			return wrong(fmt.Sprintf("Input should be within %s", b.value.Text('g', 20)))
		}
	}
	return nil
}

// Bool reads a JSON value as pydantic reads a boolean in its lax mode.
func Bool(raw []byte) (value, ok bool) {
	switch {
	case len(raw) == 0:
		return false, false
	case raw[0] == 't':
		return true, true
	case raw[0] == 'f':
		return false, true
	case raw[0] == '"':
		word, ok := prompt.TextOf(raw)
		if !ok {
			return false, false
		}
		switch strings.ToLower(word) {
		case "1", "on", "t", "true", "y", "yes":
			return true, true
		case "0", "off", "f", "false", "n", "no":
			return false, true
		}
		return false, false
	}
	x, err := strconv.ParseFloat(string(raw), 64)
	return x == 1, err == nil && (x == 0 || x == 1)
}

// Int reads a JSON value as pydantic reads an integer in its lax mode: also a boolean, a text, a number without a fraction.
func Int(raw []byte) (*big.Int, error) {
	switch {
	case len(raw) == 0:
	case raw[0] == 't':
		return big.NewInt(1), nil
	case raw[0] == 'f':
		return new(big.Int), nil
	case raw[0] == '"':
		if word, ok := prompt.TextOf(raw); ok {
			return intOfText(word)
		}
	case raw[0] == '-' || raw[0]-'0' < 10:
		if bytes.ContainsAny(raw, ".eE") {
			return intOfFloat(string(raw))
		}
		if len(raw) > maxDigits+1 { // Python's json reads no more; and the time to read them is quadratic
			break
		}
		if n, ok := new(big.Int).SetString(string(raw), 10); ok {
			return n, nil
		}
	}
	return nil, wrong("Input should be a valid integer")
}

func intOfFloat(raw string) (*big.Int, error) {
	x, err := strconv.ParseFloat(raw, 64)
	switch {
	case err != nil || math.IsInf(x, 0) || math.IsNaN(x):
		return nil, wrong("Input should be a finite number")
	case x != math.Trunc(x):
		return nil, wrong("Input should be a valid integer, got a number with a fractional part")
	case x <= math.MinInt64 || x >= math.MaxInt64:
		return nil, wrong("Unable to parse input string as an integer, exceeded maximum size")
	}
	return big.NewInt(int64(x)), nil
}

func intOfText(word string) (*big.Int, error) {
	word = strings.TrimSpace(word)
	if whole, zeros, ok := strings.Cut(word, "."); ok && strings.Trim(zeros, "0") == "" && zeros != "" {
		word = whole
	}
	digits, negative := strings.CutPrefix(word, "-")
	if !negative {
		digits, _ = strings.CutPrefix(word, "+")
	}
	plain, ok := withoutUnderscores(digits)
	if ok && len(plain) > 0 && len(plain) <= maxDigits && strings.Trim(plain, "0123456789") == "" {
		if n, ok := new(big.Int).SetString(plain, 10); ok {
			if negative {
				n.Neg(n)
			}
			return n, nil
		}
	}
	return nil, wrong("Input should be a valid integer, unable to parse string as an integer")
}

// withoutUnderscores drops single underscores between digits.
func withoutUnderscores(digits string) (string, bool) {
	if !strings.Contains(digits, "_") {
		return digits, true
	}
	if strings.HasPrefix(digits, "_") || strings.HasSuffix(digits, "_") || strings.Contains(digits, "__") {
		return digits, false
	}
	return strings.ReplaceAll(digits, "_", ""), true
}

// Float reads a JSON value as pydantic reads a float in its lax mode: also a boolean or a text.
func Float(raw []byte) (float64, bool) {
	switch {
	case len(raw) == 0:
		return 0, false
	case raw[0] == 't':
		return 1, true
	case raw[0] == 'f':
		return 0, true
	case raw[0] == '"':
		word, ok := prompt.TextOf(raw)
		if !ok {
			return 0, false
		}
		word, ok = withoutUnderscores(strings.TrimSpace(word))
		if !ok || strings.ContainsAny(word, "xXpP") {
			return 0, false
		}
		return parseFloat(word)
	case raw[0] == 'N':
		return math.NaN(), true
	case raw[0] == '[' || raw[0] == '{' || raw[0] == 'n':
		return 0, false
	}
	return parseFloat(string(raw))
}

// parseFloat is strconv's, with infinity for what is too large.
func parseFloat(word string) (float64, bool) {
	x, err := strconv.ParseFloat(word, 64)
	return x, err == nil || math.IsInf(x, 0)
}

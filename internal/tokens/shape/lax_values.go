package shape

import (
	"errors"
	"math"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// Engines read fields in pydantic's lax mode, which converts values: "yes" is true, "1" and 1.0 are integers.

// given reports whether a JSON value is present and not null.
func given(raw []byte) bool { return len(raw) > 0 && raw[0] != 'n' }

// laxBool reads a JSON value as a boolean.
func laxBool(raw []byte) (value, ok bool) {
	if !given(raw) {
		return false, false
	}
	switch raw[0] {
	case 't', 'f':
		return raw[0] == 't', true
	case '"':
		switch strings.ToLower(body.Text(raw)) {
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

// laxInt reads a JSON value as an integer. Integers that exceed 64 bits are clamped.
func laxInt(raw []byte) (n int64, ok bool) {
	if !given(raw) {
		return 0, false
	}
	word := string(raw)
	switch raw[0] {
	case 't':
		return 1, true
	case 'f':
		return 0, true
	case '"':
		word = strings.TrimSpace(body.Text(raw))
		if whole, zeros, ok := strings.Cut(word, "."); ok && zeros != "" && strings.Trim(zeros, "0") == "" {
			word = whole
		}
		if word, ok = withoutUnderscores(word); !ok {
			return 0, false
		}
	default:
		if strings.ContainsAny(word, ".eE") {
			x, err := strconv.ParseFloat(word, 64)
			const beyond = 1 << 63
			switch {
			case err != nil || x != math.Trunc(x):
				return 0, false
			case x >= beyond:
				return math.MaxInt64, true
			default:
				return int64(max(x, -beyond)), true
			}
		}
	}
	n, err := strconv.ParseInt(word, 10, 64)
	return n, err == nil || errors.Is(err, strconv.ErrRange) && strings.Trim(word[1:], "0123456789") == "" // it may not have read all
}

// withoutUnderscores drops single underscores between digits, which Python allows.
func withoutUnderscores(word string) (string, bool) {
	if strings.HasPrefix(word, "_") || strings.HasSuffix(word, "_") || strings.Contains(word, "__") {
		return word, false
	}
	return strings.ReplaceAll(word, "_", ""), true
}

// laxIDs reads a JSON list of token ids. The result is never nil.
func laxIDs(raw []byte) ([]uint32, error) {
	ids, err := body.AppendIDs([]uint32{}, raw)
	if err == nil {
		return ids, nil
	}
	ids, err = ids[:0], nil
	body.EachItem(raw, func(item []byte) {
		switch n, ok := laxInt(item); {
		case err != nil:
		case !ok:
			err = refuse("prompt: input should be a valid integer")
		case n < 0 || n > math.MaxUint32:
			err = refuse("Token id %d is out of vocabulary", n)
		default:
			ids = append(ids, uint32(n))
		}
	})
	return ids, err
}
